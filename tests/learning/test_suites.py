"""Each kind of algorithm trains in two envs of each suite of EnvPool."""

from __future__ import annotations

import math
from typing import Any

import pytest

from slm_lab.experiment.session.session import Session
from slm_lab.spec.load.loader import load_spec
from slm_lab.spec.report import SpecError

pytest.importorskip("envpool")

ENVS: dict[str, tuple[int, dict[str, Any], dict[str, Any]]] = {
    "CheetahRun-v1": (20_000, {}, {}),
    "CartpoleSwingup-v1": (20_000, {}, {}),
    "MuJoCoPlayground/Go1JoystickFlatTerrain-v1": (5_000, {"obs_keys": ["state"]}, {}),
    "MuJoCoPlayground/PandaPickCube-v1": (5_000, {}, {}),
    "MetaWorld/Reach-v3": (10_000, {}, {}),
    "MetaWorld/DoorOpen-v3": (10_000, {}, {}),
    "FetchReachDense-v4": (5_000, {}, {}),
    "PointMaze_UMaze-v3": (5_000, {}, {}),
    "MiniGrid-Empty-5x5-v0": (20_000, {}, {}),
    "BabyAI-GoToObj-v0": (20_000, {}, {}),
    "Jumanji/Game2048-v1": (20_000, {}, {}),
    "Jumanji/Snake-v1": (10_000, {}, {"name": "MLPNet", "input": "vector"}),
    "highway-fast-v0": (10_000, {}, {}),
    "racetrack-v0": (5_000, {}, {}),
    "D1Basic-v1": (1_000, {"use_combined_action": True}, {}),
    "Basic-v1": (1_000, {}, {}),
    "gfootball/academy_empty_goal-v1": (1_000, {}, {}),
    "gfootball/1_vs_1_easy-v1": (1_000, {}, {}),
    "Play2048-v1": (20_000, {}, {}),
    "Catch-v0": (20_000, {}, {}),
}
"""Env → frames, keys of env and of agent.net."""


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", ENVS)
@pytest.mark.parametrize("algorithm", ["PPO", "SoftActorCritic", "DQN"])
def test_trains(name: str, algorithm: str) -> None:
    frames, env, net = ENVS[name]
    agent: dict[str, Any] = {"algorithm": {"name": algorithm}} | ({"net": net} if net else {})
    if algorithm != "PPO":
        frames = min(frames, 2_000)
        agent["algorithm"] |= {"training_start_step": 200}
        agent["memory"] = {"name": "Replay", "max_size": 5_000, "batch_size": 32}
    body = {
        "agent": agent,
        "env": {"name": name, "num_envs": 4, "max_frame": frames, **env},
        "meta": {"eval_episodes": 0, "log_frequency": frames // 4},
    }
    try:
        rows = Session(load_spec(body)).run().rows
    except SpecError as error:
        if "requires a discrete action" not in str(error):
            raise
        pytest.skip(str(error))
    assert int(rows[-1]["frame"]) == frames  # type: ignore[arg-type]
    assert int(rows[-1]["opt_step"]) > 0  # type: ignore[arg-type]
    losses = [float(row["loss"]) for row in rows if row["loss"] is not None]  # type: ignore[arg-type]
    assert losses
    assert all(map(math.isfinite, losses))
