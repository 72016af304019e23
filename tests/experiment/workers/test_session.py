"""Learning from rollout workers: the same as without them where it must be, and what differs where it may."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces

from slm_lab.experiment.observers import SAMPLER_COLUMNS, Row
from slm_lab.experiment.sampler.ledger import Span
from slm_lab.experiment.sampler.session import SampledSession
from slm_lab.experiment.sampler.worker import RolloutWorker, Setting, note_count
from slm_lab.experiment.session import Session
from slm_lab.lib.heap import CommonHeap
from slm_lab.spec.spec import Spec
from tests.experiment.sampler.conftest import sampled

Open = Callable[[Spec], SampledSession]
DQN = {"name": "DQN", "action_pdtype": "Argmax", "action_policy": "epsilon_greedy", "training_frequency": 4, "training_start_step": 64} | {
    "explore_var_spec": {"name": "linear_decay", "start_val": 1.0, "end_val": 0.1, "start_step": 0, "end_step": 500}
}
REPLAY = {"name": "Replay", "batch_size": 16, "max_size": 1000}
RECURRENT = {"name": "RecurrentNet", "cell_type": "GRU", "rnn_hidden_size": 8, "seq_len": 8}
CONV = {"name": "ConvNet", "conv_hid_layers": [[4, 3, 2, 0, 1]], "fc_hid_layers": [16], "hid_layers_activation": "relu"}


VECTOR, IMAGES = spaces.Box(0, 1, (3,)), spaces.Box(0, 255, (1, 9, 9), np.uint8)
DICT = spaces.Dict({"a": spaces.Box(0, 1, (2,)), "b": spaces.Discrete(3)})
SPACED = "tests.env.toys:Spaced-v0"


def flat(session: Session | SampledSession) -> np.ndarray:
    acting = session.agent.algorithm.acting
    assert acting is not None
    return acting.flat.param.detach().clone().numpy()


def told(rows: list[Row]) -> list[dict[str, Any]]:
    """Rows without what the clock on the wall and the workers add."""
    left_out = ("wall_t", "fps", *SAMPLER_COLUMNS)
    return [{name: value for name, value in row.items() if name not in left_out} for row in rows]


VARIETY: dict[str, dict[str, Any]] = {
    "plain": {},
    "a2c": {"algorithm": {"name": "ActorCritic", "lam": 0.95, "training_frequency": 16}},
    "recurrent": {"net": RECURRENT},
    "truncated": {"env": {"name": "CartPole-v1", "max_t": 10}},
    "recurrent and truncated": {"net": RECURRENT, "env": {"name": "CartPole-v1", "max_t": 10}},
    "continuous": {"env": {"name": "Pendulum-v1", "max_t": 20}},
    "MultiDiscrete": {"env": {"name": SPACED, "observation": VECTOR, "action": spaces.MultiDiscrete([2, 3])}},
    "Dict": {"env": {"name": SPACED, "observation": DICT}},
    "images": {"env": {"name": SPACED, "observation": IMAGES}, "net": CONV},
}


@pytest.mark.parametrize("sections", VARIETY.values(), ids=VARIETY)
def test_one_worker_in_turns_learns_as_without_workers(sections: dict[str, Any]) -> None:
    spec = sampled(**sections, sampler={"num_workers": 1, "num_envs_per_worker": 4, "serial_mode": True})
    plain = spec.model_copy(update={"meta": spec.meta.model_copy(update={"sampler": None})})
    with_worker, without = SampledSession(spec), Session(plain)
    rows, expected = with_worker.run().rows, without.run().rows
    assert np.array_equal(flat(with_worker), flat(without))
    assert told(rows) == told(expected)
    assert rows[-1]["opt_step"]


@pytest.mark.parametrize("name", ["recurrent and truncated", "Dict"])
def test_processes_learn_as_one_process(name: str, open_session: Open) -> None:
    sections = VARIETY[name] | {"env": VARIETY[name].get("env", {}) | {"max_frame": 512, "normalize_obs": True, "normalize_reward": True}}
    apart, together = open_session(sampled(**sections)), open_session(sampled(**sections, sampler={"serial_mode": True}))
    rows, expected = apart.run().rows, together.run().rows
    assert np.array_equal(flat(apart), flat(together))
    assert told(rows) == told(expected)
    assert apart.env.state_dict()["obs_stats"] == together.env.state_dict()["obs_stats"]
    assert {row["lag_max"] for row in rows} <= {0.0, None}


def test_a_round_may_be_several_rollouts_of_each_worker(open_session: Open) -> None:
    sizes = {"algorithm": {"minibatch_size": 64}, "sampler": {"num_batches_per_epoch": 3}, "env": {"max_frame": 768}}
    apart = open_session(sampled(**sizes))
    together = open_session(sampled(**sizes | {"sampler": {"num_batches_per_epoch": 3, "serial_mode": True}}))
    apart.run()
    together.run()
    assert np.array_equal(flat(apart), flat(together))
    assert apart.students[0].clock.opt_step == 768 // 192 * 3 * 2  # datasets × minibatches × epochs


def test_statistics_are_those_of_all_observations() -> None:
    spec = sampled(env={"normalize_obs": True, "max_frame": 256}, sampler={"serial_mode": True})
    session = SampledSession(spec)
    session.build()
    seen: list[np.ndarray] = []
    for worker in session.crew.workers:  # type: ignore[union-attr]
        for group in worker.groups:
            backend = group.env._backend
            step = backend.step

            def spy(action: np.ndarray, step: Any = step) -> Any:
                raw = step(action)
                seen.append(np.array(raw.obs, np.float32))
                seen.extend(np.array(final, np.float32)[None] for _, final in raw.final or ())
                return raw

            backend.step = spy
    session.run()
    stats = session.env.state_dict()["obs_stats"]
    everything = np.concatenate(seen)
    assert stats["count"] in (len(everything), len(everything) + 4)  # and those of the resets
    np.testing.assert_allclose(stats["mean"], everything.mean(0), atol=0.02)


def busy(session: SampledSession, kind: str) -> list[Span]:
    return [span for span in session.ledger.spans if span.kind == kind]


def overlap(session: SampledSession) -> float:
    """Seconds in which the learner trained while a rollout was being gathered."""
    rollouts = busy(session, "rollout")
    return sum(
        max(0.0, min(train.end, rollout.end) - max(train.begin, rollout.begin)) for train in busy(session, "train") for rollout in rollouts
    )


def test_async_collects_while_the_learner_trains(open_session: Open) -> None:
    session = open_session(sampled(sampler={"async_rl": True}, env={"max_frame": 4096}, algorithm={"training_epoch": 8}))
    rows = session.run().rows
    assert overlap(session) > 0.0
    assert max(row["lag_max"] or 0.0 for row in rows) > 0.0
    assert all(0.0 <= (row["learner_busy"] or 0.0) <= 1.0 for row in rows)


def test_sync_takes_turns(open_session: Open) -> None:
    session = open_session(sampled(env={"max_frame": 2048}))
    session.run()
    assert busy(session, "train")
    assert busy(session, "rollout")
    assert overlap(session) == 0.0


def test_central_inference_acts_as_local_does(open_session: Open) -> None:
    """One group of envs for each worker: the same draws from the same distributions, to the rounding of a larger product."""
    central = open_session(sampled(sampler={"inference": "central", "worker_num_splits": 1}, env={"max_frame": 128}))
    local = open_session(sampled(env={"max_frame": 128}))
    central.run()
    local.run()
    np.testing.assert_allclose(flat(central), flat(local), atol=1e-4)
    assert busy(central, "inference")


@pytest.mark.parametrize("sections", [{"net": RECURRENT}, {"sampler": {"num_policies": 2}}])
def test_central_inference_of_anything(sections: dict[str, Any], open_session: Open) -> None:
    sampler = {"inference": "central", "async_rl": True} | sections.get("sampler", {})
    session = open_session(sampled(**sections | {"sampler": sampler, "env": {"max_frame": 512} | sections.get("env", {})}))
    rows = session.run().rows
    assert rows[-1]["frame"] >= 512
    assert rows[-1]["opt_step"]


def test_transitions_that_are_too_old_are_not_trained_on(open_session: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    session = open_session(sampled(sampler={"serial_mode": True, "max_policy_lag": 3})).build()
    learned: list[torch.Tensor] = []
    student = session.students[0]
    monkeypatch.setattr(student.agent, "learn", lambda rollout: learned.append(rollout.valid_TN) or _metrics())
    item = session.crew.next()  # type: ignore[union-attr]
    assert item is not None
    rollout = item[1].rollout()
    student.clock.opt_step = 10
    rollout.version_TN[:5], rollout.version_TN[5:] = 6, 7
    session._train(student, rollout)
    assert not learned[0][:5].any()
    assert learned[0][5:].all()
    rollout.version_TN[:] = 0
    session._train(student, rollout)
    assert len(learned) == 1


def _metrics() -> Any:
    from slm_lab.lib.records import Metrics

    return Metrics(0.0)


@pytest.mark.parametrize(
    "sections",
    [
        {"env": {"max_frame": 600}},
        {
            "env": {"name": SPACED, "max_frame": 600, "observation": IMAGES},
            "net": CONV,
        },
    ],
)
def test_a_replay_of_what_workers_collect(sections: dict[str, Any], open_session: Open) -> None:
    session = open_session(sampled(**sections, algorithm=DQN, memory=REPLAY, sampler={"async_rl": True, "serial_mode": True}))
    rows = session.run().rows
    algorithm = session.agent.algorithm
    assert rows[-1]["opt_step"] == sum(frame >= 64 for frame in range(4, 601, 4))  # one step every 4 transitions once there are 64
    assert rows[-1]["explore_var"] == pytest.approx(0.1)
    assert algorithm.memory is not None
    assert session.students[0].clock.frame == 600


def test_the_replay_pairs_observations_with_their_true_successors(open_session: Open) -> None:
    """Observations of Toy count the steps of an episode: the next one is one more, whatever came in between."""
    env = {"name": "tests.env.toys:Toy-v0", "mean_length": 4.0, "max_frame": 600, "backend": "sync"}
    session = open_session(sampled(env=env, algorithm=DQN, memory=REPLAY, sampler={"async_rl": True, "serial_mode": True}))
    session.run()
    memory: Any = session.agent.algorithm.memory
    batch = memory.sample()
    going_on = batch.terminated_B == 0
    assert torch.equal(batch.next_obs_B[going_on, 0], batch.obs_B[going_on, 0] + 1)


def test_policies_share_the_workers(open_session: Open) -> None:
    session = open_session(sampled(sampler={"num_policies": 3, "async_rl": True, "serial_mode": True}, env={"max_frame": 800}))
    session.run()
    assert all(student.clock.frame >= 800 for student in session.students)
    assert all(student.result.rows[-1]["total_reward"] is not None for student in session.students)
    one, two, three = (student.agent.algorithm.acting.flat.param for student in session.students)  # type: ignore[union-attr]
    assert not torch.equal(one, two)
    assert not torch.equal(two, three)


def test_policies_in_turns_are_the_same_in_one_process(open_session: Open) -> None:
    apart = open_session(sampled(sampler={"num_policies": 2}, env={"max_frame": 512}))
    together = open_session(sampled(sampler={"num_policies": 2, "serial_mode": True}, env={"max_frame": 512}))
    apart.run()
    together.run()
    for one, other in zip(apart.students, together.students, strict=True):
        assert told(one.result.rows) == told(other.result.rows)
        assert torch.equal(one.agent.algorithm.acting.flat.param, other.agent.algorithm.acting.flat.param)  # type: ignore[union-attr]


def test_frames_are_as_asked(open_session: Open) -> None:
    session = open_session(sampled(env={"max_frame": 200}, sampler={"serial_mode": True}))
    session.run()
    assert session.students[0].clock.frame == 200  # in the middle of the fourth round, which is not trained on
    assert session.students[0].clock.opt_step == 3 * 2


def test_central_inference_samples_by_the_newest_deviation(open_session: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    """The net puts out means alone; the standard deviation is a parameter that the worker needs."""
    net = {"name": "MLPNet", "hid_layers": [8], "log_std_init": 0.0, "optim_spec": {"name": "Adam", "lr": 0.05}}
    sampler = {"num_workers": 1, "num_envs_per_worker": 4, "inference": "central", "worker_num_splits": 1}
    session = open_session(sampled(net=net, sampler=sampler, env={"name": "Pendulum-v1", "max_frame": 256}))
    session.build()
    algorithm: Any = session.agent.algorithm
    worst: list[float] = []
    learn = algorithm.learn

    def spy(rollout: Any) -> Any:
        with torch.no_grad():
            params_BP, _ = algorithm.net(rollout.obs_TN[:-1].flatten(0, 1))
            logp_B = algorithm.distribution.log_prob(params_BP, rollout.action_TN.flatten(0, 1))
        worst.append(float((logp_B - rollout.logp_TN.flatten()).abs().max()))
        return learn(rollout)

    monkeypatch.setattr(algorithm, "learn", spy)
    session.run()
    assert len(worst) == 4
    assert max(worst) < 1e-4


def test_a_worker_that_begins_late_plays_for_policies_that_need_frames(open_session: Open) -> None:
    session = open_session(sampled(sampler={"num_policies": 2, "async_rl": True, "serial_mode": True})).build()
    session.common.active_P[0] = False
    first = session.students[0]
    setting = Setting(session.spec, first._info(), first.seeds, restart=1, notes=note_count(first.env))
    assert session._memory is not None
    late = RolloutWorker(setting, CommonHeap(session._memory, 0, 1, synced=False, fresh=False))
    assert (late.groups[0].policy_N == 1).all()
    late.close()
