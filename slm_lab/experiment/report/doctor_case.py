"""The data of a run for the diagnostic rules of the command `doctor`: the settings, the tables, and the content of the last checkpoint."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from pydantic import ValidationError

from slm_lab.experiment.files import bundle
from slm_lab.experiment.report.baseline import known_baseline
from slm_lab.experiment.report.metrics import Curve, Table, curve
from slm_lab.experiment.report.run import ALL_WORKERS, Run
from slm_lab.spec.compat.env_ids import envpool_envs
from slm_lab.spec.models.algorithm import ALGORITHMS, AlgorithmSpec
from slm_lab.spec.models.env import EnvSpec
from slm_lab.spec.models.spec import AgentSpec
from slm_lab.spec.report import SpecError

FEWEST_ROWS = 4
"""Minimum number of values that a rule needs in a column of a table."""
MAX_HORIZON = 1e5
"""Number of steps that replaces the infinite horizon of a discount factor γ = 1."""
_LARGEST_CHECKPOINT = 2**27
"""Maximum size in bytes of a checkpoint that is read (128 MiB, which takes about 0.1 s). Checkpoints with a replay buffer are often
larger."""
_HEADS = ("_head.", "head.")
"""Texts that occur in the names of output layers. The units of output layers are not hidden units."""


class NotMeasured(Exception):
    """Raised if a run lacks data that a diagnostic rule needs. The message of the exception names the missing data."""


class NotApplicable(NotMeasured):
    """Raised if a diagnostic rule does not apply to the algorithm or to the kind of run."""


class ColumnInterval(NamedTuple):
    """The finite values of a table column in an interval of frames."""

    curve: Curve
    column: str

    @property
    def median(self) -> float:
        return float(np.median(self.curve.value))

    @property
    def mean(self) -> float:
        return float(np.mean(self.curve.value))

    @property
    def frames(self) -> tuple[int, int]:
        """The first and the last frame, in the interval, at which the column has a value."""
        return int(self.curve.frame[0]), int(self.curve.frame[-1])

    @property
    def frame_and_largest_value(self) -> tuple[int, float]:
        """The largest value, as (frame of this value, value)."""
        place = int(np.argmax(self.curve.value))
        return int(self.curve.frame[place]), float(self.curve.value[place])

    def quantile(self, fraction: float) -> float:
        return float(np.quantile(self.curve.value, fraction))


class DiagnosedRun:
    """A run, and the data of this run that the diagnostic rules use.

    Args: checkpoints: whether to read the last checkpoint of each session, which imports torch.
    """

    def __init__(self, run: Run, *, checkpoints: bool = True) -> None:
        self.run, self.checkpoints = run, checkpoints
        self.settings: dict[str, Any] = run.settings()
        """Path of each spec key → value. A key that is missing in the saved spec has its default value."""

    @cached_property
    def algorithm(self) -> type[AlgorithmSpec]:
        """The pydantic model of the algorithm's spec, which says for example whether the algorithm is on-policy.

        For an algorithm of a user, the value is the base class AlgorithmSpec.
        """
        return ALGORITHMS.get(str(self.setting("agent.algorithm.name")), AlgorithmSpec)

    @cached_property
    def sessions(self) -> list[Session]:
        """The independent trainings of the run that have table rows.

        An independent training is a session, a policy of a session, or all workers of a shared net.
        """
        tables = self.run.tables_per_training("train")
        return [Session(self, index, table) for index, table in tables.items() if len(table["frame"])]

    @cached_property
    def eval_tables(self) -> dict[int, Table]:
        """Index of an independent training (see Session.index) → evaluation table, for evaluation tables with at least one row."""
        return {index: table for index, table in self.run.tables_per_training("eval").items() if len(table["frame"])}

    @cached_property
    def baseline(self) -> float:
        """Mean return of a random agent in the env. Raises NotMeasured if the return of a random agent is unknown."""
        value = self.run.metrics.get("random_baseline")
        if value is None:
            with suppress(ValidationError, TypeError):
                known = known_baseline(EnvSpec.model_validate(self.run.spec.get("env")))
                value = None if known is None else known.mean_return
        if not isinstance(value, int | float) or not math.isfinite(value):
            raise NotMeasured("the return of a random agent is unknown")
        return float(value)

    def setting(self, path: str, default: Any = None) -> Any:
        """Return the value of the spec key with the path `path`, or `default` if the key is absent or null."""
        value = self.settings.get(path)
        return default if value is None else value

    def spec_number(self, path: str, default: float = math.nan) -> float:
        """Return the value of the spec key with the path `path` as a float, or `default` if the value is not a number."""
        value = self.settings.get(path)
        return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else default

    @cached_property
    def has_opponents(self) -> bool:
        """Whether the env has opponents that learn too, according to the spec, so that the returns depend on these opponents."""
        pool = envpool_envs().get(str(self.setting("env.name")))
        policies = self.run.spec.get("agent", {}).get("policies")
        return (
            self.run.spec.get("meta", {}).get("self_play") is not None or len(policies or ()) > 1 or (pool is not None and pool.players > 1)
        )

    @property
    def optim_path(self) -> str:
        """Path of the spec section of the optimizer that updates the policy."""
        own = "agent.net.actor_optim_spec"
        return own if any(path.startswith(f"{own}.") for path in self.settings) else "agent.net.optim_spec"

    @property
    def rollout_length(self) -> int:
        """Number of vector steps (or episodes) of a rollout. Raises NotApplicable if the spec of the agent cannot be read."""
        try:
            return AgentSpec.model_validate(self.run.spec.get("agent")).rollout_len
        except (ValidationError, SpecError):
            raise NotApplicable("the length of a rollout is unknown") from None

    def schedule_path_and_start(self, name: str) -> tuple[str, float]:
        """Return the path and the value of the spec key start_val of a schedule of the algorithm.

        Args: name: name of the schedule in the spec, such as "entropy_coef_spec".

        Raises NotApplicable if the spec does not have the schedule.
        """
        path = f"agent.algorithm.{name}.start_val"
        if math.isnan(value := self.spec_number(path)):
            raise NotApplicable(f"the spec has no {path}")
        return path, value

    def require_training_envs(self) -> None:
        """Raise NotApplicable for offline algorithms, which do not step an env during training."""
        require_applicable(not self.algorithm.offline, "the algorithm does not step an env during training")

    def require_raw_rewards(self) -> None:
        """Raise NotApplicable unless the agent learns from the rewards of the env, possibly multiplied by env.reward_scale."""
        changed = self.setting("env.normalize_reward") or self.setting("env.clip_reward") or self.setting("env.reward_scale") == "sign"
        require_applicable(not changed and not str(self.setting("env.name")).startswith("ALE/"), "rewards are clipped or normalised")

    @property
    def horizon(self) -> float:
        """The horizon 1 / (1 − γ), which is about the number of steps over which rewards count. The horizon is infinite for γ = 1."""
        gamma = self.spec_number("agent.algorithm.gamma", 0.99)
        return math.inf if gamma >= 1.0 else 1.0 / (1.0 - gamma)


def require_measured(condition: bool, reason: str) -> None:
    """Raise NotMeasured with the message `reason` if the condition is false."""
    if not condition:
        raise NotMeasured(reason)


def require_applicable(condition: bool, reason: str) -> None:
    """Raise NotApplicable with the message `reason` if the condition is false."""
    if not condition:
        raise NotApplicable(reason)


@contextmanager
def _checkpoint_errors_as_missing(what: str) -> Iterator[None]:
    """Raise NotMeasured if the with-block cannot read an entry of the checkpoint.

    Args: what: name of the entry, for the message.
    """
    try:
        yield
    except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError):
        raise NotMeasured(f"the last checkpoint has no {what}") from None


class Session:
    """One independent training, with its training table and its last checkpoint.

    Args: index: index of the table (session · policies + policy), or ALL_WORKERS for the joint table of all workers of a shared net.
    """

    def __init__(self, case: DiagnosedRun, index: int, table: Table) -> None:
        self.case, self.index, self.table = case, index, table

    @property
    def session_number(self) -> int | None:
        """Number of the session, or None if the table is the joint table of all workers of a shared net."""
        return None if self.index == ALL_WORKERS else self.index // self.case.run.policies

    @property
    def last_frame(self) -> int:
        return int(self.table["frame"][-1])

    def column(self, name: str, begin: float = 0.0, end: float = 1.0) -> ColumnInterval:
        """Return the finite values of a table column in an interval of frames.

        Raises NotMeasured if the interval has fewer than FEWEST_ROWS values, and NotApplicable if the table has no such column.

        Args: begin, end: limits of the interval, as fractions of the last frame of the table.
        """
        if name not in self.table:
            raise NotApplicable(f"the table has no column {name}")
        found = curve(self.table, name)
        inside = (found.frame > begin * self.last_frame) & (found.frame <= end * self.last_frame)
        window = ColumnInterval(Curve(found.frame[inside], found.value[inside]), name)
        if len(window.curve.frame) < FEWEST_ROWS:
            raise NotMeasured(f"fewer than {FEWEST_ROWS} rows have a value of {name}")
        return window

    def second_half(self, name: str) -> ColumnInterval:
        """Return the finite values of the column `name` in the second half of the frames. Raises the same errors as `column`."""
        return self.column(name, 0.5)

    @cached_property
    def final_returns(self) -> ColumnInterval:
        """The values of current_return in the last fifth of the frames.

        If current_return has no value in the last fifth of the frames, only its last value is returned. The values are taken from the
        evaluation table of the training or, without an evaluation table, from the training table. Raises NotMeasured if no episode has
        ended.
        """
        table = self.case.eval_tables.get(self.index, self.table)
        found = curve(table, "current_return")
        if not len(found.frame):
            raise NotMeasured("no episode has ended")
        late = found.frame >= min(0.8 * self.last_frame, found.frame[-1])
        return ColumnInterval(Curve(found.frame[late], found.value[late]), "current_return")

    @property
    def return_error(self) -> float:
        """Standard error of the current return, averaged over the last fifth of the frames, or 0 if the standard error is unknown."""
        table = self.case.eval_tables.get(self.index, self.table)
        found = curve(table, "current_return_se")
        late = found.value[found.frame >= self.final_returns.frames[0]]
        return float(np.mean(late)) if len(late) else 0.0

    def require_fixed_opponents(self) -> None:
        """Raise NotApplicable if the return depends on opponents that learn too, and therefore does not show the agent's progress."""
        require_applicable(not self.case.has_opponents, "returns depend on opponents that learn too")

    @property
    def rating_error(self) -> float:
        """Median standard error of the Elo rating in self-play, over the second half of the run."""
        return self.second_half("elo_se").median

    def require_progress(self) -> None:
        """Raise NotMeasured if the training has reached less than half of env.max_frame, since low returns are usual early in a run."""
        planned = self.case.spec_number("env.max_frame", 0.0)
        require_measured(self.last_frame >= 0.5 * planned, "less than half of env.max_frame has been trained")

    @cached_property
    def episode_length(self) -> float:
        """Mean length of the episodes in the second half of the frames, in steps. Raises NotMeasured if no episode has ended."""
        lengths, counts = curve(self.table, "epi_len"), curve(self.table, "epi")
        if len(late := lengths.value[lengths.frame >= 0.5 * self.last_frame]):
            return float(np.mean(late))
        if not len(counts.value) or counts.value[-1] <= 0:
            raise NotMeasured("no episode has ended")
        return float(counts.frame[-1] / counts.value[-1])

    @property
    def episodes(self) -> float:
        """Number of training episodes that have ended."""
        counts = curve(self.table, "epi").value
        return float(counts[-1]) if len(counts) else 0.0

    @property
    def steps_per_frame(self) -> float:
        """Number of gradient steps per frame in the second half of the frames.

        Raises NotMeasured if the second half has fewer than two table rows with different frames.
        """
        steps = curve(self.table, "opt_step")
        late = steps.frame >= 0.5 * self.last_frame
        frames, counts = steps.frame[late], steps.value[late]
        require_measured(len(set(frames)) > 1, "fewer than two frames with table rows in the second half of the run")
        return float((counts[-1] - counts[0]) / (frames[-1] - frames[0]))

    @cached_property
    def checkpoint(self) -> dict[str, Any]:
        """The content of the last checkpoint.

        Raises NotMeasured if there is no last checkpoint, or if the checkpoint is too large or cannot be read.
        """
        case, paths = self.case, self.case.run.paths
        require_measured(case.checkpoints, "checkpoints are not read")
        first = max(self.index, 0) // case.run.policies * case.run.policies  # all policies of a Session are in one checkpoint
        path = paths.checkpoint(first, "last", case.run.trial)
        require_measured(isinstance(path, Path) and path.is_file(), "there is no last checkpoint")
        assert isinstance(path, Path)
        require_measured(path.stat().st_size <= _LARGEST_CHECKPOINT, "the last checkpoint is too large to be read quickly")
        try:
            return bundle.load(path)
        except bundle.BundleError as error:
            raise NotMeasured(str(error)) from None

    @property
    def policy_state(self) -> Mapping[str, Any]:
        """The state of this session's policy in the last checkpoint: a dict with the spaces, the weights and the state of the agent."""
        checkpoint = self.checkpoint
        with _checkpoint_errors_as_missing("policies"):
            policies = checkpoint["policies"]
            own: Mapping[str, Any] = policies[max(self.index, 0) % len(policies)]
            return own

    @property
    def acts_continuously(self) -> bool:
        """Whether the actions are continuous, according to the action space in the last checkpoint.

        If the checkpoint cannot be read, the actions count as continuous if an entropy in the training table is negative.
        """
        with suppress(NotMeasured, KeyError, TypeError):
            return bool(self.policy_state["spaces"]["action"]["type"] == "Box")
        return bool((curve(self.table, "entropy").value < 0.0).any())

    @cached_property
    def checkpoint_steps(self) -> dict[str, np.ndarray]:
        """The env steps in the last checkpoint: a dict with obs [B, …] and, if the checkpoint has a rollout, action [B, …] and reward [B].

        If a replay buffer stores the steps, the observations and rewards are not normalised. Raises NotMeasured if the checkpoint has no
        observations, because the envs cannot be saved or rollout workers step the envs.
        """
        self.case.require_training_envs()
        checkpoint = self.checkpoint
        with _checkpoint_errors_as_missing("observations (the envs cannot be saved)"):
            if "resumes" in checkpoint["source"]:
                raise NotMeasured("the last checkpoint has no observations of rollout workers")
            opened = checkpoint["source"]["open"]
            own = opened["policies"][max(self.index, 0) % len(opened["policies"])] if "policies" in opened else opened
            slabs = next((storage["slabs"] for storage in own["rollout"].values()), None)
            if slabs is not None and len(slabs["valid"]):
                valid_TN = slabs["valid"].numpy()
                steps = {name: slabs[name].numpy()[: len(valid_TN)][valid_TN] for name in ("obs", "action", "reward")}
                if len(steps["obs"]):
                    return steps
            if own is not opened and len(opened["policies"]) > 1:
                raise NotMeasured("the last checkpoint has no observations of this policy alone")
            return {"obs": opened["obs"].numpy()}

    def unused_units(self) -> Iterator[tuple[str, float]]:
        """Yield the name of each hidden layer of the policy's net, and the share of the layer's units that receive no gradient.

        A unit receives no gradient if the moving averages of squared gradients (Adam, RMSprop) of its bias and all its incoming weights are
        at most 1e-10 times the largest average of the layer. Examples are a ReLU unit that is 0 for every observation, and a tanh unit that
        is always ±1. Raises NotMeasured if the checkpoint contains no moving averages of squared gradients.
        """
        squares = self._squared_gradient_averages()
        hidden = [name for name in squares if name.endswith(".weight") and not any(part in name for part in _HEADS)]
        for name in (name for name in hidden if squares[name].ndim > 1):
            rows = squares[name].reshape(len(squares[name]), -1).max(axis=1)
            bias = squares.get(f"{name.removesuffix('weight')}bias")
            rows = rows if bias is None or bias.shape != rows.shape else np.maximum(rows, bias)
            yield name.removesuffix(".weight"), float(np.mean(rows <= 1e-10 * rows.max(initial=0.0)))

    def _squared_gradient_averages(self) -> dict[str, np.ndarray]:
        """Return a dict: name of each parameter of the policy's net → moving averages of the squared gradients of this parameter.

        Raises NotMeasured if the checkpoint has no moving averages of squared gradients.
        """
        policy = self.policy_state
        with _checkpoint_errors_as_missing("averages of squared gradients (Adam or RMSprop of a net that is not shared)"):
            algorithm = policy["agent"]["algorithm"]
            trainer = algorithm.get("actor_trainer") or algorithm["trainer"]
            averages = [one["second"] if "second" in one else one["square"] for one in trainer["optimizers"]]
            flat, param = np.concatenate([average.numpy().ravel() for average in averages]), trainer["param"].numpy()
            named, begin = dict[str, np.ndarray](), 0
            for name, weight in policy["weights"].items():
                end = begin + weight.numel()
                if np.array_equal(param[begin:end], weight.numpy().ravel(), equal_nan=True):  # false for buffers, which have no gradient
                    named[name], begin = flat[begin:end].reshape(tuple(weight.shape)), end
            if begin != len(flat):
                raise ValueError
            return named
