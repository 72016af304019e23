"""meta: how many Sessions, how often to log, what to keep."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, Strict

from slm_lab.spec.base import Count, Flag, NonNegative, Positive, PositiveReal, Seed, SpecModel
from slm_lab.spec.sampler import SamplerSpec


class SearchResources(SpecModel):
    """What one trial of a search may use."""

    cpu: PositiveReal = 1
    """CPU cores."""
    gpu: NonNegative = 0
    """GPUs, fractions allowed."""


class SearchScheduler(SpecModel):
    """Early stopping of a search (ASHA)."""

    grace_period: Positive = 1
    """Frames a trial gets before it may be stopped."""
    reduction_factor: Annotated[float, Strict(), Field(gt=1)] = 3
    """Of so many trials, one goes on."""


class MetaSpec(SpecModel):
    """Keys of the experiment around agent and env."""

    distributed: Literal[False, "shared", "synced"] = False
    """Whether the Sessions train one global net (Hogwild!), each env.max_frame / max_session frames: "shared", each reads it as it stands
    (async SAC); "synced", each as it was after its own last update, so that its policy stays the same within a rollout (A3C). false: each
    trains its own."""
    hogwild_lock: Flag = False
    """Lets one Session at a time update the global net."""
    max_restart: Count = 1
    """How often a new process takes the place of one that was killed: a Session's, attached to the same global net; a rollout worker's."""
    sampler: SamplerSpec | None = None
    """Rollout workers that collect for a learner, in turn with it or while it trains; absent: each Session steps its own envs."""
    max_session: Positive = 1
    """Sessions of a Trial, each with its own seed."""
    max_trial: Positive = 1
    """Trials of a search."""
    log_frequency: Positive = 10_000
    """Frames between two rows of the Session's table."""
    eval_frequency: Positive = 10_000
    """Frames between two evaluations, where rigorous_eval is on."""
    rigorous_eval: Count = 0
    """Number of separate evaluation envs, one episode each per evaluation; 0: metrics come from training episodes."""
    random_seed: Seed | None = None
    """Seed of everything random; absent: drawn, printed and saved."""
    save_interval: NonNegative = 10.0
    """Seconds between checkpoints, at least."""
    save_replay: Flag = False
    """Each checkpoint holds the replay memory too, so that a resumed run goes on with it: for 1 M Atari frames some 7 GB. Without it a
    resumed run gathers training_start_step transitions anew before it trains."""
    search_resources: SearchResources = SearchResources()
    """What one trial of a search may use."""
    search_scheduler: SearchScheduler | None = None
    """Early stopping of a search; absent: none."""
    run: dict[str, Any] | None = None
    """Written by a run: where the spec came from, versions, host, backend. Ignored on load."""
