"""The command line where it is answered at once: help, versions, and every error of the user."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

import slm_lab
from slm_lab.cli import main

ROOT = Path(slm_lab.__file__).parent.parent
SpecBody = Callable[..., dict[str, Any]]


@pytest.fixture
def spec_file(spec_body: SpecBody, tmp_path: Path) -> Path:
    path = tmp_path / "specs.json"
    path.write_text(json.dumps({"small": spec_body(), "other": spec_body(meta={"random_seed": 1})}))
    return path


def answer(capsys: pytest.CaptureFixture[str], *words: object) -> tuple[int, str]:
    """Exit code, and what stands on stderr."""
    try:
        code = main([str(word) for word in words])
    except SystemExit as stop:
        code = int(stop.code or 0)
    return code, capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["SPECS", "small", "trian"], "'trian' is no mode; did you mean 'train'?"),
        (["SPECS", "small", "enjoi@latest"], "did you mean 'enjoy@latest'?"),
        (["SPECS", "small", "enjoy"], "did you mean 'enjoy@latest'?"),
        (["SPECS", "small", "search"], "modes: train, dev, enjoy@"),
        (["SPECS", "small", "train", "again"], "too many arguments: 'again'"),
        (["SPECS", "smal"], "did you mean 'small'?"),
        (["SPECS"], "which spec? small, other"),
        (["nowhere.json", "small"], "no such file"),
        (["chek", "SPECS"], "did you mean 'check'?"),
        (["check"], "check takes a spec file"),
        (["run", "--jbos", "2"], "did you mean '--jobs'?"),
        (["check", "SPECS", "small", "train"], "too many arguments: 'train' after check FILE NAME"),
        (["SPECS", "train"], "'train' is a MODE; the spec's NAME comes before it: SPECS NAME train (names: small, other)"),
        ([""], "FILE is empty"),
        (["ppo_cartpole"], "but a spec: demo.json ppo_cartpole"),
        (["SPECS", "small", "-s", "agent.algorithm.action_pdtype=Normal"], "SPECS small: 1 problem"),
        (["--jobs", "0"], "'0' is no number of Sessions; allowed: 1 or more"),
        (["--device", "gpu"], "'gpu' is none of cpu, cuda, cuda:N"),
        (["--build"], "--build belongs to the command check"),
        (["--solve", "-200"], "--solve belongs to the command compare"),
        (["check", "SPECS", "--jobs", "2"], "--jobs belongs to the command run"),
        (["check", "SPECS", "--data-dir", "x"], "--data-dir belongs to the commands run and compare"),
        (["compar", "SPECS"], "did you mean 'compare'?"),
        (["SPECS", "small", "-s", "env.max_frame=-5"], "env.max_frame"),
        (["SPECS", "small", "-s", "agent.algorithm.gama=1"], "did you mean 'gamma'?"),
        (["SPECS", "small", "enjoy@latest"], "no run of 'small'"),
        (["SPECS", "small", "enjoy@nowhere"], "no run of 'small' in the folder 'nowhere'"),
        (["SPECS", "small", "train", "--data-dir", "SPECS"], "is no folder"),
        (["SPECS", "small", "train", "--data-dir", "SPECS/below"], "is no folder"),
        (["SPECS", "small", "--device", "cuda:99"], "cuda device"),
    ],
)
def test_an_error_of_the_user(
    words: list[str], says: str, spec_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Exit code 2, one clear answer, no traceback, nothing written."""
    monkeypatch.chdir(tmp_path)
    before = sorted(tmp_path.rglob("*"))
    code, text = answer(capsys, *[word.replace("SPECS", str(spec_file)) for word in words])
    assert (code, "Traceback" in text) == (2, False)
    assert says.replace("SPECS", str(spec_file)) in text
    assert sorted(tmp_path.rglob("*")) == before


def test_a_folder_without_permission(
    spec_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("os.access", lambda *arguments: False)
    assert answer(capsys, spec_file, "small", "--data-dir", tmp_path / "data") == (
        2,
        f"cannot write in the data folder {tmp_path}/data: no permission in {tmp_path}\n",
    )


@pytest.mark.parametrize("fails", ["mkdir", "write_text"])
def test_a_full_disk(
    fails: str, spec_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where it shows only when the run's folder is made or its spec is written; the folder does not stay."""
    (data := tmp_path / "data").mkdir()
    real = getattr(Path, fails)

    def full(self: Path, *arguments: Any, **options: Any) -> Any:
        if "_t0_spec" in self.name or self.name == "model":
            raise OSError(28, "No space left on device")
        return real(self, *arguments, **options)

    monkeypatch.setattr(Path, fails, full)
    code, text = answer(capsys, spec_file, "small", "--data-dir", data)
    assert (code, text) == (2, f"cannot write in the data folder {data}: No space left on device\n")
    assert list(data.iterdir()) == []


def test_a_disk_that_is_nearly_full(
    spec_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shutil.disk_usage", lambda path: type("Usage", (), {"total": 10**9, "free": 10**6}))
    code, text = answer(capsys, spec_file, "small", "--data-dir", tmp_path)
    assert (code, "a run needs 16 MiB of disk space, and 0.954 MiB are free" in text) == (2, True)


def test_check_one_or_all(spec_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", str(spec_file)]) == 0
    assert capsys.readouterr().out == "small: valid\nother: valid\n"
    assert main(["check", str(spec_file), "other", "--build"]) == 0
    assert capsys.readouterr().out == "other: builds\n"
    assert main(["check", str(spec_file), "-s", "env.name=Pendulum-v1", "-s", "agent.algorithm.action_pdtype=Categorical", "--build"]) == 2
    text = capsys.readouterr().err
    assert "small.agent.algorithm.action_pdtype" in text
    assert "other.agent.algorithm.action_pdtype" in text
    assert text.count("(from --set)") == 2


def test_what_building_shows_of_a_set_key_says_where_it_comes_from(spec_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, text = answer(capsys, spec_file, "small", "-s", "agent.algorithm.action_pdtype=Normal")
    assert code == 2
    assert "allowed: default, Categorical, Argmax, GumbelSoftmax (from --set)" in text


def test_options_may_stand_anywhere(spec_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, text = answer(capsys, spec_file, "--jobs", "2", "small", "-s", "env.max_frame=10", "trian", "--data-dir", "x")
    assert (code, "did you mean 'train'?" in text) == (2, True)


def command(*words: str, stdout: Any = subprocess.PIPE, options: Sequence[str] = ()) -> subprocess.CompletedProcess[str]:
    line = [sys.executable, *options, str(ROOT / "run_lab.py"), *words]
    return subprocess.run(line, stdout=stdout, stderr=subprocess.PIPE, text=True, check=False)


def test_an_output_that_cannot_be_written(spec_file: Path) -> None:
    with open("/dev/full", "w") as full:
        done = command("check", str(spec_file), stdout=full)
        assert (done.returncode, done.stderr) == (1, "cannot write to stdout: No space left on device\n")
        done = command("--help", stdout=full)
        assert (done.returncode, done.stderr) == (0, "")
    closed = subprocess.run(f"{sys.executable} {ROOT}/run_lab.py check {spec_file} >&-", shell=True, capture_output=True, check=False)
    assert (closed.returncode, closed.stderr) == (0, b"")


def test_a_python_without_the_packages(spec_file: Path) -> None:
    done = command("check", str(spec_file), options=["-S"])
    says = "slm_lab's packages are missing here (No module named 'rich'): run `make setup` and use .venv/bin/python\n"
    assert (done.returncode, done.stderr) == (2, says)


def timed(*words: str) -> tuple[float, str]:
    """Seconds of a whole command, and its output."""
    return best_of_three(str(ROOT / "run_lab.py"), *words)


def best_of_three(*words: str) -> tuple[float, str]:
    best = float("inf")
    for _ in range(3):
        begin = time.perf_counter()
        done = subprocess.run([sys.executable, *words], capture_output=True, text=True, check=False)
        best = min(best, time.perf_counter() - begin)
    return best, done.stdout + done.stderr


def test_help_and_a_spec_error_answer_at_once(spec_file: Path) -> None:
    bare, pydantic = (best_of_three("-c", code)[0] for code in ("pass", "import pydantic.main"))  # what this machine needs now
    seconds, text = timed("--help")
    assert "exit codes" in text
    assert "compare  draw runs in one graph" in text
    assert seconds < max(0.3, 3.0 * bare)
    seconds, text = timed(str(spec_file), "small", "-s", "env.nme=3", "-s", "env.max_frame=no")
    assert "env.max_frame" in text
    assert seconds < max(0.7, 4.0 * pydantic)
    assert timed("--version")[1] == f"slm-lab {slm_lab.__version__}\n"


@pytest.mark.parametrize("words", [["--help"], ["SPECS", "smal"], ["check", "SPECS"], ["compare", "nowhere"]])
def test_nothing_heavy_is_loaded_for_a_quick_answer(words: list[str], spec_file: Path) -> None:
    code = f"""
import sys
from slm_lab.cli import main
try:
    main({[word.replace("SPECS", str(spec_file)) for word in words]!r})
except SystemExit:
    pass
sys.exit(", ".join({{"torch", "pandas", "plotly", "matplotlib", "ray"}} & set(sys.modules)) or None)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
