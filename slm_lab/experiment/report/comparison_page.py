"""Create the HTML page of a comparison of runs. The page loads no file except plotly.min.js from its own folder."""

from __future__ import annotations

import html
import json
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from urllib.parse import quote

from slm_lab.experiment.report.figure import AnyFigure
from slm_lab.experiment.report.render_html import PLOTLY_JS, plotly_json

_STYLE = """
:root { color-scheme: light dark; --page: #f6f7f8; --card: #ffffff; --ink: #23282d; --soft: #69727a; --grid: #e4e7ea; --accent: #0060a0; }
@media (prefers-color-scheme: dark) {
  :root { --page: #101315; --card: #181c1f; --ink: #e6e8ea; --soft: #9aa1a8; --grid: #2b3136; --accent: #6cb8f5; }
}
@media print {
  :root { --page: #fff; --card: #fff; --ink: #000; --soft: #444; --grid: #bbb; --accent: #0060a0; }
  .card, tr { break-inside: avoid; } .modebar { display: none; }
}
* { box-sizing: border-box; }
body { margin: 0; background: var(--page); color: var(--ink); font: 14px/1.45 system-ui, Helvetica, Arial, sans-serif; }
main { max-width: 1320px; margin: 0 auto; padding: 12px 20px 40px; overflow-wrap: anywhere; }
h1 { font-size: 21px; margin: 0; } h2 { font-size: 15px; margin: 22px 0 8px; }
a { color: var(--accent); } .sentences { font-size: 15px; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
th, td { text-align: left; padding: 3px 16px 3px 0; border-bottom: 1px solid var(--grid); white-space: nowrap; }
th { font-weight: 500; color: var(--soft); font-size: 12px; }
ul { padding-left: 18px; } dt { font-weight: 600; margin-top: 6px; } dd { margin: 0; }
.card { background: var(--card); border: 1px solid var(--grid); border-radius: 6px; padding: 4px; margin: 0 0 12px; }
@media (max-width: 700px) { main { padding: 10px 10px 30px; } }
"""
_SCRIPT = """
const dark = matchMedia("(prefers-color-scheme: dark)"), plots = [...document.querySelectorAll(".plot")];
function coloured(layout) {
  const css = getComputedStyle(document.documentElement), value = name => css.getPropertyValue(name).trim();
  const own = {...layout, paper_bgcolor: value("--card"), plot_bgcolor: value("--card"), font: {...layout.font, color: value("--ink")},
    hoverlabel: {bgcolor: value("--page"), font: {color: value("--ink")}}, margin: {...layout.margin, l: innerWidth < 700 ? 60 : 80}};
  for (const key of Object.keys(layout)) if (/^[xy]axis/.test(key)) own[key] = {...layout[key], gridcolor: value("--grid")};
  return own;
}
function draw() {
  const displayModeBar = innerWidth < 700 ? false : "hover", modeBarButtonsToRemove = ["sendChartToCloud"];
  const options = {displaylogo: false, responsive: true, displayModeBar, modeBarButtonsToRemove};
  for (const node of plots) {
    const figure = JSON.parse(node.nextElementSibling.textContent);
    Plotly.react(node, figure.data, coloured(figure.layout), options);
  }
}
if (window.Plotly) { draw(); dark.addEventListener("change", draw); }
else for (const node of plots) node.textContent = "plotly.min.js is missing beside this page: no graph";
"""
_POLICY = "default-src 'none'; script-src 'unsafe-inline' 'self' file:; style-src 'unsafe-inline'; img-src 'self' data: blob: file:"
"""Content security policy of the page, which forbids the page to load anything from another machine."""


def page(title: str, sections: Iterable[str]) -> str:
    """Return an HTML page with a title and the HTML texts `sections`. The page loads plotly.min.js from its own folder."""
    return f"""<!DOCTYPE html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="{_POLICY}">
<title>{html.escape(title)}</title><link rel="icon" href="data:,">
<style>{_STYLE}</style></head><body>
<main><h1>{html.escape(title)}</h1>
{"".join(sections)}</main>
<script src="{PLOTLY_JS}"></script><script>{_SCRIPT}</script>
</body></html>
"""


def section(title: str, *parts: str) -> str:
    """Return an HTML section with a heading and the HTML texts `parts`, or "" if all parts are empty."""
    body = "".join(parts)
    return f"<section><h2>{html.escape(title)}</h2>{body}</section>\n" if body else ""


def table(lines: Sequence[Sequence[str]]) -> str:
    """Return an HTML table, or "" if the table has no rows below the header.

    Args: lines: the header and the rows, as lists of plain text.
    """
    if len(lines) < 2:
        return ""
    head, *rows = (f"<tr>{''.join(f'<{tag}>{html.escape(cell)}</{tag}>' for cell in line)}</tr>" for tag, line in _with_cell_tags(lines))
    return f'<div class="wide"><table>{head}{"".join(rows)}</table></div>'


def _with_cell_tags(lines: Sequence[Sequence[str]]) -> Iterable[tuple[str, Sequence[str]]]:
    return (("td" if index else "th", line) for index, line in enumerate(lines))


def bullets(lines: Iterable[str]) -> str:
    """Return an HTML bullet list with an item for each line of plain text."""
    items = "".join(f"<li>{html.escape(line)}</li>" for line in lines)
    return f"<ul>{items}</ul>" if items else ""


def definition_list_html(texts: Mapping[str, str]) -> str:
    """Return an HTML definition list.

    Args: texts: term → definition, both as plain text.
    """
    return f"<dl>{''.join(f'<dt>{html.escape(term)}</dt><dd>{html.escape(text)}</dd>' for term, text in texts.items())}</dl>"


def links(targets: Iterable[tuple[str, Path]], root: Path) -> str:
    """Return an HTML list of links to files and folders, relative to the page's folder `root`.

    A target that does not exist is shown as its name without a link.

    Args: targets: (name, path) of each target.
    """
    shown = ((html.escape(name), target) for name, target in targets)
    items = (f'<a href="{relative_url(target, root)}">{name}</a>' if target.exists() else name for name, target in shown)
    return f"<ul>{''.join(f'<li>{item}</li>' for item in items)}</ul>"


def relative_url(target: Path, root: Path) -> str:
    """Return the URL of the file or folder `target`, relative to the folder `root`."""
    return html.escape(quote(os.path.relpath(target, root)), quote=True)


def plot_html(figure: AnyFigure) -> str:
    """Return the HTML of an interactive plotly graph."""
    content = json.dumps(plotly_json(figure), separators=(",", ":"))
    for letter in "<>&":  # escaped, so that no text can end the script element
        content = content.replace(letter, f"\\u{ord(letter):04x}")
    return f'<div class="card"><div class="plot"></div><script type="application/json">{content}</script></div>'
