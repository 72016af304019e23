"""Tests that SLM Lab's spec files build and train: 60 files of the folder SLM_LAB_SPECS, if it is set.

SLM_LAB_SPECS=…/SLM-Lab/slm_lab/spec pytest -m slow tests/published/test_files.py
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from slm_lab.cli.entry import main
from slm_lab.spec.load.files import raw_entries
from slm_lab.spec.load.loader import load_with_notices
from slm_lab.spec.models.spec import Spec
from tests.published.test_forms import enough, most_updates

FOLDER = os.environ.get("SLM_LAB_SPECS", "")
COUNT = 60
ENVS = {"playground": "playground/CheetahRun", "mujoco": "Hopper-v5", "atari": "ALE/Pong-v5"}
"""Word in a file's path → value of its ${env}."""


def entries() -> Iterator[tuple[str, str]]:
    """Yield the file and the name of each spec."""
    for file in sorted(Path(FOLDER).rglob("*.*")) if FOLDER else ():
        if file.suffix in (".json", ".yaml"):
            for name, raw in raw_entries(str(file))[1].items():
                agent = json.dumps(raw["agent"]) if isinstance(raw, dict) and "agent" in raw else ""
                if agent and not ("PPO" in agent and "OnPolicyReplay" in agent):
                    yield str(file), name


def components(file: str, name: str) -> tuple[str, ...]:
    """Return the names of a spec's algorithm, memory and net."""
    agent = raw_entries(file)[1][name]["agent"]
    agent = agent[0] if isinstance(agent, list) else agent
    names = ((agent.get(key) or {}) for key in ("algorithm", "memory", "net"))
    return tuple(str(one.get("name", one.get("type"))) for one in names)


def sample() -> list[tuple[str, str]]:
    """Return COUNT specs: one for each combination of algorithm, memory and net, and others spread evenly over the files."""
    every = list(entries())
    kinds = {components(*one): one for one in reversed(every)}
    others = [one for one in every if one not in kinds.values()]
    left = max(0, COUNT - len(kinds))
    return [*kinds.values(), *(others[index * len(others) // max(1, left)] for index in range(min(left, len(others))))]


SOME = sample()


def values(file: str, name: str) -> list[str]:
    """Return the assignments of the variables of a spec."""
    text = json.dumps(raw_entries(file)[1][name])
    env = next((env for word, env in ENVS.items() if word in file), "CartPole-v1")
    sets = [f"{key}={value}" for key, value in (("env", env), ("max_frame", 1_000_000)) if f"${{{key}}}" in text]
    return [*sets, "env.num_envs=64"] if "playground" in env else sets  # rollouts of 2,048 envs take 10 GB


def short(spec: Spec) -> list[str]:
    """Return --set arguments with which a Session trains twice within a few seconds."""
    algorithm = spec.agent.algorithm
    sets = ["meta.max_session=1"]  # mode dev runs one Session, which collects all frames, also with distributed
    if not algorithm.on_policy:
        return [*sets, "env.max_frame=1000000", "agent.algorithm.training_start_step=600", "agent.memory.max_size=5000"]
    if not spec.agent.memory.episodes and spec.agent.rollout_len > 32:
        sets.append(f"agent.algorithm.{'time_horizon' if hasattr(algorithm, 'time_horizon') else 'training_frequency'}=32")
    return sets


def frames_of(spec: Spec) -> int:
    """Return the frames for two updates.

    Off-policy specs get fewer than in test_forms: 40 updates from images in large batches take minutes.
    """
    algorithm, net = spec.agent.algorithm, spec.agent.net
    if algorithm.on_policy or net is None or net.recurrent:
        return enough(spec)
    start, step = spec.agent.training_start, max(algorithm.training_frequency, spec.env.num_envs)
    resets = 0 if spec.env.name.startswith("ALE/") else start // 8  # episodes are short, and the row after a reset is not a transition
    delay = getattr(algorithm, "policy_delay", 1)  # critic updates per policy update
    frames: int = (-(-(start + resets) // step) + max(1, delay)) * step
    return frames


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(("file", "name"), SOME)
def test_builds_and_trains(file: str, name: str, tmp_path: Path) -> None:
    """`check --build` passes, and mode dev makes at least two updates."""
    sets = values(file, name)
    words = [word for one in sets for word in ("--set", one)]
    assert main(["check", file, name, "--build", *words]) == 0
    sets += short(load_with_notices(file, name, sets).specs[0])
    spec = load_with_notices(file, name, sets).specs[0]
    frames = frames_of(spec)
    sets = [one for one in sets if not one.startswith("env.max_frame=")]
    sets += [f"env.max_frame={frames}", f"meta.log_frequency={max(1, frames // 2)}"]
    words = [word for one in sets for word in ("--set", one)]
    assert main([file, name, "dev", *words, "--data-dir", str(tmp_path / "data")]) == 0
    assert most_updates(tmp_path) >= 2 or not spec.agent.algorithm.learns
