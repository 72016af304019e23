"""Current return of training episodes against an evaluation of the same weights: `python -m bench.current_return [--seeds 5]`.

Each spec is trained for all of its frames with several seeds. At the end, the current return (the mean over the episodes that ended
recently) is compared with the mean return of 100 episodes that the last weights play with sampled actions. The command prints each
difference as a multiple of its standard error, which combines the standard errors of both means, and how many differences are at most two.
"""

import argparse
import math
import sys
from statistics import fmean, stdev

from slm_lab import Session, load_spec
from slm_lab.env.make import make_env
from slm_lab.experiment.plan import Stop
from slm_lab.experiment.training.evaluate import play_episodes
from slm_lab.experiment.training.learner import PolicyLearner

SPECS = [
    ("demo.json", "ppo_cartpole"),
    ("benchmark/ppo/ppo_acrobot.json", "ppo_acrobot"),
    ("benchmark/a2c/a2c_cartpole.json", "a2c_gae_cartpole"),
    ("benchmark/reinforce/reinforce_cartpole.json", "reinforce_cartpole"),
    ("benchmark/dqn/dqn_cartpole.json", "dqn_cartpole"),
    ("benchmark/sac/sac_pendulum.json", "sac_pendulum"),
]
"""File and name of each spec."""
EPISODES = 100
FIRST_SEED = 100


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m bench.current_return", description="Compare current returns with evaluations of the same weights."
    )
    parser.add_argument("--seeds", type=int, default=5, help="number of seeds of each spec (5)")
    arguments = parser.parse_args()
    seeds = range(FIRST_SEED, FIRST_SEED + arguments.seeds)
    differences = [compare(file, name, seed) for file, name in SPECS for seed in seeds]
    within = sum(abs(difference) <= 2.0 for difference in differences)
    sys.stdout.write(f"{within} of {len(differences)} differences are at most two standard errors\n")


def compare(file: str, name: str, seed: int) -> float:
    """Train and evaluate a spec; print and return the difference as a multiple of its standard error."""
    sets = [f"meta.random_seed={seed}", "meta.rigorous_eval=0", "meta.eval_episodes=0", "meta.max_session=1"]
    session = Session(load_spec(file, name, sets)).build()
    row = session.run().rows[-1]
    current, error = float(row["current_return"] or 0.0), float(row["current_return_se"] or 0.0)
    returns = evaluate(session, session.learners[0], seed)
    mean, joint = fmean(returns), math.hypot(error, stdev(returns) / math.sqrt(len(returns)))
    difference = (current - mean) / joint if joint else 0.0 if current == mean else math.copysign(math.inf, current - mean)
    shown = f"current {current:8.1f} ± {error:5.1f}  evaluation {mean:8.1f}  difference {difference:6.2f} standard errors"
    sys.stdout.write(f"{name:20} seed {seed}  {shown}\n")
    sys.stdout.flush()
    return difference


def evaluate(session: Session, learner: PolicyLearner, seed: int) -> list[float]:
    """Return the returns of EPISODES episodes, played with sampled actions by the last weights."""
    spec = session.spec
    env = make_env(spec.env, seed + 10_000, num_envs=20, training=False, gamma=spec.agent.algorithm.gamma, input=spec.agent.input)
    env.normalizers.copy_obs_statistics(learner.normalizers.state_dict())
    try:
        return play_episodes(env, learner.agent.action_function(), Stop(), episodes=EPISODES)
    finally:
        env.close()


if __name__ == "__main__":
    main()
