"""Model cards: Markdown files that describe a policy, how it was trained, and how to use it.

The YAML header of a model card has the format of the Hugging Face Hub (https://huggingface.co/docs/hub/model-cards) and includes results
("model-index").
"""

from __future__ import annotations

import json
import math
import re
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from slm_lab.experiment.deploy.facts import PolicyFacts
from slm_lab.experiment.deploy.load import LoadedAgent
from slm_lab.experiment.files.provenance import package_versions
from slm_lab.lib.files import replace_file
from slm_lab.lib.log import notice
from slm_lab.spec.models.spec import Spec

_SEAL = re.compile(r"\n<!-- crc32 ([0-9a-f]{8}): [^\n]*-->\n\Z")


class ExportedFile(NamedTuple):
    """Name, inputs and outputs of the exported policy file that a model card describes."""

    file: str
    inputs: Mapping[str, str]
    outputs: Mapping[str, str]


def model_card(name: str, facts: PolicyFacts, agent: LoadedAgent, exported: ExportedFile | None, *, is_named: bool) -> str:
    """Return the Markdown text of a model card.

    Args:
        name: title of the model card.
        facts: information about the policy.
        exported: the exported policy file, or None if the policy was not exported.
        is_named: whether `name` is the name of a registered model, so that `load_agent(name)` loads the policy.
    """
    parts = [_header(name, facts), f"# {name}", _introduction(facts), _return_text(facts)]
    parts += [_table("Training", _training_rows(facts)), _table("Interface", _interface_rows(facts, agent)), "## Use"]
    parts += [_named_model_usage(name, _is_recurrent(agent))] if is_named else []
    parts += [_exported_file_usage(exported)] if exported is not None else []
    body = "\n\n".join(parts) + "\n"
    return f"{body}\n<!-- crc32 {zlib.crc32(body.encode()):08x}: written by slm_lab; a card that was edited is not overwritten -->\n"


def write_card(path: Path, text: str) -> bool:
    """Write a model card, and return whether the card was written. If writing fails, log a notice.

    An existing file is replaced only if it is a model card that has not been edited.
    """
    try:
        if path.exists() and not _is_unchanged(path.read_bytes().decode(errors="replace")):
            notice(f"{path} was edited, or is not a model card; it is not overwritten")
            return False
        replace_file(path, text.encode())
    except OSError as error:
        notice(f"cannot write {path}: {error.strerror or error}")
        return False
    return True


def _is_unchanged(text: str) -> bool:
    """Return whether a text is a model card that has not been edited since slm_lab wrote it."""
    seal = _SEAL.search(text)
    return seal is not None and zlib.crc32(text[: seal.start()].encode()) == int(seal[1], 16)


def _header(name: str, facts: PolicyFacts) -> str:
    """Return the YAML header of a model card. Strings are written as JSON, which is valid YAML."""
    spec = facts.spec
    tags = ["reinforcement-learning", "deep-reinforcement-learning", "slm-lab", _env_id(spec), spec.agent.algorithm.name]
    lines = ["---", "library_name: slm-lab", "pipeline_tag: reinforcement-learning"]
    lines += ["# license: choose one, see https://huggingface.co/docs/hub/repositories-licenses", "tags:"]
    lines += [f"- {_quoted(tag)}" for tag in tags]
    if facts.mean_return is not None and spec.meta.self_play is None:  # returns of a policy against itself do not measure its strength
        value, error, over = facts.mean_return
        args = {"standard_error": error, "over": over, "frame": facts.saved.get("frame")}
        env = _quoted(_env_id(spec))
        lines += ["model-index:", f"- name: {_quoted(name)}", "  results:", "  - task:", "      type: reinforcement-learning"]
        lines += ["      name: reinforcement-learning", "    dataset:", f"      name: {env}", f"      type: {env}", "    metrics:"]
        lines += ["    - type: mean_reward", f"      value: {value:.6g}", "      name: mean return of an episode"]
        lines += [f"      args: {json.dumps(args)}", "      verified: false"]
    return "\n".join([*lines, "---"])


def _introduction(facts: PolicyFacts) -> str:
    spec = facts.spec
    env, name = _escaped_for_code(spec.env.name), _escaped_for_code(spec.name)
    return f"A policy for `{env}`, trained with {spec.agent.algorithm.name} by slm_lab (spec `{name}`)."


def _return_text(facts: PolicyFacts) -> str:
    if facts.mean_return is None:
        return "No episode had ended when the weights were saved, so their return is not known."
    value, error, over = facts.mean_return
    interval = f"{value:.5g}" if error is None else f"{value:.5g} ± {error:.2g}"
    what = "mean return" if error is None else "mean return ± standard error of the mean"
    frame = f", at frame {facts.saved['frame']:,}" if "frame" in facts.saved else ""
    lines = [f"**Return: {interval}** ({what}, over {over}{frame})."]
    if facts.spec.meta.self_play is not None:
        lines.append("The opponents were the policy itself and snapshots of it: a return near 0 does not mean that it plays badly.")
        if (elo := facts.saved.get("elo")) is not None and math.isfinite(elo):
            lines.append(f"Elo rating of the newest snapshot: {elo:.0f} (random actions: 0).")
    elif "ckpt-best.pt" in facts.source:
        lines.append("The weights were selected by this return, so it tends to be higher than that of new episodes.")
    return " ".join(lines)


def _training_rows(facts: PolicyFacts) -> Iterator[tuple[str, str]]:
    """Yield (name, value in Markdown) for each row of the table about the training."""
    spec, start = facts.spec, facts.start
    versions = start.get("versions") or package_versions()
    yield "environment", f"`{_escaped_for_code(spec.env.name)}`"
    yield "algorithm", spec.agent.algorithm.name
    if (policy := facts.saved.get("policy")) is not None:
        agents = ", ".join(f"`{_escaped_for_code(agent)}`" for agent in (spec.agent.policies or {}).get(policy, ()))
        yield "policy", f"`{_escaped_for_code(policy)}` of agent.policies, for {agents}"
    if "frame" in facts.saved:
        yield "frames", f"{facts.saved['frame']:,} of {spec.env.max_frame:,} (env.max_frame)"
    yield "random seed", f"{spec.meta.random_seed} (meta.random_seed); sessions: {spec.meta.max_session}"
    yield "checkpoint", f"`{_escaped_for_code(facts.source)}`"
    yield "spec", f"`{_escaped_for_code(spec.name)}`, SHA-256 {facts.digest}"
    yield "versions", ", ".join(f"{name} {version}" for name, version in versions.items())
    for key in ("git", "began"):
        if start.get(key):
            yield key, f"`{_escaped_for_code(str(start[key]))}`"


def _interface_rows(facts: PolicyFacts, agent: LoadedAgent) -> Iterator[tuple[str, str]]:
    """Yield (name, value in Markdown) for each row of the table about the inputs and outputs of the policy."""
    env = facts.spec.env
    yield "observation space", f"`{_escaped_for_code(str(agent.observation_space))}`"
    yield "action space", f"`{_escaped_for_code(str(agent.action_space))}`"
    if env.wrappers:
        yield (
            "wrappers",
            f"`{_escaped_for_code(', '.join(wrapper.name for wrapper in env.wrappers))}` (the spaces are those after the wrappers)",
        )
    if env.obs_keys:
        yield "parts of the observation", f"`{_escaped_for_code(', '.join(env.obs_keys))}`"
    yield "observation normaliser", _describe_normalizer(agent)
    if _is_recurrent(agent):
        yield "hidden state", "that of the previous step; at the start of an episode None in `agent.act`, zeros in an exported file"


def _is_recurrent(agent: LoadedAgent) -> bool:
    return agent.policy.initial_state(1) is not None


def _describe_normalizer(agent: LoadedAgent) -> str:
    obs = agent.normalizers.obs
    if obs is None:
        return "none"
    statistics = "running mean and standard deviation of the training, then clipped" if obs.stats is not None else "clipped"
    return f"{statistics} to ±{obs.clip:g}; part of the model: give it raw observations"


def _table(title: str, rows: Iterator[tuple[str, str]]) -> str:
    return "\n".join([f"## {title}", "", "| | |", "|---|---|", *(f"| {name} | {value} |" for name, value in rows)])


def _named_model_usage(name: str, is_recurrent: bool) -> str:
    state = "state, " if is_recurrent else ""
    return f"""```python
from slm_lab import load_agent

agent = load_agent("{name}")
action, state = agent.act(obs, {state}deterministic=True)
```

```bash
slm-lab enjoy@{name} --episodes 20
```"""


def _exported_file_usage(exported: ExportedFile) -> str:
    rows = [f"| {name} | {form} |" for ports in (exported.inputs, exported.outputs) for name, form in ports.items()]
    ports = "\n".join(["| input, output | |", "|---|---|", *rows])
    names = ", ".join(f'"{name}": {name.replace(".", "_")}' for name in exported.inputs)
    if exported.file.endswith(".onnx"):
        lines = ["import onnxruntime", "", f'session = onnxruntime.InferenceSession("{exported.file}")']
        lines.append(f"{', '.join(exported.outputs)} = session.run(None, {{{names}}})")
    else:
        lines = ["import torch", "", f'policy = torch.export.load("{exported.file}").module()']
        lines.append(f"{', '.join(exported.outputs)} = policy({', '.join(name.replace('.', '_') for name in exported.inputs)})")
    code = "\n".join(lines)
    return f"`{exported.file}` needs no slm_lab:\n\n```python\n{code}\n```\n\n{ports}"


def _env_id(spec: Spec) -> str:
    return spec.env.name.rpartition(":")[2]


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _escaped_for_code(text: str) -> str:
    """Escape a text for inline code in a cell of a Markdown table."""
    return re.sub(r"\s+", " ", text.replace("`", "'").replace("|", "\\|"))
