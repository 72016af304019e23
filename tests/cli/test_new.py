"""Tests of `new`: it writes a spec for any env that `check` accepts and that trains without changes."""

from __future__ import annotations

import json
import re
import shlex
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from slm_lab.cli import main
from slm_lab.experiment.report.run import load_run
from slm_lab.spec.compat.env_ids import ATARI, KNOWN, current_id, unavailable_reason
from slm_lab.spec.load.files import SPEC_FOLDER, raw_specs, spec_summaries
from slm_lab.spec.load.loader import load_spec
from slm_lab.spec.models.algorithm import ALGORITHMS
from slm_lab.spec.models.spec import Spec
from tests.wording import check_wording

HERE = [name for name in KNOWN if current_id(name) == name and unavailable_reason(name) is None]
GAMES = [f"ALE/{game}-v5" for game in ("Pong", "Breakout", "MontezumaRevenge")]
MINIGRID = ["minigrid:MiniGrid-Empty-5x5-v0", "minigrid:BabyAI-GoToObj-v0"]
Made = Callable[..., Spec]
TEMPLATE = {
    "agent": {
        "name": "DQN",
        "algorithm": {"name": "DQN", "training_frequency": 4, "training_start_step": 100},
        "memory": {"name": "Replay", "batch_size": 32, "max_size": 1000},
        "net": {"name": "MLPNet", "hid_layers": [8], "update_type": "polyak", "update_frequency": 8, "polyak_coef": 0.01},
    },
    "env": {"name": "CartPole-v1", "max_frame": 1000},
    "meta": {"eval_frequency": 500},
}
"""A spec with two keys that have no effect."""


@pytest.fixture
def made(tmp_path: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture) -> Made:
    """Return a function that runs `new`, such as made("--env", "CartPole-v1"), checks the written `new.json` and loads it."""

    def run(*words: str) -> Spec:
        (file := tmp_path / "new.json").unlink(missing_ok=True)
        code = main(["new", str(file), *words])
        printed = capsys.readouterr()
        assert (code, printed.err) == (0, "")
        assert main(["check", str(file)]) == 0
        assert capsys.readouterr().err == ""
        assert caplog.messages == [], "a notice"
        return load_spec(file)

    return run


@pytest.fixture
def third_party(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Write a module of envs as other packages define them: Dict observations with text, and images with an action per joint."""
    (tmp_path / "envs_of_others.py").write_text(
        textwrap.dedent(
            """
            import gymnasium as gym
            import numpy as np
            from gymnasium import spaces

            class Other(gym.Env):
                def __init__(self, observation_space, action_space):
                    self.observation_space, self.action_space = observation_space, action_space

                def reset(self, *, seed=None, options=None):
                    super().reset(seed=seed)
                    self.t = 0
                    return self.observation_space.sample(), {}

                def step(self, action):
                    assert self.action_space.contains(action), action
                    self.t += 1
                    return self.observation_space.sample(), float(self.np_random.random()), self.t >= 20, False, {}

            SPACES = {
                "Robot-v0": (
                    spaces.Dict({"joints": spaces.Box(-1, 1, (3,)), "task": spaces.Text(9), "mode": spaces.Discrete(3)}),
                    spaces.Box(-2, 2, (2,)),
                ),
                "Camera-v0": (spaces.Box(0, 255, (64, 64, 3), np.uint8), spaces.MultiDiscrete([3, 4])),
                "Unbounded-v0": (spaces.Box(-1, 1, (3,)), spaces.Box(-np.inf, np.inf, (2,))),
                "Words-v0": (spaces.Text(9), spaces.Discrete(2)),
                "Pair-v0": (spaces.Box(-1, 1, (3,)), spaces.Tuple([spaces.Discrete(2), spaces.Discrete(2)])),
            }
            for name, (observation, action) in SPACES.items():
                gym.register(name, Other, kwargs={"observation_space": observation, "action_space": action})
            """
        )
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "envs_of_others", raising=False)


@pytest.mark.slow
def test_check_accepts_it_for_every_env_that_can_be_made_here(made: Made) -> None:
    assert len(HERE) >= 35
    for env in (*HERE, *GAMES, *MINIGRID):
        spec = made("--env", env)
        assert (spec.env.name, spec.agent.algorithm.name) == (env, "PPO")
        assert not spec.lacks_net
        images = env in (*GAMES, *MINIGRID, "CarRacing-v3")
        assert spec.agent.net is not None
        assert spec.agent.net.name == ("ConvNet" if images else "MLPNet"), env


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", [name for name, model in ALGORITHMS.items() if name != "Random" and not model.offline])
def test_every_algorithm(name: str, made: Made) -> None:
    model = ALGORITHMS[name]
    if "continuous" in model.action_kinds:
        spec = made("--env", "Pendulum-v1", "--like", name.lower())
        assert (spec.agent.algorithm.name, spec.agent.memory.name in model.memories) == (name, True)
    if "discrete" in model.action_kinds:
        spec = made("--env", "CartPole-v1", "--like", name)
        assert (spec.agent.algorithm.name, spec.agent.memory.name in model.memories) == (name, True)
        assert made("--env", "ALE/Pong-v5", "--like", name).env.max_frame == 10_000_000


def test_a_game_for_two_players_gets_self_play(tmp_path: Path) -> None:
    file = tmp_path / "game.json"
    assert main(["new", str(file), "--env", "TicTacToe-v1"]) == 0
    assert json.loads(file.read_text())["ppo_tictactoe"]["meta"]["self_play"] == {}


def test_other_names_of_algorithms(made: Made) -> None:
    assert made("--env", "Pendulum-v1", "--like", "SAC").agent.algorithm.name == "SoftActorCritic"
    assert made("--env", "Pendulum-v1", "--like", "a2c").agent.name == "A2C"
    assert made("--env", "CartPole-v1", "--like", "Random").agent.algorithm.name == "Random"


@pytest.mark.slow
def test_every_spec_that_ships_is_a_template(made: Made, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """Every shipped spec is a template for an env with its kind of actions; specs that need recorded episodes or goals are refused."""
    for file, name, algorithm, _, _ in spec_summaries():
        model, agent = ALGORITHMS[algorithm], raw_specs(SPEC_FOLDER / file)[name]["agent"]
        memory = (agent[0] if isinstance(agent, list) else agent).get("memory", {})
        words = ("--env", "Acrobot-v1" if "discrete" in model.action_kinds else "Pendulum-v1", "--like", name)
        goals, episodes = memory.get("name") == "HindsightReplay", model.offline or "demonstration_fraction" in memory
        if goals or episodes:
            assert main(["new", str(tmp_path / "refused.json"), *words]) == 2, name
            assert ("HindsightReplay needs" if goals else "recorded episodes") in capsys.readouterr().err
            continue
        spec = made(*words)
        assert spec.agent.algorithm.name == algorithm, name


def test_keys_without_effect_are_not_written(made: Made, tmp_path: Path) -> None:
    """Keys of the template that have no effect are left out, without a notice: the user did not write them."""
    (template := tmp_path / "template.json").write_text(json.dumps({"old": TEMPLATE}))
    spec = made("--env", "Acrobot-v1", "--like", f"{template}:old")
    assert spec.agent.net is not None
    assert (spec.agent.net.update_type, spec.agent.net.polyak_coef) == ("polyak", 0.01)
    assert "update_frequency" not in spec.agent.net.model_fields_set
    assert "eval_frequency" not in spec.meta.model_fields_set
    assert "max_session" in spec.meta.model_fields_set


def test_a_spec_as_template(made: Made, tmp_path: Path) -> None:
    """The new spec has the template's algorithm and keys; the net fits the new observations, and schedules fit the number of frames."""
    old = load_spec("ppo_cartpole.json", "ppo_cartpole")
    new = made("--env", "CartPole-v0", "--like", "ppo_cartpole")
    assert (new.env.max_frame, new.env.num_envs) == (old.env.max_frame, old.env.num_envs)
    image = made("--env", "ALE/Pong-v5", "--like", "ppo_cartpole")
    assert (image.agent.algorithm.gamma, image.env.max_frame) == (old.agent.algorithm.gamma, 10_000_000)
    assert image.agent.net is not None
    assert image.agent.net.name == "ConvNet"
    halfcheetah = load_spec("ppo_halfcheetah.json")
    small = made("--env", "CartPole-v1", "--like", "ppo_halfcheetah.json")
    assert small.agent.net is not None
    assert halfcheetah.agent.net is not None
    assert halfcheetah.agent.net.lr_scheduler_spec is not None
    assert small.agent.net.lr_scheduler_spec is not None
    assert halfcheetah.agent.net.lr_scheduler_spec.kwargs["frame"] == halfcheetah.env.max_frame == 10_000_000
    assert small.agent.net.lr_scheduler_spec.kwargs["frame"] == small.env.max_frame == 200_000
    assert small.agent.net.log_std_init is None  # a key for continuous actions
    assert not small.env.normalize_obs
    crossq = load_spec("crossq_acrobot.json").agent
    assert made("--env", "Acrobot-v1", "--like", "crossq_acrobot").agent == crossq, "a graph with nulls among its layers"
    assert made("--env", "LunarLander-v3", "--like", "crossq_acrobot").agent.critic_net is not None
    assert made("--env", "ALE/Pong-v5", "--like", "crossq_acrobot").agent.critic_net is None
    own = tmp_path / "own.json"
    agent = {
        "algorithm": {
            "name": "DQN",
            "gamma": 0.5,
            "explore_var_spec": {"name": "linear_decay", "start_val": 1, "end_val": 0, "end_step": 500},
        }
    }
    own.write_text(json.dumps({"one": {"agent": agent, "env": {"name": "CartPole-v1", "max_frame": 1000}}, "two": {}}))
    dqn: Any = made("--env", "LunarLander-v3", "--like", f"{own}:one").agent.algorithm
    assert (dqn.gamma, dqn.explore_var_spec.end_step) == (0.5, 125_000)


@pytest.mark.usefixtures("third_party")
def test_envs_of_other_packages(made: Made, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    robot = made("--env", "envs_of_others:Robot-v0")
    assert robot.env.obs_keys is not None
    assert set(robot.env.obs_keys) == {"joints", "mode"}
    assert robot.agent.net is not None
    assert (robot.agent.net.name, robot.agent.net.log_std_init) == ("MLPNet", 0.0)
    camera = made("--env", "envs_of_others:Camera-v0")
    assert camera.agent.net is not None
    assert (camera.agent.net.name, camera.env.max_frame) == ("ConvNet", 1_000_000)
    assert set(made("--env", MINIGRID[0]).env.obs_keys or ()) == {"direction", "image"}
    for env, like, hint in (
        ("Camera-v0", "SAC", "does not support the multi-discrete actions of"),
        ("Unbounded-v0", "SAC", "does not support the continuous actions without bounds of"),
        ("Words-v0", "PPO", "observation space Text is not supported"),
        ("Pair-v0", "SAC", "does not support the multi-discrete actions of"),
    ):
        (tmp_path / "new.json").unlink(missing_ok=True)
        assert main(["new", str(tmp_path / "new.json"), "--env", f"envs_of_others:{env}", "--like", like]) == 2
        assert hint in capsys.readouterr().err
        assert not (tmp_path / "new.json").exists()


def test_rewards_of_self_imitation_are_not_normalised(made: Made) -> None:
    for name in ("PPO", "SIL"):
        assert made("--env", "HalfCheetah-v5", "--like", name).env.normalize_reward == (name == "PPO")


def test_every_key_has_one_line_of_comment(made: Made, tmp_path: Path) -> None:
    for words in (("--env", "HalfCheetah-v5"), ("--env", "ALE/Pong-v5", "--like", "DQN"), ("--env", MINIGRID[0], "--like", "appo_pong")):
        strict = made(*words)
        assert (spec := made(*words, "--comments")) == strict
        lines = (tmp_path / "new.json").read_text().splitlines()
        keys = [index for index, line in enumerate(lines) if re.match(r' {4,}"', line) and line.strip() != '"agent": {']
        assert len(keys) > 15
        for index in keys:
            assert re.match(r" +// \S.{5,}", lines[index - 1]), lines[index]
        assert max(map(len, lines)) <= 140
        assert lines[-1] == f"// Run it: slm-lab {tmp_path / 'new.json'} {spec.name} train"
        json.loads("\n".join(line for line in lines if not line.lstrip().startswith("//")))


def test_it_is_strict_json_with_a_schema(made: Made, tmp_path: Path) -> None:
    made("--env", "CartPole-v1")
    content = json.loads((tmp_path / "new.json").read_text())
    assert list(content) == ["$schema", "ppo_cartpole"]
    schema = json.loads((tmp_path / content["$schema"]).read_text())
    assert schema["title"] == "SLM Lab spec file"


def answer(capsys: pytest.CaptureFixture[str], *words: object) -> tuple[int, str]:
    code = main(["new", *map(str, words)])
    printed = capsys.readouterr()
    assert printed.out == ""
    return code, printed.err


@pytest.mark.sampled(5)
@pytest.mark.parametrize(
    "line",
    [
        "",
        "FOLDER/a.json",
        "FOLDER/a.json --env",
        "FOLDER/a.json one two --env CartPole-v1",
        "FOLDER/there.json --env CartPole-v1",
        "FOLDER --env CartPole-v1",
        "FOLDER/none/a.json --env CartPole-v1",
        "FOLDER/a.yaml --env CartPole-v1",
        "FOLDER/a.json --env CartPol-v1",
        "FOLDER/a.json --env phys2d/CartPole-v1",
        "FOLDER/a.json --env nowhere:Env-v0",
        "FOLDER/a.json --env Pendulum-v1 --like DQN",
        "FOLDER/a.json --env Pendulum-v1 --like dqn_cartpole",
        "FOLDER/a.json --env CartPole-v1 --like ppo_cartpol",
        "FOLDER/a.json --env CartPole-v1 --like zzzzzzzzzz",
        "FOLDER/a.json --env CartPole-v1 --like A3C",
        "FOLDER/a.json --env CartPole-v1 --like nowhere.json:x",
        "FOLDER/a.json --env CartPole-v1 --like demo.json:ppo_cartpol",
        "FOLDER/a.json --env CartPole-v1 --like nowhere:Algorithm",
        "FOLDER/a.json a/b --env CartPole-v1",
        "FOLDER/a.json --like PPO -s env.name=x --env CartPole-v1",
    ],
)
def test_errors(line: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """An error gives exit code 2 and one message; no file is written or overwritten."""
    (tmp_path / "there.json").write_text("{}")
    words = [word.replace("FOLDER", str(tmp_path)) for word in line.split()]
    try:
        code, err = answer(capsys, *words)
    except SystemExit as stop:  # raised by argparse
        code, err = int(stop.code or 0), capsys.readouterr().err.replace(sys.argv[0].rsplit("/")[-1], "PROG")
    assert code == 2
    assert "Traceback" not in err
    assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [("there.json", "{}")]
    check_wording("test_new.test_errors", [err.replace(str(tmp_path), "FOLDER")])


def test_an_old_id(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert main(["new", str(tmp_path / "a.json"), "--env", "PongNoFrameskip-v4"]) == 0
    assert caplog.messages == ["--env PongNoFrameskip-v4: 'PongNoFrameskip-v4' is now 'ALE/Pong-v5'"]
    assert load_spec(tmp_path / "a.json").name == "ppo_pong"


def test_a_full_disk_leaves_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def full(self: Path, data: bytes) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", full)
    file = tmp_path / "a.json"
    assert answer(capsys, file, "--env", "CartPole-v1") == (2, f"cannot write {file}: No space left on device\n")
    assert list(tmp_path.iterdir()) == []


TRAINED = [
    *("Acrobot-v1", "CartPole-v0", "CartPole-v1", "MountainCar-v0", "MountainCarContinuous-v0", "Pendulum-v1"),
    *("Blackjack-v1", "CliffWalking-v1", "CliffWalkingSlippery-v1", "FrozenLake-v1", "FrozenLake8x8-v1", "Taxi-v4"),
    *("LunarLander-v3", "LunarLanderContinuous-v3", "BipedalWalker-v3", "CarRacing-v3"),
    *("Ant-v5", "HalfCheetah-v5", "Hopper-v4", "Humanoid-v5", "InvertedPendulum-v5", "Reacher-v5", "Swimmer-v5", "Walker2d-v5"),
    "ALE/Pong-v5",
]
OTHERS = ["minigrid:MiniGrid-Empty-5x5-v0", "envs_of_others:Robot-v0", "envs_of_others:Camera-v0"]
INSTALLED = ["gymnasium_2048:gymnasium_2048/TwentyFortyEight-v0", "flappy_bird_gymnasium:FlappyBird-v0"]
"""Third-party envs that are tried where their packages are installed."""
LIKE = {
    "Acrobot-v1": "DQN",
    "Taxi-v4": "DoubleDQN",
    "FrozenLake-v1": "SARSA",
    "Pendulum-v1": "SAC",
    "Reacher-v5": "CrossQ",
    "Hopper-v4": "A2C",
}


def test_there_are_25() -> None:
    assert len(set(TRAINED)) == 25
    assert set(TRAINED) <= {*KNOWN, *(f"ALE/{game}-v5" for game in ATARI)}


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.usefixtures("third_party")
@pytest.mark.parametrize("env", [*TRAINED, *OTHERS, *INSTALLED])
def test_it_trains_5000_frames_at_first_try(
    env: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The command that `new` prints trains the spec; here with fewer frames."""
    if env in INSTALLED:
        pytest.importorskip(env.partition(":")[0])
    monkeypatch.chdir(tmp_path)
    assert main(["new", "my.json", "mine", "--env", env, *(("--like", LIKE[env]) if env in LIKE else ())]) == 0
    command = shlex.split(capsys.readouterr().out.splitlines()[-1].removeprefix("run it: "))
    assert command == ["slm-lab", "my.json", "mine", "train"]
    sets = ("-s", "env.max_frame=5000", "-s", "meta.max_session=1", "-s", "meta.log_frequency=500")
    assert main([*command[1:], *sets]) == 0, capsys.readouterr().err
    (folder,) = (tmp_path / "data").iterdir()
    run = load_run(folder)
    assert run.status == "done"
    assert run.train.frame.max() >= 5000
    assert run.train.opt_step.max() >= 1
