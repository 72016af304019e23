"""Small specs with rollout workers, and functions that read values from their Sessions."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from slm_lab.experiment.collect.workers.source import BusySpan, WorkerSource
from slm_lab.experiment.session.session import Session
from slm_lab.spec.models.spec import Spec
from slm_lab.spec.report import Report
from slm_lab.spec.rules.check import check_rules
from slm_lab.spec.rules.resolve import resolve_spec

RECURRENT = {"name": "RecurrentNet", "cell_type": "GRU", "rnn_hidden_size": 8, "seq_len": 8}


def worker_spec(**sections: Any) -> Spec:
    """Return PPO on CartPole, 2 workers × 2 envs, 16 steps a rollout, synchronous collection; `sections` override values."""
    algorithm = {"name": "PPO", "time_horizon": 16, "minibatch_size": 64, "training_epoch": 2}
    net = {"name": "MLPNet", "hid_layers": [16], "hid_layers_activation": "tanh"}
    sampler = {"async_rl": False, "num_workers": 2, "num_envs_per_worker": 2}
    agent = {
        "name": "APPO",
        "algorithm": _changed(algorithm, sections.get("algorithm", {})),
        "memory": sections.get("memory", {"name": "OnPolicyBatchReplay"}),
        "net": _changed(net, sections.get("net", {})),
    }
    body = {
        "name": "small",
        "agent": agent,
        "env": {"name": "CartPole-v1", "max_frame": 1024} | sections.get("env", {}),
        "meta": {"log_frequency": 256, "random_seed": 5, "sampler": sampler | sections.get("sampler", {})} | sections.get("meta", {}),
    }
    spec, report = Spec.model_validate(body), Report()
    check_rules(spec, report)
    assert not report.problems, report.problems
    return resolve_spec(spec, report)


def _changed(component: dict[str, Any], change: dict[str, Any]) -> dict[str, Any]:
    """Return the component with other keys, or another component."""
    return change if "name" in change else component | change


def source_of(session: Session) -> WorkerSource:
    assert isinstance(session.source, WorkerSource)
    return session.source


def pool_of(session: Session) -> Any:
    """Return the session's pool of workers, in this process or in child processes."""
    return source_of(session).pool


def weights_of(session: Session, policy: int = 0) -> np.ndarray:
    """Return a copy of a policy's parameters."""
    flat = session.learners[policy].agent.policy.flat
    assert flat is not None
    return flat.param.detach().clone().numpy()


def spans_of(session: Session, kind: str) -> list[BusySpan]:
    return [span for span in source_of(session).utilization.spans if span.kind == kind]


@pytest.fixture
def open_session() -> Iterator[Callable[[Spec], Session]]:
    """Return a function such as open_session(spec) that makes a Session; the Session is closed after the test in any case."""
    opened: list[Session] = []

    def make(spec: Spec) -> Session:
        opened.append(Session(spec))
        return opened[-1]

    yield make
    while opened:
        opened.pop().close()
