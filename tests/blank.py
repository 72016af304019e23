"""A renderer that returns blank pictures."""

from __future__ import annotations

from functools import cache
from io import BytesIO

from slm_lab.experiment.report.figure import AnyFigure


class BlankRenderer:
    """Return the same white PNG for each figure."""

    def render(self, figure: AnyFigure) -> bytes:
        return _white()


@cache
def _white() -> bytes:
    from PIL import Image

    content = BytesIO()
    Image.new("RGB", (800, 450), "white").save(content, format="PNG")
    return content.getvalue()
