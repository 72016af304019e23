"""The line that the command `check --build` prints for a spec, with the size of nets and memories and the approximate training time."""

from __future__ import annotations

import math
import threading
from time import perf_counter

from slm_lab.agent.optim.trainer import Trainer
from slm_lab.env.outcome import InvalidOutcome
from slm_lab.experiment.collect.workers.shared import rollout_bytes
from slm_lab.experiment.execute.local.user_code import describe_failure
from slm_lab.experiment.files.sink import MemorySink
from slm_lab.experiment.plan import Plan
from slm_lab.experiment.report.progress import format_duration
from slm_lab.experiment.session.session import Session
from slm_lab.experiment.training.observers.base import Observer, ObserverContext
from slm_lab.lib.records import Episode, Metrics, ObservationPart, ObservationSpace
from slm_lab.lib.text import last_line
from slm_lab.spec.models.spec import Spec
from slm_lab.spec.report import Problem, SpecError

_MAX_SECONDS, _MIN_SECONDS, _MIN_UPDATES = 3.0, 1.0, 4
"""_MAX_SECONDS is the maximum duration of a measurement in seconds. A measurement ends earlier if it contains more than _MIN_UPDATES
updates and has taken more than _MIN_SECONDS seconds."""


class _SpeedObserver(Observer):
    """Observer that measures the training speed from the times of updates or, if the agent does not learn, from the times of steps."""

    def __init__(self, context: ObserverContext) -> None:
        super().__init__(context)
        self.learns = context.spec.agent.algorithm.learns
        self.begin = perf_counter()
        self.marks: list[tuple[float, int]] = []
        """(time, frame) of each update or, if the agent does not learn, of each step."""

    def on_update(self, metrics: Metrics) -> None:
        self._record_time()

    def on_step(self, episodes: list[Episode]) -> None:
        if not self.learns:
            self._record_time()

    def _record_time(self) -> None:
        self.marks.append((perf_counter(), self.context.clock.frame))

    @property
    def has_enough_updates(self) -> bool:
        return len(self.marks) > _MIN_UPDATES and self.marks[-1][0] - self.begin > _MIN_SECONDS

    def frames_per_second(self) -> float | None:
        """Return the number of frames per second, measured over complete updates, or None if there was no update."""
        if not self.marks:
            return None
        (begin, first), (end, last) = self.marks[0] if len(self.marks) > 1 else (self.begin, 0), self.marks[-1]
        return (last - first) / max(end - begin, 1e-9)


def describe_build(session: Session) -> str:
    """Return a line that describes a built Session. To measure the speed, the Session is trained for at most 3 s, without the user's
    observers."""
    spec, algorithm = session.spec, session.agent.algorithm
    flats = {id(part.flat): part.flat.size for part in algorithm.parts().values() if isinstance(part, Trainer)}
    stored = sum(slab.nbytes for storage in algorithm.rollout_storages().values() for slab in storage.slabs.values())
    if spec.meta.sampler is not None:
        stored += rollout_bytes(spec, session.parts.env_info)
    memories = {"replay buffer": algorithm.replay.nbytes if algorithm.replay is not None else 0, "rollouts": stored}
    sizes = [f"{name} {_format_bytes(nbytes)}" for name, nbytes in memories.items() if nbytes]
    numbers = ", ".join([f"{sum(flats.values()):,} parameters", *sizes, _measured_time_text(session)])
    return f"observation: {observation_text(spec, session.parts.env_info.observation)}; {numbers}"


def observation_text(spec: Spec, observation: ObservationSpace) -> str:
    """Return a text that describes how the nets interpret an observation.

    An example is "image 24 × 20, 6 channels last, 0 to 255 → 0 to 1, ConvNet".
    """
    net = spec.agent.net
    if net is None:
        return observation.text
    parts = [_observation_part_text(part, getattr(net, "normalize", True)) for part in observation.parts or (observation,)]
    return f"{'; '.join(parts)}, {net.name}"


def _observation_part_text(part: ObservationPart | ObservationSpace, normalize: bool) -> str:
    name = f"{part.name}: " if isinstance(part, ObservationPart) else ""
    if len(part.shape) != 3 or part.divisor == 1.0:
        return name + part.text
    return f"{name}{part.text}{' → 0 to 1' if normalize else ' (agent.net.normalize is false: not divided)'}"


def _measured_time_text(session: Session) -> str:
    return _format_time(session.spec, session.plan, _checked_speed(session))


def _checked_speed(session: Session) -> float | None:
    """Return the result of `measure_speed`. Raises SpecError if training fails."""
    try:
        return measure_speed(session)
    except InvalidOutcome as error:
        raise SpecError(session.spec.name, [Problem("env.name", str(error))]) from error
    except Exception as error:  # an env may raise any exception
        failure = f"builds, but training fails: {last_line(describe_failure(error))}"
        raise SpecError(session.spec.name, [Problem("", failure)]) from error


def measure_speed(session: Session) -> float | None:
    """Train a Session for a few updates, at most 3 s, and return the frames per second of each policy, or None if there was no update."""
    for learner in session.learners:
        learner.add_observers([_SpeedObserver])
    speed = session.learners[0].user_observers[0]
    assert isinstance(speed, _SpeedObserver)
    session.sink = MemorySink()
    timer = threading.Timer(_MAX_SECONDS, _request_stop, [session])
    timer.daemon = True
    timer.start()
    try:
        session.begin()
        speed.begin = perf_counter()
        for experience in session.source:
            session.learners[experience.policy].step(experience)
            if speed.has_enough_updates:
                break
    finally:
        timer.cancel()
    return speed.frames_per_second()


def measurement_spec(spec: Spec) -> Spec:
    """Return a copy of the spec in which training starts as early as possible, so that a short measurement contains updates."""
    batch = getattr(spec.agent.memory, "batch_size", 1)
    if not spec.agent.training_start or spec.agent.training_start <= batch:
        return spec
    algorithm = spec.agent.algorithm.model_copy(update={"training_start_step": batch})
    return spec.model_copy(update={"agent": spec.agent.model_copy(update={"algorithm": algorithm})})


def _request_stop(session: Session) -> None:
    session.context.stop.requested = True


def expected_seconds(session: Session) -> float:
    """Return the estimated training time of a Session's spec in seconds, or NaN if the time is unknown.

    The training speed is measured for at most 3 s. Raises SpecError if training fails.
    """
    speed = _checked_speed(session)
    return math.nan if speed is None else _training_seconds(session.spec, session.plan, speed)


def _training_seconds(spec: Spec, plan: Plan, speed: float) -> float:
    seconds = min(spec.session_frames / speed, spec.meta.max_seconds or math.inf)
    return seconds * -(-spec.meta.max_session // plan.concurrent_sessions(spec.meta))


def _format_time(spec: Spec, plan: Plan, speed: float | None) -> str:
    frames, sessions, concurrent = spec.session_frames, spec.meta.max_session, plan.concurrent_sessions(spec.meta)
    several = f" × {sessions} sessions, {concurrent} at a time" if sessions > 1 else ""
    if speed is None:
        return f"time unknown: no update within {_MAX_SECONDS:g} s"
    limit = spec.meta.max_seconds or math.inf
    seconds = _training_seconds(spec, plan, speed)
    ended = " (meta.max_seconds)" if frames / speed > limit else ""
    evaluation = ", without evaluation" if spec.meta.rigorous_eval else ""
    return f"about {format_duration(seconds)}{ended} for {frames:,} frames{several} ({speed:,.0f} frames/s{evaluation})"


def _format_bytes(nbytes: float) -> str:
    """Format a number of bytes with a unit, such as "1.5 MiB"."""
    for unit in ("B", "KiB", "MiB"):
        if nbytes < 1024:
            return f"{nbytes:.3g} {unit}"
        nbytes /= 1024
    return f"{nbytes:,.3g} GiB"
