"""Start the server of `slm-lab view` on the loopback address, and a browser that shows the page of the server."""

from __future__ import annotations

import errno
import os
import socket
import sys
import threading
import webbrowser
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from slm_lab.experiment.plan import UserError
from slm_lab.experiment.view.folders import DataFolder
from slm_lab.experiment.view.index import Index
from slm_lab.lib.log import capture_notices
from slm_lab.lib.process import freeze_objects
from slm_lab.spec.report import nearest_hint

ADDRESS = "127.0.0.1"
_THREADS = 4
"""Maximum number of requests that the server answers at the same time."""


def serve(data_dir: Path, port: int | None, say: Callable[[str], object], *, browser: bool = True) -> None:
    """Serve a web page that shows the runs of a data folder at a local address, until the process is interrupted.

    Args:
        port: port of the server, or None to choose a free port.
        say: function that is called with text to print, such as the address of the page.
        browser: whether to open the page in a browser if this machine has a display.

    Raises UserError if `data_dir` does not exist, if a necessary package is not installed, or if the port cannot be used.
    """
    _check_folder(data_dir)
    # notices about damaged files are not printed: the page shows them, and the terminal would repeat them at each request
    with capture_notices(lambda text: None):
        _serve(Index(DataFolder(data_dir)), data_dir, port, say, browser)


def _serve(index: Index, data_dir: Path, port: int | None, say: Callable[[str], object], browser: bool) -> None:
    # read the data folder in a thread while modules are imported and the browser starts
    threading.Thread(target=index.changes, daemon=True, name="first list").start()
    try:
        import uvicorn

        from slm_lab.experiment.view.server import make_app
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] not in ("starlette", "uvicorn", "anyio", "h11"):
            raise
        raise UserError(f"view needs the package {error.name}, which is not installed: pip install 'slm-lab[view]'") from None
    opened = _bind(port)
    number = opened.getsockname()[1]
    url = f"http://{ADDRESS}:{number}/"
    config = uvicorn.Config(
        make_app(index, number, threads=_THREADS),
        loop="asyncio",
        http="h11",
        ws="none",
        log_level="error",
        access_log=False,
        server_header=False,
        timeout_graceful_shutdown=1,
    )
    say(f"{url} shows the runs in {data_dir}; Ctrl-C ends it")
    if browser:
        _open(url, number, say)
    freeze_objects()
    with suppress(KeyboardInterrupt):
        uvicorn.Server(config).run(sockets=[opened])


def _check_folder(data_dir: Path) -> None:
    if data_dir.is_dir():
        return
    if data_dir.exists():
        raise UserError(f"'{data_dir}' is not a folder; expected a folder that contains runs, such as data")
    parent = data_dir.absolute().parent
    near = nearest_hint(data_dir.name, [path.name for path in parent.iterdir() if path.is_dir()], 0.5) if parent.is_dir() else ""
    raise UserError(f"the data folder '{data_dir}' does not exist{near}; expected a folder that contains runs, such as data")


def _bind(port: int | None) -> socket.socket:
    """Return a socket that listens on the loopback address.

    Args: port: port of the server, or None to choose a free port. Raises UserError if the port cannot be used.
    """
    opened = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    if os.name == "posix":  # so that the port of a server that has just ended can be used again immediately
        opened.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        opened.bind((ADDRESS, port or 0))
        opened.listen(128)
    except OSError as error:
        opened.close()
        reason = "is in use by another program" if error.errno == errno.EADDRINUSE else f"cannot be used ({error.strerror})"
        raise UserError(f"port {port} {reason}; choose another with --port, or leave --port out for a free one") from None
    return opened


def _open(url: str, port: int, say: Callable[[str], object]) -> None:
    """Open the page in a browser. If this machine has no display, print how the page can be opened on another machine."""
    if sys.platform.startswith("linux") and not (os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY")):
        say(f"no display here; from another machine: ssh -L {port}:{ADDRESS}:{port} {socket.gethostname()}, then open the address there")
        return

    def start() -> None:
        with suppress(webbrowser.Error, OSError):
            webbrowser.open(url)

    threading.Thread(target=start, daemon=True, name="browser").start()
