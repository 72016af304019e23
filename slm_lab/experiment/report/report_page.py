"""Write report.html, the HTML report of a trial, a search or a study.

The HTML page needs no network connection, only plotly.min.js in the same folder. The HTML page contains the data as JSON (see
report_data.py), the script report.js and the style sheet report.css. A web server can use report.js and report.css for its own pages (see
`assets`).
"""

from __future__ import annotations

import html
import json
import math
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from time import perf_counter
from typing import Any

from slm_lab.experiment.files.paths import RunPaths
from slm_lab.experiment.plan import UserError
from slm_lab.experiment.report.render_html import PLOTLY_JS
from slm_lab.experiment.report.report_data import report_data
from slm_lab.experiment.report.run import Run
from slm_lab.experiment.report.writer import Writer
from slm_lab.lib.files import nonfinite_to_none
from slm_lab.lib.log import notice

REFRESH = 20
"""Interval in seconds at which a browser reloads the report of a running trial. The report is not written more often than at this
interval."""
_COST = 150
"""Minimum interval between two writes of a report, as a multiple of the duration of a write, so that writes take less than 1 % of a
core."""
_POLICY = "default-src 'none'; script-src 'unsafe-inline' 'unsafe-eval' 'self' file:; style-src 'unsafe-inline'; img-src 'self' data: blob:"
"""Content security policy of the report, which forbids the page to load anything from another machine. 'unsafe-eval' is needed because
plotly compiles functions for parallel coordinates."""


@cache
def assets() -> dict[str, str]:
    """Return the script (key "js") and the style sheet (key "css") that draw the data of a report in an HTML page."""
    folder = Path(__file__).parent
    return {kind: (folder / f"report.{kind}").read_text(encoding="utf-8") for kind in ("js", "css")}


def page(data: Mapping[str, Any]) -> bytes:
    """Return the HTML page that shows the data of a report (see report_data.py)."""
    title, code = html.escape(str(data["title"])), assets()
    facts = "; ".join(f"{one['label']}: {one['value']}" for one in data.get("facts", ()))
    return f"""<!DOCTYPE html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="{_POLICY}">
<title>{title}</title><link rel="icon" href="data:,">
<style>
{code["css"]}</style></head><body>
<main id="report"><noscript><h1>{title}</h1><p>{html.escape(facts)}</p><p>The graphs of this page need JavaScript.</p></noscript></main>
<script type="application/json" id="data">{script_json(data)}</script>
<script src="{PLOTLY_JS}"></script>
<script>
{code["js"]}
SLMReport.render(document.getElementById("report"), JSON.parse(document.getElementById("data").textContent));
</script>
</body></html>
""".encode()


def script_json(data: Mapping[str, Any]) -> str:
    """Return data as JSON text that is safe inside an HTML script element: no text in the data can end the element or begin a comment."""
    text = json.dumps(nonfinite_to_none(dict(data)), ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    for letter in "<>&\u2028\u2029":
        text = text.replace(letter, f"\\u{ord(letter):04x}")
    return text.encode(errors="replace").decode()  # replaces lone surrogates, which text from a damaged log file may contain


def write_page(writer: Writer, path: Path, data: Mapping[str, Any]) -> None:
    """Write an HTML report and, in the root folder of the writer, the script plotly.min.js."""
    writer.write_script()
    writer.write("page not written", (path, lambda: page(data)))


def write_trial_report(paths: RunPaths, trial: int = 0, *, ended: bool = False) -> Path:
    """Write the HTML report of a trial from the files of its run, and return the path of the report.

    If the run is still training, a browser that shows the report reloads the page at intervals.

    Args: ended: whether the trial has ended although this process, or the search to which the trial belongs, still locks the folder.

    Raises UserError if the spec of the run cannot be read, or if the report cannot be written.
    """
    run, path = Run(paths, trial), paths.trial_report(trial)
    if ended:
        run.status = run.metrics.get("status", "stopped")
    data = report_data(run)
    if data["status"] == "running":
        data["refresh"] = REFRESH
    return write_report(paths.root, path, data)


def write_report(root: Path, path: Path, data: Mapping[str, Any]) -> Path:
    """Write the HTML report `path` and the script plotly.min.js, and return `path`. Raises UserError if the report cannot be written.

    Args: root: folder in which the script is written, which is the folder of the report.
    """
    writer = Writer(root)
    write_page(writer, path, data)
    if path not in writer.files:
        raise UserError(f"cannot write {path}{f': {writer.reason}' if writer.reason else ''}")
    return path


def try_write_report(write: Callable[[], Path]) -> Path | None:
    """Call the function `write`, which writes a report, and return the path of the report.

    If `write` raises an error, print a notice and return None, since an error in a report must not end a run.
    """
    try:
        return write()
    except Exception as error:
        reason = str(error) if isinstance(error, UserError) else f"report not written: {type(error).__name__}: {error}"
        notice(reason)
        return None


class LiveReport:
    """Writes the report of a run at intervals while the run trains.

    The intervals are so long that writing takes less than 1 % of a core. If the report cannot be written, a notice is printed and the
    report is not written again. The thread that handles the events of the run calls `write_if_due`. No additional thread is used, since a
    thread would slow down a Session in this process.
    """

    def __init__(self, write: Callable[[], Path]) -> None:
        self.write, self.due = write, perf_counter() + REFRESH

    def write_if_due(self) -> None:
        """Write the report if the interval since the last write has passed."""
        if (begin := perf_counter()) < self.due:
            return
        written = try_write_report(self.write)
        now = perf_counter()
        self.due = math.inf if written is None else now + max(REFRESH, _COST * (now - begin))
