"""Tests of meta.save_replay, and of the check that all replay memories together fit into the machine's memory."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from slm_lab.agent.replay import replay as replay_module
from slm_lab.agent.replay.replay import Replay
from slm_lab.experiment.files import bundle as state
from slm_lab.experiment.files.paths import new_run
from slm_lab.experiment.files.sink import LocalSink, MemorySink
from slm_lab.experiment.plan import Plan
from slm_lab.experiment.run.engine import check_builds
from slm_lab.experiment.run.trial import Trial
from slm_lab.experiment.session.restore import load_session_state
from slm_lab.experiment.session.session import Session
from slm_lab.spec.models.spec import Spec
from slm_lab.spec.report import SpecError

SpecBody = Callable[..., dict[str, Any]]
DQN = {"algorithm": {"name": "DQN", "training_frequency": 4, "training_start_step": 100}}
SIL = {"algorithm": {"name": "SIL", "training_frequency": 20}}


def off_policy(spec_body: SpecBody, agent: dict[str, Any] = DQN, memory: dict[str, Any] | None = None, **meta: Any) -> Spec:
    body = spec_body(env={"max_frame": 400}, meta=meta)
    replay = {"name": "Replay", "batch_size": 8, "max_size": 200} if agent is DQN else {"name": "OnPolicyBatchReplay", "max_size": 200}
    body["agent"] |= agent | {"memory": replay | (memory or {})}
    return Spec.model_validate({"name": "small", **body})


def saved(spec: Spec, folder: Path) -> tuple[Session, dict[str, Any]]:
    """Run a Session, and return it with its last checkpoint."""
    paths = new_run(folder, spec.name)
    session = Session(spec)
    session.run(LocalSink(paths))
    return session, state.load(paths.checkpoint(0, "last"))


def resumed(spec: Spec, bundle: dict[str, Any]) -> Session:
    """Return a new Session that continues from a checkpoint."""
    session = Session(spec, sink=MemorySink()).build()
    load_session_state(session, bundle)
    session.begin()
    session.learners[0].frames = 10**9
    return session


def step(session: Session) -> None:
    """Act for one step without training."""
    experience = next(iter(session.source or ()))
    session.agent.observe(*experience.transition)


def test_a_run_that_continues_without_its_replay_collects_a_batch_first(spec_body: SpecBody, tmp_path: Path) -> None:
    agent = {"algorithm": {**DQN["algorithm"], "training_frequency": 1, "training_start_step": 1}}
    spec = off_policy(spec_body, agent, {"name": "Replay", "batch_size": 8, "max_size": 200})
    _, bundle = saved(spec, tmp_path)
    after = resumed(spec, bundle)
    try:
        replay, ready = after.agent.replay, []
        assert isinstance(replay, Replay)
        while replay.seen < 12:
            step(after)
            ready.append((replay.seen, after.agent.ready()))
        assert next(seen for seen, is_ready in ready if is_ready) in range(8, 8 + spec.env.num_envs)
    finally:
        after.close()


def test_without_it_the_memory_fills_again_before_training(spec_body: SpecBody, tmp_path: Path) -> None:
    spec = off_policy(spec_body)
    _, bundle = saved(spec, tmp_path)
    assert bundle["policies"][0]["replay"] is None
    after = resumed(spec, bundle)
    try:
        replay = after.agent.replay
        assert isinstance(replay, Replay)
        while replay.seen < 100:
            assert not after.agent.ready()
            step(after)
        assert after.agent.ready()
    finally:
        after.close()


def test_on_policy_there_is_nothing_to_save(make_spec: Callable[..., Spec], tmp_path: Path) -> None:
    session, bundle = saved(make_spec(env={"max_frame": 200}, meta={"save_replay": True}), tmp_path)
    assert session.agent.replay is None
    assert bundle["policies"][0]["replay"] is None


@pytest.mark.parametrize("agent", [DQN, SIL])
def test_memories_of_sessions_that_run_at_once_must_fit(
    spec_body: SpecBody, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, agent: dict[str, Any]
) -> None:
    spec = off_policy(spec_body, agent, {"max_size": 10**6}, max_session=4, random_seed=1)
    spec = spec.model_copy(update={"env": spec.env.model_copy(update={"max_frame": 10**6})})
    session = Session(spec, plan=Plan(jobs=1)).build()
    session.close()
    one = session.agent.replay.nbytes
    monkeypatch.setattr(replay_module, "memory_bytes", lambda: 2 * one)
    check_builds([spec], Plan(jobs=2), "x.json")
    with pytest.raises(SpecError) as caught:
        check_builds([spec], Plan(jobs=3), "x.json")
    (problem,) = caught.value.problems
    assert problem.path == "agent.memory.max_size"
    assert problem.message.startswith(f"1,000,000 transitions take 3 at once of {one / 2**30:,.1f} GiB each; this machine has")
    assert "at most 600,000 would fit; or run fewer sessions at a time (--jobs)" in problem.message
    with pytest.raises(SpecError, match="3 at once"):
        Session(spec, plan=Plan(jobs=3)).build()


def test_sessions_that_train_one_net_share_the_frames(spec_body: SpecBody, monkeypatch: pytest.MonkeyPatch) -> None:
    """The check reserves the memory that all Sessions need at once: a replay memory each, sized for the Session's share of the frames."""
    spec = off_policy(spec_body, DQN, {"max_size": 10**6}, max_session=4, random_seed=1, distributed="shared")
    spec = spec.model_copy(update={"env": spec.env.model_copy(update={"max_frame": 10**6})})
    alone = Session(spec).build()
    alone.close()
    needed = 4 * replay_module.replay_bytes(250_000, alone.parts.env_info)
    monkeypatch.setattr(replay_module, "memory_bytes", lambda: needed)
    check_builds([spec], Plan(jobs=1), "x.json")
    monkeypatch.setattr(replay_module, "memory_bytes", lambda: needed - 1)
    with pytest.raises(SpecError, match=r"250,000 transitions take 4 at once .*; or use fewer sessions \(meta\.max_session\)"):
        check_builds([spec], Plan(jobs=1), "x.json")


def test_replay_memories_of_the_policies_of_the_sampler_must_fit_together(spec_body: SpecBody, monkeypatch: pytest.MonkeyPatch) -> None:
    sampler = {"async_rl": False, "serial_mode": True, "num_workers": 1, "num_policies": 2}
    spec = off_policy(spec_body, DQN, {"max_size": 10**6}, random_seed=1, sampler=sampler)
    spec = spec.model_copy(update={"env": spec.env.model_copy(update={"max_frame": 10**6})})
    session = Session(spec).build()
    session.close()
    needed = sum(learner.agent.replay.nbytes for learner in session.learners)
    monkeypatch.setattr(replay_module, "memory_bytes", lambda: needed)
    check_builds([spec], Plan(jobs=1), "x.json")
    monkeypatch.setattr(replay_module, "memory_bytes", lambda: needed - 1)
    with pytest.raises(SpecError, match="transitions take 2 at once") as caught:
        check_builds([spec], Plan(jobs=1), "x.json")
    assert caught.value.problems[0].path == "agent.memory.max_size"


def test_a_trial_whose_memory_does_not_fit_writes_nothing(spec_body: SpecBody, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replay_module, "memory_bytes", lambda: 1000)
    with pytest.raises(SpecError, match=r"agent\.memory\.max_size: 200 transitions take 0\.0 GiB"):
        Trial(off_policy(spec_body), tmp_path).run()
    assert not list(tmp_path.iterdir())
