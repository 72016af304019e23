"""Session: one agent learns in one vector env."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch

from slm_lab.agent.build import build_agent, resolve_device
from slm_lab.agent.memory.replay import check_fits
from slm_lab.env.make import make_env
from slm_lab.env.vec import Env
from slm_lab.experiment import checkpoint
from slm_lab.experiment.evaluate import play
from slm_lab.experiment.observers import (
    COLUMNS,
    GLOBAL_COLUMNS,
    SAMPLER_COLUMNS,
    Checkpointer,
    CSVWriter,
    DevChecks,
    Evaluator,
    Hook,
    Observer,
    Recorder,
    Reporter,
    Row,
    TensorBoard,
    complete_rows,
    hooks,
)
from slm_lab.experiment.paths import DataMode, RunPaths
from slm_lab.experiment.plan import Plan, Report, Stop, UserError, cores
from slm_lab.lib.clock import Clock
from slm_lab.lib.heap import PRIVATE, Heap
from slm_lab.lib.log import logger, notice
from slm_lab.lib.records import EnvInfo
from slm_lab.lib.rng import draw_seed, session_seeds
from slm_lab.spec.spec import Spec


@dataclass
class SessionResult:
    """What a Session did."""

    index: int
    frame: int = 0
    interrupted: bool = False
    rows: list[Row] = field(default_factory=list)
    """Of training; see observers.COLUMNS."""
    eval_rows: list[Row] = field(default_factory=list)
    """Of evaluation, where meta.rigorous_eval is on."""


class Session:
    """Session number `index` of a trial.

    `run()` alone keeps everything in memory: rows in its result, the trained agent in `self.agent`. Given `paths`, it
    writes tables, checkpoints and TensorBoard events there. `build()` makes env and agent and writes nothing.

    Args: heap: where the global net lies, for meta.distributed; without it a Session trains a net of its own, on all frames.
    restart: processes that died in this Session's place.
    """

    def __init__(
        self,
        spec: Spec,
        index: int = 0,
        plan: Plan | None = None,
        *,
        trial: int = 0,
        stop: Stop | None = None,
        report: Report | None = None,
        heap: Heap = PRIVATE,
        restart: int = 0,
    ) -> None:
        self.heap, self.restart = heap, restart
        self.frames = spec.session_frames if heap.common else spec.env.max_frame
        """That it is to collect."""
        self.spec, self.index, self.trial = spec, index, trial
        self.plan = plan or Plan()
        self.stop = stop or Stop()
        self.report = report
        self.device = "cpu"
        self.result = SessionResult(index)
        self._observers: list[Observer] = []
        self._eval_env: Env | None = None
        self._num_envs: int | None = None
        """Instead of the spec's."""
        self._built = False

    def build(self) -> Self:
        """Make clock, env and agent. Raises SpecError or UserError for what the user can put right."""
        seed = self.spec.meta.random_seed
        if seed is None:
            seed = draw_seed()
            self.spec = seeded(self.spec, seed)
            notice(f"{self.spec.name}: random_seed {seed}, drawn, for meta has none")
        spec = self.spec
        self.seeds = session_seeds(seed, self.trial, self.index, self.restart)
        own_seed = self.seeds.net
        if self.heap.common:  # all begin with the weights of the first
            self.seeds = replace(self.seeds, net=session_seeds(seed, self.trial, 0).net)
        self.device = device_of(spec, self.plan, self.index)
        random.seed(self.seeds.env)
        np.random.seed(self.seeds.env)
        torch.manual_seed(self.seeds.net)
        self.clock, self.result = Clock(self.heap), SessionResult(self.index)
        self.env = self._make_env(self.seeds.env, training=True)
        self._threads, self._built = torch.get_num_threads(), True
        torch.set_num_threads(1)  # one core per Session; also keeps sums, and so results, the same whatever runs beside it
        try:
            self.agent = build_agent(spec, self._info(), self.seeds, self.clock, self.device, self.heap)
            if own_seed != self.seeds.net:
                torch.manual_seed(own_seed)
            self._check_room()
            if spec.meta.rigorous_eval:
                self._eval_env = self._make_env(self.seeds.eval_env, training=False)
        except BaseException:
            self.close()
            raise
        return self

    def _check_room(self) -> None:
        """Raise SpecError where the replay memories of all Sessions that run at a time do not fit this machine."""
        replay, at_once = self.agent.replay, self.plan.at_once(self.spec.meta)
        if replay is not None:
            fewer = "take fewer Sessions (meta.max_session)" if self.heap.common else "let fewer Sessions run at a time (--jobs)"
            check_fits(replay.capacity, replay.nbytes, at_once, f"; or {fewer}")

    def run(self, paths: RunPaths | None = None) -> SessionResult:
        """Learn until this Session has its frames, or until a stop is requested."""
        if not self._built:
            self.build()
        try:
            self.begin(paths)
            self._loop()
            self.end()
        finally:
            self.close()
        return self.result

    def begin(self, paths: RunPaths | None) -> None:
        """Let the observers begin, and the clock."""
        logger.info("begins: seeds %s, backend %s, device %s", self.seeds, self.env.backend, self.device)
        self.clock.begin()
        self._observers = self._observe(paths)
        if self.restart and paths is not None:
            self._take_over(paths)

    def end(self) -> None:
        """Write what is written at the end."""
        self.result.frame, self.result.interrupted = self.clock.frame, self.clock.frame < self.frames
        if self.result.interrupted:
            self._call("on_interrupt")
        self._call("on_end")
        logger.info("ends at frame %d%s", self.clock.frame, ", as asked" if self.result.interrupted else "")

    def close(self) -> None:
        """Release env and files."""
        if not self._built:
            return
        self._built = False
        for observer in self._observers:
            observer.close()
        self.env.close()
        if self._eval_env is not None:
            self._eval_env.close()
        torch.set_num_threads(self._threads)

    def _loop(self) -> None:
        env, agent, clock, stop = self.env, self.agent, self.clock, self.stop
        num_envs, max_frame = env.info.num_envs, self.frames
        on_update, on_step = hooks(self._observers, "on_update"), hooks(self._observers, "on_step")
        obs_N = env.reset()
        while clock.frame < max_frame and not stop.requested:
            out = agent.act(obs_N)
            step = env.step(out.action_N)
            clock.tick(num_envs)
            clock.epi += len(step.episodes)
            agent.observe(obs_N, out, step)
            if agent.ready():
                metrics = agent.update()
                for hook in on_update:
                    hook(metrics)
            for hook in on_step:
                hook(step)
            obs_N = step.obs_N

    def _take_over(self, paths: RunPaths) -> None:
        """Go on with the averages and tables of the process in whose place this one is: its last checkpoint's, and the rows after that.

        With meta.save_replay also with its replay memory.
        """
        last = paths.checkpoint(self.index, "last", self.trial)
        if last.exists():
            saved = checkpoint.load(last)
            for name in ("epi", "t", "opt_step"):  # frames and time are counted in the memory in common
                setattr(self.clock, name, int(saved["clock"][name]))
            for observer in self._observers:
                observer.load_state_dict(saved["observers"][type(observer).__name__])
            if self.agent.replay is not None and "replay" in saved:
                self.agent.replay.load_contents(saved["replay"])
        for observer in self._observers:
            match observer:
                case Recorder() | Evaluator():
                    observer.go_on(complete_rows(self._tables(paths)[observer.mode]))
                case Checkpointer():
                    observer.go_on()

    def _observe(self, paths: RunPaths | None) -> list[Observer]:
        """The observers, in the order in which they are called: those that make rows, then those that take them."""
        meta, clock, agent = self.spec.meta, self.clock, self.agent
        columns = (*COLUMNS, *(GLOBAL_COLUMNS if self.heap.common else ()), *(SAMPLER_COLUMNS if self.spec.meta.sampler else ()))
        observers: list[Observer] = [Recorder(clock, agent, meta.log_frequency, self._emit, columns)]
        if meta.rigorous_eval:
            observers.append(Evaluator(clock, agent, meta.eval_frequency, self._emit, self._evaluate, columns))
        if self.report:
            observers.append(Reporter(clock, partial(self.report, self.index)))
        if paths is not None:
            observers += self._writers(paths, columns)
        if self.plan.mode == "dev":
            observers.append(DevChecks(agent.weights, agent.target))
        return observers

    def _tables(self, paths: RunPaths) -> dict[DataMode, Path]:
        return {mode: paths.session_df(self.index, mode, self.trial) for mode in ("train", "eval")}

    def _writers(self, paths: RunPaths, columns: Sequence[str]) -> list[Observer]:
        """The observers that write files; the checkpoint comes last, when the others are done."""
        meta = self.spec.meta
        observers: list[Observer] = [CSVWriter(self._tables(paths), columns)]
        if TensorBoard.installed():
            observers.append(TensorBoard(paths.tensorboard(self.index, self.trial)))
        files = (paths.checkpoint(self.index, "last", self.trial), paths.checkpoint(self.index, "best", self.trial))
        judged_by: DataMode = "eval" if meta.rigorous_eval else "train"
        observers.append(
            Checkpointer(files, self.clock, meta.save_interval, judged_by, self.state_dict, self._best, lambda: self._call("on_checkpoint"))
        )
        return observers

    def state_dict(self) -> dict[str, Any]:
        """Everything stateful; with meta.save_replay the replay memory too."""
        replay = self.agent.replay if self.spec.meta.save_replay else None
        return {
            "version": checkpoint.VERSION,
            "agent": self.agent.state_dict(),
            "env": self.env.state_dict(),
            "clock": self.clock.state_dict(),
            "rng": checkpoint.rng_state(self.device),
            "observers": {type(observer).__name__: observer.state_dict() for observer in self._observers},
        } | ({} if replay is None else {"replay": replay.contents()})

    def _best(self) -> dict[str, Any]:
        """What it takes to play: weights, and the env's normaliser statistics."""
        return {
            "version": checkpoint.VERSION,
            "weights": self.agent.weights(),
            "env": self.env.state_dict(),
            "global_frame": self.clock.global_frame,
        }

    def _emit(self, mode: DataMode, row: Row) -> None:
        (self.result.rows if mode == "train" else self.result.eval_rows).append(row)
        for hook in hooks(self._observers, "on_row"):
            hook(mode, row)

    def _call(self, name: Hook) -> None:
        for hook in hooks(self._observers, name):
            hook()

    def _evaluate(self) -> float | None:
        """Mean return of one episode in each evaluation env; None if a stop came before the first ended."""
        assert self._eval_env is not None
        self._eval_env.copy_statistics(self.env.state_dict())
        returns = play(self._eval_env, self.agent.evaluator(), self.stop)
        return sum(returns) / len(returns) if returns else None

    def _info(self) -> EnvInfo:
        """Of the envs that the agent acts in."""
        return self.env.info

    def _make_env(self, seed: int, *, training: bool) -> Env:
        spec = self.spec
        return make_env(
            spec.env.model_copy(update={"max_frame": self.frames}),
            seed,
            num_envs=self._num_envs if training else spec.meta.rigorous_eval,
            gamma=spec.agent.algorithm.gamma,
            training=training,
            threads=max(1, cores() // self.plan.at_once(spec.meta)),
            heap=self.heap if training else PRIVATE,
        )


def device_of(spec: Spec, plan: Plan, index: int) -> str:
    """The torch device of Session `index`: the plan's, or as the spec says. Raises SpecError or UserError where it is not there."""
    if plan.device is None:
        return resolve_device(spec, index)
    device, count = torch.device(plan.device), torch.cuda.device_count()
    if device.type == "cuda" and (device.index or 0) >= count:
        allowed = ", ".join(["cpu", *(f"cuda:{number}" for number in range(count))])
        raise UserError(f"--device {plan.device}: this machine has {count or 'no'} cuda device{'s' * (count != 1)}; allowed: {allowed}")
    return plan.device


def seeded(spec: Spec, seed: int) -> Spec:
    """`spec` with a seed where it has none."""
    meta = spec.meta
    return spec if meta.random_seed is not None else spec.model_copy(update={"meta": meta.model_copy(update={"random_seed": seed})})
