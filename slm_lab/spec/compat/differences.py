"""Recognise specs that were written for the library SLM Lab (v4, v5), and notify the user of each key that has another meaning in this
package, slm_lab."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from slm_lab.spec.compat.env_ids import KNOWN, current_id, envpool_envs
from slm_lab.spec.models.algorithm import ActorCriticSpec, PPOSpec, QLearningSpec, ReplayAlgorithmSpec, SARSASpec
from slm_lab.spec.models.base import LinearDecay, NoDecay, PeriodicDecay, RateDecay, Schedule
from slm_lab.spec.models.memory import PriorityKeys, SILReplayKeys
from slm_lab.spec.models.net import DuelingMLPNetSpec, NetSpec, TorchArcNetSpec
from slm_lab.spec.models.spec import Spec
from slm_lab.spec.report import KeyPath, Report, value_at

_ENV: KeyPath = ("env", "name")
_ENVS: KeyPath = ("env", "num_envs")
_ALGORITHM: KeyPath = ("agent", "algorithm")
_NET: KeyPath = ("agent", "net")


def is_for_slm_lab(raw: dict[str, Any]) -> bool:
    """Return whether a raw spec (parsed JSON) was written for the library SLM Lab instead of this package.

    A spec for SLM Lab v4 is recognised by a list at the key `agent` or `env`. A spec for SLM Lab v5 is recognised by the key agent.net.type
    together with the keys meta.distributed and meta.max_trial (the value of meta.max_trial may be null). A spec that a run of this package
    saved is never recognised as a spec for SLM Lab, because older versions of this package wrote the same keys.
    """
    if any(isinstance(raw.get(key), list) for key in ("agent", "env")):
        return True
    meta = value_at(raw, ("meta",))
    if not isinstance(meta, dict) or meta.get("run") is not None:
        return False
    return value_at(raw, ("agent", "net", "type")) is not None and meta.get("distributed") is not None and "max_trial" in meta


SIZES = ("time_horizon", "minibatch_size")
"""Keys of PPO that SLM Lab rounds up to multiples of num_envs."""


def adapt_slm_lab_spec(raw: dict[str, Any], report: Report) -> dict[str, Any]:
    """Replace values of a raw spec that have a meaning only in SLM Lab, in place, and add notes on these values and on old env ids to
    `report`."""
    _note_old_atari(value_at(raw, ("env",)), report)
    _adapt_playground_env(value_at(raw, ("env",)), report)
    for key in ("net", "critic_net"):
        if isinstance(net := value_at(raw, ("agent", key)), dict):
            _round_frequency(net, ("agent", key), report)
            if report.for_slm_lab and value_at(raw, ("meta", "distributed")):
                _replace_lookahead(net, ("agent", key), report)
    algorithm, meta = value_at(raw, _ALGORITHM), value_at(raw, ("meta",))
    if report.for_slm_lab and isinstance(meta, dict):
        meta.setdefault("rigorous_eval", 0)  # SLM Lab does not evaluate by default
        if isinstance(meta["rigorous_eval"], bool):
            _convert_rigorous_eval(meta, value_at(raw, ("env", "num_envs")) or 1, report)
    if report.for_slm_lab and isinstance(algorithm, dict):
        if algorithm.get("name") in ("PPO", "PPOSIL"):
            _round_sizes(algorithm, value_at(raw, ("env", "num_envs")), report)
        for key, schedule in algorithm.items():
            if isinstance(schedule, dict) and schedule.get("name") == "no_decay":
                _adapt_no_decay(schedule, (*_ALGORITHM, key), report)
    return raw


def _note_old_atari(env: Any, report: Report) -> None:
    """Add notes to `report` on the differences between an Atari env and the env that the old Atari id in the spec file named.

    A difference is not noted if keys of the section `env` already determine the behaviour that differs.
    """
    old = report.replaced.get(_ENV, "")
    if not isinstance(env, dict) or not str(env.get("name")).startswith("ALE/") or current_id(old) != env["name"]:
        return
    if old.endswith("-v4") and "repeat_action_probability" not in env:
        message = "sticky actions: an action is repeated with a probability of 0.25"
        message += f", which '{old}' never does; set env.repeat_action_probability to 0.0 to prevent it"
        report.note(_ENV, message)
        report.note_difference(_ENV, "old Atari ids", message)
    if "NoFrameskip" in old and not env.keys() & {"life_loss_info", "episodic_life", "obs_type"}:
        message = "a lost life does not end an episode; in training with SLM Lab v4 it does; set env.life_loss_info to true for that"
        report.note_difference(_ENV, "old Atari ids", message)


def _adapt_playground_env(env: Any, report: Report) -> None:
    """Add a note to `report` that an env of MuJoCo Playground runs with the physics of C MuJoCo.

    As in SLM Lab, the agent receives only the entry `state` of the env's observations.
    """
    if not isinstance(env, dict) or not report.replaced.get(_ENV, "").startswith("playground/") or env.get("name") not in envpool_envs():
        return
    only_state = ""
    if "privileged_state" in envpool_envs()[env["name"]].observation and not {"obs_keys"} & env.keys():
        env["obs_keys"] = ["state"]
        only_state = '; env.obs_keys is set to ["state"], the part that SLM Lab observes'
    if env["name"] == "PendulumSwingup-v1" and "frame_skip" not in env:
        only_state = "; SLM Lab repeats each action four times (env.frame_skip), and adds the rewards"
    report.note(_ENV, f"runs in EnvPool on the CPU: physics is C MuJoCo, not MJX{only_state}")


def _convert_rigorous_eval(meta: dict[str, Any], envs: Any, report: Report) -> None:
    """Replace the value true of meta.rigorous_eval by the number of envs `envs`, and the value false by 0."""
    if meta["rigorous_eval"]:
        report.note(("meta", "rigorous_eval"), f"true evaluates in num_envs environments in SLM Lab; {envs} is used")
    meta["rigorous_eval"] = envs if meta["rigorous_eval"] else 0


def _round_sizes(algorithm: dict[str, Any], envs: Any, report: Report) -> None:
    """Round time_horizon and minibatch_size of PPO up to multiples of num_envs, as SLM Lab does."""
    if not isinstance(envs, int) or envs < 2:
        return
    for key in SIZES:
        size, path = algorithm.get(key), (*_ALGORITHM, key)
        whole = round_up_to_envs(size, envs)
        if whole != size and not report.is_from_set_argument(path):
            algorithm[key] = whole
            report.note(path, f"{size} is rounded up to a multiple of num_envs ({envs}) in SLM Lab; {algorithm[key]} is used")


def round_up_to_envs(size: Any, envs: int) -> Any:
    """Round `size` up to a multiple of `envs` if `size` is a positive integer. Any other value is returned unchanged."""
    if not isinstance(size, int) or isinstance(size, bool) or size <= 0:
        return size
    return -(-size // envs) * envs


def _round_frequency(net: dict[str, Any], location: KeyPath, report: Report) -> None:
    """Replace an update_frequency below 1 by 1, because SLM Lab updates the target net in each vector step if update_frequency is below
    1."""
    path, value = (*location, "update_frequency"), net.get("update_frequency")
    if isinstance(value, float) and 0 < value < 1 and not report.is_from_set_argument(path):
        report.note(path, f"{value:g} has the same effect as 1: an update in each vector step")
        net["update_frequency"] = 1


def _replace_lookahead(net: dict[str, Any], location: KeyPath, report: Report) -> None:
    """Replace the optimizer Lookahead by the optimizer that it wraps, because in SLM Lab v4 processes share only the wrapped optimizer."""
    for key in ("optim_spec", "actor_optim_spec", "critic_optim_spec"):
        optim = net.get(key)
        if isinstance(optim, dict) and optim.get("name") == "Lookahead" and not report.is_from_set_argument((*location, key)):
            inner = optim.get("optimizer", "Adam")
            net[key] = {"name": inner, **{name: optim[name] for name in optim.keys() - {"name", "optimizer", "k", "alpha"}}}
            why = "Lookahead would reset the global net to the slow weights of one Session"
            report.note_difference((*location, key), "Lookahead with distributed", f"{why}; {inner} is used")


def _adapt_no_decay(schedule: dict[str, Any], path: KeyPath, report: Report) -> None:
    """Set start_val of a no_decay schedule to end_val, because SLM Lab uses end_val as the constant value from the second step on."""
    start, end = schedule.get("start_val"), schedule.get("end_val")
    if end and end != start and not report.is_from_set_argument(path):
        schedule["start_val"] = end
        report.note((*path, "start_val"), f"no_decay is end_val in SLM Lab; {end} is used")


Notes = Iterator[tuple[KeyPath, str, str]]
"""Iterator over differences from SLM Lab. Each difference is a tuple (path of the key, short description, message)."""


def note_differences(spec: Spec, report: Report) -> None:
    """If the spec was written for SLM Lab, add a note to `report` for each difference between training with this spec in SLM Lab and in
    this package."""
    if report.for_slm_lab and spec.agent.algorithm.learns:
        for rule in RULES:
            for path, topic, message in rule(spec):
                report.note_difference(path, topic, message)


def _note_episodes(spec: Spec) -> Notes:
    algorithm, atari = spec.agent.algorithm, spec.env.name.startswith("ALE/")
    if not atari and (algorithm.on_policy or spec.env.num_envs == 1):
        theirs = "runs on into the next episode" if algorithm.on_policy else "uses the first observation of the next episode"
        message = f"returns cut by a time limit include the value of the last observation; SLM Lab {theirs}"
        yield _ENV, "time limits", message
    if spec.env.max_t is not None:
        yield ("env", "max_t"), "max_t", f"ends episodes after {spec.env.max_t} steps; SLM Lab ignores it"
    if spec.env.num_envs > 1:
        yield _ENVS, "rows of resets", "the step in which an env resets is not trained on; SLM Lab trains on it"
    else:
        message = "total_reward is the mean of the last 100 episodes; in SLM Lab, with 1 env, it is that of the last episode"
        yield _ENVS, "total_reward", message
    if atari and spec.env.num_envs == 1:
        message = "with 1 env, SLM Lab takes no maximum over two frames, does not press FIRE and ignores life_loss_info"
        message += "; here, 1 env is treated like several"
        yield _ENVS, "Atari with one environment", message


def _note_actions(spec: Spec) -> Notes:
    algorithm = spec.agent.algorithm
    name = spec.env.name
    has_cost = (KNOWN.get(name) == "mujoco" and not name.startswith("Inverted")) or name.startswith("MountainCarContinuous-")
    if algorithm.on_policy and has_cost:
        message = "actions outside the bounds of the env are clipped; SLM Lab passes them on, and their cost enters the reward"
        yield _ENV, "actions outside the bounds", message
    if algorithm.action_pdtype == "MultivariateNormal":
        message = "has a full covariance; in SLM Lab, a diagonal covariance, whose variances are the exponentials of the net's outputs"
        yield (*_ALGORITHM, "action_pdtype"), "MultivariateNormal", message
    if isinstance(algorithm, PPOSpec) and algorithm.action_policy != "default":
        message = "probability ratios use the distributions from which actions were chosen; SLM Lab uses the distributions of the nets"
        yield (*_ALGORITHM, "action_policy"), "exploration", message


def _note_rewards(spec: Spec) -> Notes:
    env, atari = spec.env, spec.env.name.startswith("ALE/")
    if isinstance(env.reward_scale, float) and env.reward_scale != 1.0:
        yield ("env", "reward_scale"), "reward_scale", "scales the rewards; SLM Lab does so in envs of MuJoCo Playground only"
    if atari and env.clip_reward is not None and env.num_envs > 1:
        yield ("env", "clip_reward"), "clip_reward", "is used; SLM Lab always clips Atari rewards at ±1, regardless of the given value"
    if atari and env.clip_reward is None and env.num_envs == 1:
        yield _ENV, "clip_reward", "Atari rewards are replaced by their signs; SLM Lab does not clip them with 1 env"
    if env.normalize_reward:
        ours = "discounted returns restart after each episode"
        theirs = "in SLM Lab they continue over time limits, and at a terminal step are that step's reward alone"
        yield ("env", "normalize_reward"), "normalize_reward", f"{ours}; {theirs}"


def _note_memory(spec: Spec) -> Notes:
    memory, path = spec.agent.memory, ("agent", "memory", "name")
    if not spec.agent.algorithm.on_policy and not spec.env.name.startswith("ALE/"):
        yield path, "precision of the replay", "stores observations as float32; SLM Lab rounds them to float16"
    replay = memory.sil_replay if isinstance(memory, SILReplayKeys) and spec.agent.algorithm.self_imitation else memory
    if isinstance(replay, PriorityKeys):
        message = (
            "sampling is stratified (one transition from each of batch_size equal parts of the sum of priorities); in SLM Lab, independent"
        )
        yield path, "prioritised draws", message
    if isinstance(replay, PriorityKeys) and spec.agent.net is not None and spec.agent.net.recurrent:
        if replay.beta is None:
            message = (
                "beta is absent: sequences get importance weights with exponent 0.4; SLM Lab has no sequence replay and uses no weights"
            )
            yield path, "priorities of sequences", message
        if replay.initial_error is None:
            theirs = "in SLM Lab, which stores no sequences, a new transition has the priority of an error of 100,000"
            yield path, "priorities of sequences", f"a new sequence has the greatest priority so far; {theirs}"


def _note_learning(spec: Spec) -> Notes:
    algorithm = spec.agent.algorithm
    given = algorithm.model_fields_set
    if algorithm.name == "DQN":
        yield (*_ALGORITHM, "name"), "DQN", "takes the maximum of the target net; in SLM Lab DQN is DoubleDQN"
    if "minibatch_size" in type(algorithm).model_fields and "minibatch_size" not in given:
        yield (*_ALGORITHM, "minibatch_size"), "minibatch_size", "is absent: 64 is used; SLM Lab uses 4"
    if isinstance(algorithm, PPOSpec):
        size, rollout = algorithm.minibatch_size, spec.agent.rollout_len * spec.env.num_envs
        if size < rollout and rollout % size:
            message = f"the {rollout} transitions of a rollout are divided evenly; in SLM Lab the last minibatch has {rollout % size}"
            yield (*_ALGORITHM, "minibatch_size"), "minibatches", message
    if getattr(algorithm, "normalize_advantages", None) is False:
        message = "false: advantages are not normalised; SLM Lab standardises them nevertheless"
        yield (*_ALGORITHM, "normalize_advantages"), "normalize_advantages", message
    yield from _note_training_start(spec)
    if isinstance(algorithm, SARSASpec) and not spec.agent.memory.episodes:
        message = "the action after the last step of a rollout is drawn from the policy; in SLM Lab it is action 0"
        yield (*_ALGORITHM, "name"), "SARSA", message
    if algorithm.self_imitation:
        message = "actor and critic learn from the returns of complete episodes; SLM Lab sums rewards over shuffled transitions"
        yield (*_ALGORITHM, "name"), "self-imitation", message
    if (
        isinstance(algorithm, ActorCriticSpec)
        and algorithm.lam is None
        and algorithm.num_step_returns is None
        and not spec.agent.memory.episodes
    ):
        message = "lam and num_step_returns are absent: returns cut by the end of the rollout are bootstrapped with the critic's value"
        message += "; SLM Lab ends them there"
        yield _ALGORITHM, "returns at the end of a rollout", message
    if isinstance(algorithm, ActorCriticSpec) and algorithm.lam is None and algorithm.num_step_returns and spec.agent.memory.episodes:
        message = "every step has its n-step return; in SLM Lab only the first n steps of a batch have one"
        yield (*_ALGORITHM, "num_step_returns"), "num_step_returns", message
    if isinstance(algorithm, QLearningSpec):
        yield from _note_exploration(algorithm, spec.env.num_envs)
    if algorithm.action_pdtype == "NormalTanh":
        yield (*_ALGORITHM, "action_pdtype"), "NormalTanh", "tanh of a Normal; SLM Lab v5.3 has no such distribution"


def _note_exploration(algorithm: QLearningSpec, num_envs: int) -> Notes:
    given = algorithm.model_fields_set
    if "action_policy" not in given:
        theirs = "takes the best action" if "action_pdtype" in given and algorithm.action_pdtype == "Argmax" else "samples softmax(Q)"
        yield _ALGORITHM, "exploration", f"action_policy is absent: epsilon_greedy is used; SLM Lab {theirs}"
    elif algorithm.action_policy == "epsilon_greedy" and num_envs > 1:
        message = "each env explores independently; in SLM Lab, either all envs or no envs explore in a vector step"
        yield (*_ALGORITHM, "action_policy"), "exploration", message
    elif algorithm.action_policy == "default" and "action_pdtype" not in given:
        yield (*_ALGORITHM, "action_pdtype"), "exploration", "is absent: the best action is taken; SLM Lab samples from softmax(Q)"


def _note_training_start(spec: Spec) -> Notes:
    algorithm = spec.agent.algorithm
    if isinstance(algorithm, ReplayAlgorithmSpec):
        every, envs = algorithm.training_frequency, spec.env.num_envs
        first, first_there = transitions_at_first_update(spec.agent.training_start, every, envs)
        if first != first_there:
            message = f"training begins after {first} transitions at the earliest; in SLM Lab after {first_there}"
            yield (*_ALGORITHM, "training_start_step"), "start of training", message
        if every > envs:
            message = f"trains when the number of transitions reaches a multiple of {every}; SLM Lab trains one transition later"
            yield (*_ALGORITHM, "training_frequency"), "start of training", message


def transitions_at_first_update(start: int, every: int, envs: int) -> tuple[int, int]:
    """Return the number of stored transitions at the first update from a replay buffer, as a tuple (number in this package, number in SLM
    Lab).

    From training_start_step transitions on, this package trains in each vector step in which the number of transitions reaches a multiple
    of training_frequency. SLM Lab trains in the vector step that contains the transition after a multiple of training_frequency, if more
    than training_start_step transitions were stored.
    """
    ours = round_up_to_envs(max(start, 1), envs)
    if ours // every == (ours - envs) // every:
        ours = round_up_to_envs((ours // every + 1) * every, envs)
    return ours, round_up_to_envs(-(-start // every) * every + 1, envs)


def _note_schedules(spec: Spec) -> Notes:
    for key in type(spec.agent.algorithm).model_fields:
        schedule = getattr(spec.agent.algorithm, key)
        if key not in spec.agent.algorithm.model_fields_set or not isinstance(schedule, LinearDecay | RateDecay | PeriodicDecay):
            continue
        if theirs := _describe_slm_lab_schedule(schedule):
            yield (*_ALGORITHM, key), "schedules", f"goes from {schedule.start_val:g} to {schedule.end_val:g}; in SLM Lab {theirs}"


def _describe_slm_lab_schedule(schedule: Schedule) -> str:
    """Return a description of how SLM Lab interprets a schedule, or "" if slm_lab interprets the schedule in the same way."""
    if isinstance(schedule, NoDecay) or schedule.start_val == schedule.end_val:
        return ""
    if schedule.end_val == 0:
        return "an end_val of 0 is not read: it stays at start_val"
    if isinstance(schedule, PeriodicDecay):
        return "periodic_decay is constant"
    if isinstance(schedule, RateDecay):
        return "rate_decay jumps at its end"
    return "it is end_val from start_step on" if schedule.end_val > schedule.start_val else ""


def _note_nets(spec: Spec) -> Notes:
    net: NetSpec | None = spec.agent.net
    if net is None:
        return
    if net.recurrent:
        repeated = "SLM Lab repeats one observation seq_len times"
        yield (*_NET, "type"), "RecurrentNet", f"carries a hidden state over the steps of an episode; {repeated}"
    algorithm = spec.agent.algorithm
    for key in ("actor_init_std", "critic_init_std"):
        if getattr(net, key, None) is not None:
            theirs = "drops it" if algorithm.has_critic and not algorithm.soft else "uses it for nets with several outputs only"
            yield (*_NET, key), "initialisation of the output layers", f"is used; SLM Lab {theirs}"
    if net.log_std_init is not None:
        message = "is used for every continuous action; SLM Lab ignores it with one dimension, and in a shared net"
        yield (*_NET, "log_std_init"), "log_std_init", message
    yield from _note_normalised_layers(spec, net)
    if getattr(net, "out_layer_activation", None) is not None and net.dueling:
        message = "is applied to the advantages; SLM Lab ignores it in a dueling net"
        yield (*_NET, "out_layer_activation"), "out_layer_activation", message
    elif getattr(net, "out_layer_activation", None) is not None and algorithm.has_critic:
        yield (*_NET, "out_layer_activation"), "out_layer_activation", "applies to the policy; in SLM Lab, it also applies to values"
    if getattr(net, "normalize", False) and not spec.env.name.startswith("ALE/"):
        yield (*_NET, "normalize"), "normalize", "divides observations of type uint8 by 255; SLM Lab divides all observations"
    if net.lr_scheduler_spec is not None and net.lr_scheduler_spec.name == "LinearToZero":
        theirs = "it is one update behind, so that the first update has the full learning rate"
        if spec.agent.memory.episodes:
            theirs = "with this memory the schedule counts episodes as steps, so that the learning rate hardly falls"
        yield (*_NET, "lr_scheduler_spec"), "LinearToZero", f"follows the number of collected frames; in SLM Lab, {theirs}"


def _note_normalised_layers(spec: Spec, net: NetSpec) -> Notes:
    ours = "acts" if _is_crossq(spec) and spec.agent.critic_net is None else "acts and computes targets"
    theirs = f"{ours} with moving averages; SLM Lab uses the statistics of the batch"
    dueling = isinstance(net, DuelingMLPNetSpec)
    if getattr(net, "batch_norm", False):
        yield (*_NET, "batch_norm"), "batch_norm", "is used; SLM Lab ignores it in a DuelingMLPNet" if dueling else theirs
    if getattr(net, "layer_norm", False) and (dueling or getattr(net, "batch_norm", False)):
        where = "in a DuelingMLPNet" if dueling else "with batch_norm"
        yield (*_NET, "layer_norm"), "layer_norm", f"is used; SLM Lab ignores it {where}"
    if isinstance(net, TorchArcNetSpec):
        message = "for actions and targets, batch normalisation and dropout are in evaluation mode; in SLM Lab, they are in training mode"
        for key in ("arc", "actor_arc", "critic_arc"):
            arc, as_theirs = str(getattr(net, key) or ""), key == "critic_arc" and _is_crossq(spec)
            if "Dropout" in arc or ("Batch" in arc and not as_theirs):
                yield (*_NET, key), "batch_norm", message


def _is_crossq(spec: Spec) -> bool:
    return spec.agent.algorithm.soft and not spec.agent.algorithm.has_target


def _note_actor_and_critic(spec: Spec) -> Notes:
    net, critic_net, algorithm = spec.agent.net, spec.agent.critic_net, spec.agent.algorithm
    if net is None:
        return
    if algorithm.soft:
        if critic_net is not None and not _is_crossq(spec):
            yield ("agent", "critic_net"), "critic_net", "is used; SLM Lab ignores it"
        elif critic_net is not None and critic_net.loss_spec != net.loss_spec:
            yield ("agent", "critic_net", "loss_spec"), "loss_spec", "is the loss of the critics; SLM Lab uses agent.net.loss_spec"
        own = ["actor_optim_spec", "actor_lr_scheduler_spec", "actor_arc"]
        own += ["critic_optim_spec", "critic_lr_scheduler_spec", "critic_arc"] if critic_net is None else []
        one_optimizer = net.use_same_optim and "use_same_optim" in net.model_fields_set  # if it is absent, these keys set it to false
        for key in own:
            if getattr(net, key, None) is not None and (key.endswith("arc") or not one_optimizer):
                yield (*_NET, key), "optimizers of actor and critics", "is used; SLM Lab ignores it"
    elif isinstance(net, TorchArcNetSpec) and algorithm.has_critic and net.use_same_optim and net.critic_arc != net.actor_arc:
        message = "is the architecture of the critic; with use_same_optim, SLM Lab uses the architecture of the actor"
        yield (*_NET, "critic_arc"), "critic_arc", message


def _note_meta(spec: Spec) -> Notes:
    meta = spec.meta
    if meta.distributed:
        message = "schedules and learning rates count the frames of all Sessions, and each update has its own gradient; in SLM Lab"
        yield ("meta", "distributed"), "distributed", f"{message}, they count the frames of each Session, and 'synced' adds gradients up"
    if meta.rigorous_eval and meta.rigorous_eval != spec.env.num_envs:
        message = f"evaluates in {meta.rigorous_eval} environments; SLM Lab evaluates in num_envs ({spec.env.num_envs})"
        yield ("meta", "rigorous_eval"), "evaluation", message
    if meta.rigorous_eval and spec.agent.algorithm.soft:
        yield ("meta", "rigorous_eval"), "evaluation", "evaluates the policy; SLM Lab acts at random in its first evaluations"
    if meta.rigorous_eval and spec.env.num_envs > 1:
        message = "total_reward of an evaluation is the mean over its episodes; in SLM Lab, over the last 100 episodes of all evaluations"
        yield ("meta", "rigorous_eval"), "evaluation", message
    if meta.rigorous_eval and spec.env.normalize_obs:
        message = "evaluation uses the observation statistics of training; SLM Lab collects separate statistics in evaluation"
        yield ("meta", "rigorous_eval"), "normalisation in evaluation", message


RULES: tuple[Callable[[Spec], Notes], ...] = (
    _note_episodes,
    _note_actions,
    _note_rewards,
    _note_memory,
    _note_learning,
    _note_schedules,
    _note_nets,
    _note_actor_and_critic,
    _note_meta,
)
"""Functions, each of which yields the differences from SLM Lab in one aspect of a spec."""
