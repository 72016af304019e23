"""The commands for named models: `models`, `push NAME REPO` and `pull REPO`."""

from __future__ import annotations

from argparse import Namespace

from slm_lab.cli.files import model_lines
from slm_lab.cli.output import print_json, print_result
from slm_lab.cli.parser import UsageError


def models(words: list[str], arguments: Namespace) -> int:
    """Print the named models in the data folder and the pretrained agents. Return the exit code."""
    if words:
        raise UsageError(f"models: too many arguments: {' '.join(words)}; expected none")
    from slm_lab.experiment.deploy.facts import list_models, models_table

    rows = list_models(arguments.data_dir)
    return print_json({"models": rows}) if arguments.json else print_result(models_table(rows, arguments.data_dir))


def push(words: list[str], arguments: Namespace) -> int:
    """Upload a named model to a repository of the Hugging Face Hub, and return the exit code."""
    if len(words) != 2:
        raise UsageError(f"push: {len(words)} arguments ({' '.join(words)}); expected push NAME USER/REPO")
    from slm_lab.experiment.deploy.hub import push as upload

    return print_result(upload(words[0], words[1], arguments.data_dir, private=arguments.private))


def pull(words: list[str], arguments: Namespace) -> int:
    """Download a model from a repository of the Hugging Face Hub and register it as a named model. Return the exit code."""
    if len(words) != 1:
        raise UsageError(f"pull: {len(words)} arguments ({' '.join(words)}); expected pull USER/REPO or USER/REPO@REVISION")
    from slm_lab.experiment.deploy.hub import pull as download

    name = getattr(arguments, "as")
    described = download(words[0], arguments.data_dir, name, replace=arguments.replace, trust_code=arguments.trust_code)
    registered = name or words[0].partition("@")[0].rpartition("/")[2]
    return print_result(f"{described}\n{model_lines(registered, arguments.data_dir)}")
