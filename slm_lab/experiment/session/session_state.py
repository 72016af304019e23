"""The state of a Session as its checkpoints hold it."""

from __future__ import annotations

from typing import Any

from slm_lab.experiment.collect.workers.source import WorkerSource
from slm_lab.experiment.files import bundle as state
from slm_lab.experiment.files.sink import RunSink
from slm_lab.experiment.session.build import SessionBuilder
from slm_lab.experiment.training.learner import PolicyLearner


def session_state(built: SessionBuilder, sink: RunSink, *, blocked: bool) -> dict[str, Any]:
    """Return everything stateful, in tensors and plain Python. Args: blocked: an env did not return, so nothing can be asked of it."""
    source = built.source.state_dict() if built.source.between_rounds and not blocked else None
    population = built.source.population if isinstance(built.source, WorkerSource) else None
    policies = [{**playable(built, learner), **learner.state_dict(shares=built.process.shares)} for learner in built.learners]
    return {
        "version": state.VERSION,
        "policies": policies,
        "source": source,
        "population": None if population is None else population.state_dict(),
        "rng": state.rng_state(built.device),
        "tables": sink.position(built.index),
        "lost": _lost(built, source),
        "spec": built.dumped,
    }


def _lost(built: SessionBuilder, source: dict[str, Any] | None) -> list[str]:
    """Return the reasons why a continued run will differ from an uninterrupted one; an empty list if it will not."""
    lost = []
    if source is None:
        lost.append("open episodes are dropped (the envs did not respond, or were in the middle of a rollout)")
    elif source["open"] is None:
        lost.append(f"open episodes are dropped ({built.source.lost_reason})")
    elif built.spec.meta.sampler is not None and built.spec.meta.sampler.inference == "central":
        lost.append("central inference groups observations by the time at which they arrive")
    if built.learners[0].agent.replay is not None and not built.spec.meta.save_replay:
        lost.append("the replay buffer starts empty (meta.save_replay is false)")
    if built.process.shares:
        lost.append("sessions that share a net are not saved at the same moment")
    return lost


def playable(built: SessionBuilder, learner: PolicyLearner) -> dict[str, Any]:
    """Return what it takes to act: weights, statistics of the normalizers, and the env's spaces."""
    return {
        "version": state.VERSION,
        "weights": learner.agent.weights(),
        "normalizers": learner.normalizers.state_dict(),
        "spaces": built.info.spaces,
        "explore_var": learner.agent.final_explore_var,
        "global_frame": learner.clock.global_frame,
    }
