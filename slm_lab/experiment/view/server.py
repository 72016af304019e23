"""Web server of `slm-lab view` on the local machine. Its routes return HTML pages, static files, and the content of a data folder.

The content of a data folder is returned as JSON or, for a video, as a file. No route changes a file. Texts from run folders, such as names
and logs, are sent as JSON and displayed as plain text, never as HTML.
"""

from __future__ import annotations

import json
import time
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable, Hashable
from contextlib import asynccontextmanager
from pathlib import Path
from threading import Lock
from typing import Any

from anyio.to_thread import current_default_thread_limiter
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import FileResponse, Response
from starlette.routing import Route

from slm_lab.experiment.plan import UserError
from slm_lab.experiment.report import render_html, report_page
from slm_lab.experiment.report.render_html import PLOTLY_JS
from slm_lab.experiment.view import comparison, details
from slm_lab.experiment.view.entries import sparkline
from slm_lab.experiment.view.folders import NotServed
from slm_lab.experiment.view.guard import Guard
from slm_lab.experiment.view.index import Index
from slm_lab.lib.files import nonfinite_to_none

_STATIC = Path(__file__).parent / "static"
_SCRIPTS = ("page.js", "list.js", "run.js", "search.js", "study.js", "compare.js")
_ASSETS = {
    "view.css": (_STATIC, "text/css"),
    "report.css": (Path(report_page.__file__).parent, "text/css"),
    "report.js": (Path(report_page.__file__).parent, "text/javascript"),
    **dict.fromkeys(_SCRIPTS, (_STATIC, "text/javascript")),
}
"""Name of a static file of the pages → (folder of the file, media type)."""
_MOST_SPARKLINES, _MOST_RUNS = 200, 64
"""Maximum number of sparklines in one request, and maximum number of runs in one comparison."""
_KEPT = 8
"""Maximum number of answers in the cache. A cached answer is valid until the files from which the answer was computed change."""
_SHARE, _LEAST_SECONDS, _MOST_SECONDS = 0.007, 2.0, 60.0
"""Maximum fraction of a processor core that is used to answer the requests of one open page, and minimum and maximum time in seconds
between two requests of the page."""


class JsonResponse(Response):
    """HTTP response with a JSON document, in which numbers that are not finite are written as null."""

    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        try:
            text = json.dumps(content, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
        except ValueError:
            text = json.dumps(nonfinite_to_none(content), ensure_ascii=False, allow_nan=False, separators=(",", ":"))
        return text.encode("utf-8", errors="replace")


class AnswerCache:
    """Cache of the last few answers to requests, each with the version of the files from which the answer was computed.

    An answer is computed again only if the files from which the answer was computed have changed. A page that already has the current
    version of an answer receives only the version.
    """

    def __init__(self) -> None:
        self._kept: OrderedDict[Hashable, tuple[str, Any]] = OrderedDict()
        self._lock = Lock()

    def answer(self, question: Hashable, version: str, page_version: str, compute: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """Return the answer to a request, with the additional keys "version" and "again" (seconds until the next request).

        If the page already has the current version, return only the keys "version" and "again".

        Only one answer is computed at a time. Therefore, several open pages together use at most one processor core while a run trains.

        Args:
            version: current version of the files from which the answer is computed.
            page_version: version of the answer that the page already has, or "" if the page has no answer yet.
            compute: function that computes the answer.
        """
        begin = time.thread_time()
        with self._lock:
            kept_version, content = self._kept.pop(question, ("", {}))
            if kept_version != version and page_version != version:
                content = compute()
                kept_version = version
            if kept_version == version:
                self._kept[question] = version, content
            while len(self._kept) > _KEPT:
                self._kept.popitem(last=False)
        return ({} if page_version == version else content) | {"version": version, "again": _refresh_seconds(time.thread_time() - begin)}


def _refresh_seconds(seconds: float) -> float:
    return round(min(max(seconds / _SHARE, _LEAST_SECONDS), _MOST_SECONDS), 1)


def make_app(index: Index, port: int = 0, threads: int = 4) -> Starlette:
    """Return the Starlette application that shows the runs of a data folder.

    Args:
        index: index of the data folder.
        port: port of the server, which the Host header of requests must contain, or 0 for any port.
        threads: maximum number of requests that are answered at the same time.
    """

    @asynccontextmanager
    async def limited(app: Starlette) -> AsyncIterator[None]:
        current_default_thread_limiter().total_tokens = threads
        yield

    routes = _Routes(index)
    pages = [Route(path, routes.page) for path in ("/", "/run", "/compare")]
    of_api = ("runs", "sparklines", "kind", "run", "search", "study", "compare", "log", "video")
    api = [Route(f"/api/{name}", getattr(routes, name)) for name in of_api]
    return Starlette(
        routes=[*pages, Route("/static/{name}", routes.static), *api],
        lifespan=limited,
        middleware=[Middleware(Guard, port=port)],
        exception_handlers={NotServed: _not_served_response, UserError: _not_served_response, HTTPException: _http_error},
    )


def _not_served_response(request: Request, error: Exception) -> Response:
    return JsonResponse({"error": str(error)}, getattr(error, "status", 404))


def _http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    return JsonResponse({"error": error.detail}, error.status_code)


class _Routes:
    """The routes of the Starlette application. Starlette calls these methods in threads, since they read files and are not async."""

    def __init__(self, index: Index) -> None:
        self.data, self.index, self.answers = index.data, index, AnswerCache()

    def page(self, request: Request) -> Response:
        return FileResponse(_STATIC / "page.html", media_type="text/html", headers={"cache-control": "no-cache"})

    def static(self, request: Request) -> Response:
        name = request.path_params["name"]
        if name == PLOTLY_JS:
            return FileResponse(render_html.plotly_file(), media_type="text/javascript", headers={"cache-control": "max-age=86400"})
        if name not in _ASSETS:
            raise NotServed(f"there is no file '{name}'")
        folder, kind = _ASSETS[name]
        return FileResponse(folder / name, media_type=kind, headers={"cache-control": "no-cache"})

    def runs(self, request: Request) -> Response:
        begin = time.thread_time()
        content = self.index.changes(_whole_number(request, "since"))
        content |= {"folder": str(self.data.root), "now": time.time()}
        return JsonResponse(content | {"again": _refresh_seconds(time.thread_time() - begin)})

    def sparklines(self, request: Request) -> Response:
        found = {}
        for path in request.query_params.getlist("path")[:_MOST_SPARKLINES]:
            try:
                found[path] = sparkline(self.data.find(path))
            except Exception:  # a damaged folder may cause any error, which the entry of the folder shows
                found[path] = []
        return JsonResponse(found)

    def kind(self, request: Request) -> Response:
        return JsonResponse({"kind": self.data.find(_path_parameter(request)).kind}, headers={"cache-control": "no-store"})

    def run(self, request: Request) -> Response:
        found, trial = self.data.find(_path_parameter(request)), _whole_number(request, "trial")
        version, compute = details.run_content(found, trial, self.data)
        return self._answer(request, ("run", found.folder, trial), version, compute)

    def search(self, request: Request) -> Response:
        found = self.data.find(_path_parameter(request))
        version, compute = details.search_content(found, self.data)
        return self._answer(request, ("search", found.folder), version, compute)

    def study(self, request: Request) -> Response:
        found = self.data.find(_path_parameter(request))
        version, compute = details.study_content(found, self.data)
        return self._answer(request, ("study", found.folder), version, compute)

    def compare(self, request: Request) -> Response:
        words = request.query_params.getlist("run")
        if not 0 < len(words) <= _MOST_RUNS:
            raise NotServed(f"{len(words)} runs to compare; expected 1 to {_MOST_RUNS}", 400)
        by = request.query_params.get("by", "frame")
        version, compute = comparison.comparison_content(words, by, self.data)
        return self._answer(request, ("compare", tuple(words), by), version, compute)

    def log(self, request: Request) -> Response:
        found = self.data.find(_path_parameter(request))
        file = self.data.file(found, details.log_folders(found), _name_parameter(request), (".log", ".txt"))
        given = request.query_params
        after, before = (_whole_number(request, name) if name in given else None for name in ("after", "before"))
        return JsonResponse(details.read_log_part(file, after, before), headers={"cache-control": "no-store"})

    def video(self, request: Request) -> Response:
        found = self.data.find(_path_parameter(request))
        return FileResponse(self.data.file(found, ("video", ""), _name_parameter(request), (".mp4",)), media_type="video/mp4")

    def _answer(self, request: Request, question: Hashable, version: str, compute: Callable[[], dict[str, Any]]) -> Response:
        page_version = request.query_params.get("version", "")
        try:
            content = self.answers.answer(question, version, page_version, compute)
        except (NotServed, UserError):
            raise
        except Exception as error:  # a damaged file
            raise NotServed(f"this cannot be shown: {type(error).__name__}: {error}", 500) from error
        return JsonResponse(content, headers={"cache-control": "no-store"})


def _path_parameter(request: Request) -> str:
    return request.query_params.get("path", "")


def _name_parameter(request: Request) -> str:
    return request.query_params.get("name", "")


def _whole_number(request: Request, name: str) -> int:
    """Return the value of an integer parameter of a request, or 0 if the parameter is missing.

    Raises NotServed if the value is not a nonnegative integer.
    """
    text = request.query_params.get(name, "0")
    if not (text.isascii() and text.isdecimal() and len(text) < 16):
        raise NotServed(f"{name} must be a whole number, not '{text}'", 400)
    return int(text)
