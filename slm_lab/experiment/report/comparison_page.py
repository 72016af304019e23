"""The parts of the pages of comparisons and studies: HTML that loads nothing except plotly.min.js beside it."""

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
:root { color-scheme: light dark; --text: #222; --muted: #666; --rule: #ddd; --back: #fff; --code: #f3f4f5; --link: #0072B2; }
@media (prefers-color-scheme: dark) {
  :root { --text: #e4e6e8; --muted: #a3a8ad; --rule: #3a3f44; --back: #17191b; --code: #24282b; --link: #6db7e8; }
}
@media print { :root { --text: #000; --muted: #444; --rule: #bbb; --back: #fff; --code: #f3f4f5; } .plot { break-inside: avoid; } }
* { box-sizing: border-box; }
body { font: 15px/1.5 Inter, Helvetica, Arial, sans-serif; color: var(--text); background: var(--back); max-width: 1100px;
  margin: 1.5rem auto; padding: 0 1rem; overflow-wrap: break-word; }
h1 { font-size: 1.5rem; margin: 0 0 .5rem; } h2 { font-size: 1.1rem; margin: 2rem 0 .5rem; }
a { color: var(--link); } small, .muted { color: var(--muted); }
.wide { overflow-x: auto; }
table { border-collapse: collapse; white-space: nowrap; font-size: 14px; }
th, td { text-align: left; padding: .3rem .9rem .3rem 0; border-bottom: 1px solid var(--rule); font-variant-numeric: tabular-nums; }
th { font-weight: 600; }
pre { background: var(--code); padding: .6rem .8rem; overflow-x: auto; border-radius: 4px; font-size: 13px; }
dt { font-weight: 600; margin-top: .5rem; } dd { margin: 0; }
.plot { margin: 1rem 0; }
.pictures { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 480px), 1fr)); gap: 1rem; }
.pictures img { width: 100%; height: auto; background: #fff; border-radius: 4px; }
"""
_SCRIPT = """
const dark = matchMedia("(prefers-color-scheme: dark)");
function coloured(layout) {
  const css = getComputedStyle(document.documentElement), value = name => css.getPropertyValue(name).trim();
  const own = {...layout, paper_bgcolor: value("--back"), plot_bgcolor: value("--back"), font: {...layout.font, color: value("--text")},
    hoverlabel: {bgcolor: value("--code"), font: {color: value("--text")}}};
  for (const key of Object.keys(layout)) if (/^[xy]axis/.test(key)) own[key] = {...layout[key], gridcolor: value("--rule")};
  return own;
}
function draw() {
  for (const node of document.querySelectorAll(".plot")) {
    const figure = JSON.parse(node.nextElementSibling.textContent);
    Plotly.react(node, figure.data, coloured(figure.layout), {displaylogo: false, responsive: true});
  }
}
if (window.Plotly) { draw(); dark.addEventListener("change", draw); }
else for (const node of document.querySelectorAll(".plot")) node.textContent = "plotly.min.js is missing beside this page: no graph";
"""


def page(title: str, sections: Iterable[str], *, plots: bool = False) -> str:
    """Return a page. Args: plots: whether a section contains a `plot`, for which plotly.min.js is loaded."""
    script = f'<script src="{PLOTLY_JS}"></script><script>{_SCRIPT}</script>' if plots else ""
    return f"""<!DOCTYPE html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<title>{html.escape(title)}</title>
<style>{_STYLE}</style></head><body>
<h1>{html.escape(title)}</h1>
{"".join(sections)}
{script}
</body></html>
"""


def section(title: str, *parts: str) -> str:
    """Return a section with a heading; "" if all parts are empty."""
    body = "".join(parts)
    return f"<section><h2>{html.escape(title)}</h2>{body}</section>\n" if body else ""


def table(lines: Sequence[Sequence[str]]) -> str:
    """Return a table: header and rows of plain text; "" without rows."""
    if len(lines) < 2:
        return ""
    head, *rows = (f"<tr>{''.join(f'<{tag}>{html.escape(cell)}</{tag}>' for cell in line)}</tr>" for tag, line in _tagged(lines))
    return f'<div class="wide"><table>{head}{"".join(rows)}</table></div>'


def _tagged(lines: Sequence[Sequence[str]]) -> Iterable[tuple[str, Sequence[str]]]:
    return (("td" if index else "th", line) for index, line in enumerate(lines))


def bullets(lines: Iterable[str]) -> str:
    """Return a list of sentences of plain text."""
    items = "".join(f"<li>{html.escape(line)}</li>" for line in lines)
    return f"<ul>{items}</ul>" if items else ""


def definitions(texts: Mapping[str, str]) -> str:
    """Return a list of terms and their definitions in plain text."""
    return f"<dl>{''.join(f'<dt>{html.escape(term)}</dt><dd>{html.escape(text)}</dd>' for term, text in texts.items())}</dl>"


def commands(lines: Iterable[str]) -> str:
    """Return lines to copy into a terminal."""
    return f"<pre>{html.escape(chr(10).join(lines))}</pre>"


def links(targets: Iterable[tuple[str, Path]], root: Path) -> str:
    """Return a list of links to files and folders, relative to the folder of the page."""
    items = (f'<li><a href="{link(target, root)}">{html.escape(name)}</a></li>' for name, target in targets)
    return f"<ul>{''.join(items)}</ul>"


def link(target: Path, root: Path) -> str:
    """Return the relative URL of a file or folder."""
    return html.escape(quote(os.path.relpath(target, root)), quote=True)


def pictures(files: Iterable[tuple[Path, str]]) -> str:
    """Return PNG files below the folder of the page, two in a row; each is linked to its interactive page."""
    shown = [(f"{file.parent.name}/{file.stem}", title) for file, title in files]
    each = (f'<a href="{name}.html"><img src="{name}.png" alt="{html.escape(title)}" loading="lazy"></a>' for name, title in shown)
    return f'<div class="pictures">{"".join(each)}</div>' if shown else ""


def text(plain: str) -> str:
    """Return plain text as HTML."""
    return html.escape(plain)


def plot(figure: AnyFigure) -> str:
    """Return an interactive graph."""
    content = json.dumps(plotly_json(figure), ensure_ascii=False, separators=(",", ":")).replace("</", "<\\/")
    return f'<div class="plot"></div><script type="application/json">{content}</script>'
