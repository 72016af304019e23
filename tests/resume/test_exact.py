"""Tests of exact resume: a run that is stopped and continued writes the same bytes as an uninterrupted run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from slm_lab.env.make import make_env
from slm_lab.experiment.session.resume import read_run
from slm_lab.experiment.training.resolve import complete_spec
from slm_lab.spec.models.env import EnvSpec
from slm_lab.spec.models.spec import SPEC_VERSION
from tests.resume.runs import NET, bundle, differing, rows, small, train

REPLAY: dict[str, Any] = {"meta": {"save_replay": True}, "net": NET}
RNN = {"type": "RecurrentNet", "cell_type": "GRU", "rnn_hidden_size": 8, "seq_len": 4, "fc_hid_layers": []}
EARLY = {"training_start_step": 350}
UNEVALUATED = {"eval_episodes": 0, "save_replay": True}
EVALUATED = {"meta": {"rigorous_eval": 2, "eval_frequency": 300}}
NORMALIZED = {"backend": "sync", "num_envs": 2, "normalize_obs": True, "normalize_reward": True}
ROUNDS = {"async_rl": False, "num_workers": 2, "num_envs_per_worker": 2}
PBT = {"num_policies": 2, "pbt": {"period": 300, "start": 300}}
CASES: dict[str, dict[str, Any]] = {
    "PPO of the native vector env": {"algorithm": "PPO", "env": "CartPole-v1", "sections": {"env": {"num_envs": 4}}},
    "PPO, normalised, with evaluation": {"algorithm": "PPO", "env": "CartPole-v1", "sections": {"env": NORMALIZED, **EVALUATED}},
    "PPO, with few evaluations": {
        "algorithm": "PPO",
        "env": "CartPole-v1",
        "sections": {"env": {"num_envs": 4}, "meta": {"eval_episodes": 2}},
    },
    "A2C": {"algorithm": "ActorCritic", "env": "Pendulum-v1", "sections": {"env": {"num_envs": 3}}},
    "REINFORCE": {"algorithm": "Reinforce", "env": "CartPole-v1", "sections": {"env": {"num_envs": 2}}},
    "SARSA": {"algorithm": "SARSA", "env": "MountainCar-v0", "sections": {"env": {"num_envs": 2}}},
    "DQN": {"algorithm": "DQN", "env": "CartPole-v1", "sections": REPLAY},
    "double DQN with priorities": {
        "algorithm": "DoubleDQN",
        "env": "Acrobot-v1",
        "sections": {**REPLAY, "env": {"backend": "sync"}, "memory": {"name": "PrioritizedReplay", "batch_size": 16, "max_size": 200}},
    },
    "DQN with a recurrent net": {
        "algorithm": "DQN",
        "env": "CartPole-v1",
        "sections": {
            "meta": {"save_replay": True},
            "net": RNN,
            "env": {"num_envs": 2},
            "memory": {"name": "PrioritizedReplay", "batch_size": 8, "max_size": 300},
        },
    },
    "DQN, normalised, of three steps": {
        "algorithm": "DQN",
        "env": "CartPole-v1",
        "sections": {**REPLAY, "env": NORMALIZED, "algorithm": {"num_step_returns": 3}},
    },
    "SAC": {"algorithm": "SoftActorCritic", "env": "Pendulum-v1", "sections": {**REPLAY, "algorithm": {"training_start_step": 700}}},
    "SIL": {"algorithm": "SIL", "env": "CartPole-v1", "sections": {"meta": {"save_replay": True}, "env": {"num_envs": 2}}},
    "PPO with a recurrent net": {"algorithm": "PPO", "env": "CartPole-v1", "sections": {"net": RNN, "env": {"num_envs": 4}}},
    "PPO of MuJoCo": {"algorithm": "PPO", "env": "HalfCheetah-v5", "sections": {"env": {"num_envs": 2, "backend": "sync"}}},
    "an env that draws from global generators": {
        "algorithm": "PPO",
        "env": "tests.env.toys:GlobalDraws-v0",
        "sections": {"env": {"num_envs": 2}},
    },
    "sampler, serial": {
        "algorithm": "PPO",
        "env": "CartPole-v1",
        "sections": {"meta": {"sampler": {**ROUNDS, "serial_mode": True}}, "algorithm": {"time_horizon": 16, "minibatch_size": 32}},
    },
    "sampler in turns": {
        "algorithm": "PPO",
        "env": "CartPole-v1",
        "sections": {"meta": {"sampler": ROUNDS}, "algorithm": {"time_horizon": 16, "minibatch_size": 32}},
    },
    "two policies": {
        "algorithm": "PPO",
        "env": "CartPole-v1",
        "sections": {
            "meta": {"sampler": {**ROUNDS, **PBT, "serial_mode": True}},
            "algorithm": {"time_horizon": 16, "minibatch_size": 32},
        },
    },
    "two policies of a game in turns, recurrent": {
        "algorithm": "PPO",
        "env": "CartPole-v1",
        "sections": {
            "env": {"backend": "tests.env.turn_games:Duel"},
            "net": RNN,
            "meta": {"sampler": {**ROUNDS, **PBT}},
            "algorithm": {"time_horizon": 16, "minibatch_size": 32},
        },
    },
}


QUICK = (
    "PPO of the native vector env",
    "PPO, normalised, with evaluation",
    "DQN",
    "an env that draws from global generators",
    "two policies",
)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", [pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in CASES])
def test_stopped_and_continued_equals_straight(name: str, tmp_path: Path) -> None:
    case = CASES[name]
    spec = small(case["algorithm"], case["env"], **case["sections"])
    _, one = train(spec, tmp_path / "straight")
    _, other = train(spec, tmp_path / "stopped", (333, 555))
    for table in range(spec.policies):
        for mode in ("train", "eval"):
            assert rows(one.session_df(table, mode)) == rows(other.session_df(table, mode))
    assert len(rows(one.session_df(0))) >= 9
    assert differing(bundle(one), bundle(other)) == []
    assert (tmp_path / "straight" / "model").exists()


def test_a_continued_run_does_not_evaluate_nothing(tmp_path: Path) -> None:
    """Another seed gives other rows, so that the comparison above can detect a difference."""
    one, other = small("PPO", "CartPole-v1"), small("PPO", "CartPole-v1", meta={"random_seed": 4})
    assert rows(train(one, tmp_path / "a")[1].session_df(0)) != rows(train(other, tmp_path / "b")[1].session_df(0))


@pytest.mark.parametrize(
    ("algorithm", "sections", "exact"),
    [
        ("PPO", {"meta": {"eval_episodes": 0}}, True),
        ("PPO", {"run": {"eval_episodes": 0, "time_limit": 500}}, True),
        ("PPO", {"run": {"eval_episodes": 0, "time_limit": 1}}, False),
        ("PPO", {"run": {"eval_episodes": 3, "time_limit": 500}}, False),
        ("PPO", {"meta": {"rigorous_eval": 2, "eval_frequency": 400}}, True),
        ("PPO", {"meta": {"eval_episodes": 2}}, False),
        ("SoftActorCritic", {"meta": UNEVALUATED, "algorithm": {**EARLY, "entropy_anneal": 0.1}}, False),
        ("SoftActorCritic", {"meta": UNEVALUATED, "algorithm": {**EARLY, "entropy_anneal": {"end_ratio": 0.1, "frames": 500}}}, True),
    ],
)
def test_an_extended_run_is_exact_unless_a_value_depends_on_its_length(
    algorithm: str, sections: dict[str, Any], exact: bool, tmp_path: Path
) -> None:
    spec = complete_spec(small(algorithm, "CartPole-v1", 400, net=NET, **sections)).with_meta(
        run=[{"spec_version": SPEC_VERSION, **sections.get("run", {})}]
    )
    paths = train(spec, tmp_path / "run")[1]
    start = read_run(paths, ["env.max_frame=8000"]).starts[0]
    assert (start.status, start.lost == ()) == ("continues", exact)


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    "id",
    [
        *("CartPole-v1", "Pendulum-v1", "Acrobot-v1", "MountainCar-v0", "MountainCarContinuous-v0", "Blackjack-v1", "Taxi-v4"),
        *("FrozenLake-v1", "CliffWalking-v1", "HalfCheetah-v5", "Humanoid-v5", "Ant-v5", "Pusher-v5", "Hopper-v4"),
        "tests.env.toys:Nested-v0",
    ],
)
def test_open_episodes_of_single_envs_continue(id: str) -> None:
    spec = EnvSpec(name=id, backend="sync", num_envs=2, max_frame=1000, wrappers=["RecordEpisodeStatistics"])
    one, other = make_env(spec, 1), make_env(spec, 2)
    one.reset()
    other.reset()
    for _ in range(17):
        one.step(one.sample())
    other.load_state_dict(one.state_dict())
    assert other.resume()
    for _ in range(60):
        action_N = one.sample()
        a, b = one.step(action_N), other.step(action_N)
        for name in ("obs_N", "last_obs_N", "reward_N", "terminated_N", "truncated_N"):
            np.testing.assert_array_equal(getattr(a, name), getattr(b, name))
        assert a.episodes == b.episodes
    one.close()
    other.close()
