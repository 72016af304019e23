"""Tests against seeded traces: refactoring must not change them, and a change of an algorithm changes them deliberately.

`python -m tests.golden.test_golden` writes new traces.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from slm_lab.agent.build import build_agent
from slm_lab.env.make import make_env
from slm_lab.lib.clock import Clock
from slm_lab.lib.rng import session_seeds
from slm_lab.spec.models.spec import Spec
from tests.agent.helpers import Acting

FILE = Path(__file__).parent / "traces.json"
NET = {
    "name": "MLPNet",
    "hid_layers": [16, 16],
    "hid_layers_activation": "tanh",
    "init_fn": "orthogonal_",
    "actor_init_std": 1.0,
    "critic_init_std": 1.0,
    "clip_grad_val": 0.5,
}
RNN = {"name": "RecurrentNet", "rnn_hidden_size": 8, "cell_type": "LSTM", "seq_len": 8, "clip_grad_val": 0.5}
ENTROPY = {"name": "linear_decay", "start_val": 0.01, "end_val": 0.0, "start_step": 0, "end_step": 2000}
A2C = {"name": "ActorCritic", "lam": 0.95, "training_frequency": 16}
PPO = {
    "name": "PPO",
    "time_horizon": 32,
    "minibatch_size": 32,
    "training_epoch": 2,
    "normalize_advantages": "rollout",
    "entropy_coef_spec": ENTROPY,
}
CASES: dict[str, tuple[dict[str, Any], str, dict[str, Any], str]] = {
    "reinforce": (
        {"name": "Reinforce", "training_frequency": 4, "center_return": True, "normalize_advantages": False},
        "OnPolicyReplay",
        NET,
        "CartPole-v1",
    ),
    "a2c_nstep": (
        {"name": "ActorCritic", "num_step_returns": 16, "normalize_advantages": False},
        "OnPolicyBatchReplay",
        NET,
        "CartPole-v1",
    ),
    "a2c_gae": (
        {"name": "ActorCritic", "lam": 0.95, "training_frequency": 16},
        "OnPolicyBatchReplay",
        {**NET, "shared": True},
        "CartPole-v1",
    ),
    "ppo": (PPO, "OnPolicyBatchReplay", NET, "CartPole-v1"),
    "ppo_recurrent": (PPO, "OnPolicyBatchReplay", RNN, "CartPole-v1"),
    "ppo_continuous": ({**PPO, "normalize_v_targets": True}, "OnPolicyBatchReplay", {**NET, "log_std_init": 0.0}, "Pendulum-v1"),
}


def trace(name: str) -> list[float]:
    """Return the sum of all parameters after each of the first six updates of a run of 1,000 frames."""
    torch.set_num_threads(1)
    algorithm, memory, net, env_name = CASES[name]
    agent_spec = {"algorithm": algorithm, "memory": {"name": memory}, "net": net}
    env_spec = {
        "name": env_name,
        "num_envs": 4,
        "max_frame": 1000,
        "max_t": 100,
        "backend": "sync",
        "normalize_obs": env_name != "CartPole-v1",
    }
    spec = Spec.model_validate({"name": name, "agent": agent_spec, "env": env_spec})
    seeds, clock = session_seeds(0, 0, 0), Clock()
    env = make_env(spec.env, seeds.env)
    agent = build_agent(spec, env.info, seeds, clock)
    obs, out, acting = env.reset(), [], Acting(agent, 4)
    while clock.frame < spec.env.max_frame:
        act = acting.act(obs)
        step = env.step(act.action_N)
        clock.tick(4)
        acting.observe(obs, act, step)
        if agent.ready():
            agent.update()
            out.append(float(sum(w.double().sum() for w in agent.weights().values())))
        obs = step.obs_N
    env.close()
    return out[:6]


@pytest.mark.parametrize("name", CASES)
def test_golden(name: str) -> None:
    # tolerances: results of kernels differ in the last bits between processors, and updates amplify the differences
    assert trace(name) == pytest.approx(json.loads(FILE.read_text())[name], rel=2e-3, abs=2e-3)


@pytest.mark.parametrize("name", ["reinforce", "ppo"])
def test_repeats_exactly(name: str) -> None:
    assert trace(name) == trace(name)


if __name__ == "__main__":
    FILE.write_text(json.dumps({name: trace(name) for name in CASES}, indent=1) + "\n")
