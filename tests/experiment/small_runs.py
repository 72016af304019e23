"""Specs of a short run of each algorithm and each kind of net, for the tests of engines."""

from __future__ import annotations

from copy import deepcopy
from pathlib import Path
from typing import Any

from slm_lab.experiment.training.demonstrations import write
from slm_lab.spec.load.loader import load_spec
from slm_lab.spec.models.spec import Spec
from tests.agent.scripted import balance, played

REPLAYING = {"training_start_step": 100, "training_frequency": 4, "training_iter": 1}
ROLLOUT = {"time_horizon": 16}
REPLAY = {"name": "Replay", "batch_size": 32, "max_size": 2000}
POLYAK = {"update_type": "polyak", "polyak_coef": 0.01}
MLP = {"name": "MLPNet", "hid_layers": [16, 16], "hid_layers_activation": "relu", **POLYAK}
RECURRENT = {"name": "RecurrentNet", "rnn_hidden_size": 8, "seq_len": 8, **POLYAK}
CARTPOLE, PENDULUM, BITS = "CartPole-v1", "Pendulum-v1", "slm_lab.env.bit_flip:BitFlip-v0"
ATOMS = {"v_min": 0.0, "v_max": 100.0}


def run(env: str, algorithm: dict[str, Any], net: dict[str, Any] = MLP, memory: dict[str, Any] = REPLAY, **keys: Any) -> dict[str, Any]:
    """Return the body of a spec with 2 envs and 600 frames; `keys` are keys of its env section."""
    agent = {"algorithm": algorithm, "memory": memory, "net": {**net, "gpu": False, "optim_spec": {"name": "Adam", "lr": 0.001}}}
    env_section = {"name": env, "num_envs": 2, "max_frame": 600, **keys}
    meta = {"max_session": 1, "log_frequency": 100, "random_seed": 3, "eval_episodes": 0, "save_interval": 5}
    return {"agent": agent, "env": env_section, "meta": meta}


def recorded(body: dict[str, Any]) -> dict[str, Any]:
    """Return the same body, which learns from recorded episodes."""
    body["meta"]["demonstrations"] = "episodes.npz"
    return body


RUNS: dict[str, dict[str, Any]] = {
    "TD3": run(PENDULUM, {"name": "TD3", **REPLAYING}),
    "DDPG": run(PENDULUM, {"name": "DDPG", **REPLAYING}),
    "TQC": run(PENDULUM, {"name": "TQC", **REPLAYING}),
    "SAC, SimbaNet": run(PENDULUM, {"name": "SoftActorCritic", **REPLAYING}, {"name": "SimbaNet", "width": 16, **POLYAK}),
    "DistributionalSAC, SimbaV2Net": run(
        PENDULUM, {"name": "DistributionalSAC", **REPLAYING}, {"name": "SimbaV2Net", "width": 16, **POLYAK}
    ),
    "recurrent SAC": run(PENDULUM, {"name": "SoftActorCritic", **REPLAYING}, RECURRENT),
    "recurrent TD3": run(PENDULUM, {"name": "TD3", **REPLAYING}, RECURRENT),
    "SAC with resets": run(PENDULUM, {"name": "SoftActorCritic", "reset_frequency": 50, **REPLAYING}),
    "BC": recorded(run(CARTPOLE, {"name": "BC"}, memory={"name": "Replay", "batch_size": 32})),
    "IQL": recorded(run(CARTPOLE, {"name": "IQL"}, memory={"name": "Replay", "batch_size": 32})),
    "DQN with demonstrations": recorded(run(CARTPOLE, {"name": "DQN", **REPLAYING})),
    "SAC in a curriculum": run(PENDULUM, {"name": "SoftActorCritic", **REPLAYING}, schedule={"g": [[0, 5.0], [300, 10.0]]}),
    "QRDQN": run(CARTPOLE, {"name": "QRDQN", **REPLAYING}),
    "C51": run(CARTPOLE, {"name": "C51", **ATOMS, **REPLAYING}),
    "rainbow": run(
        CARTPOLE,
        {"name": "C51", "double_q": True, "num_step_returns": 3, **ATOMS, **REPLAYING},
        {**MLP, "name": "DuelingMLPNet", "noisy": True},
        {"name": "PrioritizedReplay", "batch_size": 32, "max_size": 2000},
    ),
    "PQN": run(
        CARTPOLE, {"name": "PQN", **ROLLOUT}, {"name": "MLPNet", "hid_layers": [16], "layer_norm": True}, {"name": "OnPolicyBatchReplay"}
    ),
    "recurrent PQN": run(
        CARTPOLE, {"name": "PQN", **ROLLOUT}, {**RECURRENT, "update_type": None, "polyak_coef": None}, {"name": "OnPolicyBatchReplay"}
    ),
    "DQN, HindsightReplay": run(BITS, {"name": "DQN", **REPLAYING}, memory={**REPLAY, "name": "HindsightReplay"}, n=5),
    "PPO, adaptive_lr": run(
        PENDULUM, {"name": "PPO", "adaptive_lr": {}, **ROLLOUT}, {"name": "MLPNet", "hid_layers": [16]}, {"name": "OnPolicyBatchReplay"}
    ),
}
ENGINES = ("shared", "synced", "sampler", "sampler, sync", "sampler, central")
REFUSED = {
    **{
        (name, "sampler, sync"): "meta.sampler.async_rl"
        for name, body in RUNS.items()
        if "training_start_step" in body["agent"]["algorithm"]
    },
    **{(f"recurrent {name}", engine): "agent.net.name" for name in ("SAC", "TD3") for engine in ENGINES[2:]},
    **{("SAC with resets", engine): "agent.algorithm.reset_frequency" for engine in ("shared", "synced")},
    ("rainbow", "sampler, central"): "meta.sampler.inference",
    **{(name, engine): "meta.sampler" for name in ("BC", "IQL") for engine in ENGINES[2:]},
}
"""For each (run, engine) that cannot be combined, the key path of the problem."""
PAIRS = [(name, engine) for name in RUNS for engine in ENGINES]


def body_of(name: str, engine: str) -> dict[str, Any]:
    """Return the body of a spec that trains a run with an engine: a mode of meta.distributed (shared, synced) or of meta.sampler."""
    body = deepcopy(RUNS[name])
    if engine in ("shared", "synced"):
        body["meta"] |= {"distributed": engine, "max_session": 2}
        body["env"]["max_frame"] *= 2
        body["agent"]["net"]["optim_spec"]["name"] = "GlobalAdam"
        return body
    del body["env"]["num_envs"]
    mode = {"sampler": {}, "sampler, sync": {"async_rl": False}, "sampler, central": {"inference": "central"}}[engine]
    body["meta"]["sampler"] = {"num_workers": 2, "num_envs_per_worker": 2, **mode}
    return body


def spec_of(name: str, engine: str, folder: Path | None = None) -> Spec:
    """Return the spec of a run with an engine; raise SpecError if they exclude each other. folder: for recorded episodes, if needed."""
    body = body_of(name, engine)
    if folder is not None and "demonstrations" in body["meta"]:
        data, env = played(CARTPOLE, balance, 4)
        write(folder / "episodes.npz", data, {"env": CARTPOLE, "spaces": env.info.spaces})
        body["meta"]["demonstrations"] = str(folder / "episodes.npz")
    return load_spec({"run": body}, "run")
