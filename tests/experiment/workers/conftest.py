"""Small specs with rollout workers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from slm_lab.experiment.session import Session
from slm_lab.spec.report import Report
from slm_lab.spec.resolve import resolve
from slm_lab.spec.rules import check_rules
from slm_lab.spec.spec import Spec

MakeSpec = Callable[..., Spec]


def sampled(**sections: Any) -> Spec:
    """PPO of CartPole on 2 workers × 2 envs, 16 steps a rollout, in turns; `sections` hold what differs."""
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
    return resolve(spec, report)


def _changed(component: dict[str, Any], change: dict[str, Any]) -> dict[str, Any]:
    """With other keys, or another one altogether."""
    return change if "name" in change else component | change


@pytest.fixture
def open_session() -> Iterator[Callable[[Spec], Session]]:
    """open_session(spec): a Session that is closed after the test, whatever comes."""
    opened: list[Session] = []

    def make(spec: Spec) -> Session:
        opened.append(Session(spec))
        return opened[-1]

    yield make
    for session in opened:
        session.close()
