"""`Agent`, which consists of a policy that acts and an algorithm that trains the policy."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import numpy as np
import torch

from slm_lab.agent.algorithm.base import Algorithm
from slm_lab.agent.algorithm.sil_replay import SILReplay
from slm_lab.agent.optim.shared import SharedParams
from slm_lab.agent.optim.trainer import Trainer
from slm_lab.agent.policy.policy import Policy
from slm_lab.agent.replay.replay import Replay
from slm_lab.agent.rollout.rollout import Rollout
from slm_lab.lib.clock import Clock
from slm_lab.lib.records import ActOut, Metrics
from slm_lab.lib.rng import generator_state, set_generator_state
from slm_lab.lib.store import Arrays, Named, Store
from slm_lab.spec.models.base import Schedule


class Agent:
    """A policy, the algorithm that trains the policy, and the exploration schedule.

    The caller stores the hidden state of a recurrent policy. The first hidden state comes from `policy.initial_state`, and each further
    hidden state from `ActOut.state_N`. The caller sets the hidden state of an env to zero when an episode begins.

    Args:
        explore: schedule of the exploration parameter explore_var, or None for an algorithm without this parameter.
        eval_seed: random seed of evaluations.
        random_frames: number of initial frames of the Session, during which the agent acts uniformly at random (except in evaluations).
    """

    def __init__(
        self, policy: Policy, algorithm: Algorithm, clock: Clock, explore: Schedule | None, eval_seed: int, random_frames: int = 0
    ) -> None:
        self.policy, self.algorithm, self.clock = policy, algorithm, clock
        self.observe, self.ready, self.end_step = algorithm.observe, algorithm.ready, algorithm.end_step
        """Methods of the algorithm: `observe` stores a vector step, `ready` returns whether enough steps are stored for `update`, and
        `end_step` is called at the end of each vector step, after the updates."""
        policy.acts_noisily = True
        self._explore, self._eval_seed, self._random_frames = explore, eval_seed, random_frames
        self._shared: SharedParams | None = None
        self.threads = 1
        """Number of torch threads for an update. Acting uses one thread, because its batches are small, and idle torch threads would
        compete with the threads of the envs."""
        self._trainers = [part for part in algorithm.parts().values() if isinstance(part, Trainer)]
        self._counting_trainers = [trainer for trainer in self._trainers if trainer.counts_calls]
        """Trainers whose learning rate depends on the number of training calls."""

    def act(self, obs_N: np.ndarray, state_N: np.ndarray | None = None) -> ActOut:
        """Choose actions for the observations obs_N [N, *shape].

        Args: state_N: hidden state [N, S] before obs_N, or None for a feed-forward policy.
        """
        if self._shared is not None:
            self._shared.pull_if_outdated()
        if self._explore is not None:
            self.policy.explore_var = self._explore.value(self.clock.global_frame)
        if self._random_frames:
            self.policy.uniform = self.acts_at_random
        return self.policy.act(obs_N, state_N)

    def update(self) -> Metrics:
        """Train with the steps that `Algorithm.observe` has stored, and return the metrics of this update."""
        steps_before = self.clock.opt_step
        with torch_threads(self.threads):
            metrics = self.algorithm.update()
        self.algorithm.reset_nets_if_due(steps_before)
        self._count_training_call()
        self.policy.version += 1
        return metrics

    def learn(self, rollout: Rollout) -> Metrics:
        """Train with a rollout that other processes collected, and return the metrics of this update.

        The policy version of each step in such a rollout is a number of gradient steps.
        """
        with torch_threads(self.threads):
            metrics = self.algorithm.learn(rollout)
        self._count_training_call()
        self.policy.version = self.clock.opt_step
        return metrics

    def set_rare_checks(self, rarely: bool) -> None:
        """Set whether the agent checks only rarely, instead of in each update, for nets and parameters that user code changed.

        Rare checks are sufficient as long as no user code has access to the agent. Even with rare checks, each update notices new hooks of
        modules and parameters. (See validity.py.)
        """
        for trainer in self._trainers:
            trainer.flat.check_rarely = rarely
        self.policy.set_rare_checks(rarely)

    def _count_training_call(self) -> None:
        for trainer in self._counting_trainers:
            trainer.count_training_call()

    def action_function(self, deterministic: bool = False) -> Callable[..., np.ndarray]:
        """Return a function (obs_N, first_N, acts_N=None) → action_N that acts with the current policy (see Policy.action_function).

        The returned function acts with the last value of the schedule of explore_var.
        """
        if self._shared is not None:
            self._shared.pull_if_outdated()
        self.policy.explore_var = self.final_explore_var or 0.0
        return self.policy.action_function(np.random.default_rng(self._eval_seed), deterministic)

    @property
    def acts_at_random(self) -> bool:
        """Whether the agent currently acts uniformly at random, as some algorithms do before the frame training_start_step."""
        return self.clock.frame < self._random_frames

    @property
    def diagnostics(self) -> tuple[str, ...]:
        """Names of the diagnostics that updates report in Metrics.extra, in the order of their table columns.

        A diagnostic is absent from Metrics.extra until its value is known.
        """
        return self.algorithm.diagnostics

    @property
    def lr(self) -> float | None:
        """Current learning rate, or None for an algorithm that does not learn."""
        return self.algorithm.lr

    @property
    def explore_var(self) -> float | None:
        """Current exploration parameter (ε, τ or the standard deviation of noise), or None if the agent has no such parameter."""
        return None if self._explore is None else self._explore.value(self.clock.global_frame)

    @property
    def final_explore_var(self) -> float | None:
        """Exploration parameter in evaluations: the last value of the schedule of explore_var, or None if there is no such schedule."""
        return None if self._explore is None else self._explore.last

    @property
    def entropy_coef(self) -> float | None:
        """Current weight of the entropy bonus, or None for an algorithm without an entropy bonus."""
        return self.algorithm.entropy_coef

    @property
    def replay(self) -> Replay | SILReplay | None:
        """Replay buffer, or None for an on-policy algorithm without self-imitation. Its `contents` are not part of `state_dict`."""
        return self.algorithm.replay

    def target_snapshot(self) -> tuple[int, torch.Tensor] | None:
        """Return (number of updates, copy of the parameters) of the target network, or None for an agent without a target network."""
        target = self.algorithm.target
        if target is None:
            return None
        target.pull_if_outdated()
        return target.updates_done, target.flat.copy_vectors()[0]

    def weights(self) -> dict[str, torch.Tensor]:
        """Return CPU copies of the parameters and buffers that the policy's net last used for acting or learning."""
        return self.policy.weights()

    @property
    def has_own_critics(self) -> bool:
        """Whether the critics have a net separate from the policy's net, as in soft actor-critic."""
        return self.algorithm.policy_trainer is not self.algorithm.trainer

    def copy_matching_weights(self, weights: dict[str, torch.Tensor]) -> list[str]:
        """Copy to the policy's net those entries of `weights` whose names and shapes match parameters or buffers of the net.

        Returns the names of the net's parameters and buffers that were not replaced. The weights of an agent include neither critics with a
        separate net, nor optimizers, nor the temperature.
        """
        current = self.weights()
        matching = {name: weights[name] for name, value in current.items() if name in weights and weights[name].shape == value.shape}
        if matching:
            self.load_weights({**current, **matching})
            if (trainer := self.algorithm.policy_trainer) is not None:
                trainer.refresh_stored_parameters()
            self.algorithm.copy_to_target()
        return [name for name in current if name not in matching]

    @property
    def value_statistics(self) -> list[float] | None:
        """Statistics that convert the critic's outputs to values (see ValueNormalizer), or None if the outputs are values."""
        statistics = self.algorithm.value_statistics
        return None if statistics is None else statistics.numbers.tolist()

    def load_value_statistics(self, numbers: list[float] | None) -> bool:
        """Load the value statistics of another agent (see `value_statistics`).

        Returns False, without loading, if only one of the two agents has such statistics, so that their critics' outputs have different
        scales.
        """
        statistics = self.algorithm.value_statistics
        if statistics is None or numbers is None:
            return statistics is None and numbers is None
        statistics.numbers[:] = numbers
        return True

    def load_weights(self, weights: dict[str, torch.Tensor]) -> None:
        """Load weights of the policy's net. Raises RuntimeError if the weights do not match the net."""
        self.policy.load_weights(weights)

    def shared_arrays(self) -> Named:
        return self.algorithm.shared_arrays()

    def attach(self, store: Store, arrays: Arrays) -> None:
        self.algorithm.attach(store, arrays)
        trainer = self.algorithm.policy_trainer
        self._shared = None if trainer is None else trainer.shared

    def state_dict(self) -> dict[str, Any]:
        """Return the learned state and the state of all random streams, except the state that other processes also train.

        The replay buffer (see `replay`) and the unfinished rollout (see `rollout_state`) are not included. An unfinished rollout is useful
        only if the envs continue its unfinished episodes.
        """
        return {"algorithm": self.algorithm.state_dict(), "rng": generator_state(self.policy.rng), "version": self.policy.version}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.algorithm.load_state_dict(state["algorithm"])
        set_generator_state(self.policy.rng, state["rng"])
        self.policy.version = state["version"]

    def pull(self) -> None:
        """Update this process's copies of the parameters after the shared arrays were restored."""
        self.algorithm.pull()

    def rollout_state(self) -> dict[str, Any]:
        """Return the steps collected since the last update, which are useful only if the envs continue their current episodes."""
        return {name: storage.state_dict() for name, storage in self.algorithm.rollout_storages().items()}

    def load_rollout_state(self, state: dict[str, Any]) -> None:
        for name, storage in self.algorithm.rollout_storages().items():
            storage.load_state_dict(state[name])


def torch_threads(number: int) -> AbstractContextManager[None]:
    """Return a context manager within which torch computes with `number` threads instead of one thread."""
    return nullcontext() if number == 1 else _set_torch_threads(number)


@contextmanager
def _set_torch_threads(number: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(number)
    try:
        yield
    finally:
        torch.set_num_threads(before)
