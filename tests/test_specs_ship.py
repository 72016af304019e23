"""Tests of all specs that ship, and those of bench: each loads, also from a saved run, and builds; budgets are those of the published
scores; one spec of each kind trains."""

from __future__ import annotations

import json
import math
import os
from ctypes.util import find_library
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from tempfile import mkdtemp

import numpy as np
import pytest

from slm_lab.experiment.plan import Plan
from slm_lab.experiment.session.build import SessionContext
from slm_lab.experiment.session.session import Session
from slm_lab.experiment.training.demonstrations import write
from slm_lab.lib.store import SharedArrays, create_shared_file
from slm_lab.spec.load.files import spec_names
from slm_lab.spec.load.loader import dump_spec, load_spec
from slm_lab.spec.models.algorithm import ActorCriticSpec, PPOSpec, PQNSpec, ReinforceSpec, ReplayAlgorithmSpec, SARSASpec
from slm_lab.spec.models.spec import Spec
from tests.agent.scripted import balance, played, swing_up

ROOT = Path(__file__).parent.parent
SPEC_DIR = ROOT / "slm_lab" / "spec"
FILES = [
    SPEC_DIR / "demo.json",
    *sorted(SPEC_DIR.glob("benchmark/*/*.json")),
    *sorted(SPEC_DIR.glob("experimental/*.json")),
    *sorted(SPEC_DIR.glob("suites/*.json")),
    ROOT / "bench" / "specs.json",
]
MINATAR = ("ppo_minatar", "dqn_minatar", "pqn_minatar", "rainbow_minatar", "sac_minatar")
_LEFT_OUT = (*(() if find_library("Qt5Gui") else ("ppo_procgen",)), *(() if find_spec("minatar") else MINATAR))
SPECS = [(path, name) for path in FILES for name in spec_names(path) if name not in _LEFT_OUT]
PONG = ("sac_atari", "ppo_atari", "a2c_gae_atari", "a2c_nstep_atari", "dqn_atari", "ddqn_per_atari", "dueling_ddqn_per_atari")
MUJOCO = ("sac_mujoco", "crossq_mujoco", "async_sac_mujoco", "sac_simba_mujoco")
SUITES = {
    "ppo_dm_control": "CheetahRun-v1",
    "ppo_mujoco_playground": "MuJoCoPlayground/Go1JoystickFlatTerrain-v1",
    "ppo_mujoco_playground_kl": "MuJoCoPlayground/Go1JoystickFlatTerrain-v1",
    "ppo_metaworld": "MetaWorld/Reach-v3",
    "ppo_robotics": "FetchReachDense-v4",
    "ppo_minigrid": "MiniGrid-DoorKey-5x5-v0",
    "ppo_jumanji": "Jumanji/Snake-v1",
    "ppo_highway": "highway-fast-v0",
    "ppo_vizdoom": "D1Basic-v1",
    "ppo_gfootball": "gfootball/academy_empty_goal-v1",
    "ppo_procgen": "CoinrunEasy-v0",
    **dict.fromkeys(MINATAR, "MinAtar/Breakout-v1"),
    **dict.fromkeys(spec_names(SPEC_DIR / "suites" / "mujoco.json"), "HalfCheetah-v5"),
}
ENVS = {**dict.fromkeys(MUJOCO, "HalfCheetah-v5"), **dict.fromkeys(PONG, "ALE/Pong-v5"), **SUITES}
"""Specs with `${env}`, and one of the envs that they are written for."""
BENCHMARKS = [(path, name) for path, name in SPECS if path.parent.parent.name == "benchmark"]
GLOBAL = [(path, name) for path, name in BENCHMARKS if path.parent.name == "a3c" or path.parent.name.startswith("async")]
"""Specs of Sessions that train one net, with their own budgets."""
SAMPLED = [(path, name) for path, name in BENCHMARKS if path.parent.name == "appo"]
"""Specs with rollout workers."""
FEW_FRAMES = [
    (path, name) for path, name in BENCHMARKS if path.parent.name == "simba" or "masked_pendulum" in name or name == "td3_halfcheetah"
]
"""Specs with fewer frames than the published budgets, because their algorithms learn more from each frame."""
OWN = [(path, name) for path, name in BENCHMARKS if path.parent.name in ("bc", "iql", "rlpd", "her")]
"""Specs that learn from recorded episodes or goals, with their own budgets."""
RECORDED = {"bc_cartpole": ("CartPole-v1", balance), "iql_pendulum": ("Pendulum-v1", swing_up), "rlpd_pendulum": ("Pendulum-v1", swing_up)}
"""Specs with `${demonstrations}`, and the env and the policy that record them."""
BENCHMARKS = [where for where in BENCHMARKS if where not in GLOBAL + SAMPLED + FEW_FRAMES + OWN]
CONTINUOUS = ("Pendulum-v1", "HalfCheetah-v5")
OLD_FORM = "async_sac_roboschool.json"

BUDGETS = {
    "CartPole-v1": (200_000, 4, 500),
    "Acrobot-v1": (300_000, 4, 500),
    "Pendulum-v1": (300_000, 4, 500),
    "LunarLander-v3": (300_000, 8, 1_000),
    "HalfCheetah-v5": (10_000_000, 16, 10_000),
    "ALE/Pong-v5": (10_000_000, 16, 10_000),
}
"""max_frame, num_envs, log_frequency; total_reward_ma is comparable only if all three are equal."""


def ids(spec: tuple[Path, str]) -> str:
    return f"{spec[0].stem}-{spec[1]}"


@cache
def recorded(name: str) -> Path:
    """Return a file of recorded episodes that a spec can read."""
    file, (env_name, act) = Path(mkdtemp()) / "episodes.npz", RECORDED[name]
    data, env = played(env_name, act, 2)
    write(file, data, {"env": env_name, "spaces": env.info.spaces})
    return file


def load(path: Path, name: str, *sets: str) -> Spec:
    given = [f"env={ENVS[name]}"] if name in ENVS else [f"demonstrations={recorded(name)}"] if name in RECORDED else []
    return load_spec(str(path), name, (*given, *sets))


@cache
def trained() -> dict[tuple[object, ...], tuple[Path, str]]:
    """Return the first spec of each kind, which is trained; other specs of a kind differ only in values and in the env."""
    kinds: dict[tuple[object, ...], tuple[Path, str]] = {}
    for where in SPECS:
        spec = load(*where)
        agent, meta = spec.agent, spec.meta
        components = tuple(part and part.name for part in (agent.algorithm, agent.memory, agent.net, agent.critic_net))
        optimizer = agent.net and (agent.net.optim_spec.name, agent.net.use_same_optim, agent.net.shared)
        layers = tuple(getattr(agent.net, key, None) for key in ("layer_norm", "batch_norm"))
        env = (spec.env.name.partition("/")[0] == "ALE", "continuous" in where[1] or spec.env.name in CONTINUOUS, spec.env.normalize_obs)
        engine = (meta.distributed, meta.sampler and meta.sampler.async_rl, spec.policies > 1)
        kinds.setdefault((components, optimizer, layers, env, engine), where)
    return kinds


@pytest.mark.parametrize("where", SPECS, ids=ids)
def test_the_spec_that_a_run_saves_loads_again(where: tuple[Path, str], tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The saved spec also contains default values. If it did not load, the run could not be continued, played or exported."""
    spec = load(*where)
    saved = tmp_path / "saved.json"
    saved.write_text(json.dumps(dump_spec(spec)), encoding="utf-8")
    caplog.clear()
    assert load_spec(str(saved), spec.name) == spec
    assert [record.getMessage() for record in caplog.records] == []


@pytest.mark.parametrize("where", BENCHMARKS, ids=ids)
def test_benchmark_has_published_budget(where: tuple[Path, str]) -> None:
    """Benchmark specs have the published budgets; with on-policy algorithms, the learning rate schedule ends at the last frame."""
    spec = load(*where)
    assert spec.env.name in BUDGETS or "Masked" in spec.env.name, "BUDGETS lacks this env"
    masked = (200_000, 8 if spec.agent.algorithm.on_policy else 4, 500)
    budget = masked if spec.env.name.endswith("MaskedCartPole-v1") else BUDGETS[spec.env.name]
    if isinstance(spec.agent.algorithm, PQNSpec):  # uses many envs instead of a replay buffer
        assert spec.env.num_envs in (16, 32)
        budget = (budget[0], spec.env.num_envs, budget[2])
    assert (spec.env.max_frame, spec.env.num_envs, spec.meta.log_frequency) == budget
    assert spec.meta.max_session == 4
    if not spec.agent.algorithm.on_policy:
        return
    assert spec.agent.net is not None
    scheduler = spec.agent.net.lr_scheduler_spec
    assert scheduler is not None
    assert scheduler.kwargs["frame"] == spec.env.max_frame


@pytest.mark.parametrize("where", GLOBAL, ids=ids)
def test_specs_of_global_nets_say_so(where: tuple[Path, str]) -> None:
    spec = load(*where)
    if where[1] == "a2c_gae_cartpole":  # the baseline of A3C, with the same envs, frames and updates
        other = load(where[0], "a3c_gae_cartpole")
        assert (spec.env.num_envs, spec.env.max_frame) == (other.meta.max_session * other.env.num_envs, other.env.max_frame)
        assert spec.agent.rollout_len == other.agent.rollout_len == 32
        assert spec.meta.log_frequency == other.meta.max_session * other.meta.log_frequency == 100 * 32 * 4
        return
    assert spec.meta.distributed == ("shared" if "sac" in where[1] or "dqn" in where[1] else "synced")
    assert spec.meta.max_session > 1
    assert spec.agent.net is not None
    assert spec.agent.net.optim_spec.name.startswith("Global")


@pytest.mark.parametrize("where", SAMPLED, ids=ids)
def test_specs_of_rollout_workers_say_so(where: tuple[Path, str]) -> None:
    spec = load(*where)
    assert spec.meta.sampler is not None
    assert spec.meta.sampler.async_rl == where[1].startswith("appo")
    assert isinstance(spec.agent.algorithm, PPOSpec)
    assert spec.agent.algorithm.with_vtrace == spec.meta.sampler.async_rl
    assert spec.agent.net is not None
    scheduler = spec.agent.net.lr_scheduler_spec
    if spec.meta.sampler.pbt is None:  # otherwise population-based training tunes the learning rate
        assert scheduler is not None
        assert scheduler.kwargs["frame"] == spec.env.max_frame
    assert spec.meta.max_session == 4


def test_each_algorithm_has_a_spec_for_each_env() -> None:
    envs = {"cartpole", "acrobot", "pendulum", "lunar", "lunar_continuous", "halfcheetah", "pong"}
    names = {name for _, name in BENCHMARKS}
    expected = {f"{kind}_{env}" for kind in ("reinforce", "a2c_gae", "a2c_nstep", "ppo") for env in envs}
    expected |= {f"{kind}_{env}" for kind in ("dqn", "ddqn_per") for env in ("cartpole", "acrobot", "lunar", "atari")}
    expected |= {f"{kind}_{env}" for kind in ("sac", "crossq") for env in (envs - {"halfcheetah", "pong"}) | {"mujoco"}}
    expected |= {f"pqn_{env}" for env in ("cartpole", "acrobot", "lunar")} | {f"rainbow_{env}" for env in ("cartpole", "lunar")}
    expected |= {f"{kind}_{env}" for kind in ("sil", "ppo_sil") for env in ("cartpole", "acrobot", "pendulum", "lunar")}
    assert names >= expected | {"sarsa_cartpole", "sac_atari"}


@pytest.mark.sampled(4)
@pytest.mark.parametrize("where", SPECS, ids=ids)
def test_spec_builds_without_a_notice_and_trains(where: tuple[Path, str], caplog: pytest.LogCaptureFixture) -> None:
    """Each spec builds without a notice; the first of each kind trains a few hundred frames of short episodes (for episodic memories)."""
    load(*where)
    if where[0].name != OLD_FORM:
        assert not caplog.records, "a shipped spec needs no notice"
    sets = ["meta.max_session=1"] if load(*where).meta.distributed else []
    if load(*where).meta.sampler is not None:
        sets += [f"meta.sampler.{key}" for key in ("serial_mode=true", "num_workers=2", "num_envs_per_worker=2")]
        sets += ["meta.sampler.num_batches_per_epoch=2"] if isinstance(load(*where).agent.algorithm, PPOSpec) else []
    sets += [] if load(*where).agent.algorithm.offline else ["env.num_envs=4"]
    sets += ["env.max_t=10", "env.max_frame=192", "meta.log_frequency=64", "meta.random_seed=0"]
    full = load(*where)
    match full.agent.algorithm:  # one update for each row
        case PPOSpec() | PQNSpec():
            sets += ["agent.algorithm.time_horizon=16", "agent.algorithm.minibatch_size=32", "agent.algorithm.training_epoch=2"]
        case ActorCriticSpec(num_step_returns=int()):
            sets += ["agent.algorithm.num_step_returns=16"]
        case ActorCriticSpec():
            sets += ["agent.algorithm.training_frequency=16"]
        case ReinforceSpec():
            sets += ["agent.algorithm.training_frequency=1"]
        case SARSASpec():
            sets += ["agent.algorithm.training_frequency=16"]
        case ReplayAlgorithmSpec():
            sets += ["agent.algorithm.training_start_step=32", "agent.memory.batch_size=16", "agent.algorithm.training_frequency=32"]
            sets += [
                "agent.algorithm.training_iter=1",
                *(["agent.algorithm.policy_delay=1"] if hasattr(full.agent.algorithm, "policy_delay") else []),
            ]
            sets += ["agent.net.update_frequency=16"] if full.agent.net is not None and full.agent.net.update_frequency > 16 else []
    if full.search is not None and "batch_size__choice" in full.search["agent"].get("memory", {}):
        sets += ["search.agent.memory.batch_size__choice=[16,32]"]
    spec = load(*where, *sets)
    fd = create_shared_file()
    store = SharedArrays(fd, synced=spec.meta.distributed == "synced") if spec.meta.distributed else None
    session = Session(spec, plan=Plan(mode="dev"), context=SessionContext(store=store)).build()
    if where not in trained().values():
        session.close()
        os.close(fd)
        return
    before = session.agent.weights()
    rows = session.run().rows
    if spec.policies == 1:
        assert [row["frame"] for row in rows] == [64, 128, 192]
    last = rows[-1]
    for key in ("loss", "grad_norm", "lr", *([] if spec.agent.algorithm.offline else ["total_reward"])):
        assert isinstance(last[key], float), key
        assert math.isfinite(last[key]), key
    assert moved(before, session.agent.weights())
    os.close(fd)


def moved(before: object, after: object) -> bool:
    """Return whether any number differs between two nested dicts of tensors."""
    if isinstance(before, dict) and isinstance(after, dict):
        return any(moved(before[key], after[key]) for key in before)
    return not np.array_equal(np.asarray(before), np.asarray(after))
