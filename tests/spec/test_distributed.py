"""Tests of meta.distributed."""

from __future__ import annotations

from typing import Any

import pytest

from slm_lab.experiment.plan import Plan
from tests.spec.conftest import Specs

SYNCED = {
    "meta.distributed": "synced",
    "meta.max_session": 2,
    "agent.algorithm.time_horizon": 1,
    "agent.net.optim_spec": {"name": "GlobalAdam"},
}
SEPARATE = {
    "agent.net.shared": False,
    "agent.net.use_same_optim": False,
    "agent.net.optim_spec": {"name": "Adam"},
    "agent.net.actor_optim_spec": {"name": "GlobalAdam"},
    "agent.net.critic_optim_spec": {"name": "GlobalRMSprop"},
}


@pytest.mark.parametrize("value", ["sync", True])
def test_other_values_are_refused_with_the_nearest(specs: Specs, value: Any) -> None:
    assert specs.problems({"meta.distributed": value}) == ["meta.distributed"]


@pytest.mark.parametrize(
    ("changes", "notice"),
    [
        (SYNCED, None),
        (SYNCED | {"meta.hogwild_lock": True, "meta.max_restart": 3}, None),
        (SYNCED | {"meta.max_session": 1}, "meta.distributed"),
        (SYNCED | {"agent.net.optim_spec": {"name": "Adam"}}, "agent.net.optim_spec"),
        (SYNCED | {"agent.net.optim_spec": {"name": "RMSprop"}}, "agent.net.optim_spec"),
        ({"agent.net.optim_spec": {"name": "GlobalRMSprop"}}, "agent.net.optim_spec"),
        (SYNCED | SEPARATE, None),  # the default of optim_spec, Adam, is not used
        (SYNCED | SEPARATE | {"agent.net.critic_optim_spec": {"name": "Adam"}}, "agent.net.critic_optim_spec"),
    ],
)
def test_notices(specs: Specs, changes: dict[str, Any], notice: str | None) -> None:
    specs.load(changes)
    assert specs.notices() == ([] if notice is None else [notice])


def test_lookahead_is_for_one_session(specs: Specs) -> None:
    assert specs.problems(SYNCED | {"agent.net.optim_spec": {"name": "Lookahead"}}) == ["agent.net.optim_spec.name"]


@pytest.mark.parametrize(
    ("max_frame", "max_session", "num_envs", "quota"),
    [(1000, 4, 1, 250), (1000, 3, 1, 334), (1000, 3, 4, 336), (1001, 2, 8, 504), (7, 4, 8, 8), (10**10, 16, 8, 625_000_000)],
)
def test_each_session_has_its_share_of_the_frames(specs: Specs, max_frame: int, max_session: int, num_envs: int, quota: int) -> None:
    changes = {"env.max_frame": max_frame, "env.num_envs": num_envs, "meta.max_session": max_session, "agent.algorithm.time_horizon": 1}
    assert specs.load(SYNCED | changes).session_frames == quota
    assert specs.load(changes).session_frames == max_frame


def test_all_sessions_of_a_global_net_run_at_once(specs: Specs) -> None:
    many = {"meta.max_session": 16}
    assert Plan(jobs=2).concurrent_sessions(specs.load(many).meta) == 2
    assert Plan(jobs=2).concurrent_sessions(specs.load(SYNCED | many).meta) == 16
