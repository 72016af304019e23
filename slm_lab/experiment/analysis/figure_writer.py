"""Write figures into a folder, each as HTML and PNG."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

from slm_lab.experiment.analysis.figure import Figure
from slm_lab.experiment.analysis.file_writer import FileWriter
from slm_lab.experiment.analysis.render_html import PLOTLY_JS, plotly_js, render_html
from slm_lab.experiment.analysis.render_png import PNGRenderer


class FigureWriter:
    """Writes figures into `root` and its folders, with the script that their pages share. A figure that fails is a notice."""

    def __init__(self, root: Path, files: FileWriter) -> None:
        self.root, self.files, self.png = root, files, PNGRenderer()
        script = root / PLOTLY_JS
        if not script.exists() or script.stat().st_size != len(plotly_js()):
            files.write(None, (script, plotly_js))

    def write(self, figures: Mapping[str, Figure], path: Callable[[str, str], Path]) -> None:
        """Write each figure as HTML and PNG, to path(name, "html") and path(name, "png")."""
        for name, figure in figures.items():
            html, png = path(name, "html"), path(name, "png")
            script = "/".join([".."] * len(html.parent.relative_to(self.root).parts) + [PLOTLY_JS])
            self.files.write("graph not drawn", (html, partial(render_html, figure, script)), (png, partial(self.png.render, figure)))
