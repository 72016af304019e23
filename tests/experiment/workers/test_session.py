"""Tests of Sessions with rollout workers: synchronous collection trains exactly as without workers; asynchronous collection may differ."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces
from threadpoolctl import threadpool_info, threadpool_limits

from slm_lab.agent.ops.linear import MatmulMode
from slm_lab.agent.policy.policy import Policy
from slm_lab.agent.replay.hindsight import HindsightReplay
from slm_lab.agent.replay.replay import Replay
from slm_lab.agent.torch_settings import onednn_min_size
from slm_lab.env.normalize import Moments
from slm_lab.experiment.collect.workers import shared
from slm_lab.experiment.collect.workers.shared import WorkerArrays, WorkerConfig, acting_state_size, check_memory
from slm_lab.experiment.collect.workers.worker import RolloutWorker
from slm_lab.experiment.events import RowValues
from slm_lab.experiment.execute.local.fork_server import ensure_server
from slm_lab.experiment.files.sink import MemorySink
from slm_lab.experiment.session.session import Session
from slm_lab.experiment.training.observers.base import SAMPLER_COLUMNS
from slm_lab.lib.limits import processor_description
from slm_lab.lib.store import SharedArrays
from slm_lab.spec.models.spec import Spec
from slm_lab.spec.report import SpecError
from tests.experiment.workers.conftest import RECURRENT, pool_of, source_of, spans_of, weights_of, worker_spec

Open = Callable[[Spec], Session]
DQN = {"name": "DQN", "action_pdtype": "Argmax", "action_policy": "epsilon_greedy", "training_frequency": 4, "training_start_step": 64} | {
    "explore_var_spec": {"name": "linear_decay", "start_val": 1.0, "end_val": 0.1, "start_step": 0, "end_step": 500}
}
REPLAY = {"name": "Replay", "batch_size": 16, "max_size": 1000}
CONV = {"name": "ConvNet", "conv_hid_layers": [[4, 3, 2, 0, 1]], "fc_hid_layers": [16], "hid_layers_activation": "relu"}
VECTOR, IMAGES = spaces.Box(0, 1, (3,)), spaces.Box(0, 255, (1, 9, 9), np.uint8)
DICT = spaces.Dict({"a": spaces.Box(0, 1, (2,)), "b": spaces.Discrete(3)})
SPACED = "tests.env.toys:Spaced-v0"
SHORT = {"name": "CartPole-v1", "max_t": 10}
SERIAL = {"serial_mode": True}


def comparable(rows: list[RowValues]) -> list[dict[str, Any]]:
    """Return the rows without the columns of wall-clock time and of workers."""
    left_out = ("wall_t", "fps", *SAMPLER_COLUMNS)
    return [{name: value for name, value in row.items() if name not in left_out} for row in rows]


def assert_equal_runs(one: Session, other: Session) -> list[RowValues]:
    """Run both sessions and check that rows, weights and statistics of every policy are equal. Return the rows of the first policy."""
    sinks = MemorySink(), MemorySink()
    for session, sink in zip((one, other), sinks, strict=True):
        session.run(sink)
    for p, (mine, others) in enumerate(zip(one.learners, other.learners, strict=True)):
        rows, expected = (comparable(sink.table_rows(p, "train")) for sink in sinks)
        assert rows == expected
        assert rows[-1]["opt_step"]
        assert np.array_equal(weights_of(one, p), weights_of(other, p))
        assert mine.normalizers.state_dict()["obs_stats"] == others.normalizers.state_dict()["obs_stats"]
    return sinks[0].table_rows(0, "train")


# ---- the same experience with and without workers

VARIETY: dict[str, dict[str, Any]] = {
    "plain": {},
    "a2c, recurrent, truncated": {
        "algorithm": {"name": "ActorCritic", "lam": 0.95, "training_frequency": 16},
        "net": RECURRENT,
        "env": SHORT,
    },
    "continuous, truncated": {"env": {"name": "Pendulum-v1", "max_t": 20}},
    "MultiDiscrete and Dict": {"env": {"name": SPACED, "observation": DICT, "action": spaces.MultiDiscrete([2, 3])}},
    "images": {"env": {"name": SPACED, "observation": IMAGES}, "net": CONV},
    "bfloat16": {"net": {"dtype": "bfloat16"}, "env": {"max_frame": 512}},
}


@pytest.mark.sampled(1)
@pytest.mark.parametrize("sections", VARIETY.values(), ids=VARIETY)
def test_one_worker_in_turns_learns_as_without_workers(sections: dict[str, Any]) -> None:
    spec = worker_spec(**sections, sampler={"num_workers": 1, "num_envs_per_worker": 4} | SERIAL)
    without = spec.with_meta(sampler=None)
    assert_equal_runs(Session(spec), Session(without))


def test_replay_memories_contain_the_last_observations_of_terminated_episodes() -> None:
    """In BitFlip, an episode terminates when the achieved goal equals the desired goal; the next observation shows another episode."""
    env = {"name": "slm_lab.env.bit_flip:BitFlip-v0", "n": 3, "backend": "sync"}
    memory = REPLAY | {"name": "HindsightReplay"}
    session = Session(worker_spec(algorithm=DQN, memory=memory, env=env, sampler={"async_rl": True} | SERIAL))
    session.run()
    replay = session.agent.replay
    assert isinstance(replay, HindsightReplay)
    ended_B = np.flatnonzero(replay.columns["terminated"][: replay.size])
    assert len(ended_B) > 20
    before, after = (np.asarray(get(ended_B)) for get in (replay.store.observations, replay.store.next_observations))
    achieved, desired = (slice(*goal) for goal in session.parts.env_info.observation.goals)
    assert np.array_equal(after[:, desired], before[:, desired])
    assert np.array_equal(after[:, achieved], after[:, desired])


def test_workers_compute_as_the_learner_does(open_session: Open) -> None:
    session = open_session(worker_spec(net={"dtype": "bfloat16"}, meta={"matmul": "onednn"}, sampler=SERIAL)).build()
    nets = [policy.net for worker in pool_of(session).workers for group in worker.groups for policy in group.policies]
    least = onednn_min_size(processor_description(), torch.backends.cpu.get_cpu_capability())
    assert all(net.actor_body.matmul_mode == MatmulMode(onednn=least, bfloat16=True) for net in [session.agent.policy.net, *nets])
    assert len(nets) == 2


PROCESSES: dict[str, dict[str, Any]] = {
    "recurrent, truncated, normalised": {"net": RECURRENT, "env": SHORT | {"normalize_obs": True, "normalize_reward": True}},
    "Dict, normalised, two policies": {
        "env": {"name": SPACED, "observation": DICT, "normalize_obs": True},
        "sampler": {"num_policies": 2},
    },
    "rounds of three rollouts": {"sampler": {"num_batches_per_epoch": 3}, "env": {"max_frame": 768}},
}


@pytest.mark.sampled(1)
@pytest.mark.parametrize("sections", PROCESSES.values(), ids=PROCESSES)
def test_processes_learn_as_one_process(sections: dict[str, Any], open_session: Open) -> None:
    sampler = sections.get("sampler", {})
    sections = sections | {"env": {"max_frame": 512} | sections["env"]}
    apart, together = (open_session(worker_spec(**sections | {"sampler": sampler | more})) for more in ({}, SERIAL))
    rows = assert_equal_runs(apart, together)
    assert {row["lag_max"] for row in rows} <= {0.0, None}
    if "num_batches_per_epoch" in sampler:
        assert apart.clock.opt_step == 768 // 192 * 3 * 2  # datasets × minibatches × epochs


def test_statistics_are_those_of_all_observations(open_session: Open) -> None:
    session = open_session(worker_spec(env={"normalize_obs": True, "max_frame": 256}, sampler=SERIAL)).build()
    seen: list[np.ndarray] = []
    groups = [group for worker in pool_of(session).workers for group in worker.groups]
    for group in groups:
        backend = group.env._backend
        step = backend.step

        def spy(action: np.ndarray, step: Any = step) -> Any:
            raw = step(action)
            seen.append(np.array(raw.obs, np.float32))
            seen.extend(np.array(final, np.float32)[None] for _, final in raw.final or ())
            return raw

        backend.step = spy
    session.run()
    stats = session.learners[0].normalizers.state_dict()["obs_stats"]
    everything = np.concatenate(seen)
    assert stats["count"] in (len(everything), len(everything) + 4)  # with those of the resets
    np.testing.assert_allclose(stats["mean"], everything.mean(0), atol=0.02)
    for group in groups:  # groups normalise by the statistics at the start of the last rollout
        assert 3 * 64 <= group.env.normalizers.state_dict()["obs_stats"]["count"] < stats["count"]


def test_a_continued_worker_uses_the_statistics_of_the_learner(open_session: Open) -> None:
    """The worker's own checkpoint is one round older. The statistics of the learner are used whether they were published before or after
    the worker connected; here, the worker has pulled them before it loads its checkpoint."""
    env = {"normalize_obs": True, "max_frame": 10_000, "schedule": {"length": [[0, 0.5], [4000, 1.0]]}}
    session = open_session(worker_spec(env=env, sampler=SERIAL)).build()
    source, worker = source_of(session), pool_of(session).workers[0]
    learner, worker_env = session.learners[0], worker.envs[0]
    saved = worker.state_dict()
    learner.normalizers.merge_deltas([Moments(100, np.ones(4), np.ones(4))])
    learner.clock.frame = 5000
    source._publish(0)
    for _ in range(2):
        worker.subscriber.pull()
        assert np.array_equal(worker_env.normalizers.statistics_vector, learner.normalizers.statistics_vector)
        assert worker_env.curriculum is not None
        assert worker_env.curriculum.frame == 5000
        worker.load_state(saved, 1)
        assert worker_env.curriculum.frame == 0


@pytest.mark.parametrize("workers", [True, False])
def test_a_replay_buffer_holds_observations_before_normalisation(
    workers: bool, open_session: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The policy acts on normalised observations, and batches are normalised by the latest statistics."""
    acted: list[np.ndarray] = []
    act = Policy.act

    def spy(policy: Policy, obs_N: np.ndarray, *more: Any) -> Any:
        acted.append(obs_N.copy())
        return act(policy, obs_N, *more)

    monkeypatch.setattr(Policy, "act", spy)
    spec = worker_spec(
        algorithm=DQN,
        memory=REPLAY,
        sampler={"async_rl": True} | SERIAL,
        env={**SHORT, "normalize_obs": True, "normalize_reward": True, "max_frame": 512},
    )
    session = open_session(spec if workers else spec.with_meta(sampler=None)).build()
    session.run()
    learner = session.learners[0]
    memory, normalizer, rows = learner.agent.replay, learner.normalizers.obs, np.arange(400)
    assert isinstance(memory, Replay)
    assert normalizer is not None
    stored = memory.store.observations(rows)
    assert isinstance(stored, np.ndarray)
    assert np.abs(stored[:, 2]).max() < 0.25, "the angle of a pole that stands, in radians"
    assert 0.7 < np.concatenate(acted)[:, 2].std() < 1.4
    assert np.array_equal(memory._observations(rows).numpy(), normalizer(stored))
    batch = memory.sample()
    assert 0.5 < float(batch.obs_B[:, 2].std()) < 2.0
    assert set(memory.columns["reward"][rows]) == {1.0}
    assert learner.normalizers.reward is not None
    assert np.allclose(batch.reward_B, learner.normalizers.reward.normalize(np.ones(1)))
    assert float(batch.reward_B[0]) < 0.9


# ---- synchronous and asynchronous collection


def overlap(session: Session) -> float:
    """Return the seconds in which the learner trained while a rollout was collected."""
    rollouts, trainings = spans_of(session, "rollout"), spans_of(session, "train")
    assert rollouts
    assert trainings
    return sum(max(0.0, min(train.end, rollout.end) - max(train.begin, rollout.begin)) for train in trainings for rollout in rollouts)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("async_rl", [False, True])
def test_async_collects_while_the_learner_trains(async_rl: bool, open_session: Open, tmp_path: Path) -> None:
    """Only asynchronous collection overlaps with training. Each worker steps its envs in a separate process."""
    env = {"name": "tests.env.toys:Signed-v0", "backend": "sync", "folder": str(tmp_path), "max_frame": 1536}
    session = open_session(worker_spec(sampler={"async_rl": async_rl}, env=env, algorithm={"training_epoch": 8})).build()
    pids = {worker.task.pid for worker in pool_of(session).workers}
    rows = session.run().rows
    assert (overlap(session) > 0.0) == async_rl
    assert (max(row["lag_max"] or 0.0 for row in rows) > 0.0) == async_rl
    assert all(0.0 <= (row["learner_busy"] or 0.0) <= 1.0 for row in rows)
    stepped_in = {int(file.name) for file in tmp_path.iterdir()}
    assert len(stepped_in) == 2
    assert stepped_in == pids
    assert os.getpid() not in stepped_in


def test_transitions_that_are_too_old_are_not_trained_on(open_session: Open, caplog: pytest.LogCaptureFixture) -> None:
    session = open_session(worker_spec(sampler=SERIAL | {"max_policy_lag": 3, "num_policies": 2})).build()
    source = source_of(session)
    item = source.pool.next_dataset()
    assert item is not None
    policy, dataset = item
    learner = session.learners[policy]
    learner.clock.opt_step = 10
    version_TN = dataset.rollout().version_TN
    version_TN[:5], version_TN[5:] = 6, 7
    *_, last = source._iterate_dataset(policy, dataset)
    assert last.rollout is not None
    assert last.report is not None
    assert not last.rollout.valid_TN[:5].any()
    assert last.rollout.valid_TN[5:].all()
    assert last.report()["lag_masked"] == pytest.approx(5 / 16)
    version_TN[:] = 0
    learner.clock.frame = 0
    *_, last = source._iterate_dataset(policy, dataset)
    assert last.rollout is None
    assert "all transitions of a dataset exceed meta.sampler.max_policy_lag (3 gradient steps)" in caplog.text


def test_frames_are_as_requested(open_session: Open) -> None:
    session = open_session(worker_spec(env={"max_frame": 200}, sampler=SERIAL))
    session.run()
    assert session.clock.frame == 200  # in the middle of the fourth round, which is not used for training
    assert session.clock.opt_step == 3 * 2


# ---- off-policy


@pytest.mark.sampled(1)
@pytest.mark.parametrize(("env", "net"), [({}, {}), ({"name": SPACED, "observation": IMAGES}, CONV)], ids=["vectors", "images"])
def test_a_replay_of_what_workers_collect(env: dict[str, Any], net: dict[str, Any], open_session: Open) -> None:
    sampler = {"async_rl": True} | SERIAL
    session = open_session(worker_spec(env=env | {"max_frame": 200}, net=net, algorithm=DQN, memory=REPLAY, sampler=sampler))
    rows = session.run().rows
    assert rows[-1]["opt_step"] == sum(frame >= 64 for frame in range(4, 201, 4))  # one step every 4 transitions, from 64 transitions on
    assert rows[-1]["explore_var"] == pytest.approx(1.0 - 0.9 * 200 / 500)
    assert session.agent.replay is not None
    assert session.clock.frame == 200


def test_workers_act_at_random_before_training_starts(open_session: Open) -> None:
    sac = {"name": "SoftActorCritic", "training_frequency": 4, "training_start_step": 100}
    env = {"name": "Pendulum-v1", "max_frame": 600}
    session = open_session(worker_spec(env=env, algorithm=sac, memory=REPLAY, sampler={"async_rl": True} | SERIAL))
    session.run()
    assert session.agent.replay is not None
    logp = session.agent.replay.columns["logp"][:600]  # NaN for actions of the policy
    at_random = np.isfinite(logp)
    np.testing.assert_allclose(logp[at_random], -np.log(2.0))
    first = int(np.flatnonzero(~at_random)[0])
    assert 100 <= first <= 250, "from the weights on that were published after it"
    assert not at_random[first:].any()


def test_the_replay_pairs_observations_with_their_true_successors(open_session: Open) -> None:
    """The observation of Toy is the step in the episode, so each successor is larger by one, whatever was stored in between."""
    env = {"name": "tests.env.toys:Toy-v0", "mean_length": 4.0, "max_frame": 600, "backend": "sync"}
    session = open_session(worker_spec(env=env, algorithm=DQN, memory=REPLAY, sampler={"async_rl": True} | SERIAL))
    session.run()
    batch: Any = session.agent.replay.sample()
    continues = batch.terminated_B == 0
    assert torch.equal(batch.next_obs_B[continues, 0], batch.obs_B[continues, 0] + 1)


# ---- several policies


def test_policies_share_the_workers(open_session: Open) -> None:
    session, sink = open_session(worker_spec(sampler={"num_policies": 3, "async_rl": True} | SERIAL, env={"max_frame": 800})), MemorySink()
    session.run(sink)
    assert all(learner.clock.frame >= 800 for learner in session.learners)
    assert all(sink.table_rows(p, "train")[-1]["total_reward"] is not None for p in range(3))
    one, two, three = (weights_of(session, p) for p in range(3))
    assert not np.array_equal(one, two)
    assert not np.array_equal(two, three)


def test_a_worker_that_begins_late_plays_for_policies_that_need_frames(open_session: Open) -> None:
    session = open_session(worker_spec(sampler={"num_policies": 2, "async_rl": True} | SERIAL)).build()
    arrays = source_of(session).arrays
    arrays.active_P[0] = False
    late = RolloutWorker(WorkerConfig(session.spec, session.parts.seeds(0), restart=1))
    late.connect_and_reset(lambda own: own.use_learner_arrays(arrays))
    assert (late.groups[0].policy_N == 1).all()
    late.close()


# ---- memory, threads, file descriptors


def test_rollouts_that_do_not_fit_memory_are_refused(monkeypatch: pytest.MonkeyPatch, open_session: Open) -> None:
    """The estimate of the memory is between half and four times the size of the actual arrays."""
    spec = worker_spec(sampler=SERIAL | {"num_envs_per_worker": 32}, algorithm={"minibatch_size": 1024})
    session = open_session(spec).build()
    source = source_of(session)
    storages = [slot.storage for worker in source.arrays.slots for groups in worker for slot in groups]
    storages += [dataset.storage for builder in pool_of(session).assembler.builders for dataset in builder.free]
    used = sum(slab.nbytes for storage in storages for slab in storage.slabs.values())
    monkeypatch.setattr(shared, "memory_bytes", lambda: 4 * used)
    check_memory(spec, session.parts.env_info)
    with pytest.raises(SpecError, match="--jobs"):
        check_memory(spec, session.parts.env_info, concurrent_sessions=8)
    monkeypatch.setattr(shared, "memory_bytes", lambda: used // 2)
    with pytest.raises(SpecError) as error:
        open_session(spec).build()
    (problem,) = error.value.problems
    assert problem.path == "meta.sampler"
    assert "GiB for rollouts; this machine has 0.0 GiB; use fewer envs (num_workers, num_envs_per_worker)" in problem.message
    assert problem.message.endswith("smaller datasets")


def test_many_workers_need_few_descriptors(fd: int) -> None:
    """All workers share few mappings: each keeps a file descriptor open, and a process may have 1,024 by default."""
    spec = worker_spec(sampler={"num_workers": 32, "num_envs_per_worker": 1}, algorithm={"minibatch_size": 512})
    other = Session(worker_spec(sampler=SERIAL)).build()
    policies = [learner.agent.policy for learner in other.learners]
    worker = RolloutWorker(WorkerConfig(spec, other.parts.seeds(0)))
    before = len(os.listdir("/proc/self/fd"))
    arrays = WorkerArrays(spec, replace(worker.info, num_envs=32), policies, acting_state_size(worker.envs[0].normalizers))
    SharedArrays(fd).attach({"workers": arrays})
    assert len(arrays.slots) == 32
    assert len(os.listdir("/proc/self/fd")) - before < 10, "one process's view of all slots"
    for one in (worker, other):
        one.close()


def numpy_threads() -> set[int]:
    return {library["num_threads"] for library in threadpool_info() if library["user_api"] == "blas"}


@pytest.mark.slow
def test_a_session_that_ends_leaves_threads_and_descriptors_as_they_were() -> None:
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    ensure_server()  # the server is kept for the next Session of this process
    for serial in (True, False):
        gc.collect()
        before = os.listdir("/proc/self/fd")
        sampler = {"serial_mode": serial, "num_policies": 2, "async_rl": True, "inference": "local" if serial else "central"}
        session = Session(worker_spec(sampler=sampler, env={"max_frame": 128}))
        with threadpool_limits(2, user_api="blas"):
            session.build()
            assert numpy_threads() == {1}
            session.run()
            assert numpy_threads() == {2}
        assert torch.get_num_threads() == 2
        del session
        gc.collect()
        assert len(os.listdir("/proc/self/fd")) <= len(before)
    torch.set_num_threads(threads)


@pytest.mark.parametrize("sections", [{}, {"net": RECURRENT, "sampler": {"inference": "central"}}], ids=["local", "central"])
@pytest.mark.parametrize("async_rl", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_workers_obey_action_masks(sections: dict[str, Any], async_rl: bool, open_session: Open) -> None:
    """Workers choose only valid actions; the env raises an error for an invalid one."""
    env = {"name": "tests.env.masked:Forbidding-v0", "max_frame": 512}
    spec = worker_spec(net=sections.get("net", {}), env=env, sampler={"async_rl": async_rl} | sections.get("sampler", {}))
    assert open_session(spec).build().run().frame >= 512
