"""An agent: a policy that acts and an algorithm that learns it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from slm_lab.agent.algorithm.base import Algorithm
from slm_lab.agent.replay.replay import Replay
from slm_lab.agent.rollout.rollout import Rollout
from slm_lab.agent.replay.sil import SILReplay
from slm_lab.agent.policy.policy import Policy
from slm_lab.lib.clock import Clock
from slm_lab.lib.records import ActOut, Metrics, VecStep
from slm_lab.lib.rng import generator_state, set_generator_state
from slm_lab.spec.schedule import Schedule


class Agent:
    """Carries the hidden state between steps, and hands everything else to its algorithm.

    Args: num_envs: N. explore: the schedule of explore_var, None where nothing explores by it. eval_seed: of evaluations.
    """

    def __init__(self, algorithm: Algorithm, clock: Clock, num_envs: int, explore: Schedule | None, eval_seed: int) -> None:
        self.algorithm, self.clock = algorithm, clock
        self.policy: Policy = algorithm.policy
        self._acting = algorithm.acting
        self._explore, self._eval_seed = explore, eval_seed
        self._state_N = self.policy.initial_state(num_envs)
        self._first_N = np.ones(num_envs, np.bool_)

    def act(self, obs_N: np.ndarray) -> ActOut:
        """Choose actions for obs_N [N, *shape]."""
        self._refresh()
        if self._explore is not None:
            self.policy.explore_var = self._explore.value(self.clock.global_frame)
        return self.policy.act(obs_N, self._state_N)

    def observe(self, obs_N: np.ndarray, out: ActOut, step: VecStep) -> None:
        """Remember what came of `out`, chosen for obs_N."""
        self.algorithm.observe(obs_N, self._first_N, self._state_N, out, step)
        self._first_N = step.first_N
        if out.state_N is not None:
            self._state_N = np.where(step.first_N[:, None], np.float32(0.0), out.state_N)

    def ready(self) -> bool:
        """True when `update` has something to learn from."""
        return self.algorithm.ready()

    def update(self) -> Metrics:
        """Learn."""
        metrics = self.algorithm.update()
        self.policy.version += 1
        return metrics

    def learn(self, rollout: Rollout) -> Metrics:
        """Learn from a rollout that was gathered elsewhere; the versions in it are counts of gradient steps."""
        metrics = self.algorithm.learn(rollout)
        self.policy.version = self.clock.opt_step
        return metrics

    def evaluator(self) -> Callable[[np.ndarray, np.ndarray], np.ndarray]:
        """(obs_N, first_N) → action_N: the policy as it stands, with a hidden state and random stream of its own."""
        self._refresh()
        policy = self.policy.clone(np.random.default_rng(self._eval_seed))
        policy.explore_var = self.explore_var or 0.0
        state_N: np.ndarray | None = None

        def act(obs_N: np.ndarray, first_N: np.ndarray) -> np.ndarray:
            nonlocal state_N
            if policy.state_size:
                before_N = policy.initial_state(len(obs_N)) if state_N is None else np.where(first_N[:, None], np.float32(0.0), state_N)
                out = policy.act(obs_N, before_N)
                state_N = out.state_N
            else:
                out = policy.act(obs_N)
            return out.action_N

        return act

    def _refresh(self) -> None:
        if self._acting is not None:
            self._acting.refresh()

    @property
    def lr(self) -> float | None:
        """Learning rate now; None for what does not learn."""
        return self.algorithm.lr

    @property
    def explore_var(self) -> float | None:
        """ε or τ now; None where nothing explores by it."""
        return None if self._explore is None else self._explore.value(self.clock.global_frame)

    @property
    def entropy_coef(self) -> float | None:
        """Weight of the entropy bonus now."""
        return self.algorithm.entropy_coef

    @property
    def replay(self) -> Replay | SILReplay | None:
        """The memory of old transitions, whose `contents` are no part of the state; None for on-policy algorithms."""
        return self.algorithm.replay_buffer()

    def target(self) -> tuple[int, torch.Tensor] | None:
        """How often the target net was due to follow, and a copy of its parameters; None for an agent without one."""
        target = self.algorithm.target
        return None if target is None else (target.followed, target.flat.clone()[0])

    def weights(self) -> dict[str, torch.Tensor]:
        """Copies of the net's parameters and buffers on the CPU, as it last acted or learned; empty for an agent without a net."""
        net = self.policy.net
        return {} if net is None else {name: value.detach().to("cpu", copy=True) for name, value in net.state_dict().items()}

    def load_weights(self, weights: dict[str, torch.Tensor]) -> None:
        """Copy weights in. Raises RuntimeError where they are another net's."""
        if self.policy.net is not None:
            self.policy.net.load_state_dict(weights)

    def state_dict(self) -> dict[str, Any]:
        """Everything learned and every random stream.

        Not the rollout under way, for a resumed run begins new episodes, and not the replay: see `replay`.
        """
        return {"algorithm": self.algorithm.state_dict(), "rng": generator_state(self.policy.rng), "version": self.policy.version}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over what `state_dict` gave."""
        self.algorithm.load_state_dict(state["algorithm"])
        set_generator_state(self.policy.rng, state["rng"])
        self.policy.version = state["version"]
