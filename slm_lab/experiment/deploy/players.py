"""Players in envs with several agents: the policies of a training, and opponents."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from slm_lab.env import board_players
from slm_lab.env.board_players import Player
from slm_lab.env.vec import Env
from slm_lab.experiment.deploy.load import LoadedAgent, load_trained
from slm_lab.experiment.files import bundle as state
from slm_lab.experiment.files.find import CheckpointName, Training, find_training
from slm_lab.experiment.plan import UserError
from slm_lab.experiment.training.evaluate import Act, strip_padding
from slm_lab.lib.records import VecStep
from slm_lab.spec.models.base import is_extension
from slm_lab.spec.models.spec import Spec
from slm_lab.spec.report import nearest_hint

RANDOM = "random"
"""Name of the opponent that draws uniformly among the valid actions."""


class PolicyPlayer(NamedTuple):
    """A trained policy, and the agents for which it acts."""

    agent: LoadedAgent
    policy: str | None = None
    """Name of the policy in agent.policies, or None if the training has only one policy."""
    agents: tuple[str, ...] | None = None
    """Names of the agents for which the policy acts, or None if the policy acts for all agents."""


def load_players(
    training: Training, spec: Spec, which: CheckpointName = "best", session: int | None = None, device: str = "cpu"
) -> list[PolicyPlayer]:
    """Load all policies of one Session of a training or, if training.policy is given, only this policy.

    Args: session: index of the Session, or None for the Session whose worst policy ranks highest (see bundle.weights_sort_key).

    Raises UserError if there is no usable checkpoint.
    """
    policies = spec.agent.policies
    if policies is None:
        return [PolicyPlayer(load_trained(training, which, session, device))]
    if (policy := training.policy) is None and not training.policies:  # a named model, or a training with only one policy
        agent = load_trained(training, which, session, device)
        policy = agent.saved.get("policy") or next(iter(policies))
        return [PolicyPlayer(agent, policy, tuple(policies[policy]))]
    if session is None:
        session = best_session(training, which)
    names = training.policies if policy is None else [policy]
    agents = [load_trained(replace(training, policy=name), which, session, device) for name in names]
    return [PolicyPlayer(agent, name, tuple(policies[name])) for name, agent in zip(names, agents, strict=True)]


def best_session(training: Training, which: CheckpointName) -> int | None:
    """Return the index of the Session whose worst policy ranks highest, or None if no Session has checkpoints of all policies."""
    paths, count, ranks = training.paths, len(training.policies), dict[int, tuple[int, float]]()
    for session in sorted({index // count for index in paths.table_numbers(t=training.trial)}):
        with suppress(state.BundleError, OSError):
            files = [paths.checkpoint(session * count + policy, which, training.trial) for policy in range(count)]
            ranks[session] = min(state.weights_sort_key(state.read_header(file)) for file in files)
    return max(ranks, key=lambda session: ranks[session]) if ranks else None


def make_policy_act(agent: LoadedAgent, rng: np.random.Generator, deterministic: bool) -> Act:
    """Return a function that computes the actions of a policy for all rows (agents of parallel envs) of a vector env.

    The function normalises the observations, so the env must return raw observations.
    """
    act: Act = agent.policy.action_function(rng, deterministic)
    normalizer = agent.normalizers.obs
    if normalizer is None:
        return act
    return lambda obs_N, first_N, acts_N=None, /: act(normalizer(obs_N), first_N, acts_N)


def make_scripted_act(player: Player) -> Act:
    """Return a function that computes the actions of a scripted player for the rows (agents of parallel envs) that act in a step."""

    def act(obs_N: np.ndarray, first_N: np.ndarray, acts_N: np.ndarray | None = None) -> np.ndarray:
        rows = np.arange(len(obs_N)) if acts_N is None else np.flatnonzero(acts_N)
        action = player.info.action
        action_N = np.zeros((len(obs_N), *action.shape), action.dtype)
        if len(rows):
            action_N[rows] = player.act(obs_N[rows])
        return action_N

    return act


def make_random_act(env: Env, rows: np.ndarray) -> Act:
    """Return a function that draws actions uniformly among the valid actions, for some rows (agents of parallel envs) of an env."""
    return lambda obs_N, first_N, acts_N=None, /: env.sample()[rows]


Parts = list[tuple[np.ndarray, Act]]
"""A pair (rows, function) for each player. `rows`, int64 [K], are the indices of the agents of parallel envs for which the function
acts."""


def assign_policies(players: Sequence[PolicyPlayer], env: Env, rows: np.ndarray, rng: np.random.Generator, deterministic: bool) -> Parts:
    """Assign policies to the given rows (agents of parallel envs), and return pairs (rows, function that acts for these rows).

    Rows for which no policy acts are in no pair.
    """
    parts: Parts = []
    for player in players:
        player_rows = rows if player.agents is None else np.intersect1d(rows, env.info.agent_rows(player.agents))
        if len(player_rows):
            act = make_policy_act(player.agent, rng, deterministic)
            parts.append((player_rows, act if player.agents is None else strip_padding(env.info, player.agents, act)))
    return parts


@dataclass(frozen=True)
class Opponent:
    """Opponent of a trained policy: random actions, a scripted player, or the policies of another run. The opponent plays for all agents
    for which the trained policy does not play."""

    name: str
    """Name of the opponent as the user has given it."""
    path: str | None = None
    """Class of a scripted player, "package.module:Class", or None."""
    players: tuple[PolicyPlayer, ...] = ()
    """Policies of another run, or () for random actions or a scripted player."""

    def assign_players(self, env: Env, rows: np.ndarray, rng: np.random.Generator, deterministic: bool) -> Parts:
        """Assign players of the opponent to the given rows (agents of parallel envs), and return pairs (rows, function that acts).

        Raises UserError if the opponent does not fit the env.
        """
        if self.path is not None:
            return self._assign_scripted_players(self.path, env, rows, rng)
        if not self.players:
            return [(rows, make_random_act(env, rows))]
        parts = assign_policies(self.players, env, rows, rng, deterministic)
        if sum(len(player_rows) for player_rows, _ in parts) < len(rows):
            raise UserError(f"--against {self.name}: its policies do not act for all other agents of {env.name}")
        return parts

    def _assign_scripted_players(self, path: str, env: Env, rows: np.ndarray, rng: np.random.Generator) -> Parts:
        """Return pairs (rows, function that acts), with one scripted player for each group of agents that have equal spaces."""
        parts: Parts = []
        for info in env.info.groups or (env.info,):
            try:
                act = make_scripted_act(board_players.build_player(path, info, rng))
            except ValueError as error:
                raise UserError(f"--against {self.name}: this opponent cannot play {env.name}: {error}") from None
            player_rows = np.intersect1d(rows, env.info.agent_rows(info.agents))
            parts += [(player_rows, strip_padding(env.info, info.agents, act))] if len(player_rows) else []
        return parts


def find_opponent(name: str, data_dir: Path, device: str = "cpu") -> Opponent:
    """Return the opponent with the name `name`. Raises UserError if no opponent has this name.

    Args: name: "random", the name of a class in slm_lab.env.board_players, "package.module:Class", or the name of a run or model.
    """
    from slm_lab.spec.load.loader import load_spec

    scripted = [key for key, value in vars(board_players).items() if isinstance(value, type) and hasattr(value, "shape")]
    if name == RANDOM:
        return Opponent(name)
    if name in scripted:
        return Opponent(name, f"{board_players.__name__}:{name}")
    if is_extension(name):
        return Opponent(name, name)
    try:
        training = find_training(name, None, data_dir)
    except UserError as error:
        expected = f"expected {RANDOM}, {', '.join(scripted)}, package.module:Class, or a run or model"
        raise UserError(f"--against {name}: {expected}{nearest_hint(name, [RANDOM, *scripted])} ({error})") from None
    spec = load_spec(training.spec_file, training.spec_name, for_search=False, builds_env=False)
    return Opponent(name, players=tuple(load_players(training, spec, device=device)))


def policy_mask(env: Env, players: Sequence[PolicyPlayer]) -> np.ndarray:
    """Return whether the policies of a training play for each row (agent of parallel envs) in games against an opponent, bool [N].

    A policy that acts only for certain agents (PolicyPlayer.agents) plays for these agents. A single policy for all agents plays for one
    agent of each env: the first agent in the first env, the second agent in the second env, and so on.
    """
    num_agents, mask_N = len(env.info.agents), np.zeros(env.info.num_envs, np.bool_)
    for player in players:
        if player.agents is not None:
            mask_N[env.info.agent_rows(player.agents)] = True
    if not mask_N.any():
        envs = np.arange(env.info.frames)
        mask_N[envs * num_agents + envs % num_agents] = True
    return mask_N


class GameReturns:
    """Recorder of the returns of all agents in each game.

    Args: num_rows: number of agents of all parallel envs. num_agents: A, number of agents per env.
    """

    def __init__(self, num_rows: int, num_agents: int) -> None:
        self.num_agents = num_agents
        self._returns: list[list[float]] = [[] for _ in range(num_rows)]

    def add(self, obs_N: np.ndarray, action_N: np.ndarray, step: VecStep, counts_N: np.ndarray) -> None:
        """Add the returns of the episodes that end in a vector step. The arguments are those of a function of the type evaluate.Record."""
        for episode in step.episodes:
            if counts_N[episode.env]:
                self._returns[episode.env].append(episode.total_reward)

    def completed_games(self) -> list[tuple[int, np.ndarray]]:
        """Return (index of the env, returns [A] of its agents) for each game that has ended for all agents."""
        games = []
        for first in range(0, len(self._returns), self.num_agents):
            returns_of_env = zip(*self._returns[first : first + self.num_agents], strict=False)
            games += [(first // self.num_agents, np.array(returns)) for returns in returns_of_env]
        return games


def check_agents_covered(players: Sequence[PolicyPlayer], env: Env, name: str) -> None:
    """Raise UserError if there is an agent of the env for which no policy plays.

    Args: name: description of the policies for the error message.
    """
    played: set[Any] = {agent for player in players for agent in player.agents or env.info.agents}
    if missing := [agent for agent in env.info.agents if agent not in played]:
        raise UserError(
            f"{name} acts for {', '.join(sorted(played))} only; who plays for {', '.join(missing)}? Add --against random|CLASS|RUN"
        )
