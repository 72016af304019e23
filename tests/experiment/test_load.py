"""Tests of loading a trained agent from a run folder without building its env."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium import spaces

from slm_lab import cli
from slm_lab.agent.ops.linear import FLOAT32
from slm_lab.experiment.deploy import enjoy
from slm_lab.experiment.deploy.load import LoadedAgent, load_agent
from slm_lab.experiment.files import bundle as state
from slm_lab.experiment.files.find import Training, find_weights
from slm_lab.experiment.files.paths import RunPaths, StudyPaths, new_run
from slm_lab.experiment.files.search_state import SearchState, TrialState
from slm_lab.experiment.files.sink import LocalSink
from slm_lab.experiment.plan import Plan, UserError
from slm_lab.experiment.session.session import Session
from slm_lab.spec.load.loader import dump_spec
from slm_lab.spec.models.spec import Spec
from slm_lab.spec.report import SpecError
from tests.env.toys import Spaced

NET = {"name": "MLPNet", "hid_layers": [16], "hid_layers_activation": "tanh"}
RNN = {"name": "RecurrentNet", "rnn_hidden_size": 8, "cell_type": "LSTM", "seq_len": 8}
PPO = {"name": "PPO", "time_horizon": 32, "minibatch_size": 32, "training_epoch": 1}
DQN = {"name": "DQN", "training_frequency": 4, "training_start_step": 40}


class Toy(Spaced):
    """Env with Dict observations; its action space is named by `action`."""

    def __init__(self, action: str = "multi") -> None:
        self.observation_space = gym.spaces.Dict(
            {"place": gym.spaces.Box(-10.0, 10.0, (2,), np.float32), "room": gym.spaces.Discrete(3), "grid": gym.spaces.Box(0, 9, (2, 2))}
        )
        self.action_space = gym.spaces.MultiDiscrete([2, 3]) if action == "multi" else gym.spaces.Box(-2.0, 6.0, (2,), np.float32)


gym.register("LoadToy-v0", entry_point=Toy, max_episode_steps=20)


def trained(folder: Path, env: dict[str, Any], algorithm: dict[str, Any] = PPO, net: dict[str, Any] = NET, **meta: Any) -> RunPaths:
    """Train the spec and return the paths of the run."""
    memory = (
        {"name": "Replay", "batch_size": 16, "max_size": 200}
        if algorithm["name"] in ("DQN", "SoftActorCritic")
        else {"name": "OnPolicyBatchReplay"}
    )
    spec = Spec.model_validate(
        {
            "name": "small",
            "agent": {"name": "agent", "algorithm": algorithm, "memory": memory, "net": net},
            "env": {"num_envs": 2, "max_frame": 200, **env},
            "meta": {"random_seed": 3, "log_frequency": 100, **meta},
        }
    )
    paths = new_run(folder, "small")
    for index in range(spec.meta.max_session):
        sink = LocalSink(paths)
        Session(spec, index).run(sink)
        sink.close()
    paths.spec.write_text(json.dumps(dump_spec(spec)))
    return paths


@pytest.fixture
def no_env(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Return a function after whose call no env can be made."""

    def forbid(*arguments: object, **options: object) -> None:
        raise AssertionError("an env is made")

    def call() -> None:
        monkeypatch.setattr(gym, "make", forbid)
        monkeypatch.setattr(gym, "make_vec", forbid)

    return call


CASES: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "discrete": ({"name": "CartPole-v1"}, PPO, NET),
    "normalised": ({"name": "CartPole-v1", "normalize_obs": True}, PPO, NET),
    "recurrent": ({"name": "CartPole-v1", "normalize_obs": True}, PPO, RNN),
    "values": ({"name": "CartPole-v1"}, DQN, NET),
    "box": ({"name": "Pendulum-v1", "normalize_obs": True}, PPO, NET),
    "dict": ({"name": "LoadToy-v0"}, PPO, NET),
    "masked": ({"name": "tests.env.masked:Forbidding-v0", "normalize_obs": True}, PPO, NET),
    "masked values": ({"name": "tests.env.masked:Components-v0", "joint": True}, DQN, NET),
    "privileged": ({"name": "tests.env.masked:Privileged-v0", "critic_keys": ["secret"], "normalize_obs": True}, PPO, NET),
    "dict to box": ({"name": "LoadToy-v0", "action": "box", "normalize_obs": True}, PPO, NET),
}


def test_a_net_that_was_trained_in_bfloat16_acts_in_float32(tmp_path: Path) -> None:
    """The agent computes in float32 with the weights of the run, as its exported file does."""
    paths = trained(tmp_path, {"name": "CartPole-v1"}, PPO, {**NET, "dtype": "bfloat16"})
    net: Any = load_agent(paths.root).policy.net
    assert net.actor_body.matmul_mode == FLOAT32
    weights = state.load(paths.checkpoint(0, "best"))["weights"]
    assert all(torch.equal(value, weights[name]) for name, value in net.state_dict().items())


def batch(space: gym.Space[Any], count: int) -> tuple[list[Any], Any]:
    """Return observations as a list and as one batch."""
    space.seed(0)
    singles = [space.sample() for _ in range(count)]
    if isinstance(space, gym.spaces.Dict):
        return singles, {key: np.stack([single[key] for single in singles]) for key in space.spaces}
    return singles, np.stack(singles)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("case", CASES)
def test_three_lines(case: str, tmp_path: Path, no_env: Callable[[], None]) -> None:
    """An agent acts on one observation or on a batch of observations of the env.

    The actions are in the action space of the env. With `deterministic`, an observation always has the same action.
    """
    env, algorithm, net = CASES[case]
    paths = trained(tmp_path, env, algorithm, net)
    no_env()
    agent = load_agent(paths.root)
    assert agent.path == paths.checkpoint(0, "best")
    singles, together = batch(agent.observation_space, 5)
    action, hidden = agent.act(singles[0], deterministic=True)
    assert agent.action_space.contains(action), action
    assert (hidden is None) == (case != "recurrent")
    actions, hiddens = agent.act(together, deterministic=True)
    assert len(actions) == 5
    assert np.allclose([agent.act(single, deterministic=True)[0] for single in singles], actions, atol=1e-5)
    if hidden is not None:
        assert hiddens.shape == (5, hidden.shape[1])
        assert np.array_equal(agent.act(singles[0], np.zeros_like(hidden), deterministic=True)[1], hidden), "no state: an episode begins"
        assert not np.allclose(agent.act(singles[0], hidden)[1], hidden)
    # ε-greedy with ε = 0.05 and two actions: one of 40 draws is the non-greedy action
    drawn = [tuple(np.ravel(agent.act(singles[0])[0])) for _ in range(1000)]
    assert len(set(drawn)) > 1, "no sample"


def test_it_acts_as_the_session_did(tmp_path: Path, no_env: Callable[[], None]) -> None:
    """The agent uses the statistics of the observation normaliser that were saved with the weights."""
    paths = trained(tmp_path, {"name": "Pendulum-v1", "normalize_obs": True})
    bundle = state.load(paths.checkpoint(0, "last"))
    no_env()
    agent = load_agent(str(paths.root), which="last")
    assert agent.path == paths.checkpoint(0, "last")
    assert agent.normalizers.obs is not None
    _, obs_N = batch(agent.observation_space, 4)
    saved = bundle["policies"][0]["normalizers"]["obs_stats"]
    mean, var = np.asarray(saved["mean"]), np.asarray(saved["m2"]) / saved["count"]
    assert np.abs(mean).max() > 0.01
    expected_N = np.clip((obs_N - mean) / np.sqrt(var), -10, 10)
    normalised_N = agent.normalizers.obs(obs_N)
    assert np.allclose(normalised_N, expected_N, atol=1e-3)
    plain = agent.policy.act(normalised_N, None, True).action_N
    again = agent.act(obs_N, deterministic=True)[0]
    assert np.allclose(again, agent.spaces.decode(plain))
    agent.act(obs_N)
    assert np.array_equal(agent.normalizers.obs(obs_N), normalised_N), "acting changes the statistics"


def test_the_best_session_or_the_one_asked_for(tmp_path: Path) -> None:
    paths = trained(tmp_path, {"name": "CartPole-v1"}, max_session=3)
    best = [state.load(paths.checkpoint(index, "best"))["current_return"] for index in range(3)]
    assert load_agent(paths.root).path == paths.checkpoint(int(np.argmax(best)), "best")
    assert load_agent(paths.root, session=1).path == paths.checkpoint(1, "best")
    with pytest.raises(UserError, match=r"no checkpoint of session 7 in .*; sessions: 0, 1, 2"):
        load_agent(paths.root, session=7)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("damage", ["torn", "foreign", "newer", "another net"])
def test_a_checkpoint_that_cannot_be_used(damage: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """load_agent and enjoy use another checkpoint and name the unusable file; if there is no other, this is an error."""
    paths = trained(tmp_path, {"name": "CartPole-v1"}, max_session=2)
    broken = paths.checkpoint(0, "best")
    bundle = state.load(broken)
    match damage:
        case "torn":
            broken.write_bytes(broken.read_bytes()[:1000])
        case "foreign":
            torch.save({"state_dict": bundle["weights"]}, broken)
        case "newer":
            torch.save({**bundle, "version": 99}, broken)
        case "another net":
            weights = {name: torch.zeros(3) for name in bundle["weights"]}
            torch.save({**bundle, "weights": weights, "current_return": 1e6, "current_epi": 20, "mode": "train"}, broken)
    agent = load_agent(paths.root)
    assert agent.path == paths.checkpoint(1, "best")
    assert [str(broken) in message for message in caplog.messages] == [True]
    path, _, returns = enjoy.enjoy(Training(paths), enjoy.EnjoyOptions(), Plan(data_dir=tmp_path))[:3]
    assert (path, len(returns)) == (paths.checkpoint(1, "best"), 10)
    paths.checkpoint(1, "best").unlink()
    with pytest.raises(UserError) as caught:
        load_agent(paths.root)
    assert str(broken) in str(caught.value)


def test_what_is_no_run(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="is not a run folder"):
        load_agent(tmp_path)
    with pytest.raises(UserError, match="is not a run folder"):
        load_agent(tmp_path / "nowhere")
    paths = new_run(tmp_path, "small")
    paths.spec.write_text("{}")
    with pytest.raises(SpecError, match="no spec"):
        load_agent(paths.root)


def searched(folder: Path, metrics: Sequence[float | None], confirmed: Sequence[float | None] = ()) -> RunPaths:
    """Return a search whose trials have these metrics (None: failed).

    Trial i has a net of i + 1 units; the first trials have the confirmation results `confirmed`.
    """
    runs = [trained(folder / str(trial), {"name": "CartPole-v1"}, net={**NET, "hid_layers": [trial + 1]}) for trial in range(len(metrics))]
    paths = new_run(folder, "small")
    shutil.copy(runs[0].spec, paths.spec)

    def add(to: RunPaths, trial: int) -> None:
        for source in [*runs[trial].model_dir.iterdir(), *runs[trial].info_dir.iterdir()]:
            shutil.copy(source, to.root / source.parent.name / source.name.replace("_t0_", f"_t{trial}_"))
        shutil.copy(runs[trial].spec, to.trial_spec(trial))

    ended: list[list[TrialState]] = []
    for to, values in ((paths, metrics), (RunPaths(paths.confirmation, "small"), confirmed)):
        to.root.mkdir(exist_ok=True)
        to.make_dirs()
        shutil.copy(runs[0].spec, to.spec)
        ended.append([TrialState(t, {}, "failed" if value is None else "finished", metric=value) for t, value in enumerate(values)])
        for trial, value in enumerate(values):
            if value is not None:
                add(to, trial)
    SearchState("current_return", None, False, trials=ended[0], confirmations=ended[1]).save(paths.search_state)
    return paths


def units(agent: LoadedAgent) -> int:
    return next(weight for name, weight in agent.policy.net.state_dict().items() if name.endswith("weight")).shape[0]


def test_the_agent_of_a_search_is_that_of_its_best_trial(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    root = searched(tmp_path, [1.0, 3.0, 2.0, None]).root
    agent = load_agent(root)
    assert units(agent) == 2
    assert "trial 1 of the search" in repr(agent)
    assert units(load_agent(root, trial=2)) == 3
    with pytest.raises(UserError, match=r"trial 3 of .* has no checkpoint; it is failed"):
        load_agent(root, trial=3)
    with pytest.raises(UserError, match=r"trial 4: the trials of .* are 0, 1, 2, 3"):
        load_agent(root, trial=4)
    with pytest.raises(UserError, match=r"entry fast: .* is not the folder of a study"):
        load_agent(root, entry="fast")
    assert cli.main([f"enjoy@{root}", "--episodes", "1"]) == 0
    assert "trial 1 of the search" in capsys.readouterr().out
    assert find_weights(str(root), tmp_path)[0] == agent.path
    assert cli.main(["export", str(root), "--trial", "0", "--format", "torch"]) == 0
    assert "trial 0 of the search" in capsys.readouterr().out
    assert isinstance(agent.path, Path)
    agent.path.write_bytes(agent.path.read_bytes()[:100])
    with pytest.raises(UserError, match=r"meta\.init_from: .*; this one can be read: .*_t1_s0_ckpt-last\.pt"):
        find_weights(str(root), tmp_path)


def test_a_failed_run_of_a_study_is_not_chosen(tmp_path: Path) -> None:
    study = StudyPaths(tmp_path / "st_2026_01_03_120000", "st")
    study.runs.mkdir(parents=True)
    study.study.write_text("{}")
    for seed, status in enumerate(("failed", "done")):
        run = trained(tmp_path / str(seed), {"name": "CartPole-v1"}, net={**NET, "hid_layers": [seed + 1]})
        run.trial_metrics().write_text(json.dumps({"status": status}))
        folder = shutil.copytree(run.root, study.runs / str(seed) / run.root.name).parent
        (folder / "study_run.json").write_text(json.dumps({"entry": "A", "env": "CartPole-v1", "random_seed": seed}))
    assert units(load_agent(study.root)) == 2
    with pytest.raises(UserError, match=r"seed 0: the runs of .* have 1"):
        load_agent(study.root, seed=0)


def test_a_confirmed_trial_comes_before_a_better_one_that_was_not(tmp_path: Path) -> None:
    paths = searched(tmp_path, [1.0, 2.0, 9.0], confirmed=[5.0, 4.0])
    agent = load_agent(paths.root)
    assert (units(agent), "confirmed" in repr(agent)) == (1, True)
    assert units(load_agent(paths.root, trial=2)) == 3
    assert units(load_agent(paths.confirmation, trial=1)) == 2
    alone = searched(tmp_path / "alone", [1.0, 2.0], confirmed=[5.0])
    assert units(load_agent(alone.root)) == 1, "its own values, not those of the search's spec"
    assert units(load_agent(alone.confirmation)) == 1, "the folder of a single confirmation is not a run of mode train"
    second = searched(tmp_path / "second", [1.0, 2.0], confirmed=[None, 5.0])
    assert units(load_agent(second.confirmation)) == 2, "nor if its number is not 0"


def test_a_search_none_of_whose_trials_has_ended(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"no trial of .* has ended with a checkpoint; trials: 1 failed"):
        load_agent(searched(tmp_path, [None]).root)


def test_a_run_folder_that_was_renamed(tmp_path: Path) -> None:
    """A renamed run folder can be loaded, also if the spec's name is written differently in file names."""
    paths = trained(tmp_path, {"name": "CartPole-v1"})
    moved = paths.root.rename(tmp_path / "my agent")
    assert isinstance(load_agent(moved), LoadedAgent)


def test_an_agent_is_loaded_without_the_package_of_its_env(tmp_path: Path) -> None:
    paths = trained(tmp_path, {"name": "CartPole-v1"})
    content = json.loads(paths.spec.read_text())
    content["small"]["env"]["name"] = "missing_package:Env-v0"
    paths.spec.write_text(json.dumps(content))
    last = paths.checkpoint(0, "last")
    state.save(last, state.load(last) | {"spec": content})
    assert load_agent(paths.root).action_space == spaces.Discrete(2)


@pytest.mark.parametrize(
    ("section", "key", "value", "refused"),
    [("net", "hid_layers_activation", "relu", True), ("algorithm", "gamma", 0.5, False), ("env", "max_t", 5, True)],
)
def test_an_agent_is_not_loaded_with_an_edited_spec(section: str, key: str, value: Any, refused: bool, tmp_path: Path) -> None:
    """An edited activation would fit the weights, and the agent would act otherwise than it was trained."""
    paths = trained(tmp_path, {"name": "CartPole-v1"}, net={**NET, "hid_layers_activation": "tanh"})
    load_agent(paths.root)
    content = json.loads(paths.spec.read_text())
    body = content["small"]
    (body["env"] if section == "env" else body["agent"][section])[key] = value
    paths.spec.write_text(json.dumps(content))
    if not refused:
        load_agent(paths.root)
        return
    with pytest.raises(UserError, match=key):
        load_agent(paths.root)
