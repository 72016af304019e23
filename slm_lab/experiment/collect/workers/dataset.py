"""Build the training datasets of one policy from the rollouts of rollout workers."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np

from slm_lab.agent.rollout.rollout import OnPolicyBatchReplay, Rollout, Truncation, build_batch_storage
from slm_lab.experiment.collect.workers.shared import RolloutSlot
from slm_lab.lib.records import EnvInfo, Episode


class EndedEpisode(NamedTuple):
    """An episode of the policy with index `policy`. The episode ended in step t of a rollout, in row n of the vector env."""

    t: int
    n: int
    policy: int
    episode: Episode


@dataclass
class GroupRolloutReport:
    """Report of a worker on the rollout of one env group (vector env of the worker). The transitions of the rollout are in a slot and not
    in the report."""

    truncations: list[Truncation]
    ended: list[EndedEpisode]


@dataclass
class Dataset:
    """A batch of rollouts on which one policy trains. Each column of a Dataset contains the rollout of one env or, with several agents, of
    one agent."""

    storage: OnPolicyBatchReplay
    frame_TN: np.ndarray
    """Whether each step of each column counts as a frame of the policy, bool [T, N]. A step counts as a frame if the policy played the
    step, even if the step is not a valid transition. If the policy played several agents of an env in the same step, only the step of the
    first of these agents counts as a frame."""
    columns: int = 0
    """Number of columns that have been filled."""
    ended: list[tuple[int, Episode]] = field(default_factory=list)
    """(step, episode) for each episode of the policy that ended during the rollouts."""

    def rollout(self) -> Rollout:
        """Return a Rollout that contains only the filled columns, as views."""
        rollout, C = self.storage.rollout(), self.columns
        if rollout.reward_TN.shape[1] == C:
            return rollout
        arrays = {name: getattr(rollout, name)[:, :C] for name in vars(rollout) if name.endswith("_TN")}
        return replace(rollout, **arrays, state_NS=rollout.state_NS[:C])


class DatasetBuilder:
    """Builder of the datasets of one policy from the rollouts in slots.

    The builder copies each rollout from its slot, so that workers can overwrite the slot before the policy trains.

    Args:
        policy: index of the policy.
        info: info of the env.
        columns: number of columns of a dataset.
        steps: number of steps of a rollout.
        state_size: S, size of the hidden state.
        num_spare: number of allocated datasets in addition to the dataset that is being filled.
        single_policy: whether the Session has only this policy.
    """

    def __init__(self, policy: int, info: EnvInfo, columns: int, steps: int, state_size: int, num_spare: int, single_policy: bool) -> None:
        self.policy, self.capacity, self.single_policy, self.num_agents = policy, columns, single_policy, len(info.agents)
        column_info = replace(info, num_envs=columns)
        self.free = deque(
            Dataset(build_batch_storage(column_info, steps, state_size), np.zeros((steps, columns), np.bool_)) for _ in range(num_spare + 1)
        )
        self.current: Dataset | None = None

    @property
    def free_columns(self) -> int:
        """Number of columns that still fit into the current dataset and the free datasets."""
        return self.capacity * len(self.free) + (0 if self.current is None else self.capacity - self.current.columns)

    def add(self, slot: RolloutSlot, rollout: GroupRolloutReport, begin: int = 0) -> tuple[list[Dataset], int]:
        """Copy a rollout to datasets, starting at column `begin`. Only the columns (env rows) that this policy has played are copied.

        Returns (datasets that have become full, index of the first column that did not fit). If all columns fit, the returned index is the
        number of columns.
        """
        own_TN = slot.played_TN == self.policy
        num_columns = own_TN.shape[1]
        columns = np.arange(begin, num_columns)
        if not self.single_policy:
            columns = columns[own_TN[:, begin:].any(axis=0)]
        frame_TN = self._frame_mask(own_TN)
        full: list[Dataset] = []
        while len(columns):
            if self.current is None:
                if not self.free:
                    return full, int(columns[0])
                self.current = self.free.popleft()
            added, columns = np.split(columns, [self.capacity - self.current.columns])
            self._copy_columns(self.current, slot, rollout, frame_TN, added)
            if self.current.columns == self.capacity:
                full.append(self.current)
                self.current = None
        return full, num_columns

    def _frame_mask(self, own_TN: np.ndarray) -> np.ndarray:
        """Return whether each step t of each env row n counts as a frame of the policy, bool [T, N].

        If the policy plays several rows of an env in a step, only the first of these rows counts as a frame.

        Args: own_TN: whether this policy played row n in step t, bool [T, N].
        """
        if self.num_agents < 2:
            return own_TN
        own_TEA = own_TN.reshape(len(own_TN), -1, self.num_agents)
        frame_TN: np.ndarray = (own_TEA & (own_TEA.cumsum(axis=2) == 1)).reshape(own_TN.shape)
        return frame_TN

    def take_dataset(self) -> Dataset | None:
        """Return the current dataset even if it is not full, or None if no dataset has been begun.

        The next rollout begins a new dataset.
        """
        dataset, self.current = self.current, None
        return dataset

    def release(self, dataset: Dataset) -> None:
        """Empty a dataset on which the policy has trained, and add it to the free datasets."""
        dataset.columns = 0
        dataset.ended.clear()
        dataset.storage.begin_rollout()
        self.free.append(dataset)

    def _copy_columns(
        self, dataset: Dataset, slot: RolloutSlot, rollout: GroupRolloutReport, frame_TN: np.ndarray, columns: np.ndarray
    ) -> None:
        """Copy the columns with the indices `columns` of a rollout to the next free columns of a dataset."""
        begin, end = dataset.columns, dataset.columns + len(columns)
        whole = len(columns) == frame_TN.shape[1]
        source = slice(None) if whole else columns
        dataset.storage.copy_columns(begin, slot.storage, source)
        dataset.frame_TN[:, begin:end] = frame_TN[:, source]
        if not self.single_policy:
            dataset.storage.slabs["valid"][:, begin:end] &= slot.policy_TN[:, source] == self.policy
        column = {int(n): begin + index for index, n in enumerate(columns)}
        dataset.storage.truncations += [(t, column[n], obs, state) for t, n, obs, state in rollout.truncations if n in column]
        dataset.ended += [(ended.t, ended.episode) for ended in rollout.ended if ended.n in column and ended.policy == self.policy]
        dataset.columns = end
