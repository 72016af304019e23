"""Tests of NormalTanh: algorithms learn from actions before tanh, the env receives actions after tanh."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from slm_lab.agent.policy.policy import build_policy
from slm_lab.agent.rollout.rollout import OnPolicyBatchReplay
from slm_lab.env.vec import Env
from slm_lab.experiment.collect.workers.worker import EnvGroup
from slm_lab.experiment.deploy.load import load_agent
from slm_lab.experiment.plan import Plan
from slm_lab.experiment.run.trial import Trial
from slm_lab.experiment.session.session import Session
from slm_lab.lib.records import ActionSpace, EnvInfo, ObservationSpace
from slm_lab.spec.load.loader import load_spec
from slm_lab.spec.report import SpecError

SPEC: dict[str, Any] = {
    "agent": {
        "algorithm": {"name": "PPO", "action_pdtype": "NormalTanh", "time_horizon": 16, "minibatch_size": 16, "training_epoch": 1},
        "net": {"name": "MLPNet", "hid_layers": [8], "log_std_init": 1.0},
    },
    "env": {"name": "Pendulum-v1", "num_envs": 2, "max_frame": 128},
    "meta": {"random_seed": 3, "log_frequency": 64},
}
INFO = EnvInfo(2, ObservationSpace((3,)), ActionSpace("continuous", (), 1))


def test_the_policy_returns_actions_before_tanh_and_the_envs_after_it() -> None:
    policy = build_policy(load_spec(SPEC).agent, INFO, np.random.default_rng(0))
    obs_N = np.random.default_rng(1).normal(size=(200, 3)).astype(np.float32)
    u_N = policy.act(obs_N).action_N
    assert np.abs(u_N).max() > 2
    assert np.array_equal(policy.env_action(u_N), np.tanh(u_N))
    act = policy.action_function(np.random.default_rng(0), deterministic=True)
    assert np.allclose(act(obs_N, np.ones(200, bool)), np.tanh(policy.act(obs_N, deterministic=True).action_N))


def test_a_run_steps_the_env_after_tanh_and_learns_from_before(monkeypatch: pytest.MonkeyPatch) -> None:
    stepped: list[np.ndarray] = []
    kept: list[np.ndarray] = []
    step, add = Env.step, OnPolicyBatchReplay.add
    monkeypatch.setattr(Env, "step", lambda self, action_N: stepped.append(action_N) or step(self, action_N))
    monkeypatch.setattr(OnPolicyBatchReplay, "add", lambda self, *words: kept.append(words[3].action_N.copy()) or add(self, *words))
    Session(load_spec(SPEC)).run()
    assert len(kept) == 64
    run = stepped[1:65]  # the first is the trial step before the run
    assert np.array_equal(np.array(run), np.tanh(np.array(kept)))


def test_a_loaded_agent_acts_in_the_envs_bounds(tmp_path: Path) -> None:
    result = Trial(load_spec(SPEC), plan=Plan(data_dir=tmp_path)).run()
    agent = load_agent(result.paths.root, "last")
    obs = np.zeros(3, np.float32)
    action, _ = agent.act(obs, deterministic=True)
    assert np.allclose(action, 2.0 * np.tanh(agent.policy.act(obs[None], deterministic=True).action_N[0]), atol=1e-6)


def test_workers_step_the_env_after_tanh() -> None:
    class Stop(Exception):
        pass

    class Recorder:
        info = INFO
        acts_N = None

        def reset(self) -> np.ndarray:
            return np.zeros((2, 3), np.float32)

        def step(self, action_N: np.ndarray) -> Any:
            self.action_N = action_N
            raise Stop

    class Slot:
        t = 0

    env: Any = Recorder()
    policy = build_policy(load_spec(SPEC).agent, INFO, np.random.default_rng(0))
    group = EnvGroup(0, env, [policy], np.ones(1, bool), np.random.default_rng(0))
    out = policy.act(group.obs_N)
    slot: Any = Slot()
    with pytest.raises(Stop):
        group.step(slot, out, [])
    assert np.array_equal(env.action_N, np.tanh(out.action_N))


def test_what_it_does_not_fit() -> None:
    rng = np.random.default_rng(0)
    unbounded = EnvInfo(2, ObservationSpace((3,)), ActionSpace("continuous", (), 1, bounded=False))
    with pytest.raises(SpecError, match="action_pdtype"):
        build_policy(load_spec(SPEC).agent, unbounded, rng)
    with pytest.raises(SpecError, match="action_policy"):
        build_policy(load_spec(SPEC, sets=["agent.algorithm.action_policy=random"]).agent, INFO, rng)
