"""Rules of the command `doctor` about learning: changes of the policy, values, gradients and the learning rate.

As in doctor_rules.py, the docstring of a rule describes the fault that the rule detects, and cites the sources of its threshold.
"""

from __future__ import annotations

import math

import numpy as np

from slm_lab.experiment.report.doctor_case import MAX_HORIZON, Session, require_applicable, require_measured
from slm_lab.experiment.report.doctor_finding import (
    Finding,
    half_with_larger_median,
    has_poor_return,
    is_at_baseline,
    learning_rate_setting,
    number_text,
    range_text,
    round_to_one_digit,
)

MAX_KL, MAX_PEAK, MIN_KL, MAX_CLIPPED = 0.1, 1.0, 1e-5, 0.5
"""Limits beyond which a value counts as a fault: maximum median of approx_kl in half of a run, maximum of approx_kl in any row, minimum
90 % quantile of approx_kl, and maximum median of clip_fraction."""
MIN_ENTROPY = 0.02
"""A categorical policy counts as deterministic if its entropy is below this fraction of its largest entropy."""
MAX_SATURATED = 0.85
"""Maximum share of the components of continuous actions that are at or beyond the bounds of the action space."""
MAX_UNUSED = 0.5
"""Maximum share of the units of a hidden layer that receive no gradient."""
USUAL_RATE = 0.003
"""Largest usual learning rate of the Adam optimizer."""
MIN_EXPLAINED = 0.05
"""Minimum explained variance at which a critic counts as better than a constant prediction."""
MAX_GROWTH, MAX_CLIP_RATIO = 100.0, 1000.0
"""Maximum growth factor of the gradient norm during a run, and maximum ratio of the gradient norm to the norm to which it is clipped."""
MAX_AT_FLOOR = 0.25
"""Maximum share of the frames of a run that may be trained with the lowest learning rate."""


# ---- how the policy changes


def clipping(session: Session) -> Finding | None:
    """Detect a clip range ε of PPO that does not fit the size of the updates.

    The clip range is too narrow if most ratios are clipped although the policy hardly changes. The clip range is too wide if hardly any
    ratio is clipped although the policy changes much. Schulman et al., 2017 (arXiv:1707.06347), use ε = 0.2. Andrychowicz et al., 2021
    (arXiv:2006.05990), section 3.1, recommend to start with ε = 0.25.
    """
    clipped, change = half_with_larger_median(session, "clip_fraction"), half_with_larger_median(session, "approx_kl")
    path, eps = session.case.schedule_path_and_start("clip_eps_spec")
    tight = clipped.median > 0.5 and change.median < 0.01 and eps < 0.05
    loose = clipped.median < 0.05 and change.median > MAX_KL and eps > 0.5
    if not tight and not loose:
        return None
    return Finding(
        "The clip range stops nearly every update" if tight else "The clip range limits no update",
        "problem",
        f"clip_fraction {number_text(clipped.median)} (usual: 0.02 to 0.3) while approx_kl is {number_text(change.median)} "
        f"(usual: 0.001 to 0.05) {range_text(clipped)}",
        "set the clip range to its usual value",
        path,
        0.2,
        frames=clipped.frames,
    )


def large_updates(session: Session) -> Finding | None:
    """Detect updates of PPO that change the policy too much.

    The fault is reported in three cases: the median of approx_kl is above 0.1, this median is above 0.01 and the median of clip_fraction is
    above 0.5, or approx_kl is above 1 in any row. Schulman et al., 2017 (arXiv:1707.06347), section 6.1, use 0.003 to 0.03 as targets for
    the KL divergence. Engstrom et al., 2020 (arXiv:2005.12729), show that clipping alone does not keep the policy in its trust region.
    """
    clipped, change = half_with_larger_median(session, "clip_fraction"), half_with_larger_median(session, "approx_kl")
    peak_frame, peak = session.column("approx_kl").frame_and_largest_value
    often = change.median > MAX_KL or (clipped.median > MAX_CLIPPED and change.median > 0.1 * MAX_KL)
    if not often and peak <= MAX_PEAK:
        return None
    path, rate = learning_rate_setting(session)
    factor = min(max((change.median if often else peak) / 0.02, 3.0), 100.0)
    measured = f"{number_text(change.median)}" if often else f"{number_text(peak)} at frame {peak_frame:,}"
    return Finding(
        "The policy changes too much in an update",
        "problem",
        f"approx_kl {measured} (usual: 0.001 to 0.05), clip_fraction {number_text(clipped.median)} (usual: 0.02 to 0.3) "
        f"{range_text(change)}",
        "lower the learning rate",
        path,
        round_to_one_digit(rate / factor),
        frames=change.frames if often else (peak_frame, peak_frame),
    )


def small_updates(session: Session) -> Finding | None:
    """Detect a policy that hardly changes: in nine of ten rows, approx_kl is below 1e-5 and at most 0.1 % of the ratios are clipped.

    The fault is not reported if approx_kl is above 0.1 in any row. An update with an approx_kl above 0.1 may have made the policy
    deterministic, so that the policy no longer changes. Schulman, Nuts and Bolts of Deep RL (2016), recommends to monitor the KL divergence
    of updates. Usual targets of the KL divergence are 0.003 to 0.03.
    """
    clipped, change = session.column("clip_fraction"), session.column("approx_kl")
    if change.quantile(0.9) >= MIN_KL or clipped.quantile(0.9) > 0.001 or change.frame_and_largest_value[1] > MAX_KL:
        return None
    path, rate = learning_rate_setting(session)
    return Finding(
        "The policy hardly changes",
        "problem",
        f"approx_kl is below {number_text(change.quantile(0.9))} in nine of ten rows (usual: 0.001 to 0.05), clip_fraction "
        f"{number_text(clipped.quantile(0.9))}",
        "raise the learning rate",
        path,
        round_to_one_digit(max(10.0 * rate, min(100.0 * rate, 3e-4))),
        frames=change.frames,
    )


def entropy_high(session: Session) -> Finding | None:
    """Detect an entropy bonus that keeps the policy random.

    The fault is reported if the spec has an entropy bonus, the median entropy in the second half of the run is high, and the return is not
    above the return of a random agent (see is_at_baseline). The entropy of discrete actions is high if it is at least 95 % of the largest
    entropy. The entropy of continuous actions, which has no upper bound, is high if it is above the entropy in the first row. Mnih et al.,
    2016 (arXiv:1602.01783), use an entropy bonus of 0.01. Andrychowicz et al., 2021 (arXiv:2006.05990), section 3.8, compare entropy
    bonuses.
    """
    path, coef = session.case.schedule_path_and_start("entropy_coef_spec")
    entropy, values = session.second_half("entropy"), session.column("entropy").curve.value
    first, largest = float(values[0]), float(values.max())
    is_high = entropy.median > first if session.acts_continuously else entropy.median >= 0.95 * largest
    if coef <= 0.0 or not is_high or not is_at_baseline(session):
        return None
    compared = f"{number_text(first)} in the first row" if session.acts_continuously else f"at most {number_text(largest)}"
    return Finding(
        "The entropy bonus keeps the policy random",
        "problem",
        f"entropy {number_text(entropy.median)} ({compared}) {range_text(entropy)}; "
        f"entropy_coef starts at {number_text(coef)} "
        f"(usual: 0 to 0.05), and the return of {number_text(session.final_returns.median)} is that of a random agent",
        "lower the entropy bonus",
        path,
        round_to_one_digit(min(0.01, coef / 10.0)),
        frames=entropy.frames,
    )


def entropy_lost(session: Session) -> Finding | None:
    """Detect a categorical policy that stops exploring too early.

    The fault is reported if the entropy falls below 2 % of its largest value in the first half of the run and stays below this level, and
    the final return is poor (see has_poor_return). Mnih et al., 2016 (arXiv:1602.01783), section 4, describe the premature convergence to a
    deterministic policy. Ahmed et al., 2019 (arXiv:1811.11214), study the effect of entropy on policy optimization.
    """
    path, coef = session.case.schedule_path_and_start("entropy_coef_spec")
    entropy = session.column("entropy")
    first = entropy.frame_and_largest_value[1]
    require_applicable(first > 0.0 and not session.acts_continuously, "the entropy of continuous actions has no lower bound")
    above = np.flatnonzero(entropy.curve.value >= MIN_ENTROPY * first)
    since = int(above[-1]) + 1 if len(above) else 0
    frame = int(entropy.curve.frame[min(since, len(entropy.curve.frame) - 1)])
    if len(entropy.curve.frame) - since < 2 or frame > 0.5 * session.last_frame or not has_poor_return(session):
        return None
    sudden = frame <= 0.1 * session.last_frame or coef >= 0.01
    rate_path, rate = learning_rate_setting(session)
    return Finding(
        "The policy has stopped exploring",
        "problem",
        f"entropy is below {number_text(MIN_ENTROPY * first)}, {100 * MIN_ENTROPY:.0f} % of its largest value, since frame {frame:,}; the "
        f"return since then is {number_text(session.final_returns.median)}",
        "lower the learning rate" if sudden else "raise the entropy bonus",
        rate_path if sudden else path,
        round_to_one_digit(rate / 10.0) if sudden else 0.01,
        frames=(frame, session.last_frame),
    )


def saturated_actions(session: Session) -> Finding | None:
    """Detect continuous actions of which at least 85 % of the components are at or beyond the bounds of the action space.

    All actions beyond a bound of the action space have the same effect in the env. Andrychowicz et al., 2021 (arXiv:2006.05990), section
    3.2, recommend a narrow initial distribution of actions that is centred in the action space. Chou et al., 2017 (beta policies), describe
    the bias of clipped Gaussians.
    """
    case, steps = session.case, session.checkpoint_steps
    require_measured("action" in steps, "the last checkpoint has no actions")
    action = steps["action"]
    require_applicable(action.dtype == np.float32, "actions are discrete")
    require_measured(action.size >= 64, "fewer than 64 actions in the last checkpoint")
    share = float(np.mean(np.abs(action) >= 1.0))
    if share < MAX_SATURATED:
        return None
    free = not math.isnan(case.spec_number("agent.net.log_std_init"))
    return Finding(
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
    """Detect a hidden layer of which at least half of the units receive no gradient and therefore no longer learn.

    Lu et al., 2019 (arXiv:1903.06733), describe dying ReLU units. Sokar et al., 2023 (arXiv:2302.12902), describe dormant neurons in deep
    RL.
    """
    shares = dict(session.unused_units())
    require_measured(bool(shares), "the net has no hidden layer")
    layer = max(shares, key=lambda name: shares[name])
    if shares[layer] < MAX_UNUSED:
        return None
    relu = str(session.case.setting("agent.net.hid_layers_activation", "")).lower() == "relu"
    path, rate = learning_rate_setting(session)
    return Finding(
        "Units of the net do not learn",
        "problem" if shares[layer] > 0.9 else "warning",
        f"{100 * shares[layer]:.0f} % of the units of {layer} receive no gradient (usual: under 30 %)",
        "use an activation without a flat side" if relu else "lower the learning rate",
        "agent.net.hid_layers_activation" if relu else path,
        "leaky_relu" if relu else round_to_one_digit(rate / 10.0),
        frames=(session.last_frame, session.last_frame),
    )


def critic(session: Session) -> Finding | None:
    """Detect a critic that is no better than a constant prediction.

    The fault is reported if the explained variance is at most 0.05 in nine of ten rows of each half of the run, and the return is poor (see
    has_poor_return). If rollouts have only a few steps or the task is solved, the returns are nearly equal and the explained variance has
    no meaning. Therefore, a low explained variance in only one half of the run, or with a good return, is not reported. Schulman, Nuts and
    Bolts of Deep RL (2016), states that a critic with an explained variance of 0 or less only adds noise.
    """
    explained = session.column("explained_variance")
    best = max(session.column("explained_variance", 0.0, 0.5).quantile(0.9), session.second_half("explained_variance").quantile(0.9))
    if best > MIN_EXPLAINED or not has_poor_return(session):
        return None
    coef = "agent.algorithm.val_loss_coef"
    path, rate = learning_rate_setting(session)
    if rate > USUAL_RATE:
        advice, key, value = "lower the learning rate", path, round_to_one_digit(rate / 10.0)
    elif session.case.setting("agent.net.shared"):
        advice, key, value = "weight the value loss more", coef, round_to_one_digit(4.0 * session.case.spec_number(coef, 0.5))
    else:
        advice, key, value = "raise the learning rate", path, round_to_one_digit(3.0 * rate)
    measured = f"explained_variance {number_text(explained.median)} {range_text(explained)} (usual: 0.3 to 1; 0 is a constant prediction)"
    return Finding("The critic explains nothing", "warning", measured, advice, key, value, frames=explained.frames)


def values(session: Session) -> Finding | None:
    """Detect action values that are more than twice as large as the largest return of the run.

    van Hasselt et al., 2016 (arXiv:1509.06461), describe the overestimation of action values. van Hasselt et al., 2018 (arXiv:1812.02648),
    interpret values above the largest possible value as a sign of divergence.
    """
    case, value = session.case, session.second_half("q_mean")
    case.require_raw_rewards()
    returns = np.abs(session.column("return_new").curve.value) * case.spec_number("env.reward_scale", 1.0)
    bound = 2.0 * max(float(returns.max()), 1.0) + _entropy_bonus(session)
    if abs(value.median) <= bound:
        return None
    path, rate = learning_rate_setting(session)
    single = case.setting("agent.algorithm.name") in ("DQN", "VanillaDQN")
    return Finding(
        "Values are far from the returns",
        "problem",
        f"q_mean {number_text(value.median)} {range_text(value)}; the largest return is {number_text(float(returns.max()))}",
        "use double Q-learning" if single else "lower the learning rate",
        "agent.algorithm.name" if single else path,
        "DoubleDQN" if single else round_to_one_digit(rate / 10.0),
        frames=value.frames,
    )


def _entropy_bonus(session: Session) -> float:
    """Return α |H| / (1 − γ), an upper bound of the entropy bonus that soft action values contain.

    Return 0 if the algorithm has no soft action values.
    """
    case = session.case
    if not case.algorithm.soft:
        return 0.0
    entropy, alpha = session.second_half("entropy"), session.second_half("entropy_coef")
    return float(np.abs(alpha.curve.value).max() * np.abs(entropy.curve.value).max()) * min(case.horizon, MAX_HORIZON)


def gradients(session: Session) -> Finding | None:
    """Detect a gradient norm that has increased by a factor of 100, or that clipping reduces to less than a thousandth.

    Gradient clipping improves results a little (Andrychowicz et al., 2021, arXiv:2006.05990, section 3.3). The threshold of gradient
    clipping should be chosen according to the norms that occur in training (Pascanu et al., 2013, arXiv:1211.5063).
    """
    norm, early = session.second_half("grad_norm"), session.column("grad_norm", 0.0, 0.25)
    clip = session.case.spec_number("agent.net.clip_grad_val")
    exploding = norm.median > MAX_GROWTH * max(early.median, 1.0)
    if not exploding and not norm.median > MAX_CLIP_RATIO * clip:
        return None
    path, rate = learning_rate_setting(session)
    lower = exploding or math.isnan(clip)
    return Finding(
        "Gradients explode" if exploding else "Every gradient is clipped to a small part",
        "problem" if exploding else "warning",
        f"grad_norm {number_text(norm.median)} {range_text(norm)}, {number_text(early.median)} in the first quarter"
        + ("" if math.isnan(clip) else f"; it is clipped to {number_text(clip)}"),
        "lower the learning rate" if lower else "clip at a larger norm",
        path if lower else "agent.net.clip_grad_val",
        round_to_one_digit(rate / 10.0) if lower else round_to_one_digit(norm.median / 2.0),
        frames=norm.frames,
    )


def learning_rate(session: Session) -> Finding | None:
    """Detect a learning rate that is constant and at most a tenth of its start value during the last quarter of the run or longer.

    Andrychowicz et al., 2021 (arXiv:2006.05990), section 3.7, found that a linear decay of the learning rate over the whole run improves
    results a little.
    """
    rate = session.column("lr").curve
    low = (rate.value <= 1.001 * rate.value[-1]) & (rate.value <= 0.1 * rate.value[0])
    since = rate.frame[int(np.argmax(low))] if low.any() else math.inf
    share = 1.0 - since / session.last_frame
    if share < MAX_AT_FLOOR:
        return None
    own = session.case.optim_path.replace("optim_spec", "lr_scheduler_spec")
    scheduler = own if session.case.setting(f"{own}.name") else "agent.net.lr_scheduler_spec"
    limited = not math.isnan(session.case.spec_number(f"{scheduler}.frame"))
    return Finding(
        "The learning rate is at its lowest for long",
        "problem" if share > 0.5 else "warning",
        f"lr {number_text(float(rate.value[-1]))}, from {number_text(float(rate.value[0]))}, since frame {since:,.0f}: "
        f"{100 * share:.0f} % of the run",
        "let the schedule end with the run" if limited else "start with a higher learning rate or a longer schedule",
        f"{scheduler}.frame" if limited else learning_rate_setting(session)[0],
        int(session.case.spec_number("env.max_frame", session.last_frame))
        if limited
        else round_to_one_digit(2.0 * learning_rate_setting(session)[1]),
        frames=(int(since), session.last_frame),
    )
