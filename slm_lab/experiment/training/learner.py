"""The learner of one policy of a Session, which trains, saves and evaluates the policy and produces the rows of its tables."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from time import perf_counter
from typing import Any

from slm_lab.agent.agent import Agent
from slm_lab.agent.replay.replay import Replay
from slm_lab.agent.torch_settings import TorchSettings
from slm_lab.env.normalize import Normalizers
from slm_lab.env.outcome import InvalidOutcome
from slm_lab.env.vec import Env
from slm_lab.experiment.events import Mode, Progress, Row
from slm_lab.experiment.execute.heartbeat import SAVING
from slm_lab.experiment.files.bundle import VERSION
from slm_lab.experiment.files.sink import CheckpointKind, RunSink
from slm_lab.experiment.plan import Stop, UserError
from slm_lab.experiment.training.evaluate import Act, EvaluationPlan, joint_act, play_episodes, strip_padding
from slm_lab.experiment.training.experience import Beat, CollectedRollout, Experience, no_beat
from slm_lab.experiment.training.observers.base import (
    COLUMNS,
    SAMPLER_COLUMNS,
    SELF_PLAY_COLUMNS,
    SHARED_COLUMNS,
    EmitRow,
    Hook,
    Observer,
    ObserverContext,
    ObserverFactory,
    hooks,
    info_column,
    mean,
    schedule_column,
    score_column,
)
from slm_lab.experiment.training.observers.builtin import Checkpointer, DevChecks, ProgressReporter, SaveTimer, TimeLimit
from slm_lab.experiment.training.observers.rows import Evaluator, Recorder
from slm_lab.lib.episodes import EpisodeWindow
from slm_lab.lib.log import logger
from slm_lab.lib.records import Metrics
from slm_lab.spec.models.spec import Spec


class PolicyLearner:
    """Learner that trains, evaluates and saves one policy of a Session.

    Args:
        table: number of the policy's tables and checkpoints (see events.Row).
        frames: number of frames after which training ends.
        normalizers: normalizers of the envs that the policy acts in.
        timer: SaveTimer that determines when the state of the Session is saved.
        spaces: observation and action space of the envs, as stored in checkpoints.
        evaluation: settings of the evaluation, or None if the policy is not evaluated.
        shared: whether several Sessions train the same net.
        torch_settings: torch settings during updates, or None to keep the current settings.
    """

    def __init__(
        self,
        spec: Spec,
        table: int,
        agent: Agent,
        frames: int,
        normalizers: Normalizers,
        timer: SaveTimer,
        spaces: dict[str, Any] | None,
        *,
        evaluation: EvaluationPlan | None = None,
        shared: bool = False,
        torch_settings: TorchSettings | None = None,
    ) -> None:
        self.spec, self.table, self.agent, self.clock, self.frames = spec, table, agent, agent.clock, frames
        self.normalizers, self.spaces, self.shared = normalizers, spaces, shared
        self.torch = torch_settings or TorchSettings()
        self.window = EpisodeWindow()
        self.evaluation = evaluation
        self.eval_env: Env | None = None
        """Evaluation env, or None if the policy is not evaluated."""
        self.partners: list[tuple[Sequence[str], PolicyLearner]] | None = None
        """(names of the agents, learner) for each policy of agent.policies, including this learner's policy, or None if the spec does not
        contain agent.policies."""
        self._eval_state: dict[str, Any] | None = None
        """State of the evaluation env before an evaluation that was interrupted, or None if no evaluation was interrupted."""
        self._update_times: tuple[float, float] | None = None
        self.interrupted = False
        self.recorder, self.evaluator = self._build_row_observers()
        modes: tuple[Mode, ...] = ("train",) if evaluation is None else ("eval",) if spec.meta.rigorous_eval else ("train", "eval")
        self.checkpointer = Checkpointer(
            self.policy_checkpoint, self.clock, timer, modes, self._save, spec.meta.checkpoint_frequency, spec.meta.self_play is not None
        )
        self.user_observers: list[Observer] = []
        self._observers: list[Observer] = []
        """All observers in the order in which they are called, or [] before training begins."""
        self._on_step: list[Callable[..., None]] = []
        self._on_update: list[Callable[..., None]] = []
        self._on_row: list[EmitRow] = []

    def _build_row_observers(self) -> tuple[Recorder, Evaluator | None]:
        """Build the observers that produce the training rows and, if the policy is evaluated, the evaluation rows."""
        meta, clock, agent = self.spec.meta, self.clock, self.agent
        sources = (
            *(SHARED_COLUMNS if self.shared else ()),
            *(SAMPLER_COLUMNS if meta.sampler else ()),
            *((*SELF_PLAY_COLUMNS, *map(score_column, meta.self_play.fixed_opponents)) if meta.self_play else ()),
        )
        scheduled = tuple(self.spec.env.schedule or ())
        from_env = (*map(schedule_column, scheduled), *map(info_column, meta.track_info))
        columns = (*COLUMNS, *dict.fromkeys((*sources, *agent.diagnostics, *from_env)))
        recorder = Recorder(clock, agent, meta.log_frequency, self._emit, columns, self.table, meta.track_info, self.window, scheduled)
        if self.evaluation is None:
            return recorder, None
        every = self.evaluation.every
        # Sessions that train one net evaluate the net in turn, so that the evaluations are evenly spaced over global frames
        ahead = self.table * every // meta.max_session if self.shared else 0
        return recorder, Evaluator(clock, agent, every, self._emit, self.evaluate, columns, self.table, ahead)

    def add_observers(self, factories: Sequence[ObserverFactory]) -> None:
        """Create the user's observers. Raises UserError if a factory returns an object that is not an Observer."""
        context = ObserverContext(self.spec, self.table, self.agent, self.clock)
        self.user_observers = [factory(context) for factory in factories]
        for factory, observer in zip(factories, self.user_observers, strict=True):
            if not isinstance(observer, Observer):
                raise UserError(f"observers: {factory!r} returned {observer!r}; expected a slm_lab.Observer")

    @property
    def has_finished(self) -> bool:
        """Whether the policy has collected all its frames."""
        return self.clock.frame >= self.frames

    @property
    def total_reward(self) -> float | None:
        """Mean return of the last 100 episodes, or None before the end of the first episode."""
        return mean(self.window.returns)

    @property
    def runs_user_code(self) -> bool:
        """Whether an observer or an algorithm of the user can access the agent during training."""
        return bool(self.user_observers) or not type(self.agent.algorithm).__module__.startswith("slm_lab.")

    def _stop_at_limit(self) -> None:
        """End training at the current frame, because the time limit meta.max_seconds has been reached."""
        self.frames = min(self.frames, self.clock.frame)

    def take_update_times(self) -> tuple[float, float] | None:
        """Return (begin, end) of the last update in seconds of perf_counter, or None if there was no update since the last call."""
        times, self._update_times = self._update_times, None
        return times

    def begin(self, mode: str, sink: RunSink, stop: Stop, beat: Beat = no_beat) -> None:
        """Prepare for training: create the built-in observers and collect the hooks of all observers.

        Args:
            mode: "train", or "dev" to add checks.
            sink: object to which rows and checkpoints are written.
        """
        self.sink, self.stop, self.beat = sink, stop, beat
        sink.open_table(self.table)
        clock, agent, limit = self.clock, self.agent, self.spec.meta.max_seconds
        learns = self.spec.agent.algorithm.learns
        progress = ProgressReporter(
            clock,
            lambda *report: sink(Progress(self.table, *report)),
            learns=learns,
            evaluates=bool(self.spec.meta.rigorous_eval),
            max_seconds=limit,
        )
        self._observers = [
            # the time limit precedes the recorder, so that the time in the last row is not below the limit
            *([] if limit is None else [TimeLimit(clock, limit, self._stop_at_limit)]),
            self.recorder,
            *([] if self.evaluator is None else [self.evaluator]),
            progress,
            *([DevChecks(agent.weights, agent.target_snapshot)] if mode == "dev" else []),
            *self.user_observers,
            self.checkpointer,
        ]
        self._on_step, self._on_update = self._hooks("on_step"), self._hooks("on_update")
        self._on_row = [sink, *self._hooks("on_row")]

    def _emit(self, row: Row) -> None:
        for listener in self._on_row:
            listener(row)

    def step(self, experience: Experience | CollectedRollout) -> None:
        """Count the frames and episodes of an experience or a rollout, and learn from it."""
        if isinstance(experience, CollectedRollout):
            self._learn_from_rollout(experience)
            return
        agent, clock, episodes = self.agent, self.clock, experience.episodes
        if experience.time is not None:
            clock.time = experience.time
        clock.tick(experience.frames)
        clock.epi += len(episodes)
        if experience.transition is not None:
            agent.observe(*experience.transition)
        metrics = self._run_timed_update(agent.update) if agent.ready() else None
        agent.end_step()
        if metrics is not None:
            self._report(metrics, experience.report)
        for hook in self._on_step:
            hook(episodes)

    def _learn_from_rollout(self, collected: CollectedRollout) -> None:
        """Count the frames and episodes of a rollout, and learn from the rollout unless training ends before the last step of the
        rollout."""
        clock, last = self.clock, len(collected.steps) - 1
        for t, (frames, episodes, time) in enumerate(collected.steps):
            clock.time = time
            clock.tick(frames)
            clock.epi += len(episodes)
            if t == last and collected.rollout is not None:
                self._report(self._run_timed_update(partial(self.agent.learn, collected.rollout)), collected.report)
            for hook in self._on_step:
                hook(episodes)
            if self.has_finished:
                return

    def _run_timed_update(self, update: Callable[[], Metrics]) -> Metrics:
        self.torch.restore()
        begin = perf_counter()
        metrics = update()
        self._update_times = (begin, perf_counter())
        return metrics

    def _report(self, metrics: Metrics, report: Callable[[], dict[str, float]] | None) -> None:
        if report is not None:
            metrics.extra |= report()
        for hook in self._on_update:
            hook(metrics)

    def end(self) -> None:
        """Call the hooks `on_interrupt` (if training ends early) and `on_end` of the observers, which write the last rows."""
        self.interrupted = not self.has_finished
        if self.interrupted:
            self._call_hooks("on_interrupt")
        self._call_hooks("on_end")
        logger.info("ends at frame %d%s", self.clock.frame, ", as requested" if self.interrupted else "")

    def add_frame_note(self, error: BaseException, frames_per_step: int) -> None:
        """Add a note to `error` with the frame at which `error` was raised (see user_code.describe_failure).

        Args: frames_per_step: number of frames that a step of the vector env counts.
        """
        call = error.call if isinstance(error, InvalidOutcome) else None
        frame = self.clock.frame + (frames_per_step if call == "step" else 0)  # frame of the step that raised the error
        error.add_note(f"(at frame {frame}{f' of {self.spec.env.name}' if call is None else ''})")

    def evaluate(self) -> list[float]:
        """Play one episode in each evaluation env, and return the undiscounted returns of this learner's policy.

        Returns [] if a stop is requested before all episodes have ended.
        """
        assert self.eval_env is not None
        assert self.evaluation is not None
        env, deterministic, own_rows = self.eval_env, self.evaluation.deterministic, None
        for names, learner in self.partners or [((), self)]:
            env.normalizers_of(names).copy_obs_statistics(learner.normalizers.state_dict())
        if self.partners is None or len(self.partners) == 1:
            act: Act = self.agent.action_function(deterministic=deterministic)
        else:
            rows = [env.info.agent_rows(names) for names, _ in self.partners]
            acts = [strip_padding(env.info, names, learner.agent.action_function(deterministic)) for names, learner in self.partners]
            act = joint_act(list(zip(rows, acts, strict=True)))
            own_rows = next(row_K for row_K, (_, learner) in zip(rows, self.partners, strict=True) if learner is self)
        before = self.eval_env.state_dict()
        returns = play_episodes(self.eval_env, act, self.stop, self.beat, rows=own_rows)
        if not returns:  # interrupted: a continued run evaluates again, from the state before the evaluation
            self._eval_state = before
        return returns

    def close(self) -> None:
        """Close the evaluation env, if there is one."""
        if self.eval_env is not None:
            self.eval_env.close()

    def policy_checkpoint(self) -> dict[str, Any]:
        """Return the data that is needed to act with the policy: weights, statistics of the normalizers and of the critic's values, and
        spaces of the env."""
        return {
            "version": VERSION,
            "weights": self.agent.weights(),
            "normalizers": self.normalizers.state_dict(),
            "spaces": self.spaces,
            "explore_var": self.agent.final_explore_var,
            "global_frame": self.clock.global_frame,
            "value_statistics": self.agent.value_statistics,
        }

    @property
    def _stateful_observers(self) -> dict[str, Observer]:
        """Key in the saved state → observer, for the observers whose state is saved."""
        observers: dict[str, Observer] = {"recorder": self.recorder, "checkpointer": self.checkpointer}
        if self.evaluator is not None:
            observers["evaluator"] = self.evaluator
        for observer in self.user_observers:
            name = f"user/{type(observer).__module__}:{type(observer).__qualname__}"
            observers[name if name not in observers else f"{name}/{len(observers)}"] = observer
        return observers

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the agent, counters and observers, and the data that is needed to act.

        With meta.save_replay, the state includes the replay memory. State that several Sessions share is not included, since it is saved
        with the shared arrays.
        """
        replay = self.agent.replay if self.spec.meta.save_replay else None
        return {
            **self.policy_checkpoint(),
            "agent": self.agent.state_dict(),
            "clock": self.clock.state_dict(),
            "observers": {name: observer.state_dict() for name, observer in self._stateful_observers.items()},
            "eval_env": self._eval_state or (None if self.eval_env is None else self.eval_env.state_dict()),
            "replay": None if replay is None else replay.contents(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load a state returned by `state_dict`. Raises ValueError, RuntimeError or KeyError if the state does not fit the learner."""
        self.agent.load_state_dict(state["agent"])
        self.normalizers.load_state_dict(state["normalizers"])
        if self.eval_env is not None and state["eval_env"] is not None:
            self.eval_env.load_state_dict(state["eval_env"])
            self.eval_env.resume()  # each evaluation begins with a reset, but wrappers may keep state across episodes
        self.load_counters(state)

    def load_counters(self, state: dict[str, Any]) -> None:
        """Load only the counters, the state of the observers, and the replay memory from a state returned by `state_dict`."""
        if self.shared:
            self.clock.load_unshared_state(state["clock"], self.spec.env.num_envs)
        else:
            self.clock.load_state_dict(state["clock"])
        replay = self.agent.replay
        if replay is not None and state["replay"] is not None:
            replay.load_contents(state["replay"])
        elif isinstance(replay, Replay):
            replay.require_full_batch()
        for name, observer in self._stateful_observers.items():
            if name in state["observers"]:
                observer.load_state_dict(state["observers"][name])

    def resume_tables(self, *, rebuild: bool = False) -> None:
        """Restore the row history of the recorder and the evaluator from the rows in the table files (CSV).

        Args: rebuild: whether the recorder and the evaluator first forget rows that are not in the files.
        """
        for observer in (self.recorder, self.evaluator):
            if observer is not None:
                observer.restore_row_history(self.sink.read_rows(self.table, observer.mode), rebuild=rebuild)

    def repeat_interrupted_evaluation(self) -> None:
        """Repeat the last evaluation if it was interrupted."""
        if self.evaluator is not None:
            self.evaluator.repeat_interrupted_evaluation()

    def _save(self, which: CheckpointKind, bundle: dict[str, Any]) -> None:
        self.beat(SAVING)
        self.sink.save(self.table, which, bundle)

    def _hooks(self, name: Hook) -> list[Callable[..., None]]:
        return hooks(self._observers, name)

    def _call_hooks(self, name: Hook) -> None:
        for hook in self._hooks(name):
            hook()
