"""The graphs of one folder, each as a page and as a picture."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

from slm_lab.experiment.analysis.files import Writer
from slm_lab.experiment.analysis.graph import PLOTLY_JS, Graph, page, plotly_js
from slm_lab.experiment.analysis.picture import Painter


class Album:
    """Writes graphs into `root` and the folders in it, with the script that their pages share. One that fails is a notice."""

    def __init__(self, root: Path, writer: Writer) -> None:
        self.root, self.writer, self.painter = root, writer, Painter()
        script = root / PLOTLY_JS
        if not script.exists() or script.stat().st_size != len(plotly_js()):
            writer.write(None, (script, plotly_js))

    def draw(self, graphs: Mapping[str, Graph], path: Callable[[str, str], Path]) -> None:
        """Draw each graph as HTML and PNG; path(name, "html") is where."""
        for name, graph in graphs.items():
            html, png = path(name, "html"), path(name, "png")
            script = "/".join([".."] * len(html.parent.relative_to(self.root).parts) + [PLOTLY_JS])
            self.writer.write("graph not drawn", (html, partial(page, graph, script)), (png, partial(self.painter.picture, graph)))
