"""Tests of recorded episodes: the file that enjoy --record writes, and the files that meta.demonstrations reads or refuses."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest

import slm_lab
from slm_lab.cli import main
from slm_lab.env.spaces import space_to_dict
from slm_lab.experiment.session.resume import find_run, read_run
from slm_lab.experiment.training.demonstrations import _compatible_actions, load_demonstrations, read, write
from slm_lab.experiment.training.minari_data import encode_actions
from slm_lab.lib.demonstrations import Demonstrations, EpisodeRecorder
from slm_lab.lib.records import ActionSpace, VecStep
from slm_lab.spec.load.loader import dump_spec
from slm_lab.spec.models.spec import Spec
from slm_lab.spec.report import SpecError
from slm_lab.testing.spec_contract import SpecContract
from tests.agent.scripted import balance, played, swing_up
from tests.experiment.test_load import trained


def test_numbers_that_are_not_finite_and_actions_outside_of_the_space_are_refused(tmp_path: Path) -> None:
    file = tmp_path / "file.npz"
    data = saved(file, "CartPole-v1", balance, 1)
    header = {"env": "CartPole-v1", "spaces": played("CartPole-v1", balance, 1)[1].info.spaces}
    obs_K, last_obs_E, action_K, reward_K = data.obs_K.copy(), data.last_obs_E.copy(), data.action_K.copy(), data.reward_K.copy()
    obs_K[3, 2], last_obs_E[0, 1], action_K[4], reward_K[5] = np.nan, np.inf, 7, -np.inf
    write(file, replace(data, obs_K=obs_K), header)
    assert problem(bc(file)) == f"{file}: obs_K[3, 2] is nan; expected a finite number"
    write(file, replace(data, reward_K=reward_K), header)
    assert problem(bc(file)) == f"{file}: reward_K[5] is -inf; expected a finite number"
    write(file, replace(data, action_K=action_K), header)
    assert problem(bc(file)) == f"{file}: the action of transition 4 is 7; CartPole-v1 allows 0 to 1"
    write(file, replace(data, last_obs_E=last_obs_E), header)
    assert problem(bc(file)) == f"{file}: last_obs_E[0, 1] is inf; expected a finite number"
    slm_lab.Session(bc(file, CARTPOLE | {"clip_obs": 10.0})).build()


CARTPOLE = {"name": "CartPole-v1", "max_frame": 400}


def saved(path: Path, name: str, act: Any, episodes: int = 4, **keys: Any) -> Demonstrations:
    data, env = played(name, act, episodes, **keys)
    write(path, data, {"env": name, "spaces": env.info.spaces})
    return data


def bc(path: Path | str, env: dict[str, Any] = CARTPOLE, algorithm: dict[str, Any] | None = None, **meta: Any) -> Spec:
    net = {"name": "MLPNet", "hid_layers": [32], "hid_layers_activation": "tanh", "optim_spec": {"name": "Adam", "lr": 0.01}}
    agent = {"algorithm": {"name": "BC", **(algorithm or {})}, "net": net, "memory": {"name": "Replay", "batch_size": 64}}
    raw = {"agent": agent, "env": env, "meta": {"demonstrations": str(path), "eval_episodes": 0, "log_frequency": 100, **meta}}
    return slm_lab.load_spec({"bc": raw}, "bc")


# ---- the recorder


def test_a_file_holds_the_steps_of_the_env_before_normalisation(tmp_path: Path) -> None:
    """Each row must obey the pendulum's equations, including the last row of an episode, after which the env was reset."""
    paths = trained(tmp_path, {"name": "Pendulum-v1", "max_t": 20, "normalize_obs": True})
    file = tmp_path / "episodes.npz"
    assert main([f"enjoy@{paths.root}", "--record", str(file), "--episodes", "3"]) == 0
    data, header = read(file)
    assert (header["env"], header["episodes"], header["transitions"], header["spec"]) == ("Pendulum-v1", 3, 60, "small")
    assert len(header["digest"]) == 16
    assert data.end_E.tolist() == [19, 39, 59]
    assert data.truncated_K.sum() == 3
    assert not data.terminated_K.any()
    env: Any = gym.make("Pendulum-v1").unwrapped
    env.reset()
    _, _, _, _, step = data.steps(0, 60)
    for obs, action, reward, after in zip(data.obs_K, data.action_K, data.reward_K, step.last_obs_N, strict=True):
        env.state = np.array([np.arctan2(obs[1], obs[0]), obs[2]])
        expected, cost, *_ = env.step(2.0 * action)
        np.testing.assert_allclose(after, expected, atol=1e-4)
        np.testing.assert_allclose(reward, cost, rtol=1e-3, atol=1e-4)
    assert (np.abs(data.action_K) <= 1.0).all()


def test_a_file_is_not_overwritten_unless_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    paths = trained(tmp_path, {"name": "CartPole-v1"})
    file = tmp_path / "episodes.npz"
    record = [f"enjoy@{paths.root}", "--episodes", "2", "--record", str(file)]
    file.write_text("mine")
    assert main(record) == 2
    assert file.read_text() == "mine"
    assert f"--record {file} exists; choose another name, or add --replace to overwrite it" in capsys.readouterr().err
    assert main([*record, "--replace"]) == 0
    assert read(file)[1]["episodes"] == 2
    assert main([f"enjoy@{paths.root}", "--replace"]) == 2
    assert "--replace has no effect without --record PATH" in capsys.readouterr().err
    assert main([*record[:-1], str(tmp_path)]) == 2
    (link := tmp_path / "link.npz").symlink_to(file)
    os.mkfifo(fifo := tmp_path / "fifo.npz")
    for special in (link, fifo):
        assert main([*record[:-1], str(special), "--replace"]) == 2
        assert f"--record {special} is a symbolic link or a special file" in capsys.readouterr().err
    assert link.is_symlink()
    link.unlink(), fifo.unlink()
    assert main([*record[:-1], str(tmp_path / "no" / "file.npz")]) == 2
    assert sorted(path.name for path in tmp_path.glob("*.npz")) == ["episodes.npz"]  # no temporary file is left


def test_steps_have_the_last_observations_of_their_episodes() -> None:
    """The steps of two episodes, of 2 and 3 steps, are read whole and in pieces."""
    obs = np.arange(5, dtype=np.float32)[:, None]
    flags = np.array([[0, 0], [1, 0], [0, 0], [0, 0], [0, 1]], np.bool_)
    data = Demonstrations(obs, np.arange(5), np.ones(5, np.float32), flags[:, 0], flags[:, 1], np.array([[10.0], [20.0]], np.float32))
    assert data.first_K.tolist() == [True, False, True, False, False]
    assert data.return_E.tolist() == [2.0, 3.0]
    for size in (1, 2, 3, 5):
        parts = [data.steps(begin, min(begin + size, 5)) for begin in range(0, 5, size)]
        assert np.concatenate([step.last_obs_N for *_, step in parts]).ravel().tolist() == [1.0, 10.0, 3.0, 4.0, 20.0]
        assert np.concatenate([first for _, first, *_ in parts]).tolist() == data.first_K.tolist()


# ---- the reader


def problem(spec: Spec) -> str:
    with pytest.raises(SpecError) as caught:
        slm_lab.Session(spec).build()
    (found,) = caught.value.problems
    assert found.path == "meta.demonstrations"
    return found.message


def test_demonstrations_of_another_env_are_refused_with_both_ids(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file, where = tmp_path / "cartpole.npz", tmp_path / "spec.json"
    saved(file, "CartPole-v1", balance, 1)
    body = {"acrobot": {"agent": {"algorithm": {"name": "BC"}}, "env": {"name": "Acrobot-v1", "max_frame": 100}}}
    where.write_text(json.dumps({"acrobot": body["acrobot"] | {"meta": {"demonstrations": str(file)}}}))
    assert main([str(where), "acrobot", "train", "--data-dir", str(tmp_path / "data")]) == 2
    shown = " ".join(capsys.readouterr().err.split())
    assert f"meta.demonstrations: {file} was recorded in CartPole-v1; env.name is Acrobot-v1" in shown


@pytest.mark.parametrize("inside", [False, True], ids=["plain", "in a dict"])
def test_other_bounds_of_actions_are_refused(inside: bool, tmp_path: Path) -> None:
    """The numbers in a file are actions scaled to the bounds of the env in which they were recorded."""
    spec, file = bc(tmp_path / "file.npz", {"name": "Pendulum-v1", "max_frame": 10}), tmp_path / "file.npz"
    data, env = played("Pendulum-v1", swing_up, 1)
    info, wide = env.info, gym.spaces.Box(-4.0, 4.0, (1,))
    assert info.spaces is not None
    if inside:  # a hybrid space
        parts = {"turn": gym.spaces.Discrete(2), "force": gym.spaces.Box(-2.0, 2.0, (1,))}
        info = replace(info, spaces=info.spaces | {"action": space_to_dict(gym.spaces.Dict(parts))})
        wide = gym.spaces.Dict(parts | {"force": wide})
    write(file, data, {"env": "Pendulum-v1", "spaces": info.spaces})
    assert len(load_demonstrations(spec, info)) == len(data)
    write(file, data, {"env": "Pendulum-v1", "spaces": info.spaces | {"action": space_to_dict(wide)}})
    with pytest.raises(SpecError, match=r"has actions .*4\.0.*; those of Pendulum-v1 are .*2\.0"):
        load_demonstrations(spec, info)


def test_bounds_that_count_as_infinite_are_equal() -> None:
    """Actions are not scaled to bounds beyond ±1e30."""
    spaces = [gym.spaces.Tuple([gym.spaces.Discrete(2), gym.spaces.Box(-high, high, (1,))]) for high in (3e38, np.inf, 2.0)]
    assert _compatible_actions(spaces[0], spaces[1])
    assert not _compatible_actions(spaces[0], spaces[2])


def test_recorded_actions_with_bounds_are_clipped() -> None:
    """The env clips the continuous components, which are the last ones of a hybrid action."""
    hybrid = ActionSpace("hybrid", (3, 2), dim=5, bits=1)
    no, yes, obs = np.zeros(1, np.bool_), np.ones(1, np.bool_), np.zeros((1, 2), np.float32)
    step = VecStep(np.zeros(1, np.float32), yes, no, obs, obs, yes, yes, [])
    for space, recorded in ((hybrid, [2, 1, 1, -1, 0.5]), (replace(hybrid, bounded=False), [2, 1, 1, -1.5, 0.5])):
        recorder = EpisodeRecorder(1, space)
        action_N = np.array([[2, 1, 1, -1.5, 0.5]], np.float32)
        recorder.add(obs, action_N, step, yes)
        assert recorder.episodes[0][0].action.tolist() == recorded
        assert action_N[0, 3] == -1.5


def test_actions_of_minari_outside_of_the_bounds_are_clipped() -> None:
    """The second component has only one value."""
    space = gym.spaces.Box(np.array([-2.0, 3.0, -np.inf], np.float32), np.array([2.0, 3.0, np.inf], np.float32))
    actions_K = np.array([[5.0, 3.0, 7.0], [-1.0, 4.0, -7.0]])
    assert encode_actions(space, actions_K).tolist() == [[1.0, 0.0, 7.0], [-0.5, 0.0, -7.0]]


def test_other_spaces_and_files_that_cannot_be_read_are_refused(tmp_path: Path) -> None:
    file = tmp_path / "file.npz"
    data = saved(file, "CartPole-v1", balance, 1)
    read_env = played("CartPole-v1", balance, 1)[1].info.spaces
    assert read_env is not None
    assert problem(bc(tmp_path / "none.npz")) == f"{tmp_path / 'none.npz'}: No such file or directory"
    write(file, data, {"env": "CartPole-v1", "spaces": read_env | {"action": {"type": "Discrete", "n": 3, "start": 0, "dtype": "int64"}}})
    assert problem(bc(file)) == f"{file} has actions Discrete(3); those of CartPole-v1 are Discrete(2)"
    write(file, replace(data, last_obs_E=data.last_obs_E[:0]), {"env": "CartPole-v1", "spaces": read_env})
    assert problem(bc(file)) == f"{file} is damaged: its episodes are not complete"
    never = np.zeros(len(data), np.bool_)
    write(file, replace(data, terminated_K=never, truncated_K=never, last_obs_E=data.last_obs_E[:0]), {"env": None, "spaces": read_env})
    assert problem(bc(file)) == f"{file} is damaged: its episodes are not complete"
    file.write_bytes(file.read_bytes()[:300])
    assert "is damaged, or is not a data set of enjoy --record" in problem(bc(file))
    file.write_text("hello")
    assert "is not a data set of enjoy --record" in problem(bc(file))
    assert "pickle" not in problem(bc(file))


def test_a_key_without_its_algorithm_or_an_algorithm_without_its_key(tmp_path: Path) -> None:
    def found(algorithm: dict[str, Any], env: dict[str, Any] | None = None, demonstrations: str | None = None, **agent: Any) -> set[str]:
        meta = {} if demonstrations is None else {"demonstrations": demonstrations}
        with pytest.raises(SpecError) as caught:
            slm_lab.load_spec({"a": {"agent": {"algorithm": algorithm, **agent}, "env": CARTPOLE | (env or {}), "meta": meta}}, "a")
        return {one.path for one in caught.value.problems}

    assert found({"name": "BC"}) == {"meta.demonstrations"}
    assert found({"name": "PPO"}, demonstrations="x.npz") == {"meta.demonstrations"}
    dqn = {"name": "DQN"}
    assert found(dqn, memory={"name": "PrioritizedReplay"}, demonstrations="x.npz") == {"agent.memory.name"}
    fraction = "agent.memory.demonstration_fraction"
    for share in (0.0, 1.0):
        assert found(dqn, memory={"name": "Replay", "demonstration_fraction": share}, demonstrations="x.npz") == {fraction}
    assert found(dqn, memory={"name": "Replay", "demonstration_fraction": 0.5}) == {fraction}
    for name, (key, value) in product(("BC", "IQL"), {"demonstration_fraction": 0.5, "max_size": 5000, "use_cer": True}.items()):
        assert found({"name": name}, memory={"name": "Replay", key: value}, demonstrations="x.npz") == {f"agent.memory.{key}"}
    assert found(dqn, net={"name": "RecurrentNet"}, demonstrations="x.npz") == {"agent.net.name"}
    assert found({"name": "BC"}, {"normalize_reward": True}, demonstrations="x.npz") == {"env.normalize_reward"}


def test_rewards_and_observations_are_transformed_as_the_spec_says(tmp_path: Path) -> None:
    file = tmp_path / "pendulum.npz"
    raw = saved(file, "Pendulum-v1", swing_up, 1)
    env = {"name": "Pendulum-v1", "max_frame": 10, "reward_scale": 0.5, "clip_reward": [-1.0, 1.0], "normalize_obs": True}
    session = slm_lab.Session(bc(file, env)).build()
    memory = session.agent.algorithm.memory
    np.testing.assert_allclose(memory.columns["reward"][: len(raw)], np.maximum(0.5 * raw.reward_K, -1.0), rtol=1e-6)
    normal = (raw.obs_K - raw.obs_K.mean(0)) / np.sqrt(raw.obs_K.var(0) + 1e-8)
    drawn = memory.sample()
    np.testing.assert_allclose(drawn.obs_B, np.clip(normal, -10, 10)[drawn.row_B], atol=1e-4)
    statistics = session.learners[0].normalizers.state_dict()["obs_stats"]
    np.testing.assert_allclose(statistics["mean"], raw.obs_K.mean(0), atol=1e-6)
    session.close()


def test_loaded_statistics_normalise_the_recorded_observations_too(tmp_path: Path) -> None:
    """The statistics are loaded (here by meta.init_from) after the recordings have been read; policy and batches must use the same ones."""
    files = {"first": swing_up, "second": lambda obs: np.zeros((len(obs), 1), np.float32)}
    raw, other = (saved(tmp_path / name, "Pendulum-v1", act, 1) for name, act in files.items())
    env = {"name": "Pendulum-v1", "max_frame": 10, "normalize_obs": True}
    trained_on_other = slm_lab.Trial(bc(tmp_path / "second", env, max_session=1), data_dir=tmp_path / "data").run()
    session = slm_lab.Session(bc(tmp_path / "first", env, init_from=str(trained_on_other.paths.root)))
    session.run()
    drawn, spread = session.agent.algorithm.memory.sample(), np.sqrt(other.obs_K.var(0) + 1e-8)
    expected = np.clip((raw.obs_K - other.obs_K.mean(0)) / spread, -10, 10)
    np.testing.assert_allclose(drawn.obs_B, expected[drawn.row_B], atol=1e-3)


@pytest.mark.parametrize("algorithm", ["BC", "SoftActorCritic"])
def test_recorded_observations_are_clipped(algorithm: str, tmp_path: Path) -> None:
    saved(tmp_path / "pendulum.npz", "Pendulum-v1", swing_up, 1)
    agent = {"algorithm": {"name": algorithm}, "memory": {"name": "Replay", "batch_size": 16}}
    meta = {"demonstrations": str(tmp_path / "pendulum.npz"), "eval_episodes": 0}
    body = {"agent": agent, "env": {"name": "Pendulum-v1", "max_frame": 10_000, "clip_obs": 0.5}, "meta": meta}
    session = slm_lab.Session(slm_lab.load_spec({"clipped": body}, "clipped")).build()
    memory = session.agent.algorithm.memory
    drawn = (memory.demonstrations or memory).sample()
    assert drawn.obs_B.abs().max() == drawn.next_obs_B.abs().max() == 0.5
    session.close()


# ---- behaviour cloning in a Session


def test_recorded_and_own_observations_are_normalised_alike(tmp_path: Path) -> None:
    file = tmp_path / "pendulum.npz"
    raw = saved(file, "Pendulum-v1", swing_up, 1)
    agent = {"algorithm": {"name": "SoftActorCritic", "training_start_step": 40}, "memory": {"name": "Replay", "batch_size": 16}}
    env = {"name": "Pendulum-v1", "max_frame": 100, "normalize_obs": True, "reward_scale": 0.1}
    body = {"agent": agent, "env": env, "meta": {"demonstrations": str(file), "eval_episodes": 0}}
    session = slm_lab.Session(slm_lab.load_spec({"sac": body}, "sac")).build()
    session.run()
    memory, normalizer = session.agent.algorithm.memory, session.learners[0].normalizers.obs
    np.testing.assert_array_equal(memory.demonstrations.store.obs[: len(raw)], raw.obs_K)
    assert memory.demonstrations.obs_normalizer is memory.obs_normalizer is normalizer
    assert normalizer.stats.count == 101, "own observations alone"
    drawn = memory.demonstrations.sample()
    np.testing.assert_allclose(drawn.reward_B, 0.1 * raw.reward_K[drawn.row_B], rtol=1e-6)


def test_a_run_counts_gradient_steps_as_frames_and_plays_as_well_as_the_recorded_agent(tmp_path: Path) -> None:
    file = tmp_path / "cartpole.npz"
    recorded = saved(file, "CartPole-v1", balance, 10)
    session = slm_lab.Session(bc(file, eval_episodes=4))
    result = session.run()
    assert session.clock.frame == session.clock.opt_step == 400
    assert result.rows[-1]["epi"] == 0  # no training env was stepped
    assert result.eval_rows[-1]["total_reward"] >= 0.9 * recorded.return_E.mean()


def test_a_continued_run_notices_other_recorded_episodes(tmp_path: Path) -> None:
    file, spec, data_dir = tmp_path / "cartpole.npz", tmp_path / "bc.json", tmp_path / "data"
    saved(file, "CartPole-v1", balance, 2)
    spec.write_text(json.dumps(dump_spec(bc(file, CARTPOLE | {"max_frame": 40}))))
    assert main([str(spec), "bc", "train", "--data-dir", str(data_dir)]) == 0
    paths = find_run(next(data_dir.glob("bc_*")))
    assert not read_run(paths, ["env.max_frame=80"]).starts[0].lost
    saved(file, "CartPole-v1", balance, 3)
    (reason,) = read_run(paths, ["env.max_frame=80"]).starts[0].lost
    assert str(file) in reason
    copy = tmp_path / "copy.npz"
    copy.write_bytes(file.read_bytes())
    (reason,) = read_run(paths, ["env.max_frame=80", f"meta.demonstrations={copy}"]).starts[0].lost
    assert reason == "meta.demonstrations was changed"


def test_envs_in_the_spec_are_ignored_with_a_note() -> None:
    assert bc("x.npz", CARTPOLE | {"num_envs": 8}).env.num_envs == 1


class TestContract(SpecContract):
    """A run from recorded episodes is repeatable, resumes exactly, and its agent acts without the run."""

    @pytest.fixture(autouse=True)
    def _file(self, tmp_path: Path) -> None:
        self.path = tmp_path / "cartpole.npz"
        saved(self.path, "CartPole-v1", balance, 2)

    def spec(self) -> Spec:
        return bc(self.path, {"name": "CartPole-v1", "max_frame": 100}, random_seed=3, log_frequency=25)


class TestContractOfOwnAndRecordedSteps(TestContract):
    """SAC with batches of half own and half recorded steps: its replay buffer is saved, and the recorded steps are read again."""

    @pytest.fixture(autouse=True)
    def _file(self, tmp_path: Path) -> None:
        self.path = tmp_path / "pendulum.npz"
        saved(self.path, "Pendulum-v1", swing_up, 2)

    def spec(self) -> Spec:
        algorithm = {"name": "SoftActorCritic", "training_start_step": 40, "training_frequency": 4}
        net = {"name": "MLPNet", "hid_layers": [16], "layer_norm": True, "optim_spec": {"name": "Adam", "lr": 0.01}}
        agent = {"algorithm": algorithm, "net": net, "memory": {"name": "Replay", "batch_size": 16, "demonstration_fraction": 0.5}}
        meta = {"demonstrations": str(self.path), "eval_episodes": 0, "log_frequency": 50, "random_seed": 3, "save_replay": True}
        return slm_lab.load_spec({"rlpd": {"agent": agent, "env": {"name": "Pendulum-v1", "max_frame": 250}, "meta": meta}}, "rlpd")


class TestContractOfIQL(TestContract):
    """IQL has two critics, a state-value net V and a policy."""

    def spec(self) -> Spec:
        return bc(self.path, {"name": "CartPole-v1", "max_frame": 60}, {"name": "IQL"}, random_seed=3, log_frequency=15)


# ---- Minari


def test_a_data_set_of_minari_is_read_in_the_form_of_the_agent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    minari = pytest.importorskip("minari", reason="minari is not installed")
    pytest.importorskip("h5py", reason="minari cannot write without h5py")
    monkeypatch.setenv("MINARI_DATASETS_PATH", str(tmp_path / "minari"))
    env = gym.make("Pendulum-v1", max_episode_steps=30)
    taken = np.random.default_rng(0).uniform(-2.0, 2.0, (2, 30, 1)).astype(np.float32)
    episodes = [[env.reset(seed=seed), *(env.step(action) for action in actions)] for seed, actions in enumerate(taken)]
    obs = np.array([[outcome[0] for outcome in outcomes] for outcomes in episodes])
    reward, terminated, truncated = (np.array([[outcome[k] for outcome in outcomes[1:]] for outcomes in episodes]) for k in (1, 2, 3))
    rows = zip(obs, taken, reward, terminated, truncated, strict=True)
    names = ("observations", "actions", "rewards", "terminations", "truncations")
    from minari.data_collector import EpisodeBuffer

    buffer = [EpisodeBuffer(id=index, **dict(zip(names, row, strict=True))) for index, row in enumerate(rows)]
    about = {"algorithm_name": "random", "author": "a", "author_email": "a@b.c", "code_permalink": "x"}
    minari.create_dataset_from_buffers("pendulum/random-v0", buffer, env, **about)
    spec = bc("minari:pendulum/random-v0", {"name": "Pendulum-v1", "max_frame": 10})
    info = played("Pendulum-v1", swing_up, 1)[1].info
    for where in ("minari:pendulum/random-v0", str(tmp_path / "minari" / "pendulum" / "random-v0")):
        data = load_demonstrations(bc(where, {"name": "Pendulum-v1", "max_frame": 10}), info)
        np.testing.assert_allclose(data.action_K, taken.reshape(60, 1) / 2.0, rtol=1e-6)
        np.testing.assert_allclose(data.obs_K, obs[:, :-1].reshape(60, 3))
        np.testing.assert_allclose(data.last_obs_E, obs[:, -1])
        np.testing.assert_allclose(data.reward_K, reward.ravel(), rtol=1e-6)
        assert data.end_E.tolist() == [29, 59]
        assert data.truncated_K.sum() == 2
    other = spec.model_copy(update={"env": spec.env.model_copy(update={"name": "MountainCarContinuous-v0"})})
    with pytest.raises(SpecError, match=r"was recorded in Pendulum-v1; env.name is MountainCarContinuous-v0"):
        load_demonstrations(other, info)
    with pytest.raises(SpecError, match=r"local data sets: pendulum/random-v0"):
        load_demonstrations(bc("minari:pendulum/none-v0"), info)
