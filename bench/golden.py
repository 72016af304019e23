"""Compare the results of two checkouts byte by byte: `python -m bench.golden OTHER [CASE …]`.

Equal results show that a refactoring changes no number.

Each case is a short training with a fixed seed. Both checkouts run the case on this machine. The columns of every table (except columns
that depend on the clock) and every float tensor of the last checkpoint are compared by their SHA-256. The hashes are not kept, since sums
of floats differ between processors.
"""

import argparse
import csv
import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
TIMED = ("wall_t", "fps", "rollout_busy", "inference_busy", "learner_busy", "lock_wait")
"""Columns that depend on the clock."""

NET = {
    "name": "MLPNet",
    "hid_layers": [16, 16],
    "hid_layers_activation": "tanh",
    "init_fn": "orthogonal_",
    "actor_init_std": 1.0,
    "critic_init_std": 1.0,
    "clip_grad_val": 0.5,
}
RNN = {"name": "RecurrentNet", "rnn_hidden_size": 8, "cell_type": "LSTM", "seq_len": 8}
CONV = {
    "name": "ConvNet",
    "conv_hid_layers": [[8, 8, 4], [8, 4, 2]],
    "fc_hid_layers": [32],
    "normalize": True,
    "batch_norm": False,
}
GLOBAL = {**NET, "optim_spec": {"name": "GlobalAdam", "lr": 0.01}}
POLYAK = {"update_type": "polyak", "polyak_coef": 0.005}
PPO = {"name": "PPO", "time_horizon": 32, "minibatch_size": 32, "training_epoch": 2, "normalize_advantages": "rollout"}
A2C = {"name": "ActorCritic", "lam": 0.95, "training_frequency": 16}
REPLAY = {"name": "Replay", "batch_size": 16, "max_size": 1000}
PER = {**REPLAY, "name": "PrioritizedReplay", "beta": 0.4, "initial_error": "greatest"}
SIL = {"batch_size": 16, "max_size": 1000, "beta": 0.4, "initial_error": "greatest"}
DQN = {
    "training_frequency": 4,
    "training_start_step": 64,
    "action_policy": "epsilon_greedy",
    "action_pdtype": "Argmax",
    "explore_var_spec": {"name": "linear_decay", "start_val": 1.0, "end_val": 0.1, "start_step": 0, "end_step": 1000},
}
SAC = {"name": "SoftActorCritic", "training_frequency": 4, "training_start_step": 64, "training_iter": 2, "log_alpha_min": -10.0}
SAC_DISCRETE = {**SAC, "critic_reduction": "min", "target_entropy": 0.68}
BATCH, EPISODES = {"name": "OnPolicyBatchReplay"}, {"name": "OnPolicyReplay"}
SERIAL = {"num_workers": 2, "num_envs_per_worker": 4, "serial_mode": True, "async_rl": False}
CARTPOLE, PENDULUM = {"name": "CartPole-v1", "num_envs": 4}, {"name": "Pendulum-v1", "num_envs": 4}
SAMPLED = {"name": "CartPole-v1"}
PBT = {"period": 512, "start": 512, "mutation_rate": 0.9, "replace_fraction": 0.5}

CASES: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "reinforce": (
        {"name": "Reinforce", "training_frequency": 4, "center_return": True, "normalize_advantages": False},
        EPISODES,
        NET,
        CARTPOLE,
        {},
    ),
    "a2c_nstep": ({"name": "ActorCritic", "num_step_returns": 16, "normalize_advantages": False}, BATCH, NET, CARTPOLE, {}),
    "a2c_one_env": (A2C, BATCH, NET, {"name": "CartPole-v1"}, {}),
    "a2c_gae_shared": (A2C, BATCH, {**NET, "shared": True}, CARTPOLE, {"rigorous_eval": 2, "eval_frequency": 500}),
    "a2c_cross_entropy": ({**A2C, "training_frequency": 4}, {"name": "OnPolicyCrossEntropy", "cross_entropy": 0.5}, NET, CARTPOLE, {}),
    "a2c_vtrace": ({**A2C, "with_vtrace": True, "normalize_v_targets": True}, BATCH, NET, CARTPOLE, {}),
    "ppo": (PPO, BATCH, NET, CARTPOLE, {}),
    "ppo_recurrent": (PPO, BATCH, RNN, CARTPOLE, {}),
    "ppo_percentile": ({**PPO, "normalize_advantages": "percentile", "symlog": True, "clip_vloss": True}, BATCH, NET, CARTPOLE, {}),
    "ppo_continuous": (
        {**PPO, "normalize_v_targets": True},
        BATCH,
        {**NET, "log_std_init": 0.0, "use_same_optim": False, "critic_optim_spec": {"name": "Adam", "lr": 0.01}},
        {**PENDULUM, "normalize_obs": True, "normalize_reward": True},
        {},
    ),
    "ppo_images": (PPO, BATCH, CONV, {"name": "ALE/Pong-v5", "num_envs": 2, "max_frame": 256}, {}),
    "sil": ({**A2C, "name": "SIL", "training_iter": 2}, {**BATCH, **SIL}, NET, CARTPOLE, {}),
    "pposil": ({**PPO, "name": "PPOSIL", "training_iter": 2}, {**BATCH, **SIL}, NET, CARTPOLE, {}),
    "sarsa": (
        {"name": "SARSA", "training_frequency": 16, **{k: v for k, v in DQN.items() if not k.startswith("tr")}},
        BATCH,
        NET,
        CARTPOLE,
        {},
    ),
    "vanilla_dqn": ({**DQN, "name": "VanillaDQN"}, REPLAY, NET, CARTPOLE, {}),
    "dqn": ({**DQN, "name": "DQN"}, REPLAY, {**NET, "update_type": "replace", "update_frequency": 100}, CARTPOLE, {}),
    "ddqn_per": ({**DQN, "name": "DoubleDQN"}, PER, {**NET, **POLYAK, "name": "DuelingMLPNet"}, CARTPOLE, {}),
    "sac": (SAC, REPLAY, {**NET, **POLYAK}, PENDULUM, {}),
    "sac_discrete": ({**SAC_DISCRETE, "entropy_penalty_coef": 0.5}, PER, {**NET, **POLYAK}, CARTPOLE, {}),
    "crossq": ({**SAC, "name": "CrossQ", "policy_delay": 2}, REPLAY, {**NET, "batch_norm": True}, PENDULUM, {}),
    "dqn_images": ({**DQN, "name": "DQN"}, REPLAY, {**CONV, **POLYAK}, {"name": "ALE/Pong-v5", "num_envs": 2, "max_frame": 256}, {}),
    "sampler_ppo": ({**PPO, "minibatch_size": 128}, BATCH, NET, SAMPLED, {"sampler": {**SERIAL, "num_batches_per_epoch": 2}}),
    "sampler_recurrent": ({**PPO, "minibatch_size": 256}, BATCH, RNN, SAMPLED, {"sampler": SERIAL}),
    "sampler_dqn": (
        {**DQN, "name": "DQN", "training_frequency": 8},
        REPLAY,
        {**NET, **POLYAK},
        SAMPLED,
        {"sampler": {**SERIAL, "async_rl": True}},
    ),
    "sampler_normalized": (
        {**PPO, "minibatch_size": 256},
        BATCH,
        NET,
        {"name": "Pendulum-v1", "normalize_obs": True, "normalize_reward": True},
        {"sampler": SERIAL},
    ),
    "sampler_pbt": (
        {**PPO, "minibatch_size": 128},
        BATCH,
        NET,
        SAMPLED,
        {"sampler": {**SERIAL, "num_policies": 3, "num_batches_per_epoch": 2, "pbt": PBT}},
    ),
    "sampler_processes": (
        {**PPO, "minibatch_size": 128},
        BATCH,
        NET,
        SAMPLED,
        {"sampler": {**SERIAL, "serial_mode": False, "num_batches_per_epoch": 2}},
    ),
    "synced": (A2C, BATCH, GLOBAL, CARTPOLE, {"distributed": "synced", "max_session": 1}),
    "shared_sac": (SAC, REPLAY, {**GLOBAL, **POLYAK}, PENDULUM, {"distributed": "shared", "max_session": 1}),
    "shared_normalized": (
        {**PPO, "normalize_v_targets": True},
        BATCH,
        {**GLOBAL, "optim_spec": {"name": "GlobalRMSprop", "lr": 0.002}},
        {**PENDULUM, "normalize_obs": True},
        {"distributed": "shared", "max_session": 1},
    ),
    "two_sessions": (PPO, BATCH, NET, CARTPOLE, {"max_session": 2}),
}
"""Name of a case → (algorithm, memory, net, env, meta)."""


def body(name: str) -> dict[str, Any]:
    """Return the spec of a case."""
    algorithm, memory, net, env, meta = CASES[name]
    return {
        "agent": {"name": name, "algorithm": algorithm, "memory": memory, "net": net},
        "env": {"max_frame": 2000, **env},
        "meta": {"log_frequency": 250, "random_seed": 3, "save_interval": 0.0, **meta},
    }


def digest(data: bytes) -> str:
    """Return the first 16 characters of the SHA-256 of `data`."""
    return hashlib.sha256(data).hexdigest()[:16]


def results(name: str) -> dict[str, str]:
    """Run a case, and return its results: "table:column" → hash, and "checkpoint:tensor:hash" → hash."""
    import torch

    import slm_lab

    hashes: dict[str, str] = {}
    with TemporaryDirectory() as folder:
        spec_file = Path(folder) / "spec.json"
        spec_file.write_text(json.dumps({name: body(name)}))
        slm_lab.Trial(slm_lab.load_spec(str(spec_file), name), data_dir=folder).run()
        for table in sorted(Path(folder).glob("*/info/*_session_df_*.csv")) + sorted(Path(folder).glob("*/info/*_pbt.csv")):
            with table.open(newline="") as file:
                rows = list(csv.DictReader(file))
            for column in rows[0]:
                if column not in TIMED:
                    hashes[f"{table.name}:{column}"] = digest("\n".join(row[column] for row in rows).encode())
        for path in sorted(Path(folder).glob("*/model/*_ckpt-last.pt")):
            for tensor in _tensors(torch.load(path, weights_only=True)):
                key = digest(tensor.contiguous().numpy().tobytes())
                hashes[f"{path.name}:tensor:{key}"] = key
    return hashes


def _tensors(item: Any) -> list[Any]:
    """Return the float tensors of a checkpoint that have several elements."""
    if isinstance(item, dict):
        return [tensor for value in item.values() for tensor in _tensors(value)]
    if isinstance(item, list | tuple):
        return [tensor for value in item for tensor in _tensors(value)]
    return [item] if hasattr(item, "is_floating_point") and item.is_floating_point() and item.numel() > 1 else []


def run(checkout: Path, names: list[str]) -> dict[str, dict[str, str]]:
    """Return the results of the cases `names`, computed by the code of a checkout: name → results."""
    env = {**os.environ, "PYTHONPATH": str(checkout), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(Path(__file__).resolve()), "--record", "-", *names]
    done = subprocess.run(command, env=env, cwd=checkout, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{checkout}: {done.stderr[-3000:]}")
    outputs: dict[str, dict[str, str]] = json.loads(done.stdout.splitlines()[-1])
    return outputs


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.golden", description="Compare the results of two checkouts byte by byte.")
    parser.add_argument("other", metavar="OTHER", help="the other checkout, or a file that --save wrote")
    parser.add_argument("cases", nargs="*", metavar="CASE", help=f"{', '.join(CASES)} (default: all)")
    parser.add_argument("--save", type=Path, metavar="FILE", help="also write the results of the other checkout to this file")
    parser.add_argument("--record", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    names = arguments.cases or list(CASES)
    if arguments.record:
        sys.stdout.write("\n" + json.dumps({name: results(name) for name in names}) + "\n")
        return 0
    other = Path(arguments.other)
    expected = json.loads(other.read_text()) if other.is_file() else run(other.resolve(), names)
    if arguments.save:
        arguments.save.write_text(json.dumps(expected))
    found, differing = run(ROOT, names), 0
    for name in names:
        missing = sorted(key for key, value in expected[name].items() if found[name].get(key) != value)
        differing += bool(missing)
        sys.stdout.write(f"{name}: {f'{len(missing)} of {len(expected[name])} differ: {missing[:6]}' if missing else 'equal'}\n")
    return 1 if differing else 0


if __name__ == "__main__":
    sys.exit(main())
