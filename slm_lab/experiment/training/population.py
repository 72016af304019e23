"""Population-based training (arXiv:1711.09846) of the policies of one Session (arXiv:2006.11751, appendix)."""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy
from typing import Any

import numpy as np

from slm_lab.agent.agent import Agent
from slm_lab.agent.algorithm.base import TunedHyperparameters
from slm_lab.experiment.files.sink import RunSink
from slm_lab.experiment.training.learner import PolicyLearner
from slm_lab.lib.log import notice
from slm_lab.lib.rng import generator_state, set_generator_state
from slm_lab.spec.models.meta import PBTSpec

COLUMNS = ("frame", "policy", "total_reward", "lr", "entropy_coef", "gamma", "source")
GAMMA_MAX = 0.99999


class PopulationBasedTraining:
    """Population-based training, which replaces poor policies and mutates hyperparameters at regular intervals (rounds).

    The first round of a policy takes place after spec.start frames of this policy, and a further round after every spec.period frames. In a
    round, a policy that is among the worst policies may copy the weights and hyperparameters of one of the best policies. At the end of a
    round, the hyperparameters of the policy are mutated, unless the policy is among the best policies. Policy 0 is never changed, so that
    it can serve for comparison.

    Args:
        spec: meta.sampler.pbt.
        learners: the learner of each policy.
        seed: seed of the random choices.
        session: index of the Session, for the table of rounds.
    """

    def __init__(
        self,
        spec: PBTSpec,
        learners: Sequence[PolicyLearner],
        seed: int,
        session: int = 0,
    ) -> None:
        self.spec, self.learners, self.session = spec, list(learners), session
        self.rng = np.random.default_rng([seed, 2])
        self.rounds = [0] * len(learners)
        self.sink: RunSink | None = None
        """Sink to which the table of rounds is written, or None to write no table."""
        self._loaded = False

    def begin(self, sink: RunSink | None) -> None:
        """Set the sink of the table of rounds. If no state was loaded, write the initial hyperparameters of each policy to this table.

        Args: sink: sink to which the table of rounds is written, or None to write no table.
        """
        self.sink = sink
        if not self._loaded:
            for policy in range(len(self.learners)):
                self._record(policy, None)

    def is_round_due(self, policy: int) -> bool:
        """Return whether the next round of the policy with index `policy` is due."""
        frames = self.learners[policy].clock.frame - self.spec.start
        return frames >= 0 and frames // self.spec.period >= self.rounds[policy]

    def step(self, policy: int) -> None:
        """Perform a round of the policy with index `policy`."""
        learner = self.learners[policy]
        self.rounds[policy] = (learner.clock.frame - self.spec.start) // self.spec.period + 1
        worst, best = self._worst_and_best()
        source = None
        if policy > 0 and policy not in best:
            source = self._policy_to_copy(policy, best) if policy in worst else None
            if source is not None:
                replace_policy(learner.agent, self.learners[source].agent)
            algorithm = learner.agent.algorithm
            algorithm.apply_tuned_hyperparameters(self._mutate_hyperparameters(algorithm.tuning, algorithm.spec.gamma))
        self._record(policy, source)
        if source is not None:
            learner.recorder.forget_episodes()  # they were played by the replaced policy

    def _worst_and_best(self) -> tuple[list[int], list[int]]:
        """Return (indices of the worst policies, indices of the best policies) by mean return.

        Each list contains at most the fraction spec.replace_fraction of the population. A policy without a mean return is in neither list.
        The best of the other policies is never among the worst, and no policy is in both lists.
        """
        mean_return = {p: value for p, learner in enumerate(self.learners) if (value := learner.total_reward) is not None}
        count = self.spec.replaced_policies(len(self.learners))
        ranked = sorted(mean_return, key=lambda p: mean_return[p])
        worst = ranked[:-1][:count]
        return worst, [p for p in ranked[max(len(ranked) - count, 0) :] if p not in worst]

    def _policy_to_copy(self, policy: int, best: Sequence[int]) -> int | None:
        """Draw one of the best policies at random, and return its index if its mean return sufficiently exceeds that of `policy`.

        The difference of the two mean returns must exceed both spec.reward_gap_absolute and spec.reward_gap · |mean return of `policy`|.
        Otherwise, None is returned.
        """
        if not best:
            return None
        source = int(self.rng.choice(best))
        policy_return, source_return = self.learners[policy].total_reward, self.learners[source].total_reward
        assert policy_return is not None
        assert source_return is not None
        gap = source_return - policy_return
        return source if gap > self.spec.reward_gap_absolute and gap > self.spec.reward_gap * abs(policy_return) else None

    def _mutate_hyperparameters(self, tuning: TunedHyperparameters, gamma: float) -> TunedHyperparameters:
        lr, entropy_coef = (value * self._mutation_factor() for value in (tuning.lr, tuning.entropy_coef))
        if not self.spec.optimize_gamma:
            return TunedHyperparameters(lr, entropy_coef, tuning.gamma)
        # mutate 1 − γ, the inverse of the horizon
        return TunedHyperparameters(lr, entropy_coef, min(max(0.0, 1.0 - (1.0 - gamma) * self._mutation_factor()), GAMMA_MAX))

    def _mutation_factor(self) -> float:
        """Return a factor by which a hyperparameter is multiplied: a random factor with probability spec.mutation_rate, else 1."""
        if self.rng.random() >= self.spec.mutation_rate:
            return 1.0
        factor = float(self.rng.uniform(self.spec.perturb_min, self.spec.perturb_max))
        return factor if self.rng.random() < 0.5 else 1.0 / factor

    def _record(self, policy: int, source: int | None) -> None:
        if self.sink is None:
            return
        learner = self.learners[policy]
        agent = learner.agent
        values = (learner.clock.frame, policy, learner.total_reward, agent.lr, agent.entropy_coef, agent.algorithm.spec.gamma, source)
        try:
            self.sink.append_extra_row(self.session, "pbt", COLUMNS, dict(zip(COLUMNS, values, strict=True)))
        except OSError as error:
            notice(f"the table of population-based training cannot be written: {error.strerror or error}")
            self.sink = None

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the random stream and of the rounds. The hyperparameters are not included, because they are part of the state
        of each agent."""
        return {"rng": generator_state(self.rng), "rounds": list(self.rounds)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load a state returned by `state_dict`."""
        set_generator_state(self.rng, state["rng"])
        self.rounds, self._loaded = list(state["rounds"]), True


def replace_policy(agent: Agent, source: Agent) -> None:
    """Copy weights, optimizer state, reward scales and hyperparameters from `source` to `agent`.

    The random streams of `agent` are not changed.
    """
    before, copied = agent.algorithm.state_dict(), deepcopy(source.algorithm.state_dict())  # torch's optimizers return references
    agent.algorithm.load_state_dict({key: before[key] if key == "rng" else value for key, value in copied.items()})
