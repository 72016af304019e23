"""Play episodes without learning: evaluation during training, and mode enjoy."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import numpy as np

from slm_lab.experiment.execute.heartbeat import EVALUATING
from slm_lab.experiment.plan import Stop
from slm_lab.experiment.training.experience import Beat, no_beat
from slm_lab.lib.log import notice
from slm_lab.lib.padding import padded, without_padding
from slm_lab.lib.records import EnvInfo, VecStep
from slm_lab.spec.models.algorithm import ReplayAlgorithmSpec
from slm_lab.spec.models.spec import Spec

if TYPE_CHECKING:
    from slm_lab.env.vec import Env

MAX_STEPS = 100_000
"""Maximum length of an episode: four times ALE's longest game."""
EVALUATIONS = 8
"""Number of evaluations in a Session, with meta.eval_episodes."""
_EPISODES = range(3, 6)
"""Numbers of episodes that meta.eval_episodes "auto" can mean."""
_SHARE = 0.024
"""Maximum env steps of evaluation by default as a share of the frames, which takes at most 3 % of the time (PPO with 8 envs: 2.4 %)."""
_UPDATE_COST = 4.0
"""Assumed time of an off-policy update, in env steps of an evaluation; measured: 25 for DQN in CartPole, 130 for SAC in HalfCheetah."""
_ENVS = 8
"""Number of training envs above which a frame is assumed to be faster in proportion; with 8, PPO in CartPole takes 42 µs per frame."""


class Act(Protocol):
    """Function that chooses the actions of all rows of an env."""

    def __call__(self, obs_N: np.ndarray, first_N: np.ndarray, acts_N: np.ndarray | None = None, /) -> np.ndarray:
        """Return the actions, in the form that the env takes. Args: acts_N: see VecStep; given only if some rows wait."""


Record = Callable[[np.ndarray, np.ndarray, VecStep, np.ndarray], None]
"""record(obs_N, action_N, step, counts_N): a step, and whether each env's episode counts."""


@dataclass(frozen=True)
class EvaluationPlan:
    """When and how a Session is evaluated."""

    envs: int
    """Number of evaluation envs, each of which plays one episode."""
    every: int
    """Frames between evaluations; the last one is at the end."""
    deterministic: bool
    """Whether the agent acts by the mode of the action distribution."""


def plan_evaluation(spec: Spec, frames: int, time_limit: int | None) -> EvaluationPlan | None:
    """Return how a Session is evaluated, None if it is not.

    The number of episodes that meta.eval_episodes "auto" means depends on the spec alone, not on measured times, so that a run repeats.

    Args:
        frames: frames that a policy of the Session collects.
        time_limit: maximum steps of an episode; None if not limited.
    """
    meta = spec.meta
    if meta.rigorous_eval:
        return EvaluationPlan(meta.rigorous_eval, meta.eval_frequency, meta.eval_deterministic)
    # the mean return of a policy against itself says nothing
    episodes = 0 if meta.self_play is not None and meta.eval_episodes == "auto" else meta.eval_episodes
    if episodes == "auto":
        episodes = _affordable_episodes(spec, frames, time_limit) if meta.evaluates_by_default else 0
    return EvaluationPlan(episodes, -(-frames // EVALUATIONS), True) if episodes else None


def _affordable_episodes(spec: Spec, frames: int, time_limit: int | None) -> int:
    """Return the number of episodes per evaluation with at most _SHARE of the frames if all reach the time limit; 0 if below _EPISODES."""
    algorithm = spec.agent.algorithm
    if time_limit is None or not algorithm.learns:
        return 0
    if algorithm.offline:  # there are no other episodes
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
    """Return a function that lets each policy choose the actions of its rows, int64 [K]."""

    def act(obs_N: np.ndarray, first_N: np.ndarray, acts_N: np.ndarray | None = None) -> np.ndarray:
        action_N: np.ndarray | None = None
        for rows, own in policies:
            action_K = own(obs_N[rows], first_N[rows], None if acts_N is None else acts_N[rows])
            if action_N is None:
                action_N = np.zeros((len(obs_N), *action_K.shape[1:]), action_K.dtype)
            action_N[rows] = action_K
        assert action_N is not None
        return action_N

    return act


def without_padding_of(info: EnvInfo, names: Collection[str], act: Act) -> Act:
    """Return a function that acts for the rows of some agents in an env whose observations and actions may be padded.

    Args: names: of the agents. act: gets observations, and returns actions, without padding.
    """
    if not info.groups:
        return act
    own, form = info.for_agents(names).observation, info.action
    return lambda obs_K, first_K, acts_K=None, /: padded(act(without_padding(obs_K, own), first_K, acts_K), form)


def play(
    env: Env,
    act: Act,
    stop: Stop,
    beat: Beat = no_beat,
    episodes: int | None = None,
    record: Record | None = None,
    rows: np.ndarray | None = None,
) -> list[float]:
    """Return raw returns of `episodes` episodes (None: one per env) in the order of envs; [] if `stop` is requested before the end.

    `record` is called with each step; with `rows`, only returns of these rows are returned. The number of episodes per env is fixed before
    the first step: the episodes that end first are the shortest, and their mean would be biased. If one does not end within MAX_STEPS, it
    and all later episodes of its env are left out.
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
    played = [value for of_env in returns for value in of_env]
    if len(played) < wanted:
        notice(f"evaluation: {wanted - len(played)} of {wanted} episodes did not end within {MAX_STEPS:,} steps; set env.max_t")
    return played if rows is None else [value for row in rows for value in returns[row]]
