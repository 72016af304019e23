"""Write the generated files: python tools/generate.py [--check]

- slm_lab/spec/compat/known_envs.json from Gymnasium's registry and ALE's list of games,
- slm_lab/spec/compat/envpool_envs.json from EnvPool's registry,
- slm_lab/spec/models/torch_names.json from torch,
- slm_lab/spec/spec.schema.json, docs/spec.md, docs/nets.md and the tables of docs/from_slm_lab.md from the models,
- the table of docs/platforms.md from lib/system.py and the code,
- PYPI.md from README.md,
- docs/algorithms/, docs/memories/ and docs/nets/ from the models, the implementations, docs/equations.md and docs/BENCHMARKS.md.

With --check, nothing is written, and the exit status is 1 if a file is out of date.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from tools import envpool_envs, known_envs, package_page, torch_names

ROOT = Path(__file__).resolve().parent.parent


def _schema() -> str:
    from tools import schema  # imported here, since it reads the files of names, which are written first

    return schema.text()


def _reference() -> str:
    from tools import spec_reference

    return spec_reference.text()


def _from_slm_lab() -> str:
    from tools import from_slm_lab

    return from_slm_lab.text()


def _platforms() -> str:
    from tools import platforms

    return platforms.text()


FILES: dict[str, Callable[[], str]] = {
    "slm_lab/spec/compat/known_envs.json": known_envs.text,
    "slm_lab/spec/compat/envpool_envs.json": envpool_envs.text,
    "slm_lab/spec/models/torch_names.json": torch_names.text,
    "slm_lab/spec/spec.schema.json": _schema,
    "docs/spec.md": _reference,
    "docs/from_slm_lab.md": _from_slm_lab,
    "docs/platforms.md": _platforms,
    "PYPI.md": package_page.text,
}


def main() -> int:
    """Write or check the files; return the exit status."""
    from tools import component_pages

    if unknown := [argument for argument in sys.argv[1:] if argument != "--check"]:
        sys.stderr.write(f"{unknown[0]}: unknown argument; allowed: --check\n")
        return 2
    check, stale, left_over = "--check" in sys.argv[1:], [], component_pages.left_over()
    for name, text in (FILES | component_pages.pages()).items():
        path, fresh = ROOT / name, text()
        if path.exists() and path.read_text(encoding="utf-8") == fresh:
            continue
        stale.append(name)
        if not check:
            path.parent.mkdir(exist_ok=True)
            path.write_text(fresh, encoding="utf-8")
    sys.stdout.write("".join(f"{'out of date' if check else 'written'}: {name}\n" for name in stale))
    sys.stdout.write("".join(f"to be removed, since there is no such component: {name}\n" for name in left_over))
    return int(bool(left_over) or (check and bool(stale)))


if __name__ == "__main__":
    sys.exit(main())
