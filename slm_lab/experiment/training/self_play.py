"""Self-play, in which a policy trains against snapshots of its earlier weights. Snapshots receive Elo ratings."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from slm_lab.agent.policy.policy import Policy
from slm_lab.env.board_players import Player, build_player
from slm_lab.env.vec import Env
from slm_lab.experiment.execute.heartbeat import EVALUATING
from slm_lab.experiment.files.sink import RunSink
from slm_lab.experiment.plan import Stop
from slm_lab.experiment.training.evaluate import MAX_STEPS
from slm_lab.experiment.training.experience import Beat, no_beat
from slm_lab.experiment.training.learner import PolicyLearner
from slm_lab.experiment.training.observers.base import SELF_PLAY_COLUMNS, score_column
from slm_lab.lib.log import PlainError
from slm_lab.lib.records import VecStep
from slm_lab.lib.rng import generator_state, set_generator_state
from slm_lab.spec.models.meta import SelfPlaySpec
from slm_lab.spec.report import Problem, SpecError

SNAPSHOTS = 20
"""Number of snapshots that a run takes if meta.self_play.snapshot_frequency is absent."""
RATING_ENVS = 16
"""Maximum number of rating games that are played at the same time."""
_RATED_AGAINST = 2
"""Maximum number of older snapshots against which a snapshot plays for its rating, in addition to random actions and the previous
snapshot."""
_SCORE_DECAY = 0.95
"""Decay factor per game for the moving average of the score against a snapshot. The average covers about the last 20 games."""
_SCALE = 400.0 / np.log(10.0)
"""Number of Elo points per unit of log odds."""
BuildPolicy = Callable[[np.random.Generator], Policy]


class Rating(NamedTuple):
    """An Elo rating and its standard error."""

    elo: float = 0.0
    error: float = 0.0


def estimate_elo(score_K: Sequence[float], games_K: Sequence[int], opponent_K: Sequence[float], prior: float = 0.0) -> Rating:
    """Return the maximum likelihood estimate of a player's Elo rating, given total scores against opponents with known ratings.

    The expected score against an opponent is 1 / (1 + 10^((opponent − elo) / 400)) (Elo 1978). One draw against an opponent with the rating
    `prior` is added, so that the estimate is finite even if all games were won or all games were lost.

    Args:
        score_K: total score against each opponent: 1 for each won game, 0.5 for each drawn game.
        games_K: number of games against each opponent.
        opponent_K: ratings of the opponents.
    """
    score_J, games_J = np.array([*score_K, 0.5]), np.array([*games_K, 1.0])
    opponent_J = np.array([*opponent_K, prior]) / _SCALE
    low, high = float(opponent_J.min()) - 20.0, float(opponent_J.max()) + 20.0
    for _ in range(60):  # the sum of expected scores increases with the rating
        middle = 0.5 * (low + high)
        expected_J = 1.0 / (1.0 + np.exp(opponent_J - middle))
        low, high = (middle, high) if (games_J * expected_J).sum() < score_J.sum() else (low, middle)
    information = float((games_J * expected_J * (1.0 - expected_J)).sum())
    return Rating(float(middle * _SCALE), float(_SCALE / max(information, 1e-12) ** 0.5))


_UNRATED = Rating()


class Snapshot:
    """A copy of the learning policy with the weights of one frame. The copy plays as an opponent."""

    def __init__(self, index: int, frame: int, policy: Policy, rating: Rating = _UNRATED, score: float = 0.5) -> None:
        self.index, self.frame, self.policy, self.rating = index, frame, policy, rating
        self.score = score
        """Moving average of the learning policy's score in games against this snapshot."""

    def state_dict(self) -> dict[str, Any]:
        values = {"index": self.index, "frame": self.frame, "rating": tuple(self.rating), "score": self.score}
        return {**values, "weights": self.policy.weights(), "explore_var": self.policy.explore_var}


def team_score(returns_A: np.ndarray, own_A: np.ndarray) -> float:
    """Return the score of a team of agents in one game.

    The score is a mean over all pairs that consist of an agent of the team and an agent outside the team. The score of a pair is 1 if the
    agent of the team has the higher return, 0.5 if the two agents have equal returns, and 0 if the agent of the team has the lower return.

    Args:
        returns_A: return of each agent in the game, [A].
        own_A: whether each agent belongs to the team, bool [A].
    """
    difference = returns_A[own_A][:, None] - returns_A[~own_A]
    return float(np.mean(0.5 * (np.sign(difference) + 1.0)))


def game_score(returns_A: np.ndarray, player: int) -> float:
    """Return the score of a single agent in one game (see team_score).

    Args:
        returns_A: return of each agent in the game, [A].
        player: index of the agent whose score is returned.
    """
    return team_score(returns_A, np.arange(len(returns_A)) == player)


class SelfPlay:
    """Self-play of one policy. A SelfPlay object chooses the opponent of each game, computes the opponents' actions, and rates snapshots.

    Args:
        spec: meta.self_play.
        learner: learner of the policy that trains by self-play.
        build: function that receives a random generator, and builds a policy with the nets of the spec.
        env: vector env in which the rating games are played.
        num_envs: E, number of training envs.
        seed: seed for the choice of opponents and for the opponents' actions.
        session: index of the Session, for the table of snapshots.
        stop: stop request, which ends rating games early.
        beat: heartbeat function, which is called during rating games.
    """

    def __init__(
        self,
        spec: SelfPlaySpec,
        learner: PolicyLearner,
        build: BuildPolicy,
        env: Env,
        num_envs: int,
        seed: int,
        session: int,
        stop: Stop,
        beat: Beat = no_beat,
    ) -> None:
        self.spec, self.learner, self.session, self.env, self.stop, self.beat = spec, learner, session, env, stop, beat
        self.rng = np.random.default_rng([seed, 3])
        self._build = build
        self.fixed = {path: self._build_fixed_opponent(path) for path in spec.fixed_opponents}
        """Scripted players by their import paths (spec.fixed_opponents). Each snapshot plays games against every scripted player, and its
        mean scores are recorded."""
        self.rated: dict[str, float] = {}
        """Rating and scores of the newest snapshot: column → value."""
        self.frequency = spec.snapshot_frequency or max(1, learner.frames // SNAPSHOTS)
        self.pool: list[Snapshot] = []
        self.taken = 0
        """Number of snapshots that have been taken."""
        self.num_agents = len(env.info.agents)
        self.opponent_E = np.full(num_envs, -1, np.int64)
        """Index of the snapshot that plays against the learning policy in each env, or −1 if the learning policy plays for all agents of
        the env."""
        self.player_E = np.zeros(num_envs, np.int64)
        """Index of the agent for which the learning policy plays in each env. The index is used only in envs with a snapshot as the
        opponent."""
        self._state_N = learner.agent.policy.initial_state(num_envs * self.num_agents)
        self.sink: RunSink | None = None
        """Sink to which the table of snapshots is written, or None to write no table."""
        self.retired: list[Snapshot] = []
        """Snapshots that have been removed from the pool and still play in running games."""

    def _build_fixed_opponent(self, path: str) -> Player:
        """Build the scripted player with the import path `path`. Raises SpecError if the player cannot be built."""
        try:
            return build_player(path, self.env.info, self.rng)
        except ValueError as error:
            problem = Problem("meta.self_play.fixed_opponents", f"cannot be built for {self.env.name}: {error}")
            raise SpecError(self.env.name, [problem]) from None

    def begin(self, sink: RunSink | None) -> None:
        """Set the sink to which the table of snapshots is written, or None to write no table."""
        self.sink = sink

    @property
    def learner_mask_N(self) -> np.ndarray:
        """Whether the learning policy acts for each row (agent of one of the parallel envs) of the training env, bool [N]."""
        mask_EA: np.ndarray = (self.opponent_E < 0)[:, None] | (self.player_E[:, None] == np.arange(self.num_agents))
        return mask_EA.ravel()

    def write_opponent_actions(self, obs_N: np.ndarray, acts_N: np.ndarray | None, action_N: np.ndarray) -> None:
        """Compute the actions of the snapshots, and write the actions into `action_N`. Rows in which no snapshot acts are not changed.

        Args:
            obs_N: observations of all rows (agents of parallel envs).
            acts_N: whether the agent of each row acts in this step, bool [N], or None if all agents act.
            action_N: actions of all rows in the format of `env.step`. This array is changed in place.
        """
        acting_N = ~self.learner_mask_N
        if acts_N is not None:
            acting_N &= acts_N
        if not acting_N.any():
            return
        opponent_N = np.repeat(self.opponent_E, self.num_agents)
        for snapshot in (*self.pool, *self.retired):
            rows = np.flatnonzero(acting_N & (opponent_N == snapshot.index))
            if len(rows):
                out = snapshot.policy.act(obs_N[rows], None if self._state_N is None else self._state_N[rows])
                action_N[rows] = snapshot.policy.env_action(out.action_N)
                if self._state_N is not None:
                    self._state_N[rows] = out.state_N

    def finish_step(self, step: VecStep) -> None:
        """Update the scores of snapshots with the games that ended in a step, and choose the opponents of new games."""
        if self._state_N is not None:
            self._state_N[step.first_N] = 0.0
        for env, returns_A in returns_by_env(step, self.env).items():
            if self.opponent_E[env] >= 0:
                self._update_score(int(self.opponent_E[env]), game_score(returns_A, int(self.player_E[env])))
        if 1 in step.first_N.tobytes():
            self.choose_opponents(step.first_N)

    def _update_score(self, index: int, score: float) -> None:
        for snapshot in self.pool:
            if snapshot.index == index:
                snapshot.score = _SCORE_DECAY * snapshot.score + (1.0 - _SCORE_DECAY) * score

    def choose_opponents(self, first_N: np.ndarray) -> None:
        """Choose the opponents in the envs in which a game begins.

        Args: first_N: whether an episode begins in each row, bool [N].
        """
        for env in np.flatnonzero(first_N.reshape(-1, self.num_agents).any(axis=1)):
            self.opponent_E[env] = -1
            if self.spec.opponent == "latest" or not self.pool or self.rng.random() >= self.spec.past_fraction:
                continue
            self.opponent_E[env] = self.pool[self._draw_opponent()].index
            self.player_E[env] = self.rng.integers(self.num_agents)
        self.retired = [snapshot for snapshot in self.retired if (self.opponent_E == snapshot.index).any()]

    def _draw_opponent(self) -> int:
        """Draw a snapshot at random as an opponent, and return its position in the pool."""
        if self.spec.opponent == "uniform":
            return int(self.rng.integers(len(self.pool)))
        weight_P = np.array([(1.0 - snapshot.score) ** 2 for snapshot in self.pool]) + 1e-3  # so that every snapshot can be drawn
        return int(self.rng.choice(len(self.pool), p=weight_P / weight_P.sum()))

    def take_snapshot_if_due(self) -> None:
        """If `frequency` frames have passed since the last snapshot, take and rate a snapshot, and add the snapshot to the pool."""
        if self.learner.clock.frame < self.taken * self.frequency or self.stop.requested:
            return
        agent, before = self.learner.agent, (generator_state(self.rng), self.env.state_dict())
        policy = self._build_policy(agent.policy.weights(), agent.final_explore_var or 0.0)
        snapshot = Snapshot(self.taken, self.learner.clock.frame, policy)
        if not self._rate(snapshot):  # a continued run takes the snapshot, from the state before the rating
            set_generator_state(self.rng, before[0])
            self.env.load_state_dict(before[1])
            return
        self.taken += 1
        self.pool.append(snapshot)
        while len(self.pool) > self.spec.pool:
            self.retired.append(self.pool.pop(0))

    def _build_policy(self, weights: dict[str, torch.Tensor], explore_var: float) -> Policy:
        """Return a new policy with the given weights and exploration variable."""
        policy = self._build(self.rng)
        policy.load_weights(weights)
        policy.explore_var = explore_var
        return policy

    def _rate(self, snapshot: Snapshot) -> bool:
        """Rate a snapshot by games against random actions, the previous snapshot, and up to two older snapshots.

        The snapshot also plays against the scripted players, but these games do not affect the rating. Returns False if a stop is requested
        before all games have ended, and True otherwise.
        """
        games = self.spec.rating_games
        if not games:
            return True
        others = self.pool[:-1]
        places = np.linspace(0, len(others) - 1, min(_RATED_AGAINST, len(others))).astype(int).tolist()
        opponents: list[Snapshot | None] = [None, *([self.pool[-1]] if self.pool else []), *(others[place] for place in places)]
        self.env.normalizers.copy_obs_statistics(self.learner.normalizers.state_dict())
        policies = [None if opponent is None else opponent.policy for opponent in opponents]
        scores = [play_match(self.env, snapshot.policy, policy, games, self.stop, self.beat) for policy in policies]
        fixed = {path: play_match(self.env, snapshot.policy, player, games, self.stop, self.beat) for path, player in self.fixed.items()}
        if self.stop.requested:
            return False
        ratings = [0.0 if opponent is None else opponent.rating.elo for opponent in opponents]
        totals, counts = [sum(score_G) for score_G in scores], [len(score_G) for score_G in scores]
        snapshot.rating = estimate_elo(totals, counts, ratings, ratings[min(1, len(ratings) - 1)])
        rated: dict[str, float] = {"elo": snapshot.rating.elo, "elo_se": snapshot.rating.error}
        rated |= {name: float(np.mean(score_G)) for name, score_G in zip(SELF_PLAY_COLUMNS[2:], scores, strict=False)}
        rated |= {score_column(path): float(np.mean(score_G)) for path, score_G in fixed.items()}
        self.rated = rated
        if self.sink is not None:
            columns = ("frame", "snapshot", *SELF_PLAY_COLUMNS, *map(score_column, self.fixed))
            values = {"frame": snapshot.frame, "snapshot": snapshot.index, **rated}
            self.sink.append_extra_row(self.session, "elo", columns, {column: values.get(column) for column in columns})
        return True

    def newest_rating(self) -> dict[str, float]:
        """Return the rating and the scores of the newest snapshot, or {} if no snapshot has been rated."""
        return self.rated

    def close(self) -> None:
        """Close the env in which rating games are played."""
        self.env.close()

    def state_dict(self, running_games: bool) -> dict[str, Any]:
        """Return the state of the pool, the ratings and the random stream.

        Args: running_games: whether the state also contains the opponents and players of the running games.
        """
        state = {
            "rng": generator_state(self.rng),
            "taken": self.taken,
            "rated": self.rated,
            "pool": [snapshot.state_dict() for snapshot in self.pool],
            "env": self.env.state_dict(),
        }
        if running_games:
            hidden = None if self._state_N is None else torch.from_numpy(self._state_N.copy())
            state["retired"] = [snapshot.state_dict() for snapshot in self.retired]
            state["games"] = {"opponent": self.opponent_E.tolist(), "player": self.player_E.tolist(), "state": hidden}
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        set_generator_state(self.rng, state["rng"])
        self.taken, self.rated = int(state["taken"]), dict(state["rated"])
        self.pool = list(map(self._load_snapshot, state["pool"]))
        self.env.load_state_dict(state["env"])
        self.env.resume()

    def _load_snapshot(self, state: dict[str, Any]) -> Snapshot:
        policy = self._build_policy(state["weights"], state["explore_var"])
        return Snapshot(int(state["index"]), int(state["frame"]), policy, Rating(*state["rating"]), float(state["score"]))

    def load_games(self, state: dict[str, Any]) -> None:
        """Load the opponents and players of the running games from a state returned by `state_dict(running_games=True)`."""
        self.retired = list(map(self._load_snapshot, state["retired"]))
        games = state["games"]
        self.opponent_E[:], self.player_E[:] = games["opponent"], games["player"]
        self._state_N = None if games["state"] is None else games["state"].numpy()


def play_match(env: Env, policy: Policy, opponent: Policy | Player | None, games: int, stop: Stop, beat: Beat = no_beat) -> list[float]:
    """Play games between a policy and an opponent, and return the policy's score in each game (see team_score).

    The agent for which the policy plays changes from game to game. The number of games is `games`, rounded up to a multiple of the number
    of envs. If a stop is requested, fewer scores are returned.

    Args: opponent: policy or scripted player that plays for all other agents, or None if the other agents take uniformly random actions.

    Raises PlainError if a game is longer than MAX_STEPS, or if a game does not end for all agents at the same time.
    """
    A, E = len(env.info.agents), env.info.frames
    scores: list[float] = []
    while len(scores) < games and not stop.requested:
        player_E = (np.arange(E) + len(scores) // E) % A
        scores += _play_games(env, policy, opponent, player_E, stop, beat)
    return scores


def _play_games(env: Env, policy: Policy, opponent: Policy | Player | None, player_E: np.ndarray, stop: Stop, beat: Beat) -> list[float]:
    """Play one game in each env, and return the score of `policy` in each game. Returns [] if a stop is requested.

    Args: player_E: index of the agent for which `policy` plays in each env, int64 [E].
    """
    A, obs_N = len(env.info.agents), env.reset()
    policy_mask_N = (player_E[:, None] == np.arange(A)).ravel()
    state_N = policy.initial_state(len(policy_mask_N))
    return_EA, over_E = np.zeros((len(player_E), A)), np.zeros(len(player_E), np.bool_)
    for _ in range(MAX_STEPS):
        beat(EVALUATING)
        action_N = env.sample()
        playing_N = np.repeat(~over_E, A) if env.acts_N is None else env.acts_N & np.repeat(~over_E, A)
        for player, mask_N in ((policy, policy_mask_N), (opponent, ~policy_mask_N)):
            rows = np.flatnonzero(playing_N & mask_N)
            if isinstance(player, Policy) and len(rows):
                out = player.act(obs_N[rows], None if state_N is None else state_N[rows])
                action_N[rows] = player.env_action(out.action_N)
                if state_N is not None:
                    state_N[rows] = out.state_N
            elif player is not None and len(rows):
                action_N[rows] = player.act(obs_N[rows])
        step = env.step(action_N)
        obs_N = step.obs_N
        for index, of_player in returns_by_env(step, env).items():
            if not over_E[index]:
                return_EA[index], over_E[index] = of_player, True
        if over_E.all():
            return [game_score(returns_A, int(index)) for returns_A, index in zip(return_EA, player_E, strict=True)]
        if stop.requested:
            return []
    raise PlainError(f"meta.self_play: a game of {env.name} did not end within {MAX_STEPS:,} steps; set env.max_t")


def returns_by_env(step: VecStep, env: Env) -> dict[int, np.ndarray]:
    """Return the returns of the games that ended in a step, as a dict: index of the env → returns of the env's agents, [A].

    Raises PlainError if a game ended only for some of its agents, since such a game has no winner.
    """
    agents, returns = env.info.agents, dict[int, dict[int, float]]()
    for episode in step.episodes:
        index, player = divmod(episode.env, len(agents))
        returns.setdefault(index, {})[player] = episode.total_reward
    for index, of_player in returns.items():
        if len(of_player) < len(agents):
            ended = ", ".join(agents[player] for player in of_player)
            why = "needs a game that ends for all agents at once"
            raise PlainError(f"meta.self_play: {why}; in env {index} of {env.name}, a game ended only for {ended}; remove meta.self_play")
    return {index: np.array([of_player[player] for player in range(len(agents))]) for index, of_player in returns.items()}
