"""Five lines of spec learn: algorithm, env and number of frames; everything else is recommended."""

import pytest

from slm_lab.experiment.session import Session
from slm_lab.spec.loader import load_spec
from slm_lab.spec.recommended import complete


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("seed", [100, 101, 102])
@pytest.mark.parametrize(
    ("algorithm", "env", "max_frame", "least"),
    [
        ("PPO", "CartPole-v1", 100_000, 400.0),
        ("DQN", "CartPole-v1", 200_000, 400.0),
        ("SoftActorCritic", "Pendulum-v1", 30_000, -200.0),
    ],
)
def test_a_short_spec_learns(algorithm: str, env: str, max_frame: int, least: float, seed: int) -> None:
    body = {"agent": {"algorithm": {"name": algorithm}}, "env": {"name": env, "max_frame": max_frame}, "meta": {"random_seed": seed}}
    spec = complete(load_spec(body), False, "continuous" if env == "Pendulum-v1" else "discrete")
    total_reward = Session(spec).run().rows[-1]["total_reward"]  # the mean of the last 100 episodes
    assert isinstance(total_reward, float)
    assert total_reward >= least
