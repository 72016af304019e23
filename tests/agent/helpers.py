"""A toy env and small specs for the agent's tests."""

from __future__ import annotations

import io
from collections.abc import Iterator
from itertools import islice
from typing import Any

import numpy as np
import torch

from slm_lab.agent.agent import Agent
from slm_lab.agent.build import build_agent
from slm_lab.lib.clock import Clock
from slm_lab.lib.records import ActionSpace, ActOut, EnvInfo, Episode, ObservationSpace, VecStep
from slm_lab.lib.rng import session_seeds
from slm_lab.spec.models.spec import Spec

DISCRETE = ActionSpace("discrete", (3,), 1)
CONTINUOUS = ActionSpace("continuous", (), 2)


def info(num_envs: int = 3, action: ActionSpace = DISCRETE, shape: tuple[int, ...] = (4,), dtype: Any = "float32") -> EnvInfo:
    return EnvInfo(num_envs, ObservationSpace(shape, dtype), action)


class ToyEnv:
    """Env with random observations and rewards, terminations and truncations, and (with `next_step`) a dummy row after each episode end."""

    def __init__(self, env_info: EnvInfo, seed: int = 0, next_step: bool = False) -> None:
        self.info, self.next_step = env_info, next_step
        self.rng = np.random.default_rng(seed)
        self.ended = np.zeros(env_info.num_envs, bool)
        self.length = np.zeros(env_info.num_envs, int)

    def _obs(self) -> np.ndarray:
        space = self.info.observation
        if space.dtype == "uint8":
            return self.rng.integers(0, 256, (self.info.num_envs, *space.shape)).astype(np.uint8)
        return self.rng.normal(size=(self.info.num_envs, *space.shape)).astype(np.float32)

    def reset(self) -> np.ndarray:
        return self._obs()

    def step(self, action_N: np.ndarray) -> VecStep:
        n = self.info.num_envs
        valid = ~self.ended if self.next_step else np.ones(n, bool)
        terminated = (self.rng.random(n) < 0.15) & valid
        truncated = (self.rng.random(n) < 0.15) & ~terminated & valid
        done = terminated | truncated
        reward = np.where(valid, self.rng.normal(size=n), 0.0).astype(np.float32)
        last_obs = self._obs()
        if self.next_step:
            obs, first = last_obs, self.ended
            self.ended = done
        else:
            obs, first = np.where(done.reshape(-1, *[1] * (last_obs.ndim - 1)), self._obs(), last_obs), done
        self.length += valid
        episodes = [Episode(int(i), 1.0, int(self.length[i])) for i in np.flatnonzero(done)]
        self.length[done] = 0
        return VecStep(reward, terminated, truncated, last_obs, obs, first, valid, episodes)


MLP = {"name": "MLPNet", "hid_layers": [8], "hid_layers_activation": "tanh", "optim_spec": {"name": "Adam", "lr": 0.01}}
RNN = {"name": "RecurrentNet", "rnn_hidden_size": 5, "seq_len": 4, "optim_spec": {"name": "Adam", "lr": 0.01}}


def spec(algorithm: dict[str, Any], net: dict[str, Any] | None = None, memory: str = "OnPolicyBatchReplay", num_envs: int = 3) -> Spec:
    agent = {"algorithm": algorithm, "memory": {"name": memory}, "net": net or MLP}
    return Spec.model_validate({"name": "toy", "agent": agent, "env": {"name": "Toy-v0", "num_envs": num_envs, "max_frame": 1000}})


def changed(toy: Spec, **sections: dict[str, Any]) -> Spec:
    """Return a spec in which keys of sections of `agent` are replaced, such as `net={"tf32": True}`. The new values are not validated."""
    update = {name: getattr(toy.agent, name).model_copy(update=keys) for name, keys in sections.items()}
    return toy.model_copy(update={"agent": toy.agent.model_copy(update=update)})


def reloaded(state: Any) -> Any:
    """Save a state with torch.save, load it again, and return it."""
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def agent_of(toy: Spec, env_info: EnvInfo, seed: int = 0) -> Agent:
    return build_agent(toy, env_info, session_seeds(seed, 0, 0), Clock())


class Acting:
    """Carries an agent's hidden state from step to step, as a Session does."""

    def __init__(self, agent: Agent, num_envs: int) -> None:
        self.agent = agent
        self.state_N, self.first_N = agent.policy.initial_state(num_envs), np.ones(num_envs, np.bool_)

    def act(self, obs_N: np.ndarray) -> ActOut:
        return self.agent.act(obs_N, self.state_N)

    def observe(self, obs_N: np.ndarray, out: ActOut, step: VecStep) -> None:
        self.agent.observe(obs_N, self.first_N, self.state_N, out, step)
        self.first_N = step.first_N
        if out.state_N is not None:
            self.state_N = np.where(step.first_N[:, None], np.float32(0.0), out.state_N)


def steps_of(agent: Agent, env: ToyEnv) -> Iterator[tuple[np.ndarray, ActOut, VecStep]]:
    """Act, step, tick and observe without end; yield (observations, action output, env step). The caller runs the updates."""
    obs, acting = env.reset(), Acting(agent, env.info.num_envs)
    while True:
        out = acting.act(obs)
        step = env.step(out.action_N)
        agent.clock.tick(env.info.num_envs)
        acting.observe(obs, out, step)
        yield obs, out, step
        obs = step.obs_N


def gathered(
    algorithm: dict[str, Any],
    memory: str = "OnPolicyBatchReplay",
    next_step: bool = False,
    net: dict[str, Any] | None = None,
    action: ActionSpace = DISCRETE,
) -> Any:
    """Return an agent whose on-policy memory is ready; it has not learned yet."""
    agent = agent_of(spec(algorithm, net, memory), info(3, action))
    next(None for _ in steps_of(agent, ToyEnv(info(3, action), 4, next_step)) if agent.ready())
    return agent


def drive(agent: Agent, env: ToyEnv, steps: int) -> list[Any]:
    """Act, step, observe and update for `steps` vector steps; return the metrics of the updates."""
    return [metrics for metrics in islice(drive_on(agent, env), steps) if metrics is not None]


def drive_on(agent: Agent, env: ToyEnv) -> Iterator[Any]:
    """Act, step, observe and update without end; after each vector step, yield the metrics of its update, or None without an update."""
    for _ in steps_of(agent, env):
        metrics = agent.update() if agent.ready() else None
        agent.end_step()
        yield metrics
