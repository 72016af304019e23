"""Specs that older versions of this package saved with a run: values with which their keys mean what they meant there."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from slm_lab.spec.algorithm import ALGORITHMS
from slm_lab.spec.report import Report, value_at

SPEC_VERSION = 3
"""meta.run.spec_version of specs that are saved now; absent: 1."""
SOFT = [name for name, model in ALGORITHMS.items() if model.soft]


_PARTS = {("net", True): ("actor", "critic"), ("net", False): ("actor",), ("critic_net", False): ("critic",)}
"""(section of a net, whether it is the only one) → what it initialises."""


def keep_meaning(raw: dict[str, Any], report: Report) -> None:
    """Change, in place, what the saved spec of an older version would mean otherwise now.

    Version 1 moved target nets by polyak_coef once per update_frequency frames; now it is once per gradient step that updates the policy
    (soft actor-critic) or once per vector step (Q-learning). The coefficient is converted, so that they move as fast.
    The automatic target entropy of discrete soft actor-critic was 0.98 ln|A|. Advantages were standardised over the rollout in PPO, in
    ActorCritic if lam was given, and in Reinforce not.
    Changes since version 2 are handled by `_keep_version_2`.
    """
    run = value_at(raw, ("meta", "run"))
    last = run[-1] if isinstance(run, list) and run else run  # an entry for each start of the run; each start saves the spec again
    if not isinstance(last, dict) or (version := last.get("spec_version", 1)) >= SPEC_VERSION:
        return
    last["spec_version"] = SPEC_VERSION
    _keep_version_2(raw, report)
    if version < 2:
        _keep_version_1(raw, report)


def _keep_version_2(raw: dict[str, Any], report: Report) -> None:
    """Change, in place, or note what had another meaning in version 2.

    Training began as soon as the replay buffer held one batch. Critics of soft actor-critic were clipped by one norm, and the temperature
    was tuned by Adam with default arguments and the gradient (entropy − target entropy), without the factor α. A shared net could have two
    optimizers.
    """
    algorithm, memory, net = (value_at(raw, ("agent", key)) for key in ("algorithm", "memory", "net"))
    if not isinstance(algorithm, dict) or not isinstance(net, dict):
        return
    start, batch = algorithm.get("training_start_step"), value_at(memory, ("batch_size",))
    if isinstance(start, int) and isinstance(batch, int) and start < batch:
        algorithm["training_start_step"] = batch
    critic_place = "net" if value_at(raw, ("agent", "critic_net")) is None else "critic_net"
    if algorithm.get("name") in SOFT:
        if value_at(raw, ("agent", critic_place, "clip_grad_val")) is not None:
            report.note(("agent", critic_place, "clip_grad_val"), "an older version clipped both critics by one norm")
        if algorithm.get("fixed_alpha") is None:
            why = "an older version tuned the temperature by Adam with default arguments, along the distance to the target entropy"
            report.note(("agent", "algorithm", "target_entropy"), why)
    elif net.get("shared") and net.get("use_same_optim") is False:
        why = "an older version trained actor and critic of a shared net with an optimizer each"
        report.note(("agent", "net", "use_same_optim"), why)


def _keep_version_1(raw: dict[str, Any], report: Report) -> None:
    """Change, in place, or note what had another meaning in version 1 (see `keep_meaning`)."""
    algorithm = value_at(raw, ("agent", "algorithm"))
    if isinstance(algorithm, dict) and algorithm.get("name") in SOFT:
        if algorithm.get("target_entropy", "auto") == "auto" and algorithm.get("fixed_alpha") is None:
            algorithm.setdefault("target_entropy_ratio", 0.98)
        if algorithm.get("symlog"):
            report.note(
                ("agent", "algorithm", "symlog"), "an older version trained these critics to give symlog of the values, not the values"
            )
    _keep_memory(raw, report)
    if isinstance(algorithm, dict):
        _keep_advantages(algorithm, value_at(raw, ("agent", "net")), report)
    for key in ("net", "critic_net"):
        net = value_at(raw, ("agent", key))
        if isinstance(net, dict) and net.get("update_type") == "polyak":
            coef, frames = float(net.get("polyak_coef", 0.005)), int(net.pop("update_frequency", 1))
            if (exponent := _frames_per_update(raw) / frames) != 1:
                net["polyak_coef"] = 1.0 - (1.0 - coef) ** exponent
        if isinstance(net, dict):
            if key == "critic_net":
                net.pop("gpu", None)  # without effect
            _keep_net(net, _PARTS[key, value_at(raw, ("agent", "critic_net")) is None])


def _keep_memory(raw: dict[str, Any], report: Report) -> None:
    """Change, in place, the keys of the memory whose meaning or default was another in version 1, and note what no key expresses.

    Importance weights had an exponent of 0.4 unless one was given; new transitions had the greatest priority so far. cross_entropy was the
    fraction of episodes to keep. use_cer included only the newest transition. Evaluation acted at the present value of explore_var.
    """
    algorithm, memory = value_at(raw, ("agent", "algorithm")), value_at(raw, ("agent", "memory"))
    if not isinstance(algorithm, dict) or not isinstance(memory, dict):
        return
    imitates = getattr(ALGORITHMS.get(str(algorithm.get("name"))), "self_imitation", False)
    kind = memory.get("sil_replay_name") or "PrioritizedReplay" if imitates else memory.get("name")
    if isinstance(kind, str) and kind.endswith("PrioritizedReplay"):
        for key, value in (("beta", 0.4), ("initial_error", "greatest")):
            if memory.get(key) is None:
                memory[key] = value
    share, episodes = memory.get("cross_entropy"), algorithm.get("training_frequency", 1)
    if isinstance(share, int | float) and share < 1 and isinstance(episodes, int | float) and episodes >= 1:
        kept = max(1, round(share * episodes))
        memory["cross_entropy"] = 0.0 if kept >= episodes else (episodes - kept - 0.5) / (episodes - 1)  # between two returns
    net = value_at(raw, ("agent", "net", "name"))
    if memory.get("use_cer") and net != "RecurrentNet":
        report.note(("agent", "memory", "use_cer"), "an older version included only the newest transition in a batch")
    schedule = algorithm.get("explore_var_spec")
    if value_at(raw, ("meta", "rigorous_eval")) and isinstance(schedule, dict) and schedule.get("name") != "no_decay":
        why = "an older version evaluated at the present value of explore_var, not at its end value"
        report.note(("meta", "rigorous_eval"), why)


def _keep_advantages(algorithm: dict[str, Any], net: Any, report: Report) -> None:
    """Change, in place, the keys of a policy gradient algorithm whose meaning was another in version 1; add notes on others."""
    name = algorithm.get("name")
    if name in ("PPO", "PPOSIL"):
        if algorithm.get("normalize_advantages", True) in (True, "standardize"):
            algorithm["normalize_advantages"] = "rollout"
    elif name in ("Reinforce", "ActorCritic", "SIL"):
        algorithm.setdefault("normalize_advantages", algorithm.get("lam") is not None)
    else:
        return
    notes = {
        "normalize_v_targets": "an older version trained the critic on values minus their mean, by moving statistics",
        "symlog": "an older version trained the critic to give symlog of the values, not the values",
        "clip_vloss": "an older version used loss_spec, and twice the present weight for squared errors",
    }
    for key, note in notes.items():
        if algorithm.get(key):
            report.note(("agent", "algorithm", key), note)
    if algorithm.get("normalize_advantages") == "percentile":
        report.note(("agent", "algorithm", "normalize_advantages"), "an older version used the range of the rollout's returns")
    if name != "Reinforce" and isinstance(net, dict) and net.get("clip_grad_val") is not None and not net.get("shared"):
        report.note(("agent", "net", "clip_grad_val"), "an older version clipped actor and critic by one norm over both")


def _keep_net(net: dict[str, Any], parts: Sequence[str]) -> None:
    """Change, in place, the keys of layers whose meaning was another in version 1.

    ConvNet applied batch norm before the activation of every hidden layer. init_fn had a gain of 1 for output layers, and in TorchArcNet
    for all layers. torch's schedulers counted frames. Batch renormalisation had eps 1e-3 and warmup_steps 100,000, and another order of
    positional arguments.
    """
    for key in ("lr_scheduler_spec", "actor_lr_scheduler_spec", "critic_lr_scheduler_spec"):
        if isinstance(scheduler := net.get(key), dict) and scheduler.get("name") not in ("LinearToZero", "LinearToMin"):
            scheduler.setdefault("unit", "frames")
    _keep_layers(net)
    if net.get("name") == "TorchArcNet" and net.get("init_fn") in ("orthogonal_", "xavier_normal_", "xavier_uniform_"):
        net["hid_layers_activation"] = "identity"
    elif net.get("init_fn") == "orthogonal_":
        for part in parts:
            net.setdefault(f"{part}_init_std", 1.0)
    if net.get("name") in ("ConvNet", "DuelingConvNet") and net.get("batch_norm") is True:
        net["batch_norm"] = "before"


def _frames_per_update(raw: dict[str, Any]) -> float:
    """Return the frames between two updates of the target net, as they are counted now."""
    algorithm, envs = value_at(raw, ("agent", "algorithm")), int(value_at(raw, ("env", "num_envs")) or 1)
    if not isinstance(algorithm, dict) or algorithm.get("name") != "SoftActorCritic":
        return envs
    steps = (algorithm.get("training_iter") or envs) / algorithm.get("policy_delay", 1)
    return float(max(algorithm.get("training_frequency", 1), envs) / steps)


def _keep_layers(node: Any) -> None:
    """Change, in place, the layers of batch renormalisation inside a net."""
    if isinstance(node, list):
        for item in node:
            _keep_layers(item)
    elif isinstance(node, dict):
        for key, value in node.items():
            if key == "LazyBatchRenorm1d":
                given = dict(zip(("momentum", "eps", "warmup_steps"), value, strict=False)) if isinstance(value, list) else value or {}
                node[key] = {"eps": 1e-3, "warmup_steps": 100_000, **given}
            else:
                _keep_layers(value)
