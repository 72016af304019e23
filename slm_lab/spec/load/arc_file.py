"""`arc_file` of a TorchArcNet: a file that contains the graph. It is read when the spec is loaded, so that the saved spec has all of it."""

from __future__ import annotations

from pathlib import Path as FilePath
from typing import Any

from slm_lab.spec.load.text import read
from slm_lab.spec.report import Report, SpecError, show, value_at

PLACES = (("agent", "net"), ("agent", "critic_net"))


def read_arc_files(raw: dict[str, Any], folder: FilePath | None, report: Report) -> dict[str, Any]:
    """Replace `arc_file` by `arc` in the nets of a raw spec. Args: folder: of the spec file; None: the spec is not in a file."""
    for place in PLACES:
        net = value_at(raw, place)
        if not isinstance(net, dict) or net.get("arc_file") is None or "TorchArcNet" not in (net.get("name"), net.get("type")):
            continue
        name, path = net.pop("arc_file"), (*place, "arc_file")
        if net.get("arc") is not None:
            report.ineffective(path, "has no effect: arc is given; ignored")
            continue
        if not isinstance(name, str):
            report.fail(path, f"must be the name of a YAML or JSON file, not {show(name)}")
            continue
        candidates = [where / name for where in (folder, FilePath()) if where is not None]
        file = next((file for file in candidates if file.is_file()), None)
        if file is None:
            report.fail(path, f"no such file: {' or '.join(dict.fromkeys(map(str, candidates)))}")
            continue
        try:
            arc = read(file)
        except SpecError as error:
            report.fail(path, f"{file}: {error.problems[0].message}")
            continue
        if arc is None:
            report.fail(path, f"{file} is empty")
            continue
        net["arc"] = arc
        report.moved((*place, "arc"), path)
    return raw
