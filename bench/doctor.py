"""Accuracy of the doctor: `python -m bench.doctor {faults | healthy} [--data DIR] [--only NAME ...] [--base SPEC] [--seed N]`.

`faults` trains short runs with one fault each, and prints the rank of the fault among the findings of `slm-lab doctor`. `healthy` trains
shipped specs, and counts false alarms: findings that are more severe than remarks. Runs that already exist in the folder are not trained
again.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import gymnasium as gym
import numpy as np

from slm_lab.experiment.report.doctor import Diagnosis, diagnose_run
from slm_lab.experiment.report.run import load_run
from slm_lab.experiment.training.observers.base import Observer, ObserverContext

ROOT = Path(__file__).resolve().parent.parent
DATA = ROOT / "data" / "doctor"


class LargeRewards(gym.RewardWrapper):
    """Multiplies rewards by 1,000."""

    def reward(self, reward: Any) -> float:
        return 1000.0 * float(reward)


class LargeObservations(gym.ObservationWrapper):
    """Multiplies observations by 1,000."""

    def __init__(self, env: gym.Env) -> None:
        super().__init__(env)
        self.observation_space = gym.spaces.Box(-np.inf, np.inf, env.observation_space.shape, np.float32)

    def observation(self, observation: Any) -> Any:
        return np.float32(1000.0) * np.asarray(observation, np.float32)


class TerminatedAtLimit(gym.Wrapper):
    """Ends episodes after 100 steps, and reports this time limit as termination instead of truncation."""

    def reset(self, **options: Any) -> Any:
        self.steps = 0
        return self.env.reset(**options)

    def step(self, action: Any) -> Any:
        obs, reward, terminated, _, info = self.env.step(action)
        self.steps += 1
        return obs, reward, terminated or self.steps >= 100, False, info


class Slow(gym.Wrapper):
    """Makes each step 3 ms longer."""

    def step(self, action: Any) -> Any:
        time.sleep(0.003)
        return self.env.step(action)


class DeadUnits(Observer):
    """Sets the biases of the hidden layers to -100 before training, so that the output of every ReLU is 0."""

    def __init__(self, context: ObserverContext) -> None:
        super().__init__(context)
        weights = context.agent.weights()
        for name, weight in weights.items():
            if name.endswith("bias") and "body" in name:
                weight.fill_(-100.0)
        context.agent.load_weights(weights)


class Training(NamedTuple):
    """A run to train: its spec, the changes to the spec, and the rules that detect its fault."""

    file: str
    name: str
    sets: Sequence[str] = ()
    expected: Sequence[str] = ()


DEMO, A2C, DQN, APPO = (
    ("demo", "ppo_cartpole"),
    ("a2c_cartpole", "a2c_gae_cartpole"),
    ("dqn_cartpole", "dqn_cartpole"),
    ("appo_cartpole",) * 2,
)
ONE, SHORT = "meta.max_session=1", "env.max_frame=40000"
LR, ALGORITHM = "agent.net.optim_spec.lr", "agent.algorithm"


def _wrapped(name: str) -> str:
    return f'env.wrappers=["bench.doctor:{name}"]'


FAULTS = {
    "learning rate × 100": Training(*DEMO, (SHORT, f"{LR}=0.2"), ("large_updates",)),
    "learning rate × 0.001": Training(*DEMO, (SHORT, f"{LR}=2e-6"), ("small_updates",)),
    "entropy bonus of 10": Training(*DEMO, (SHORT, f"{ALGORITHM}.entropy_coef_spec.start_val=10"), ("entropy_high",)),
    "no entropy bonus, learning rate × 100": Training(*A2C, (SHORT, f"{LR}=0.2"), ("entropy_lost",)),
    "clip range of 0.0001": Training(*DEMO, (SHORT, f"{ALGORITHM}.clip_eps_spec.start_val=0.0001"), ("clipping",)),
    "clip range of 10, 40 epochs": Training(
        *DEMO, (SHORT, f"{ALGORITHM}.clip_eps_spec.start_val=10", f"{ALGORITHM}.training_epoch=40"), ("clipping", "large_updates")
    ),
    "discount factor of 0": Training(*DEMO, (SHORT, f"{ALGORITHM}.gamma=0"), ("discount",)),
    "rewards × 1,000": Training(*DEMO, (SHORT, _wrapped("LargeRewards")), ("reward_scale",)),
    "observations × 1,000": Training(*DEMO, (SHORT, _wrapped("LargeObservations"), "env.normalize_obs=false"), ("observation_scale",)),
    "time limit reported as termination": Training(*DEMO, (SHORT, _wrapped("TerminatedAtLimit")), ("truncation",)),
    "time limit of 5 steps": Training(*DEMO, (SHORT, "env.max_t=5"), ("time_limit",)),
    "one seed, 600 frames": Training(*DEMO, ("env.max_frame=600", "meta.log_frequency=100"), ("episodes", "seeds")),
    "one update per 2,000 frames": Training(*DQN, (SHORT, f"{ALGORITHM}.training_frequency=2000"), ("replay_ratio",)),
    "25 updates per frame": Training(*DQN, ("env.max_frame=3000", f"{ALGORITHM}.training_iter=100"), ("replay_ratio",)),
    "slow env": Training(*APPO, ("env.max_frame=24000", _wrapped("Slow"), 'env.backend="sync"'), ("bottleneck",)),
    "old data": Training(*APPO, (SHORT, "meta.sampler.num_batches_to_accumulate=50", f"{ALGORITHM}.training_epoch=20"), ("policy_lag",)),
    "dead ReLU units": Training(
        *DEMO, (SHORT, "agent.net.hid_layers_activation=relu", 'meta.observers=["bench.doctor:DeadUnits"]'), ("dead_units",)
    ),
    "actions beyond the bounds": Training("ppo_pendulum", "ppo_pendulum", (SHORT, "agent.net.log_std_init=1.99"), ("saturated_actions",)),
    "Q-learning without target net, with learning rate × 50 and γ = 1": Training(
        *DQN,
        ("env.max_frame=20000", f"{ALGORITHM}.name=VanillaDQN", f"{LR}=0.05", f"{ALGORITHM}.gamma=1", "agent.net.clip_grad_val=1e9"),
        ("values", "gradients"),
    ),
    "atoms of C51 up to 10": Training(
        "rainbow_cartpole", "rainbow_cartpole", ("env.max_frame=20000", f"{ALGORITHM}.v_max=10"), ("value_range",)
    ),
    "learning rate decays in an eighth of the run": Training(
        *DEMO, (SHORT, 'agent.net.lr_scheduler_spec={"name": "LinearToMin", "frame": 5000, "min_factor": 0.01}'), ("learning_rate",)
    ),
}
"""Name of a fault → a training run with this fault."""
_FULL, _SHORTENED = None, 100_000
HEALTHY = {
    name if seed == 11 else f"{name}, seed {seed}": Training(
        file, name, (f"meta.random_seed={seed}", *([] if frames is None else [f"env.max_frame={frames}"]), *sets)
    )
    for file, name, seed, frames, *sets in (
        ("ppo_cartpole", "ppo_cartpole", 11, _FULL),
        ("a2c_cartpole", "a2c_gae_cartpole", 11, _FULL),
        ("a2c_cartpole", "a2c_nstep_cartpole", 12, _FULL),
        ("reinforce_cartpole", "reinforce_cartpole", 11, _FULL),
        ("dqn_cartpole", "dqn_cartpole", 11, _FULL),
        ("sarsa_cartpole", "sarsa_cartpole", 11, _FULL),
        ("ppo_acrobot", "ppo_acrobot", 11, _FULL),
        ("a2c_acrobot", "a2c_gae_acrobot", 11, _FULL),
        ("a2c_acrobot", "a2c_nstep_acrobot", 12, _FULL),
        ("ppo_pendulum", "ppo_pendulum", 11, _SHORTENED),
        ("a2c_pendulum", "a2c_gae_pendulum", 11, _SHORTENED),
        ("reinforce_pendulum", "reinforce_pendulum", 11, _SHORTENED),
        ("demo", "ppo_cartpole", 21, _FULL),
        ("ppo_lunar", "ppo_lunar", 11, _SHORTENED),
        ("ppo_lunar_continuous", "ppo_lunar_continuous", 11, _SHORTENED),
        ("a2c_lunar", "a2c_gae_lunar", 11, _SHORTENED),
        ("a2c_lunar_continuous", "a2c_gae_lunar_continuous", 11, _SHORTENED),
        ("appo_cartpole", "appo_cartpole", 11, _SHORTENED),
        ("appo_cartpole", "sync_ppo_cartpole", 11, _SHORTENED),
        ("sac_cartpole", "sac_cartpole", 11, 20_000),
        ("sac_pendulum", "sac_pendulum", 11, 30_000),
        ("dqn_cartpole", "ddqn_per_cartpole", 11, 60_000),
        ("reinforce_acrobot", "reinforce_acrobot", 11, _FULL),
        ("a3c_gae_cartpole", "a3c_gae_cartpole", 11, _FULL, "meta.max_session=2"),
        ("sil_cartpole", "sil_cartpole", 11, 30_000),
        ("a2c_pendulum", "a2c_nstep_pendulum", 11, _SHORTENED),
        ("crossq_cartpole", "crossq_cartpole", 11, 8_000),
        ("dqn_acrobot", "dqn_acrobot", 11, 30_000),
        ("appo_lunar", "appo_lunar", 11, 60_000),
        ("sac_lunar_continuous", "sac_lunar_continuous", 11, 20_000),
        ("reinforce_lunar", "reinforce_lunar", 11, _SHORTENED),
    )
}
"""Name → a training run of a shipped spec. Some runs have fewer frames than the spec."""


def trained(folder: Path, training: Training) -> Path:
    """Return the folder of a run, which is trained first if it does not exist."""
    if not any(folder.glob("*/*_trial_metrics_scalar.json")):
        sets = [part for setting in (ONE, *training.sets) for part in ("--set", setting)]
        command = [sys.executable, "run_lab.py", f"{training.file}.json", training.name, "train", *sets, "--data-dir", str(folder)]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
        if done.returncode:
            raise SystemExit(f"{' '.join(command)}\n{done.stdout}{done.stderr}")
    return next(path.parent for path in folder.glob("*/*_trial_metrics_scalar.json"))


def rank(diagnosis: Diagnosis, expected: Sequence[str]) -> int | None:
    """Return the rank, from 1, of the first finding of an expected rule; None if there is no such finding."""
    rules = [finding.rule for finding in diagnosis.findings]
    return next((place for place, rule in enumerate(rules, 1) if rule in expected), None)


def _with_base_and_seed(training: Training, base: str | None, seed: int) -> Training:
    """Return a run with another seed and, if its spec is from demo.json, with the spec `base`."""
    if base is not None and training.file == DEMO[0]:
        training = training._replace(file=base, name=base)
    return training._replace(sets=(*training.sets, f"meta.random_seed={seed}"))


def main() -> None:
    """Train the missing runs, and print a line for each run and the totals."""
    parser = argparse.ArgumentParser(prog="python -m bench.doctor", description="Measure the accuracy of the doctor.")
    parser.add_argument("what", choices=("faults", "healthy"), help="runs with one fault each, or shipped specs")
    parser.add_argument("--data", type=Path, default=DATA, help="folder of the runs")
    parser.add_argument("--only", nargs="+", help="only the runs whose names contain one of these texts")
    parser.add_argument("--base", help="with faults: a shipped spec, such as ppo_acrobot, in place of the PPO of demo.json")
    parser.add_argument("--seed", type=int, default=0, help="with faults: meta.random_seed")
    arguments = parser.parse_args()
    cases = FAULTS if arguments.what == "faults" else HEALTHY
    if arguments.what == "faults":
        cases = {name: _with_base_and_seed(training, arguments.base, arguments.seed) for name, training in cases.items()}
    named = alarms = 0
    if arguments.only:
        cases = {name: training for name, training in cases.items() if any(part in name for part in arguments.only)}
    for name, training in cases.items():
        stem = "".join(letter if letter.isalnum() else "_" for letter in name)
        diagnosis = diagnose_run(load_run(trained(arguments.data / arguments.what / stem, training)))
        found = ", ".join(f"{finding.rule} ({finding.severity})" for finding in diagnosis.findings) or "nothing"
        place = rank(diagnosis, training.expected)
        named += place in (1, 2)
        alarms += any(finding.severity != "remark" for finding in diagnosis.findings)
        sys.stdout.write(f"{name}: {f'rank {place}; ' if training.expected else ''}{found}\n")
        sys.stdout.flush()
    sys.stdout.write(f"{len(cases)} runs: {named} named first or second, {alarms} with an alarm\n")


if __name__ == "__main__":
    main()
