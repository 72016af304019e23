"""Small envs with PettingZoo's interfaces."""

from __future__ import annotations

from typing import Any

import numpy as np
from gymnasium import spaces
from pettingzoo import AECEnv, ParallelEnv

NAMES = ["a", "b", "c"]


class Countdown(ParallelEnv):
    """Agent number i ends after `ends[i]` steps. Observations: number of the agent, steps so far, a number drawn at the reset.

    Rewards: 10 · (number of the agent + 1) + action. The last agent joins after `comes` steps (0: at the reset).
    """

    metadata: dict[str, Any] = {"name": "countdown"}

    def __init__(self, ends: tuple[int, ...] = (1, 3, 3), masks: bool = False, state: bool = False, comes: int = 0) -> None:
        self._comes = comes
        self.possible_agents = NAMES[: len(ends)]
        self._ends, self._masks, self._has_state = ends, masks, state
        self.faults: dict[str, Any] = {}
        self.rng = np.random.default_rng()

    def observation_space(self, agent: str) -> spaces.Space[Any]:
        return spaces.Box(-1e3, 1e3, (3,), np.float32)

    def action_space(self, agent: str) -> spaces.Space[Any]:
        return spaces.Discrete(3)

    def _seen(self) -> dict[str, Any]:
        return {name: np.array([NAMES.index(name), self.steps, self.drawn], np.float32) for name in self.agents}

    def _infos(self) -> dict[str, Any]:
        masks = {name: {"action_mask": np.array([1, 0, NAMES.index(name) > 0])} for name in self.agents}
        return masks if self._masks else {name: {"steps": self.steps} for name in self.agents}

    def reset(self, seed: int | None = None, options: Any = None) -> Any:
        if seed is not None:
            self.rng = np.random.default_rng(seed)
        self.agents = self.possible_agents[: -1 if self._comes else None]
        self.steps, self.drawn = 0, int(self.rng.integers(100))
        return self._seen(), self._infos()

    def state(self) -> np.ndarray:
        if not self._has_state:
            return super().state()
        return np.array([self.steps, self.drawn], np.float32)

    def step(self, actions: dict[str, int]) -> Any:
        assert list(actions) == self.agents
        self.steps += 1
        rewards = {name: 10 * (NAMES.index(name) + 1) + action for name, action in actions.items()}
        if self.steps == self._comes:
            self.agents = [*self.agents, self.possible_agents[-1]]
        terminated = {name: self.steps == self._ends[NAMES.index(name)] for name in self.agents}
        outcome = [self._seen(), rewards, terminated, dict.fromkeys(self.agents, False), self._infos()]
        self.agents = [name for name in self.agents if not terminated[name]]
        for index, part in self.faults.items():
            if index == "agents":
                self.agents = part
            else:
                outcome[int(index)].update(part)
                outcome[int(index)] = {name: value for name, value in outcome[int(index)].items() if value is not ...}
        return tuple(outcome)


class Unequal(Countdown):
    """Countdown whose agent b observes one number more than the others and has other actions: four, or with `continuous` two numbers.

    Rewards: 10 · (number of the agent + 1) + the sum of the action. The mask forbids the first action. With `alike` all agents have the
    spaces of b: the observations of the others end with a 0, and their first three actions are valid.
    """

    def __init__(self, continuous: bool = False, alike: bool = False, **more: Any) -> None:
        super().__init__(**more)
        self._continuous, self._alike = continuous, alike

    def _wide(self, agent: str) -> bool:
        return agent == "b" or self._alike

    def observation_space(self, agent: str) -> spaces.Space[Any]:
        return spaces.Box(-1e3, 1e3, (3 if self._wide(agent) else 2,), np.float32)

    def action_space(self, agent: str) -> spaces.Space[Any]:
        if self._continuous and self._wide(agent):
            return spaces.Box(-2.0, 2.0, (2,), np.float32)
        return spaces.Discrete(4 if self._wide(agent) else 3)

    def _seen(self) -> dict[str, Any]:
        seen = {name: obs if name == "b" else obs * [1, 1, 0] for name, obs in super()._seen().items()}
        return {name: obs[: 3 if self._wide(name) else 2].astype(np.float32) for name, obs in seen.items()}

    def _infos(self) -> dict[str, Any]:
        if not self._masks:
            return super()._infos()
        wide = {name: name == "b" for name in self.agents}
        return {name: {"action_mask": np.array([0, 1, 1, wide[name]][: 4 if self._wide(name) else 3])} for name in self.agents}

    def step(self, actions: dict[str, Any]) -> Any:
        for name, action in actions.items():
            assert self.action_space(name).contains(action), f"{name}: {action!r}"
        return super().step({name: float(np.sum(action)) for name, action in actions.items()})


class Numbered(ParallelEnv):
    """Agents 0 and 1, whose rewards are their actions."""

    metadata: dict[str, Any] = {"name": "numbered"}
    possible_agents = (0, 1)

    def observation_space(self, agent: int) -> spaces.Space[Any]:
        return spaces.Box(0, 1, (1,), np.float32)

    def action_space(self, agent: int) -> spaces.Space[Any]:
        return spaces.Discrete(3)

    def reset(self, seed: int | None = None, options: Any = None) -> Any:
        self.agents = list(self.possible_agents)
        return {name: np.zeros(1, np.float32) for name in self.agents}, {}

    def step(self, actions: dict[int, int]) -> Any:
        over = dict.fromkeys(actions, False)
        return {name: np.zeros(1, np.float32) for name in actions}, actions, over, over, {}


class Leaving(ParallelEnv):
    """Env in which agent a terminates after one step, and agent b after four steps.

    Args: width: number of elements of the observations of a (those of b have 2). first, last: value of all elements of the first
    observations, and of the last observation of a. images: whether observations also contain a white image.
    """

    metadata: dict[str, Any] = {"name": "leaving"}
    possible_agents = ("a", "b")

    def __init__(self, width: int = 2, last: float = 0.0, first: float = 0.0, images: bool = False) -> None:
        self.width, self.last, self.first, self.images = width, last, first, images

    def observation_space(self, agent: str) -> spaces.Space[Any]:
        numbers = spaces.Box(-9, 9, (self.width if agent == "a" else 2,), np.float32)
        return spaces.Dict({"numbers": numbers, "image": spaces.Box(0, 255, (4, 4, 3), np.uint8)}) if self.images else numbers

    def action_space(self, agent: str) -> spaces.Space[Any]:
        return spaces.Discrete(2)

    def _observe(self, agent: str, value: float) -> Any:
        numbers = np.full(self.width if agent == "a" else 2, value, np.float32)
        return {"numbers": numbers, "image": np.full((4, 4, 3), 255, np.uint8)} if self.images else numbers

    def reset(self, seed: int | None = None, options: Any = None) -> Any:
        self.agents, self.t = ["a", "b"], 0
        return {agent: self._observe(agent, self.first) for agent in self.agents}, {}

    def step(self, actions: Any) -> Any:
        self.t += 1
        agents, ends = self.agents, {"a": True, "b": self.t == 4}
        self.agents = [agent for agent in agents if not ends[agent]]
        obs = {agent: self._observe(agent, self.last if agent == "a" else 0.0) for agent in agents}
        return obs, dict.fromkeys(agents, 1.0), {agent: ends[agent] for agent in agents}, dict.fromkeys(agents, False), {}


class Turns(AECEnv):
    """Agents act in the order `order`. At a sum of actions of 4 or more, the agent that acted gets 1, the others −1, and all agents end.

    With `leaves`, the action 0 ends the agent that took it. Observations: the sum and the number of the agent. The mask allows 1 and 2,
    and 0 with `leaves`.
    """

    metadata: dict[str, Any] = {"name": "turns"}

    def __init__(self, order: str = "abb", leaves: bool = False) -> None:
        self.possible_agents = sorted(set(order))
        self._order, self._leaves = order, leaves
        self.selected: str | None = None

    def observation_space(self, agent: str) -> spaces.Space[Any]:
        mask = spaces.Box(0, 1, (3,), np.int8)
        return spaces.Dict(action_mask=mask, observation=spaces.Box(-1e3, 1e3, (2,), np.float32))

    def action_space(self, agent: str) -> spaces.Space[Any]:
        return spaces.Discrete(3)

    def observe(self, agent: str) -> Any:
        mask = np.array([self._leaves, 1, 1], np.int8) if agent == self.agent_selection else np.zeros(3, np.int8)
        return {"observation": np.array([self.total, NAMES.index(agent)], np.float32), "action_mask": mask}

    def reset(self, seed: int | None = None, options: Any = None) -> None:
        self.agents, self.total, self._turn = list(self.possible_agents), 0, 0
        self.rewards = dict.fromkeys(self.agents, 0.0)
        self.terminations, self.truncations = dict.fromkeys(self.agents, False), dict.fromkeys(self.agents, False)
        self._cumulative_rewards, self.infos = dict.fromkeys(self.agents, 0.0), {name: {} for name in self.agents}
        self.agent_selection = self._order[0]

    def step(self, action: int | None) -> None:
        agent = self.agent_selection
        if self.terminations[agent]:
            self._was_dead_step(action)
            return
        self.total += action
        over = self.total >= 4
        self.rewards = {name: 0.0 if not over else 1.0 if name == agent else -1.0 for name in self.agents}
        if over:
            self.terminations = dict.fromkeys(self.agents, True)
        elif action == 0:
            self.terminations[agent] = True
        self._next()
        self._deads_step_first()
        self.agent_selection = self.selected or self.agent_selection

    def _next(self) -> None:
        while True:
            self._turn = (self._turn + 1) % len(self._order)
            name = self._order[self._turn]
            if name in self.agents and (not self.terminations[name] or all(self.terminations.values())):
                self.agent_selection = name
                return


class UnequalTurns(Turns):
    """Turns whose agent b observes one more number, 7, and has one more action, which counts as 1; for `alike` see Unequal."""

    def __init__(self, alike: bool = False, **more: Any) -> None:
        super().__init__(**more)
        self._alike = alike

    def _wide(self, agent: str) -> bool:
        return agent == "b" or self._alike

    def observation_space(self, agent: str) -> spaces.Space[Any]:
        numbers, actions = (3, 4) if self._wide(agent) else (2, 3)
        return spaces.Dict(action_mask=spaces.Box(0, 1, (actions,), np.int8), observation=spaces.Box(-1e3, 1e3, (numbers,), np.float32))

    def action_space(self, agent: str) -> spaces.Space[Any]:
        return spaces.Discrete(4 if self._wide(agent) else 3)

    def observe(self, agent: str) -> Any:
        seen, wide = super().observe(agent), self._wide(agent)
        own = np.append(seen["observation"], np.float32(7 if agent == "b" else 0))
        mask = np.append(seen["action_mask"], np.int8(agent == "b" and agent == self.agent_selection))
        return {"observation": own[: 3 if wide else 2], "action_mask": mask[: 4 if wide else 3]}

    def step(self, action: int | None) -> None:
        assert action is None or self.action_space(self.agent_selection).contains(action)
        super().step(1 if action == 3 else action)


class Pictures(Numbered):
    """Agents that observe images of different sizes."""

    def observation_space(self, agent: int) -> spaces.Space[Any]:
        return spaces.Box(0, 255, (10 + 2 * agent, 10, 3), np.uint8)

    def reset(self, seed: int | None = None, options: Any = None) -> Any:
        self.agents = list(self.possible_agents)
        return {name: np.zeros(self.observation_space(name).shape or (), np.uint8) for name in self.agents}, {}


def not_an_env() -> object:
    return object()
