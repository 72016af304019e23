"""Export a policy with a model card to a file, or register a policy as a named model."""

from __future__ import annotations

from datetime import datetime
from pathlib import Path

from slm_lab.experiment.deploy.card import ExportedFile, model_card, write_card
from slm_lab.experiment.deploy.export import POLICIES, ExportResult, Format, check_packages, choose_format, export_agent, export_training
from slm_lab.experiment.deploy.facts import policy_facts, read_saved_spec
from slm_lab.experiment.deploy.load import LoadedAgent, load_trained
from slm_lab.experiment.files import tensor_file
from slm_lab.experiment.files.find import CheckpointName, Training, TrainingChoice, find_training
from slm_lab.experiment.files.named_model import (
    CARD,
    SPEC,
    WEIGHTS,
    ModelPaths,
    check_name_available,
    models_dir,
    new_model,
)
from slm_lab.experiment.plan import UserError
from slm_lab.lib.files import indented_json, replace_file
from slm_lab.lib.log import notice

_PRIVATE = ("command", "host", "checkpoints")
"""Entries of meta.run that are not copied to a named model, because they name a machine, folders and users, and models may be published."""


def export(
    folder: str | Path,
    format: Format | None = None,
    out: str | Path | None = None,
    which: CheckpointName = "best",
    session: int | None = None,
    *,
    name: str | None = None,
    replace: bool = False,
    trial: int | None = None,
    entry: str | None = None,
    env: str | None = None,
    seed: int | None = None,
    policy: str | None = None,
) -> ExportResult:
    """Export the policy of a checkpoint to a file with a model card beside it, or as a named model.

    Args:
        folder, which, session, trial, entry, env, seed, policy: as in `load_agent`.
        format, out: as in `export_training`.
        name: name under which the policy is registered in data/models/{name}, so that `load_agent(name)` loads the policy. `name` and `out`
            cannot be combined.
        replace: whether to replace an existing model with this name.

    Raises UserError if the policy cannot be exported, or if the actions of the exported file differ from those of the agent.
    """
    data_dir = Path("data")
    training = find_training(folder, None, data_dir, TrainingChoice(trial, entry, env, seed, policy))
    if name is None:
        return export_with_card(training, format, None if out is None else Path(out), which, session)
    if out is not None:
        raise UserError(
            f"out={str(out)!r} has no effect with name={name!r}: the file is written to the folder of the model; remove one of them"
        )
    return register(training, name, data_dir, format, which, session, replace=replace)


def export_with_card(
    training: Training, format: Format | None = None, out: Path | None = None, which: CheckpointName = "best", session: int | None = None
) -> ExportResult:
    """Export a policy as `export_training` does, and write a model card beside the exported file, with the same name and the suffix .md.

    If an edited model card or another file already exists at the path of the card, the existing file is kept, and a notice is logged.
    """
    result, agent = export_training(training, format, out, which, session)
    if isinstance(training.paths, ModelPaths) and result.path.parent == training.paths.root:
        return result  # the folder of a named model already has a model card
    card = result.path.with_suffix(".md")
    text = model_card(result.path.stem, policy_facts(training, agent.saved, agent.path), agent, _exported_file(result), is_named=False)
    return result._replace(card=card if write_card(card, text) else None)


def register(
    training: Training,
    name: str,
    data_dir: Path,
    format: Format | None = None,
    which: CheckpointName = "best",
    session: int | None = None,
    *,
    replace: bool = False,
) -> ExportResult:
    """Register a policy as a named model: write weights, spec, exported policy and model card to the folder `data_dir`/models/`name`.

    If `format` is None and the policy cannot be exported, the policy is registered without an exported file, a notice is logged, and the
    returned ExportResult contains the path of the weights. Raises UserError, without writing anything, if the name cannot be used, if there
    is no usable checkpoint, or if an export to the given `format` fails.
    """
    check_name_available(name, data_dir, replace)
    agent = load_trained(training, which, session)
    facts = policy_facts(training, agent.saved, agent.path)
    folder = models_dir(data_dir) / name
    try:
        with new_model(name, data_dir, replace) as temporary:
            origin = {"source": facts.source, "registered": datetime.now().astimezone().isoformat(timespec="seconds")}
            tensor_file.save(temporary / WEIGHTS, {**agent.saved, **origin})
            replace_file(temporary / SPEC, public_spec(training.spec_file))
            result = _export_to_model(agent, format, temporary)
            exported = None if result.path.name == WEIGHTS else _exported_file(result)
            replace_file(temporary / CARD, model_card(name, facts, agent, exported, is_named=True).encode())
    except OSError as error:
        raise UserError(f"cannot write {folder}: {error.strerror or error}") from None
    return result._replace(path=folder / result.path.name, card=folder / CARD)


def _export_to_model(agent: LoadedAgent, format: Format | None, folder: Path) -> ExportResult:
    """Export a policy to the folder of a named model. If the export fails, raise UserError if `format` is given. If `format` is None, log a
    notice and return an ExportResult that contains the path of the weights."""
    chosen = choose_format(None, format)
    try:
        check_packages(chosen)
        return export_agent(agent, chosen, folder / POLICIES[chosen])
    except UserError as error:
        if format is not None:
            raise
        notice(f"the model has no exported file: {error}")
        return ExportResult(folder / WEIGHTS, agent.path, agent.description, {}, {}, 0.0, 0.0)


def _exported_file(result: ExportResult) -> ExportedFile:
    return ExportedFile(result.path.name, result.inputs, result.outputs)


def public_spec(file: Path) -> bytes:
    """Return the saved spec in `file` as JSON bytes, without the entries of meta.run that name a machine, folders or users."""
    name, body = read_saved_spec(file)
    meta = dict(body.get("meta", {}))
    if isinstance(starts := meta.get("run"), list):
        meta["run"] = [{key: value for key, value in start.items() if key not in _PRIVATE} for start in starts]
    return indented_json({name: {**body, "meta": meta}})
