"""The graphs of one folder, each as a page and as a picture."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from slm_lab.experiment.analysis.files import Writer
from slm_lab.experiment.analysis.graph import Graph
from slm_lab.experiment.analysis.page import PLOTLY_JS, figure, page, plotly_js
from slm_lab.experiment.analysis.picture import Painter


class Drawing(Protocol):
    """What is no plain graph, and draws itself."""

    def figure(self) -> dict[str, Any]:
        """As plotly's JSON."""
        ...

    def picture(self) -> bytes:
        """As a PNG."""
        ...


class Album:
    """Writes graphs into `root` and the folders in it, with the script that their pages share. One that fails is a notice."""

    def __init__(self, root: Path, writer: Writer) -> None:
        self.root, self.writer, self.painter = root, writer, Painter()
        script = root / PLOTLY_JS
        if not script.exists() or script.stat().st_size != len(plotly_js()):
            writer.write(None, (script, plotly_js))

    def draw(self, graphs: Mapping[str, Graph] | Mapping[str, Drawing], path: Callable[[str, str], Path]) -> None:
        """Draw each graph as HTML and PNG; path(name, "html") is where."""
        for name, graph in graphs.items():
            html, png = path(name, "html"), path(name, "png")
            script = "/".join([".."] * len(html.parent.relative_to(self.root).parts) + [PLOTLY_JS])
            self.writer.write("graph not drawn", (html, partial(self._page, graph, script)), (png, partial(self._picture, graph)))

    @staticmethod
    def _page(graph: Graph | Drawing, script: str) -> bytes:
        return page(figure(graph) if isinstance(graph, Graph) else graph.figure(), script)

    def _picture(self, graph: Graph | Drawing) -> bytes:
        return self.painter.picture(graph) if isinstance(graph, Graph) else graph.picture()
