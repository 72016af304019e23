"""From rollouts of groups of envs to datasets of one policy."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np

from slm_lab.agent.memory.on_policy import OnPolicyBatchReplay, Truncation
from slm_lab.agent.memory.rollout import Rollout
from slm_lab.experiment.sampler.shared import Slot
from slm_lab.lib.records import EnvInfo, Episode


class Ended(NamedTuple):
    """An episode that ended in a rollout."""

    t: int
    n: int
    policy: int
    episode: Episode


@dataclass
class Gathered:
    """A rollout of a group of envs, beside what lies in its slot."""

    truncations: list[Truncation]
    ended: list[Ended]


@dataclass
class Dataset:
    """Rollouts of single envs side by side, each a column, that a policy trains on at once."""

    memory: OnPolicyBatchReplay
    mine_TN: np.ndarray
    """Transitions of the policy, dummy rows included: the frames that it has played."""
    columns: int = 0
    """Filled so far."""
    ended: list[tuple[int, Episode]] = field(default_factory=list)
    """Episodes of the policy, by the row in which they ended."""

    def rollout(self) -> Rollout:
        """As views, the empty columns left out."""
        rollout, C = self.memory.rollout(), self.columns
        if rollout.reward_TN.shape[1] == C:
            return rollout
        arrays = {name: getattr(rollout, name)[:, :C] for name in vars(rollout) if name.endswith("_TN")}
        return replace(rollout, **arrays, state_NS=rollout.state_NS[:C])


class Batcher:
    """Fills datasets of one policy; copies, so that slots are free at once.

    Args: policy: whose. info: the env. columns: of a dataset. rows: of a rollout. state_size: S. spare: datasets beside the one under way.
    alone: there is no other policy.
    """

    def __init__(self, policy: int, info: EnvInfo, columns: int, rows: int, state_size: int, spare: int, alone: bool) -> None:
        self.policy, self.capacity, self.alone = policy, columns, alone
        wide = replace(info, num_envs=columns)
        self.free = deque(_empty(wide, rows, state_size) for _ in range(spare + 1))
        self.current: Dataset | None = None

    @property
    def room(self) -> int:
        """Columns that can be taken."""
        return self.capacity * len(self.free) + (0 if self.current is None else self.capacity - self.current.columns)

    def add(self, slot: Slot, gathered: Gathered, begin: int = 0) -> tuple[list[Dataset], int]:
        """Take the columns of this policy from `begin` on.

        Returns datasets that are full, and the first column for which there was no room: the number of columns where all are taken.
        """
        policy_TN = slot.policy_TN
        columns = np.arange(begin, policy_TN.shape[1])
        if not self.alone:
            columns = columns[(policy_TN[:, begin:] == self.policy).any(axis=0)]
        full: list[Dataset] = []
        while len(columns):
            if self.current is None:
                if not self.free:
                    return full, int(columns[0])
                self.current = self.free.popleft()
            taken, columns = np.split(columns, [self.capacity - self.current.columns])
            self._copy(self.current, slot, gathered, taken)
            if self.current.columns == self.capacity:
                full.append(self.current)
                self.current = None
        return full, policy_TN.shape[1]

    def close(self) -> Dataset | None:
        """The dataset under way, full or not; None where it is empty."""
        dataset, self.current = self.current, None
        return dataset

    def release(self, dataset: Dataset) -> None:
        """A dataset was trained on."""
        dataset.columns = 0
        dataset.ended.clear()
        dataset.memory.truncations.clear()
        self.free.append(dataset)

    def _copy(self, dataset: Dataset, slot: Slot, gathered: Gathered, columns: np.ndarray) -> None:
        begin, end = dataset.columns, dataset.columns + len(columns)
        whole = len(columns) == slot.policy_TN.shape[1]
        source = slice(None) if whole else columns
        for name, slab in slot.memory.slabs.items():
            dataset.memory.slabs[name][:, begin:end] = slab[:, source]
        dataset.memory.state_NS[begin:end] = slot.memory.state_NS[source]
        mine_TN = slot.policy_TN[:, source] == self.policy
        dataset.mine_TN[:, begin:end] = mine_TN
        if not self.alone:
            dataset.memory.slabs["valid"][:, begin:end] &= mine_TN
        place = {int(n): begin + index for index, n in enumerate(columns)}
        dataset.memory.truncations += [(t, place[n], obs, state) for t, n, obs, state in gathered.truncations if n in place]
        dataset.ended += [(one.t, one.episode) for one in gathered.ended if one.n in place and one.policy == self.policy]
        dataset.columns = end


def _empty(info: EnvInfo, rows: int, state_size: int) -> Dataset:
    return Dataset(OnPolicyBatchReplay(info, rows, state_size), np.zeros((rows, info.num_envs), np.bool_))
