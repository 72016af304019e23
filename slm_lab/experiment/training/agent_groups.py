"""Check whether the policies of a spec fit an env whose agents have different spaces."""

from __future__ import annotations

import json

from slm_lab.env.outcome import space_text
from slm_lab.env.spaces import space_from_dict
from slm_lab.lib.records import EnvInfo
from slm_lab.spec.models.spec import Spec
from slm_lab.spec.report import Problem


def find_space_problems(spec: Spec, info: EnvInfo) -> list[Problem]:
    """Return the problems that a spec has because agents of the env have different spaces. The returned list is empty if all agents have
    equal spaces."""
    if not info.groups:
        return []
    first, second = info.groups[:2]
    difference = _difference(first, first.agents[0], second, second.agents[0])
    differ = f"the agents of {spec.env.name} have different spaces ({difference})"
    fitting = f'"policies": {json.dumps(fitting_policies(info))}'
    needs_equal_spaces = {
        "meta.self_play": spec.meta.self_play is not None,
        "meta.distributed": spec.meta.distributed is not False,
        "meta.sampler": spec.meta.sampler is not None,
        "meta.demonstrations": spec.meta.demonstrations is not None,
    }
    advice = f"remove it, and set {fitting}" if spec.agent.policies is None else "remove it"
    problems = [
        Problem(key, f"needs agents with equal spaces, but {differ}; {advice}") for key, is_set in needs_equal_spaces.items() if is_set
    ]
    if spec.agent.policies is None:
        return problems or [Problem("agent.policies", f"{differ}, so that each kind needs a policy; set {fitting}")]
    group_of = {agent: group for group in info.groups for agent in group.agents}
    for policy, names in spec.agent.policies.items():
        agents = [name for name in names if name in group_of]
        if odd := next((name for name in agents if group_of[name] is not group_of[agents[0]]), None):
            reason = f"its agents have different spaces ({_difference(group_of[agents[0]], agents[0], group_of[odd], odd)})"
            problems.append(Problem(f"agent.policies.{policy}[{names.index(odd)}]", f"{reason}; these fit: {fitting}"))
    return problems


def _difference(group: EnvInfo, agent: str, other_group: EnvInfo, other_agent: str) -> str:
    """Return a text that describes how the spaces of two agents differ.

    Args:
        group, other_group: infos of the groups to which the agents belong. The agents of a group have equal spaces.
        agent, other_agent: names of the agents.
    """
    texts = []
    for kind in ("observation", "action"):
        space, other = (space_from_dict(info.spaces[kind]) for info in (group, other_group) if info.spaces is not None)
        if space != other:
            describe = space_text if space_text(space) != space_text(other) else str
            texts.append(f"{kind}s: {describe(space)} for {agent}, {describe(other)} for {other_agent}")
    return "; ".join(texts)


def fitting_policies(info: EnvInfo) -> dict[str, list[str]]:
    """Return a value for agent.policies (name of a policy → names of its agents) that fits an env whose agents have different spaces.

    Each group of agents with equal spaces gets one policy, which is named after its agents.
    """
    stems = [{agent.rstrip("0123456789").rstrip("_-") for agent in group.agents} for group in info.groups]
    names = [stem.pop() if len(stem) == 1 else "" for stem in stems]
    if not all(names) or len(set(names)) < len(names):
        names = [group.agents[0] for group in info.groups]
    return {name: list(group.agents) for name, group in zip(names, info.groups, strict=True)}
