"""Contract tests of all algorithms: one suite for every entry of the tables."""

from __future__ import annotations

import io
import os
from typing import Any

import numpy as np
import pytest
import torch

from slm_lab.agent.agent import Agent
from slm_lab.agent.algorithm import base
from slm_lab.agent.algorithm.target import TargetNet
from slm_lab.agent.build import build_agent
from slm_lab.agent.policy.policy import supported_algorithm_names
from slm_lab.agent.replay.replay import Replay
from slm_lab.agent.rollout.rollout import RolloutStorage
from slm_lab.lib.clock import Clock
from slm_lab.lib.records import ActionSpace, EnvInfo, VecStep
from slm_lab.lib.rng import session_seeds
from slm_lab.lib.store import SharedArrays, create_shared_file
from slm_lab.spec.load.loader import dump_spec
from slm_lab.spec.models.algorithm import Algorithm
from slm_lab.spec.models.memory import Memory
from slm_lab.spec.models.spec import Spec, union_members
from slm_lab.spec.report import SpecError
from tests.agent.helpers import Acting, ToyEnv
from tests.contract.combinations import ALGORITHM_NAMES, OFFLINE, SMALL, Case, cases

CASES = cases()
every_case = pytest.mark.parametrize("case", CASES, ids=str)
every_second_case = pytest.mark.parametrize(
    "case", [pytest.param(case, marks=[pytest.mark.slow] if index % 2 else []) for index, case in enumerate(CASES)], ids=str
)
"""For tests that take long: all other cases are marked as slow tests."""


ONLINE = [name for name in ALGORITHM_NAMES if name not in OFFLINE]
SENT = ("staleness", "lock_wait", "bytes_pushed", "bytes_pulled")
"""Metrics that an update reports only if several processes train the net."""


@pytest.fixture(autouse=True, scope="module")
def _one_thread() -> None:
    torch.set_num_threads(1)


class Beat(ToyEnv):
    """Toy env in which all episodes end every fifth step, so that there are moments without unfinished episodes."""

    ticks = 0

    def step(self, action_N: np.ndarray) -> VecStep:
        step = super().step(action_N)
        self.ticks += 1
        over = self.ticks % 5 == 0
        ended_N = np.full(self.info.num_envs, over)
        truncated_N = ended_N & (np.arange(self.info.num_envs) % 2 == self.ticks // 5 % 2)
        obs_N = self._obs() if over else step.last_obs_N
        return step._replace(terminated_N=ended_N & ~truncated_N, truncated_N=truncated_N, first_N=ended_N, obs_N=obs_N, episodes=[])


def build(case: Case, seed: int = 0, num_envs: int = 2, **net: Any) -> Agent:
    torch.manual_seed(seed + 100)
    return build_agent(case.spec(num_envs, net), case.info(num_envs), session_seeds(seed, 0, 0), Clock())


def drive(agent: Agent, env: ToyEnv, steps: int) -> list[Any]:
    """Act, step, observe and update; return all actions and metrics as numbers."""
    trace: list[Any] = []
    obs_N, acting = env.reset(), Acting(agent, env.info.num_envs)
    for _ in range(steps):
        out = acting.act(obs_N)
        step = env.step(out.action_N)
        agent.clock.tick(env.info.num_envs)
        acting.observe(obs_N, out, step)
        trace.append((out.action_N.tolist(), out.logp_N.tobytes()))  # NaN equals NaN
        if agent.ready():
            metrics = agent.update()
            trace.append((metrics.loss, metrics.grad_norm, metrics.entropy, sorted(metrics.extra.items())))
        agent.end_step()
        obs_N = step.obs_N
    return trace


def updates(trace: list[Any]) -> list[tuple[float, ...]]:
    return [item for item in trace if len(item) == 4]


def bundle(agent: Agent) -> dict[str, Any]:
    """Return the contents of a checkpoint with save_replay, after writing and reading it."""
    replay = None if agent.replay is None else agent.replay.contents()
    file = io.BytesIO()
    torch.save({"agent": agent.state_dict(), "clock": agent.clock.state_dict(), "replay": replay}, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=True)
    assert isinstance(loaded, dict)
    return loaded


def assert_equal(left: Any, right: Any, path: str = "") -> None:
    """Assert that two states are equal, bit for bit."""
    if isinstance(left, dict):
        assert left.keys() == right.keys(), path
        for key in left:
            assert_equal(left[key], right[key], f"{path}.{key}")
    elif isinstance(left, list | tuple):
        assert len(left) == len(right), path
        for index, (one, other) in enumerate(zip(left, right, strict=True)):
            assert_equal(one, other, f"{path}[{index}]")
    elif isinstance(left, torch.Tensor):
        assert (left.shape, left.dtype) == (right.shape, right.dtype), path
        assert left.numpy().tobytes() == right.numpy().tobytes(), path  # NaN equals NaN
    else:
        assert left == right, path


# ---- the tables


def test_the_tables_have_every_entry_of_the_spec() -> None:
    assert all(issubclass(model.implementation(), base.Algorithm) for model in union_members(Algorithm))
    assert all(issubclass(model.implementation(), RolloutStorage if model.on_policy else Replay) for model in union_members(Memory))
    assert list(SMALL) == ALGORITHM_NAMES, "a new algorithm needs small keys in combinations.py"
    assert {case.algorithm for case in CASES} | {"Random", *OFFLINE} == set(ALGORITHM_NAMES)


# ---- each algorithm


@pytest.mark.sampled(6)
@pytest.mark.parametrize("synced", [pytest.param(False, marks=pytest.mark.slow, id="shared"), pytest.param(True, id="synced")])
@every_second_case
def test_one_session_alone_on_a_global_net_is_plain_training(case: Case, synced: bool) -> None:
    def weights_and_trace(store: SharedArrays | None, optimizer: str) -> tuple[dict[str, Any], list[Any]]:
        spec, clock = case.spec(2, {"optim_spec": {"name": optimizer, "lr": 0.01}}), Clock()
        torch.manual_seed(100)
        agent = build_agent(spec, case.info(2), session_seeds(0, 0, 0), clock)
        if store is not None:
            store.attach({"clock": clock, "agent": agent})
        return agent.state_dict(), drive(agent, Beat(case.info(2)), 60)

    store = SharedArrays(create_shared_file(), synced=synced, locked=True)
    state, trace = weights_and_trace(store, "GlobalAdam")
    plain_state, plain_trace = weights_and_trace(None, "Adam")
    for _, _, _, extra in updates(trace):
        assert dict(extra)["staleness"] == 0.0
        assert dict(extra)["lock_wait"] >= 0.0
    without = [item if len(item) != 4 else (*item[:3], [x for x in item[3] if x[0] not in SENT]) for item in trace]
    assert len(updates(trace)) > 2
    assert_equal(without, plain_trace)
    assert_equal(state, plain_state)
    os.close(store.fd)


@pytest.mark.sampled(16)
@every_case
def test_it_learns_from_what_it_sees(case: Case) -> None:
    """Gradients are finite, every weight changes, equal seeds give equal results, and another seed gives other results."""
    agent, again, other = build(case), build(case), build(case, seed=1)
    before = agent.weights()
    trace = drive(agent, ToyEnv(case.info(), 3), 24)
    learned = updates(trace)
    assert len(learned) >= 2
    for loss, grad_norm, *_ in learned:
        assert np.isfinite([loss, grad_norm]).all()
    assert any(grad_norm > 0.0 for _, grad_norm, *_ in learned)
    moved = {name: not torch.equal(value, before[name]) for name, value in agent.weights().items()}
    assert all(moved.values()), [name for name, did in moved.items() if not did]
    assert agent.clock.opt_step >= len(learned)
    assert agent.policy.version == len(learned)
    assert drive(again, ToyEnv(case.info(), 3), 24) == trace
    assert drive(other, ToyEnv(case.info(), 3), 5) != trace[:5]


@pytest.mark.sampled(9)
@every_second_case
def test_a_saved_state_goes_on_bit_for_bit(case: Case) -> None:
    """A state that was saved between two episodes gives the same actions, updates and weights in an agent with other initial weights."""
    agent = build(case)
    drive(agent, Beat(case.info(), 3), 20)
    saved = bundle(agent)
    assert_equal(bundle(agent)["agent"], saved["agent"])  # saving changes nothing
    twin = build(case, seed=9)
    drive(twin, Beat(case.info(), 8), 10)  # loading discards what it has learned before
    twin.clock.load_state_dict(saved["clock"])
    twin.load_state_dict(saved["agent"])
    if agent.replay is not None:
        assert twin.replay is not None
        twin.replay.load_contents(saved["replay"])
    traces = []
    for one in (agent, twin):
        torch.manual_seed(0)  # a Session saves the state of torch's generator
        traces.append(drive(one, Beat(case.info(), 5), 20))
    assert len(updates(traces[0])) >= 2
    assert traces[0] == traces[1]
    ours, theirs = bundle(agent), bundle(twin)
    del ours["clock"]["wall_t"], theirs["clock"]["wall_t"]
    assert_equal(ours, theirs)


@pytest.mark.sampled(17)
@every_case
def test_one_env_with_dummy_rows(case: Case) -> None:
    """With one env (N = 1) and NEXT_STEP autoreset, dummy rows are not transitions."""
    agent = build(case, num_envs=1)
    env = ToyEnv(case.info(1), 1, next_step=True)
    learned = updates(drive(agent, env, 60))
    assert learned
    assert all(np.isfinite([loss, grad_norm]).all() for loss, grad_norm, *_ in learned)
    if isinstance(seen := getattr(agent.replay, "seen", None), int):
        assert 30 < seen < 55


def target_nets(thing: Any, depth: int = 3) -> list[TargetNet[Any]]:
    """Return all target nets of an algorithm and of its parts."""
    if isinstance(thing, TargetNet):
        return [thing]
    inner = getattr(thing, "__dict__", {}).values() if depth and type(thing).__module__.startswith("slm_lab.agent.algorithm") else ()
    return list({id(net): net for value in inner for net in target_nets(value, depth - 1)}.values())


@pytest.mark.parametrize("update_type", ["replace", "polyak"])
@pytest.mark.parametrize(
    "case", [case for case in CASES if case[1:3] == ("Replay", "MLPNet") and target_nets(build(case).algorithm)], ids=str
)
def test_target_nets_move_when_due(case: Case, update_type: str) -> None:
    """Target nets move when their update is due.

    With replace: every 14 frames, in soft actor-critic at the next training call. With polyak: in every vector step, or in every training
    call of the policy.
    """
    keys: dict[str, Any] = {"polyak_coef": 0.1} if update_type == "polyak" else {"update_frequency": 14}
    agent, env = build(case, update_type=update_type, **keys), ToyEnv(case.info(), 3)
    targets = target_nets(agent.algorithm)
    assert all(torch.equal(target.flat.param, target.source.param) for target in targets)
    obs_N, befores, moves, open_ = env.reset(), [target.flat.param.clone() for target in targets], 0, False
    for _ in range(60):
        out = agent.act(obs_N)
        step = env.step(out.action_N)
        agent.clock.tick(2)
        agent.observe(obs_N, np.ones(2, bool), None, out, step)
        open_ |= update_type == "polyak" or agent.clock.frame % 14 == 0
        if trained := agent.ready():
            agent.update()
        agent.end_step()
        due = open_ and (trained or not agent.algorithm.spec.own_critics)
        for target, before in zip(targets, befores, strict=True):
            if not due:
                assert torch.equal(before, target.flat.param)
            elif update_type == "polyak":
                assert torch.equal(before, target.flat.param) == torch.equal(before, target.source.param)
                assert (target.flat.param - before).norm() <= (target.source.param - before).norm()
            else:
                assert torch.equal(target.source.param, target.flat.param)
        moves += not torch.equal(befores[0], targets[0].flat.param)
        befores, open_ = [target.flat.param.clone() for target in targets], open_ and not due
        obs_N = step.obs_N
    assert moves >= 7


def test_target_nets_are_where_the_papers_have_them() -> None:
    found = {case.algorithm: len(target_nets(build(case).algorithm)) for case in CASES if case.net == "MLPNet"}
    one = ("DQN", "DoubleDQN", "QRDQN", "C51", "SoftActorCritic", "TQC", "DistributionalSAC")
    assert {name: number for name, number in found.items() if number} == {**dict.fromkeys(one, 1), "TD3": 2, "DDPG": 2}


@pytest.mark.parametrize("name", ONLINE)
def test_building_leaves_the_spec_as_it_is(name: str) -> None:
    case = next((case for case in CASES if case.algorithm == name), Case("Random", "OnPolicyBatchReplay", "MLPNet"))
    spec = case.spec()
    dumped = dump_spec(spec)
    agent = build_agent(spec, case.info(), session_seeds(0, 0, 0), Clock())
    drive(agent, ToyEnv(case.info()), 30)
    assert dump_spec(spec) == dumped
    assert Spec.model_validate(spec.model_dump()) == spec
    assert getattr(agent.algorithm, "spec", spec.agent.algorithm) == spec.agent.algorithm
    assert type(agent.algorithm) is type(spec.agent.algorithm).implementation()


@pytest.mark.parametrize("name", ONLINE)
@pytest.mark.parametrize("kind", ["discrete", "continuous", "unbounded", "multi_discrete", "multi_binary", "hybrid"])
def test_actions_are_served_or_refused_by_name(name: str, kind: str) -> None:
    """For each kind of actions, the agent acts in the right shape, or a SpecError names a key and the allowed values."""
    spaces = {
        "discrete": ActionSpace("discrete", (3,), 1),
        "continuous": ActionSpace("continuous", (), 2),
        "unbounded": ActionSpace("continuous", (), 2, bounded=False),
        "multi_discrete": ActionSpace("multi_discrete", (2, 3), 2),
        "multi_binary": ActionSpace("multi_binary", (), 2),
        "hybrid": ActionSpace("hybrid", (3,), 2),
    }
    case = next((case for case in CASES if case.algorithm == name), Case("Random", "OnPolicyBatchReplay", "MLPNet"))
    info = EnvInfo(2, case.info().observation, spaces[kind])
    try:
        agent = build_agent(case.spec(), info, session_seeds(0, 0, 0), Clock())
    except SpecError as error:
        (problem,) = error.problems
        assert kind != "discrete" or case.continuous
        assert problem.path == "agent.algorithm.name"
        assert f"'{name}'" in problem.message
        assert problem.message.partition("; allowed: ")[2] == supported_algorithm_names(info.action)
        assert name not in supported_algorithm_names(info.action).split(", ")
        return
    assert name == "Random" or name in supported_algorithm_names(info.action).split(", ")
    out = agent.act(np.zeros((2, 4), np.float32))
    assert out.action_N.shape == ((2,) if kind == "discrete" else (2, 2))
    assert out.action_N.dtype == info.action.dtype
    drive(agent, ToyEnv(info), 30)


@pytest.mark.parametrize("case", [case for case in CASES if not case.continuous], ids=str)
@pytest.mark.parametrize("section", ["algorithm", "memory", "net"])
def test_an_unknown_key_is_refused_with_its_path(case: Case, section: str) -> None:
    raw = dump_spec(case.spec())["small"]
    raw["agent"][section]["no_such_key"] = 1
    with pytest.raises(ValueError, match=rf"agent\.{section}\.[\w.\[\],]*no_such_key"):
        Spec.model_validate({"name": "small", **raw})
