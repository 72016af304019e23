"""One policy of a Session with rollout workers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from slm_lab.env.vec import Env
from slm_lab.experiment.observers import Recorder, hooks
from slm_lab.experiment.observers.base import mean
from slm_lab.experiment.paths import RunPaths
from slm_lab.experiment.plan import Plan, Report, Stop
from slm_lab.experiment.sampler.pbt import Member, Population
from slm_lab.experiment.sampler.shared import splits
from slm_lab.experiment.session import Session
from slm_lab.lib.records import EnvInfo, Episode, Metrics, VecStep
from slm_lab.spec.spec import Spec

_NOTHING = np.zeros(0)


class Student(Session):
    """One policy: its agent, clock, rows and checkpoints. Its env is never stepped: it stands for those of the workers.

    Args: env: that of another policy, to be used here too.
    """

    def __init__(self, spec: Spec, index: int, plan: Plan, *, trial: int, stop: Stop, report: Report | None, env: Env | None) -> None:
        super().__init__(spec, index, plan, trial=trial, stop=stop, report=report)
        sampler = spec.meta.sampler
        assert sampler is not None
        self._given, self._num_envs = env, sampler.num_envs_per_worker // splits(sampler)
        self._on_step: list[Callable[..., None]] = []
        self._on_update: list[Callable[..., None]] = []
        self.population: Population | None = None
        """The policies that this one is among, where they are trained as a population."""

    def _make_env(self, seed: int, *, training: bool) -> Env:
        return self._given if training and self._given is not None else super()._make_env(seed, training=training)

    def _info(self) -> EnvInfo:
        return replace(self.env.info, num_envs=self.spec.env.num_envs)

    def advance(self, frames: int, episodes: list[Episode]) -> bool:
        """Count a step of several envs. Returns whether there are more frames to come."""
        self.clock.tick(frames)
        self.clock.epi += len(episodes)
        return self.clock.frame < self.frames

    def begin(self, paths: RunPaths | None) -> None:
        super().begin(paths)
        self._on_step, self._on_update = hooks(self._observers, "on_step"), hooks(self._observers, "on_update")

    def stepped(self, episodes: list[Episode]) -> None:
        """Tell the observers, after the training that a step may have led to."""
        step = VecStep(_NOTHING, _NOTHING, _NOTHING, _NOTHING, _NOTHING, _NOTHING, _NOTHING, episodes)
        for hook in self._on_step:
            hook(step)

    @property
    def member(self) -> Member:
        """How this policy stands."""
        recorder = next(observer for observer in self._observers if isinstance(observer, Recorder))
        return Member(self.agent, self.clock.frame, mean(recorder.returns))

    def state_dict(self) -> dict[str, Any]:
        return super().state_dict() | ({} if self.population is None else {"population": self.population.state_dict()})

    def updated(self, metrics: Metrics) -> None:
        """Tell the observers."""
        for hook in self._on_update:
            hook(metrics)
