from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from slm_lab.env.vec import Env
from slm_lab.experiment.files import bundle as state
from slm_lab.experiment.files.paths import RunPaths, new_run
from slm_lab.experiment.files.sink import LocalSink
from slm_lab.experiment.plan import Plan, Stop, UserError
from slm_lab.experiment.run.engine import check_builds
from slm_lab.experiment.session.build import SessionContext
from slm_lab.experiment.session.restore import load_session_state, state_dict
from slm_lab.experiment.session.session import Session
from slm_lab.experiment.training.observers.builtin import DevCheckError
from slm_lab.lib.records import Metrics
from slm_lab.spec.load.loader import load_spec
from slm_lab.spec.models.spec import Spec
from slm_lab.spec.report import SpecError
from tests.experiment.commands import rows
from tests.resume.runs import differing

MakeSpec = Callable[..., Spec]


class StopAt(Stop):
    """Stop that is requested once the Session has reached the frame."""

    def __init__(self, frame: int) -> None:
        self.frame, self.number = frame, None
        self.session: Session | None = None

    @property
    def requested(self) -> bool:  # type: ignore[override]
        return self.session is not None and bool(self.session.learners) and self.session.clock.frame >= self.frame


def stopped_at(frame: int, spec: Spec) -> Session:
    """Return a Session that will be stopped at a frame."""
    stop = StopAt(frame)
    stop.session = Session(spec, context=SessionContext(stop))
    return stop.session


@contextmanager
def threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@pytest.fixture
def paths(tmp_path: Path) -> RunPaths:
    return new_run(tmp_path / "data", "small")


def test_it_ends_at_the_first_step_at_or_past_its_frames(make_spec: MakeSpec) -> None:
    """The Session computes on one thread, and restores torch's number of threads when it ends."""
    with threads(2):
        session = Session(make_spec(env={"num_envs": 3}, meta={"log_frequency": 400})).build()
        assert torch.get_num_threads() == 1
        result = session.run()
        assert torch.get_num_threads() == 2
    assert [row["frame"] for row in result.rows] == [402, 801, 1002]
    assert (result.frame, result.interrupted) == (1002, False)
    assert all(row["t"] * 3 == row["frame"] for row in result.rows if row["t"] is not None)
    assert (result.rows[-1]["opt_step"] or 0) > 0


def test_alone_it_collects_all_frames_of_a_distributed_spec(make_spec: MakeSpec) -> None:
    session = Session(make_spec().with_meta(distributed="synced", max_session=4))
    assert session.run().frame == 1000
    assert session.learners[0].policy_checkpoint()["global_frame"] == session.clock.frame


def test_equal_seeds_give_equal_bytes_and_another_session_others(make_spec: MakeSpec, paths: RunPaths) -> None:
    """One of the equal runs has evaluation, which must not change the training."""
    sinks = [LocalSink(paths, trial) for trial in range(3)]
    eval_meta = {"rigorous_eval": 2, "eval_frequency": 100}
    for sink, meta, index in zip(sinks, ({}, eval_meta, {}), (0, 0, 1), strict=True):
        Session(make_spec(meta=meta), index).run(sink)
        sink.close()
    first, again, other = (rows(paths.session_df(index, t=t)) for t, index in enumerate((0, 0, 1)))
    assert first == again
    assert first != other
    assert float(first[-1]["total_reward"]) > 0


def test_files_of_a_session(make_spec: MakeSpec, paths: RunPaths) -> None:
    session = Session(make_spec(meta={"rigorous_eval": 2, "eval_frequency": 500}))
    result = session.run(LocalSink(paths))
    assert (result.rows, result.eval_rows) == ([], []), "kept in memory for nothing"
    assert [row["frame"] for row in rows(paths.session_df(0))] == ["252", "500", "752", "1000"]
    assert [row["frame"] for row in rows(paths.session_df(0, "eval"))] == ["500", "1000"]
    bundle = state.load(paths.checkpoint(0, "last"))
    assert bundle["version"] == state.VERSION
    assert {"source", "rng", "tables", "spec", "done"} <= bundle.keys()
    (policy,) = bundle["policies"]
    assert policy["clock"]["frame"] == 1000
    assert policy["observers"]["recorder"]["table"]["frame"] == 1000
    assert {"agent", "normalizers", "weights", "spaces"} <= policy.keys()
    best = state.load(paths.checkpoint(0, "best"))
    assert best["current_return"] == max(float(row["current_return"]) for row in rows(paths.session_df(0, "eval")))
    session.agent.load_weights(best["weights"])


def test_a_stop_saves_first_and_then_writes_the_last_row(make_spec: MakeSpec, paths: RunPaths) -> None:
    """A continued run must not see a row that is off the grid, nor take the weights of this row as the best ones."""
    session = stopped_at(500, make_spec(meta={"log_frequency": 300}, env={"max_frame": 10**9}))
    assert session.run(LocalSink(paths)).interrupted
    table = rows(paths.session_df(0))
    assert [row["frame"] for row in table] == ["300", "500"]
    bundle = state.load(paths.checkpoint(0, "last"))
    (policy,) = bundle["policies"]
    assert policy["clock"]["frame"] == 500
    assert policy["observers"]["recorder"]["table"]["frame"] == 300
    best = state.load(paths.checkpoint(0, "best"))
    assert float(table[1]["total_reward_ma"]) > float(table[0]["total_reward_ma"])
    assert best["frame"] == 300, "of a row that a continued run does not have"


def test_dev_fails_where_nothing_is_learned(make_spec: MakeSpec) -> None:
    Session(make_spec(), plan=Plan(mode="dev")).run()
    with pytest.raises(DevCheckError, match="before the first update"):
        Session(make_spec(env={"max_frame": 100}), plan=Plan(mode="dev")).run()
    session = Session(make_spec(), plan=Plan(mode="dev")).build()
    session.agent.update = lambda: Metrics(0.0, 0.0)
    session.agent.ready = lambda: True
    with pytest.raises(DevCheckError, match="no weight changed"):
        session.run()


def test_what_a_check_of_the_build_reports(make_spec: MakeSpec) -> None:
    """The line has parameters, memory and the time of a whole trial; it takes at most 3 s, even if training would begin late."""
    (line,) = check_builds([make_spec(env={"max_frame": 10**6}, meta={"max_session": 3})], Plan(jobs=2), "x.json")
    found = re.fullmatch(
        r"observation: vector of 4 numbers, MLPNet; ([\d,]+) parameters, rollouts (.*), "
        r"about ([\d:]+) for 1,000,000 frames × 3 sessions, 2 at a time \(([\d,]+) .*",
        line,
    )
    assert found
    assert int(found[1].replace(",", "")) == (4 + 1) * 16 + (16 + 1) * 2 + (4 + 1) * 16 + 16 + 1, "actor and critic"
    assert found[2].endswith("KiB")
    hours, minutes, seconds = map(int, ("0:0:" + found[3]).split(":")[-3:])
    assert hours * 3600 + minutes * 60 + seconds == pytest.approx(2 * 10**6 / int(found[4].replace(",", "")), rel=0.05, abs=1)


def test_the_estimated_time_of_a_limited_and_of_a_short_spec(make_spec: MakeSpec, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("slm_lab.experiment.run.build_report._MAX_SECONDS", 30.0)  # allows for a busy machine
    limited = make_spec(env={"max_frame": 10**9}, meta={"max_session": 3, "max_seconds": 60, "rigorous_eval": 1})
    short = load_spec({"agent": {"algorithm": {"name": "DQN"}}, "env": {"name": "tests.experiment.faulty_env:Slow-v0", "max_frame": 10**5}})
    first, second = check_builds([limited, short], Plan(jobs=2), "x.json")
    assert "about 2:00 " in first
    assert "without evaluation" in first
    assert "frames/s" in second, "updates begin after a batch, not after 1,000 steps of 5 ms"


def test_what_the_user_can_correct(make_spec: MakeSpec) -> None:
    """User errors: a device that does not exist, and the problems of several specs, all at once."""
    with pytest.raises(UserError, match="cuda device"):
        Session(make_spec(), plan=Plan(device="cuda:99")).build()
    wrong = make_spec(env={"name": "Pendulum-v1", "gravitas": 1}).model_copy(update={"name": "pendulum"})
    worse = make_spec(env={"name": "Pendulum-v1", "levitas": 1}).model_copy(update={"name": "other"})
    with pytest.raises(SpecError) as caught:
        check_builds([wrong, make_spec(), worse], Plan(), "specs.json")
    assert [problem.path for problem in caught.value.problems] == ["pendulum.env.gravitas", "other.env.levitas"]


def test_the_default_seed_is_0_and_a_session_runs_twice(make_spec: MakeSpec) -> None:
    """A second run of a Session, and a run of another Session with the same seed, must equal the first one."""
    session = Session(make_spec(env={"max_frame": 300})).build()
    assert type(session.spec.meta)().random_seed == 0
    rewards = [[row["total_reward"] for row in session.run().rows]]
    again = Session(session.spec)
    rewards += [[row["total_reward"] for row in again.run().rows] for _ in range(2)]
    assert rewards[0] == rewards[1] == rewards[2]


def test_a_stopped_evaluation_has_no_returns(make_spec: MakeSpec) -> None:
    """The episodes that end first are the shortest, so their mean would be a biased estimate."""
    session = Session(make_spec(meta={"rigorous_eval": 3}, env={"max_frame": 100})).build()
    session.train()
    assert len(session.learners[0].evaluate()) == 3
    session.context.stop.requested = True
    assert session.learners[0].evaluate() == []
    session.close()


def test_a_session_closes_its_env(make_spec: MakeSpec, monkeypatch: pytest.MonkeyPatch) -> None:
    session: Any = Session(make_spec()).build()
    closed: list[Env] = []
    monkeypatch.setattr(Env, "close", lambda env: closed.append(env))
    session.close()
    assert closed == [session.source.env]


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_gradient_that_is_not_finite_changes_no_weight(value: float, make_spec: MakeSpec, caplog: pytest.LogCaptureFixture) -> None:
    """Also in a Session with a separate net, such a step is skipped with one notice, and the other steps still learn."""
    session = Session(make_spec()).build()
    trainer = session.agent.algorithm.policy_trainer
    step, weights, skipped = trainer.step, [session.agent.weights()], []

    def poisoned() -> float:
        skipped.append(len(skipped) < 9)
        if skipped[-1]:
            trainer.flat.grad[3] = value
        norm = step()
        if skipped[-1]:
            weights.append(session.agent.weights())
        return float(norm)

    trainer.step = poisoned
    assert session.run().frame == 1000
    assert all(torch.equal(after[name], before) for after in weights for name, before in weights[0].items())
    assert not all(torch.equal(session.agent.weights()[name], before) for name, before in weights[0].items())
    assert session.agent.algorithm.skipped_steps == sum(skipped) == 9
    assert sum("not finite" in message for message in caplog.messages) == 1


# ---- state

NET = {"name": "MLPNet", "hid_layers": [16], "hid_layers_activation": "tanh"}
RNN = {"name": "RecurrentNet", "rnn_hidden_size": 8, "cell_type": "LSTM", "seq_len": 8}
PPO = {"name": "PPO", "time_horizon": 32, "minibatch_size": 32, "training_epoch": 1, "normalize_v_targets": True}
REPLAY = {"name": "PrioritizedReplay", "batch_size": 16, "max_size": 200}
FAMILIES: dict[str, tuple[str, dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "reinforce": ("CartPole-v1", {"name": "Reinforce", "training_frequency": 2}, {"name": "OnPolicyReplay"}, NET),
    "ppo": ("Pendulum-v1", PPO, {"name": "OnPolicyBatchReplay"}, {**NET, "log_std_init": 0.0}),
    "recurrent ppo": ("CartPole-v1", PPO, {"name": "OnPolicyBatchReplay"}, RNN),
    "dqn": (
        "CartPole-v1",
        {"name": "DQN", "training_frequency": 4, "training_start_step": 40},
        REPLAY,
        {**NET, "update_type": "polyak", "polyak_coef": 0.9},
    ),
    "sac": (
        "Pendulum-v1",
        {"name": "SoftActorCritic", "training_frequency": 4, "training_start_step": 40},
        {**REPLAY, "name": "Replay"},
        {**NET, "update_type": "polyak", "polyak_coef": 0.9},
    ),
    "sil": ("CartPole-v1", {"name": "SIL", "training_frequency": 20}, {"name": "OnPolicyBatchReplay", "max_size": 200}, NET),
}


def family_spec(name: str, seed: int) -> Spec:
    env, algorithm, memory, net = FAMILIES[name]
    normalize = {"normalize_obs": True, "normalize_reward": True}
    return Spec.model_validate(
        {
            "name": "small",
            "agent": {"name": name, "algorithm": algorithm, "memory": memory, "net": net},
            "env": {"name": env, "num_envs": 2, "max_frame": 400, "max_t": 50, **(normalize if "ppo" in name else {})},
            "meta": {"random_seed": seed, "log_frequency": 100, "save_replay": True, "rigorous_eval": 1, "eval_frequency": 200},
        }
    )


OF_THE_OTHER = ("/spec", "/source/env/episodes")
"""Parts of a bundle that depend on the Session that saves it, which has another seed and separate envs."""


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", FAMILIES)
def test_a_saved_state_is_loaded_whole(name: str, paths: RunPaths) -> None:
    """A new Session with another seed loads the state; the state that it saves then must equal the loaded one."""
    with closing(LocalSink(paths)) as sink:
        Session(family_spec(name, 1)).run(sink)
    bundle = state.load(paths.checkpoint(0, "last"))
    after = Session(family_spec(name, 2), sink=LocalSink(new_run(paths.root / "other", "small"))).build()
    try:
        after.begin()
        assert differing(bundle, {**state_dict(after), "done": True}), "a fresh Session has another state"
        load_session_state(after, bundle)
        after.begin()
        now = {**state_dict(after), "done": True}
        assert [path for path in differing(bundle, now) if not path.startswith(OF_THE_OTHER)] == []
        assert bundle["policies"][0]["agent"]["algorithm"], "there is something to compare"
    finally:
        after.close()


def test_the_best_weights_on_disk_may_be_newer(make_spec: MakeSpec, paths: RunPaths, caplog: pytest.LogCaptureFixture) -> None:
    """Only the header of the file is read; if it is unreadable, a notice says so and the value in the state is used."""
    spec, best = make_spec(), paths.checkpoint(0, "best")
    assert isinstance(best, Path)
    with closing(LocalSink(paths)) as sink:
        stopped_at(500, spec).run(sink)
    last = state.load(paths.checkpoint(0, "last"))["policies"][0]["observers"]["checkpointer"]["best_rank"]
    state.save(best, {**state.load(best), "current_return": 1000.0, "current_epi": 20})

    def best_rank() -> tuple[bool, float]:
        with closing(Session(spec, context=SessionContext(resumed=paths)).build()) as session:
            return session.learners[0].checkpointer.best_rank

    assert best_rank() == (True, 1000.0)
    assert not caplog.messages
    best.write_bytes(best.read_bytes()[:300])
    assert best_rank() == tuple(last) < (True, 1000.0)
    assert [str(best) in message for message in caplog.messages] == [True]


IMAGES: dict[str, Any] = {
    "name": "images",
    "agent": {
        "name": "PPO",
        "algorithm": {"name": "PPO", "time_horizon": 32, "minibatch_size": 32, "training_epoch": 2},
        "memory": {"name": "OnPolicyBatchReplay"},
        "net": {"name": "ConvNet", "conv_hid_layers": [[8, 8, 4], [8, 4, 2]], "fc_hid_layers": [32], "batch_norm": False},
    },
    "env": {"name": "ALE/Pong-v5", "num_envs": 2, "max_frame": 64},
    "meta": {"max_session": 1, "log_frequency": 64, "random_seed": 3},
}


@pytest.mark.slow
def test_convolutions_learn_in_several_threads_and_equal_numbers_give_equal_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Acting uses one thread, and learning one per core; meta.threads overrides this.

    With --jobs, learning uses one thread, as other runs may need the cores.
    """
    monkeypatch.setattr("slm_lab.experiment.session.build.cores", lambda: 2)
    monkeypatch.setattr("slm_lab.agent.build.MAX_THREADS", 8)
    weights, numbers = [], set()
    for _ in range(2):
        session = Session(Spec.model_validate(IMAGES)).build()
        agent = session.agent
        learn, act = agent.algorithm.learn, agent.policy.act

        def counted(*args: Any, name: str, of: Callable[..., Any]) -> Any:
            numbers.add((name, torch.get_num_threads()))
            return of(*args)

        monkeypatch.setattr(agent.algorithm, "learn", partial(counted, name="learn", of=learn))
        monkeypatch.setattr(agent.policy, "act", partial(counted, name="act", of=act))
        session.run()
        weights.append(agent.weights())
        assert session.parts.chosen_settings["threads"] == 2
    assert numbers == {("learn", 2), ("act", 1)}
    assert all(torch.equal(value, weights[1][name]) for name, value in weights[0].items())
    assert Session(Spec.model_validate(IMAGES), plan=Plan(jobs=1)).build().parts.chosen_settings["threads"] == 1
    three = {**IMAGES, "meta": {**IMAGES["meta"], "threads": 3}}
    assert Session(Spec.model_validate(three)).build().parts.chosen_settings["threads"] == 3


def test_fully_connected_layers_learn_in_one_thread(make_spec: MakeSpec, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("slm_lab.experiment.session.build.cores", lambda: 4)
    assert Session(make_spec()).build().parts.chosen_settings["threads"] == 1
