"""Settings of all tests: one thread, and blank pictures, because drawing takes 80 % of a short run; see the fixture `pictures`."""

from __future__ import annotations

import os
import signal
from collections import defaultdict
from collections.abc import Iterator
from zlib import crc32

# Several test processes run at the same time: with several threads each, operations wait for cores and take up to 100 times as long.
# The variables are read when numpy and torch are loaded, also by child processes.
for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ.setdefault(name, "1")

import pytest

from slm_lab.experiment.execute.local.fork_server import server_in_use, use_start_method
from tests.blank import BlankRenderer


@pytest.fixture(scope="session", autouse=True)
def _interrupts() -> None:
    """Restore the SIGINT handler: a shell starts background jobs with SIGINT ignored, and child processes inherit that."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session", autouse=True)
def _one_fork_server() -> Iterator[None]:
    """Keep one fork server for all tests, also for envs that are built without a Session, because loading torch takes 2 s."""
    use_start_method("auto")
    with server_in_use():
        yield


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add options that select the numeric libraries of the test processes; child processes select theirs themselves."""
    parser.addoption("--matmul", choices=["mkl", "onednn"], help="library of large matrix products where meta.matmul is auto")
    parser.addoption("--no-onednn", action="store_true", help="convolutions and products without oneDNN")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark all but n cases of a test with the marker `sampled(n)` as slow; a hash of the test id selects the n cases."""
    cases = defaultdict(list)
    for item in items:
        if marker := item.get_closest_marker("sampled"):
            cases[item.nodeid.split("[")[0], marker.args[0]].append(item)
    for (_, n), group in cases.items():
        for item in sorted(group, key=lambda item: crc32(item.nodeid.encode()))[n:]:
            item.add_marker(pytest.mark.slow)


@pytest.fixture(scope="session", autouse=True)
def _arithmetic(request: pytest.FixtureRequest) -> Iterator[None]:
    matmul, without = request.config.getoption("--matmul"), request.config.getoption("--no-onednn")
    with pytest.MonkeyPatch.context() as patch:
        if matmul is not None:
            from slm_lab.agent import torch_settings as module

            patch.setattr(module, "prefers_onednn", lambda processor, capability: matmul == "onednn")
        if without:
            import torch

            torch.backends.mkldnn.set_flags(False)
        yield


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> Iterator[None]:
    """Use one thread also for nets with convolutions, for which meta.threads "auto" means all cores."""
    from slm_lab.agent import build

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(build, "MAX_THREADS", 1)
        yield


@pytest.fixture(scope="session", autouse=True)
def _blank_pictures() -> Iterator[None]:
    from slm_lab.experiment.report import writer

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(writer, "PNGRenderer", BlankRenderer)
        yield


@pytest.fixture
def pictures(monkeypatch: pytest.MonkeyPatch) -> None:
    """Draw pictures in this test instead of blank ones."""
    from slm_lab.experiment.report import render_png, writer

    monkeypatch.setattr(writer, "PNGRenderer", render_png.PNGRenderer)
