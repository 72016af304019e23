"""Adapters to experiment trackers. An adapter creates one run in the tracker for each table of metrics. The tracker's runs are grouped by
trial, search or study, and have the spec as config.

The names of projects and servers come from the environment variables of each library (WANDB_PROJECT, MLFLOW_TRACKING_URI, TRACKIO_PROJECT,
…). If no environment variable names a project, the name of the project is "slm_lab".
"""

from __future__ import annotations

import json
import os
from abc import ABC, abstractmethod
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

from slm_lab.experiment.events import Status
from slm_lab.experiment.files.paths import RunPaths, study_in
from slm_lab.experiment.files.trackers import acquire_tracker_lock
from slm_lab.spec.report import flatten_leaves

PROJECT = "slm_lab"
Scalar = str | int | float | bool


class _Owner(NamedTuple):
    """The trial, search or study to which a tracked run belongs."""

    group: str
    """Name of the folder of the trial, search or study."""
    prefix: str
    """Prefix that distinguishes the run's trial from the other trials of its group."""
    folder: Path
    """The folder of the trial, search or study."""


@dataclass(frozen=True)
class TrackedRun:
    """One table of metrics in a run folder, which is tracked as one run of the tracker."""

    paths: RunPaths
    trial: int = 0
    table: int = 0

    @cached_property
    def spec(self) -> dict[str, Any]:
        """The saved spec of the run without meta.run."""
        ((_, body),) = json.loads(self.paths.trial_spec(self.trial).read_text(encoding="utf-8")).items()
        meta = {key: value for key, value in body["meta"].items() if key != "run"}
        return {**body, "meta": meta, "name": self.paths.spec_name}

    @cached_property
    def settings(self) -> dict[str, Scalar]:
        """Path of a spec key → value. Lists are converted to JSON text, and keys whose value is null are omitted."""
        values = dict(flatten_leaves(self.spec))
        return {key: value if isinstance(value, Scalar) else json.dumps(value) for key, value in values.items() if value is not None}

    @cached_property
    def owner(self) -> _Owner:
        root = self.paths.root
        runs = root.parent.parent
        if runs.name == "runs" and study_in(runs.parent) is not None:
            return _Owner(runs.parent.name, f"{root.parent.name}_", runs.parent)
        if root.name == "confirm" and self.paths.has_several_trials:
            return _Owner(root.parent.name, f"confirm_t{self.trial}_", root.parent)
        return _Owner(root.name, f"t{self.trial}_" if self.paths.search_state.exists() else "", root)

    @property
    def group(self) -> str:
        return self.owner.group

    @property
    def trial_name(self) -> str:
        """Name of the trial, or of the study's run, to which the tracked run belongs. The sessions of a trial differ only in their
        seeds."""
        return f"{self.group}_{self.owner.prefix}".rstrip("_")

    @property
    def name(self) -> str:
        """Name of the tracked run. The name contains the group, because trackers also list runs without their groups."""
        session, policy = divmod(self.table, self.paths.policies)
        return f"{self.trial_name}_s{session}" + (f"_p{policy}" if self.paths.policies > 1 else "")


class Adapter(ABC):
    """Base class of adapters to experiment trackers. If a method raises an exception, the tracker is switched off."""

    @abstractmethod
    def start(self, run: TrackedRun, earlier_id: str | None) -> str:
        """Begin a new run in the tracker, or continue the tracker's run with the id `earlier_id`. Return the id of the run."""

    @abstractmethod
    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Send the values of one table row to the tracker.

        Args: values: dict that maps tags to numbers (see `tracker_values`).
        """

    @abstractmethod
    def end(self, status: Status, metrics: Mapping[str, float]) -> None:
        """Send the final metrics to the tracker and end the run."""


class Wandb(Adapter):
    """Adapter to Weights & Biases. With WANDB_MODE=offline, the tracker writes to the run's log folder, which `wandb sync` uploads."""

    def start(self, run: TrackedRun, earlier_id: str | None) -> str:
        import wandb

        self.run = wandb.init(
            project=os.environ.get("WANDB_PROJECT") or PROJECT,
            group=run.group,
            name=run.name,
            id=earlier_id,
            resume="allow" if earlier_id else None,
            dir=str(run.paths.log_dir),
            config=run.spec,
            settings=wandb.Settings(console="off", silent=True),
        )
        return str(self.run.id)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self.run.log(dict(values), step=step)

    def end(self, status: Status, metrics: Mapping[str, float]) -> None:
        self.run.summary.update({**{f"metric/{name}": value for name, value in metrics.items()}, "status": status})
        self.run.finish(exit_code=int(status == "failed"))


class MLflow(Adapter):
    """Adapter to MLflow. If MLFLOW_TRACKING_URI is not set, the tracker writes to mlflow.db, an SQLite file in the data folder."""

    _STATUS = {"done": "FINISHED", "stopped": "KILLED", "failed": "FAILED"}
    _PARAM_LETTERS, _PARAMS = 500, 100
    """Limits that all MLflow servers accept: maximum length of a parameter's value, and maximum number of parameters per request."""

    def start(self, run: TrackedRun, earlier_id: str | None) -> str:
        from mlflow.tracking import MlflowClient

        uri = os.environ.get("MLFLOW_TRACKING_URI")
        home = run.owner.folder.parent
        with nullcontext() if uri else (home / ".mlflow.lock").open("ab") as lock:
            acquire_tracker_lock(None if lock is None else lock.fileno())  # the first of several processes creates the tables
            self.client = MlflowClient(uri or f"sqlite:///{home / 'mlflow.db'}")
            experiment = self._experiment(os.environ.get("MLFLOW_EXPERIMENT_NAME") or PROJECT)
        if earlier_id is not None:
            self.id = earlier_id
            self.client.update_run(earlier_id, "RUNNING")
            return earlier_id
        tags = {"group": run.group, "spec": run.paths.spec_name, "mlflow.note.content": str(run.paths.root)}
        self.id = self.client.create_run(experiment, tags=tags, run_name=run.name).info.run_id
        self._log_params(run.settings)
        return self.id

    def _experiment(self, name: str) -> str:
        experiment = self.client.get_experiment_by_name(name)
        return str(experiment.experiment_id if experiment is not None else self.client.create_experiment(name))

    def _log_params(self, settings: Mapping[str, Scalar]) -> None:
        from mlflow.entities import Param

        params = [Param(_mlflow_name(key), str(value)[: self._PARAM_LETTERS]) for key, value in settings.items()]
        for at in range(0, len(params), self._PARAMS):
            self.client.log_batch(self.id, params=params[at : at + self._PARAMS])

    def log(self, step: int, values: Mapping[str, float]) -> None:
        import time

        from mlflow.entities import Metric

        moment = int(1000 * time.time())
        self.client.log_batch(self.id, metrics=[Metric(_mlflow_name(tag), value, moment, step) for tag, value in values.items()])

    def end(self, status: Status, metrics: Mapping[str, float]) -> None:
        self.log(int(metrics.get("frame", 0)), {f"metric/{name}": value for name, value in metrics.items()})
        self.client.set_terminated(self.id, self._STATUS[status])


def _mlflow_name(tag: str) -> str:
    """Return a tag in which characters that MLflow does not accept in names, such as brackets, are replaced by "_"."""
    return "".join(letter if letter.isalnum() or letter in "_-. /:" else "_" for letter in tag)


class Trackio(Adapter):
    """Adapter to Trackio. The tracker writes to a local folder (TRACKIO_DIR), which `trackio show` displays. If TRACKIO_SPACE_ID is set,
    the tracker writes to the Hugging Face Space with this id."""

    def start(self, run: TrackedRun, earlier_id: str | None) -> str:
        import trackio

        name = earlier_id or run.name
        self.run = trackio.init(
            project=os.environ.get("TRACKIO_PROJECT") or PROJECT,
            name=name,
            group=run.group,
            config=dict(run.settings),
            space_id=os.environ.get("TRACKIO_SPACE_ID"),
            resume="allow" if earlier_id else "never",
            embed=False,
            auto_log_cpu=False,
            auto_log_gpu=False,
        )
        return name

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self.run.log(dict(values), step=step)
        self.step = step

    def end(self, status: Status, metrics: Mapping[str, float]) -> None:
        self.run.log({f"metric/{name}": value for name, value in metrics.items()}, step=int(metrics.get("frame", 0)))
        self.run.finish()


class TensorBoard(Adapter):
    """Adapter that writes TensorBoard event files to the run's log folder, with the values of the spec as hparams and the spec as text."""

    def start(self, run: TrackedRun, earlier_id: str | None) -> str:
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        folder = run.paths.tensorboard(run.table, run.trial)
        self.writer = EventFileWriter(str(folder))
        if earlier_id is None:
            self._add(0, _text("spec", f"```json\n{json.dumps(run.spec, indent=2, ensure_ascii=False)}\n```"))
            self._add(0, _session_start(run.settings, run.trial_name))
        return folder.name

    def _add(self, step: int, summary: Any) -> None:
        import time

        from tensorboard.compat.proto.event_pb2 import Event

        self.writer.add_event(Event(wall_time=time.time(), step=step, summary=summary))

    def log(self, step: int, values: Mapping[str, float]) -> None:
        from tensorboard.compat.proto.summary_pb2 import Summary

        self._add(step, Summary(value=[Summary.Value(tag=tag, simple_value=value) for tag, value in values.items()]))
        self.writer.flush()

    def end(self, status: Status, metrics: Mapping[str, float]) -> None:
        self.log(int(metrics.get("frame", 0)), {f"metric/{name}": value for name, value in metrics.items()})
        self._add(0, _session_end(status))
        self.writer.close()


def _text(tag: str, text: str) -> Any:
    """Return a TensorBoard summary with text for the TEXT page of TensorBoard."""
    from tensorboard.compat.proto.summary_pb2 import Summary
    from tensorboard.compat.proto.tensor_pb2 import TensorProto
    from tensorboard.compat.proto.tensor_shape_pb2 import TensorShapeProto
    from tensorboard.plugins.text.metadata import create_summary_metadata

    shape = TensorShapeProto(dim=[TensorShapeProto.Dim(size=1)])
    tensor = TensorProto(dtype="DT_STRING", string_val=[text.encode()], tensor_shape=shape)
    metadata = create_summary_metadata(display_name=tag, description="")
    return Summary(value=[Summary.Value(tag=f"{tag}/text_summary", metadata=metadata, tensor=tensor)])


def _session_start(settings: Mapping[str, Scalar], group: str) -> Any:
    """Return the TensorBoard summary that begins a run on the HPARAMS page of TensorBoard. The HPARAMS page shows all runs of a group in
    one row.

    No summary of the whole experiment is written, so that TensorBoard collects hparams and metrics from all runs and shows the hparams that
    differ first.
    """
    from tensorboard.plugins.hparams import metadata, plugin_data_pb2

    start = plugin_data_pb2.SessionStartInfo(group_name=group)
    for key, value in settings.items():
        kind = "bool" if isinstance(value, bool) else "string" if isinstance(value, str) else "number"
        setattr(start.hparams[key], f"{kind}_value", value)
    return _hparams_summary(metadata.SESSION_START_INFO_TAG, session_start_info=start)


def _session_end(status: Status) -> Any:
    from tensorboard.plugins.hparams import api_pb2, metadata, plugin_data_pb2

    value = api_pb2.Status.Value("STATUS_FAILURE" if status == "failed" else "STATUS_SUCCESS")
    return _hparams_summary(metadata.SESSION_END_INFO_TAG, session_end_info=plugin_data_pb2.SessionEndInfo(status=value))


def _hparams_summary(tag: str, **content: Any) -> Any:
    from tensorboard.compat.proto.summary_pb2 import Summary, SummaryMetadata
    from tensorboard.plugins.hparams import metadata, plugin_data_pb2

    data = plugin_data_pb2.HParamsPluginData(version=metadata.PLUGIN_DATA_VERSION, **content)
    plugin = SummaryMetadata.PluginData(plugin_name=metadata.PLUGIN_NAME, content=data.SerializeToString())
    return Summary(value=[Summary.Value(tag=tag, metadata=SummaryMetadata(plugin_data=plugin))])


ADAPTERS: dict[str, type[Adapter]] = {"wandb": Wandb, "mlflow": MLflow, "trackio": Trackio, "tensorboard": TensorBoard}
"""Adapter classes by the name of the tracker in meta.track."""
