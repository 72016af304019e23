"""Tests of make_env: choice of the backend, arguments, error messages, and worker processes that fail, die or hang."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path
from typing import Any, get_args

import gymnasium as gym
import numpy as np
import pytest
from gymnasium.spaces import Text

from slm_lab.env import BACKENDS
from slm_lab.env.arguments import accepted_arguments, boolean_arguments
from slm_lab.env.make import choose_backend, make_env_request
from slm_lab.spec.models.env import Backend as spec_backends
from slm_lab.spec.models.env import EnvSpec
from slm_lab.spec.report import SpecError
from tests.env.test_step import build
from tests.env.toys import PREFIX


def chosen(name: str, num_envs: int = 4, **keys: Any) -> str:
    spec = EnvSpec(name=name, max_frame=1, num_envs=num_envs, **keys)
    return choose_backend(spec, make_env_request(spec, num_envs)).name


@pytest.mark.parametrize(
    ("name", "keys", "backend", "needs"),
    [
        ("CartPole-v1", {}, "native", ""),
        ("CartPole-v1", {"num_envs": 3}, "native", ""),
        ("CartPole-v1", {"num_envs": 2}, "sync", ""),
        ("CartPole-v1", {"max_t": 50}, "native", ""),
        ("CartPole-v1", {"sutton_barto_reward": True}, "native", ""),
        ("CartPole-v1", {"render_mode": "rgb_array"}, "native", ""),
        ("Pendulum-v1", {}, "sync", ""),
        ("Pendulum-v1", {"g": 9.0}, "sync", ""),
        ("ALE/Pong-v5", {}, "ale", "ale_py"),
        ("ALE/Pong-v5", {"difficulty": 1}, "sync", "ale_py"),
        ("HalfCheetah-v5", {}, "envpool", "envpool"),
        ("HalfCheetah-v5", {"ctrl_cost_weight": 0.2}, "envpool", "envpool"),
        ("HalfCheetah-v5", {"num_envs": 1}, "sync", ""),
        ("HalfCheetah-v5", {"render_mode": "rgb_array"}, "sync", "mujoco"),
        ("HalfCheetah-v5", {"wrappers": ["TimeAwareObservation"]}, "sync", "mujoco"),
        ("CartPole-v1", {"wrappers": ["TimeAwareObservation"]}, "sync", ""),
        ("LunarLander-v3", {"continuous": True}, "envpool", "envpool"),
        ("LunarLander-v3", {"gravity": -5.0}, "sync", "Box2D"),
        ("Acrobot-v1", {}, "envpool", "envpool"),
        (PREFIX + "Toy-v0", {}, "sync", ""),
        (PREFIX + "Toy-v0", {"mean_length": 3.0}, "sync", ""),
        (PREFIX + "Anything-v0", {"colour": "red"}, "sync", ""),
        (PREFIX + "ToyNextStep-v0", {}, "native", ""),
    ],
)
def test_auto(name: str, keys: dict[str, Any], backend: str, needs: str) -> None:
    if needs:
        pytest.importorskip(needs)
    assert chosen(name, **keys) == backend


def test_an_older_version_is_made_without_a_warning(recwarn: pytest.WarningsRecorder) -> None:
    build("CartPole-v0", backend="sync").close()
    assert not [warning for warning in recwarn if "out of date" in str(warning.message)]


def test_lunar_lander_continuous_in_envpool() -> None:
    pytest.importorskip("envpool")
    env = build("LunarLander-v3", continuous=True, backend="envpool")
    assert (env.info.action.kind, env.info.action.dim, env.info.action.bounded) == ("continuous", 2, True)
    env.close()


@pytest.mark.parametrize(
    ("keys", "paths"),
    [
        ({"name": "FrozenLake-v1", "is_slippery": "no"}, ["env.is_slippery"]),
        ({"name": "ALE/Pong-v5", "full_action_space": "no"}, ["env.full_action_space"]),
        ({"name": "CartPole-v1", "gravty": 1, "sutton_barto_reward": "off"}, ["env.gravty", "env.sutton_barto_reward"]),
    ],
)
def test_text_is_not_a_truth_value(keys: dict[str, Any], paths: list[str]) -> None:
    """A text is refused for a boolean argument, because any text, such as YAML's "no", would count as true."""
    with pytest.raises(SpecError) as error:
        build(**keys)
    assert [problem.path for problem in error.value.problems] == paths


def test_arguments_that_take_text_or_a_truth_value() -> None:
    class Base:
        def __init__(self, flag: bool = False, plain=True, record: bool | str = False) -> None: ...  # type: ignore[no-untyped-def]

    class Passing(Base):
        def __init__(self, mode: str = "a", **kwargs: Any) -> None: ...

    class Closed(Base):
        def __init__(self, mode: str = "a") -> None: ...

    assert boolean_arguments(Passing) == {"flag", "plain"}
    assert accepted_arguments(Passing) == (["mode", "flag", "plain", "record"], True)
    assert boolean_arguments(Closed) == set()
    assert accepted_arguments(Closed) == (["mode"], False)


def problem(**keys: Any) -> str:
    with pytest.raises(SpecError) as error:
        build(**keys)
    return "\n".join(map(str, error.value.problems))


@pytest.mark.parametrize(
    ("keys", "path", "words"),
    [
        ({"name": "CartPole-v1", "gravty": 1}, "env.gravty", ["sutton_barto_reward", "render_mode"]),
        ({"name": PREFIX + "Toy-v0", "mean_lenght": 2}, "env.mean_lenght", ["did you mean 'mean_length'"]),
        ({"name": "HalfCheetah-v5", "ctrl_cost": 1}, "env.ctrl_cost", ["ctrl_cost_weight", "width"]),
        ({"name": "ALE/Pong-v5", "sticky": 0.1}, "env.sticky", ["repeat_action_probability"]),
        ({"name": "ALE/Pong-v5", "reward_clipping": True}, "env.reward_clipping", ["clip_reward"]),
        ({"name": "CartPol-v1"}, "env.name", ["Did you mean: `CartPole`"]),
        ({"name": "CartPole-v9"}, "env.name", ["v1"]),
        ({"name": "no_such_module:Env-v0"}, "env.name", ["no_such_module"]),
        (
            {"name": PREFIX + "ToyDisable-v0"},
            "env.name",
            ["toys registers no env 'ToyDisable-v0'; did you mean 'ToyDisabled-v0'? it registers ToyDisabled-v0, Toy"],
        ),
        ({"name": "json:Env-v0"}, "env.name", ["json registers no env 'Env-v0'; importing it registers no envs"]),
        (
            {"name": "CartPole-v1", "num_envs": 10**11},
            "env.num_envs",
            ["100,000,000,000 envs", "95,367.4 GiB (1,024 bytes each); this machine has"],
        ),
        ({"name": PREFIX + "Spaced-v0", "observation": Text(3)}, "env.name", ["Text", "allowed: Box, Discrete"]),
        ({"name": PREFIX + "Faulty-v0"}, "env.name", ["fault"]),
        ({"name": "Pendulum-v1", "backend": "ale"}, "env.backend", ["ALE/"]),
        ({"name": "Pendulum-v1", "backend": "native"}, "env.backend", ["no vector env of its own"]),
        ({"name": "CartPole-v1", "backend": "native", "wrappers": ["TimeAwareObservation"]}, "env.backend", ["cannot be wrapped", "sync"]),
        ({"name": "LunarLander-v3", "backend": "envpool", "gravity": -5.0}, "env.backend", ["has no argument gravity"]),
        ({"name": "CartPole-v1", "backend": "native", "gravty": 1}, "env.gravty", []),
        ({"name": PREFIX + "Toy-v0", "backend": "envpool"}, "env.backend", ["envpool"]),
        (
            {"name": "CartPole-v1", "backend": "tests.env.own_backend:Counter"},
            "env.backend",
            ["has no class 'Counter'; did you mean 'Counting'"],
        ),
        ({"name": "CartPole-v1", "backend": "tests.env.own_backnd:Counting"}, "env.backend", ["cannot import 'tests.env.own_backnd'"]),
        (
            {"name": "CartPole-v1", "backend": "tests.env.own_backend:NOT_ONE"},
            "env.backend",
            ["not a subclass of slm_lab.env.backend.Backend"],
        ),
        ({"name": "CartPole-v1", "backend": "tests.env.own_backend:Partial"}, "env.backend", ["does not implement __init__, close, reset"]),
        (
            {"name": "CartPole-v1", "backend": "tests.env.own_backend:Counting"},
            "env.backend",
            ["cannot use backend", "not a counting env"],
        ),
        (
            {"name": "Any-v0", "backend": "tests.env.toys:Unnamed"},
            "env.name",
            ['Unnamed.metadata["autoreset_mode"] is None; expected AutoresetMode.NEXT_STEP, AutoresetMode.SAME_STEP, '],
        ),
        ({"name": "Any-v0", "backend": "tests.env.toys:Unnamed", "size": 2}, "env.size", ["Unnamed.num_envs is 2; expected", "3"]),
        ({"name": "Any-v0", "backend": "tests.env.toys:ToyVector", "mean_lenght": 2}, "env.mean_lenght", ["did you mean 'mean_length'"]),
        (
            {"name": "Any-v0", "backend": "tests.env.toys:Unnamed", "max_t": 5},
            "env.backend",
            ["no argument max_episode_steps", "env.max_t"],
        ),
        ({"name": PREFIX + "ToyVectorOnly-v0", "mean_lenght": 2}, "env.mean_lenght", ["did you mean 'mean_length'"]),
        ({"name": PREFIX + "ToyVectorOnly-v0", "wrappers": ["TimeAwareObservation"]}, "env.wrappers", ["vector env only", "remove it"]),
        ({"name": PREFIX + "ToyVectorOnly-v0", "backend": "sync"}, "env.backend", ["registered as a vector env only"]),
    ],
)
def test_user_errors(keys: dict[str, Any], path: str, words: list[str]) -> None:
    if "ALE" in keys["name"]:
        pytest.importorskip("ale_py")
    if "Cheetah" in keys["name"]:
        pytest.importorskip("mujoco")
    text = problem(**keys)
    assert text.startswith(path + ":"), text
    for word in words:
        assert word in text, text


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("package", "keys", "extra"),
    [
        ("ale_py", {"name": "ALE/Pong-v5"}, "slm-lab[atari]"),
        ("mujoco", {"name": "HalfCheetah-v5", "num_envs": 1}, "slm-lab[mujoco]"),
        ("Box2D", {"name": "LunarLander-v3", "num_envs": 1}, "slm-lab[box2d]"),
        ("cv2", {"name": "ALE/Pong-v5", "num_envs": 1, "backend": "sync"}, "slm-lab[atari]"),
    ],
)
def test_missing_packages(package: str, keys: dict[str, Any], extra: str) -> None:
    """The message names the extra to install; the test runs in a separate process in which the package cannot be imported."""
    code = f"""
import sys
sys.modules[{package!r}] = None
from slm_lab.env import make_env
from slm_lab.spec.report import SpecError
from slm_lab.spec.models.env import Backend as spec_backends
from slm_lab.spec.models.env import EnvSpec
try:
    make_env(EnvSpec(max_frame=1, **{keys!r}), 0).reset()
except SpecError as error:
    print(error)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert f"pip install '{extra}'" in done.stdout, done.stdout + done.stderr
    assert "env.name" in done.stdout


def test_missing_envpool(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without EnvPool, "auto" chooses the next backend for the same env; the backend "envpool" is an error."""
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert problem(name="CartPole-v1", backend="envpool").startswith("env.backend: cannot use backend 'envpool'")
    assert "pip install 'slm-lab[envpool]'" in problem(name="CartPole-v1", backend="envpool")
    assert chosen("Acrobot-v1") == "sync"


def test_every_backend_is_in_the_spec() -> None:
    assert set(get_args(get_args(spec_backends)[0])) == {"auto", *BACKENDS}
    assert all(name == backend.name for name, backend in BACKENDS.items())


def test_mujoco_stays_quiet(tmp_path: Path) -> None:
    """MuJoCo's warnings about Gymnasium's own models appear neither on the screen nor in MUJOCO_LOG.TXT."""
    pytest.importorskip("mujoco")
    made = "make_env(EnvSpec(name='HalfCheetah-v5', max_frame=1), 0).reset()"
    code = f"from slm_lab.env import make_env; from slm_lab.spec.models.env import EnvSpec; {made}"
    root = Path(__file__).parents[2]
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True, cwd=tmp_path, env={"PYTHONPATH": str(root)}
    )
    assert done.stdout + done.stderr == ""
    assert not list(tmp_path.iterdir())


def test_constructor_that_fails_in_a_worker() -> None:
    text = problem(name=PREFIX + "Faulty-v0", fault="make", backend="async", num_envs=2)
    assert "no licence in this process" in text
    assert "toys.py" in text  # the traceback of the worker process


FAULTS_OF_WORKERS = [
    ("step", "the robot fell over"),
    ("die", r"^the worker process of env [01] ended with exit code 3"),
    ("kill", r"^the worker process of env [01] was killed by SIGKILL \(often: out of memory\)"),
    ("exit", r"env [01], step 1: sys.exit\('enough'\) was called in .*toys\.py, line \d+$"),
    ("interrupt", r"env [01], step 1: KeyboardInterrupt was raised \(by code, not by a signal\) in .*toys\.py, line \d+$"),
]


@pytest.mark.parametrize(("fault", "words"), FAULTS_OF_WORKERS)
def test_step_that_fails_in_a_worker(fault: str, words: str) -> None:
    env = build(PREFIX + "Faulty-v0", 2, fault=fault, backend="async")
    env.reset()
    with pytest.raises(RuntimeError, match=words):
        env.step(np.zeros(2, np.int64))
    processes = env._backend._vec.processes  # type: ignore[attr-defined]
    env.close()
    assert not any(process.is_alive() for process in processes)


def test_close_does_not_wait_for_an_env_that_hangs() -> None:
    env = build(PREFIX + "Faulty-v0", 2, fault="close", backend="async")
    env.reset()
    start = time.monotonic()
    env.close()
    assert time.monotonic() - start < 10


def test_error_of_an_env_in_process_is_its_own() -> None:
    env = build(PREFIX + "Faulty-v0", 2, fault="step")
    env.reset()
    with pytest.raises(ValueError, match="the robot fell over"):
        env.step(np.zeros(2, np.int64))


def test_envpool_id_that_gymnasium_does_not_know() -> None:
    pytest.importorskip("envpool")
    with pytest.raises(gym.error.Error):
        gym.spec("Catch-v0")
    env = build("Catch-v0", 2, backend="envpool")
    assert env.reset().shape[0] == 2
    env.close()


def test_only_a_vector_env_that_is_known_to_hands_out_fresh_arrays(monkeypatch: pytest.MonkeyPatch) -> None:
    """An id can register a different vector env together with CartPole's single env; that one may reuse its arrays."""
    own = gym.envs.registration.EnvSpec(
        "Own-v0",
        entry_point="gymnasium.envs.classic_control.cartpole:CartPoleEnv",
        vector_entry_point="tests.env.toys:ToyVector",
        max_episode_steps=9,
    )
    monkeypatch.setitem(gym.registry, "Own-v0", own)
    for name, fresh in (("CartPole-v1", True), ("Own-v0", False)):
        backend = BACKENDS["native"](make_env_request(EnvSpec(name=name, max_frame=1, num_envs=4), 4))
        assert backend.returns_new_arrays is fresh
        backend.close()


def test_hidden_random_streams_are_new_ones_whenever_a_run_continues() -> None:
    """The positions of hidden streams are unknown; with the seeds of the first start, the same episodes would begin again."""
    keys = {"backend": "tests.env.own_backend:Hidden"}
    env = build("Counting-v0", 2, **keys)
    unused, starts = env.state_dict(), []
    for _ in range(3):
        starts.append(env.reset().ravel().tolist())
        state, env = env.state_dict(), build("Counting-v0", 2, **keys)
        env.load_state_dict(state)
        assert not env.resume()
    assert len({number for start in starts for number in start}) == 6
    env.load_state_dict(state)
    again = env.reset().ravel().tolist()
    assert again not in starts
    env.load_state_dict(state)
    assert env.reset().ravel().tolist() == again, "the same state is continued in the same way"
    env.load_state_dict(unused)
    assert env.reset().ravel().tolist() == starts[0], "nothing was drawn before"


def test_a_backend_of_the_users_own() -> None:
    """It is named by its import path and steps an id that Gymnasium does not know; its errors are problems of env.backend."""
    backend = "tests.env.own_backend:Counting"
    env = build("Counting-v0", 2, backend=backend, start=3.0)
    assert env.backend == env.info.backend == backend
    np.testing.assert_array_equal(env.reset(), [[3], [3]])
    steps = [env.step(np.zeros(2, np.int64)) for _ in range(7)]
    np.testing.assert_array_equal([step.last_obs_N[0, 0] for step in steps], [4, 5, 6, 7, 4, 5, 6])
    assert [bool(step.truncated_N[0]) for step in steps] == [False] * 3 + [True] + [False] * 3
    state = env.state_dict()
    other = build("Counting-v0", 2, backend=backend, start=3.0)
    other.load_state_dict(state)
    assert other.resume()
    np.testing.assert_array_equal(other.step(np.zeros(2, np.int64)).obs_N, env.step(np.zeros(2, np.int64)).obs_N)
    env.close()
