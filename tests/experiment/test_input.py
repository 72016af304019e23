"""Tests of how nets interpret observations, as decided by the space, `net.input`, `env.channels` and the kind of net."""

from __future__ import annotations

from contextlib import closing
from typing import Any

import gymnasium as gym
import numpy as np
import pytest

from slm_lab.env.spaces import observation_codec
from slm_lab.experiment.run.build_report import observation_text
from slm_lab.experiment.session.session import Session
from slm_lab.experiment.training.resolve import complete_spec
from slm_lab.spec.load.loader import load_spec
from slm_lab.spec.report import SpecError
from tests.env.test_layout import CUE
from tests.env.toys import Spaced


class Shown(Spaced):
    """Env whose observation is a Box."""

    def __init__(self, shape: list[int], low: float = 0.0, high: float = 255.0, dtype: str = "uint8") -> None:
        self.observation_space = gym.spaces.Box(low, high, tuple(shape), np.dtype(dtype).type)
        self.action_space = gym.spaces.Discrete(2)


gym.register("Shown-v0", entry_point=Shown, max_episode_steps=20)
PPO = {"name": "PPO", "time_horizon": 8, "minibatch_size": 8, "training_epoch": 1}
MLP, CONV = {"name": "MLPNet", "hid_layers": [4]}, {"name": "ConvNet", "fc_hid_layers": [4]}
ARC = {"name": "TorchArcNet", "arc": {"modules": {"body": {"Sequential": [{"Flatten": None}, {"LazyLinear": {"out_features": 4}}]}}}}
CUBE = {"name": "Shown-v0", "shape": [8, 8, 8]}
FEATURES = {"name": "Shown-v0", "shape": [64, 64, 3], "low": -1e38, "high": 1e38, "dtype": "float32"}
RAW = " (agent.net.normalize is false: not divided)"
Keys = dict[str, Any]


def built(env: Keys, net: Keys | None, algorithm: Keys = PPO) -> closing[Session]:
    agent = {"algorithm": algorithm, **({} if net is None else {"net": net})}
    body = {"s": {"agent": agent, "env": {"max_frame": 16, **env}, "meta": {"random_seed": 0}}}
    return closing(Session(complete_spec(load_spec(body, "s"))).build())


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("env", "net", "key"),
    [
        (CUBE, None, "env.channels"),
        (CUBE, CONV, "env.channels"),
        (CUBE, ARC, "env.channels"),
        (FEATURES, None, "agent.net.input"),
        (FEATURES, ARC, "agent.net.input"),
        ({"name": CUE}, {**MLP, "input": "image"}, "agent.net.input"),
        ({"name": CUE, "form": "image"}, {**CONV, "input": "vector"}, "agent.net.input"),
        ({"name": CUE, "channels": "last"}, MLP, "env.channels"),
        ({"name": "ALE/Pong-v5", "channels": "last"}, {**CONV, "normalize": True}, "env.channels"),
    ],
)
def test_what_is_open_or_contradicts_the_space_is_an_error(env: Keys, net: Keys | None, key: str) -> None:
    with pytest.raises(SpecError) as caught, built(env, net):
        pass
    assert [problem.path for problem in caught.value.problems] == [key]


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("env", "net", "text"),
    [
        (CUBE, MLP, "image 8 × 8, 8 channels first, 0 to 255 → 0 to 1, MLPNet"),
        ({**CUBE, "channels": "last"}, CONV, f"image 8 × 8, 8 channels last, 0 to 255{RAW}, ConvNet"),
        (FEATURES, CONV, "image 64 × 64, 3 channels last, without bounds, ConvNet"),
        (FEATURES, {**ARC, "input": "vector"}, "vector of 12288 numbers (64 × 64 × 3), TorchArcNet"),
        ({"name": CUE, "form": "channels_12"}, CONV, f"image 20 × 24, 12 channels last, 0 to 255{RAW}, ConvNet"),
        ({"name": CUE, "form": "planes"}, MLP, "vector of 768 numbers (8 × 8 × 12), MLPNet"),
        ({"name": CUE, "form": "codes"}, {**CONV, "normalize": True}, "image 9 × 9, 3 channels last, 0 to 10 → 0 to 1, ConvNet"),
        ({"name": CUE, "form": "board"}, {**MLP, "input": "image"}, "image 3 × 3, 1 channel, 0 to 2 → 0 to 1, MLPNet"),
    ],
)
def test_check_prints_what_was_decided(env: Keys, net: Keys, text: str) -> None:
    with built(env, net) as session:
        assert observation_text(session.spec, session.parts.env_info.observation) == text


def test_the_images_of_a_dict_are_divided_too() -> None:
    camera = gym.spaces.Box(0, 255, (9, 9, 3), np.uint8)
    observation, _ = observation_codec(gym.spaces.Dict({"camera": camera, "speed": gym.spaces.Box(-1, 1, (2,))}))
    spec = load_spec({"s": {"agent": {"algorithm": PPO, "net": {**CONV, "normalize": True}}, "env": {"name": CUE, "max_frame": 16}}}, "s")
    assert (
        observation_text(spec, observation)
        == "camera: image 9 × 9, 3 channels last, 0 to 255 → 0 to 1; speed: vector of 2 numbers, ConvNet"
    )


def test_critics_of_another_kind_read_the_same_observation() -> None:
    algorithm = {"name": "SoftActorCritic", "training_start_step": 8}
    sac = {"env": {"name": CUE, "form": "planes"}, "algorithm": algorithm}
    with built(**sac, net=MLP) as session:
        assert session.parts.env_info.observation.shape == (768,)
    agent = {"algorithm": algorithm, "net": MLP, "critic_net": CONV}
    body = {"s": {"agent": agent, "env": {"max_frame": 16, "name": CUE, "form": "planes"}, "meta": {"random_seed": 0}}}
    with closing(Session(complete_spec(load_spec(body, "s"))).build()) as session:
        assert session.parts.env_info.observation.shape == (12, 8, 8)
    body["s"]["agent"]["net"], body["s"]["agent"]["critic_net"] = {**MLP, "input": "vector"}, {**MLP, "input": "image"}
    with pytest.raises(SpecError) as caught:
        load_spec(body, "s")
    assert [problem.path for problem in caught.value.problems] == ["agent.critic_net.input"]


@pytest.mark.parametrize("form", ["board", "ram", "floats_255"])
def test_normalised_observations_are_not_divided_again(form: str) -> None:
    """The statistics are those of the observation as the env layer returns it, so a net must not scale normalised observations again."""
    with built({"name": CUE, "form": form, "normalize_obs": True}, {**CONV, "normalize": True} if form == "floats_255" else MLP) as session:
        assert session.parts.env_info.observation.dtype == "float32"
        assert session.parts.env_info.observation.divisor == 1.0
