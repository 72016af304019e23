"""Small multiples: graphs below each other over one axis, with one legend."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from slm_lab.experiment.analysis.graph import INK, Graph
from slm_lab.experiment.analysis.page import base_layout, traces, x_axis, y_axis
from slm_lab.experiment.analysis.picture import LEGEND, Canvas, draw_lines, legend_form

_PANEL, _BETWEEN, _BELOW, _ABOVE = 150, 24, 55, 52
"""Points: a panel, between two, below and above all."""
_ROW = 20
"""Points of a row of the legend."""


@dataclass(frozen=True)
class Panels:
    """One graph or more, whose lines have the same names; their own titles are not shown."""

    title: str
    graphs: list[Graph]

    def figure(self) -> dict[str, Any]:
        """As plotly's JSON."""
        data, layout = [], base_layout(self.title)
        named: set[str] = set()
        count = len(self.graphs)
        height = 1 / (count + 0.15 * (count - 1))
        for order, graph in enumerate(self.graphs):
            suffix = str(order + 1) if order else ""
            top = 1 - 1.15 * height * order
            last = order == count - 1
            for trace in traces(graph):
                first = trace["name"] not in named and trace.get("showlegend", True)
                if first:
                    named.add(trace["name"])
                data.append(trace | {"xaxis": f"x{suffix}", "yaxis": f"y{suffix}", "showlegend": first, "legendgroup": trace["name"]})
            below = {} if last else {"title": {"text": ""}, "showticklabels": False}
            matching = {"matches": "x"} if order else {}
            layout[f"xaxis{suffix}"] = x_axis(graph.x_label) | {"anchor": f"y{suffix}"} | matching | below
            layout[f"yaxis{suffix}"] = y_axis(graph) | {"anchor": f"x{suffix}", "domain": [max(top - height, 0.0), top]}
        return {"data": data, "layout": layout}

    def picture(self) -> bytes:
        """As a PNG, the higher the more graphs there are."""
        count = len(self.graphs)
        names = list(dict.fromkeys(line.name for graph in self.graphs for line in graph.lines))
        marks = any(line.marks for graph in self.graphs for line in graph.lines)
        columns, rows = legend_form([*names, *(["x" * 35] if marks else [])])
        canvas = Canvas(self.title, _ABOVE + _ROW * rows + count * _PANEL + (count - 1) * _BETWEEN + _BELOW)
        handles: dict[str, Any] = {}
        for order, graph in enumerate(self.graphs):
            bottom = _BELOW + (count - 1 - order) * (_PANEL + _BETWEEN)
            axes = canvas.axes(0.115, bottom / canvas.height, 0.845, _PANEL / canvas.height)
            draw_lines(axes, graph)
            axes.set_ylabel(graph.y_label, color=INK, size=10)
            axes.yaxis.set_label_coords(-0.104, 0.5)
            if order == count - 1:
                axes.set_xlabel(graph.x_label, color=INK, size=10)
            else:
                axes.tick_params(labelbottom=False)
            drawn = axes.get_legend_handles_labels()
            handles = {name: handle for handle, name in zip(*drawn, strict=True)} | handles
        place = (0.105, (canvas.height - _ABOVE - _ROW * rows) / canvas.height)
        canvas.figure.legend(list(handles.values()), list(handles), loc="lower left", bbox_to_anchor=place, ncols=columns, **LEGEND)
        return canvas.png()
