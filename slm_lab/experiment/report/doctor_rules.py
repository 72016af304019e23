"""Rules of the command `doctor` about the settings, the data and the results of a run.

Each rule detects one fault and names a spec key to change.

A rule returns a Finding, or None if the run does not have the fault. A rule raises NotMeasured if the run lacks the data that the rule
needs, and NotApplicable if the rule does not apply to the run. The thresholds of the rules are far outside the values that runs of the
shipped specs have, so that a finding shows a real fault. The thresholds and their reasons are listed in docs/doctor.md.
"""

from __future__ import annotations

import math

import numpy as np

from slm_lab.experiment.report.doctor_case import MAX_HORIZON, DiagnosedRun, Session, require_applicable, require_measured
from slm_lab.experiment.report.doctor_finding import Finding, is_at_baseline, number_text, range_text, round_to_one_digit
from slm_lab.experiment.report.sampler import bottleneck as busiest

MIN_HORIZON = 10.0
"""Minimum horizon 1 / (1 − γ) in steps. A discount factor γ with at least this horizon never counts as too low."""
MAX_TARGET = 5000.0
"""Largest target of a value function that nets can learn without normalisation."""
MAX_OBSERVATION = 100.0
"""Limit for the root mean square of an entry of the observation vectors. Larger values are reported as a fault."""
MIN_REPLAYS, MAX_STEPS_PER_FRAME = 0.5, 8.0
"""Minimum number of times that each transition of a replay buffer is used, and maximum number of gradient steps per frame."""
MAX_LAG = 8.0
"""Maximum policy lag, in datasets. The policy lag is the number of datasets that the learner has used since the policy that collected the
data."""
MIN_BUSY = 0.75
"""A process counts as busy if it works for at least this share of the time."""
MIN_EPISODES, MIN_SEEDS = 20, 3
MAX_PART = 0.25
"""A rollout counts as short if it is at most this share of an episode."""


# ---- settings that contradict the env


def discount(session: Session) -> Finding | None:
    """Detect a discount factor γ that is so low that rewards after a few steps do not count.

    The fault is reported if the horizon 1 / (1 − γ) is below 10 steps and also below a tenth of an episode, or if the horizon is below 2
    steps. Andrychowicz et al., 2021 (arXiv:2006.05990), section 3.6, found that the discount factor is among the choices that matter most,
    and recommend to start with 0.99.
    """
    horizon, length = session.case.horizon, session.episode_length
    if horizon >= min(MIN_HORIZON, max(0.1 * length, 2.0)) or length < 5.0:
        return None
    return Finding(
        "The discount factor hides all but the next rewards",
        "problem",
        f"gamma counts rewards over 1 / (1 - gamma) = {number_text(horizon)} steps; episodes have {number_text(length)}",
        "raise the discount factor",
        "agent.algorithm.gamma",
        0.99,
    )


def time_limit(session: Session) -> Finding | None:
    """Detect a time limit that truncates nearly every episode and is shorter than half of the horizon 1 / (1 − γ).

    The agent never observes the steps after the time limit, and can only estimate the value of these steps (Pardo et al., 2018,
    arXiv:1712.00378).
    """
    truncated, longest = session.second_half("epi_truncated"), session.second_half("epi_len_max")
    limit, horizon, limit_of_env = longest.median, session.case.horizon, session.case.setting("env.max_t") is None
    if truncated.median < 0.95 or limit >= 0.5 * min(horizon, MAX_HORIZON):
        return None
    return Finding(
        "Episodes are cut before actions show their effect",
        "problem",
        f"{100 * truncated.median:.0f} % of the episodes are truncated after {number_text(limit)} steps or less; "
        f"gamma counts rewards over {number_text(horizon)} steps",
        "raise the time limit" if limit_of_env else "remove the time limit of the spec",
        "env.max_t",
        int(min(horizon, MAX_HORIZON)) if limit_of_env else None,
        frames=truncated.frames,
    )


def truncation(session: Session) -> Finding | None:
    """Detect an env that seems to report its time limit as termination.

    The fault is reported if no episode is truncated, but the longest episode has the same length in at least half of the table rows. If a
    time limit is reported as termination, the agent assumes that the value after the time limit is 0, although the episode would have
    continued (Pardo et al., 2018, arXiv:1712.00378).
    """
    require_applicable(not session.case.has_opponents, "a game ends by its rules")
    truncated, longest = session.second_half("epi_truncated"), session.second_half("epi_len_max")
    limit = float(longest.curve.value.max())
    share = float(np.mean(longest.curve.value == limit))
    if truncated.curve.value.any() or limit < 20 or share < 0.5 or len(longest.curve.value) < 5:
        return None
    return Finding(
        "A time limit seems to be reported as termination",
        "warning",
        f"no episode is truncated, yet in {100 * share:.0f} % of the rows the longest episode has exactly {number_text(limit)} steps",
        "return truncated, not terminated, at the env's time limit; or let the run truncate episodes one step before it",
        "env.max_t",
        int(limit) - 1,
        frames=longest.frames,
    )


def reward_scale(session: Session) -> Finding | None:
    """Detect rewards that are not normalised and so large that the targets of the value function are at least 5,000.

    With large targets, the value loss dominates the loss, and Adam needs many steps until the predictions are as large as the targets. van
    Hasselt et al., 2016 (arXiv:1602.07714), normalise the targets of the value function. Henderson et al., 2018 (arXiv:1709.06560), study
    the reward scale. Engstrom et al., 2020 (arXiv:2005.12729), study reward normalisation.
    """
    case = session.case
    case.require_raw_rewards()
    length, scale = session.episode_length, case.spec_number("env.reward_scale", 1.0)
    target = scale * abs(session.final_returns.median) * min(1.0, case.horizon / length)
    if target < MAX_TARGET:
        return None
    normalize = case.algorithm.on_policy and not case.algorithm.self_imitation
    return Finding(
        "Rewards are large and not normalised",
        "problem",
        f"returns of {number_text(session.final_returns.median)} in episodes of {number_text(length)} steps: "
        f"values of about {number_text(target)} "
        f"(usual: up to {number_text(MAX_TARGET)})",
        "normalise rewards" if normalize else "scale rewards down",
        "env.normalize_reward" if normalize else "env.reward_scale",
        True if normalize else round_to_one_digit(100.0 * scale / target),
        frames=session.final_returns.frames,
    )


def value_range(session: Session) -> Finding | None:
    """Detect a discounted return that is outside the range v_min to v_max that a categorical critic can represent.

    The discounted return is computed as if rewards were distributed evenly over the episode. The projection of the critic clips targets to
    the range v_min to v_max, so that all targets above v_max become v_max, and all targets below v_min become v_min (Bellemare et al.,
    2017, arXiv:1707.06887, equation 7).
    """
    case = session.case
    low, high = case.spec_number("agent.algorithm.v_min"), case.spec_number("agent.algorithm.v_max")
    require_applicable(not math.isnan(low), "the critic has no atoms")
    case.require_raw_rewards()
    length, gamma = session.episode_length, case.spec_number("agent.algorithm.gamma", 0.99)
    counted = 1.0 if gamma >= 1.0 else (1.0 - gamma**length) / (length * (1.0 - gamma))  # mean of γ^t over the episode
    value = case.spec_number("env.reward_scale", 1.0) * session.final_returns.median * counted
    if low <= value <= high:
        return None
    return Finding(
        "Returns lie outside of what the critic can represent",
        "warning",
        f"returns of {number_text(session.final_returns.median)} in episodes of {number_text(length)} steps: discounted returns of about "
        f"{number_text(value)}; the atoms go from {number_text(low)} to {number_text(high)}",
        "widen the range of the atoms",
        f"agent.algorithm.{'v_max' if value > high else 'v_min'}",
        round_to_one_digit(1.5 * value),
        frames=session.final_returns.frames,
    )


def observation_scale(session: Session) -> Finding | None:
    """Detect observations with an entry whose root mean square is at least 100, so that the entry saturates or dominates the first layer.

    Andrychowicz et al., 2021 (arXiv:2006.05990), section 3.3, and LeCun et al., 1998 (Efficient BackProp), recommend to normalise
    observations.
    """
    require_applicable(not session.case.setting("env.normalize_obs"), "observations are normalised")
    obs = session.checkpoint_steps["obs"]
    require_applicable(obs.dtype != np.uint8, "observations are images")
    rows = obs.reshape(len(obs), -1).astype(np.float64)
    scale = np.sqrt(np.mean(rows * rows, axis=0))
    largest = int(np.argmax(scale)) if len(scale) else 0
    if not len(scale) or scale[largest] < MAX_OBSERVATION:
        return None
    return Finding(
        "Observations are large and not normalised",
        "problem" if scale[largest] > 2 * MAX_OBSERVATION else "warning",
        f"entry {largest} of the observation has a root mean square of {number_text(scale[largest])} over "
        f"{len(rows)} steps (usual: about 1)",
        "normalise observations",
        "env.normalize_obs",
        True,
        frames=(session.last_frame, session.last_frame),
    )


# ---- how often and with which data the agent learns


def replay_ratio(session: Session) -> Finding | None:
    """Detect a replay buffer whose transitions are used less than 0.5 times each, or a run with more than 8 gradient steps per frame.

    Mnih et al., 2015, use each transition 8 times: DQN makes a gradient step on 32 transitions after every 4 new transitions. Fedus et al.,
    2020 (arXiv:2007.06700), study the replay ratio. Nikishin et al., 2022 (arXiv:2205.07802), show that agents with many gradient steps per
    frame overfit to their first data.
    """
    case = session.case
    require_applicable(not case.algorithm.on_policy, "only for algorithms with a replay buffer")
    steps, batch = session.steps_per_frame, case.spec_number("agent.memory.batch_size", 32.0)
    if steps * batch >= MIN_REPLAYS and steps <= MAX_STEPS_PER_FRAME:
        return None
    few = steps * batch < MIN_REPLAYS
    every, repeat = case.spec_number("agent.algorithm.training_frequency", 1.0), case.spec_number("agent.algorithm.training_iter", 1.0)
    key, value = ("training_frequency", max(1, round(every * steps * batch / 8.0))) if few else ("training_iter", 1)
    if not few and repeat <= 1:
        key, value = "training_frequency", math.ceil(every * steps)
    return Finding(
        "The agent learns rarely from what it collects" if few else "The agent learns very often from the same data",
        "problem" if steps * batch < 0.1 * MIN_REPLAYS or steps > 2 * MAX_STEPS_PER_FRAME else "warning",
        f"{number_text(steps)} gradient steps per frame with batches of {batch:.0f}: each transition is used "
        f"{number_text(steps * batch)} times (usual: 8 to 256 times, at most a few steps per frame)",
        "train more often" if few else "train less often",
        f"agent.algorithm.{key}",
        value,
        frames=(session.last_frame // 2, session.last_frame),
    )


def policy_lag(session: Session) -> Finding | None:
    """Detect data from rollout workers that is more than 8 datasets old, or of which at least a tenth is discarded because of its age.

    Espeholt et al., 2018 (arXiv:1802.01561), show that a policy lag (data from an older policy) lowers returns, but less with V-trace.
    Petrenko et al., 2020 (arXiv:2006.11751), measure the policy lag of asynchronous sampling.
    """
    case, lag = session.case, session.second_half("lag_mean")
    require_applicable(case.algorithm.on_policy, "a replay buffer holds old data on purpose")
    batches = case.spec_number("meta.sampler.num_batches_per_epoch", 1.0)
    # with several agents, a dataset has more transitions than frames, and therefore more minibatches than num_batches_per_epoch; target_kl
    # and shares of several policies make `measured` smaller, and without minibatches it is 0
    measured = session.steps_per_frame * batches * case.spec_number("agent.algorithm.minibatch_size", 0.0)
    per_dataset = max(batches * case.spec_number("agent.algorithm.training_epoch", 1.0), measured)
    masked = session.second_half("lag_masked").median
    if lag.median <= MAX_LAG * per_dataset and masked < 0.1:
        return None
    waiting = case.spec_number("meta.sampler.num_batches_to_accumulate", 2.0)
    fewer = waiting > 1
    return Finding(
        "The data is from an old policy",
        "problem" if masked >= 0.5 or lag.median > 4 * MAX_LAG * per_dataset else "warning",
        f"policy lag of {number_text(lag.median)} gradient steps, {number_text(lag.median / per_dataset)} datasets {range_text(lag)}; "
        f"{100 * masked:.0f} % of the transitions discarded (usual: under {MAX_LAG:.0f} datasets)",
        "let fewer datasets wait for the learner" if fewer else "collect with fewer envs at a time",
        "meta.sampler.num_batches_to_accumulate" if fewer else "meta.sampler.num_envs_per_worker",
        1 if fewer else max(1, int(case.spec_number("meta.sampler.num_envs_per_worker", 8.0) // 2)),
        frames=lag.frames,
    )


def staleness(session: Session) -> Finding | None:
    """Detect workers of a shared net whose gradients are computed with outdated weights.

    With N workers, the fault is reported if the weights receive, on average, more than 2 · max(N − 1, 1) updates of other workers while a
    worker computes a gradient. Asynchronous workers are described by Mnih et al., 2016 (arXiv:1602.01783). Ho et al., 2013 (stale
    synchronous parallel), show that convergence needs bounded staleness.
    """
    stale, workers = session.second_half("staleness"), session.case.spec_number("meta.max_session", 1.0)
    if stale.mean <= 2.0 * max(workers - 1.0, 1.0):
        return None
    return Finding(
        "Workers learn with outdated weights",
        "warning",
        f"{number_text(stale.mean)} updates of other workers on average between pull and push of a worker; {workers:.0f} workers",
        "let one worker at a time update",
        "meta.hogwild_lock",
        True,
        frames=stale.frames,
    )


# ---- results


def baseline(session: Session) -> Finding | None:
    """Detect an agent whose final return (in self-play, final Elo rating) is not above the return of a random agent.

    The final return must exceed the return of a random agent by two standard errors and by 5 % (see is_at_baseline). Henderson et al., 2018
    (arXiv:1709.06560), recommend to compare an agent with a baseline first.
    """
    require_applicable(session.case.algorithm.learns, "the algorithm does not learn")
    require_measured(session.episodes >= MIN_EPISODES, f"fewer than {MIN_EPISODES} episodes have ended")
    if not is_at_baseline(session):
        return None
    frames = session.case.spec_number("env.max_frame", session.last_frame)
    in_self_play = "elo" in session.table
    return Finding(
        "The agent is no better than a random one",
        "problem",
        f"Elo rating {_last_rating(session)} at the end; random actions have 0"
        if in_self_play
        else f"return {number_text(session.final_returns.median)} at the end; a random agent has {number_text(session.case.baseline)}",
        "first change what the findings above name; otherwise train for longer",
        "env.max_frame",
        int(4 * frames),
        frames=session.final_returns.frames,
    )


def _last_rating(session: Session) -> str:
    return f"{session.column('elo').curve.value[-1]:.0f} ± {session.rating_error:.0f}"


def rating(session: Session) -> Finding | None:
    """Detect self-play in which the final Elo rating is not significantly above the rating of the first snapshot, or has fallen.

    The rating counts as fallen if the final rating is significantly below the highest rating. In figure 1 of Silver et al., 2018
    (arXiv:1712.01815), the Elo rating of AlphaZero rises during training. Vinyals et al., 2019 (AlphaStar), describe that strategies can be
    forgotten and learned again in cycles if the agent plays only against its latest snapshot.
    """
    session.require_progress()
    ratings, error = session.column("elo"), math.sqrt(2.0) * session.rating_error
    last = session.column("elo", 0.75).median
    peak_frame, peak = ratings.frame_and_largest_value
    rises, falls = last > ratings.curve.value[0] + 2.0 * error, last < peak - 4.0 * error
    if rises and not falls:
        return None
    frames = session.case.spec_number("env.max_frame", session.last_frame)
    only_latest = session.case.setting("meta.self_play.opponent") == "latest"
    return Finding(
        "The rating falls" if falls else "The rating does not rise",
        "warning",
        f"Elo rating {last:.0f} in the last quarter; {peak:.0f} at frame {peak_frame:,}"
        if falls
        else f"Elo rating {last:.0f} in the last quarter, {ratings.curve.value[0]:.0f} at frame {int(ratings.curve.frame[0]):,}",
        "play against earlier snapshots too" if only_latest else "train for longer",
        "meta.self_play.opponent" if only_latest else "env.max_frame",
        "uniform" if only_latest else int(4 * frames),
        frames=ratings.frames,
    )


def bottleneck(session: Session) -> Finding | None:
    """Detect a learner that waits for the envs: the learner is busy at most 25 % of the time, and the rollout workers at least 75 %.

    The slowest kind of process determines the throughput (Petrenko et al., 2020, arXiv:2006.11751).
    """
    session.second_half("rollout_busy")
    found = busiest([session.table])
    require_measured(found is not None, "no shares of time")
    assert found is not None
    busy = found[1]
    if busy["rollout"] < MIN_BUSY or busy["learner"] > 1.0 - MIN_BUSY:
        return None
    workers = int(session.case.spec_number("meta.sampler.num_workers", 1.0))
    return Finding(
        "The env is slower than the learner",
        "remark",
        f"workers step envs for {100 * busy['rollout']:.0f} % of the time, the learner trains for {100 * busy['learner']:.0f} %",
        "use more workers, if there are cores",
        "meta.sampler.num_workers",
        2 * workers,
        frames=session.second_half("rollout_busy").frames,
    )


def lockstep(session: Session) -> Finding | None:
    """Detect rollouts that contain only one part of the episodes, because all episodes begin and end in the same steps.

    The fault is reported for envs of EnvPool if the time limit ends every episode and a rollout has at most a quarter of the steps of an
    episode. Each update then learns from one part of the episodes only, and the next update learns from the next part. On tasks of the
    DeepMind Control Suite, PPO was unstable (see docs/algorithms/PPO.md). rsl_rl, the library of Rudin et al., 2021
    (arXiv:2109.11978), can begin the first episodes at random steps.
    """
    case = session.case
    backend, num_envs = case.run.starts[-1].get("backend"), case.spec_number("env.num_envs", 1.0)
    require_applicable(backend == "envpool" and not case.has_opponents, "only EnvPool can stagger episodes, in envs with one agent")
    require_applicable(
        case.setting("agent.memory.name") == "OnPolicyBatchReplay" and num_envs > 1.0, "there are no rollouts of several envs"
    )
    require_applicable(not case.run.spec.get("meta", {}).get("sampler") and not case.run.shares_one_net, "several processes step envs")
    rollout = case.rollout_length
    truncated, length, longest = (session.column(name) for name in ("epi_truncated", "epi_len", "epi_len_max"))
    limit = float(longest.curve.value.max())
    equal = bool((truncated.curve.value == 1.0).all() and (length.curve.value == limit).all())
    if case.setting("env.stagger_episodes") or not equal or rollout > MAX_PART * limit:
        return None
    return Finding(
        "All envs are in the same part of their episodes",
        "remark",
        f"all episodes have {number_text(limit)} steps and begin at the same time; a rollout has {rollout} steps",
        "truncate the first episode of each env after a different number of steps",
        "env.stagger_episodes",
        True,
        frames=length.frames,
    )


def episodes(session: Session) -> Finding | None:
    """Detect a run in which fewer than 20 episodes have ended. Fewer episodes are not enough to estimate the mean return.

    Henderson et al., 2018 (arXiv:1709.06560), and Agarwal et al., 2021 (arXiv:2108.13264), describe the uncertainty of estimates from few
    samples.
    """
    session.case.require_training_envs()
    count = session.episodes
    if count >= MIN_EPISODES:
        return None
    frames = session.case.spec_number("env.max_frame", session.last_frame)
    return Finding(
        "Too few episodes to tell",
        "remark",
        f"{count:.0f} episodes have ended in {session.last_frame:,} frames; at least {MIN_EPISODES} are needed for a mean return",
        "train for longer",
        "env.max_frame",
        int(frames * max(2.0, math.ceil(MIN_EPISODES / max(count, 1.0)))),
        frames=(0, session.last_frame),
    )


def seeds(case: DiagnosedRun) -> Finding | None:
    """Detect a run with fewer than 3 sessions. The returns of a spec can differ considerably between seeds.

    Henderson et al., 2018 (arXiv:1709.06560), show how much returns differ between seeds. Agarwal et al., 2021 (arXiv:2108.13264),
    recommend interval estimates for 3 to 10 runs.
    """
    count = len({session.session_number for session in case.sessions})
    require_applicable(not case.run.shares_one_net, "the sessions train one net")
    require_applicable(case.run.is_standalone, "a search or a study has the other seeds")
    if count >= MIN_SEEDS:
        return None
    return Finding(
        "Too few seeds to tell",
        "remark",
        f"{count} session{'s' if count > 1 else ''}: another seed may give another result",
        "train more sessions",
        "meta.max_session",
        4,
    )
