"""Collect information about a trained policy from its spec and its checkpoint, for model cards and the list of models."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from slm_lab.experiment.files import tensor_file
from slm_lab.experiment.files.find import Training
from slm_lab.experiment.files.named_model import PRETRAINED, SPEC, WEIGHTS, model_in, model_names, models_dir, pretrained_names
from slm_lab.experiment.files.storage import Location
from slm_lab.experiment.plan import UserError
from slm_lab.experiment.report.progress import format_with_error
from slm_lab.lib.text import format_table, last_line
from slm_lab.spec.load.loader import load_spec
from slm_lab.spec.models.spec import Spec
from slm_lab.spec.report import SpecError


class PolicyFacts(NamedTuple):
    """Information about a trained policy that is collected from its spec and its checkpoint."""

    spec: Spec
    digest: str
    """First 16 hexadecimal digits of the SHA-256 of the saved spec without meta.run."""
    saved: Mapping[str, Any]
    """Entries of the checkpoint of the policy (see bundle.PLAYABLE)."""
    source: str
    """Name of the run folder and of the checkpoint file."""
    start: Mapping[str, Any]
    """Last entry of meta.run, which describes the last start of the run: versions, git commit, date."""

    @property
    def mean_return(self) -> tuple[float, float | None, str] | None:
        """(mean return, standard error of the mean, description of the episodes), or None if no episode had ended."""
        value = self.saved.get("current_return")
        if value is None:
            return None
        count, is_eval = self.saved["current_epi"], self.saved["mode"] == "eval"
        over = f"{count} {'evaluation' if is_eval else 'training'} episode{'' if count == 1 else 's'}"
        return float(value), self.saved.get("current_return_se"), f"{over}{'' if is_eval else ', with sampled actions'}"


def policy_facts(training: Training, saved: Mapping[str, Any], checkpoint: Location) -> PolicyFacts:
    """Return information about the policy of a checkpoint. Raises SpecError or UserError if the saved spec is damaged.

    Args: saved: entries of the checkpoint.
    """
    spec = load_spec(training.spec_file, training.spec_name, for_search=False, builds_env=False)
    name, body = read_saved_spec(training.spec_file)
    starts = body.get("meta", {}).get("run") or [{}]
    source = saved.get("source") or _checkpoint_text(training, checkpoint)
    return PolicyFacts(spec, spec_digest(name, body), saved, source, starts[-1] if isinstance(starts, list) else starts)


def _checkpoint_text(training: Training, checkpoint: Location) -> str:
    root = training.paths.root
    folder = f"{root.parent.name}/{root.name}" if root.name == "confirm" else root.name
    return f"{folder}/{checkpoint.name}{f', {training.name}' if training.name else ''}"


def read_saved_spec(file: Path) -> tuple[str, dict[str, Any]]:
    """Return the name and the content of the only spec in a file. Raises UserError if the file cannot be read or has another form."""
    try:
        ((name, body),) = json.loads(file.read_text(encoding="utf-8")).items()
        return str(name), dict(body)
    except (OSError, ValueError, TypeError, AttributeError) as error:
        raise UserError(f"{file} cannot be read as a saved spec: {error}") from None


def spec_digest(name: str, body: Mapping[str, Any]) -> str:
    """Return the digest of a saved spec without meta.run: the first 16 hexadecimal digits of its SHA-256."""
    meta = {key: value for key, value in body.get("meta", {}).items() if key != "run"}
    return hashlib.sha256(json.dumps({name: {**body, "meta": meta}}, sort_keys=True).encode()).hexdigest()[:16]


def list_models(data_dir: Path) -> list[dict[str, Any]]:
    """Return one dict for each registered model, followed by one dict for each pretrained agent.

    Each dict has the keys name, pretrained, env, algorithm, return, standard_error, episodes, mode, frames, registered, policy, digest and
    folder. If a model cannot be read, its dict has only the keys name, pretrained, problem and folder.
    """
    registered = [models_dir(data_dir) / name for name in model_names(data_dir)]
    pretrained = [PRETRAINED / name for name in pretrained_names()]
    return [
        {"name": folder.name, "pretrained": folder in pretrained, **_model_row(folder), "folder": str(folder)}
        for folder in registered + pretrained
    ]


def _model_row(folder: Path) -> dict[str, Any]:
    try:
        if (model := model_in(folder)) is None:
            return {"problem": f"the folder has no {WEIGHTS} or no {SPEC}"}
        values = tensor_file.load_values(model.weights)
        facts = policy_facts(Training(model), values, model.weights)
    except (UserError, SpecError, OSError, tensor_file.TensorFileError) as error:
        return {"problem": last_line(str(error))}
    return {**_facts_row(facts, values), "policy": model.policy and model.policy.name}


def _facts_row(facts: PolicyFacts, values: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "env": facts.spec.env.name,
        "algorithm": facts.spec.agent.algorithm.name,
        "return": values.get("current_return"),
        "standard_error": values.get("current_return_se"),
        "episodes": values.get("current_epi"),
        "mode": values.get("mode"),
        "frames": values.get("frame"),
        "registered": values.get("registered"),
        "digest": facts.digest,
    }


def models_table(rows: list[dict[str, Any]], data_dir: Path) -> str:
    """Return a text table of the registered models, followed by a text table of the pretrained agents.

    Args: rows: dicts returned by `list_models`.
    """
    registered = [row for row in rows if not row["pretrained"]]
    lines = _format_table(registered) or [f"no model in {models_dir(data_dir)}; register one with: slm-lab export RUN --as NAME"]
    if pretrained := _format_table([row for row in rows if row["pretrained"]], columns=5):
        lines += ["", "pretrained agents:", *pretrained]
    return "\n".join(lines)


def _format_table(rows: Sequence[Mapping[str, Any]], columns: int = 6) -> list[str]:
    cells = [_model_cells(row)[:columns] for row in rows if "problem" not in row]
    lines = format_table([["name", "env", "algorithm", "return", "frames", "date"][:columns], *cells]) if cells else []
    return lines + [f"{row['name']}: {row['problem']}" for row in rows if "problem" in row]


def _model_cells(row: Mapping[str, Any]) -> list[str]:
    value = "" if row["return"] is None else format_with_error(row["return"], row["standard_error"])
    frames = "" if row["frames"] is None else f"{row['frames']:,}"
    return [row["name"], row["env"].rpartition(":")[2], row["algorithm"], value, frames, str(row["registered"] or "")[:10]]
