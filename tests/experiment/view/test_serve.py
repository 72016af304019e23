"""Tests of the command `view`: its errors, its address and its end."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest

from slm_lab.cli import main
from tests.experiment.view.folders import make_run


def answer(capsys: pytest.CaptureFixture[str], *words: object) -> tuple[int, str]:
    code = main(["view", *map(str, words), "--no-browser"])
    return code, capsys.readouterr().err


def test_the_folder_is_missing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "data").mkdir()
    code, text = answer(capsys, tmp_path / "dat")
    assert code == 2
    assert str(tmp_path / "dat") in text
    assert "'data'" in text  # the closest name
    (tmp_path / "file").write_text("")
    assert answer(capsys, tmp_path / "file")[0] == 2
    assert answer(capsys, tmp_path, "twice")[0] == 2


@pytest.mark.parametrize("port", ["0", "65536", "http", "-1"])
def test_no_port(tmp_path: Path, capsys: pytest.CaptureFixture[str], port: str) -> None:
    with pytest.raises(SystemExit) as stop:
        main(["view", str(tmp_path), "--port", port])
    assert stop.value.code == 2
    assert "--port" in capsys.readouterr().err


def test_the_port_is_taken(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("uvicorn")
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        code, text = answer(capsys, tmp_path, "--port", port)
    assert code == 2
    assert str(port) in text
    assert "--port" in text


@pytest.mark.parametrize("package", ["starlette", "uvicorn"])
def test_a_package_is_missing(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, package: str) -> None:
    for name in list(sys.modules):
        if name.partition(".")[0] == package or name.startswith("slm_lab.experiment.view."):
            monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, package, None)
    code, text = answer(capsys, tmp_path)
    assert code == 2
    assert package in text
    assert "slm-lab[view]" in text


@pytest.mark.slow  # starts a process
def test_it_serves_on_the_loopback_address_until_ctrl_c(tmp_path: Path) -> None:
    pytest.importorskip("uvicorn")
    paths = make_run(tmp_path)
    paths.trial_metrics().write_text("{")  # its notice must not appear on the terminal
    environment = {name: value for name, value in os.environ.items() if name not in ("DISPLAY", "WAYLAND_DISPLAY")}
    command = [sys.executable, "-c", "from slm_lab.cli import console; console()", "view", str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment) as process:
        try:
            assert process.stdout is not None
            address = re.search(r"http://127\.0\.0\.1:(\d+)/", process.stdout.readline())
            assert address is not None
            assert "ssh -L" in process.stdout.readline()  # there is no display
            with urllib.request.urlopen(f"{address[0]}api/runs", timeout=60) as found:
                assert found.status == 200
            other = next(
                (one[4][0] for one in socket.getaddrinfo(socket.gethostname(), None, socket.AF_INET) if one[4][0] != "127.0.0.1"), None
            )
            if other is not None:
                with socket.socket() as outside:
                    assert outside.connect_ex((str(other), int(address[1]))) != 0
            process.send_signal(signal.SIGINT)
            assert process.wait(60) == 0
            assert process.stdout.read() == ""
        finally:
            process.kill()  # otherwise the end of the block would wait for it
