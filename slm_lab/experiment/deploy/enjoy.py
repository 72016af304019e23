"""Mode enjoy: play episodes with the policy of a checkpoint, on screen, recorded as a video, or without rendering."""

from __future__ import annotations

import os
from collections.abc import Collection, Generator, Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from types import ModuleType
from typing import Any, Literal, NamedTuple

import gymnasium as gym
import numpy as np

from slm_lab.env.agent_spaces import image_channels
from slm_lab.env.make import make_env
from slm_lab.env.render import has_display, with_rendering
from slm_lab.env.spaces import action_codec, is_compatible_space, space_from_dict
from slm_lab.env.vec import Env
from slm_lab.experiment.deploy.facts import read_saved_spec, spec_digest
from slm_lab.experiment.deploy.load import LoadedAgent
from slm_lab.experiment.deploy.players import (
    GameReturns,
    Opponent,
    PolicyPlayer,
    assign_policies,
    check_agents_covered,
    find_opponent,
    load_players,
    policy_mask,
)
from slm_lab.experiment.execute.local.user_code import close_env
from slm_lab.experiment.files.find import CheckpointName, Training
from slm_lab.experiment.files.paths import RunPaths
from slm_lab.experiment.files.storage import Location
from slm_lab.experiment.plan import Plan, Stop, UserError
from slm_lab.experiment.report.metrics import estimate_mean
from slm_lab.experiment.report.return_range import return_range
from slm_lab.experiment.training import demonstrations
from slm_lab.experiment.training.evaluate import MAX_STEPS, joint_act, play_episodes
from slm_lab.experiment.training.resolve import select_device
from slm_lab.experiment.training.self_play import team_score
from slm_lab.lib.demonstrations import EpisodeRecorder, join_episodes
from slm_lab.lib.limits import cores
from slm_lab.lib.records import EnvInfo
from slm_lab.lib.rng import session_seeds
from slm_lab.lib.text import error_line, last_line
from slm_lab.spec.load.loader import load_spec, mark_set_arguments, parse_set_arguments
from slm_lab.spec.models.env import EnvSpec
from slm_lab.spec.models.spec import Spec
from slm_lab.spec.report import SpecError, show_path

SMALLEST = 360
"""Minimum height of a video frame in pixels. Smaller frames are enlarged by an integer factor, because H.264 blurs the colour of single
pixels."""


def load_ffmpeg() -> ModuleType:
    """Import and return the package imageio_ffmpeg. Raises UserError if the package or the program ffmpeg is missing."""
    install = "--video needs ffmpeg: pip install 'slm-lab[video]'"
    try:
        import imageio_ffmpeg
    except ImportError:
        raise UserError(install) from None
    try:
        imageio_ffmpeg.get_ffmpeg_exe()
    except RuntimeError as error:
        raise UserError(f"{install} (imageio-ffmpeg is installed: {error_line(error)})") from None
    ffmpeg: ModuleType = imageio_ffmpeg
    return ffmpeg


class VideoFile:
    """Writer of an MP4 file with the frames of episodes. The file gets its final name when `close` is called.

    Args: stop_after_frames: number of frames after which no new episode is recorded, or None to record all episodes.
    """

    def __init__(self, path: Path, stop_after_frames: int | None = None) -> None:
        self.path, self.stop_after_frames, self.frames, self.episodes = path, stop_after_frames, 0, 0
        self._temporary = path.with_name(f".{path.name}")
        self._ffmpeg = load_ffmpeg()
        self._writer: Generator[None, np.ndarray | None, None] | None = None
        self._begins = False

    def begin_episode(self) -> bool:
        """Begin an episode, and return whether the episode will be recorded."""
        self._begins = self.stop_after_frames is None or self.frames < self.stop_after_frames
        return self._begins

    def add_frame(self, frame_HWC: np.ndarray, fps: float) -> None:
        """Write a frame, uint8 [height, width, 3]. Raises UserError if the frame cannot be written."""
        factor = -(-SMALLEST // len(frame_HWC))
        frame_HWC = frame_HWC.repeat(factor, axis=0).repeat(factor, axis=1)
        height, width = frame_HWC.shape[:2]
        frame_HWC = np.pad(frame_HWC, ((0, height % 2), (0, width % 2), (0, 0)), mode="edge")  # H.264 needs even sizes
        try:
            if self._writer is None:
                self.path.parent.mkdir(parents=True, exist_ok=True)
                size = (frame_HWC.shape[1], frame_HWC.shape[0])
                self._writer = self._ffmpeg.write_frames(
                    str(self._temporary), size, fps=fps, quality=7, macro_block_size=1, ffmpeg_log_level="error"
                )
                next(self._writer)
            self._writer.send(np.ascontiguousarray(frame_HWC))
        except OSError as error:
            raise UserError(f"cannot write {self.path}: {error.strerror or last_line(str(error))}") from None
        self.frames += 1
        self.episodes += self._begins
        self._begins = False

    def close(self, keep: bool) -> None:
        """Close the video file, and delete the file if `keep` is False. Raises UserError if the file cannot be written."""
        if self._writer is None:
            return
        self._writer.close()
        try:
            if keep and self._temporary.stat().st_size > 0:
                os.replace(self._temporary, self.path)
            else:
                self._temporary.unlink(missing_ok=True)
        except OSError as error:
            raise UserError(f"cannot write {self.path}: {error.strerror}") from None


EPISODES = 10
GAMES = 100
"""Default number of games against an opponent."""
MAX_ENVS = 32
"""Maximum number of parallel envs."""
VIDEO_FRAMES = 1_000
"""Default length of a video in frames. Without --episodes, the video ends with the episode in which the video reaches VIDEO_FRAMES
frames."""
_TRAINING_KEYS = (
    "num_envs", "stagger_episodes", "max_frame", "normalize_obs", "normalize_reward", "clip_obs", "clip_reward", "reward_scale", "channels",
)  # fmt: skip
"""Keys of the section env of a spec that enjoy cannot change. All other keys of the section env are used to build the env."""


@dataclass(frozen=True)
class EnjoyOptions:
    """Options of mode enjoy."""

    episodes: int | None = None
    """Number of episodes, or None for the default: GAMES against an opponent without rendering, and EPISODES in all other cases."""
    deterministic: bool = False
    """Whether to use the mode of the action distribution instead of a sample, even if meta.eval_deterministic is false."""
    show: Literal["screen", "video"] | None = None
    """How to render episodes: "screen" opens a window, "video" records an MP4 file in the run folder, and None does not render."""
    which: CheckpointName = "best"
    session: int | None = None
    """Index of the Session whose checkpoint is used, or None to use the Session with the best weights."""
    record: Path | None = None
    """File to which the episodes are written as a data set for meta.demonstrations."""
    replace: bool = False
    """Whether an existing file `record` may be replaced."""
    against: str | None = None
    """Name of the opponent that plays for the other agents of the env (see `find_opponent`), or None if the policies play for all
    agents."""
    sets: Sequence[str] = ()
    """`--set` arguments, which may change only keys that are used to build the env."""


class GameResults(NamedTuple):
    """Results of the games that were played in an env with several agents."""

    policy_of: dict[str, str]
    """Name of an agent → name of the policy that plays for the agent ("" if there is only one policy). `policy_of` is empty in games
    against an opponent."""
    returns: list[np.ndarray]
    """Array [A] of the returns of the A agents, for each game."""
    scores: list[float]
    """Mean score of the policy's agents in each game against an opponent, from 0 (worse than all other agents) to 1 (better than all other
    agents). `scores` is empty if there is no opponent."""
    opponent: str | None = None


class EnjoyResult(NamedTuple):
    """Result of `enjoy`: the episodes that were played, and the files that were written."""

    checkpoint: Location
    description: str
    """Description of the loaded agent in one line."""
    returns: list[float]
    """Sum of raw rewards of each episode."""
    video: VideoFile | None = None
    bounds: tuple[float, float] | None = None
    """Lowest and highest possible return of the env, or None if these bounds are unknown."""
    recorded: Path | None = None
    """File to which the episodes were written as a data set, if any."""
    games: GameResults | None = None
    """Results of the games, or None if the env has one agent."""


def enjoy(training: Training, options: EnjoyOptions, plan: Plan) -> EnjoyResult:
    """Play episodes with a checkpoint of a training, in the env of the training or in another env with the same spaces.

    With parallel envs, the number of episodes per env is fixed in advance. If a window is shown or a video is recorded, a single env is
    used. Raises SpecError if the env section is invalid, and UserError if the options cannot be used.
    """
    spec = load_spec(training.spec_file, training.spec_name, for_search=False, builds_env=False)
    env_spec = env_with_set_arguments(spec, training.spec_file, options.sets)
    if options.show == "screen" and not has_display():
        raise UserError("--render needs a display, and there is none here (DISPLAY is not set or cannot be opened); use --video")
    if options.record is not None:
        demonstrations.check_output_path(options.record, options.replace)
    device = select_device(spec, plan, 0)
    players = load_players(training, spec, options.which, options.session, device)
    opponent = None if options.against is None else find_opponent(options.against, plan.data_dir, device)
    agent = players[0].agent
    bounds = return_range({f"env.{key}": value for key, value in env_spec.model_dump(exclude_defaults=True).items()})
    video = _new_video_file(training.paths, agent, options) if options.show == "video" else None
    try:
        if options.show is not None:
            env_spec = with_rendering(env_spec, "human" if video is None else "rgb_array", video)
        returns, games = _play(spec, env_spec, players, opponent, options, _recording_origin(training, spec, agent))
    except BaseException as error:
        if video is not None:
            video.close(keep=False)
        if isinstance(error, SpecError):
            raise mark_set_arguments(error, f"{training.spec_file} {spec.name}", options.sets) from None
        if isinstance(error, gym.error.DependencyNotInstalled) and options.show is not None:
            raise UserError(f"--{'render' if video is None else 'video'}: {env_spec.name} cannot be rendered: {error}") from None
        raise
    if video is not None:
        video.close(keep=True)
    description = "\n".join(player.agent.description for player in players)
    return EnjoyResult(agent.path, description, returns, video, bounds, options.record, games)


def _recording_origin(training: Training, spec: Spec, agent: LoadedAgent) -> dict[str, Any]:
    """Return the information about the origin of recorded episodes (spec, digest, checkpoint) that is stored with the data set."""
    return {"spec": spec.name, "digest": spec_digest(*read_saved_spec(training.spec_file)), "checkpoint": agent.path.name}


def _play(
    spec: Spec,
    env_spec: EnvSpec,
    players: Sequence[PolicyPlayer],
    opponent: Opponent | None,
    options: EnjoyOptions,
    origin: dict[str, Any],
) -> tuple[list[float], GameResults | None]:
    """Play the episodes, and return the returns of the episodes and, in an env with several agents, the results of the games.

    If options.record is set, the episodes and `origin` are written to the file options.record.
    """
    seed = session_seeds(spec.meta.random_seed, 0, 0).eval_env
    usual = EPISODES if opponent is None or options.show is not None else GAMES
    episodes = usual if options.episodes is None else options.episodes
    env = make_play_env(spec, env_spec, seed, 1 if options.show is not None else min(episodes, MAX_ENVS))
    try:
        for player in (*players, *(opponent.players if opponent is not None else ())):
            check_spaces([player.agent], env, spec, env_spec.name, player.agents)
        _check_agents(env, players, opponent, options)
        count = max(1, len(env.info.agents))
        results = GameReturns(env.info.num_envs, count)
        recorder = EpisodeRecorder(env.info.num_envs, env.info.action)
        mask_N = policy_mask(env, players) if opponent is not None else np.ones(env.info.num_envs, np.bool_)
        deterministic = options.deterministic or spec.meta.eval_deterministic
        parts = assign_policies(players, env, np.flatnonzero(mask_N), np.random.default_rng(seed), deterministic)
        if opponent is not None:
            parts += opponent.assign_players(env, np.flatnonzero(~mask_N), np.random.default_rng([seed, 1]), deterministic)
        act = parts[0][1] if len(parts) == 1 else joint_act(parts)
        record = recorder.add if options.record is not None else results.add if count > 1 else None
        returns = play_episodes(env, act, Stop(), episodes=episodes * count, record=record)
    finally:
        close_env(env.close)
    if not returns:
        raise UserError(f"no episode of {env_spec.name} ended within {MAX_STEPS:,} steps; limit their length by --set env.max_t=…")
    if options.record is not None:
        demonstrations.write(options.record, join_episodes(recorder.episodes), {**origin, "env": env_spec.name, "spaces": env.info.spaces})
    return returns, _game_results(env, players, opponent, results, mask_N) if count > 1 else None


def make_play_env(spec: Spec, env_spec: EnvSpec, seed: int, num_envs: int) -> Env:
    """Return a vector env for playing, which does not normalise observations, because each policy has separate normalisation statistics."""
    raw = env_spec.model_copy(update={"normalize_obs": False, "clip_obs": None})
    return make_env(raw, seed, num_envs=num_envs, gamma=spec.agent.algorithm.gamma, training=False, threads=cores(), input=spec.agent.input)


def _check_agents(env: Env, players: Sequence[PolicyPlayer], opponent: Opponent | None, options: EnjoyOptions) -> None:
    """Raise UserError if the options do not fit the number of agents of the env, or if an agent has no policy that plays for it."""
    if not env.info.agents:
        if opponent is not None:
            raise UserError(f"--against {opponent.name} has no effect: {env.name} has one agent; remove it")
        return
    if options.record is not None:
        raise UserError(f"--record is not supported for {env.name}, which has several agents: a data set contains one agent's episodes")
    if opponent is None:
        check_agents_covered(players, env, f"policy {players[0].policy}")
    elif policy_mask(env, players).all():
        who = "policies " + ", ".join(str(player.policy) for player in players) if len(players) > 1 else "policy"
        verb, hint = ("play", "; add --policy NAME") if len(players) > 1 else ("plays", "; remove --against")
        message = f"the {who} {verb} for all agents of {env.name}, so that no agent is left for the opponent"
        raise UserError(f"--against {opponent.name}: {message}{hint}")


def _game_results(
    env: Env, players: Sequence[PolicyPlayer], opponent: Opponent | None, results: GameReturns, mask_N: np.ndarray
) -> GameResults:
    """Return the results of the games that were played in an env with several agents.

    Args: mask_N: whether `players` (and not the opponent) play for each row, bool [N].
    """
    games, count = results.completed_games(), len(env.info.agents)
    returns = [returns_A for _, returns_A in games]
    if opponent is None:
        policy_of = {agent: player.policy or "" for player in players for agent in player.agents or env.info.agents}
        return GameResults({agent: policy_of[agent] for agent in env.info.agents}, returns, [])
    mask_EA = mask_N.reshape(-1, count)
    return GameResults({}, returns, [team_score(returns_A, mask_EA[index]) for index, returns_A in games], opponent.name)


def env_with_set_arguments(spec: Spec, file: Path, sets: Sequence[str]) -> EnvSpec:
    """Return the section env of a spec with `--set` arguments applied.

    Raises UserError if an argument changes a key that is not used to build the env, and SpecError if an argument is invalid or a package
    that the env needs is missing.
    """
    for name in parse_set_arguments(sets).variables:
        raise UserError(f"--set {name}=… has no effect: the saved spec has no variables; expected env.KEY=VALUE")
    for path in parse_set_arguments(sets).overrides:
        key = path[2:] if path[1:2] in ((0,), ("0",)) else path[1:]
        if path[0] != "env" or not key or key[0] in _TRAINING_KEYS:
            allowed = "env.name, env.max_t, env.backend, env.wrappers, env.obs_keys, and arguments of the env's constructor (env.KEY)"
            raise UserError(f"--set {show_path(path)} has no effect: a policy plays as it was trained; allowed: {allowed}")
    return load_spec(file, spec.name, sets, for_search=False).env  # `spec` may have been loaded without a check of packages


def check_spaces(agents: Iterable[LoadedAgent], env: Env, spec: Spec, env_name: str, names: Collection[str] | None = None) -> None:
    """Raise UserError if the observation or action space of the env differs from the space of a policy, except in the bounds.

    Args:
        agents: loaded agents, whose policies act in the env.
        env_name: name of the env for error messages.
        names: names of the agents for which the policies act, or None if the policies act for all agents.
    """
    try:
        info = env.info.for_agents(env.info.agents if names is None else names) if env.info.groups else env.info
    except ValueError as error:
        raise UserError(f"the policy was trained in {spec.env.name} for agents with equal spaces; in {env_name}, {error}") from None
    for agent in agents:
        _check_agent_spaces(agent, info, spec, env_name)


def _check_agent_spaces(agent: LoadedAgent, info: EnvInfo, spec: Spec, env_name: str) -> None:
    assert info.spaces is not None
    observation, action = space_from_dict(info.spaces["observation"]), space_from_dict(info.spaces["action"])
    differing = []
    if not is_compatible_space(agent.observation_space, observation, spec.agent.input, image_channels(spec.env)):
        differing.append(f"observations {agent.observation_space}; those of {env_name} are {observation}")
    if not is_compatible_space(agent.action_space, action) or action_codec(agent.action_space)[0] != action_codec(action)[0]:
        differing.append(f"actions {agent.action_space}; those of {env_name} are {action}")
    if differing:
        raise UserError("\n".join(f"the policy was trained in {spec.env.name} with {line}" for line in differing))


def _new_video_file(paths: RunPaths, agent: LoadedAgent, options: EnjoyOptions) -> VideoFile:
    """Return a new video file, named after the checkpoint and the current time."""
    name = f"{agent.path.stem}_{datetime.now():%Y_%m_%d_%H%M%S}.mp4"
    return VideoFile(paths.output_dir / "video" / name, VIDEO_FRAMES if options.episodes is None else None)


def format_summary(result: EnjoyResult) -> str:
    """Return a text with the checkpoint, the mean return and its 95 % interval, the range of the returns, and the written files."""
    returns = result.returns
    count = _format_episode_count(len(returns) if result.games is None else len(result.games.returns))
    lines = [result.description]
    lines += [f"{count}: {_format_statistics(returns, result.bounds)}"] if result.games is None else _game_lines(result.games)
    if result.video is not None:
        shown = f"{result.video.episodes} of {count}" if result.video.episodes < int(count.split()[0]) else count
        lines.append(f"{result.video.path}: {shown}, {result.video.frames:,} frames")
    if result.recorded is not None:
        lines.append(f"{result.recorded}: {count}, for meta.demonstrations")
    return "\n".join(lines)


def _format_episode_count(count: int) -> str:
    return f"{count} episode{'s' if count > 1 else ''}"


def _format_statistics(returns: Sequence[float], bounds: tuple[float, float] | None) -> str:
    """Return a text with the mean, the 95 % interval and the range of returns."""
    mean = estimate_mean(returns, bounds)
    assert mean is not None
    interval = "" if mean.low is None else f" [{mean.low:.5g}, {mean.high:.5g}] (95 % interval: Student's t)"
    return f"mean return {mean.value:.5g}{interval}, min {min(returns):.5g}, max {max(returns):.5g}"


def _game_lines(games: GameResults) -> list[str]:
    """Return lines of text with the results of games: the returns of each agent, or the results against an opponent."""
    count = _format_episode_count(len(games.returns))
    if games.opponent is None:
        of_agents = np.array(games.returns).T.tolist()
        names = [f"{agent} (policy {policy})" if policy else agent for agent, policy in games.policy_of.items()]
        return [f"{count}:", *(f"  {name}: {_format_statistics(of_agent, None)}" for name, of_agent in zip(names, of_agents, strict=True))]
    won, lost = games.scores.count(1.0), games.scores.count(0.0)
    score = estimate_mean(games.scores, (0.0, 1.0))
    assert score is not None
    interval = "" if score.low is None else f" [{score.low:.3f}, {score.high:.3f}] (95 % interval: Student's t)"
    results = f"won {won}, drawn {len(games.scores) - won - lost}, lost {lost}"
    return [f"{count} against {games.opponent}: {results}; mean score {score.value:.3f}{interval}"]
