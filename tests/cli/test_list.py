"""Tests of `list` and `--search`: it shows shipped and installed components quickly, without importing torch."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

import slm_lab
from slm_lab.cli import main
from slm_lab.spec.compat import env_ids
from slm_lab.spec.compat.env_ids import ATARI, KNOWN, current_id
from slm_lab.spec.load.files import spec_names, spec_summaries
from slm_lab.spec.models.algorithm import ALGORITHMS
from slm_lab.spec.models.memory import MEMORIES
from slm_lab.spec.models.net import NETS
from tests.wording import check_wording

ROOT = Path(slm_lab.__file__).parent.parent
Listed = Callable[..., str]


@pytest.fixture
def listed(capsys: pytest.CaptureFixture[str]) -> Listed:
    """Return a function that runs `list`, such as listed("envs", "--search", "pong"), and returns the output."""

    def run(*words: str) -> str:
        assert main(["list", *words]) == 0
        printed = capsys.readouterr()
        assert printed.err == ""
        return printed.out

    return run


@pytest.mark.parametrize(("kind", "names"), [("algorithms", ALGORITHMS), ("nets", NETS), ("memories", MEMORIES)])
def test_every_component_with_a_line(kind: str, names: dict[str, type], listed: Listed) -> None:
    text = listed(kind)
    lines = text.splitlines()
    assert [line.split()[0] for line in lines if not line.startswith(" ")] == list(names)
    for name, model in names.items():
        row = next(index for index, line in enumerate(lines) if line.split()[0] == name)
        assert lines[row + 1].strip().split()[0] == str(model.__doc__).split()[0]
    assert max(map(len, lines)) <= 80
    if kind == "algorithms":
        words = [" ".join(line.split()) for line in lines]
        assert "DQN off-policy discrete and multi_discrete actions" in words
        assert "PPO on-policy any actions" in words


def test_every_spec_that_ships_by_the_file_that_run_takes(listed: Listed) -> None:
    lines = listed("specs").splitlines()
    file, found = "", []
    for line in lines[:-2]:
        if line.endswith(".json"):
            file = line
        elif line:
            found.append((file, line.split()[0]))
    assert len(found) == len(list(spec_summaries())) > 80
    assert all(name in spec_names(file) for file, name in found)
    assert ["ppo_cartpole", "PPO", "80k", "CartPole-v1"] in [line.split() for line in lines]
    old = ["async_sac_humanoid", "SoftActorCritic", "50M", "Humanoid-v5"]
    assert old in [line.split() for line in lines], "a spec in the v4 form, with an old id"
    assert max(map(len, lines)) <= 80


def test_studies_by_file(listed: Listed) -> None:
    lines = listed("studies").splitlines()
    assert lines[0] == "a3c_vs_a2c.json"
    assert [line.split()[:3] for line in lines if "seeds" in line][:2] == [
        ["a3c_vs_a2c", "5", "entries"],
        ["a3c_vs_a2c_short", "5", "entries"],
    ]
    assert max(map(len, lines)) <= 80


def test_every_env_by_what_is_installed(listed: Listed, monkeypatch: pytest.MonkeyPatch) -> None:
    text = listed("envs")
    words = text.split()
    assert {name for name in KNOWN if current_id(name) == name} <= set(words)
    assert {f"ALE/{game}-v5" for game in ATARI} <= set(words)
    assert "jax: not installed; pip install 'gymnasium[jax]'" in text
    assert "  native, pettingzoo, ale, envpool, sync, async" in text.splitlines()
    assert "minigrid:MiniGrid-Empty-5x5-v0" in words
    assert {"CheetahRun-v1", "MetaWorld/Reach-v3", "MiniGrid-Empty-5x5-v0", "D1Basic-v1"} <= set(words), "of EnvPool"
    assert not {"Hopper-v3", "Pong-v5"} & set(words)
    assert max(map(len, text.splitlines())) <= 80
    missing = ("minigrid", "Box2D")
    real = env_ids._is_installed
    monkeypatch.setattr(env_ids, "_is_installed", lambda package: package not in missing and real(package))
    text = listed("envs")
    assert "box2d: not installed; pip install 'slm-lab[box2d]'" in text
    assert "minigrid: not installed; pip install 'slm-lab[minigrid]'" in text
    assert "minigrid:MiniGrid-Empty-5x5-v0" not in text


def test_envs_of_envpool(listed: Listed, monkeypatch: pytest.MonkeyPatch) -> None:
    found = listed("envs", "--search", "CheetahRun")
    assert "dm_control, backend envpool (installed)" in found
    assert "position 8, velocity 9 → 6" in found
    assert "6 × 7 × 2 bits → discrete 7, 2 agents" in " ".join(listed("envs", "--search", "ConnectFour").split())
    assert "MuJoCoPlayground/Go1Getup-v1" in listed("envs", "--search", "Go1Getup-v1")
    real = env_ids._is_installed
    monkeypatch.setattr(env_ids, "_is_installed", lambda package: package != "envpool" and real(package))
    assert "pip install 'slm-lab[envpool]'" in listed("envs", "--search", "CheetahRun")


def test_what_a_package_registers_by_itself_is_listed(listed: Listed) -> None:
    import gymnasium

    gymnasium.register("listed/Toy-v0", "tests.env.toys:Toy")
    try:
        assert "listed (installed)\n  listed/Toy-v0\n" in listed("envs")
    finally:
        del gymnasium.registry["listed/Toy-v0"]


def test_search_takes_all_words_in_any_case(listed: Listed) -> None:
    found = [line.split()[0] for line in listed("specs", "--search", "PONG", "ppo").splitlines() if line.startswith("  ")]
    assert found == ["appo_pong", "ppo_pong"]
    assert listed("specs", "--search", "pong ppo") == listed("specs", "--search", "ppo", "pong")
    assert listed("algorithms", "--search", "sac").splitlines()[0].startswith("SoftActorCritic"), "its name elsewhere"
    everywhere = listed("--search", "dueling")
    assert "nets" in everywhere.splitlines()
    assert "DuelingMLPNet" in everywhere
    assert "memories" not in everywhere


def test_words_after_the_kind_are_searched(listed: Listed) -> None:
    assert listed("specs", "pong", "ppo") == listed("specs", "--search", "pong", "ppo")


def test_overview(listed: Listed) -> None:
    text = listed()
    assert [line.split()[2] for line in text.splitlines()[:6]] == ["specs", "studies", "algorithms", "nets", "memories", "envs"]
    assert f"{len(ALGORITHMS)} algorithms" in text


@pytest.mark.parametrize(
    "line",
    [
        "spces",
        "specs algorithms",
        "specs --search pogn",
        "envs --search cartpolle",
        "algorithms --search zzzz",
        "specs --search pong cartpole",
        "--search pendulumm",
        "nets --by frame",
    ],
)
def test_errors(line: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["list", *line.split()]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.count("\n") == 1
    check_wording("test_list.test_errors", [printed.err])


def test_an_empty_search(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["list", "--search", " "]) == 2
    assert "--search is empty" in capsys.readouterr().err


@pytest.mark.sampled(2)
@pytest.mark.parametrize("kind", ["specs", "algorithms", "nets", "memories"])
def test_it_is_quick_and_needs_no_torch(kind: str) -> None:
    code = (
        f"import sys; from slm_lab.cli import main; assert main(['list', '{kind}']) == 0; "
        "assert not {'torch', 'pandas', 'plotly', 'matplotlib', 'gymnasium'} & set(sys.modules), set(sys.modules)"
    )
    begin = time.process_time(), time.perf_counter()
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert time.perf_counter() - begin[1] < 5  # 0.5 s without other load; other tests run at the same time


def test_a_reader_that_closes_the_pipe() -> None:
    done = subprocess.run(
        f"{sys.executable} run_lab.py list specs | true", shell=True, cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
