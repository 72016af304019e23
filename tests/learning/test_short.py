"""Specs that give only an algorithm, an env and a number of frames learn with the recommended values of all other keys."""

import pytest

from slm_lab.experiment.session.session import Session
from slm_lab.spec.load.loader import load_spec


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    ("algorithm", "env", "max_frame", "least", "seeds"),
    [
        ("SoftActorCritic", "Pendulum-v1", 15_000, -200.0, (100,)),  # takes minutes, so each seed has its own test
        ("SoftActorCritic", "Pendulum-v1", 15_000, -200.0, (101,)),
        ("DQN", "CartPole-v1", 200_000, 400.0, (100, 101, 102)),
        ("PPO", "CartPole-v1", 100_000, 400.0, (100, 101, 102)),
    ],
)
def test_a_short_spec_learns(algorithm: str, env: str, max_frame: int, least: float, seeds: tuple[int, ...]) -> None:
    """The best row's mean return over its 20 or more new episodes, averaged over seeds, reaches the score."""
    best = []
    for seed in seeds:
        body = {"agent": {"algorithm": {"name": algorithm}}, "env": {"name": env, "max_frame": max_frame}, "meta": {"random_seed": seed}}
        rows = Session(load_spec(body)).run().rows
        best.append(max(float(row["return_new"]) for row in rows[1:]))  # type: ignore[arg-type]
    assert sum(best) / len(best) >= least, best
