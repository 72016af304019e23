"""Tests of the data path from workers to learner: rollouts are copied into datasets in the right order, while there is room."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch

from slm_lab.agent.rollout.rollout import OnPolicyBatchReplay
from slm_lab.experiment.collect.workers.assembler import RolloutAssembler
from slm_lab.experiment.collect.workers.dataset import Dataset, DatasetBuilder, EndedEpisode, GroupRolloutReport
from slm_lab.experiment.collect.workers.shared import SLOTS, RolloutSlot
from slm_lab.experiment.collect.workers.source import _transition_at_step
from slm_lab.lib.records import Episode
from tests.experiment.workers.puppets import INFO, ROWS, STATE, empty_slot, fill, report

EPISODE = Episode(0, 1.0, 1)


def filled_slot(number: int, columns: int = 3, policies: list[int] | None = None) -> tuple[RolloutSlot, GroupRolloutReport]:
    """Return a slot filled with `number`; each column is played by one policy."""
    slot = empty_slot(columns)
    fill(slot, number)
    slot.policy_TN[:] = policies or 0
    return slot, GroupRolloutReport([], [])


def make_builder(columns: int, spare: int = 1, policy: int = 0, alone: bool = True) -> DatasetBuilder:
    return DatasetBuilder(policy, INFO, columns, ROWS, STATE, spare, alone)


def columns_of(dataset: Dataset) -> list[int]:
    """Return 10 · slot + column for each column of a dataset, after checking that the whole column has that origin."""
    rollout = dataset.rollout()
    first = rollout.reward_TN[0]
    for t in range(ROWS):
        assert torch.equal(rollout.reward_TN[t], first + t)
        assert torch.equal(rollout.obs_TN[t, :, 0], first + t)
        assert torch.equal(rollout.version_TN[t], first.long() + t)
    assert torch.equal(rollout.obs_TN[ROWS, :, 0], first + ROWS)
    assert torch.equal(rollout.state_NS[:, 1], first)
    return [int(number) // 10 for number in first]


# ---- DatasetBuilder


def test_datasets_wider_and_narrower_than_a_slot() -> None:
    wide, narrow = make_builder(4), make_builder(1, spare=2)
    assert wide.add(*filled_slot(1)) == ([], 3)
    (full,), begin = wide.add(*filled_slot(2))
    assert (columns_of(full), begin) == ([10, 11, 12, 20], 3)
    assert wide.current is not None
    assert columns_of(wide.current) == [21, 22]
    several, begin = narrow.add(*filled_slot(1))
    assert ([columns_of(dataset) for dataset in several], begin) == ([[10], [11], [12]], 3)


def test_without_room_the_first_column_left_is_returned() -> None:
    builder = make_builder(2, spare=0)
    slot, rollout = filled_slot(1)
    (full,), begin = builder.add(slot, rollout)
    assert (columns_of(full), begin, builder.free_columns) == ([10, 11], 2, 0)
    assert builder.add(slot, rollout, begin) == ([], 2)
    builder.release(full)
    assert builder.free_columns == 2
    assert builder.add(slot, rollout, begin) == ([], 3)
    (other,), _ = builder.add(*filled_slot(2))
    assert columns_of(other) == [12, 20]


def test_truncations_and_episodes_follow_their_columns() -> None:
    builder = make_builder(4)
    obs, state = np.array([7.0], np.float32), np.array([8.0, 9.0], np.float32)
    slot, _ = filled_slot(1)
    builder.add(slot, GroupRolloutReport([(1, 2, obs, state)], [EndedEpisode(2, 0, 0, Episode(0, 5.0, 3))]))
    slot, _ = filled_slot(2)
    ended = [EndedEpisode(0, 0, 0, EPISODE), EndedEpisode(3, 1, 0, EPISODE)]
    (full,), _ = builder.add(slot, GroupRolloutReport([(0, 0, obs, state), (3, 1, obs, state)], ended))
    assert [(t, n) for t, n, _, _ in full.storage.truncations] == [(1, 2), (0, 3)]
    assert [t for t, _ in full.ended] == [2, 0]
    truncations = full.rollout().truncations
    assert [truncations.t_K.tolist(), truncations.n_K.tolist()] == [[1, 0], [2, 3]]
    assert [truncations.obs_K.tolist(), truncations.state_KS.tolist()] == [[[7.0]] * 2, [[8.0, 9.0]] * 2]
    assert builder.current is not None
    assert [(t, n) for t, n, _, _ in builder.current.storage.truncations] == [(3, 0)]
    assert [t for t, _ in builder.current.ended] == [3]


def test_each_policy_gets_its_columns_and_trains_on_its_rows() -> None:
    """A column in which two policies played goes to both policies, with the other's rows masked; an episode goes to its own policy."""
    slot, rollout = filled_slot(1, policies=[0, 1, 0])
    slot.policy_TN[:2, 2], slot.policy_TN[2:, 2] = 1, 0
    slot.storage.slabs["valid"][3, 0] = False
    rollout.ended += [EndedEpisode(1, 2, 1, EPISODE), EndedEpisode(3, 2, 0, Episode(2, 2.0, 2))]
    datasets: list[Dataset] = []
    for policy in (0, 1):
        (full,), begin = make_builder(2, policy=policy, alone=False).add(slot, rollout)
        assert begin == 3
        datasets.append(full)
    zero, one = datasets
    assert columns_of(zero) == [10, 12]
    assert columns_of(one) == [11, 12]
    assert zero.rollout().valid_TN.tolist() == [[True, False], [True, False], [True, True], [False, True]]
    assert one.rollout().valid_TN.tolist() == [[True, True], [True, True], [True, False], [True, False]]
    assert zero.frame_TN.tolist() == [[True, False], [True, False], [True, True], [True, True]], "frames count dummy rows"
    assert ([t for t, _ in zero.ended], [t for t, _ in one.ended]) == ([3], [1])
    assert slot.storage.slabs["valid"][:2, 2].all(), "the slot itself is unchanged"


def test_a_released_dataset_is_empty() -> None:
    builder = make_builder(3, spare=0, alone=False)
    slot, _ = filled_slot(1, policies=[0, 1, 0])
    truncation = (0, 0, np.zeros(1, np.float32), np.zeros(2, np.float32))
    builder.add(slot, GroupRolloutReport([truncation], [EndedEpisode(0, 0, 0, EPISODE)]))
    dataset = builder.take_dataset()
    assert dataset is not None
    assert columns_of(dataset) == [10, 12], "closed before it was full: without the empty column"
    assert builder.take_dataset() is None
    builder.release(dataset)
    (full,), _ = builder.add(*filled_slot(2))
    assert full is dataset
    assert columns_of(full) == [20, 21, 22]
    assert (full.storage.truncations, full.ended) == ([], [])
    assert full.rollout().valid_TN.all()
    assert full.frame_TN.all()


def test_the_last_observation_of_a_truncated_episode_is_no_observation_of_the_next() -> None:
    """For off-policy algorithms, which read a dataset step by step, the next step starts from the observation after the reset."""
    builder = make_builder(3)
    slot, _ = filled_slot(1)
    last, state = np.array([-1.0], np.float32), np.zeros(STATE, np.float32)
    (full,), _ = builder.add(slot, GroupRolloutReport([(1, 2, last, state)], []))
    *_, step = _transition_at_step(full, 1)
    assert step.last_obs_N[:, 0].tolist() == [102.0, 112.0, -1.0]
    assert step.obs_N[:, 0].tolist() == [102.0, 112.0, 122.0]
    obs_N, *_ = _transition_at_step(full, 2)
    assert obs_N[:, 0].tolist() == [102.0, 112.0, 122.0]


# ---- RolloutAssembler


def make_assembler(rounds: int | None, columns: int, spare: int = 1) -> RolloutAssembler:
    """Return an assembler of two workers; slot s of each worker is filled with 10 · worker + s + 1."""
    slots = [[[filled_slot(10 * worker + s + 1)[0]] for s in range(SLOTS)] for worker in range(2)]
    return RolloutAssembler(slots, [make_builder(columns, spare)], rounds)


def assembled(assembler: RolloutAssembler) -> tuple[list[tuple[int, int]], list[list[int]]]:
    """Return the (worker, slot) pairs that are free again, and the columns of the complete datasets."""
    free, complete = [], []
    for filled, datasets in assembler.assemble():
        free += [] if filled is None else [(filled.worker, filled.slot)]
        complete += [columns_of(dataset) for _, dataset in datasets]
    return free, complete


def test_rounds_are_in_the_order_of_the_workers() -> None:
    assembler = make_assembler(2, 12)
    assembler.put(1, 0, report(1.0))
    assert assembled(assembler) == ([], [])
    assembler.put(0, 0, report(2.0))
    assert assembled(assembler) == ([(0, 0), (1, 0)], [])
    assembler.put(0, 1, report(3.0))
    assert assembled(assembler) == ([(0, 1)], [])
    assert not assembler.round_over
    assembler.put(1, 1, report(4.0))
    free, (complete,) = assembled(assembler)
    assert free == [(1, 1)]
    assert [number // 10 for number in complete] == [1, 1, 1, 11, 11, 11, 2, 2, 2, 12, 12, 12]
    assert assembler.round_over


def test_at_the_end_of_a_round_a_dataset_need_not_be_full() -> None:
    assembler = make_assembler(1, 100)
    assembler.put(0, 0, report(1.0))
    assembler.put(1, 0, report(1.0))
    assert assembled(assembler) == ([(0, 0), (1, 0)], [[10, 11, 12, 110, 111, 112]])


def test_without_rounds_the_oldest_rollout_goes_first_and_waits_for_room() -> None:
    assembler = make_assembler(None, 4, spare=0)
    assembler.put(0, 1, report(3.0))
    assembler.put(1, 0, report(1.0))
    assembler.put(1, 1, report(2.0))
    assert assembled(assembler) == ([(1, 0)], [[110, 111, 112, 120]])
    assert assembled(assembler) == ([], []), "no room"
    storage = OnPolicyBatchReplay(replace(INFO, num_envs=4), ROWS, STATE)
    assembler.builders[0].release(Dataset(storage, np.zeros((ROWS, 4), np.bool_)))
    assert assembled(assembler) == ([(1, 1)], [[121, 122, 20, 21]])
