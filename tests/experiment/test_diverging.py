"""Tests of episodes that end because the env diverged: their last observation is not finite and must not affect learning."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from slm_lab.experiment.session.session import Session
from slm_lab.spec.load.loader import load_spec
from tests.env.test_step import build
from tests.env.toys import PREFIX

BACKENDS = {"Toy-v0": "sync", "ToyNextStep-v0": "native", "ToySameStep-v0": "native"}
MLP: dict[str, Any] = {"name": "MLPNet", "hid_layers": [8]}
REPLAY: dict[str, Any] = {"name": "Replay", "batch_size": 16}
PPO = {"name": "PPO", "time_horizon": 16, "minibatch_size": 16}
AGENTS: dict[str, dict[str, Any]] = {
    "ppo": {"algorithm": PPO, "net": MLP},
    "ppo, v-trace": {"algorithm": PPO | {"with_vtrace": True}, "net": MLP},
    "ppo, recurrent": {"algorithm": PPO, "net": {"name": "RecurrentNet"}},
    "a2c, gae": {"algorithm": {"name": "ActorCritic", "lam": 0.9, "training_frequency": 16}, "net": MLP},
    "a2c, n-step": {"algorithm": {"name": "ActorCritic", "num_step_returns": 16}, "net": MLP},
    "sarsa": {"algorithm": {"name": "SARSA", "training_frequency": 16}},
    "dqn": {"algorithm": {"name": "DQN", "training_frequency": 4}, "memory": REPLAY},
    "per": {"algorithm": {"name": "DoubleDQN", "training_frequency": 4}, "memory": {**REPLAY, "name": "PrioritizedReplay"}},
    "sac": {"algorithm": {"name": "SoftActorCritic", "training_frequency": 8}, "memory": REPLAY},
    "crossq": {"algorithm": {"name": "CrossQ", "training_frequency": 8}, "memory": REPLAY},
}


@pytest.mark.parametrize("env", BACKENDS)
def test_observations_are_finite_where_they_have_no_value(env: str) -> None:
    diverging = build(PREFIX + env, 4, backend=BACKENDS[env], diverges=True)
    obs_N, ended = diverging.reset(), 0
    for _ in range(60):
        step = diverging.step(diverging.sample())
        assert np.isfinite(step.obs_N).all()
        assert np.isfinite(step.last_obs_N).all()
        assert (step.last_obs_N[step.terminated_N, 1:] == 0).all()
        ended += int(step.terminated_N.sum())
        obs_N = step.obs_N
    assert ended > 5
    assert obs_N.any()


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("name", "env"), [(name, list(BACKENDS)[index % 2]) for index, name in enumerate(AGENTS)])
def test_every_gradient_step_counts(name: str, env: str) -> None:
    keys = {"name": PREFIX + env, "num_envs": 4, "max_frame": 640, "diverges": True}
    session = Session(load_spec({"agent": AGENTS[name], "env": keys, "meta": {"random_seed": 0}}))
    assert session.run().frame == 640
    algorithm = session.learners[0].agent.algorithm
    assert algorithm.skipped_steps == 0
    assert session.learners[0].clock.opt_step > 3
