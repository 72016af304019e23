"""A headless Chromium, controlled over a pipe by the DevTools protocol: pages, scripts, requests, errors, pictures and printing."""

from __future__ import annotations

import base64
import json
import os
import shutil
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any, Self

import pytest

CHROMIUM = next((found for name in ("chromium", "chromium-browser", "google-chrome") if (found := shutil.which(name))), None)
needs_browser = pytest.mark.skipif(CHROMIUM is None, reason="Chromium is not installed")
_SECONDS = 60.0


class Browser:
    """One page of a headless Chromium.

    Attributes: errors: errors and warnings of the console, and exceptions. requests: the URLs that were requested.
    """

    def __init__(self) -> None:
        assert CHROMIUM is not None
        self.errors: list[str] = []
        self.requests: list[str] = []
        self._profile = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
        self._count, self._input = 0, b""
        to_read, self._to = os.pipe()
        self._from, to_write = os.pipe()
        options = ["--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--remote-debugging-pipe"]
        options += [
            "--no-first-run",
            "--disable-background-networking",
            "--enable-unsafe-swiftshader",
            f"--user-data-dir={self._profile.name}",
            "about:blank",
        ]
        # the protocol uses the descriptors 3 and 4
        line = f'exec "$@" 3<&{to_read} 4>&{to_write}'
        self._process = subprocess.Popen(
            ["bash", "-c", line, "bash", CHROMIUM, *options],
            pass_fds=(to_read, to_write),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        os.close(to_read)
        os.close(to_write)
        targets = self._send("Target.getTargets")["targetInfos"]
        page = next(one["targetId"] for one in targets if one["type"] == "page")
        self._session: str | None = self._send("Target.attachToTarget", targetId=page, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Network", "Log"):
            self._send(f"{domain}.enable")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._process.kill()
        self._process.wait()
        os.close(self._to)
        os.close(self._from)
        self._profile.cleanup()

    def size(self, width: int, height: int = 800) -> None:
        self._send("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 500)

    def scheme(self, scheme: str, media: str = "") -> None:
        """Emulate `prefers-color-scheme`, "dark" or "light", until the next call."""
        self._send("Emulation.setEmulatedMedia", media=media, features=[{"name": "prefers-color-scheme", "value": scheme}])

    def open(self, page: Path | str) -> None:
        """Open a page and wait until it is loaded."""
        self.errors.clear()
        self.requests.clear()
        self._send("Page.navigate", url=page.absolute().as_uri() if isinstance(page, Path) else page)
        self.wait("document.readyState === 'complete' && location.href !== 'about:blank'")

    def run(self, script: str) -> Any:
        """Evaluate a JavaScript expression and return its value; a promise is awaited."""
        found = self._send("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in found:
            raise AssertionError(found["exceptionDetails"].get("exception", {}).get("description", found["exceptionDetails"]["text"]))
        return found["result"].get("value")

    def wait(self, condition: str, seconds: float = _SECONDS) -> None:
        """Wait until an expression is true."""
        end = time.monotonic() + seconds
        while not self.run(condition):
            assert time.monotonic() < end, f"not true within {seconds} s: {condition}"
            time.sleep(0.05)

    def picture(self, path: Path, *, whole: bool = False) -> None:
        """Save a PNG of the visible part, or of the whole page."""
        path.write_bytes(base64.b64decode(self._send("Page.captureScreenshot", captureBeyondViewport=whole)["data"]))

    def print(self) -> bytes:
        """Return the page as PDF."""
        return base64.b64decode(self._send("Page.printToPDF", printBackground=True)["data"])

    def _send(self, method: str, **parameters: Any) -> dict[str, Any]:
        self._count += 1
        message: dict[str, Any] = {"id": self._count, "method": method, "params": parameters}
        if getattr(self, "_session", None):
            message["sessionId"] = self._session
        os.write(self._to, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._next()
            if answer.get("id") == self._count:
                assert "error" not in answer, f"{method}: {answer['error']}"
                return dict(answer["result"])
            self._note(answer.get("method", ""), answer.get("params", {}))

    def _next(self) -> dict[str, Any]:
        while b"\0" not in self._input:
            part = os.read(self._from, 1 << 20)
            assert part, "the browser has ended"
            self._input += part
        line, _, self._input = self._input.partition(b"\0")
        return dict(json.loads(line))

    def _note(self, event: str, found: dict[str, Any]) -> None:
        if event == "Network.requestWillBeSent":
            self.requests.append(found["request"]["url"])
        elif event == "Runtime.exceptionThrown":
            self.errors.append(str(found["exceptionDetails"].get("exception", {}).get("description", found["exceptionDetails"]["text"])))
        elif (
            event == "Log.entryAdded"
            and found["entry"]["level"] in ("error", "warning")
            and "GL Driver Message" not in found["entry"]["text"]
        ):
            # a software renderer logs performance warnings, which are no errors of the page
            self.errors.append(f"{found['entry']['text']} {found['entry'].get('url', '')}")
        elif event == "Runtime.consoleAPICalled" and found["type"] in ("error", "warning", "assert"):
            self.errors.append(" ".join(str(one.get("value", one.get("description"))) for one in found["args"]))
