"""A Session whose envs are stepped by rollout workers: the learner."""

from __future__ import annotations

import os
from dataclasses import replace
from functools import partial
from secrets import token_hex
from time import perf_counter
from typing import Self

import numpy as np
import torch

from slm_lab.agent.agent import Agent
from slm_lab.agent.memory.rollout import Rollout
from slm_lab.env.vec import Env
from slm_lab.experiment.engine import WorkerFailed
from slm_lab.experiment.engine.spawned import CommonFile
from slm_lab.experiment.paths import RunPaths
from slm_lab.experiment.plan import Plan, Report, Stop
from slm_lab.experiment.sampler.batcher import Batcher, Dataset
from slm_lab.experiment.sampler.crew import Crew, ProcessCrew, SerialCrew
from slm_lab.experiment.sampler.intake import Intake
from slm_lab.experiment.sampler.ledger import Ledger
from slm_lab.experiment.sampler.pbt import Population
from slm_lab.experiment.sampler.process import SERVER, WorkerProcess
from slm_lab.experiment.sampler.shared import Common, check_room
from slm_lab.experiment.sampler.student import Student
from slm_lab.experiment.sampler.worker import RolloutWorker, Setting, note_count
from slm_lab.experiment.session import SessionResult, device_of
from slm_lab.lib.heap import CommonHeap, common_file
from slm_lab.lib.log import notice
from slm_lab.lib.records import ActOut, EnvInfo, Episode, VecStep
from slm_lab.spec.algorithm import ReplayAlgorithmSpec
from slm_lab.spec.base import Problem, SpecError
from slm_lab.spec.spec import Spec


class SampledSession:
    """Session number `index` of a trial with meta.sampler; see Session. Table number index · num_policies + p is policy p's."""

    def __init__(
        self,
        spec: Spec,
        index: int = 0,
        plan: Plan | None = None,
        *,
        trial: int = 0,
        stop: Stop | None = None,
        report: Report | None = None,
    ) -> None:
        assert spec.meta.sampler is not None
        self.spec, self.index, self.plan, self.trial = spec, index, plan or Plan(), trial
        self.sampler, self.stop, self.report = spec.meta.sampler, stop or Stop(), report
        self.students: list[Student] = []
        self.crew: Crew | None = None
        self._built = False
        self._memory: int | None = None
        self._processes: list[WorkerProcess] = []

    @property
    def env(self) -> Env:
        """Stands for those of the workers; holds their statistics."""
        return self.students[0].env

    @property
    def agent(self) -> Agent:
        """Of the first policy."""
        return self.students[0].agent

    def build(self) -> Self:
        """Make agents and rollout workers. Raises SpecError or UserError for what the user can put right."""
        self._built = True
        try:
            self._build()
        except BaseException:
            self.close()
            raise
        return self

    def _build(self) -> None:
        self._settle_inference()
        sampler, workers = self.sampler, self.sampler.num_workers
        self._memory = common_file()
        if not sampler.serial_mode:
            self._processes = [WorkerProcess(index, CommonFile(self._memory)) for index in range(workers)]
        for p in range(sampler.num_policies):
            env = self.students[0].env if self.students else None
            index = self.index * sampler.num_policies + p
            student = Student(self.spec, index, self.plan, trial=self.trial, stop=self.stop, report=self.report, env=env)
            self.students.append(student.build())
            self.spec = student.spec  # with the seed that was drawn
        first = self.students[0]
        info = first._info()
        check_room(self.spec, info, self.plan.at_once(self.spec.meta))
        central = sampler.inference == "central"
        address = f"\0slm_lab_{os.getpid()}_{token_hex(8)}" if central else ""  # in no folder, so nothing is left of it
        setting = Setting(self.spec, info, first.seeds, notes=note_count(first.env), address=address, device=first.device)
        algorithms = [student.agent.algorithm for student in self.students]
        heap = partial(CommonHeap, self._memory, 0, 1, synced=False)
        try:
            self.common = Common(heap(), self.spec, info, algorithms, setting.notes)
        except MemoryError as error:
            message = f"{error}; take fewer envs, or shorter rollouts"
            raise SpecError(self.spec.name, [Problem("meta.sampler.num_envs_per_worker", message)]) from error
        intake = Intake(self.common.slots, self._batchers(info), self._rounds())
        self.ledger = Ledger(workers, central)
        self._publish()
        if sampler.serial_mode:
            self.crew = SerialCrew([RolloutWorker(replace(setting, index=w), heap(fresh=False)) for w in range(workers)], intake)
        else:
            if central:
                self._processes.append(WorkerProcess(SERVER, CommonFile(self._memory)))
            for process in self._processes:
                process.begin(replace(setting, index=process.index))
            server = self._processes[-1] if central else None
            crew = self._processes[:workers]
            self.crew = ProcessCrew(crew, server, CommonFile(self._memory), intake, self.spec.meta.max_restart, not sampler.async_rl)

    def _begin_population(self, paths: RunPaths | None) -> None:
        if self.sampler.pbt is not None:
            path = None if paths is None else paths.pbt(self.index, self.trial)
            members = [student.member for student in self.students]
            population = Population(self.sampler.pbt, members, self.students[0].seeds.update, path)
            for student in self.students:
                student.population = population

    def _settle_inference(self) -> None:
        """auto: central for nets on a GPU."""
        if self.sampler.inference == "auto":
            central = device_of(self.spec, self.plan, self.index).startswith("cuda") and not self.sampler.serial_mode
            even = self.sampler.num_envs_per_worker % self.sampler.worker_num_splits == 0
            change = {"inference": "central" if central else "local"} | ({} if even else {"worker_num_splits": 1})
            self.sampler = self.sampler.model_copy(update=change)
            self.spec = self.spec.model_copy(update={"meta": self.spec.meta.model_copy(update={"sampler": self.sampler})})

    def _rounds(self) -> int | None:
        """Rollouts of each worker that make a round; None where they are taken as they come."""
        if isinstance(self.spec.agent.algorithm, ReplayAlgorithmSpec):
            return 1  # a replay of images needs the steps of an env in its column
        if self.sampler.async_rl and not self.sampler.serial_mode:
            return None
        return -(-self.spec.dataset_columns // self.sampler.num_envs)

    def _batchers(self, info: EnvInfo) -> list[Batcher]:
        sampler, spec, alone = self.sampler, self.spec, len(self.students) == 1
        columns = spec.dataset_columns
        spare = sampler.num_batches_to_accumulate if sampler.async_rl and not sampler.serial_mode else 0
        state_size = self.agent.policy.state_size
        return [Batcher(p, info, columns, spec.rollout_rows, state_size, spare, alone) for p in range(len(self.students))]

    def run(self, paths: RunPaths | None = None) -> SessionResult:
        """Learn until every policy has its frames, or until a stop is requested."""
        if not self._built:
            self.build()
        assert self.crew is not None
        try:
            self.crew.start(self.stop)
            for student in self.students:
                student.begin(paths)
                student.clock.moment = perf_counter()
            self._begin_population(paths)
            self.ledger.begin()
            try:
                self._loop(self.crew)
            except WorkerFailed:
                self._end(paths)  # what was learned so far is kept
                raise
            self._end(paths)
        finally:
            self.close()
        first = self.students[0].result
        first.interrupted = any(student.result.interrupted for student in self.students)
        return first

    def _end(self, paths: RunPaths | None) -> None:
        """Write what is written at the end."""
        for student in self.students:
            student.end()
        if paths is not None:
            self.ledger.write(paths.timeline(self.index, self.trial))

    def close(self) -> None:
        """End the workers; release envs and files."""
        if not self._built:
            return
        self._built = False
        if self.crew is not None:
            self.crew.close()
        else:
            for process in self._processes:
                process.kill()
        for student in reversed(self.students):  # each leaves torch's number of threads as it was when it was built
            student.close()
        if self._memory is not None:
            os.close(self._memory)

    def _loop(self, crew: Crew) -> None:
        while self.common.active_P.any() and not self.stop.requested:
            item = crew.next()
            self.ledger.inferred(self.common.spans.news())
            for worker, report in crew.reports():
                self.ledger.collected(worker, report)
                for news in report.news:
                    self.env.merge_news(news)
            if item is not None:
                policy, dataset = item
                if self.common.active_P[policy]:
                    self._take(policy, dataset)
                crew.release(policy, dataset)

    def _take(self, policy: int, dataset: Dataset) -> None:
        """Count the steps of a dataset, and train on it with the last."""
        student = self.students[policy]
        frames_T = dataset.mine_TN[:, : dataset.columns].sum(axis=1).tolist()
        ended: list[list[Episode]] = [[] for _ in frames_T]
        for t, episode in dataset.ended:
            ended[t].append(episode)
        replays = isinstance(self.spec.agent.algorithm, ReplayAlgorithmSpec)
        last = len(frames_T) - 1
        going_on = True
        when_T = np.linspace(student.clock.moment, perf_counter(), len(frames_T) + 1)[1:].tolist()
        for t, (frames, episodes) in enumerate(zip(frames_T, ended, strict=True)):
            student.clock.moment = when_T[t]
            going_on = student.advance(frames, episodes)
            if replays:
                self._replay(student, dataset, t)
            elif t == last:
                self._train(student, dataset.rollout())
            student.stepped(episodes)
            if not going_on:
                break
        self.common.active_P[policy] = going_on
        if (population := student.population) is not None:
            population.members[policy] = student.member
            if going_on and population.due(policy):  # weights that are not trained any more are those that were measured
                population.step(policy)
        self._publish(policy)

    def _train(self, student: Student, rollout: Rollout) -> None:
        """On-policy: once on the whole dataset."""
        lag_TN = student.clock.opt_step - rollout.version_TN
        lag_B = lag_TN[rollout.valid_TN]
        if not len(lag_B):
            return
        late_TN = lag_TN > self.sampler.max_policy_lag
        masked = float((lag_B > self.sampler.max_policy_lag).float().mean())
        if masked:
            rollout = replace(rollout, valid_TN=rollout.valid_TN & ~late_TN)
        if masked == 1.0:
            most = self.sampler.max_policy_lag
            notice(f"all transitions of a dataset are older than meta.sampler.max_policy_lag ({most} gradient steps); not trained on")
            return
        begin = perf_counter()
        metrics = student.agent.learn(rollout)
        self.ledger.trained(begin, perf_counter())
        metrics.extra |= _lags(lag_B, masked) | self.ledger.shares()
        student.updated(metrics)

    def _replay(self, student: Student, dataset: Dataset, t: int) -> None:
        """Off-policy: a step goes into the replay memory; the algorithm trains when it is due."""
        begin = perf_counter()
        slabs = dataset.memory.slabs
        obs_N, last_obs_N = slabs["obs"][t], slabs["obs"][t + 1]
        cut = [(n, obs) for row, n, obs, _ in dataset.memory.truncations if row == t]
        if cut:
            last_obs_N = last_obs_N.copy()
            for n, obs in cut:
                last_obs_N[n] = obs
        terminated_N, truncated_N, first_N = slabs["terminated"][t], slabs["truncated"][t], slabs["first"][t + 1]
        step = VecStep(slabs["reward"][t], terminated_N, truncated_N, last_obs_N, slabs["obs"][t + 1], first_N, slabs["valid"][t], [])
        student.agent.algorithm.observe(obs_N, slabs["first"][t], None, ActOut(slabs["action"][t], slabs["logp"][t]), step)
        if not student.agent.ready():
            return
        lag_B = torch.from_numpy(student.clock.opt_step - slabs["version"][t][slabs["valid"][t]])
        metrics = student.agent.update()
        student.agent.policy.version = student.clock.opt_step
        self.ledger.trained(begin, perf_counter())
        metrics.extra |= (_lags(lag_B, 0.0) if len(lag_B) else {}) | self.ledger.shares()
        student.updated(metrics)

    def _publish(self, policy: int | None = None) -> None:
        """Let the workers have the newest weights of one policy, or of all."""
        statistics = self.env.statistics
        for p, student in enumerate(self.students):
            if policy in (None, p):
                explore_var = student.agent.explore_var
                notes = np.array([0.0 if explore_var is None else explore_var, *statistics])
                self.common.weights[p].publish(student.clock.opt_step, notes)


def _lags(lag_B: torch.Tensor, masked: float) -> dict[str, float]:
    return {
        "lag_min": float(lag_B.min()),
        "lag_mean": float(lag_B.float().mean()),
        "lag_max": float(lag_B.max()),
        "lag_masked": masked,
    }
