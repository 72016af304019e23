"""Recommended values for a short spec: the net and the algorithm keys that it leaves out (memories are in spec.py: they need no env)."""

from __future__ import annotations

from typing import Any

from slm_lab.spec.models.algorithm import PPOSpec, QLearningSpec, ReinforceSpec, ReplayAlgorithmSpec, SARSASpec, SoftActorCriticSpec
from slm_lab.spec.models.net import NETS, NetSpec
from slm_lab.spec.models.schedule import LinearDecay, constant
from slm_lab.spec.models.spec import Spec

_POLICY = {"init_fn": "orthogonal_", "actor_init_std": 0.01, "critic_init_std": 1.0, "clip_grad_val": 0.5}
"""Initialisation and gradient clipping of policy gradients (Engstrom et al. 2020, arXiv:2005.12729)."""


def complete(spec: Spec, images: bool, action_kind: str) -> Spec:
    """Return a short spec with a net, and with recommended values of algorithm keys that are absent; another spec as it is.

    Args:
        images: whether the env's observations are images, or contain some.
        action_kind: lib.records.ActionKind of the env's actions.
    """
    if not spec.is_short:
        return spec
    agent = spec.agent
    keys = _algorithm(spec, images)
    change = {key: value for key, value in keys.items() if key not in agent.algorithm.model_fields_set}
    net = _net(spec, images, action_kind)
    agent = agent.model_copy(update={"algorithm": agent.algorithm.model_copy(update=change), "net": net})
    return spec.model_copy(update={"agent": agent})


def _algorithm(spec: Spec, images: bool) -> dict[str, Any]:
    """Return recommended values of algorithm keys."""
    algorithm, frames = spec.agent.algorithm, spec.session_frames
    if isinstance(algorithm, PPOSpec):
        keys: dict[str, Any] = {
            "val_loss_coef": 0.5,
            "training_epoch": 4 if images else 10,
            "clip_eps_spec": constant(0.1 if images else 0.2),
        }
        if images:
            keys["entropy_coef_spec"] = constant(0.01)
        if spec.meta.sampler is None:  # else the sizes of datasets decide
            rollout = _power_of_2(min(1024 if images else 2048, frames // 10))
            horizon = max(1, rollout // spec.env.num_envs)
            given = algorithm.time_horizon if "time_horizon" in algorithm.model_fields_set else horizon
            keys |= {"time_horizon": horizon, "minibatch_size": min(256 if images else 64, given * spec.env.num_envs)}
        return keys
    if isinstance(algorithm, ReinforceSpec):
        episodes = {"training_frequency": 4} if spec.agent.memory.episodes else {}
        return {"center_return": True, **episodes, "entropy_coef_spec": constant(0.01)}
    if isinstance(algorithm, QLearningSpec):
        return {"training_frequency": 4, "training_start_step": min(10_000 if images else 1_000, frames // 10)}
    if isinstance(algorithm, SoftActorCriticSpec):
        return {"training_start_step": min(10_000 if images else 1_000, frames // 10)}
    if isinstance(algorithm, SARSASpec):
        if {"action_policy", "explore_var_spec"} & algorithm.model_fields_set:
            return {}
        explore = LinearDecay(name="linear_decay", start_val=1.0, end_val=0.05, end_step=0.2 * spec.env.max_frame)
        return {"action_pdtype": "Argmax", "action_policy": "epsilon_greedy", "explore_var_spec": explore}
    if algorithm.on_policy and algorithm.has_critic:  # ActorCritic, SIL
        keys = {"val_loss_coef": 0.5, "entropy_coef_spec": constant(0.01)}
        return keys if "num_step_returns" in algorithm.model_fields_set else keys | {"lam": 0.95}
    return {}


def _net(spec: Spec, images: bool, action_kind: str) -> NetSpec:
    """Return the recommended net."""
    algorithm = spec.agent.algorithm
    width = 64 if algorithm.on_policy else 256 if algorithm.soft else 128
    net: dict[str, Any] = (
        {"name": "ConvNet", "normalize": True, "batch_norm": False} if images else {"name": "MLPNet", "hid_layers": [width, width]}
    )
    optim: dict[str, Any] = {"name": "Adam"}
    if isinstance(algorithm, ReplayAlgorithmSpec) or algorithm.values:
        optim["lr"] = 1e-4 if images else 3e-4 if algorithm.soft else 5e-4
        if algorithm.values:
            net |= {"loss_spec": {"name": "SmoothL1Loss"}, "clip_grad_val": 10.0}
        if isinstance(algorithm, QLearningSpec) and algorithm.has_target:
            # a target net that follows slowly is steadier than one that is replaced
            net |= {"update_type": "replace", "update_frequency": 1_000} if images else _moving(0.01, spec.env.num_envs)
        if isinstance(algorithm, QLearningSpec):
            net["lr_scheduler_spec"] = {"name": "LinearToMin", "frame": spec.env.max_frame, "min_factor": 0.01}
            if not images:
                net["layer_norm"] = True  # without it some seeds collapse (CartPole: 2 of 4)
        if algorithm.soft:
            # CrossQ's critics need batch norm instead of target nets
            net |= _moving(0.005) if algorithm.has_target else {"batch_norm": "before" if images else True}
    else:
        net |= _POLICY | {"hid_layers_activation": "relu" if images else "tanh", "shared": images and algorithm.has_critic}
        if not algorithm.has_critic:
            del net["critic_init_std"]
        optim |= {"lr": 2.5e-4 if images else 3e-4 if isinstance(algorithm, PPOSpec) else 1e-3, "eps": 1e-5}
        net["lr_scheduler_spec"] = {"name": "LinearToMin", "frame": spec.env.max_frame, "min_factor": 0.1}
        if action_kind == "continuous":
            net["log_std_init"] = 0.0
    net["gpu"] = False  # most of these nets are faster on the CPU
    if spec.meta.distributed:
        optim["name"] = "GlobalAdam"  # one net of several Sessions, which share its statistics
    return NETS[net["name"]].model_validate(net | {"optim_spec": optim})


def _moving(coef: float, times: int = 1) -> dict[str, Any]:
    """Return keys of target nets that each update moves as far as `times` updates with polyak_coef `coef` would."""
    return {"update_type": "polyak", "polyak_coef": round(1.0 - (1.0 - coef) ** times, 6)}


def _power_of_2(number: int) -> int:
    """Return the largest power of 2 that is at most `number`; at least 1."""
    return 1 << max(0, number.bit_length() - 1)
