"""Hooks of mkdocs (mkdocs.yml). They build a complete site from the files in docs/, which GitHub also shows.

- A folder in the navigation is replaced by its pages.
- A link to a file outside docs/ becomes a link to a page of the site that shows the file.
- Formulas ($…$) become SVG, which matplotlib draws, so that the site loads no script and no font for them.
- A notebook becomes a page.
"""

from __future__ import annotations

import html
import json
import posixpath
import re
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parent.parent
_UP = re.compile(r"\]\((\.\./[^)#\s]+?)/?(#[^)\s]*)?\)")
"""Matches a link to a path outside the folder of a page. Groups: the path and the anchor."""
_LANGUAGES = {".py": "python", ".json": "json", ".md": "markdown", ".toml": "toml", ".yml": "yaml"}
_MATH = re.compile(r'<(span|div) class="arithmatex">\\[(\[](.*?)\\[)\]]</\1>', re.DOTALL)
_REPLACED = {r"\\big\b|\\Big\b": "", r"\\[lr]vert\b": "|", r"\\tfrac\s*12": r"\\frac{1}{2}", r"\s+": " "}
"""TeX that matplotlib does not support → its replacement."""


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Replace each folder in the navigation by its pages."""
    config.nav = [_with_pages(entry) for entry in config.nav or ()]
    return config


def _with_pages(entry: Any) -> Any:
    if not isinstance(entry, dict):
        return entry
    ((title, content),) = entry.items()
    if not isinstance(content, list):
        return entry
    expanded = list[Any]()
    for item in content:
        folder = isinstance(item, str) and item.endswith("/")
        expanded += sorted(f"{item}{page.name}" for page in (ROOT / "docs" / item).glob("*.md")) if folder else [_with_pages(item)]
    return {title: expanded}


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add pages for notebooks, and for the files outside docs/ to which a page links."""
    for file in list(files):
        if file.src_uri.endswith(".ipynb"):
            page = notebook(json.loads(file.content_string))
            files.append(File.generated(config, file.src_uri.replace(".ipynb", ".md"), content=page))
    wanted = [path for file in list(files.documentation_pages()) for path in _outside(file)]
    done = set[str]()
    while wanted:
        path = wanted.pop()
        if path in done:
            continue
        done.add(path)
        inside = shown(ROOT / path)
        wanted += [str(listed.relative_to(ROOT)) for listed in inside]
        files.append(File.generated(config, _page_of(path), content=_source(ROOT / path, inside)))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Replace links to files outside docs/ and to notebooks by links to their pages."""
    if page.file.src_uri.startswith("source/"):
        return markdown
    folder = posixpath.dirname(page.file.src_uri)

    def link(match: re.Match[str]) -> str:
        path = _from_root(folder, match[1])
        return match[0] if path is None else f"]({posixpath.relpath(_page_of(path), folder or '.')})"

    linked = _UP.sub(link, markdown)
    return re.sub(r"\]\(([^)\s:]+)\.ipynb\)", r"](\1.md)", linked)


def on_page_content(content: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Replace formulas by SVG."""
    return _MATH.sub(lambda match: formula(html.unescape(match[2]), block=match[1] == "div"), content)


def shown(path: Path) -> list[Path]:
    """Return the files and folders that the page of a folder lists. Raises FileNotFoundError for a broken link."""
    if not path.exists():
        raise FileNotFoundError(f"a page of docs/ refers to {path}")
    if path.is_file():
        return []
    return sorted(
        child for child in path.iterdir() if child.suffix in _LANGUAGES or (child.is_dir() and not child.name.startswith(("__", ".")))
    )


def _outside(file: File) -> list[str]:
    """Return the paths outside docs/ to which a page links, relative to the repository."""
    paths = (_from_root(posixpath.dirname(file.src_uri), path) for path, _ in _UP.findall(file.content_string))
    return [path for path in paths if path is not None]


def _from_root(folder: str, link: str) -> str | None:
    """Return the path of a link in a page in `folder`, relative to the repository; None if the path is inside docs/."""
    path = posixpath.normpath(posixpath.join("docs", folder, link))
    return None if path.startswith("docs/") else path


def _page_of(path: str) -> str:
    """Return the page of a path outside docs/."""
    return f"source/{path}.md"


def _source(path: Path, inside: list[Path]) -> str:
    """Return the page of a file or folder."""
    name = path.relative_to(ROOT).as_posix()
    head = f"---\nsearch: {{exclude: true}}\n---\n# {name}\n\n"
    if path.is_dir():
        return head + "".join(f"- [{child.name}]({path.name}/{child.name}.md)\n" for child in inside)
    return f"{head}``````{_LANGUAGES.get(path.suffix, 'text')}\n{path.read_text(encoding='utf-8')}\n``````\n"


@cache
def formula(tex: str, block: bool) -> str:
    """Return a formula as SVG, scaled to the font size of the surrounding text. The TeX is the label for screen readers."""
    from matplotlib.font_manager import FontProperties
    from matplotlib.path import Path as Outline
    from matplotlib.textpath import text_to_path

    supported = tex.strip()
    for pattern, replacement in _REPLACED.items():
        supported = re.sub(pattern, replacement, supported)
    size = FontProperties(math_fontfamily="stix", size=100)
    width, _, _ = text_to_path.get_text_width_height_descent(f"${supported}$", size, ismath=True)
    vertices, codes = text_to_path.get_text_path(size, f"${supported}$", ismath=True)
    outline = Outline(vertices, codes)
    letters = {Outline.MOVETO: "M", Outline.LINETO: "L", Outline.CURVE3: "Q", Outline.CURVE4: "C"}
    drawn = "".join(
        letters[code] + " ".join(f"{x:.0f} {-y:.0f}" for x, y in points.reshape(-1, 2)) if code in letters else "Z"
        for points, code in outline.iter_segments(simplify=False)
    )
    height = np.asarray(outline.vertices)[:, 1]
    bottom, top = height.min() - 2, height.max() + 2
    svg = (
        f'<svg class="math" role="img" aria-label="{html.escape(tex.strip())}" viewBox="0 {-top:.0f} {width:.0f} {top - bottom:.0f}" '
        f'style="width:{width / 100:.2f}em;height:{(top - bottom) / 100:.2f}em;vertical-align:{bottom / 100:.2f}em">'
        f'<path d="{drawn}"/></svg>'
    )
    return f'<div class="math">{svg}</div>' if block else svg


def notebook(content: dict[str, Any]) -> str:
    """Return the page of a notebook: its text, code and outputs."""
    lines = list[str]()
    for cell in content["cells"]:
        source = "".join(cell["source"])
        lines.append(source if cell["cell_type"] == "markdown" else f"```python\n{source}\n```")
        for output in cell.get("outputs", ()):
            data = output.get("data", {})
            if "image/png" in data:
                lines.append(f'<img alt="plot" src="data:image/png;base64,{"".join(data["image/png"]).strip()}">')
            elif text := "".join(output.get("text", data.get("text/plain", ()))).rstrip():
                lines.append(f"```text\n{text}\n```")
    return "\n\n".join(lines) + "\n"
