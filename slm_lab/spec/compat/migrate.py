"""Convert specs in older formats to the current format, and list the names that other libraries use for keys and algorithms, for
suggestions in messages."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from slm_lab.spec.compat import env_ids
from slm_lab.spec.report import KeyPath, Report, format_json, show_path, value_at

RENAMED: dict[KeyPath, KeyPath] = {
    ("agent", "algorithm", "clip_val_loss"): ("agent", "algorithm", "clip_vloss"),
    ("env", "max_tick"): ("env", "max_frame"),
    ("env", "normalize_state"): ("env", "normalize_obs"),
    ("meta", "resources", "num_cpus"): ("meta", "search_resources", "cpu"),
    ("meta", "resources", "num_gpus"): ("meta", "search_resources", "gpu"),
    ("meta", "num_cpus"): ("meta", "search_resources", "cpu"),
    ("meta", "num_gpus"): ("meta", "search_resources", "gpu"),
}
_ALGORITHMS = {"HydraDQN": "DQN"}
"""Maps old names of algorithms to current names. HydraDQN of SLM Lab v2 was DQN with a HydraMLPNet that had one head for each env. With one
env, HydraDQN is the same as DQN."""
_WRITTEN = "SLM Lab writes this key when it runs a spec"
_FRAMES = ("total_t", "frame")
"""Values of the old key max_tick_unit (SLM Lab v2, v3) with which the old key max_tick counts frames."""
DROPPED: dict[KeyPath, str] = {
    ("agent", "algorithm", "normalize_state"): "a key of env; SLM Lab ignores it here",
    ("body",): "there is one agent and one env",
    ("git_sha",): "now in meta.run",
    ("name",): "a spec is named by its key",
    ("env", "frame_op"): "the env stacks Atari frames; other observations are single frames",
    ("env", "frame_op_len"): "4 Atari frames are stacked",
    ("env", "max_tick_unit"): "env.max_frame counts frames",
    ("env", "image_downsize"): "Atari frames are 84 × 84",
    ("env", "scale_obs"): "agent.net.normalize divides observations by 255",
    ("meta", "max_tick_unit"): "env.max_frame counts frames",
    ("meta", "resources"): "now meta.search_resources",
    ("meta", "save_frequency"): "checkpoints are saved every meta.save_interval seconds",
    ("meta", "train_mode"): "MODE is a command-line argument",
    ("meta", "cuda_offset"): "an environment variable of SLM Lab; here net.cuda_id chooses the GPU",
    ("meta", "resume"): "the command train@ continues a run",
    **{
        ("meta", name): _WRITTEN
        for name in (
            *("experiment", "trial", "session", "experiment_ts", "git_sha", "ckpt", "eval_model_prepath", "eval_model_prepaths"),
            *("predir", "prepath", "graph_prepath", "info_prepath", "log_prepath", "model_prepath"),
        )
    },
}
"""Maps the path of each key that is no longer used to the reason why the key is no longer used."""

OTHER_NAMES = {
    "learning_rate": "agent.net.optim_spec.lr",
    "lr": "agent.net.optim_spec.lr",
    "actor_lr": "agent.net.actor_optim_spec.lr",
    "critic_lr": "agent.net.critic_optim_spec.lr",
    "policy_lr": "agent.net.actor_optim_spec.lr",
    "q_lr": "agent.net.critic_optim_spec.lr",
    "optimizer": "agent.net.optim_spec.name",
    "max_grad_norm": "agent.net.clip_grad_val",
    "policy_kwargs": "agent.net",
    "net_arch": "agent.net.hid_layers",
    "hidden_sizes": "agent.net.hid_layers",
    "activation": "agent.net.hid_layers_activation",
    "activation_fn": "agent.net.hid_layers_activation",
    "tau": "agent.net.polyak_coef",
    "target_update_interval": "agent.net.update_frequency",
    "target_network_frequency": "agent.net.update_frequency",
    "device": "agent.net.gpu",
    "n_steps": "agent.algorithm.time_horizon (ActorCritic: num_step_returns)",
    "num_steps": "agent.algorithm.time_horizon (ActorCritic: num_step_returns)",
    "rollout_length": "agent.algorithm.time_horizon",
    "n_epochs": "agent.algorithm.training_epoch",
    "update_epochs": "agent.algorithm.training_epoch",
    "num_epochs": "agent.algorithm.training_epoch",
    "gae_lambda": "agent.algorithm.lam",
    "clip_range": "agent.algorithm.clip_eps_spec",
    "clip_coef": "agent.algorithm.clip_eps_spec",
    "clip_param": "agent.algorithm.clip_eps_spec",
    "clip_range_vf": "agent.algorithm.clip_vloss",
    "kl_threshold": "agent.algorithm.adaptive_lr.kl_target",
    "desired_kl": "agent.algorithm.adaptive_lr.kl_target",
    "init_at_random_ep_len": "env.stagger_episodes",
    "normalize_value": "agent.algorithm.normalize_values",
    "ent_coef": "agent.algorithm.entropy_coef_spec",
    "entropy_coeff": "agent.algorithm.entropy_coef_spec",
    "vf_coef": "agent.algorithm.val_loss_coef",
    "vf_loss_coeff": "agent.algorithm.val_loss_coef",
    "normalize_advantage": "agent.algorithm.normalize_advantages",
    "learning_starts": "agent.algorithm.training_start_step",
    "train_freq": "agent.algorithm.training_frequency",
    "gradient_steps": "agent.algorithm.training_iter",
    "exploration_fraction": "agent.algorithm.explore_var_spec.end_step",
    "exploration_initial_eps": "agent.algorithm.explore_var_spec.start_val",
    "exploration_final_eps": "agent.algorithm.explore_var_spec.end_val",
    "epsilon": "agent.algorithm.explore_var_spec",
    "alpha": "agent.algorithm.fixed_alpha",
    "batch_size": "agent.memory.batch_size (PPO: agent.algorithm.minibatch_size)",
    "mini_batch_size": "agent.algorithm.minibatch_size",
    "sgd_minibatch_size": "agent.algorithm.minibatch_size",
    "buffer_size": "agent.memory.max_size",
    "replay_size": "agent.memory.max_size",
    "env_id": "env.name",
    "n_envs": "env.num_envs",
    "nenvs": "env.num_envs",
    "total_timesteps": "env.max_frame",
    "total_steps": "env.max_frame",
    "max_episode_steps": "env.max_t",
    "seed": "meta.random_seed",
    "log_interval": "meta.log_frequency",
    "eval_freq": "meta.eval_frequency",
    "n_eval_episodes": "meta.rigorous_eval",
}
"""Maps the names of keys in other libraries (Stable-Baselines3, CleanRL, RLlib, …) to the paths of the keys in specs of this package."""

OTHER_ALGORITHMS = {
    "A2C": "ActorCritic",
    "A3C": "ActorCritic, with meta.distributed",
    "SAC": "SoftActorCritic",
    "DDQN": "DoubleDQN",
    "RAINBOW": "C51, with double_q, num_step_returns, PrioritizedReplay and a noisy dueling net (see rainbow_lunar.json)",
    "SIMBA": "SoftActorCritic, with SimbaNet",
    "SIMBAV2": "DistributionalSAC, with SimbaV2Net",
    "HER": "DQN, SoftActorCritic or TD3, with HindsightReplay",
    "RLPD": "SoftActorCritic, with meta.demonstrations",
    "R2D2": "DoubleDQN, with RecurrentNet and PrioritizedReplay",
    "APPO": "PPO, with meta.sampler",
    "PPO2": "PPO",
    "IMPALA": "PPO, with meta.sampler and with_vtrace",
    "REINFORCE": "Reinforce",
    "VPG": "Reinforce",
}
"""Maps the upper-case names of algorithms in other libraries to the most similar algorithms of this package."""


def migrate_spec(raw: dict[str, Any], report: Report) -> dict[str, Any]:
    """Convert a raw spec to the current format in place, add a note for each change to `report`, and return the raw spec."""
    v4 = all(isinstance(raw.get(key), list) for key in ("agent", "env"))
    for root in ((), ("search",)):
        for key in ("agent", "env"):
            _replace_list(raw, (*root, key), v4, report)
    _migrate_search_algorithm(raw, report)
    _check_tick_unit(raw, report)
    for old, new in RENAMED.items():
        _move_key(raw, old, new, report)
    for path, reason in DROPPED.items():
        if _section_at(raw, *path[:-1]).pop(str(path[-1]), None) not in (None, {}):
            report.note_ineffective_key(path, f"no longer used ({reason}); ignored")
    _replace_value(raw, ("agent", "algorithm", "action_policy"), lambda policy: policy.removeprefix("multi_"), report)
    _replace_value(raw, ("agent", "algorithm", "name"), lambda name: _ALGORITHMS.get(name, name), report)
    _replace_value(raw, ("env", "name"), env_ids.current_id, report)
    for key in ("net", "critic_net"):
        _rename_type(_section_at(raw, "agent", key), ("agent", key), report)
    return raw


def _migrate_search_algorithm(raw: dict[str, Any], report: Report) -> None:
    """Replace the key meta.search of SLM Lab v4 by meta.search_algorithm.

    The value RandomSearch of meta.search becomes "grid" if the search section has grid_search keys, else "random".
    """
    meta, path = _section_at(raw, "meta"), ("meta", "search")
    name = meta.get("search")
    if name != "RandomSearch":
        if name is not None and not report.is_from_set_argument(path):
            report.add_problem(path, f"must be 'RandomSearch' (v4 form; now meta.search_algorithm), not {format_json(name)}")
            del meta["search"]
        return
    meta["search"] = "grid" if _has_grid(raw.get("search")) else "random"
    _move_key(raw, path, ("meta", "search_algorithm"), report)


def _check_tick_unit(raw: dict[str, Any], report: Report) -> None:
    """Add a problem if the old key max_tick counts episodes, because no current key limits the number of episodes."""
    env = _section_at(raw, "env")
    unit = _section_at(raw, "meta").get("max_tick_unit") or env.get("max_tick_unit")
    if env.get("max_tick") is not None and unit not in (None, *_FRAMES):
        report.add_problem(
            ("env", "max_tick"), f"counts in units of {format_json(unit)} (max_tick_unit); expected frames: set env.max_frame instead"
        )
        del env["max_tick"]
        report.record_move(("env", "max_frame"), ("env", "max_tick"))  # so that the missing max_frame is not reported too


def _has_grid(search: Any) -> bool:
    """Return whether a search section has grid_search keys."""
    items = search.items() if isinstance(search, dict) else enumerate(search) if isinstance(search, list) else ()
    return any(str(key).endswith("__grid_search") or _has_grid(value) for key, value in items)


def _section_at(raw: dict[str, Any], *keys: str | int) -> dict[str, Any]:
    """Return the dict at the path `keys` of a raw spec, or an empty dict if the path does not exist or its value is not a dict."""
    node = value_at(raw, keys)
    return node if isinstance(node, dict) else {}


def _replace_list(raw: dict[str, Any], path: KeyPath, v4: bool, report: Report) -> None:
    """Replace a list at `path` of a raw spec by the list's only item or, if `v4` is true, by the list's first item, as SLM Lab v4 does."""
    section = _section_at(raw, *path[:-1])
    items = section.get(str(path[-1]))
    if not isinstance(items, list):
        return
    if len(items) != 1 and not (items and v4):
        report.add_problem(
            path, f"must be an object, or a list of one object (v4 form), not a list of {len(items)}: a spec has one {path[-1]}"
        )
        section[str(path[-1])] = None
        return
    used = "its only item is used" if len(items) == 1 else f"the first of {len(items)} is used, the others are ignored, as in SLM Lab v4"
    report.note(path, f"a list (v4 form); {used}")
    section[str(path[-1])] = items[0]
    report.record_move(path, (*path, 0))


def _move_key(raw: dict[str, Any], old: KeyPath, new: KeyPath, report: Report) -> None:
    """Move a value of a raw spec from the path `old` to the path `new`, unless there is already a value at `new`."""
    value = _section_at(raw, *old[:-1]).pop(str(old[-1]), None)
    if value is None:
        return
    section: Any = raw
    for key in new[:-1]:
        section = section.setdefault(key, {}) if isinstance(section, dict) else None
    shared = next(depth for depth, key in enumerate(new) if key != old[depth])
    message = f"old name of '{show_path(new[shared:])}'"
    if not isinstance(section, dict) or section.get(str(new[-1])) is not None:
        report.note_ineffective_key(old, f"{message}, which is also set; ignored")
        return
    report.note(old, message)
    section[str(new[-1])] = value
    report.record_move(new, old)


def _replace_value(raw: dict[str, Any], path: KeyPath, current: Callable[[str], str], report: Report) -> None:
    """Replace the string at `path` by `current(string)`, and add a note if the two strings differ."""
    section, key = _section_at(raw, *path[:-1]), str(path[-1])
    old = section.get(key)
    if isinstance(old, str) and (new := current(old)) != old:
        section[key] = new
        report.replaced[path] = old
        report.note(path, f"'{old}' is now '{new}'")


def _rename_type(net: dict[str, Any], location: KeyPath, report: Report) -> None:
    """Rename the key `type` of a net to `name`, without a note, because both keys are valid."""
    if "type" not in net:
        return
    kind = net.pop("type")
    if net.get("name") is not None and net["name"] != kind:
        report.add_problem((*location, "type"), f"{format_json(kind)} differs from name {format_json(net['name'])}; remove one of them")
    net["name"] = kind
    report.record_move((*location, "name"), (*location, "type"))
