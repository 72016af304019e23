"""The interface of all algorithms."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from slm_lab.agent.algorithm.common.sil_replay import SILReplay
from slm_lab.agent.algorithm.common.target import TargetNet
from slm_lab.agent.optim.trainer import Trainer
from slm_lab.agent.policy.policy import Policy
from slm_lab.agent.replay.replay import Replay
from slm_lab.agent.rollout.rollout import Rollout
from slm_lab.agent.rollout.storage import RolloutStorage
from slm_lab.lib.clock import Clock
from slm_lab.lib.records import ActOut, EnvInfo, Metrics, VecStep
from slm_lab.lib.rng import Seeds
from slm_lab.lib.store import Arrays, Named, Shareable, SharedArrays, attach_parts, prefixed
from slm_lab.spec.schedule import Schedule
from slm_lab.spec.spec import AgentSpec


class Tuning(NamedTuple):
    """Hyperparameters that population-based training changes, relative to the spec."""

    lr: float = 1.0
    """Factor of the learning rate."""
    entropy_coef: float = 1.0
    """Factor of the entropy coefficient."""
    gamma: float | None = None
    """Replaces the spec's discount factor."""


class Algorithm:
    """Learn a policy: store steps in a memory, and update when it is ready."""

    diagnostics: tuple[str, ...] = ()
    """Names of the columns that every update reports in Metrics.extra, in order."""

    memory: RolloutStorage | Replay | None = None
    """Storage of what is learned from; None for an algorithm that does not learn."""
    replay: Replay | SILReplay | None = None
    """Replay buffer; None for an on-policy algorithm."""
    trainer: Trainer | None = None
    """Steps the parameters (of the critics, where actor and critics have separate nets)."""
    target: TargetNet[Any] | None = None
    """Target network."""
    entropy_schedule: Schedule | None = None
    """Weight of the entropy bonus over frames."""

    def __init__(self, agent: AgentSpec, info: EnvInfo, clock: Clock, seeds: Seeds, policy: Policy, device: str = "cpu") -> None:
        self.spec: Any = agent.algorithm
        """The algorithm's section of the spec."""
        self.clock, self.policy, self.device = clock, policy, device
        self.tuning = Tuning()
        self._untuned = self.spec

    def observe(self, obs_N: np.ndarray, first_N: np.ndarray, state_N: np.ndarray | None, out: ActOut, step: VecStep) -> None:
        """Store one step. `first_N`: obs_N begins an episode; `state_N`: the hidden state before it."""
        if self.memory is not None:
            self.memory.add(obs_N, first_N, state_N, out, step)

    def ready(self) -> bool:
        """Return whether `update` has something to learn from."""
        return self.memory is not None and self.memory.ready

    def update(self) -> Metrics:
        """Learn from what was stored."""
        if not isinstance(self.memory, RolloutStorage):
            raise RuntimeError(f"{type(self).__name__} does not learn from rollouts")
        return self.learn(self.memory.rollout())

    def learn(self, rollout: Rollout) -> Metrics:
        """Learn from a rollout, wherever it was collected."""
        raise RuntimeError(f"{type(self).__name__} does not learn from rollouts")

    @property
    def policy_trainer(self) -> Trainer | None:
        """Trainer of the net that the policy acts with."""
        return self.trainer

    @property
    def lr(self) -> float | None:
        """Learning rate of the last update."""
        return None if self.trainer is None else self.trainer.lr

    @property
    def entropy_coef(self) -> float | None:
        """Weight of the entropy bonus now."""
        return None if self.entropy_schedule is None else self.entropy_schedule.value(self.clock.global_frame)

    @property
    def skipped_steps(self) -> int:
        """Gradient steps skipped because loss or gradient was not finite."""
        return sum(part.skipped for part in self.shared_parts().values() if isinstance(part, Trainer))

    def tune(self, tuning: Tuning) -> None:
        """Continue with other hyperparameters."""
        self.tuning = tuning
        if self.trainer is not None:
            self.trainer.lr_factor = tuning.lr
            self.trainer.begin(self.clock.global_frame)
        if self.entropy_schedule is not None:
            own = self.spec.entropy_coef_spec
            ends = {end: value * tuning.entropy_coef for end in ("start_val", "end_val") if (value := getattr(own, end)) is not None}
            self.entropy_schedule = own.model_copy(update=ends)
        self.spec = self._untuned if tuning.gamma is None else self._untuned.model_copy(update={"gamma": tuning.gamma})

    def shared_parts(self) -> dict[str, Shareable]:
        """Return the parts that several processes can train together."""
        parts = {"trainer": self.trainer, "target": self.target}
        return {name: part for name, part in parts.items() if part is not None}

    def shared_arrays(self) -> Named:
        return prefixed(self.shared_parts())

    def attach(self, store: SharedArrays, arrays: Arrays) -> None:
        attach_parts(self.shared_parts(), store, arrays)

    def storages(self) -> dict[str, RolloutStorage]:
        """Return the storages that collect an unfinished rollout."""
        return {"rollout": self.memory} if isinstance(self.memory, RolloutStorage) else {}

    def state_dict(self) -> dict[str, Any]:
        """Return everything learned, without the transitions that it is learned from."""
        state: dict[str, Any] = {"tuning": tuple(self.tuning)}
        state |= {} if self.trainer is None else {"trainer": self.trainer.state_dict()}
        state |= {} if self.target is None else {"target": self.target.state_dict()}
        return state | ({"memory": self.memory.state_dict()} if isinstance(self.memory, Replay) else {})

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load what `state_dict` returned."""
        if (tuning := Tuning(*state["tuning"])) != self.tuning:
            self.tune(tuning)
        if self.trainer is not None:
            self.trainer.load_state_dict(state["trainer"])
        if self.target is not None:
            self.target.load_state_dict(state["target"])
        if isinstance(self.memory, Replay):
            self.memory.load_state_dict(state["memory"])
