"""Small envs that make mistakes visible. Importing this module registers them: `tests.env.toys:Toy-v0`."""

from __future__ import annotations

import atexit
import json
import multiprocessing
import os
import random
import signal
import subprocess
import sys
import time
from copy import deepcopy
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, SyncVectorEnv

PREFIX = "tests.env.toys:"


class Toy(gym.Env[np.ndarray, int]):
    """Episodes of random length; every number depends on the episode, the step, the action and the random stream.

    With `reuse` observations are written into one array again and again, as a careless env does. With `diverges` an episode that is
    terminated ends with an observation that is not finite.
    """

    def __init__(self, mean_length: float = 6.0, reuse: bool = True, diverges: bool = False) -> None:
        self._reuse, self._diverges = reuse, diverges
        self.observation_space = spaces.Box(-np.inf, np.inf, (3,), np.float64)
        self.action_space = spaces.Discrete(3, start=5)
        self._stop = 1 / mean_length
        self._obs = np.zeros(3)
        self._t = 0

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[np.ndarray, dict[str, Any]]:
        super().reset(seed=seed)
        self._t = 0
        self._obs[:] = 0, self.np_random.normal(), 100
        return self._observation(), {"lives": None}

    def step(self, action: int) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        assert self.action_space.contains(int(action)), action
        self._t += 1
        self._obs[:] = self._t, self.np_random.normal(), action
        reward, terminated = float(self._obs.sum()), bool(self.np_random.random() < self._stop)
        if terminated and self._diverges:
            self._obs[1:] = np.nan, np.inf
        return self._observation(), reward, terminated, False, {"final_obs": self._t}

    def _observation(self) -> np.ndarray:
        return self._obs if self._reuse else self._obs.copy()


class Spaced(gym.Env[Any, Any]):
    """Env with the given spaces."""

    def __init__(self, observation: spaces.Space[Any] | None = None, action: spaces.Space[Any] | None = None) -> None:
        # a copy for each env: otherwise all envs would draw from one random stream
        self.observation_space = deepcopy(observation) or spaces.Text(3)
        self.action_space = deepcopy(action) or spaces.Discrete(2)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        if seed is not None:
            self.observation_space.seed(seed)
        return self.observation_space.sample(), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        assert self.action_space.contains(action), action
        return self.observation_space.sample(), 1.0, bool(self.np_random.random() < 0.3), False, {}


class GlobalDraws(Toy):
    """Draws rewards from the process-wide generators of Python, numpy and torch, as a careless env does."""

    def step(self, action: int) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        import torch  # not at the top: the import takes two seconds in each env process

        obs, _, terminated, truncated, info = super().step(action)
        return obs, random.random() + np.random.random() + float(torch.rand(())), terminated, truncated, info


class Faulty(Toy):
    """Fails as `fault` says: "make", "block" or "close" in worker processes only, "step", "die", "kill", "exit" or "interrupt" in
    the step after `after` steps."""

    def __init__(self, fault: str, mark: str = "", after: int = 0) -> None:
        super().__init__()
        self.fault, self.left = fault, after
        if fault == "block" and multiprocessing.parent_process() is not None:
            if mark:
                Path(mark).write_text(str(os.getpid()))
            time.sleep(300)
        if fault == "make" and multiprocessing.parent_process() is not None:
            raise OSError("no licence in this process")

    def step(self, action: int) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        self.left -= 1
        if self.fault == "step" and self.left < 0:
            raise ValueError("the robot fell over")
        if self.fault == "die" and self.left < 0:
            os._exit(3)
        if self.fault == "kill" and self.left < 0:
            os.kill(os.getpid(), signal.SIGKILL)
        if self.fault == "exit" and self.left < 0:
            sys.exit("enough")
        if self.fault == "interrupt" and self.left < 0:
            raise KeyboardInterrupt
        return super().step(action)

    def close(self) -> None:
        if self.fault == "close" and multiprocessing.parent_process() is not None:
            time.sleep(300)


class Wanderer(Toy):
    """Changes the working directory to `folder`, which can be relative, in its constructor."""

    def __init__(self, folder: str) -> None:
        super().__init__()
        os.chdir(folder)


class Simulated(Toy):
    """Starts a program, as envs with a simulator do, and never ends it; writes the ids of both processes into `folder`."""

    def __init__(self, folder: str, blocks: bool = False) -> None:
        super().__init__()
        self.blocks = blocks
        if multiprocessing.parent_process() is not None:
            self.simulator = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(300)"])
            (Path(folder) / "worker").write_text(str(os.getpid()))
            (Path(folder) / "simulator").write_text(str(self.simulator.pid))

    def step(self, action: int) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        if self.blocks:
            time.sleep(300)
        return super().step(action)


class Signed(Toy):
    """Creates an empty file in `folder`, named after the process id, in each process that steps the env."""

    def __init__(self, folder: str) -> None:
        super().__init__()
        self.folder = Path(folder)

    def step(self, action: int) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        (self.folder / str(os.getpid())).touch()
        return super().step(action)


class Reporting(Toy):
    """Writes a JSON file about its worker process into `folder`, and an empty file when the process runs its exit hooks."""

    def __init__(self, folder: str) -> None:
        super().__init__()
        if multiprocessing.parent_process() is not None:
            own = Path(folder) / str(os.getpid())
            about = {"server": os.getppid(), "variable": os.environ.get("SLM_LAB_TEST"), "random": np.random.random_sample()}
            own.with_suffix(".json").write_text(json.dumps(about | {"group": os.getpgid(0), "pid": os.getpid()}))
            atexit.register(own.with_suffix(".exit").touch)


class Nested(gym.Env[Any, Any]):
    """Contains another env without being its wrapper, and draws from the random streams of its spaces."""

    def __init__(self) -> None:
        self.inner = gym.make("CartPole-v1", max_episode_steps=None)
        self.noise = spaces.Dict({"a": spaces.Box(-1.0, 1.0, (4,), np.float32), "b": spaces.Discrete(9)})
        self.observation_space = spaces.Box(-np.inf, np.inf, (4,), np.float32)
        self.action_space = self.inner.action_space
        self.base = self.inner.unwrapped

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[np.ndarray, dict[str, Any]]:
        super().reset(seed=seed)
        if seed is not None:
            self.noise.seed(seed)
        return self._observation(self.inner.reset(seed=seed)[0]), {}

    def step(self, action: int) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        obs, _, terminated, truncated, _ = self.inner.step(action)
        return self._observation(obs), float(self.base.state[0]), terminated, truncated, {}  # type: ignore[attr-defined]

    def _observation(self, obs: np.ndarray) -> np.ndarray:
        drawn = self.noise.sample()
        return obs + drawn["a"] + np.float32(drawn["b"])


class Anything(Toy):
    """Accepts any keyword argument."""

    def __init__(self, mean_length: float = 6.0, **kwargs: Any) -> None:
        super().__init__(mean_length)


class ToyVector(SyncVectorEnv[Any, Any]):
    """Vector env class that an id can register as its vector entry point."""

    def __init__(
        self, num_envs: int, max_episode_steps: int = 9, mode: str = "NextStep", mean_length: float = 6.0, diverges: bool = False
    ) -> None:
        def make() -> gym.Env[Any, Any]:
            return gym.wrappers.TimeLimit(Toy(mean_length, reuse=False, diverges=diverges), max_episode_steps)

        super().__init__([make] * num_envs, autoreset_mode=AutoresetMode(mode))


class Reusing(ToyVector):
    """Returns its internal arrays without a copy; a reset clears those of flags and rewards, as vector envs that work in place may do."""

    def __init__(self, num_envs: int, max_episode_steps: int = 9, mean_length: float = 6.0) -> None:
        super().__init__(num_envs, max_episode_steps, "Disabled", mean_length)
        self.copy = False

    def step(self, actions: Any) -> Any:
        obs, *_, info = super().step(actions)
        return obs, self._rewards, self._terminations, self._truncations, info

    def reset(self, *, seed: Any = None, options: Any = None) -> Any:
        result = super().reset(seed=seed, options=options)
        self._rewards[:] = 0.0
        return result


class Unnamed(ToyVector):
    """Does not declare its autoreset mode, unless `size` sets the number of envs."""

    metadata: dict[str, Any] = {}

    def __init__(self, num_envs: int, size: int = 0) -> None:
        super().__init__(size or num_envs)
        self.metadata = {"autoreset_mode": AutoresetMode.NEXT_STEP} if size else {}


for name, entry in {
    "Toy": Toy,
    "Spaced": Spaced,
    "GlobalDraws": GlobalDraws,
    "Faulty": Faulty,
    "Signed": Signed,
    "Anything": Anything,
    "Nested": Nested,
    "Wanderer": Wanderer,
    "Simulated": Simulated,
    "Reporting": Reporting,
}.items():
    gym.register(f"{name}-v0", entry_point=f"tests.env.toys:{entry.__name__}", max_episode_steps=9)
for mode in ("NextStep", "SameStep", "Disabled"):
    gym.register(
        f"Toy{mode}-v0", entry_point="tests.env.toys:Toy", vector_entry_point="tests.env.toys:ToyVector", kwargs={}, max_episode_steps=9
    )
    gym.registry[f"Toy{mode}-v0"].kwargs = {"mode": mode}
gym.register("ToyVectorOnly-v0", vector_entry_point="tests.env.toys:ToyVector", max_episode_steps=9)


class Course(gym.Env[np.ndarray, int]):
    """Episodes with a given length and reward: `length` is an argument of the constructor; `bonus` and `label` are attributes."""

    def __init__(self, length: int = 3) -> None:
        self.length, self.bonus, self.label = length, 0.0, "easy"
        self.observation_space = spaces.Box(-10, 10, (2,), np.float32)
        self.action_space = spaces.Discrete(2)
        self._t = 0

    def _observe(self) -> np.ndarray:
        return self.np_random.normal(size=2).clip(-10, 10).astype(np.float32)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[np.ndarray, dict[str, Any]]:
        super().reset(seed=seed)
        self._t = 0
        return self._observe(), {}

    def step(self, action: int) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        self._t += 1
        return self._observe(), 1.0 + self.bonus, self._t >= self.length, False, {}


class Growing(Course):
    """A Course whose `size` changes the observation space."""

    def __init__(self, length: int = 3, size: int = 2) -> None:
        super().__init__(length)
        self.observation_space = spaces.Box(-10, 10, (size,), np.float32)


class Goal(gym.Env[dict[str, np.ndarray], int]):
    """Episodes of 5 steps on a line. The reward is `unit` times compute_reward, which is 0 at the goal and −1 elsewhere.

    With `reads_info`, compute_reward needs an entry of `info`.
    """

    def __init__(self, unit: float = 1.0, reads_info: bool = False) -> None:
        part = spaces.Box(-10, 10, (1,), np.float32)
        self.observation_space: Any = spaces.Dict({"achieved_goal": part, "desired_goal": part, "observation": part})
        self.action_space: Any = spaces.Discrete(2)
        self.unit, self.reads_info = unit, reads_info

    def _observe(self) -> dict[str, np.ndarray]:
        at = np.array([self._at], np.float32)
        return {"achieved_goal": at, "desired_goal": np.array([9.0], np.float32), "observation": at}

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
        super().reset(seed=seed)
        self._at, self._t = 0.0, 0
        return self._observe(), {}

    def step(self, action: int) -> tuple[dict[str, np.ndarray], float, bool, bool, dict[str, Any]]:
        self._at, self._t = self._at + action, self._t + 1
        reward = self.unit * float(self.compute_reward(np.array([self._at]), np.array([9.0]), {"known": True}))
        return self._observe(), reward, False, self._t == 5, {}

    def compute_reward(self, achieved_goal: np.ndarray, desired_goal: np.ndarray, info: Any) -> np.ndarray:
        assert not self.reads_info or info["known"]
        return np.asarray((achieved_goal == desired_goal).all(-1) - 1.0)


class HalfReward(gym.RewardWrapper[Any, Any]):
    """Halves rewards."""

    def reward(self, reward: Any) -> float:
        return float(reward) / 2


class HalfInStep(gym.Wrapper[Any, Any, Any, Any]):
    """Halves rewards in `step` instead of `reward`."""

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        obs, reward, *others = self.env.step(action)
        return obs, float(reward) / 2, *others  # type: ignore[return-value]


gym.register(id="Course-v0", entry_point=Course)
gym.register(id="Goal-v0", entry_point=Goal)
gym.register(id="Growing-v0", entry_point=Growing)
