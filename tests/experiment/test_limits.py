"""Tests of meta.max_seconds, meta.eval_deterministic and meta.track_info, and of rewards that are not finite."""

from __future__ import annotations

import itertools
import json
import math
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from gymnasium.envs.classic_control import CartPoleEnv

from slm_lab.cli import main
from slm_lab.experiment.files import bundle as state
from slm_lab.experiment.plan import Plan, TrialFailed
from slm_lab.experiment.report.analyze import analyze_trial
from slm_lab.experiment.report.baseline import cache_folder, known_baseline, measure_baseline
from slm_lab.experiment.report.report_data import report_data
from slm_lab.experiment.run.engine import check_builds
from slm_lab.experiment.run.trial import Trial
from slm_lab.experiment.session.session import Session
from slm_lab.experiment.training.observers.rows import Recorder
from slm_lab.lib.clock import Clock
from slm_lab.lib.records import Episode
from slm_lab.spec.models.env import EnvSpec
from slm_lab.spec.models.spec import Spec
from slm_lab.spec.report import SpecError
from tests.experiment.test_observers import Rows, ScheduledValues

MakeSpec = Callable[..., Spec]


class BadReward(CartPoleEnv):
    """CartPole whose 60th step has a reward that is not finite."""

    def __init__(self, reward: float = math.nan, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.reward, self.count = reward, 0

    def step(self, action: Any) -> Any:
        self.count += 1
        obs, reward, terminated, truncated, info = super().step(action)
        return obs, self.reward if self.count == 60 else reward, terminated, truncated, info


gym.register("BadReward-v0", entry_point=BadReward, max_episode_steps=500)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("sessions", [1, 2])
def test_max_seconds_ends_a_session_saved_and_done(
    sessions: int, make_spec: MakeSpec, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    spec = make_spec(env={"max_frame": 10**8}, meta={"max_seconds": 0.5, "max_session": sessions})
    begin = time.perf_counter()
    result = Trial(spec, tmp_path).run()
    assert time.perf_counter() - begin < 60
    assert (result["status"], result["sessions"]) == ("done", sessions)
    assert "ended after 0.5 s of training (meta.max_seconds), before 100,000,000 frames" in capsys.readouterr().out.replace("\n", " ")
    last = result.train.groupby("session").last()
    assert last.wall_t.between(0.4, 30.0).all()  # a busy machine needs more than 0.5 s
    for index in range(sessions):
        assert state.load(result.paths.checkpoint(index, "last"))["policies"][0]["clock"]["frame"] == last.frame[index] < 10**8
    assert analyze_trial(spec, result.paths)["status"] == "done", "analysed again, when nobody remembers how it ended"


def test_the_last_row_reaches_max_seconds(make_spec: MakeSpec, monkeypatch: pytest.MonkeyPatch) -> None:
    """The clock advances by 0.01 s at each reading; the row of the last step must not be older than the time limit found in that step."""
    for hundredths in range(50, 60):
        reads = itertools.count(1)
        monkeypatch.setattr(Clock, "wall_t", property(lambda clock, reads=reads: next(reads) / 100))
        spec = make_spec(env={"num_envs": 1, "max_frame": 10**6}, meta={"max_seconds": hundredths / 100, "log_frequency": 1})
        assert float(Session(spec).run().rows[-1]["wall_t"]) >= hundredths / 100


def test_max_seconds_says_nothing_if_frames_end_first(make_spec: MakeSpec, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Trial(make_spec(meta={"max_seconds": 1000}), tmp_path).run()
    assert "meta.max_seconds" not in capsys.readouterr().out


@pytest.mark.parametrize("deterministic", [False, True])
def test_evaluation_takes_the_mode_if_asked(deterministic: bool, make_spec: MakeSpec) -> None:

    session = Session(make_spec(meta={"rigorous_eval": 2, "eval_deterministic": deterministic})).build()
    learner = session.learners[0]
    learner.stop, learner.beat = session.context.stop, session.context.beat
    calls: list[bool] = []
    policy_class = type(learner.agent.policy)
    act = policy_class.act

    def recorded(self: Any, obs_N: Any, state_N: Any = None, deterministic: bool = False) -> Any:
        calls.append(deterministic)
        return act(self, obs_N, state_N, deterministic)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(policy_class, "act", recorded)
        learner.evaluate()
    session.close()
    assert set(calls) == {deterministic}


class Informed(Episode):
    """Episode with numbers from its env's info."""

    info: dict[str, float] = {}


def episode(**info: float) -> Episode:
    one = Informed(0, 1.0, 9)
    one.info = info
    return one


def test_columns_of_the_envs_info_are_means_over_the_last_100_episodes(caplog: pytest.LogCaptureFixture) -> None:
    rows, clock = Rows(), Clock()
    recorder = Recorder(clock, ScheduledValues(), 10, rows, ("frame", "loss", "info_success", "info_never"), infos=["success", "never"])
    for index in range(150):
        clock.tick(1)
        recorder.on_step([episode(success=float(index))] if index % 2 else [episode()])
    recorder.on_end()
    assert rows[0]["info_success"] == np.mean([1, 3, 5, 7, 9])
    assert rows[-1]["info_success"] == np.mean([index for index in range(50, 150) if index % 2])
    assert {row["info_never"] for row in rows} == {None}
    assert [message for message in caplog.messages if "'never'" in message] == caplog.messages != []
    other = Recorder(clock, ScheduledValues(), 10, Rows(), infos=["success", "never"])
    other.load_state_dict(recorder.state_dict())
    assert other.infos == recorder.infos


def test_info_is_in_tables_and_graphs(make_spec: MakeSpec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from slm_lab.experiment.session import build as module

    make_env = module.make_env

    def informed(*args: Any, track_info: tuple[str, ...] = (), **kwargs: Any) -> Any:
        env = make_env(*args, **kwargs)
        step = env.step

        def with_info(action_N: np.ndarray) -> Any:
            made = step(action_N)
            return made._replace(episodes=[episode(**dict.fromkeys(track_info, float(one.length))) for one in made.episodes])

        monkeypatch.setattr(env, "step", with_info)
        return env

    monkeypatch.setattr(module, "make_env", informed)
    result = Trial(make_spec(meta={"track_info": ["steps"]}), tmp_path).run()
    assert result.train.columns[-1] == "info_steps"
    assert result.train.info_steps.iloc[-1] > 5
    panels = report_data(result.run)["panels"]
    assert ("Other diagnostics", "steps") in [(panel["group"], panel["title"]) for panel in panels]


@pytest.mark.parametrize("sessions", [1, 2])
def test_a_failure_in_training_names_frame_and_env(
    sessions: int, spec_body: Callable[..., dict[str, Any]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file, name = tmp_path / "spec.json", "tests.experiment.fatal_env:Fatal-v0"
    body = spec_body(env={"name": name, "does": "ValueError", "after": 60}, meta={"max_session": sessions})
    file.write_text(json.dumps({"small": body}))
    assert main([str(file), "small", "--data-dir", str(tmp_path / "data")]) == 1
    (folder,) = (tmp_path / "data").iterdir()
    metrics = json.loads((folder / "small_t0_trial_metrics_scalar.json").read_text(), parse_constant=pytest.fail)
    assert metrics["failures"]["0"] == f"ValueError: the reason (at frame 236 of {name})"
    assert f"(at frame 236 of {name})" in capsys.readouterr().out.replace("\n", "")


@pytest.mark.sampled(1)
@pytest.mark.parametrize(("reward", "sessions"), [(math.nan, 1), (-math.inf, 2)])
def test_a_reward_that_is_not_finite_fails_the_session(
    reward: float, sessions: int, make_spec: MakeSpec, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The error names the frame and the env, without a traceback; no metric is computed from such a reward."""
    name = f"{__name__}:BadReward-v0"
    spec = make_spec(env={"name": name, "backend": "sync", "reward": reward}, meta={"max_session": sessions})
    with pytest.raises(TrialFailed) as failed:
        Trial(spec, tmp_path).run()
    causes = failed.value.metrics["failures"]
    assert len(causes) == sessions
    assert all(re.fullmatch(rf"{name}, env 0, step 60: .*{reward};.* \(at frame 240\)", cause) for cause in causes.values())
    assert failed.value.metrics["final_return"] is None
    printed = capsys.readouterr().out
    assert "open " not in printed
    assert "baseline" not in printed


def test_a_reward_that_is_not_finite_in_a_rollout_worker(make_spec: MakeSpec, tmp_path: Path) -> None:
    """The error is one line, as in the Session's own process."""
    env = {"name": f"{__name__}:BadReward-v0", "backend": "sync"}
    with pytest.raises(TrialFailed) as failed:
        Trial(make_spec(env=env, meta={"sampler": {"num_workers": 1, "num_envs_per_worker": 4, "async_rl": False}}), tmp_path).run()
    assert re.fullmatch(r".*, env 0, step 60: .* nan;.* \(at frame .*\)", failed.value.metrics["failures"]["0"])


def test_an_env_that_fails_while_its_speed_is_measured_is_an_error(make_spec: MakeSpec) -> None:
    with pytest.raises(SpecError, match=r"env\.name: .*, env 0, step 60: .* nan;"):
        check_builds([make_spec(env={"name": f"{__name__}:BadReward-v0", "backend": "sync"})], Plan(), "x.json")


@pytest.mark.parametrize("reward", [math.nan, math.inf])
def test_a_baseline_that_is_not_finite_is_not_cached(reward: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    spec = EnvSpec(name=f"{__name__}:BadReward-v0", max_frame=1, backend="sync", reward=reward)  # type: ignore[call-arg]
    assert measure_baseline(spec) is None
    assert not cache_folder().exists()
    assert known_baseline(spec) is None
