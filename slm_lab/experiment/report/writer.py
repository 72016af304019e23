"""Write files and figures atomically, so that a new file is either complete or absent. An error on write never ends a run."""

from __future__ import annotations

import csv
import errno
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from io import StringIO
from pathlib import Path
from typing import Any

from slm_lab.experiment.report.figure import AnyFigure
from slm_lab.experiment.report.render_html import PLOTLY_JS, plotly_js, render_html, script_size
from slm_lab.experiment.report.render_png import PNGRenderer
from slm_lab.lib.files import indented_json, nonfinite_to_none, replace_file
from slm_lab.lib.log import notice

_FULL = (errno.ENOSPC, errno.EDQUOT)
_REFUSED = (errno.EACCES, errno.EPERM, errno.EROFS, errno.EFBIG)


class Writer:
    """Writes files and figures in the folder `root`. If a file cannot be written, a notice is printed.

    If the disk is full, the folder is read-only, or a file exceeds the limit on the size of files, all further files are skipped, and
    `close` prints one notice with the number of items that are missing.
    """

    def __init__(self, root: Path) -> None:
        self.root, self.reason = root, ""
        self.files: list[Path] = []
        """Paths of the files that have been written, except plotly.min.js, the script of the HTML pages."""
        self._png: PNGRenderer | None = None
        self._missing: Counter[str] = Counter()

    def write(self, what: str | None, *files: tuple[Path, Callable[[], bytes]]) -> None:
        """Write the files of one item, such as the HTML file and the PNG file of one graph.

        Args:
            what: text for the notice if the item is skipped, such as "graph not drawn", or None if a skipped item is not counted.
            files: (path, function that returns the content) of each file of the item.
        """
        for path, content in files:
            if self.reason:
                break
            try:
                data = content()
            except Exception as error:
                notice(f"{path.name} failed: {type(error).__name__}: {error}")
                continue
            try:
                replace_file(path, data)
                self.files += [path] if what else []
            except OSError as error:
                if error.errno in _FULL:
                    self.reason = "disk full"
                elif error.errno in _REFUSED:
                    self.reason = f"files cannot be written ({error.strerror})"
                else:
                    notice(f"{path.name} failed: {error}")
        if self.reason and what:
            self._missing[what] += 1

    def draw(self, figures: Mapping[str, AnyFigure], path: Callable[[str, str], Path]) -> None:
        """Write each figure to the files path(name, "html") and path(name, "png"), and write the script that all HTML pages share."""
        if self._png is None:
            self._png = PNGRenderer()
            self.write_script()
        for name, figure in figures.items():
            html, png = path(name, "html"), path(name, "png")
            source = "/".join([".."] * len(html.parent.relative_to(self.root).parts) + [PLOTLY_JS])
            self.write("graph not drawn", (html, partial(render_html, figure, source)), (png, partial(self._png.render, figure)))

    def write_script(self) -> None:
        """Write plotly.min.js, which all HTML pages in the folder share, unless the folder has a complete copy of this script."""
        script = self.root / PLOTLY_JS
        if not script.exists() or script.stat().st_size != script_size():
            self.write(None, (script, plotly_js))

    @contextmanager
    def suppress_drawing_errors(self, what: str = "graphs") -> Iterator[None]:
        """If the with-block raises an error, suppress the error and print a notice that names `what`."""
        try:
            yield
        except Exception as error:
            notice(f"cannot draw {what}: {type(error).__name__}: {error}")

    def close(self) -> None:
        """If files were skipped, print one notice with the reason and the number of missing items.

        An item is what one call of `write` writes, for example a graph, which has two files. Other errors are announced when they occur.
        """
        if self.reason:
            kinds = (f"{count} {what if count == 1 else what.replace(' not', 's not')}" for what, count in self._missing.items())
            notice(f"{self.reason}: {', '.join(kinds)}")


def json_bytes(content: Mapping[str, Any], *, ensure_ascii: bool = False) -> bytes:
    """Return `content` as the bytes of a JSON file. Numbers that are not finite become null."""
    return indented_json(nonfinite_to_none(content), ensure_ascii=ensure_ascii)


def csv_bytes(names: Iterable[str], rows: Iterable[Iterable[Any]]) -> bytes:
    """Return the bytes of a CSV file with the header `names` and the rows `rows`."""
    text = StringIO()
    table = csv.writer(text, lineterminator="\n")
    table.writerows([names, *rows])
    return text.getvalue().encode()
