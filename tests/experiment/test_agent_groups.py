"""Tests of policies for agents with different spaces: observations, actions, exact resume, loading, playing, and errors with key paths."""

from __future__ import annotations

from collections import defaultdict
from copy import deepcopy
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from slm_lab import Session, load_agent, load_spec
from slm_lab.agent.replay import replay
from slm_lab.env import pettingzoo_backend
from slm_lab.env.board_players import Player
from slm_lab.experiment.deploy.enjoy import EnjoyOptions, enjoy
from slm_lab.experiment.deploy.export import export_training
from slm_lab.experiment.files.find import TrainingChoice, find_training
from slm_lab.experiment.files.paths import RunPaths
from slm_lab.experiment.plan import Plan, UserError
from slm_lab.experiment.run.build_report import describe_build
from slm_lab.experiment.run.new_spec import write_new_spec
from slm_lab.spec.load.files import SPEC_FOLDER
from slm_lab.spec.report import SpecError
from tests.experiment.small_runs import MLP, RECURRENT, REPLAYING, ROLLOUT, run
from tests.experiment.test_agents import BATCH, PLAIN, TIMES
from tests.packages import needs
from tests.resume.runs import bundle, differing, train
from tests.resume.runs import rows as table

packages = needs("pettingzoo")

UNEQUAL, TURNS = "pettingzoo:tests.env.zoo:Unequal", "pettingzoo:tests.env.zoo:UnequalTurns"
POLICIES = {"outer": ["a", "c"], "inner": ["b"]}


def unequal(algorithm: str = "PPO", name: str = UNEQUAL, policies: dict[str, list[str]] | None = POLICIES, **keys: Any) -> dict[str, Any]:
    """Return a spec of policies for agents with different spaces; `keys` are keys of its env section."""
    replays = algorithm in ("DQN", "SoftActorCritic")
    recurrent = keys.pop("recurrent", False)
    net = {**RECURRENT, **({} if replays else {"update_type": None, "polyak_coef": None})} if recurrent else MLP if replays else PLAIN
    body = run(name, {"name": algorithm, **(REPLAYING if replays else ROLLOUT)}, net, **({} if replays else {"memory": BATCH}), **keys)
    agent = {**body["agent"], **({} if policies is None else {"policies": policies})}
    return {**body, "agent": agent, "meta": {**body["meta"], "eval_episodes": 2}}


def built(body: dict[str, Any]) -> Session:
    return Session(load_spec({"run": deepcopy(body)}, "run")).build()


@pytest.mark.parametrize("algorithm", ["PPO", "DQN"])
def test_each_policy_sees_its_agents_and_acts_for_them(algorithm: str) -> None:
    """In this env the first number of an observation is the agent's number, and the agent's reward is 10 · (number + 1) + action."""
    session = built(unequal(algorithm))
    seen: dict[str, list[np.ndarray]] = defaultdict(list)
    rewards: dict[str, list[float]] = defaultdict(list)
    for name, learner in zip(POLICIES, session.parts.learners, strict=True):
        act = learner.agent.act

        def acted(obs_N: np.ndarray, *more: Any, name: str = name, act: Any = act, **keys: Any) -> Any:
            seen[name].append(obs_N.copy())
            return act(obs_N, *more, **keys)

        learner.agent.act = acted  # type: ignore[method-assign]
    env: Any = session.source
    step = env.env.step

    def stepped(action_N: np.ndarray) -> Any:
        result = step(action_N)
        for row in np.flatnonzero(result.valid_N):
            rewards["inner" if row % 3 == 1 else "outer"].append(result.reward_N[row] - 10 * (row % 3 + 1) - action_N[row])
        return result

    env.env.step = stepped
    session.run()
    outer, inner = (np.concatenate(seen[name]) for name in POLICIES)
    assert (outer.shape[1], inner.shape[1]) == (2, 3)
    assert set(outer[:, 0].tolist()) == {0.0, 2.0}
    assert set(inner[:, 0].tolist()) == {1.0}
    assert len(set(inner[:, 2].tolist())) > 5, "the number that is drawn at a reset"
    assert not np.any(rewards["outer"])
    assert not np.any(rewards["inner"])
    assert [learner.agent.policy.action.nvec for learner in session.parts.learners] == [(3,), (4,)]


def test_the_replay_memories_of_all_policies_must_fit_together(monkeypatch: pytest.MonkeyPatch) -> None:
    session = built(unequal("DQN"))
    sizes = [learner.agent.replay.nbytes for learner in session.parts.learners if learner.agent.replay is not None]
    assert len(sizes) == 2
    monkeypatch.setattr(replay, "memory_bytes", lambda: sum(sizes))
    built(unequal("DQN"))
    monkeypatch.setattr(replay, "memory_bytes", lambda: sum(sizes) - 2)
    with pytest.raises(SpecError, match=r"agent\.memory\.max_size: .* 2 at once of"):
        built(unequal("DQN"))


def learned(body: dict[str, Any]) -> list[dict[str, Any]]:
    return [{key: value for key, value in row.items() if key not in TIMES} for row in built(body).run().rows]


@pytest.mark.sampled(2)
@pytest.mark.parametrize("keys", [{}, {"recurrent": True}, {"comes": 2}])
@pytest.mark.parametrize("algorithm", ["PPO", "DQN"])
def test_groups_of_agents_with_equal_spaces_learn_as_usual(algorithm: str, keys: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Agents treated as if their spaces differed must give the same results as the usual path, digit for digit, with evaluation."""
    body = unequal(algorithm, alike=True, **keys)
    usual, kinds = learned(body), pettingzoo_backend._agent_kinds

    def split(env: Any, names: Any, target: Any) -> Any:
        return [one for part in (("a", "c"), ("b",)) for one in kinds(env, part, target)]

    monkeypatch.setattr(pettingzoo_backend, "_agent_kinds", split)
    assert built(body).parts.env_info.groups
    assert learned(body) == usual


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("algorithm", "keys"),
    [
        ("PPO", {"continuous": True, "normalize_obs": True, "normalize_reward": True}),
        ("PPO", {"recurrent": True, "critic_keys": ["state"]}),
        ("PPO", {"name": TURNS, "policies": {"first": ["a"], "second": ["b"]}}),
        ("PPO", {"masks": True, "action_mask": "action_mask", "comes": 2}),
        ("DQN", {"normalize_obs": True}),
    ],
)
def test_stopped_and_continued_policies_equal_straight(algorithm: str, keys: dict[str, Any], tmp_path: Path) -> None:
    body = unequal(algorithm, **keys)
    body["meta"]["save_replay"] = algorithm == "DQN"
    spec = load_spec({"run": body}, "run")
    _, one = train(spec, tmp_path / "straight")
    _, other = train(spec, tmp_path / "stopped", (234, 417))
    for i in range(2):
        assert len(table(one.session_df(i))) >= 5
        assert table(one.session_df(i)) == table(other.session_df(i))
        assert table(one.session_df(i, "eval")) == table(other.session_df(i, "eval"))
    assert differing(bundle(one), bundle(other)) == []


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> RunPaths:
    body = unequal(continuous=True, normalize_obs=True, critic_keys=["state"])
    return train(load_spec({"run": body}, "run"), tmp_path_factory.mktemp("groups") / "run")[1]


def test_a_loaded_policy_has_the_spaces_of_its_agents(paths: RunPaths) -> None:
    outer, inner = (load_agent(paths.root, "last", policy=name) for name in POLICIES)
    assert str(outer.action_space) == "Discrete(3)"
    assert inner.action_space.shape == (2,)
    assert (outer.acting_space["observation"].shape, inner.acting_space["observation"].shape) == ((2,), (3,))  # type: ignore[index]
    action, _ = outer.act({"observation": np.array([0, 1], np.float32)}, deterministic=True)
    assert outer.action_space.contains(action)
    action, _ = inner.act({"observation": np.array([1, 1, 5], np.float32)}, deterministic=True)
    assert inner.action_space.contains(action)
    assert [None if one.normalizers.obs is None else one.normalizers.obs.stats.mean.shape for one in (outer, inner)] == [(9,), (10,)]  # type: ignore[union-attr]


@pytest.mark.parametrize("policy", POLICIES)
def test_a_policy_is_exported(policy: str, paths: RunPaths, tmp_path: Path) -> None:
    """The export itself compares the file with the agent."""
    training = find_training(paths.root, None, paths.root.parent, TrainingChoice(policy=policy))
    _, agent = export_training(training, out=tmp_path / f"{policy}.onnx", which="last")
    assert agent.saved["policy"] == policy
    assert (tmp_path / f"{policy}.onnx").stat().st_size > 0


class First(Player):
    """A player that always takes the first action."""

    def act(self, obs_N: np.ndarray) -> np.ndarray:
        assert obs_N.shape[1:] == self.info.observation.shape
        return np.zeros((len(obs_N), *self.info.action.shape), self.info.action.dtype)


def test_each_agent_is_played_by_its_policy(paths: RunPaths) -> None:
    result = enjoy(find_training(paths.root, None, paths.root.parent), EnjoyOptions(which="last", episodes=3), Plan())
    assert result.games is not None
    assert result.games.policy_of == {"a": "outer", "b": "inner", "c": "outer"}
    assert all(10 <= a <= 12 and 90 <= c <= 96 for a, _, c in result.games.returns)


@pytest.mark.parametrize("against", ["random", "tests.experiment.test_agent_groups:First"])
def test_games_against_another_player(against: str, paths: RunPaths) -> None:
    training = find_training(paths.root, None, paths.root.parent, TrainingChoice(policy="inner"))
    games = enjoy(training, EnjoyOptions(which="last", episodes=3, against=against), Plan()).games
    assert games is not None
    assert len(games.scores) == 3


def test_an_opponent_needs_an_agent(paths: RunPaths) -> None:
    """The policies outer and inner play for all agents."""
    training = find_training(paths.root, None, paths.root.parent)
    with pytest.raises(UserError, match=r"--against random: the policies outer, inner play for all agents.*add --policy NAME"):
        enjoy(training, EnjoyOptions(which="last", episodes=3, against="random"), Plan())


def test_policies_play_in_an_env_with_their_spaces(paths: RunPaths) -> None:
    training = find_training(paths.root, None, paths.root.parent)
    with pytest.raises(UserError, match=r"the policy was trained in .*Unequal with actions Box.*; those of .*Unequal are Discrete\(4\)"):
        enjoy(training, EnjoyOptions(which="last", sets=["env.continuous=false"]), Plan())


@pytest.mark.parametrize(
    ("keys", "path", "words"),
    [
        (
            {"policies": None},
            "agent.policies",
            "have different spaces (observations: Box of shape (2,), float32 for a, Box of shape (3,), float32 for b; "
            "actions: Discrete(3), 0 to 2 for a, Discrete(4), 0 to 3 for b), so that each kind needs a policy; "
            'set "policies": {"a": ["a", "c"], "b": ["b"]}',
        ),
        (
            {"policies": {"one": ["a"], "two": ["c", "b"]}},
            "agent.policies.two[1]",
            "its agents have different spaces (observations: Box of shape (2,), float32 for c, Box of shape (3,), float32 for b; ",
        ),
        ({"policies": {"one": ["a", "c"], "two": ["bb"]}}, "agent.policies.two[0]", "unknown agent 'bb'"),
        ({"policies": {"one": ["a"], "two": ["b"]}}, "agent.policies", "no policy acts for c"),
    ],
)
def test_policies_must_fit_the_spaces(keys: dict[str, Any], path: str, words: str) -> None:
    with pytest.raises(SpecError) as error:
        built(unequal(**keys))
    (problem,) = error.value.problems
    assert problem.path == path
    assert words in problem.message


@pytest.mark.parametrize(
    "meta", [{"self_play": {}}, {"distributed": "synced"}, {"demonstrations": "never.npz"}, {"sampler": {"serial_mode": True}}]
)
def test_what_needs_equal_spaces_is_refused_by_its_path(meta: dict[str, Any]) -> None:
    algorithm = {"name": {"demonstrations": "BC", "sampler": "ActorCritic"}.get(next(iter(meta)), "PPO")}
    body = {"agent": {"algorithm": algorithm}, "env": {"name": UNEQUAL, "max_frame": 600}, "meta": meta}
    with pytest.raises(SpecError) as error:
        built(body)
    (problem,) = error.value.problems
    assert problem.path == f"meta.{next(iter(meta))}"
    assert "needs agents with equal spaces, but the agents of" in problem.message


def test_the_report_of_a_build_describes_each_kind_of_agents() -> None:
    session = built(unequal())
    assert describe_build(session).startswith("observation: a, c: vector of 2 numbers; b: vector of 3 numbers, MLPNet; ")
    session.close()


def test_a_new_spec_has_a_policy_for_each_kind_of_agents(tmp_path: Path) -> None:
    new = write_new_spec(tmp_path / "new.json", None, UNEQUAL, None, comments=False)
    assert new.spec.agent.policies == {"a": ["a", "c"], "b": ["b"]}


@pytest.mark.slow
def test_a_speaker_and_a_listener_learn() -> None:
    """The shipped spec must learn within 30,000 frames; random actions have a mean return of −44."""
    pytest.importorskip("mpe2")
    spec = load_spec(SPEC_FOLDER / "suites" / "agents.json", "ppo_speaker_listener", ["env.max_frame=30000", "meta.random_seed=1"])
    rows = Session(spec).run().rows
    assert float(rows[-1]["current_return"]) > -25  # type: ignore[arg-type]
