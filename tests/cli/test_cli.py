"""Tests of the command line without training: help, versions, and the message of every user error."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

import slm_lab
from slm_lab.cli import main
from slm_lab.cli.files import resolve_request
from slm_lab.cli.parser import COMMANDS, make_parser
from slm_lab.experiment.plan import Plan
from tests.wording import check_wording

ROOT = Path(slm_lab.__file__).parent.parent


def answer(capsys: pytest.CaptureFixture[str], *words: object) -> tuple[int, str]:
    """Run the command line in this process; return its exit code and stderr."""
    try:
        code = main([str(word) for word in words])
    except SystemExit as stop:
        code = int(stop.code or 0)
    return code, capsys.readouterr().err


USER_ERRORS = [
    "SPECS small trian",
    "train",
    "train@",
    "SPECS small enjoi@latest",
    "SPECS small enjoy",
    "SPECS small serch",
    "SPECS small train again",
    "SPECS small check --build",
    "SPECS smal",
    "SPECS",
    "nowhere.json small",
    "chek SPECS",
    "check",
    "run --jbos 2",
    "--wrong",
    "SPECS small study@latest",
    "small study@latest",
    "ppo_cartpole train@latest",
    "check SPECS small train",
    "SPECS train",
    "",
    "ppo_cartpole",
    "--jobs 0",
    "--device gpu0",
    "compare --by frme",
    "compare --solve nan",
    "--build",
    "--solve -200",
    "check SPECS --jobs 2",
    "check SPECS --data-dir x",
    "SPECS small -s env.max_frame=-5",
    "enjoi@latest",
    "enjoy",
    "enjoy@latest SPECS small",
    "enjoy@latest",
    "enjoy@nowhere",
    "enjoy@latest --episodes 0",
    "enjoy@latest --checkpoint bst",
    "enjoy@latest --render --video",
    "enjoy@latest --jobs 2",
    "SPECS small train --video",
    "export",
    "export latest twice",
    "export latest --format tflite",
    "export latest --session one",
    "export latest --episodes 3",
]


@pytest.mark.parametrize("line", USER_ERRORS)
def test_an_error_of_the_user(
    line: str, spec_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every user error gives exit code 2 and one message, without a traceback, and no file is written."""
    monkeypatch.chdir(tmp_path)
    before = sorted(tmp_path.rglob("*"))
    code, text = answer(capsys, *[word.replace("SPECS", str(spec_file)) for word in line.split(" ")])
    assert (code, "Traceback" in text) == (2, False)
    assert sorted(tmp_path.rglob("*")) == before
    check_wording(
        "test_cli.test_an_error_of_the_user",
        [text.replace(str(tmp_path), "FOLDER").replace(f"see {sys.argv[0].rsplit('/')[-1]} --help", "see PROG --help")],
    )


def test_enjoy_with_a_name_plays_the_model_of_this_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert resolve_request(["enjoy", "walker"]) == resolve_request(["enjoy@walker"])
    Path("enjoy").write_text("{}")  # a spec file
    assert resolve_request(["enjoy", "walker"]).file == "enjoy"


def test_an_error_without_notices_of_keys_that_have_no_effect(capsys: pytest.CaptureFixture[str]) -> None:
    """A spec with an error prints the error alone: no notices of the many keys that have no effect with another algorithm."""
    code, text = answer(capsys, "demo.json", "ppo_cartpole", "train", "-s", "agent.algorithm.name=DQN")
    assert (code, text.count("\n"), "agent.memory.name" in text) == (2, 2, True)


def test_check_names_the_valid_specs_beside_the_problems(spec_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    specs = json.loads(spec_file.read_text())
    specs["other"] = specs["other"] | {"env": {"name": "CartPole-v1", "max_frame": -1}}
    spec_file.write_text(json.dumps(specs))
    assert main(["check", str(spec_file)]) == 2
    printed = capsys.readouterr()
    assert printed.out == "small: valid\n"
    assert "other.env.max_frame" in printed.err


def test_check_of_specs_and_studies_names_the_problems_of_both(spec_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    specs = json.loads(spec_file.read_text())
    specs["other"] = specs["other"] | {"env": {"name": "CartPole-v1", "max_frame": -1}}
    specs["of_both"] = {"study": {"entries": [{"spec": "small"}, {"spec": "small", "label": "x" * 200}], "random_seed": [0]}}
    entries = [{"spec": "small"}, {"spec": "small", "label": "more", "set": {"agent.algorithm.gamma": 0.5}, "random_seed": [7, 8]}]
    specs["seeds"] = {"study": {"entries": entries, "random_seed": [0]}}
    spec_file.write_text(json.dumps(specs))
    assert main(["check", str(spec_file)]) == 2
    printed = capsys.readouterr()
    assert printed.out.splitlines()[:2] == ["small: valid", "seeds: valid; 3 runs"]
    assert [line.rpartition(": ")[2] for line in printed.out.splitlines()[2:]] == ["random_seed 0", "random_seed 7, 8"]
    assert "other.env.max_frame" in printed.err
    assert "of_both.study.entries[1].label" in printed.err
    del specs["other"], specs["of_both"]
    spec_file.write_text(json.dumps(specs))
    assert main(["check", str(spec_file)]) == 0


@pytest.mark.parametrize(
    ("name", "valid"), [("a" * 100, True), ("a" * 101, False), ("漢" * 53, True), ("漢" * 54, False)], ids=["100", "101", "159", "162"]
)
def test_names_that_do_not_fit_into_the_names_of_files(name: str, valid: bool, spec_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    spec_file.write_text(json.dumps({name: json.loads(spec_file.read_text())["small"]}))
    assert main(["check", str(spec_file)]) == (0 if valid else 2)
    assert ("160 bytes" in capsys.readouterr().err) != valid
    spec_file.write_text(json.dumps({name: {"study": {"entries": [{"spec": "demo.json:ppo_cartpole"}], "random_seed": [0]}}}))
    assert main(["check", str(spec_file)]) == (0 if valid else 2)


@pytest.mark.parametrize(
    "line", ["SPECS small train --data-dir SPECS", "SPECS small train --data-dir SPECS/below", "SPECS small --device cuda:99"]
)
def test_an_error_of_the_user_that_the_run_finds(line: str, spec_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = sorted(tmp_path.rglob("*"))
    code, text = answer(capsys, *[word.replace("SPECS", str(spec_file)) for word in line.split(" ")])
    assert (code, "Traceback" in text) == (2, False)
    assert sorted(tmp_path.rglob("*")) == before


def test_a_folder_without_permission(
    spec_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("os.access", lambda *arguments: False)
    assert answer(capsys, spec_file, "small", "--data-dir", tmp_path / "data") == (
        2,
        f"cannot write to the data folder {tmp_path}/data: no permission in {tmp_path}\n",
    )


@pytest.mark.parametrize("fails", ["mkdir", "replace"])
def test_a_full_disk(
    fails: str, spec_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A full disk is a user error, also if it is noticed when the run's folder or its spec is written; the folder is removed."""
    (data := tmp_path / "data").mkdir()
    owner: Any = {"mkdir": Path, "replace": os}[fails]
    real = getattr(owner, fails)

    def full(path: Path, *arguments: Any, **options: Any) -> Any:
        if path.name == "model" or any("_t0_spec" in str(argument) for argument in arguments):
            raise OSError(28, "No space left on device")
        return real(path, *arguments, **options)

    monkeypatch.setattr(owner, fails, full)
    code, text = answer(capsys, spec_file, "small", "--data-dir", data)
    assert (code, text) == (2, f"cannot write to the data folder {data}: No space left on device\n")
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
    assert re.fullmatch(
        r"other: builds; observation: .*, MLPNet; [\d,]+ parameters, .*, about [\d:]+ for [\d,]+ frames.*",
        " ".join(capsys.readouterr().out.split()),
    )
    assert main(["check", str(spec_file), "-s", "env.name=Pendulum-v1", "-s", "agent.algorithm.action_pdtype=Categorical", "--build"]) == 2
    text = capsys.readouterr().err
    assert "small.agent.algorithm.action_pdtype" in text
    assert "other.agent.algorithm.action_pdtype" in text
    assert text.count("(from --set)") == 2


def test_what_building_shows_of_a_set_key_says_where_it_comes_from(spec_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, text = answer(capsys, spec_file, "small", "-s", "agent.algorithm.action_pdtype=Normal")
    assert code == 2
    assert "agent.algorithm.action_pdtype: " in text
    assert "(from --set)" in text


@pytest.mark.parametrize(("distributed", "told"), [('"synced"', True), ("false", False)])
def test_jobs_has_no_effect_with_distributed(
    distributed: str, told: bool, spec_file: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    plans: list[Plan] = []

    class Trial:
        def __init__(self, spec: object, plan: Plan) -> None:
            plans.append(plan)

        def run(self) -> None:
            return None

    monkeypatch.setattr("slm_lab.experiment.run.trial.Trial", Trial)
    assert main([str(spec_file), "small", "--jobs", "2", "-s", f"meta.distributed={distributed}", "-s", "meta.max_session=3"]) == 0
    assert plans[0].jobs == 2
    assert any("--jobs" in record.getMessage() for record in caplog.records) == told


def test_each_option_belongs_to_a_command() -> None:
    options = {option for command in COMMANDS.values() for option in command.options}
    assert options == set(vars(make_parser().parse_args([]))) - {"words"}


def test_options_may_stand_anywhere(spec_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, text = answer(capsys, spec_file, "--jobs", "2", "small", "-s", "env.max_frame=10", "trian", "--data-dir", "x")
    assert (code, "did you mean 'train'?" in text) == (2, True)


def command(
    *words: str, stdout: Any = subprocess.PIPE, options: Sequence[str] = (), env: dict[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    line = [sys.executable, *options, str(ROOT / "run_lab.py"), *words]
    return subprocess.run(line, stdout=stdout, stderr=subprocess.PIPE, text=True, check=False, env=os.environ | (env or {}))


def test_an_output_that_cannot_be_written(spec_file: Path) -> None:
    with open("/dev/full", "w") as full:
        done = command("check", str(spec_file), stdout=full)
        assert (done.returncode, done.stderr) == (1, "cannot write to stdout: No space left on device\n")
        done = command("--help", stdout=full)
        assert (done.returncode, done.stderr) == (0, "")
    closed = subprocess.run(f"{sys.executable} {ROOT}/run_lab.py check {spec_file} >&-", shell=True, capture_output=True, check=False)
    assert (closed.returncode, closed.stderr) == (0, b"")


def test_an_output_that_is_not_utf_8(spec_file: Path) -> None:
    spec_file.write_text(spec_file.read_text().replace("small", "größe"), encoding="utf-8")
    done = command("check", str(spec_file), env={"PYTHONIOENCODING": "ascii:strict", "PYTHONUTF8": "0"})
    assert (done.returncode, done.stdout, done.stderr) == (0, "gr??e: valid\nother: valid\n", "")


def test_a_python_without_the_packages(spec_file: Path) -> None:
    done = command("check", str(spec_file), options=["-S"])
    says = "missing package 'rich': run `make setup` and use .venv/bin/python\n"
    assert (done.returncode, done.stderr) == (2, says)


def seconds_of(*words: str) -> tuple[float, str]:
    """Run a Python process; return its duration in seconds and its output."""
    begin = time.perf_counter()
    done = subprocess.run([sys.executable, *words], capture_output=True, text=True, check=False)
    return time.perf_counter() - begin, done.stdout + done.stderr


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("words", "limit", "factor", "unit", "says"),
    [
        (["--help"], 0.3, 3.0, "pass", "exit codes"),
        (["SPECS", "small", "-s", "env.nme=3", "-s", "env.max_frame=no"], 0.7, 4.0, "import pydantic.main", "env.max_frame"),
    ],
)
def test_help_and_a_spec_error_answer_at_once(words: list[str], limit: float, factor: float, unit: str, says: str, spec_file: Path) -> None:
    """Help and a spec error end within a time limit; on a busy machine, within a multiple of the time of Python or pydantic alone."""
    line = [word.replace("SPECS", str(spec_file)) for word in words]
    for _ in range(3):
        seconds, text = seconds_of(str(ROOT / "run_lab.py"), *line)
        assert says in text
        if seconds < limit or seconds < (limit := max(limit, factor * seconds_of("-c", unit)[0])):
            return
    pytest.fail(f"{seconds:.2f} s, allowed {limit:.2f}")


def test_help_and_version(capsys: pytest.CaptureFixture[str]) -> None:
    for word in ("--help", "--version"):
        with pytest.raises(SystemExit) as stop:
            main([word])
        assert stop.value.code == 0
    text = capsys.readouterr().out
    assert all(command.usage in " ".join(text.split()) for command in COMMANDS.values())
    assert text.endswith(f"slm-lab {slm_lab.__version__}\n")


@pytest.mark.parametrize(
    ("words", "usage"), [(["train"], "FILE NAME train [options]"), (["enjoy@latest"], "enjoy@{"), (["diff"], "diff A B")]
)
def test_help_of_one_command_or_mode(words: list[str], usage: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main([*words, "--help"])
    assert stop.value.code == 0
    text = capsys.readouterr().out
    assert usage in text
    assert "retro_analyze" not in text


def test_help_needs_no_library() -> None:
    """Printing the help imports none of these libraries: each import takes longer than printing the text."""
    code = """
import sys
from slm_lab.cli import main
try:
    main(["--help"])
finally:
    loaded = {"rich", "pydantic", "numpy", "torch"} & set(sys.modules)
    assert not loaded, loaded
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_nothing_heavy_is_loaded_for_a_quick_answer(spec_file: Path) -> None:
    lines = [[str(spec_file), "smal"], ["check", str(spec_file)], ["compare", "nowhere"]]
    code = f"""
import sys
from slm_lab.cli import main
assert [main(words) for words in {lines!r}] == [2, 0, 2]
sys.exit(", ".join({{"torch", "pandas", "plotly", "matplotlib", "ray"}} & set(sys.modules)) or None)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(("given", "policy"), [(None, "PASSIVE"), ("ACTIVE", "ACTIVE")])
def test_threads_of_torch_wait_passively(given: str | None, policy: str) -> None:
    """The command line sets OMP_WAIT_POLICY before torch is imported, because torch reads it at import; a user's value is kept."""
    code = "import os, sys; from slm_lab.cli import main; main(['help']); print(os.environ['OMP_WAIT_POLICY'], 'torch' in sys.modules)"
    env = {name: value for name, value in os.environ.items() if name != "OMP_WAIT_POLICY"} | ({"OMP_WAIT_POLICY": given} if given else {})
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=env)
    assert done.stdout.splitlines()[-1] == f"{policy} False"
