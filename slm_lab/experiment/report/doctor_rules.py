"""The rules of the doctor: each looks for one fault in one session, and names the key to change.

A rule returns a Finding, None if it finds nothing, or raises NotMeasured if the run has no data for it. Thresholds leave room around what
the shipped specs show, so that a finding is worth reading; docs/doctor.md lists them with their reasons.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from slm_lab.experiment.report.doctor_case import Case, Session, Window, concerns, require
from slm_lab.experiment.report.sampler import bottleneck as busiest

Severity = Literal["problem", "warning", "remark"]
"""problem: training cannot work well like this; warning: it probably costs performance; remark: nothing is wrong with the training."""


@dataclass(frozen=True)
class Finding:
    """One fault that a rule found."""

    rule: str
    """Name of the rule."""
    title: str
    severity: Severity
    evidence: str
    """What was measured, with its usual values."""
    advice: str
    """What to change, in a sentence."""
    key: str | None = None
    """Path of the key to change; None if no key helps."""
    value: Any = None
    """A value to try."""
    sessions: tuple[int, ...] = ()
    """Sessions with the fault; empty: it concerns the trial as a whole."""
    frames: tuple[int, int] | None = None
    """First and last frame of the evidence."""


def _number(value: float) -> str:
    return f"{value:,.0f}" if 1000 <= abs(value) < 1e7 else f"{value:.3g}"


def _rounded(value: float) -> float:
    """Return a value with one significant digit, as a user would write it."""
    return float(f"{value:.1g}")


def _range(window: Window) -> str:
    first, last = window.frames
    return f"(median of frames {first:,} to {last:,})"


# ---- settings that contradict the env


def discount(session: Session) -> Finding | None:
    """γ so low that rewards beyond a few steps do not count: 1 / (1 − γ) is under 10 steps and a tenth of an episode, or under 2 steps.

    Andrychowicz et al. 2021 (arXiv:2006.05990), section 3.6: the discount factor is among the choices that matter most; start with 0.99.
    """
    horizon, length = session.case.horizon, session.episode_length
    if horizon >= min(MIN_HORIZON, max(0.1 * length, 2.0)) or length < 5.0:
        return None
    return Finding(
        "discount",
        "The discount factor hides all but the next rewards",
        "problem",
        f"gamma counts rewards over 1 / (1 - gamma) = {_number(horizon)} steps; episodes have {_number(length)}",
        "raise the discount factor",
        "agent.algorithm.gamma",
        0.99,
    )


def time_limit(session: Session) -> Finding | None:
    """Nearly every episode is cut by a time limit that is shorter than half of the horizon 1 / (1 − γ).

    Pardo et al. 2018 (arXiv:1712.00378): the agent never sees what follows the limit, only its own estimate of it.
    """
    truncated, longest = session.late("epi_truncated"), session.late("epi_len_max")
    limit, horizon = longest.median, session.case.horizon
    if truncated.median < 0.95 or limit >= 0.5 * min(horizon, MAX_HORIZON):
        return None
    return Finding(
        "time_limit",
        "Episodes are cut before actions show their effect",
        "problem",
        f"{100 * truncated.median:.0f} % of the episodes are truncated after {_number(limit)} steps or less; "
        f"gamma counts rewards over {_number(horizon)} steps",
        "raise the time limit (null: the env's own)",
        "env.max_t",
        None,
        frames=truncated.frames,
    )


def truncation(session: Session) -> Finding | None:
    """Episodes end at one and the same length, but count as terminated: a time limit that the env reports as termination.

    The value after the end is then taken for 0, although the episode would have gone on. Pardo et al. 2018 (arXiv:1712.00378).
    """
    truncated, longest = session.late("epi_truncated"), session.late("epi_len_max")
    limit = float(longest.curve.value.max())
    share = float(np.mean(longest.curve.value == limit))
    if truncated.curve.value.any() or limit < 20 or share < 0.5 or len(longest.curve.value) < 5:
        return None
    return Finding(
        "truncation",
        "A time limit seems to be reported as termination",
        "warning",
        f"no episode is truncated, yet in {100 * share:.0f} % of the rows the longest episode has exactly {_number(limit)} steps",
        "return truncated, not terminated, at the env's time limit, or let the run set the limit",
        "env.max_t",
        int(limit),
        frames=longest.frames,
    )


def reward_scale(session: Session) -> Finding | None:
    """Value targets above 5,000 without normalisation: the value loss dwarfs all else, and Adam takes long to reach such values.

    van Hasselt et al. 2016 (arXiv:1602.07714); Henderson et al. 2018 (arXiv:1709.06560), on reward scale; Engstrom et al. 2020
    (arXiv:2005.12729), on reward normalisation.
    """
    case = session.case
    handled = case.setting("env.normalize_reward") or case.setting("env.clip_reward") or case.setting("env.reward_scale") == "sign"
    concerns(not handled and not str(case.setting("env.name")).startswith("ALE/"), "rewards are clipped or normalised")
    length, scale = session.episode_length, case.number("env.reward_scale", 1.0)
    target = scale * abs(session.returns.median) * min(1.0, case.horizon / length)
    if target < MAX_TARGET:
        return None
    on_policy = case.algorithm.on_policy
    return Finding(
        "reward_scale",
        "Rewards are large and not normalised",
        "problem",
        f"returns of {_number(session.returns.median)} in episodes of {_number(length)} steps: values of about {_number(target)} "
        f"(usual: up to {_number(MAX_TARGET)})",
        "normalise rewards" if on_policy else "scale rewards down",
        "env.normalize_reward" if on_policy else "env.reward_scale",
        True if on_policy else _rounded(100.0 * scale / target),
        frames=session.returns.frames,
    )


def observation_scale(session: Session) -> Finding | None:
    """An entry of the observations with a root mean square above 100 without normalisation: it saturates or dominates the first layer.

    Andrychowicz et al. 2021 (arXiv:2006.05990), section 3.3: normalise observations; LeCun et al. 1998, Efficient BackProp.
    """
    obs = session.experience["obs"]
    concerns(obs.dtype != np.uint8, "observations are images")
    rows = obs.reshape(len(obs), -1).astype(np.float64)
    scale = np.sqrt(np.mean(rows * rows, axis=0))
    largest = int(np.argmax(scale)) if len(scale) else 0
    if not len(scale) or scale[largest] < MAX_OBSERVATION:
        return None
    return Finding(
        "observation_scale",
        "Observations are large and not normalised",
        "problem" if scale[largest] > 2 * MAX_OBSERVATION else "warning",
        f"entry {largest} of the observation has a root mean square of {_number(scale[largest])} over {len(rows)} steps (usual: about 1)",
        "normalise observations",
        "env.normalize_obs",
        True,
        frames=(session.last_frame, session.last_frame),
    )


# ---- how often and with which data the agent learns


def replay_ratio(session: Session) -> Finding | None:
    """Each transition is replayed less than 0.5 times on average, or there are more than 8 gradient steps per frame.

    Mnih et al. 2015 use each transition 8 times (a step on 32 transitions after every 4); Fedus et al. 2020 (arXiv:2007.06700) on the
    replay ratio; Nikishin et al. 2022 (arXiv:2205.07802): with many steps per frame, agents overfit to their first data.
    """
    case = session.case
    concerns(not case.algorithm.on_policy, "only for algorithms with a replay buffer")
    steps, batch = session.steps_per_frame, case.number("agent.memory.batch_size", 32.0)
    if steps * batch >= MIN_REPLAYS and steps <= MAX_STEPS_PER_FRAME:
        return None
    few = steps * batch < MIN_REPLAYS
    every, repeat = case.number("agent.algorithm.training_frequency", 1.0), case.number("agent.algorithm.training_iter", 1.0)
    key, value = ("training_frequency", max(1, round(every * steps * batch / 8.0))) if few else ("training_iter", 1)
    if not few and repeat <= 1:
        key, value = "training_frequency", math.ceil(every * steps)
    return Finding(
        "replay_ratio",
        "The agent learns rarely from what it collects" if few else "The agent learns very often from the same data",
        "problem" if steps * batch < 0.1 * MIN_REPLAYS or steps > 2 * MAX_STEPS_PER_FRAME else "warning",
        f"{_number(steps)} gradient steps per frame with batches of {batch:.0f}: each transition is used {_number(steps * batch)} times "
        "(usual: 8 to 256 times, at most a few steps per frame)",
        "train more often" if few else "train less often",
        f"agent.algorithm.{key}",
        value,
        frames=(session.last_frame // 2, session.last_frame),
    )


def policy_lag(session: Session) -> Finding | None:
    """Rollout workers deliver data that is many datasets old, or a tenth of it is discarded for its age.

    Espeholt et al. 2018 (arXiv:1802.01561): returns fall with policy lag, less so with V-trace; Petrenko et al. 2020 (arXiv:2006.11751).
    """
    case, lag = session.case, session.late("lag_mean")
    per_dataset = case.number("meta.sampler.num_batches_per_epoch", 1.0) * case.number("agent.algorithm.training_epoch", 1.0)
    masked = session.late("lag_masked").median
    if lag.median <= MAX_LAG * per_dataset and masked < 0.1:
        return None
    waiting = case.number("meta.sampler.num_batches_to_accumulate", 2.0)
    fewer = waiting > 1
    return Finding(
        "policy_lag",
        "The data is from an old policy",
        "problem" if masked >= 0.5 or lag.median > 4 * MAX_LAG * per_dataset else "warning",
        f"policy lag of {_number(lag.median)} gradient steps, {_number(lag.median / per_dataset)} datasets {_range(lag)}; "
        f"{100 * masked:.0f} % of the transitions discarded (usual: under {MAX_LAG:.0f} datasets)",
        "let fewer datasets wait for the learner" if fewer else "collect with fewer envs at a time",
        "meta.sampler.num_batches_to_accumulate" if fewer else "meta.sampler.num_envs_per_worker",
        1 if fewer else max(1, int(case.number("meta.sampler.num_envs_per_worker", 8.0) // 2)),
        frames=lag.frames,
    )


def staleness(session: Session) -> Finding | None:
    """Between pull and push of a worker, more updates of others happen than twice the number of other workers.

    Mnih et al. 2016 (arXiv:1602.01783); Ho et al. 2013 (stale synchronous parallel): convergence needs bounded staleness.
    """
    stale, workers = session.late("staleness"), session.case.number("meta.max_session", 1.0)
    if stale.mean <= 2.0 * max(workers - 1.0, 1.0):
        return None
    return Finding(
        "staleness",
        "Workers learn with outdated weights",
        "warning",
        f"{_number(stale.mean)} updates of others on average between pull and push of a worker, of {workers:.0f} workers",
        "let one worker at a time update",
        "meta.hogwild_lock",
        True,
        frames=stale.frames,
    )


# ---- how the policy changes


def clipping(session: Session) -> Finding | None:
    """PPO's ε does not fit the size of the updates: nearly all ratios are clipped though the policy hardly changes, or none though it does.

    Schulman et al. 2017 (arXiv:1707.06347), ε = 0.2; Andrychowicz et al. 2021 (arXiv:2006.05990), section 3.1: start with 0.25.
    """
    clipped, change = _largest_half(session, "clip_fraction"), _largest_half(session, "approx_kl")
    path, eps = session.case.schedule("clip_eps_spec")
    tight = clipped.median > 0.5 and change.median < 0.01 and eps < 0.05
    loose = clipped.median < 0.05 and change.median > MAX_KL and eps > 0.5
    if not tight and not loose:
        return None
    return Finding(
        "clipping",
        "The clip range stops nearly every update" if tight else "The clip range limits no update",
        "problem",
        f"clip_fraction {_number(clipped.median)} (usual: 0.02 to 0.3) while approx_kl is {_number(change.median)} "
        f"(usual: 0.001 to 0.05) {_range(clipped)}",
        "set the clip range to its usual value",
        path,
        0.2,
        frames=clipped.frames,
    )


def large_updates(session: Session) -> Finding | None:
    """The policy changes much within an update of PPO: approx_kl above 0.1, or above 0.01 with clip_fraction above 0.5.

    Schulman et al. 2017 (arXiv:1707.06347), section 6.1: targets of 0.003 to 0.03 for the KL divergence; Engstrom et al. 2020
    (arXiv:2005.12729): clipping alone does not keep the policy in its trust region.
    """
    clipped, change = _largest_half(session, "clip_fraction"), _largest_half(session, "approx_kl")
    if change.median <= MAX_KL and not (clipped.median > MAX_CLIPPED and change.median > 0.1 * MAX_KL):
        return None
    path, rate = _learning_rate(session)
    factor = min(max(change.median / 0.02, 3.0), 100.0)
    return Finding(
        "large_updates",
        "The policy changes too much in each update",
        "problem",
        f"approx_kl {_number(change.median)} (usual: 0.001 to 0.05), clip_fraction {_number(clipped.median)} (usual: 0.02 to 0.3) "
        f"{_range(change)}",
        "lower the learning rate",
        path,
        _rounded(rate / factor),
        frames=change.frames,
    )


def small_updates(session: Session) -> Finding | None:
    """The policy hardly changes: in nine of ten rows approx_kl is below 1e-5 and no ratio is clipped.

    Schulman, Nuts and Bolts of Deep RL (2016): watch the KL divergence of updates; values of 0.003 to 0.03 are targets.
    """
    clipped, change = session.column("clip_fraction"), session.column("approx_kl")
    if change.quantile(0.9) >= MIN_KL or clipped.quantile(0.9) > 0.001:
        return None
    path, rate = _learning_rate(session)
    return Finding(
        "small_updates",
        "The policy hardly changes",
        "problem",
        f"approx_kl is below {_number(change.quantile(0.9))} in nine of ten rows (usual: 0.001 to 0.05), clip_fraction "
        f"{_number(clipped.quantile(0.9))}",
        "raise the learning rate",
        path,
        _rounded(max(10.0 * rate, min(100.0 * rate, 3e-4))),
        frames=change.frames,
    )


def entropy_high(session: Session) -> Finding | None:
    """The entropy stays above 95 % of its largest value in the second half, the bonus is on, and the return is that of a random agent.

    Mnih et al. 2016 (arXiv:1602.01783), a bonus of 0.01; Andrychowicz et al. 2021 (arXiv:2006.05990), section 3.8.
    """
    path, coef = session.case.schedule("entropy_coef_spec")
    entropy, largest = session.late("entropy"), float(session.column("entropy").curve.value.max())
    if coef <= 0.0 or entropy.median < 0.95 * largest or not _at_baseline(session):
        return None
    return Finding(
        "entropy_high",
        "The entropy bonus keeps the policy random",
        "problem",
        f"entropy {_number(entropy.median)} of at most {_number(largest)} {_range(entropy)}; entropy_coef starts at {_number(coef)} "
        f"(usual: 0 to 0.05), and the return of {_number(session.returns.median)} is that of a random agent",
        "lower the entropy bonus",
        path,
        _rounded(min(0.01, coef / 10.0)),
        frames=entropy.frames,
    )


def entropy_lost(session: Session) -> Finding | None:
    """The entropy of a categorical policy falls below 2 % of its first value in the first half of the run, and the return stays poor.

    Mnih et al. 2016 (arXiv:1602.01783), section 4: premature convergence to a deterministic policy; Ahmed et al. 2019 (arXiv:1811.11214).
    """
    path, coef = session.case.schedule("entropy_coef_spec")
    entropy = session.column("entropy")
    concerns(entropy.curve.value[0] > 0.0, "the entropy of continuous actions has no lower bound")
    low = entropy.curve.value < MIN_ENTROPY * entropy.curve.value[0]
    begin = int(np.argmin(low[::-1])) if not low.all() else len(low)
    since = len(low) - begin  # index of the first row after which all are low
    if begin < 2 or entropy.curve.frame[min(since, len(low) - 1)] > 0.5 * session.last_frame or not _is_poor(session):
        return None
    frame = int(entropy.curve.frame[since])
    return Finding(
        "entropy_lost",
        "The policy has stopped exploring",
        "problem",
        f"entropy is below {_number(MIN_ENTROPY * entropy.curve.value[0])}, {100 * MIN_ENTROPY:.0f} % of its first value, since frame "
        f"{frame:,}; the return since then is {_number(session.returns.median)}",
        "raise the entropy bonus" if coef < 0.01 else "lower the learning rate",
        path if coef < 0.01 else _learning_rate(session)[0],
        0.01 if coef < 0.01 else _rounded(_learning_rate(session)[1] / 10.0),
        frames=(frame, session.last_frame),
    )


def saturated_actions(session: Session) -> Finding | None:
    """At least 85 % of the components of continuous actions lie at or beyond the bounds, where all actions are equal for the env.

    Andrychowicz et al. 2021 (arXiv:2006.05990), section 3.2: the initial distribution should be narrow and centred; Chou et al. 2017
    (beta policies), on the bias of clipped Gaussians.
    """
    case, steps = session.case, session.experience
    require("action" in steps, "the last checkpoint has no actions")
    action = steps["action"]
    concerns(action.dtype == np.float32, "actions are discrete")
    require(action.size >= 64, "fewer than 64 actions in the last checkpoint")
    share = float(np.mean(np.abs(action) >= 1.0))
    if share < MAX_SATURATED:
        return None
    free = not math.isnan(case.number("agent.net.log_std_init"))
    return Finding(
        "saturated_actions",
        "Nearly all actions lie beyond the bounds",
        "warning",
        f"{100 * share:.0f} % of {action.size:,} components of the last actions are at or beyond the bounds (usual: under 70 %)",
        "start with a narrower distribution" if free else "use a distribution with bounds",
        "agent.net.log_std_init" if free else "agent.algorithm.action_pdtype",
        -0.5 if free else "Beta",
        frames=(session.last_frame, session.last_frame),
    )


# ---- values and gradients


def dead_units(session: Session) -> Finding | None:
    """Half of the units of a hidden layer receive no gradient: they no longer learn.

    Lu et al. 2019 (arXiv:1903.06733): dying ReLU; Sokar et al. 2023 (arXiv:2302.12902): dormant neurons in deep RL.
    """
    shares = dict(session.unused_units())
    require(bool(shares), "the net has no hidden layer")
    layer = max(shares, key=lambda name: shares[name])
    if shares[layer] < MAX_UNUSED:
        return None
    relu = str(session.case.setting("agent.net.hid_layers_activation", "")).lower() == "relu"
    path, rate = _learning_rate(session)
    return Finding(
        "dead_units",
        "Units of the net do not learn",
        "problem" if shares[layer] > 0.9 else "warning",
        f"{100 * shares[layer]:.0f} % of the units of {layer} receive no gradient (usual: under 30 %)",
        "use an activation without a flat side" if relu else "lower the learning rate",
        "agent.net.hid_layers_activation" if relu else path,
        "leaky_relu" if relu else _rounded(rate / 10.0),
        frames=(session.last_frame, session.last_frame),
    )


def critic(session: Session) -> Finding | None:
    """The critic never predicts returns better than a constant: the explained variance is below 0.05 in nine of ten rows of each half.

    One half is not enough: once a task is solved, the returns of a rollout are nearly equal and the explained variance has no meaning.
    Schulman, Nuts and Bolts of Deep RL (2016): an explained variance of 0 or less means that the critic only adds noise.
    """
    explained = session.column("explained_variance")
    session.require_progress()
    best = max(session.column("explained_variance", 0.0, 0.5).quantile(0.9), session.late("explained_variance").quantile(0.9))
    if best > MIN_EXPLAINED:
        return None
    key = "agent.algorithm.val_loss_coef"
    shared = bool(session.case.setting("agent.net.shared"))
    path, rate = _learning_rate(session)
    return Finding(
        "critic",
        "The critic explains nothing",
        "warning",
        f"explained_variance {_number(explained.median)} {_range(explained)} (usual: 0.3 to 1; 0 is a constant prediction)",
        "weight the value loss more" if shared else "raise the learning rate",
        key if shared else path,
        _rounded(4.0 * session.case.number(key, 0.5)) if shared else _rounded(3.0 * rate),
        frames=explained.frames,
    )


def values(session: Session) -> Finding | None:
    """Action values are more than twice as large as any return that was reached.

    van Hasselt et al. 2016 (arXiv:1509.06461): overestimation; van Hasselt et al. 2018 (arXiv:1812.02648): values above the largest
    possible one as the sign of divergence.
    """
    case, value = session.case, session.late("q_mean")
    scaled = case.setting("env.normalize_reward") or case.setting("env.clip_reward") or case.setting("env.reward_scale") == "sign"
    concerns(not scaled and not str(case.setting("env.name")).startswith("ALE/"), "rewards are clipped or normalised")
    returns = np.abs(session.column("return_new").curve.value) * case.number("env.reward_scale", 1.0)
    bound = 2.0 * max(float(returns.max()), 1.0) + _entropy_bonus(session)
    if abs(value.median) <= bound:
        return None
    path, rate = _learning_rate(session)
    single = case.setting("agent.algorithm.name") in ("DQN", "VanillaDQN")
    return Finding(
        "values",
        "Values are far from the returns",
        "problem",
        f"q_mean {_number(value.median)} {_range(value)}; the largest return is {_number(float(returns.max()))}",
        "use double Q-learning" if single else "lower the learning rate",
        "agent.algorithm.name" if single else path,
        "DoubleDQN" if single else _rounded(rate / 10.0),
        frames=value.frames,
    )


def _entropy_bonus(session: Session) -> float:
    """Return a bound of the part of soft values that is the entropy bonus: α |H| / (1 − γ)."""
    case = session.case
    if not case.algorithm.soft:
        return 0.0
    entropy, alpha = session.late("entropy"), session.late("entropy_coef")
    return float(np.abs(alpha.curve.value).max() * np.abs(entropy.curve.value).max()) * min(case.horizon, MAX_HORIZON)


def gradients(session: Session) -> Finding | None:
    """Gradients grow a hundredfold, or are clipped to less than a thousandth of their norm.

    Andrychowicz et al. 2021 (arXiv:2006.05990), section 3.3: clipping helps a little; Pascanu et al. 2013 (arXiv:1211.5063): set the
    threshold by the norms that occur.
    """
    norm, early = session.late("grad_norm"), session.column("grad_norm", 0.0, 0.25)
    clip = session.case.number("agent.net.clip_grad_val")
    exploding = norm.median > MAX_GROWTH * max(early.median, 1.0)
    if not exploding and not norm.median > MAX_CLIP_RATIO * clip:
        return None
    path, rate = _learning_rate(session)
    lower = exploding or math.isnan(clip)
    return Finding(
        "gradients",
        "Gradients explode" if exploding else "Every gradient is clipped to a small part",
        "problem" if exploding else "warning",
        f"grad_norm {_number(norm.median)} {_range(norm)}, {_number(early.median)} in the first quarter"
        + ("" if math.isnan(clip) else f"; it is clipped to {_number(clip)}"),
        "lower the learning rate" if lower else "clip at a larger norm",
        path if lower else "agent.net.clip_grad_val",
        _rounded(rate / 10.0) if lower else _rounded(norm.median / 2.0),
        frames=norm.frames,
    )


def learning_rate(session: Session) -> Finding | None:
    """The learning rate is at a tenth of its start or less, and does not change, in the last quarter of the run or longer.

    Andrychowicz et al. 2021 (arXiv:2006.05990), section 3.7: a linear decay over the whole run helps a little.
    """
    rate = session.column("lr").curve
    low = (rate.value <= 1.001 * rate.value[-1]) & (rate.value <= 0.1 * rate.value[0])
    since = rate.frame[int(np.argmax(low))] if low.any() else math.inf
    share = 1.0 - since / session.last_frame
    if share < MAX_AT_FLOOR:
        return None
    spec = f"{session.case.optim_path.replace('optim_spec', 'lr_scheduler_spec')}"
    scheduler = spec if session.case.setting(f"{spec}.name") else "agent.net.lr_scheduler_spec"
    limited = not math.isnan(session.case.number(f"{scheduler}.frame"))
    return Finding(
        "learning_rate",
        "The learning rate is at its lowest for long",
        "warning",
        f"lr {_number(float(rate.value[-1]))}, from {_number(float(rate.value[0]))}, since frame {since:,.0f}: "
        f"{100 * share:.0f} % of the run",
        "let the schedule end with the run" if limited else "start with a higher learning rate or a longer schedule",
        f"{scheduler}.frame" if limited else _learning_rate(session)[0],
        int(session.case.number("env.max_frame", session.last_frame)) if limited else _rounded(2.0 * _learning_rate(session)[1]),
        frames=(int(since), session.last_frame),
    )


# ---- results


def baseline(session: Session) -> Finding | None:
    """The return at the end is that of a random agent, within two standard errors or 5 %.

    Henderson et al. 2018 (arXiv:1709.06560): compare with a baseline before anything else.
    """
    concerns(session.case.algorithm.learns, "the algorithm does not learn")
    require(session.episodes >= MIN_EPISODES, f"fewer than {MIN_EPISODES} episodes have ended")
    if not _at_baseline(session):
        return None
    frames = session.case.number("env.max_frame", session.last_frame)
    return Finding(
        "baseline",
        "The agent is no better than a random one",
        "problem",
        f"return {_number(session.returns.median)} at the end; a random agent has {_number(session.case.baseline)}",
        "first change what the findings above name; otherwise train for longer",
        "env.max_frame",
        int(4 * frames),
        frames=session.returns.frames,
    )


def bottleneck(session: Session) -> Finding | None:
    """The learner waits for the envs: it is busy for less than a quarter of the time, and the workers for more than three quarters.

    Petrenko et al. 2020 (arXiv:2006.11751): throughput is that of the slowest part.
    """
    session.late("rollout_busy")
    found = busiest([session.table])
    require(found is not None, "no shares of time")
    assert found is not None
    busy = found[1]
    if busy["rollout"] < MIN_BUSY or busy["learner"] > 1.0 - MIN_BUSY:
        return None
    workers = int(session.case.number("meta.sampler.num_workers", 1.0))
    return Finding(
        "bottleneck",
        "The env is slower than the learner",
        "remark",
        f"workers step envs for {100 * busy['rollout']:.0f} % of the time, the learner trains for {100 * busy['learner']:.0f} %",
        "use more workers, if there are cores",
        "meta.sampler.num_workers",
        2 * workers,
        frames=session.late("rollout_busy").frames,
    )


def episodes(session: Session) -> Finding | None:
    """Fewer than 20 episodes have ended, too few for a mean return.

    Henderson et al. 2018 (arXiv:1709.06560); Agarwal et al. 2021 (arXiv:2108.13264), on point estimates from few runs.
    """
    count = session.episodes
    if count >= MIN_EPISODES:
        return None
    frames = session.case.number("env.max_frame", session.last_frame)
    return Finding(
        "episodes",
        "Too few episodes to tell",
        "remark",
        f"{count:.0f} episodes have ended in {session.last_frame:,} frames; at least {MIN_EPISODES} are needed for a mean return",
        "train for longer",
        "env.max_frame",
        int(frames * max(2.0, math.ceil(MIN_EPISODES / max(count, 1.0)))),
        frames=(0, session.last_frame),
    )


def seeds(case: Case) -> Finding | None:
    """Fewer than 3 sessions: returns of one spec differ much between seeds.

    Henderson et al. 2018 (arXiv:1709.06560); Agarwal et al. 2021 (arXiv:2108.13264): 3 to 10 runs need interval estimates.
    """
    count = len({session.number for session in case.sessions})
    concerns(not case.run.distributed, "the sessions train one net")
    if count >= MIN_SEEDS:
        return None
    return Finding(
        "seeds",
        "Too few seeds to tell",
        "remark",
        f"{count} session{'s' if count > 1 else ''}: another seed may give another result",
        "train more sessions",
        "meta.max_session",
        4,
    )


MIN_HORIZON = 10.0
MAX_HORIZON = 1e5
MAX_TARGET = 5000.0
MAX_OBSERVATION = 100.0
MIN_REPLAYS, MAX_STEPS_PER_FRAME = 0.5, 8.0
MAX_LAG = 8.0
MIN_EXPLAINED = 0.05
MAX_KL, MIN_KL, MAX_CLIPPED = 0.1, 1e-5, 0.5
MIN_ENTROPY = 0.02
MAX_SATURATED = 0.85
MAX_UNUSED = 0.5
MAX_GROWTH, MAX_CLIP_RATIO = 100.0, 1000.0
MAX_AT_FLOOR = 0.25
MIN_BUSY = 0.75
MIN_EPISODES, MIN_SEEDS = 20, 3

RULES: tuple[Callable[[Session], Finding | None], ...] = (
    *(discount, time_limit, truncation, reward_scale, observation_scale),
    *(replay_ratio, policy_lag, staleness),
    *(clipping, entropy_high, dead_units, large_updates, small_updates, entropy_lost, saturated_actions),
    *(values, gradients, critic, learning_rate, baseline, bottleneck, episodes),
)
"""The rules of one session, causes before symptoms: findings of one severity are ranked in this order."""
TRIAL_RULES: tuple[Callable[[Case], Finding | None], ...] = (seeds,)
"""The rules of a whole trial."""


def _largest_half(session: Session, column: str) -> Window:
    """Return the half of the run in which the median of a column is larger: a fault may be over when the learning rate has decayed."""
    return max(session.column(column, 0.0, 0.5), session.late(column), key=lambda half: half.median)


def _learning_rate(session: Session) -> tuple[str, float]:
    """Return path and value of the learning rate; without a value in the spec, that of the first row."""
    path = f"{session.case.optim_path}.lr"
    rate = session.case.number(path)
    if math.isnan(rate):
        rows = session.table.get("lr", np.empty(0))
        rate = float(rows[np.isfinite(rows)][:1].sum()) or 1e-3
    return path, rate


def _at_baseline(session: Session) -> bool:
    """Whether the return at the end is that of a random agent or lower, within two standard errors or 5 %."""
    session.require_progress()
    margin = max(2.0 * session.return_error, 0.05 * abs(session.case.baseline))
    return max(session.returns.median, float(session.returns.curve.value[-1])) <= session.case.baseline + margin


def _is_poor(session: Session) -> bool:
    """Whether the return at the end is at most half of the way from that of a random agent to the best of the run."""
    rows = session.column("current_return").curve.value
    base = session.case.baseline
    return _at_baseline(session) or session.returns.median < base + 0.5 * (float(rows.max()) - base)
