"""Export a policy to an ONNX or torch.export file, and check that the outputs of the file are those of the agent."""

from __future__ import annotations

import logging
import os
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from importlib.util import find_spec
from io import BytesIO
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from gymnasium import spaces
from torch import Tensor

from slm_lab.env.nested_actions import assemble_action, leaf_values
from slm_lab.experiment.deploy.exported import ExportedPolicy, InputEntry, append_log_std, torch_dtype
from slm_lab.experiment.deploy.load import LoadedAgent, load_trained
from slm_lab.experiment.files.find import CheckpointName, Training
from slm_lab.experiment.files.named_model import ModelPaths
from slm_lab.experiment.files.storage import Location
from slm_lab.experiment.plan import UserError
from slm_lab.lib.text import first_line

Format = Literal["onnx", "torch"]
SUFFIXES: dict[Format, str] = {"onnx": ".onnx", "torch": ".pt2"}
POLICIES: dict[Format, str] = {"onnx": "policy.onnx", "torch": "policy.pt2"}
"""Format → name of the exported file in the folder of a named model."""
OBSERVATIONS = 1_000
"""Number of observations with which the exported file is checked."""
TOLERANCE = 1e-4
"""Maximum allowed difference between outputs of the file and of the agent, relative to the largest output of the agent (at least 1)."""
_ONNX_PACKAGES = ("onnx", "onnxscript", "onnxruntime")
Outputs = list[np.ndarray]
Run = Callable[[list[np.ndarray]], Outputs]
"""Function that maps the inputs of an exported policy to its outputs."""


class ExportResult(NamedTuple):
    """An exported policy file that was written and checked."""

    path: Path
    checkpoint: Location
    description: str
    """Description of the exported agent in one line."""
    inputs: dict[str, str]
    """Name of each input → dtype and shape."""
    outputs: dict[str, str]
    """Name of each output → dtype and shape."""
    action_difference: float
    """Largest difference between actions of the file and of the agent."""
    params_difference: float
    """Largest difference between distribution parameters (and hidden states) of the file and of the agent."""
    card: Path | None = None
    """Path of the model card, or None if no model card was written."""


def export_training(
    training: Training, format: Format | None = None, out: Path | None = None, which: CheckpointName = "best", session: int | None = None
) -> tuple[ExportResult, LoadedAgent]:
    """Export the policy of a checkpoint to a file, as a function from observations to deterministic actions.

    The exported function includes the observation normaliser and the conversion of network outputs to actions. Returns (information about
    the exported file, loaded agent).

    Args:
        format: "onnx" or "torch" (torch.export), or None to choose the format by the suffix of `out` ("onnx" without `out`).
        out: path of the output file, or None for a file beside the checkpoint (for a pretrained agent, below the data folder). The file is
            created or replaced only after the check of its outputs has succeeded.
        which, session: as in `load_agent`.

    Raises UserError if the policy cannot be exported, or if the actions of the exported file differ from those of the agent.
    """
    format = choose_format(out, format)
    check_packages(format)
    agent = load_trained(training, which, session)
    default = POLICIES[format] if isinstance(training.paths, ModelPaths) else f"{agent.path.stem}{SUFFIXES[format]}"
    return export_agent(agent, format, out or training.paths.model_dir / default, new_folder=out is None), agent


def export_agent(agent: LoadedAgent, format: Format, path: Path, *, new_folder: bool = False) -> ExportResult:
    """Export the policy of an agent to the file `path`, and check the outputs of the file.

    Args: new_folder: whether to create the folder of `path` if it does not exist.

    Raises UserError in the same cases as `export_training`, without writing a file.
    """
    temporary = path.with_name(f".{path.stem}.tmp{SUFFIXES[format]}")
    try:
        if new_folder:
            path.parent.mkdir(parents=True, exist_ok=True)
        ports, differences = _write_checked(agent, format, temporary)
        os.replace(temporary, path)
    except UserError as error:
        raise UserError(f"cannot export the policy of {agent.path}: {error}") from None
    except OSError as error:
        raise UserError(f"cannot write {path}: {error.strerror or error}") from None
    finally:
        with suppress(OSError):  # deletion fails if the folder is read-only
            temporary.unlink(missing_ok=True)
    return ExportResult(path, agent.path, agent.description, *ports, *differences)


def check_packages(format: Format) -> None:
    """Raise UserError if a package that an export to `format` needs is not installed."""
    for package in _ONNX_PACKAGES if format == "onnx" else ():
        if find_spec(package) is None:  # packages are not imported here, because importing onnxscript takes seconds, and it is rarely used
            raise UserError(f"export to ONNX needs the package {package}, which is not installed: pip install 'slm-lab[onnx]'")


def choose_format(out: Path | None, format: Format | None) -> Format:
    """Return the format of the output file `out`: `format` or, if `format` is None, the format of the suffix of `out`, or "onnx" if `out`
    is None.

    Raises UserError if `out` cannot be written, or if its suffix does not fit the format.
    """
    if out is not None and (out.is_dir() or not out.parent.is_dir()):
        why = "is a folder; expected a file" if out.is_dir() else f"cannot be written: there is no folder {out.parent}"
        raise UserError(f"--out {out} {why}")
    if out is not None and out.exists() and not out.is_file():
        raise UserError(f"--out {out} is a special file; expected the path of a regular file")
    named = None if out is None else next((name for name, suffix in SUFFIXES.items() if out.suffix == suffix), None)
    if out is not None and (named is None or (format is not None and format != named)):
        expected = " or ".join(SUFFIXES.values()) if format is None else SUFFIXES[format]
        raise UserError(f"--out {out} must end with {expected}{'' if format is None else f', since --format is {format}'}")
    return format or named or "onnx"


def format_summary(result: ExportResult) -> str:
    """Return a text with the checkpoint, the exported file, its inputs and outputs, and the differences between outputs of the file and of
    the agent."""
    lines = [result.description, str(result.path)]
    lines += [
        f"  {kind} {name}: {form}" for kind, ports in (("input", result.inputs), ("output", result.outputs)) for name, form in ports.items()
    ]
    if not result.inputs:
        return "\n".join(lines)
    lines.append(
        f"checked on {OBSERVATIONS:,} observations: actions differ from the agent's by at most {result.action_difference:.2g}, "
        f"distribution parameters by at most {result.params_difference:.2g}"
    )
    lines += [] if result.card is None else [str(result.card)]
    return "\n".join(lines)


Ports = tuple[dict[str, str], dict[str, str]]
"""Two dicts {name: dtype and shape}, the first for the inputs and the second for the outputs of an exported policy."""


class _ExampleInputs(NamedTuple):
    """An example batch of inputs for the exporters, the names of the inputs, and the names of the outputs."""

    inputs: tuple[Tensor, ...]
    names: list[str]
    out_names: list[str]


def _write_checked(agent: LoadedAgent, format: Format, path: Path) -> tuple[Ports, tuple[float, float]]:
    """Write the exported policy to `path` and check the file. Raises UserError if no exporter succeeds.

    Returns (description of the inputs and outputs of the file, (largest difference of the actions, largest difference of the other
    outputs)), where the differences are those between the file and the agent. For ONNX, tracing is tried first, which takes 0.3 s
    (torch.export with translation to ONNX takes 9 s). A trace cannot contain control flow that depends on values. torch.export is used if
    tracing fails or warns, or if the traced policy gives different actions.
    """
    policy = ExportedPolicy(agent)
    example = _make_example_inputs(policy)
    writers = {"onnx": (_trace_to_onnx, _export_to_onnx), "torch": (_export_to_torch,)}[format]
    for write in writers:
        try:
            with _suppress_torch_output():
                outputs = policy(*example.inputs)
                path.write_bytes(write(policy, example))
            differences = _compare_with_agent(agent, policy, _load_exported(format, path))
        except OSError:
            raise
        except Exception as error:  # torch raises many types of errors for code that it cannot trace or translate
            if write is writers[-1]:
                raise error if isinstance(error, UserError) else _not_exportable_error(format, error) from error
            continue
        forms = dict(zip(example.names, map(_describe_tensor, example.inputs), strict=True))
        return (forms, dict(zip(example.out_names, map(_describe_tensor, outputs), strict=True))), differences
    raise AssertionError


def _make_example_inputs(policy: ExportedPolicy) -> _ExampleInputs:
    rows = 3  # torch.export would treat 0 and 1 as fixed sizes
    inputs = [torch.zeros(rows, *(entry.space.shape or ()), dtype=torch_dtype(entry.space)) for entry in policy.entries]
    names, out_names = [entry.name for entry in policy.entries], [*policy.action_names, "params"]
    if policy.state_size:
        inputs.append(torch.zeros(rows, policy.state_size))
        names.append("state")
        out_names.append("next_state")
    return _ExampleInputs(tuple(inputs), names, out_names)


def _not_exportable_error(format: Format, error: Exception) -> UserError:
    other = "; --format torch may work" if format == "onnx" else ""
    return UserError(f"the net cannot be exported to {format}: {type(error).__name__}: {first_line(str(error))[:200]}{other}")


def _trace_to_onnx(policy: ExportedPolicy, example: _ExampleInputs) -> bytes:
    """Return the content of an ONNX file of the traced policy. Raises TracerWarning if the trace turns computed values into constants."""
    content: Any = BytesIO()
    axes = {name: {0: "batch"} for name in (*example.names, *example.out_names)}
    doubt: type[Warning] = vars(torch.jit)["TracerWarning"]
    warnings.filterwarnings("error", category=doubt)
    warnings.filterwarnings("ignore", category=doubt, module=r"torch\.")  # torch's own checks of shapes
    names: dict[str, Any] = {"input_names": example.names, "output_names": example.out_names, "dynamic_axes": axes}
    torch.onnx.export(policy, example.inputs, content, dynamo=False, verbose=False, **names)
    return bytes(content.getvalue())


def _make_exported_program(policy: ExportedPolicy, example: _ExampleInputs) -> torch.export.ExportedProgram:
    batch = torch.export.Dim("batch")
    return torch.export.export(policy, example.inputs, dynamic_shapes=(tuple({0: batch} for _ in example.inputs),))


def _export_to_onnx(policy: ExportedPolicy, example: _ExampleInputs) -> bytes:
    """Return the content of the ONNX file to which torch translates the program of torch.export."""
    program = _make_exported_program(policy, example)
    written = torch.onnx.export(program, input_names=example.names, output_names=example.out_names, verbose=False)
    assert written is not None
    content: bytes = written.model_proto.SerializeToString()
    return content


def _export_to_torch(policy: ExportedPolicy, example: _ExampleInputs) -> bytes:
    """Return the content of a torch.export file, created in memory, because torch's file writer aborts if the disk is full."""
    content = BytesIO()
    torch.export.save(_make_exported_program(policy, example), content)
    return content.getvalue()


def _describe_tensor(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} [{', '.join(['batch', *map(str, tensor.shape[1:])])}]"


@contextmanager
def _suppress_torch_output() -> Iterator[None]:
    """Suppress log messages and warnings of torch's exporters, which are not needed because failures of the exporters raise errors."""
    logger = logging.getLogger("torch")
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        with warnings.catch_warnings(), torch.inference_mode(False), torch.no_grad():
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(level)


def _load_exported(format: Format, path: Path) -> Run:
    if format == "torch":
        module = torch.export.load(path).module()
        return lambda inputs: [value.detach().numpy() for value in module(*map(torch.from_numpy, inputs))]
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    options.intra_op_num_threads = 1
    session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    names = [port.name for port in session.get_inputs()]
    return lambda inputs: list(session.run(None, dict(zip(names, inputs, strict=True))))


def _compare_with_agent(agent: LoadedAgent, policy: ExportedPolicy, run: Run) -> tuple[float, float]:
    """Compare the exported policy with agent.act(deterministic=True). Returns (largest difference of the actions, largest difference of the
    other outputs).

    An integer action of the file may differ from that of the agent if the distribution parameters differ slightly. However, the action of
    the file must be the mode of the distribution that the parameters in the file's output define. Raises UserError if the outputs of the
    file do not match those of the agent.

    Args: run: function that runs the exported file.
    """
    rng = np.random.default_rng(0)
    inputs = [_sample_observations(entry, policy, rng) for entry in policy.entries]
    obs = assemble_action(agent.acting_space, iter(inputs))
    state = agent.policy.initial_state(OBSERVATIONS)
    if state is not None:
        state = rng.uniform(-0.9, 0.9, state.shape).astype(np.float32)
        inputs.append(np.ascontiguousarray(state[:, : policy.state_size]))
    action_N, next_state = agent.act(obs, state, deterministic=True)
    expected = leaf_values(agent.action_space, action_N)
    params_NP, _ = agent.policy.forward(agent.encode(obs), state)
    results, single_results = run(inputs), run([values[:1] for values in inputs])
    actions, others = results[: len(expected)], results[len(expected) :]
    distribution = agent.policy.distribution
    assert distribution is not None
    outputs = [append_log_std(distribution, torch.from_numpy(params_NP)).numpy()]
    outputs += [] if next_state is None else [next_state[:, : policy.state_size]]
    difference = max(_relative_difference(actual, of_agent) for actual, of_agent in zip(others, outputs, strict=True))
    modes = policy.decode(distribution.env_action(distribution.mode(torch.from_numpy(others[0][:, : distribution.param_dim]))))
    wrong = difference > TOLERANCE
    for actual_N, expected_N, mode_N, single_1 in zip(actions, expected, modes, single_results, strict=False):
        wrong |= not _is_same_action(actual_N, expected_N, mode_N.numpy()) or not np.allclose(single_1, actual_N[:1], atol=TOLERANCE)
    greatest = max(float(np.abs(a.astype(np.float64) - b).max()) for a, b in zip(actions, expected, strict=True))
    if wrong:
        raise UserError(
            f"the file acts differently from the agent on {OBSERVATIONS:,} observations: actions differ by up to {greatest:.2g}, "
            f"distribution parameters by up to {difference:.2g} of their size; no file is written"
        )
    return greatest, max(float(np.abs(actual - of_agent).max()) for actual, of_agent in zip(others, outputs, strict=True))


def _is_same_action(actual_N: np.ndarray, expected_N: np.ndarray, mode_N: np.ndarray) -> bool:
    """Return whether the file's actions are right: floats equal the agent's actions up to TOLERANCE, integers equal the modes.

    Raises UserError if the file's actions have another type or shape than the agent's.
    """
    if actual_N.shape != expected_N.shape or actual_N.dtype != expected_N.dtype:
        mismatch = f"{actual_N.dtype} {actual_N.shape} instead of {expected_N.dtype} {expected_N.shape}"
        raise UserError(f"the file's actions are {mismatch}")
    return _relative_difference(actual_N, expected_N) <= TOLERANCE if actual_N.dtype.kind == "f" else np.array_equal(actual_N, mode_N)


def _relative_difference(actual: np.ndarray, expected: np.ndarray) -> float:
    """Return the largest difference between two arrays, relative to the largest absolute value of `expected` (at least 1).

    If an array contains a value that is not finite, return infinity.
    """
    difference = float(np.abs(actual.astype(np.float64) - expected).max() / max(1.0, float(np.abs(expected).max())))
    return difference if np.isfinite(difference) else float("inf")


def _sample_observations(entry: InputEntry, policy: ExportedPolicy, rng: np.random.Generator) -> np.ndarray:
    """Sample random values of an entry of the observation, in the form of the env.

    Values of a normalised entry are drawn around the mean of the normaliser, and other values are drawn from the complete space.
    """
    space, count = entry.space, OBSERVATIONS
    match space:
        case spaces.Discrete():
            return rng.integers(space.start, space.start + space.n, count).astype(space.dtype)
        case spaces.MultiDiscrete():
            return rng.integers(space.start, space.start + space.nvec, (count, *space.shape)).astype(space.dtype)
        case spaces.MultiBinary():
            return rng.integers(0, 2, (count, *space.shape)).astype(space.dtype)
    assert isinstance(space, spaces.Box)
    low, high, shape = space.low.astype(np.float64), space.high.astype(np.float64), (count, *space.shape)
    if policy.mean is not None and policy.inv_std is not None and entry.floats.stop > entry.floats.start and not entry.is_image:
        mean, std = policy.mean[entry.floats].numpy(), 1.0 / policy.inv_std[entry.floats].numpy()
        spread = np.where(np.arange(count) % 10, 2.0, 50.0)[:, None]  # some observations exceed the normaliser's bounds
        drawn = (mean + spread * std * rng.standard_normal((count, len(mean)))).reshape(shape)
    else:
        drawn = 3.0 * rng.standard_normal(shape)
        finite = (np.abs(low) < 1e6) & (np.abs(high) < 1e6)
        uniform = rng.uniform(np.where(finite, low, 0.0), np.where(finite, high, 1.0), shape)
        drawn = np.where(finite, uniform, drawn)
    return np.clip(drawn, low, high).astype(space.dtype)
