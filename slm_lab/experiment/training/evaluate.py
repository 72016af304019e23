"""Play episodes without learning, for evaluation during training and for the mode enjoy."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import numpy as np

from slm_lab.experiment.execute.heartbeat import EVALUATING
from slm_lab.experiment.plan import Stop
from slm_lab.experiment.training.experience import Beat, no_beat
from slm_lab.lib.log import notice
from slm_lab.lib.padding import pad_rows, remove_padding
from slm_lab.lib.records import EnvInfo, VecStep
from slm_lab.spec.models.algorithm import ReplayAlgorithmSpec
from slm_lab.spec.models.spec import Spec

if TYPE_CHECKING:
    from slm_lab.env.vec import Env

MAX_STEPS = 100_000
"""Maximum length of an episode in steps, four times the length of the longest games of ALE."""
EVALUATIONS = 8
"""Number of evaluations during a Session whose evaluation is configured by meta.eval_episodes and not by meta.rigorous_eval."""
_EPISODES = range(3, 6)
"""Possible numbers of episodes per evaluation for meta.eval_episodes="auto", in addition to 0."""
_SHARE = 0.024
"""Maximum number of evaluation steps for meta.eval_episodes="auto", as a fraction of the frames. With the fraction 0.024, evaluation takes
at most 3 % of the training time (PPO with 8 envs: 2.4 %)."""
_UPDATE_COST = 4.0
"""Assumed duration of an off-policy update, in units of the duration of an evaluation step. Measured durations are 25 evaluation steps for
DQN in CartPole, and 130 evaluation steps for SAC in HalfCheetah."""
_ENVS = 8
"""Number of training envs. With more envs, the time per frame is assumed to be inversely proportional to the number of envs. With 8 envs,
PPO in CartPole takes 42 µs per frame."""


class Act(Protocol):
    """Function that chooses the actions of all rows of a vector env (one row per agent of each env copy)."""

    def __call__(self, obs_N: np.ndarray, first_N: np.ndarray, acts_N: np.ndarray | None = None, /) -> np.ndarray:
        """Return the actions of all rows, in the format of `env.step`.

        Args:
            obs_N: observations.
            first_N: whether the observation of each row is the first of an episode, bool [N].
            acts_N: whether the agent of each row acts in this step, bool [N], or None if all agents act (see VecStep).
        """


Record = Callable[[np.ndarray, np.ndarray, VecStep, np.ndarray], None]
"""Function record(obs_N, action_N, step, counts_N), which is called with each step. The flags counts_N, bool [N], tell whether the running
episode of each row counts among the requested episodes."""


@dataclass(frozen=True)
class EvaluationPlan:
    """Settings that determine when and how the policies of a Session are evaluated."""

    envs: int
    """Number of evaluation envs. An evaluation plays one episode in each evaluation env."""
    every: int
    """Number of frames between two evaluations. A further evaluation takes place at the end of training."""
    deterministic: bool
    """Whether the agent takes the mode of the action distribution as the action, instead of a sample."""


def plan_evaluation(spec: Spec, frames: int, time_limit: int | None) -> EvaluationPlan | None:
    """Return the evaluation plan of a Session, or None if the Session is not evaluated.

    With meta.eval_episodes="auto", the number of episodes depends only on the spec and not on measured times, so that runs are
    reproducible.

    Args:
        frames: number of frames that each policy of the Session collects.
        time_limit: maximum number of steps of an episode, or None if there is no limit.
    """
    meta = spec.meta
    if meta.rigorous_eval:
        return EvaluationPlan(meta.rigorous_eval, meta.eval_frequency, meta.eval_deterministic)
    # the mean return of a policy that plays against itself contains no information
    episodes = 0 if meta.self_play is not None and meta.eval_episodes == "auto" else meta.eval_episodes
    if episodes == "auto":
        episodes = _affordable_episodes(spec, frames, time_limit) if meta.evaluates_by_default else 0
    return EvaluationPlan(episodes, -(-frames // EVALUATIONS), True) if episodes else None


def _affordable_episodes(spec: Spec, frames: int, time_limit: int | None) -> int:
    """Return the number of episodes per evaluation for meta.eval_episodes="auto", or 0 if fewer than min(_EPISODES) episodes are
    affordable.

    Even if all episodes reach the time limit, the estimated time of all evaluations is at most the fraction _SHARE of the training time.
    """
    algorithm = spec.agent.algorithm
    if time_limit is None or not algorithm.learns:
        return 0
    if algorithm.offline:  # all returns come from evaluation, since training plays no episodes
        return _EPISODES[-1]
    updates = (
        (getattr(algorithm, "training_iter", None) or 1) / algorithm.training_frequency
        if isinstance(algorithm, ReplayAlgorithmSpec)
        else 0.0
    )
    cost = (1.0 + _UPDATE_COST * updates) / max(1.0, spec.env.num_envs / _ENVS)
    affordable = int(_SHARE * frames * cost / (EVALUATIONS * time_limit))
    return min(affordable, _EPISODES[-1]) if affordable >= _EPISODES[0] else 0


def joint_act(policies: Sequence[tuple[np.ndarray, Act]]) -> Act:
    """Return a function that chooses the actions of all rows of a vector env with several policies.

    Args: policies: pair (row indices, int64 [K], and function that chooses the actions of these rows) for each policy.
    """

    def act(obs_N: np.ndarray, first_N: np.ndarray, acts_N: np.ndarray | None = None) -> np.ndarray:
        action_N: np.ndarray | None = None
        for rows, policy_act in policies:
            action_K = policy_act(obs_N[rows], first_N[rows], None if acts_N is None else acts_N[rows])
            if action_N is None:
                action_N = np.zeros((len(obs_N), *action_K.shape[1:]), action_K.dtype)
            action_N[rows] = action_K
        assert action_N is not None
        return action_N

    return act


def strip_padding(info: EnvInfo, names: Collection[str], act: Act) -> Act:
    """Return a function that chooses padded actions for the rows of the agents `names`, given the padded observations of these rows.

    If the env does not pad observations and actions, `act` is returned unchanged.

    Args:
        info: EnvInfo of the vector env.
        names: names of the agents for which `act` chooses actions.
        act: function that chooses actions without padding, given observations without padding.
    """
    if not info.groups:
        return act
    unpadded, padded = info.for_agents(names).observation, info.action
    return lambda obs_K, first_K, acts_K=None, /: pad_rows(act(remove_padding(obs_K, unpadded), first_K, acts_K), padded)


def play_episodes(
    env: Env,
    act: Act,
    stop: Stop,
    beat: Beat = no_beat,
    episodes: int | None = None,
    record: Record | None = None,
    rows: np.ndarray | None = None,
) -> list[float]:
    """Play episodes. Returns the return (sum of raw rewards) of each episode, in the order of the rows of `env`, or [] if a stop is
    requested before all episodes end.

    The number of episodes of each row is fixed before the first step. (If the first `episodes` episodes that end were counted, they would
    include too many short episodes, and their mean return would be biased.) If an episode does not end within MAX_STEPS, this episode and
    all later episodes of its row are left out.

    Args:
        act: function that chooses the actions.
        episodes: total number of episodes, or None for one episode per row.
        record: function that is called with each step (see Record).
        rows: indices of the rows for which returns are returned, or None for all rows.
    """
    count = env.info.num_envs
    quota, rest = divmod(count if episodes is None else episodes, count)
    left_N = np.full(count, quota) + (np.arange(count) < rest)
    wanted = int(left_N.sum())
    returns: list[list[float]] = [[] for _ in range(count)]
    obs_N, first_N = env.reset(), np.ones(count, dtype=bool)
    steps, begin_N, deadline = 0, np.zeros(count, np.int64), MAX_STEPS
    while left_N.any():
        if stop.requested:
            return []
        if steps == deadline:
            left_N[steps - begin_N >= MAX_STEPS] = 0
            deadline = int(begin_N[left_N > 0].min(initial=steps)) + MAX_STEPS
            continue
        steps += 1
        beat(EVALUATING)
        action_N = act(obs_N, first_N) if env.acts_N is None else act(obs_N, first_N, env.acts_N)
        step = env.step(action_N)
        if record is not None:
            record(obs_N, action_N, step, left_N > 0)
        obs_N, first_N = step.obs_N, step.first_N
        for episode in step.episodes:
            begin_N[episode.env] = steps
            if left_N[episode.env]:
                left_N[episode.env] -= 1
                returns[episode.env].append(episode.total_reward)
    played = [value for row_returns in returns for value in row_returns]
    if len(played) < wanted:
        notice(f"evaluation: {wanted - len(played)} of {wanted} episodes did not end within {MAX_STEPS:,} steps; set env.max_t")
    return played if rows is None else [value for row in rows for value in returns[row]]
