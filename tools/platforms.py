"""Generate the table of docs/platforms.md: features of the operating system that the code uses and that some systems lack.

The features are listed in `slm_lab.lib.system.FEATURES`. Their uses are found in the syntax trees of the code: names of the standard
library that the stubs of mypy (typeshed) define only for some systems, and folders that exist only on Linux. The script raises
ValueError if the code uses something that no feature lists, or if a feature is not used.
"""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from pathlib import Path

from slm_lab.lib.system import FEATURES

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "platforms.md"
SYSTEMS = ("linux", "darwin", "win32")
_TABLE = re.compile(r"(<!-- features -->\n).*?(<!-- end -->)", re.DOTALL)
_STRINGS = re.compile(r"/proc\b|/sys/fs/cgroup|\bAF_UNIX\b")
_START_METHOD = "multiprocessing.forkserver"
"""The start method forkserver, which exists on macOS too, but which the package uses only on Linux."""

_TESTS = {"sys": frozenset({"platform"}), "os": frozenset({"name"})}
"""Module → attributes that identify the operating system."""


def text() -> str:
    """Return the page with an up-to-date table."""
    return _TABLE.sub(lambda match: f"{match[1]}{table()}\n{match[2]}", PAGE.read_text(encoding="utf-8"))


def table() -> str:
    """Return the table of features, with the modules that use each feature."""
    modules = modules_of(uses(ROOT / "slm_lab"))
    rows = ["| feature | systems | used for | without it | used in |", "|---|---|---|---|---|"]
    for name, feature in FEATURES.items():
        files = ", ".join(f"`{module}`" for module in sorted(modules[name]))
        rows.append(f"| {name} | {feature.systems} | {feature.purpose} | {feature.fallback} | {files} |")
    return "\n".join(rows)


def modules_of(used: Mapping[str, set[str]]) -> dict[str, set[str]]:
    """Return {feature: modules that use the feature}.

    Raises ValueError if a use belongs to no feature, or if a symbol of a feature is not used.
    """
    owner = {symbol: name for name, feature in FEATURES.items() for symbol in feature.symbols}
    if unlisted := sorted(used.keys() - owner.keys()):
        raise ValueError(f"no feature of lib/system.py lists {unlisted[0]}, which {sorted(used[unlisted[0]])[0]} uses")
    if unused := sorted(owner.keys() - used.keys()):
        raise ValueError(f"feature {owner[unused[0]]!r} of lib/system.py lists {unused[0]}, which the code does not use")
    modules = defaultdict[str, set[str]](set)
    for symbol, where in used.items():
        modules[owner[symbol]] |= where
    return modules


@cache
def uses(folder: Path) -> Mapping[str, set[str]]:
    """Return {symbol that some systems lack: files below `folder` that use the symbol}."""
    found = defaultdict[str, set[str]](set)
    for path in sorted(folder.rglob("*.py")):
        if path.name != "system.py":
            for symbol in _uses_of(ast.parse(path.read_text(encoding="utf-8"))):
                found[symbol].add(path.relative_to(folder).as_posix())
    return found


def _uses_of(tree: ast.Module) -> Iterator[str]:
    """Yield the symbols that a syntax tree uses and that some systems lack."""
    nodes, imported = list(ast.walk(tree)), dict[str, str]()
    for node in nodes:
        if isinstance(node, ast.Import):
            for alias in node.names:
                imported[alias.asname or alias.name] = alias.name
                if _is_on_some_systems_only(alias.name):
                    yield alias.name
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            if _is_on_some_systems_only(node.module):
                yield node.module
            for alias in node.names:
                imported[alias.asname or alias.name] = f"{node.module}.{alias.name}"
                if f"{node.module}.{alias.name}" == _START_METHOD or alias.name in _names_missing_elsewhere(node.module):
                    yield f"{node.module}.{alias.name}"
    docstrings = {id(node.value) for node in nodes if isinstance(node, ast.Expr)}
    for node in nodes:
        match node:
            case ast.Attribute(value=ast.Name(id=name), attr=attribute) if attribute in _names_missing_elsewhere(imported.get(name, "")):
                yield f"{imported[name]}.{attribute}"
            case ast.Constant(value=str(text)) if id(node) not in docstrings:
                yield from _STRINGS.findall(text)


def _is_on_some_systems_only(module: str) -> bool:
    """Return whether a whole module exists only on some systems, like fcntl."""
    names = [_names(module, system) for system in SYSTEMS]
    return bool(names[0]) and not all(names)


@cache
def _names_missing_elsewhere(module: str) -> frozenset[str]:
    """Return the names of a module that Linux has and another system lacks; empty if a system lacks the whole module."""
    if not module or _is_on_some_systems_only(module):
        return frozenset()
    linux, *others = (_names(module, system) for system in SYSTEMS)
    return frozenset(name for name in linux if not all(name in other for other in others)) | _TESTS.get(module, frozenset())


@cache
def _names(module: str, system: str) -> frozenset[str]:
    """Return the names that the stub of a standard library module defines for a system; empty if there is no stub."""
    import mypy

    base = Path(mypy.__file__).parent / "typeshed" / "stdlib" / module.replace(".", "/")
    path = next((path for path in (base / "__init__.pyi", base.with_suffix(".pyi")) if path.exists()), None)
    return frozenset(_defined(ast.parse(path.read_text(encoding="utf-8")).body, system)) if path else frozenset()


def _defined(body: Iterable[ast.stmt], system: str) -> Iterator[str]:
    """Yield the names that the statements of a stub define for a system."""
    for node in body:
        match node:
            case ast.If(test=test, body=then, orelse=otherwise):
                yield from _defined(then if _holds(test, system) else otherwise, system)
            case ast.FunctionDef(name=name) | ast.ClassDef(name=name) | ast.AnnAssign(target=ast.Name(id=name)):
                yield name
            case ast.Assign(targets=targets):
                yield from (target.id for target in targets if isinstance(target, ast.Name) and target.id != "__all__")
            case ast.ImportFrom(names=names):
                yield from (alias.asname or alias.name for alias in names if alias.asname == alias.name)


def _holds(test: ast.expr, system: str) -> bool:
    """Return whether a condition in a stub is true on a system, with Python 3.11."""
    scope = {"sys": type("Sys", (), {"platform": system, "version_info": (3, 11)}), "TYPE_CHECKING": True}
    return bool(eval(ast.unparse(test), scope))
