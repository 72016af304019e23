"""Source of experience that collects with rollout workers."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from time import monotonic, perf_counter
from typing import Any, Literal, NamedTuple

import numpy as np
import torch

from slm_lab.agent.rollout.rollout import Rollout
from slm_lab.experiment.collect.workers.assembler import RolloutAssembler
from slm_lab.experiment.collect.workers.dataset import Dataset, DatasetBuilder
from slm_lab.experiment.collect.workers.shared import WorkerArrays, acting_state_size, check_memory, count_dataset_columns, get_sampler_spec
from slm_lab.experiment.collect.workers.worker import RolloutReport
from slm_lab.experiment.collect.workers.worker_pool import WorkerPool
from slm_lab.experiment.execute.heartbeat import TRAINING, WAITING
from slm_lab.experiment.files.bundle import to_arrays, to_tensors
from slm_lab.experiment.files.sink import Spans
from slm_lab.experiment.plan import Stop
from slm_lab.experiment.training.experience import Beat, CollectedRollout, Experience, Transition, no_beat
from slm_lab.experiment.training.learner import PolicyLearner
from slm_lab.experiment.training.population import PopulationBasedTraining
from slm_lab.lib.log import notice
from slm_lab.lib.records import ActOut, EnvInfo, Episode, VecStep
from slm_lab.spec.models.spec import Spec
from slm_lab.spec.report import Problem, SpecError

Kind = Literal["rollout", "inference", "train"]
_TRAININGS = 6
"""Number of updates of the learner that the timeline plot shows."""
_SPANS = 2048
_WINDOW = 5.0
"""Length in seconds of the time window in which busy times are measured."""


class BusySpan(NamedTuple):
    """A time span in which a process was busy. The times `begin` and `end` are in seconds of perf_counter."""

    process: str
    kind: Kind
    begin: float
    end: float


class UtilizationTracker:
    """Recorder of the time spans in which rollout workers, inference and the learner are busy.

    Args:
        workers: number of rollout workers.
        central: whether an inference server computes the actions. A worker that waits for the server counts as idle.
    """

    def __init__(self, workers: int, central: bool) -> None:
        self.workers, self.central = workers, central
        self.spans: deque[BusySpan] = deque(maxlen=_SPANS * (8 if central else 1))
        self.busy: dict[Kind, float] = {"rollout": 0.0, "inference": 0.0, "train": 0.0}
        """Total busy time in seconds for each kind of work, summed over the processes."""
        self.marks: deque[tuple[float, dict[Kind, float]]] = deque()
        """(time of a call of `busy_shares`, value of `busy` at this time) for the recent calls of `busy_shares`."""
        self.begin()

    def begin(self) -> None:
        """Start the measurement of busy times."""
        self.marks.clear()
        self.marks.append((perf_counter(), dict(self.busy)))

    def record_rollout(self, worker: int, report: RolloutReport) -> None:
        """Record the busy times of a worker during one rollout."""
        self.spans.append(BusySpan(f"worker {worker}", "rollout", report.begin, report.end))
        self.busy["rollout"] += report.env_seconds
        if not self.central:
            self.busy["inference"] += report.act_seconds

    def record(self, span: BusySpan) -> None:
        """Record a time span in which the inference server computed an answer or the learner computed an update."""
        self.spans.append(span)
        self.busy[span.kind] += span.end - span.begin

    def busy_shares(self) -> dict[str, float]:
        """Return the fractions (0 to 1) of the time in which rollout workers, inference and the learner were busy.

        The result is a dict: column → fraction. The fractions are measured over the last _WINDOW seconds. In a shorter time window, a
        single rollout could dominate the result.
        """
        now, marks = perf_counter(), self.marks
        while len(marks) > 1 and marks[1][0] <= now - _WINDOW:
            marks.popleft()
        then, before = marks[0]
        marks.append((now, dict(self.busy)))
        processes = {"rollout": self.workers, "inference": 1 if self.central else self.workers, "train": 1}
        share = {kind: min(1.0, (self.busy[kind] - before[kind]) / (max(now - then, 1e-9) * processes[kind])) for kind in self.busy}
        return {"rollout_busy": share["rollout"], "inference_busy": share["inference"], "learner_busy": share["train"]}

    def recent_busy_spans(self) -> Spans:
        """Return the busy time spans during recent updates, each as (process, kind, begin, end).

        If there are enough earlier updates, the last _TRAININGS updates are left out, because the workers' reports for the time of these
        updates may not have arrived yet.
        """
        trainings = [span for span in self.spans if span.kind == "train"]
        window = trainings[-2 * _TRAININGS : -_TRAININGS] or trainings
        begin, end = (window[0].begin, window[-1].end) if window else (0.0, 0.0)
        shown = [(span.process, str(span.kind), span.begin, span.end) for span in self.spans if span.end > begin and span.begin < end]
        return sorted(shown, key=lambda span: span[2])


STOP_SECONDS = 3.0
"""Maximum time in seconds for finishing the current round of rollouts after a stop request."""


class WorkerSource:
    """Source of experience that collects with a pool of rollout workers, and publishes the weights of the learners (one per policy).

    Args:
        info: EnvInfo of one vector env that contains the envs of all workers.
        concurrent_sessions: number of Sessions that run at the same time on this machine.
    """

    def __init__(
        self,
        spec: Spec,
        pool: WorkerPool,
        info: EnvInfo,
        learners: Sequence[PolicyLearner],
        stop: Stop,
        beat: Beat = no_beat,
        *,
        concurrent_sessions: int = 1,
    ) -> None:
        check_memory(spec, info, concurrent_sessions)
        self.spec, self.sampler, self.pool, self.learners = spec, get_sampler_spec(spec), pool, list(learners)
        self.stop, self.beat, self.backend = stop, beat, info.backend
        self.normalizers = learners[0].normalizers
        """Normalizers that all learners share. The statistics that the workers collect are merged into `normalizers`."""
        self.in_rounds = self.sampler.serial_mode or not self.sampler.async_rl
        """Whether the workers wait while the learner trains."""
        self._midway = False
        """Whether the learner has trained on only some of the transitions of the current dataset."""
        self._states: list[Any] | None = None
        """Saved states from which the workers continue, or None if the workers begin new episodes."""
        self._loaded, self._resumes, self._restarts = False, 0, 0
        self.population: PopulationBasedTraining | None = None
        """Population-based training as configured by meta.sampler.pbt, or None if the spec has no section meta.sampler.pbt."""
        policies = [learner.agent.policy for learner in learners]
        self.arrays = WorkerArrays(spec, info, policies, acting_state_size(self.normalizers))
        try:
            if pool.store is not None:
                pool.store.attach({"workers": self.arrays})
        except MemoryError as error:
            message = f"{error}; use fewer envs, or shorter rollouts"
            raise SpecError(spec.name, [Problem("meta.sampler.num_envs_per_worker", message)]) from error
        self.utilization = UtilizationTracker(self.sampler.num_workers, self.sampler.inference == "central")
        for policy in range(len(policies)):
            self._publish(policy)
        pool.connect(self.arrays, RolloutAssembler(self.arrays.slots, self._make_dataset_builders(info), self._rollouts_per_round()), info)

    def _rollouts_per_round(self) -> int | None:
        """Return the number of rollouts per worker in a round, or None if rollouts are used in the order of arrival, without rounds."""
        if not self.spec.agent.algorithm.on_policy:
            return 1  # FrameStore: a replay memory of images needs all steps of an env in one column
        if not self.in_rounds:
            return None
        return -(-self.spec.rollouts_per_dataset // self.sampler.num_envs)

    def _make_dataset_builders(self, info: EnvInfo) -> list[DatasetBuilder]:
        sampler, spec, single_policy = self.sampler, self.spec, len(self.learners) == 1
        num_spare = 0 if self.in_rounds else sampler.num_batches_to_accumulate
        sizes = (spec.worker_rollout_len, self.learners[0].agent.policy.state_size)
        columns = count_dataset_columns(spec, info)
        return [DatasetBuilder(p, info, columns[p], *sizes, num_spare, single_policy) for p in range(len(self.learners))]

    def begin(self) -> None:
        """Publish the weights, and wait until the workers are ready. Raises WorkerFailed if a worker cannot start."""
        for policy in range(len(self.learners)):
            (self._publish_after_training if self._loaded else self._publish)(policy)
        self.beat(WAITING)
        self.pool.start(self._states, self._resumes)
        self._states = None
        self.utilization.begin()
        for learner in self.learners:
            learner.clock.time = perf_counter()

    def __iter__(self) -> Iterator[Experience | CollectedRollout]:
        deadline = math.inf
        while self.arrays.active_P.any():
            if self.stop.requested:  # in rounds, finish the current round, since a run cannot continue exactly from the middle of a round
                deadline = min(deadline, monotonic() + STOP_SECONDS)
                if self.between_rounds or monotonic() > deadline:  # after the deadline, the state is saved without the envs
                    return
            self.beat(WAITING)
            item = self.pool.next_dataset()
            self.beat(TRAINING)
            for span in self.arrays.spans.take_unread_spans():
                self.utilization.record(BusySpan("inference", "inference", *span))
            for worker, report in self.pool.take_reports():
                self.utilization.record_rollout(worker, report)
                for deltas in report.deltas:
                    self.normalizers.merge_deltas(deltas)
            if item is not None:
                policy, dataset = item
                if self.arrays.active_P[policy]:
                    yield from self._iterate_dataset(policy, dataset)
                    self._publish_after_training(policy)
                if not self.arrays.active_P.any() or (self.stop.requested and self.between_rounds):
                    return  # return before the workers can begin another round, during which their state cannot be saved
                self.pool.release(policy, dataset)

    def _iterate_dataset(self, policy: int, dataset: Dataset) -> Iterator[Experience | CollectedRollout]:
        """Yield the experience of a dataset: one CollectedRollout if the algorithm is on-policy, else one Experience per vector step."""
        learner = self.learners[policy]
        frames_T = dataset.frame_TN[:, : dataset.columns].sum(axis=1).tolist()
        episodes_T: list[list[Episode]] = [[] for _ in frames_T]
        for t, episode in dataset.ended:
            episodes_T[t].append(episode)
        # all steps arrive at the same time; their times are spread evenly over the time since the last dataset
        time_T = np.linspace(learner.clock.time, perf_counter(), len(frames_T) + 1)[1:].tolist()
        steps = list(zip(frames_T, episodes_T, time_T, strict=True))
        if self.spec.agent.algorithm.on_policy:
            rollout, report = self._mask_stale_transitions(dataset.rollout(), learner.clock.opt_step)
            yield CollectedRollout(policy, steps, rollout, report)
            self._record_update(learner)
            return
        for t, (frames, episodes, time) in enumerate(steps):
            self._midway = t < len(steps) - 1
            yield Experience(
                policy,
                frames,
                episodes,
                _transition_at_step(dataset, t),
                time,
                partial(self._step_lag_report, dataset, t, learner.clock.opt_step),
            )
            self._record_update(learner)
            if learner.has_finished:
                return

    def _record_update(self, learner: PolicyLearner) -> None:
        """Record the time span of the learner's last update, unless it has already been recorded, and set the policy's version."""
        if (trained := learner.take_update_times()) is not None:
            self.utilization.record(BusySpan("learner", "train", *trained))
            learner.agent.policy.version = learner.clock.opt_step

    def _mask_stale_transitions(self, rollout: Rollout, opt_step: int) -> tuple[Rollout | None, Callable[[], dict[str, float]] | None]:
        """Mask those transitions of a rollout whose policy lag exceeds meta.sampler.max_policy_lag.

        Returns (rollout, function that reports the lag), or (None, None) if no valid transitions are left.
        """
        lag_TN = opt_step - rollout.version_TN
        lag_B = lag_TN[rollout.valid_TN]
        if not len(lag_B):
            return None, None
        max_lag = self.sampler.max_policy_lag
        masked = float((lag_B > max_lag).float().mean())
        if masked == 1.0:
            notice(f"all transitions of a dataset exceed meta.sampler.max_policy_lag ({max_lag} gradient steps); the dataset is skipped")
            return None, None
        if masked:
            rollout = replace(rollout, valid_TN=rollout.valid_TN & ~(lag_TN > max_lag))
        return rollout, partial(self._lag_report, lag_B, masked)

    def _step_lag_report(self, dataset: Dataset, t: int, opt_step: int) -> dict[str, float]:
        """Return the `_lag_report` of the valid transitions in time step t of a dataset."""
        slabs = dataset.storage.slabs
        return self._lag_report(torch.from_numpy(opt_step - slabs["version"][t][slabs["valid"][t]]), 0.0)

    def _lag_report(self, lag_B: torch.Tensor, masked: float) -> dict[str, float]:
        """Return the values of the columns about the policy lag (in gradient steps) and the busy times, as a dict: column → value.

        Args:
            lag_B: policy lag of each transition.
            masked: fraction of the transitions that are masked.
        """
        shares = self.utilization.busy_shares()
        if not len(lag_B):
            return shares
        low, high, mean = float(lag_B.min()), float(lag_B.max()), float(lag_B.float().mean())
        return {"lag_min": low, "lag_mean": mean, "lag_max": high, "lag_masked": masked} | shares

    def _publish_after_training(self, policy: int) -> None:
        """Perform a round of population-based training if a round is due, and publish the policy's new weights.

        This method is called after the learner has trained on a dataset.
        """
        is_active = not self.learners[policy].has_finished
        self.arrays.active_P[policy] = is_active
        if (
            is_active and self.population is not None and self.population.is_round_due(policy)
        ):  # a finished policy keeps its evaluated weights
            self.population.step(policy)
        self._publish(policy)

    def _publish(self, policy: int) -> None:
        """Publish the newest weights of a policy."""
        learner = self.learners[policy]
        acting_state = np.concatenate(
            [
                [learner.agent.explore_var or 0.0, learner.agent.acts_at_random, learner.clock.global_frame],
                self.normalizers.statistics_vector,
            ]
        )
        self.arrays.weights[policy].publish(learner.clock.opt_step, acting_state)

    def recent_busy_spans(self) -> Spans:
        return self.utilization.recent_busy_spans()

    def close(self) -> None:
        self.pool.close()

    @property
    def between_rounds(self) -> bool:
        """Whether the state of the source can be saved now.

        With synchronous rounds, the state can be saved only after the learner has trained on a round and before the next round begins.
        """
        return not self.in_rounds or (not self._midway and self.pool.between_rounds)

    @property
    def unsaved_episodes_reason(self) -> str:
        if not self.in_rounds:
            return "asynchronous rollout workers are ahead of the learner"
        return f"the rollout workers cannot save them; backend {self.backend}"

    def state_dict(self) -> dict[str, Any]:
        open_episodes = to_tensors(self.pool.collect_states()) if self.in_rounds else None
        return {"open": open_episodes, "resumes": self._resumes, "restarts": self._restarts + self.pool.restarts}

    def load_state_dict(self, state: dict[str, Any]) -> bool:
        self._loaded, self._states, self._resumes = True, to_arrays(state["open"]), int(state["resumes"]) + 1
        self._restarts = int(state.get("restarts", 0))  # absent in checkpoints of earlier versions
        return self._states is not None


def _transition_at_step(dataset: Dataset, t: int) -> Transition:
    """Return time step t of a dataset as the transition of a vector env, in which each column of the dataset is one env."""
    slabs = dataset.storage.slabs
    obs_N, last_obs_N = slabs["obs"][t], slabs["obs"][t + 1]
    ended = [(n, obs) for step, n, obs, _ in dataset.storage.truncations if step == t]
    if ended:
        last_obs_N = last_obs_N.copy()
        for n, obs in ended:
            last_obs_N[n] = obs
    first_N = slabs["first"][t + 1]
    step = VecStep(
        slabs["reward"][t], slabs["terminated"][t], slabs["truncated"][t], last_obs_N, slabs["obs"][t + 1], first_N, slabs["valid"][t], []
    )
    return obs_N, slabs["first"][t], None, ActOut(slabs["action"][t], slabs["logp"][t]), step
