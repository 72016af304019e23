"""Upload named models to repositories of the Hugging Face Hub (`push`), and download them (`pull`).

A downloaded model is untrusted data. Only files whose names are in PULLED are downloaded. None of the downloaded files contains a pickle,
and the weights are a safetensors file. A spec that names modules is refused unless the user trusts the spec, because these modules would be
imported.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

from slm_lab.experiment.files import tensor_file
from slm_lab.experiment.files.find import Training
from slm_lab.experiment.files.named_model import (
    CARD,
    FILES,
    SPEC,
    WEIGHTS,
    ModelPaths,
    check_name_available,
    get_model,
    models_dir,
    new_model,
)
from slm_lab.experiment.plan import UserError
from slm_lab.lib.text import error_line
from slm_lab.spec.report import KeyPath, show_path

PULLED = (WEIGHTS, SPEC, "policy.onnx", CARD)
"""Names of the files that are downloaded. policy.pt2 is not downloaded, because torch.export.load may unpickle it. The policy can be
exported to policy.pt2 again from the weights."""
LARGEST = {WEIGHTS: 2**31, "policy.onnx": 2**31, SPEC: 2**20, CARD: 2**20}
"""Maximum size in bytes of each file that is downloaded."""
_PICKLES = (".pt", ".pth", ".pkl", ".pickle", ".bin", ".ckpt", ".zip", ".joblib")
_REPO = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_CODE = re.compile(r"\S+:\S+")
"""Regular expression for a name of the form "package.module:Name". The module of such a name would be imported."""
_WHY = {
    401: "the token is not valid: hf auth login, or set HF_TOKEN",
    403: "the token does not allow it: it needs write access to this repository",
    404: "there is no such repository or revision, or the token gives no access to it",
    429: "too many requests; try again later",
}


def push(name: str, repo: str, data_dir: Path, *, private: bool = False) -> str:
    """Upload a named model to a repository, and return a summary. The repository is created if it does not exist.

    Args: private: whether a new repository is private. If `private` is True, an existing repository must be private too.

    Raises UserError if the model does not exist, if the token, the network or the permission is missing, or if the repository is public
    although `private` is True.
    """
    model = get_model(name, data_dir)
    _check_repo(repo)
    hub = _import_hub()
    if hub.get_token() is None:
        raise UserError("no token of the Hugging Face Hub: log in with hf auth login, or set HF_TOKEN (a token with write access)")
    files = [model.root / file for file in FILES if (model.root / file).is_file()]
    with _hub_errors(hub, repo):
        api = _hub_api(hub)
        api.create_repo(repo, private=private or None, exist_ok=True)
        info = api.model_info(repo)
        if private and not info.private:
            raise UserError(f"{repo} exists and is public; make it private on its page, use another one, or leave --private out")
        existing = {sibling.rfilename for sibling in info.siblings or ()}
        operations = [hub.CommitOperationAdd(file.name, str(file)) for file in files]
        operations += [hub.CommitOperationDelete(file) for file in existing.intersection(FILES).difference(file.name for file in files)]
        api.create_commit(repo, operations, commit_message=f"Upload the model {name}")
    size = sum(file.stat().st_size for file in files)
    return f"{api.endpoint}/{repo}: {', '.join(file.name for file in files)} ({size / 2**20:.2g} MiB)\nslm-lab pull {repo}"


def pull(where: str, data_dir: Path, name: str | None = None, *, replace: bool = False, trust_code: bool = False) -> str:
    """Download a model from a repository, register the model on this machine, and return a summary.

    Args:
        where: USER/REPO, or USER/REPO@REVISION (a branch, tag or commit).
        name: name under which the model is registered, or None for the name of the repository.
        replace: whether to replace an existing model with this name.
        trust_code: whether to accept a spec that names modules, which are imported when the model is loaded.

    Raises UserError, without registering a model, if the repository or the network cannot be reached, or if the model was not written by
    slm_lab, is damaged, or is unsafe.
    """
    repo, _, revision = where.partition("@")
    _check_repo(repo)
    name = name or repo.rpartition("/")[2]
    check_name_available(name, data_dir, replace)
    hub = _import_hub()
    with _hub_errors(hub, where):
        info = _hub_api(hub).model_info(repo, revision=revision or None, files_metadata=True)
    files = _files_to_download(where, {sibling.rfilename: sibling.size for sibling in info.siblings or ()})
    folder = models_dir(data_dir) / name
    try:
        with new_model(name, data_dir, replace) as temporary:
            with _hub_errors(hub, where):
                for file in files:
                    _download(hub, repo, info.sha, file, temporary)
            description = _check_downloaded_model(where, ModelPaths(temporary, name), trust_code)
    except OSError as error:
        raise UserError(f"cannot write {folder}: {error.strerror or error}") from None
    return f"{description}: {folder}"


def _check_repo(repo: str) -> None:
    if not _REPO.fullmatch(repo) or ".." in repo:
        in_url = re.fullmatch(rf"https?://[^/]+/({_REPO.pattern})/?", repo)
        hint = f"; did you mean '{in_url[1]}'?" if in_url else ""
        raise UserError(f"invalid repository {repo!r}; expected USER/REPO, its name on the Hugging Face Hub, such as alice/cartpole{hint}")


def _import_hub() -> ModuleType:
    try:
        package = import_module("huggingface_hub")
        import_module("huggingface_hub.utils").disable_progress_bars()
    except ImportError:
        raise UserError("push and pull need the package huggingface_hub, which is not installed: pip install 'slm-lab[hub]'") from None
    return package


def _hub_api(hub: ModuleType) -> Any:
    return hub.HfApi(endpoint=os.environ.get("HF_ENDPOINT"), library_name="slm-lab")


@contextmanager
def _hub_errors(hub: ModuleType, where: str) -> Iterator[None]:
    """Convert errors of the Hugging Face Hub and of the network to UserError."""
    try:
        yield
    except UserError:
        raise
    except hub.errors.OfflineModeIsEnabled:
        raise UserError(f"cannot reach {where}: HF_HUB_OFFLINE is set") from None
    except hub.errors.HfHubHTTPError as error:
        status = getattr(error.response, "status_code", None)
        why = _WHY.get(status or 0, error_line(error))
        why = "the repository is gated: accept its conditions on its page first" if isinstance(error, hub.errors.GatedRepoError) else why
        why = _WHY[404] if isinstance(error, hub.errors.RepositoryNotFoundError) else why
        raise UserError(f"{where}: {why} ({_hub_api(hub).endpoint}, HTTP status {status})") from None
    except (hub.errors.LocalEntryNotFoundError, hub.errors.HFValidationError) as error:
        raise UserError(f"{where}: {error_line(error)}") from None
    except (RuntimeError, ValueError) as error:  # a file was not uploaded, or the answer is not from the Hub
        raise UserError(f"{where}: {error_line(error)} ({_hub_api(hub).endpoint})") from None
    except Exception as error:
        if type(error).__module__.partition(".")[0] not in ("httpx", "httpx2", "httpcore", "httpcore2", "huggingface_hub"):
            raise
        raise UserError(f"cannot reach {_hub_api(hub).endpoint}: {type(error).__name__}: {error}") from None


def _files_to_download(where: str, sizes: Mapping[str, int | None]) -> list[str]:
    """Return the names of the files to download. Raises UserError if the repository has no model of slm_lab, or if a file is too large.

    Args:
        where: the repository as the user has given it, for error messages.
        sizes: name of each file in the repository → size in bytes, or None if the size is unknown.
    """
    if missing := [file for file in (WEIGHTS, SPEC) if file not in sizes]:
        pickles = sorted(file for file in sizes if file.endswith(_PICKLES))
        unsafe = (
            f"; {', '.join(pickles[:3])}: such files can execute code when they are loaded, and are never downloaded" if pickles else ""
        )
        raise UserError(f"{where} has no model of slm_lab: {' and '.join(missing)} missing{unsafe}")
    for file in PULLED:
        if (size := sizes.get(file)) is not None and size > LARGEST[file]:
            raise UserError(f"{where}: {file} has {size:,} bytes; allowed: {LARGEST[file]:,}")
    return [file for file in PULLED if file in sizes]


def _download(hub: ModuleType, repo: str, revision: str, file: str, folder: Path) -> None:
    """Download one file of a repository to `folder`."""
    cache = folder / ".download"
    try:
        downloaded = Path(_hub_api(hub).hf_hub_download(repo, file, revision=revision, local_dir=cache))
        if downloaded.stat().st_size > LARGEST[file]:
            raise UserError(f"{repo}: {file} has {downloaded.stat().st_size:,} bytes; allowed: {LARGEST[file]:,}")
        shutil.copyfile(downloaded, folder / file)
    finally:
        shutil.rmtree(cache, ignore_errors=True)


def _check_downloaded_model(where: str, model: ModelPaths, trust_code: bool) -> str:
    """Load a downloaded model to check it, and return its description.

    Raises UserError if the model is damaged, unsafe, or written by another version of slm_lab.
    """
    from slm_lab.experiment.deploy.facts import read_saved_spec
    from slm_lab.experiment.deploy.load import load_trained

    try:
        name, body = read_saved_spec(model.spec)
        _reject_control_characters([name, body, tensor_file.load_values(model.weights)])
        named = list(_code_names(body, ()))
        if named and not trust_code:
            shown = ", ".join(f"{show_path(path)}: '{name}'" for path, name in named)
            raise UserError(f"its spec names code, which is imported when the model is used ({shown}); if you trust it, add --trust-code")
        agent = load_trained(Training(model))
    except Exception as error:  # a crafted or damaged file can cause any error
        kind = "" if isinstance(error, UserError) else f"{type(error).__name__}: "
        kind = f"{WEIGHTS} " if isinstance(error, tensor_file.TensorFileError) else kind
        raise UserError(
            f"{where} cannot be used, and was not registered: {kind}{str(error).replace(f'{model.root}{os.sep}', '')}"
        ) from None
    return agent.description.removesuffix(f": {agent.path}")


def _reject_control_characters(tree: Any) -> None:
    """Raise UserError if a string in nested lists and dicts contains a control character, which could change what a terminal shows."""
    match tree:
        case dict():
            _reject_control_characters([*tree.keys(), *tree.values()])
        case list():
            for value in tree:
                _reject_control_characters(value)
        case str() if not tree.isprintable():
            raise UserError(f"it contains control characters: {tree[:60]!r}")


def _code_names(tree: Any, path: KeyPath) -> Iterator[tuple[KeyPath, str]]:
    """Yield (path, value) for each value of a saved spec that names a module. The record meta.run is skipped."""
    if path == ("meta", "run"):
        return
    match tree:
        case dict():
            for key, value in tree.items():
                yield from _code_names(value, (*path, key))
        case list():
            for index, value in enumerate(tree):
                yield from _code_names(value, (*path, index))
        case str() if _CODE.fullmatch(tree):
            yield path, tree
