"""Tests of observations with images and other entries packed into one byte vector, of float images, and of nets without layer keys."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces
from torch import nn

from slm_lab.agent.net.body import build_body
from slm_lab.agent.net.layers import unpack
from slm_lab.env.spaces import observation_codec
from slm_lab.experiment.deploy.load import load_agent
from slm_lab.experiment.session.session import Session
from slm_lab.lib.records import ObservationSpace
from slm_lab.spec.models.net import NETS as MODELS
from slm_lab.spec.models.net import ConvNetSpec, DuelingMLPNetSpec, MLPNetSpec, NetSpec
from slm_lab.spec.models.spec import Spec
from tests.agent.both_parts import BothParts
from tests.agent.helpers import CONTINUOUS, DISCRETE, ToyEnv, agent_of, drive, info
from tests.contract.combinations import Case
from tests.experiment.test_load import trained

SPACE = spaces.Dict(
    {
        "camera": spaces.Box(0, 255, (8, 9, 3), np.uint8),
        "place": spaces.Box(-1, 1, (2,)),
        "sensor": spaces.Tuple((spaces.Discrete(3), spaces.Box(0, 255, (7, 7), np.uint8))),
    }
)
KNOWN, ENCODE = observation_codec(SPACE)
ARC = {"modules": {"body": {"Sequential": [{"LazyLinear": {"out_features": 8}}, {"Tanh": None}]}}}
CONV = {"conv_hid_layers": [[4, 3, 2]], "fc_hid_layers": [8]}


def sampled(count: int, seed: int = 0) -> dict[str, Any]:
    """Return a batch of observations in the env's format."""
    rng = np.random.default_rng(seed)
    return {
        "camera": rng.integers(256, size=(count, 8, 9, 3), dtype=np.uint8),
        "place": rng.uniform(-1, 1, (count, 2)).astype(np.float32),
        "sensor": (rng.integers(3, size=count), rng.integers(256, size=(count, 7, 7), dtype=np.uint8)),
    }


class PackedEnv(ToyEnv):
    def _obs(self) -> np.ndarray:
        return ENCODE(sampled(self.info.num_envs, int(self.rng.integers(2**31))))


def test_unpacked_entries_equal_the_envs() -> None:
    raw = sampled(4)
    entries = unpack(torch.from_numpy(ENCODE(raw))[1:], KNOWN.parts)  # a view that does not begin at the start of the storage
    assert [(part.name, part.shape) for part in KNOWN.parts] == [
        ("camera", (3, 8, 9)), ("place", (2,)), ("sensor/0", (3,)), ("sensor/1", (1, 7, 7)),
    ]  # fmt: skip
    assert all(entry.dtype == torch.float32 for entry in entries)
    np.testing.assert_allclose(entries[0], np.moveaxis(raw["camera"], -1, 1)[1:] / 255.0, rtol=1e-6)
    np.testing.assert_array_equal(entries[1], raw["place"][1:])
    np.testing.assert_array_equal(entries[2], np.eye(3)[raw["sensor"][0][1:]])
    np.testing.assert_allclose(entries[3], raw["sensor"][1][1:, None] / 255.0, rtol=1e-6)
    np.testing.assert_array_equal(unpack(torch.from_numpy(ENCODE(raw)), KNOWN.parts, normalize=False)[3], raw["sensor"][1][:, None])


NETS = {
    "MLPNet": {"hid_layers": [8]},
    "HydraMLPNet": {"hid_layers": [[[8], [4]], [8], []]},
    "ConvNet": CONV,
    "RecurrentNet": {"rnn_hidden_size": 4},
    "TorchArcNet": {"arc": ARC},
}


@pytest.mark.parametrize("name", NETS)
def test_every_net_reads_every_entry(name: str) -> None:
    torch.manual_seed(0)
    body = build_body(MODELS[name].model_validate({"name": name, **NETS[name]}), KNOWN, "actor").eval()
    raw, other = sampled(2, 0), sampled(2, 1)
    changes = [
        {"camera": other["camera"]},
        {"place": other["place"]},
        {"sensor": ((raw["sensor"][0] + 1) % 3, raw["sensor"][1])},
        {"sensor": (raw["sensor"][0], other["sensor"][1])},
    ]
    with torch.no_grad():
        features = body.layers(torch.from_numpy(ENCODE(raw)))
        for changed in ({**raw, **change} for change in changes):
            assert not torch.allclose(features, body.layers(torch.from_numpy(ENCODE(changed))), atol=1e-6)


def test_a_conv_net_has_an_encoder_for_each_image() -> None:
    body = build_body(ConvNetSpec(name="ConvNet", **CONV, normalize=True), KNOWN, "actor")
    assert [layer.in_channels for layer in body.modules() if isinstance(layer, nn.Conv2d)] == [3, 1]
    first = next(layer for layer in body.modules() if isinstance(layer, nn.Linear))
    assert first.in_features == 4 * 3 * 4 + 2 + 3 + 4 * 3 * 3
    raw = torch.from_numpy(ENCODE(sampled(1)))
    as_it_is = build_body(ConvNetSpec(name="ConvNet", **CONV), KNOWN, "actor")
    as_it_is.load_state_dict(body.state_dict())
    assert not torch.allclose(body(raw), as_it_is(raw))


LEARNERS = [
    Case("PPO", "OnPolicyBatchReplay", "ConvNet"),
    Case("PPO", "OnPolicyBatchReplay", "RecurrentNet"),
    Case("ActorCritic", "OnPolicyReplay", "ConvNet"),
    Case("SIL", "OnPolicyReplay", "MLPNet"),
    Case("DoubleDQN", "PrioritizedReplay", "DuelingConvNet"),
    Case("DQN", "Replay", "MLPNet"),
    Case("SoftActorCritic", "Replay", "ConvNet"),
    Case("SoftActorCritic", "Replay", "MLPNet", continuous=True),
    Case("CrossQ", "Replay", "ConvNet", continuous=True),
]


@pytest.mark.sampled(2)
@pytest.mark.parametrize("case", LEARNERS, ids=str)
def test_every_algorithm_learns_from_them(case: Case) -> None:
    packed = info(2, CONTINUOUS if case.continuous else DISCRETE)
    packed = replace(packed, observation=KNOWN, max_frame=10_000)
    agent = agent_of(case.spec(2), packed)
    before = agent.weights()
    metrics = drive(agent, PackedEnv(packed), 60)
    assert metrics
    assert all(np.isfinite(one.loss) for one in metrics)
    assert agent.algorithm.skipped_steps == 0
    assert any(not torch.equal(value, before[name]) for name, value in agent.weights().items())


def test_images_of_floats() -> None:
    for case in (Case("PPO", "OnPolicyBatchReplay", "ConvNet"), Case("SoftActorCritic", "Replay", "ConvNet", continuous=True)):
        known = info(2, CONTINUOUS if case.continuous else DISCRETE, shape=(1, 7, 7))
        agent = agent_of(case.spec(2), known)
        assert all(np.isfinite(one.loss) for one in drive(agent, ToyEnv(known), 40))


def layers(spec: NetSpec, obs: ObservationSpace) -> list[str]:
    return [str(layer) for layer in build_body(spec, obs, "actor").layers]


def test_a_conv_net_without_layers_is_that_of_mnih() -> None:
    found = layers(ConvNetSpec.model_validate({"name": "ConvNet"}), ObservationSpace((4, 84, 84), "uint8"))
    explicit = ConvNetSpec(name="ConvNet", conv_hid_layers=[[32, 8, 4], [64, 4, 2], [64, 3, 1]], fc_hid_layers=[512])
    assert found == layers(explicit, ObservationSpace((4, 84, 84), "uint8"))
    assert found[-2] == "Linear(in_features=3136, out_features=512, bias=True)"
    for side in (1, 7, 35):  # too small for these kernels
        assert layers(ConvNetSpec(name="ConvNet"), ObservationSpace((3, side, side), "uint8"))[1].startswith("Conv2d(3, 32, kernel_size=(3")
    assert "kernel_size=(8" in layers(ConvNetSpec(name="ConvNet"), ObservationSpace((3, 36, 36), "uint8"))[1]


@pytest.mark.parametrize("model", [MLPNetSpec, DuelingMLPNetSpec])
def test_an_mlp_without_layers_has_two_of_64_with_tanh(model: type[MLPNetSpec]) -> None:
    name = model.__name__.removesuffix("Spec")
    found = model.model_validate({"name": name})
    assert (found.hid_layers, found.hid_layers_activation) == ([64, 64], "tanh")
    assert model.model_validate({"name": name, "hid_layers_activation": "selu"}).hid_layers_activation == "selu"
    assert model.model_validate({"name": name, "hid_layers": [64, 64]}).hid_layers_activation == "relu"
    assert model.model_validate(found.model_dump()) == found


@pytest.mark.sampled(1)
@pytest.mark.parametrize("multi", [False, True])
def test_a_loaded_agent_acts_on_them(tmp_path: Path, multi: bool) -> None:
    """A loaded agent acts on one observation and on a batch in the env's format, normalised as in training."""
    env = {"name": "tests.agent.both_parts:BothParts-v0", "multi": multi, "normalize_obs": True}
    agent = load_agent(trained(tmp_path, env, net={"name": "ConvNet", **CONV}).root, "last")
    toy = BothParts(multi)
    obs, _ = toy.reset(seed=0)
    action, state = agent.act(obs, deterministic=True)
    assert state is None
    assert toy.action_space.contains(action)
    batch = {key: np.stack([value, value]) for key, value in obs.items()}
    assert np.array_equal(agent.act(batch, deterministic=True)[0], [action, action])
    assert agent.normalizers.obs.stats.count > 100


def both_parts(multi: bool, frames: int) -> Spec:
    net = {
        "name": "ConvNet",
        "shared": True,
        "conv_hid_layers": [[8, 3, 2], [8, 3, 1]],
        "fc_hid_layers": [64],
        "optim_spec": {"name": "Adam", "lr": 1e-3},
        "clip_grad_val": 0.5,
    }
    algorithm = {"name": "PPO", "time_horizon": 64, "minibatch_size": 128, "training_epoch": 4, "gamma": 0.5, "lam": 0.5}
    env = {"name": "tests.agent.both_parts:BothParts-v0", "multi": multi, "num_envs": 8, "max_frame": frames}
    return Spec.model_validate(
        {
            "name": "both_parts",
            "agent": {"algorithm": algorithm, "memory": {"name": "OnPolicyBatchReplay"}, "net": net},
            "env": env,
            "meta": {"random_seed": 0, "log_frequency": frames // 10},
        }
    )


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("multi", [False, True])
def test_ppo_solves_what_only_both_parts_together_solve(multi: bool) -> None:
    finals = [
        float(Session(both_parts(multi, 60_000), index).run().rows[-1]["total_reward"])  # type: ignore[arg-type]
        for index in range(2)
    ]
    assert sum(finals) / len(finals) >= 28.0, finals
