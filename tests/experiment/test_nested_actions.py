"""Tests of runs with nested actions of several kinds in every engine, and of the use of the trained agent."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import onnxruntime
import pytest
import torch

import slm_lab
from slm_lab.cli import main
from slm_lab.env.make import make_env
from slm_lab.env.nested_actions import leaf_values
from slm_lab.experiment.deploy.export import Format, export_training
from slm_lab.experiment.deploy.load import load_agent
from slm_lab.experiment.files.find import Training
from slm_lab.spec.load.loader import load_spec
from slm_lab.spec.models.env import EnvSpec
from slm_lab.testing import SpecContract
from tests.experiment.test_load import NET, PPO, RNN, trained
from tests.resume.runs import small

ENV = "tests.env.hybrid:Hybrid-v0"
WORKERS = {"async_rl": False, "num_workers": 1, "num_envs_per_worker": 2, "serial_mode": True}


@pytest.mark.slow
class TestPPOWithHybridActions(SpecContract):
    def spec(self) -> Any:
        return small("PPO", ENV, 1200, algorithm={"time_horizon": 64, "minibatch_size": 32}, env={"mask": True})


@pytest.mark.parametrize("backend", ["sync", "async"])
@pytest.mark.parametrize("num_envs", [1, 3])
def test_the_env_takes_the_nested_action(backend: str, num_envs: int) -> None:
    """The env itself checks that each action is in its space and that its move is valid."""
    env = make_env(EnvSpec(name=ENV, backend=backend, num_envs=num_envs, max_frame=100, mask=True), 0)  # type: ignore[call-arg]
    env.reset()
    for _ in range(25):
        step = env.step(env.sample())
        assert (step.reward_N <= 1.0).all()
    env.close()


def test_a_mask_in_info_covers_the_discrete_choices(tmp_path: Path) -> None:
    env = make_env(EnvSpec(name="HybridInfo-v0", action_mask="action_mask", max_frame=100, num_envs=2), 0)
    assert env.info.observation.mask == (6, 9)
    env.reset()
    for _ in range(25):
        env.step(env.sample())
    env.close()


class MaskInInfo(gym.Wrapper[Any, Any, Any, Any]):
    """Wrapper that moves the mask from the observation to info."""

    def __init__(self, env: gym.Env[Any, Any]) -> None:
        super().__init__(env)
        self.observation_space = env.observation_space["seen"]  # type: ignore[index]

    def reset(self, **options: Any) -> Any:
        obs, _ = self.env.reset(**options)
        return obs["seen"], {"action_mask": obs["action_mask"]}

    def step(self, action: Any) -> Any:
        obs, reward, terminated, truncated, _ = self.env.step(action)
        return obs["seen"], reward, terminated, truncated, {"action_mask": obs["action_mask"]}


gym.register("HybridInfo-v0", entry_point=lambda: MaskInInfo(gym.make(ENV, mask=True)))


@pytest.mark.parametrize(
    "meta", [{}, {"sampler": WORKERS}, {"distributed": "shared", "max_session": 2}], ids=["here", "workers", "Hogwild"]
)
@pytest.mark.slow
def test_every_engine_trains(meta: dict[str, Any], tmp_path: Path) -> None:
    algorithm = {"time_horizon": 16, "minibatch_size": 32}
    spec = small("PPO", ENV, 1200, algorithm=algorithm, env={"mask": True}, meta=meta)
    result = slm_lab.Trial(spec, tmp_path).run()
    agent = result.agent()
    action, _ = agent.act(agent.observation_space.sample())
    assert agent.action_space.contains(action)


@pytest.mark.parametrize("name", ["Reinforce", "ActorCritic", "SIL", "PPOSIL"])
@pytest.mark.parametrize("net", [pytest.param(NET, id="MLP"), pytest.param(RNN, id="RNN", marks=pytest.mark.slow)])
def test_every_policy_gradient_trains(name: str, net: dict[str, Any]) -> None:
    session = slm_lab.Session(small(name, ENV, 300, net=net, env={"mask": True}))
    rows = session.run().rows
    assert session.clock.opt_step > 0
    assert all(np.isfinite(float(row["loss"])) for row in rows if row["loss"] is not None)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("net", "algorithm", "format"),
    [
        pytest.param(NET | {"log_std_init": -0.5}, PPO, "onnx", marks=pytest.mark.slow),
        pytest.param(RNN, PPO | {"action_pdtype": "NormalTanh"}, "torch", marks=pytest.mark.slow),
    ],
    ids=["MLP", "RNN"],
)
def test_the_trained_agent_acts_and_its_file_too(net: dict[str, Any], algorithm: dict[str, Any], format: Format, tmp_path: Path) -> None:
    """The exported file has one output for each part of the action."""
    paths = trained(tmp_path, {"name": ENV, "mask": True}, algorithm, net)
    agent = load_agent(paths.root)
    agent.observation_space.seed(0)
    singles = [agent.observation_space.sample() for _ in range(4)]
    together = {key: np.stack([one[key] for one in singles]) for key in ("action_mask", "seen")}
    actions, _ = agent.act(together, deterministic=True)
    for index, single in enumerate(singles):
        action, _ = agent.act(single, deterministic=True)
        assert agent.action_space.contains(action)
        assert type(action["move"]) is int
        for one, every in zip(leaf_values(agent.action_space, action), leaf_values(agent.action_space, actions), strict=True):
            np.testing.assert_allclose(one, every[index], atol=1e-5)
    done, _ = export_training(Training(paths), format)
    state = agent.policy.initial_state(4)
    inputs = [together["seen"], together["action_mask"]] + ([] if state is None else [state[:, : state.shape[1] // 2]])
    if format == "onnx":
        assert list(done.outputs) == ["action.aim.0", "action.aim.1", "action.move", "params"]
        session = onnxruntime.InferenceSession(str(done.path))
        outputs = session.run(None, dict(zip([one.name for one in session.get_inputs()], inputs, strict=True)))
    else:
        outputs = [out.numpy() for out in torch.export.load(done.path).module()(*map(torch.from_numpy, inputs))]
    for found, expected in zip(outputs, leaf_values(agent.action_space, actions), strict=False):
        assert found.dtype == expected.dtype
        np.testing.assert_allclose(found, expected, atol=1e-5)


def test_enjoy_plays_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    paths = trained(tmp_path, {"name": ENV, "mask": True})
    assert main([f"enjoy@{paths.root}", "--episodes", "2"]) == 0
    assert "2 episodes: mean return" in capsys.readouterr().out


def test_an_algorithm_that_cannot_take_the_space_names_those_that_can(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "spec.json"
    file.write_text(json.dumps({"s": {"agent": {"algorithm": {"name": "DQN"}}, "env": {"name": ENV, "max_frame": 5000}}}))
    assert main(["check", str(file), "s", "--build"]) == 2
    shown = capsys.readouterr()
    assert "agent.algorithm.name" in shown.out + shown.err
    assert "this env has hybrid actions (multi-discrete and multi-binary and continuous)" in shown.out + shown.err
    assert "Reinforce, ActorCritic, PPO" in shown.out + shown.err


@pytest.mark.parametrize("kinds", ["move", pytest.param("strength", marks=pytest.mark.slow)])
def test_parts_of_one_kind_can_be_learned_by_algorithms_for_that_kind(kinds: str) -> None:
    name = {"move": "DQN", "strength": "SoftActorCritic"}[kinds]
    memory = {"name": "Replay", "batch_size": 16, "max_size": 1000}
    rows = slm_lab.Session(small(name, ENV, 400, memory=memory, algorithm={"training_start_step": 50}, env={"kinds": kinds})).run().rows
    assert rows[-1]["opt_step"] > 0  # type: ignore[operator]


@pytest.mark.slow
@pytest.mark.parametrize("mask", [False, True])
def test_ppo_learns_hybrid_actions(mask: bool) -> None:
    """The maximum is 10; a random policy reaches 5.0, or 5.5 with masks. With seed 100, PPO reaches 8.0 and 8.1."""
    algorithm = {"name": "PPO", "time_horizon": 64, "minibatch_size": 64, "training_epoch": 10}
    body = {"agent": {"algorithm": algorithm}, "env": {"name": ENV, "num_envs": 8, "max_frame": 20_000, "mask": mask}}
    rows = slm_lab.Session(load_spec({"s": {**body, "meta": {"random_seed": 100}}}, "s")).run().rows
    assert float(rows[-1]["total_reward"]) > 7.4  # type: ignore[arg-type]
