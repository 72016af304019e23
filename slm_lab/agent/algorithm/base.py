"""Base class of all algorithms, and `Random`, a baseline that chooses actions uniformly at random."""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

import numpy as np
import torch

from slm_lab.agent.algorithm.sil_replay import SILReplay
from slm_lab.agent.algorithm.target import TargetNet
from slm_lab.agent.algorithm.value_scale import ValueNormalizer
from slm_lab.agent.net.passes.validity import add_gradient
from slm_lab.agent.ops import device as devices
from slm_lab.agent.ops.distributions import ActionDistribution
from slm_lab.agent.optim.flat import FlatParams
from slm_lab.agent.optim.trainer import Trainer
from slm_lab.agent.policy.policy import Policy, actor_critic_gradients, build_policy, optimizer_group_names
from slm_lab.agent.replay.demonstration_replay import build_demonstration_replay
from slm_lab.agent.replay.replay import Replay
from slm_lab.agent.replay.sequences import SEQUENCE_REPLAYS
from slm_lab.agent.rollout.rollout import Rollout, RolloutStorage, build_rollout_storage, storage_bytes
from slm_lab.lib.clock import Clock
from slm_lab.lib.demonstrations import Demonstrations
from slm_lab.lib.limits import memory_bytes
from slm_lab.lib.records import ActOut, EnvInfo, Metrics, VecStep
from slm_lab.lib.rng import Seeds, generator_state, set_generator_state
from slm_lab.lib.store import Arrays, Named, Shareable, Store, attach_parts, prefixed_arrays
from slm_lab.spec.models.base import Schedule
from slm_lab.spec.models.memory import OnPolicyBatchReplaySpec, ReplaySpec
from slm_lab.spec.models.net import RecurrentNetSpec
from slm_lab.spec.models.spec import AgentSpec
from slm_lab.spec.report import Problem, SpecError


def build_agent_memory(
    agent: AgentSpec, info: EnvInfo, clock: Clock, seeds: Seeds, state_size: int, device: str = "cpu"
) -> RolloutStorage | Replay | None:
    """Build the memory that the agent's spec names: a rollout storage or a replay buffer.

    Returns None for an algorithm that does not learn, and for an offline algorithm, whose memory `use_demonstrations` builds.

    Args: state_size: size of the policy's hidden state. device: device of the net.

    Raises SpecError if the memory does not fit into the RAM of this machine, or into the memory of the CUDA device.
    """
    algorithm: Any = agent.algorithm
    memory: Any = agent.memory
    if not algorithm.learns or algorithm.offline:
        return None
    if algorithm.on_policy:
        if isinstance(memory, OnPolicyBatchReplaySpec):
            check_rollout_memory(agent, info, device)
        return build_rollout_storage(memory, info, agent.rollout_len, state_size)
    options: dict[str, Any] = {"device": device} if getattr(memory, "on_device", False) else {}
    if (num_steps := getattr(algorithm, "num_step_returns", 1)) > 1:
        options["num_steps"] = num_steps
    if isinstance(agent.net, RecurrentNetSpec):
        options |= {"state_size": state_size, "seq_len": agent.net.seq_len}
        kind: Any = SEQUENCE_REPLAYS[type(memory)]
    else:
        kind = type(memory).implementation()
    rng = np.random.default_rng(seeds.update)
    replay: Replay = kind(memory, info, clock, rng, algorithm.training_frequency, agent.training_start, **options)
    return replay


def check_rollout_memory(agent: AgentSpec, info: EnvInfo, device: str) -> None:
    """Raise SpecError if a rollout and its shuffled copy do not fit into host memory, or into the memory of the net's CUDA device."""
    needed, available = 2 * storage_bytes(info, agent.rollout_len), memory_bytes()
    where = "machine"
    if device != "cpu" and (on_device := devices.memory_bytes(device)) < available:
        available, where = on_device, f"device ({device})"
    if needed > available:
        lengths = [key for key in ("time_horizon", "num_step_returns", "training_frequency") if getattr(agent.algorithm, key, None)]
        path = f"agent.algorithm.{lengths[0]}" if lengths else "env.num_envs"
        sizes = f"need {needed / 2**30:,.1f} GiB; this {where} has {available / 2**30:,.1f}"
        message = f"rollouts of {agent.rollout_len} steps of {info.num_envs} envs {sizes}; shorten them, or use fewer envs"
        raise SpecError("agent", [Problem(path, message)])


RLPD_FRACTION = 0.5
"""Fraction of each batch that is drawn from demonstrations, if the spec does not set memory.demonstration_fraction (arXiv:2302.02948,
section 4.1)."""


def add_log_std_gradient(distribution: ActionDistribution, grad_D: np.ndarray | None) -> None:
    """Add grad_D [D], the gradient of a state-independent log standard deviation, to `Parameter.grad`.

    Args: grad_D: the gradient, or None if the distribution has no state-independent log standard deviation.
    """
    if grad_D is not None:
        assert distribution.gaussian_part is not None
        assert distribution.gaussian_part.log_std is not None
        add_gradient(distribution.gaussian_part.log_std, torch.from_numpy(grad_D))


class TunedHyperparameters(NamedTuple):
    """Changes that population-based training makes to the hyperparameters of the spec."""

    lr: float = 1.0
    """Factor by which the spec's learning rate is multiplied."""
    entropy_coef: float = 1.0
    """Factor by which the spec's entropy coefficient is multiplied."""
    gamma: float | None = None
    """Discount factor that replaces the discount factor of the spec, or None to keep the discount factor of the spec."""


class TrainablePart(Shareable, Protocol):
    """Interface of those parts of an algorithm that have learned state, such as trainers and target networks.

    Several processes can train a trainable part together. Checkpoints contain the state of each trainable part.
    """

    def state_dict(self) -> dict[str, Any]:
        """Return the learned state."""

    def load_state_dict(self, state: dict[str, Any], /) -> None:
        """Load a state that `state_dict` returned."""


class Algorithm:
    """Base class of algorithms, which store the steps of envs in a memory and learn from this memory.

    The class Algorithm builds the memory and the trainer. Subclasses build further parts, such as target networks, in the method `build`.
    The method `parts` returns all parts of the algorithm that have learned state.
    """

    diagnostics: tuple[str, ...] = ()
    """Names of the diagnostics that updates report in Metrics.extra, in the order of their table columns. A diagnostic is absent from
    Metrics.extra until its value is known."""

    memory: RolloutStorage | Replay | None = None
    """Storage of the experience that the algorithm learns from, or None for an algorithm that does not learn."""
    replay: Replay | SILReplay | None = None
    """Replay buffer, or None for an on-policy algorithm without self-imitation."""
    trainer: Trainer | None = None
    """Trainer, which takes gradient steps on the parameters of a net. If the critics have their own net, this is the trainer of the
    critics."""
    target: TargetNet[Any] | None = None
    """Target network, or None for an algorithm without a target network."""
    value_statistics: ValueNormalizer | None = None
    """Statistics that convert the critic's outputs to values, or None if the outputs are values."""
    entropy_schedule: Schedule | None = None
    """Schedule of the entropy bonus's weight over frames, or None for an algorithm without such a schedule."""
    rng: np.random.Generator | None = None
    """Random stream of the updates, separate from the memory's random stream."""

    def __init__(self, agent: AgentSpec, info: EnvInfo, clock: Clock, seeds: Seeds, policy: Policy, device: str = "cpu") -> None:
        self.spec: Any = agent.algorithm
        """Section `algorithm` of the agent's spec."""
        self.info, self.clock, self.seeds, self.policy, self.device = info, clock, seeds, policy, device
        self.agent_spec: Any = agent
        self.net: Any = policy.net
        self.distribution: Any = policy.distribution
        self.tuning = TunedHyperparameters()
        self._untuned = self.spec
        if policy.flat is not None and agent.net is not None:
            self.trainer = Trainer(policy.flat, agent.net, optimizer_group_names(agent), actor_critic_gradients(policy.net, policy.flat))
        self.memory = build_agent_memory(agent, info, clock, seeds, policy.state_size, device)
        self.replay = self.memory if isinstance(self.memory, Replay) else None
        self.seq_len = agent.net.seq_len if isinstance(agent.net, RecurrentNetSpec) else 1
        """Length of the sequences that a recurrent net learns from, or 1 for other nets."""
        self.build()

    def build(self) -> None:
        """Build the parts of the algorithm other than its memory and its trainer."""

    def use_demonstrations(self, data: Demonstrations) -> None:
        """Draw a fraction of each batch from recorded episodes (meta.demonstrations). Call this method before training."""
        memory, spec = self.memory, self.agent_spec.memory
        if not isinstance(memory, Replay) or not isinstance(spec, ReplaySpec):
            raise RuntimeError(f"{type(self).__name__} does not learn from demonstrations")
        share = RLPD_FRACTION if spec.demonstration_fraction is None else spec.demonstration_fraction
        drawn = min(max(round(share * spec.batch_size), 1), spec.batch_size - 1)
        memory.use_demonstrations(build_demonstration_replay(data, self.info, drawn, self.clock, memory.rng, memory.device))

    def observe(self, obs_N: np.ndarray, first_N: np.ndarray, state_N: np.ndarray | None, out: ActOut, step: VecStep) -> None:
        """Store one vector step in the memory.

        Args: obs_N: observations of the step, before normalisation if the memory normalises its batches. first_N: bool [N], whether each
        observation is the first of its episode. state_N: hidden state [N, S] before obs_N.
        """
        if self.memory is not None:
            self.memory.add(obs_N, first_N, state_N, out, step)

    def ready(self) -> bool:
        """Return whether the memory contains enough steps for `update`."""
        return self.memory is not None and self.memory.ready

    def update(self) -> Metrics:
        """Update the parameters with the steps in the memory, and return the metrics of this update."""
        if not isinstance(self.memory, RolloutStorage):
            raise RuntimeError(f"{type(self).__name__} does not learn from rollouts")
        return self.learn(self.memory.rollout())

    def fresh_params(self) -> dict[str, FlatParams]:
        """Return the initial parameters of newly built nets, keyed by the names of their trainers in `parts`.

        The weights are drawn from torch's global random generator.
        """
        policy = build_policy(self.agent_spec, self.info, np.random.default_rng(0), self.device)
        assert policy.flat is not None
        return {name: policy.flat for name, part in self.parts().items() if part is self.policy_trainer}

    def reset(self) -> None:
        """Replace all weights with newly drawn initial weights, restart the optimizers, and keep the replay buffer (arXiv:2205.07802)."""
        parts: dict[str, Any] = dict(self.parts())
        for name, params in self.fresh_params().items():
            parts[name].reset(params)
        self.copy_to_target()

    def reset_nets_if_due(self, steps_before: int) -> None:
        """Call `reset` if, in the last update, the number of gradient steps reached or passed a multiple of the spec key reset_frequency.

        Args: steps_before: number of gradient steps before the last update.
        """
        every = getattr(self.spec, "reset_frequency", None)
        if every is not None and self.clock.opt_step // every > steps_before // every:
            self.reset()

    def end_step(self) -> None:
        """Finish a vector step, for example by updating the target network.

        This method is called after `observe`, and after the updates of the vector step.
        """

    def learn(self, rollout: Rollout) -> Metrics:
        """Update the parameters with a rollout that this process or another process collected, and return the metrics of this update."""
        raise RuntimeError(f"{type(self).__name__} does not learn from rollouts")

    @property
    def policy_trainer(self) -> Trainer | None:
        """Trainer of the net with which the policy chooses actions, or None for an algorithm that does not learn."""
        return self.trainer

    @property
    def lr(self) -> float | None:
        """Learning rate of the last update, or None for an algorithm that does not learn."""
        return None if self.trainer is None else self.trainer.lr

    @property
    def entropy_coef(self) -> float | None:
        """Current weight of the entropy bonus, or None for an algorithm without an entropy bonus."""
        return None if self.entropy_schedule is None else self.entropy_schedule.value(self.clock.global_frame)

    @property
    def skipped_steps(self) -> int:
        """Number of gradient steps that were skipped because the loss or the gradient was not finite."""
        return sum(part.skipped for part in self.parts().values() if isinstance(part, Trainer))

    def apply_tuned_hyperparameters(self, tuning: TunedHyperparameters) -> None:
        """Continue training with the changes that population-based training makes to the hyperparameters."""
        self.tuning = tuning
        if self.trainer is not None:
            self.trainer.lr_factor = tuning.lr
            self.trainer.begin_update(self.clock.global_frame)
            self.trainer.end_update()
        if self.entropy_schedule is not None:
            schedule = self.spec.entropy_coef_spec
            ends = {end: value * tuning.entropy_coef for end in ("start_val", "end_val") if (value := getattr(schedule, end)) is not None}
            self.entropy_schedule = schedule.model_copy(update=ends)
        self.spec = self._untuned if tuning.gamma is None else self._untuned.model_copy(update={"gamma": tuning.gamma})

    def parts(self) -> dict[str, TrainablePart]:
        """Return the parts of the algorithm that have learned state, keyed by their names in shared arrays and checkpoints."""
        parts = {"trainer": self.trainer, "target": self.target}
        return {name: part for name, part in parts.items() if part is not None}

    def shared_arrays(self) -> Named:
        return prefixed_arrays(self.parts())

    def attach(self, store: Store, arrays: Arrays) -> None:
        attach_parts(self.parts(), store, arrays)

    def rollout_storages(self) -> dict[str, RolloutStorage]:
        """Return the storages that can contain an unfinished rollout, by name."""
        return {"rollout": self.memory} if isinstance(self.memory, RolloutStorage) else {}

    def state_dict(self) -> dict[str, Any]:
        """Return the state of all trainable parts and random streams, without stored transitions and without state that processes share."""
        state: dict[str, Any] = {"tuning": tuple(self.tuning), **{name: part.state_dict() for name, part in self.parts().items()}}
        state |= {"memory": self.memory.state_dict()} if isinstance(self.memory, Replay) else {}
        return state | ({} if self.rng is None else {"rng": generator_state(self.rng)})

    def copy_to_target(self) -> None:
        """Copy the current parameters to the target networks, if the algorithm has target networks."""
        if self.target is not None:
            self.target.copy_source()

    def pull(self) -> None:
        for part in self.parts().values():
            if isinstance(part, Trainer | TargetNet):
                part.pull()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if (tuning := TunedHyperparameters(*state["tuning"])) != self.tuning:
            self.apply_tuned_hyperparameters(tuning)
        for name, part in self.parts().items():
            part.load_state_dict(state[name])
        if isinstance(self.memory, Replay):
            self.memory.load_state_dict(state["memory"])
        if self.rng is not None:
            set_generator_state(self.rng, state["rng"])


class Random(Algorithm):
    """Baseline that chooses actions uniformly at random and does not learn."""
