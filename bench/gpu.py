"""Tests and speed on a CUDA device: `make gpu`, or `python -m bench.gpu [--device cuda:0] [--out FILE] [--dry-run]`.

The checks come first: three updates of every algorithm give the same result as on the CPU, a checkpoint of the device is loaded on the CPU
and then again on the device, and two processes train one shared net. After the checks, the gradient steps per second of PPO, SAC and CrossQ
are measured with small and large nets: slm_lab on the CPU (one thread, as in a Session), slm_lab on the device, and a minimal loop of plain
torch on the device, in which the data never leave the device. The data are random, and no environment is used. The command prints a table
and writes a JSON file. With `--dry-run`, the code paths of the device are used on the CPU, with tiny sizes.

Exit status: 0 on success, 1 if a check failed, 2 if there is no CUDA device.
"""

from __future__ import annotations

import argparse
import copy
import json
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import date
from functools import partial
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import slm_lab
from slm_lab.agent.agent import Agent
from slm_lab.agent.build import build_agent
from slm_lab.agent.ops import device as devices
from slm_lab.lib.clock import Clock
from slm_lab.lib.records import ActionSpace, EnvInfo, Metrics, ObservationSpace
from slm_lab.lib.rng import generator_state, session_seeds, set_generator_state
from slm_lab.spec.models.spec import Spec
from tests.agent.helpers import Acting, ToyEnv
from tests.contract.combinations import Case

CHECKS = {
    "Reinforce": Case("Reinforce", "OnPolicyReplay", "MLPNet"),
    "ActorCritic": Case("ActorCritic", "OnPolicyBatchReplay", "MLPNet"),
    "ActorCritic, GRU": Case("ActorCritic", "OnPolicyBatchReplay", "RecurrentNet"),
    "PPO": Case("PPO", "OnPolicyBatchReplay", "MLPNet", continuous=True),
    "PPO, GRU": Case("PPO", "OnPolicyBatchReplay", "RecurrentNet"),
    "PPO, images": Case("PPO", "OnPolicyBatchReplay", "ConvNet"),
    "SIL": Case("SIL", "OnPolicyBatchReplay", "MLPNet"),
    "PPOSIL": Case("PPOSIL", "OnPolicyBatchReplay", "MLPNet"),
    "SARSA": Case("SARSA", "OnPolicyBatchReplay", "MLPNet"),
    "VanillaDQN": Case("VanillaDQN", "Replay", "MLPNet"),
    "DQN, images": Case("DQN", "Replay", "ConvNet"),
    "DoubleDQN, prioritised": Case("DoubleDQN", "PrioritizedReplay", "DuelingMLPNet"),
    "SoftActorCritic": Case("SoftActorCritic", "Replay", "MLPNet", continuous=True),
    "SoftActorCritic, discrete": Case("SoftActorCritic", "Replay", "MLPNet"),
    "CrossQ": Case("CrossQ", "Replay", "MLPNet", continuous=True),
}
TOLERANCE = 1e-4
ENVS, OBS, ACTIONS = 16, 17, 6


@contextmanager
def paths_of(device: str, dry: bool) -> Iterator[None]:
    """Use the code paths of `device` in the with-block; in a dry run, use the code paths of a CUDA device on the CPU."""
    before, devices.ON_CPU = devices.ON_CPU, dry and device != "cpu"
    try:
        yield
    finally:
        devices.ON_CPU = before


# ---- checks


def check_updates(case: Case, device: str, dry: bool) -> str:
    """Train an agent on the CPU and an agent on the device with the same steps; return a description of the difference, or "".

    The weights of both agents are made equal before each update, since rounding errors grow over several updates by an amount that depends
    on the processor.
    """
    net = {"clip_grad_val": 0.5} | ({"hid_layers": [7]} if case.net == "MLPNet" else {})  # an odd size causes gaps in the flat vector
    spec, info = case.spec(2, net), case.info()
    here = build_agent(spec, info, session_seeds(0, 0, 0), Clock())
    with paths_of(device, dry):
        there = build_agent(spec, info, session_seeds(0, 0, 0), Clock(), "cpu" if dry else device)
    env, acting, updates = ToyEnv(info, 1), Acting(here, 2), 0
    obs_N = env.reset()
    while updates < 3:
        out = acting.act(obs_N)
        step = env.step(out.action_N)
        for agent in (here, there):
            agent.clock.tick(2)
            agent.observe(obs_N, acting.first_N, acting.state_N, out, step)
        if here.ready():
            set_generator_state(there.policy.rng, generator_state(here.policy.rng))  # SARSA samples its next actions with this generator
            first = here.update()
            with paths_of(device, dry):
                second = there.update()
            updates += 1
            if difference := update_difference(first, second) or weight_difference(here, there):
                return f"update {updates}: {difference}"
            with paths_of(device, dry):
                there.load_state_dict(copy.deepcopy(here.state_dict()))
        acting.first_N = step.first_N
        if out.state_N is not None:
            acting.state_N = np.where(step.first_N[:, None], np.float32(0.0), out.state_N)
        obs_N = step.obs_N
    return check_checkpoint(here, there, case, device, dry)


def update_difference(first: Metrics, second: Metrics) -> str:
    """Return a description of the difference between the metrics of two updates, or ""."""
    assert first.grad_norm is not None
    assert second.grad_norm is not None
    if np.allclose([first.loss, first.grad_norm], [second.loss, second.grad_norm], rtol=TOLERANCE, atol=TOLERANCE):
        return ""
    return f"loss {first.loss:.6g} and {second.loss:.6g}, gradient norm {first.grad_norm:.6g} and {second.grad_norm:.6g}"


def weight_difference(here: Agent, there: Agent) -> str:
    """Return a description of the largest difference between the weights of two agents, or "" if it is at most TOLERANCE."""
    worst = max(float((value - there.weights()[key]).abs().max()) for key, value in here.weights().items())
    return f"weights differ by {worst:.2g}" if worst > TOLERANCE else ""


def check_checkpoint(here: Agent, there: Agent, case: Case, device: str, dry: bool) -> str:
    """Load the state of `there` into `here`, and then back into `there`; return a message if a loaded state differs, or ""."""
    with paths_of(device, dry):
        state = copy.deepcopy(there.state_dict())
    here.load_state_dict(state)
    back = here.state_dict()
    with paths_of(device, dry):
        there.load_state_dict(copy.deepcopy(back))
        again = there.state_dict()
    return "" if repr(on_cpu(state)) == repr(on_cpu(back)) == repr(on_cpu(again)) else "a checkpoint differs after loading"


def on_cpu(state: Any) -> Any:
    """Return a state whose tensors are on the CPU."""
    if isinstance(state, dict):
        return {key: on_cpu(value) for key, value in state.items()}
    if isinstance(state, list | tuple):
        return [on_cpu(value) for value in state]
    return state.cpu() if isinstance(state, Tensor) else state


def check_workers(gpu: bool) -> str:
    """Train one shared net with two processes; return a description of the failure, or ""."""
    spec = {
        "agent": {
            "algorithm": {"name": "ActorCritic", "lam": 0.95, "training_frequency": 16},
            "memory": {"name": "OnPolicyBatchReplay"},
            "net": {"name": "MLPNet", "hid_layers": [7], "gpu": gpu, "optim_spec": {"name": "GlobalAdam", "lr": 0.001}},
        },
        "env": {"name": "CartPole-v1", "num_envs": 2, "max_frame": 4096},
        "meta": {"distributed": "shared", "max_session": 2, "log_frequency": 512, "random_seed": 0},
    }
    with TemporaryDirectory() as folder:
        rows = slm_lab.Trial(slm_lab.load_spec({"gpu_workers": spec}, "gpu_workers"), data_dir=folder).run().train
    return "" if len(rows) and np.isfinite(rows["loss"].dropna()).all() else f"{len(rows)} rows, not all of them finite"


def run_checks(device: str, dry: bool) -> dict[str, str]:
    """Run and print all checks; return name → "ok" or a description of the failure."""
    checks: dict[str, Callable[[], str]] = {name: partial(check_updates, case, device, dry) for name, case in CHECKS.items()}
    if not dry:
        checks["two workers, one net"] = partial(check_workers, True)
    results: dict[str, str] = {}
    for name, run in checks.items():
        try:
            results[name] = run() or "ok"
        except Exception as error:  # the other checks are still run
            results[name] = f"{type(error).__name__}: {error}"
        sys.stdout.write(f"{name}: {results[name]}\n")
        sys.stdout.flush()
    return results


# ---- speed


def build(algorithm: str, width: int, batch: int, device: str) -> Agent:
    """Build an agent whose replay buffer or rollout is full, so that it can be updated repeatedly."""
    net: dict[str, Any] = {"name": "MLPNet", "hid_layers": [width, width], "hid_layers_activation": "relu", "clip_grad_val": 0.5}
    if algorithm == "PPO":
        keys = {"time_horizon": 8 * batch // ENVS, "minibatch_size": batch, "training_epoch": 4}
        memory: dict[str, Any] = {"name": "OnPolicyBatchReplay"}
        net["log_std_init"] = 0.0
    else:
        keys = {"training_iter": ENVS, "training_frequency": ENVS, "training_start_step": 2 * batch}
        memory = {"name": "Replay", "batch_size": batch, "max_size": 8 * batch}
        net["batch_norm"] = algorithm == "CrossQ"
    agent = {"algorithm": {"name": algorithm, **keys}, "memory": memory, "net": net}
    spec = Spec.model_validate({"name": "gpu", "agent": agent, "env": {"name": "Toy-v0", "num_envs": ENVS, "max_frame": 10**7}})
    info = EnvInfo(ENVS, ObservationSpace((OBS,)), ActionSpace("continuous", (), ACTIONS), max_frame=10**7)
    built, env = build_agent(spec, info, session_seeds(0, 0, 0), Clock(), device), ToyEnv(info)
    obs_N, acting = env.reset(), Acting(built, ENVS)
    for _ in range(8 * batch // ENVS):
        out = acting.act(obs_N)
        step = env.step(out.action_N)
        built.clock.tick(ENVS)
        acting.observe(obs_N, out, step)
        obs_N = step.obs_N
    return built


def ours(algorithm: str, width: int, batch: int, device: str) -> Callable[[], int]:
    """Return a function that makes one update of slm_lab and returns the number of gradient steps."""
    agent = build(algorithm, width, batch, device)

    def update() -> int:
        before = agent.clock.opt_step
        agent.update()
        return agent.clock.opt_step - before

    return update


def mlp(inputs: int, width: int, outputs: int, norm: bool = False) -> nn.Sequential:
    """Return a net with two hidden layers, with batch normalisation if `norm` is true."""
    sizes, layers = [inputs, width, width], []
    for n_in, n_out in pairwise(sizes):
        layers += [nn.Linear(n_in, n_out), *([nn.BatchNorm1d(n_out)] if norm else []), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(width, outputs))


def plain(algorithm: str, width: int, batch: int, device: str) -> Callable[[], int]:
    """Return a function that makes the same update in a minimal loop of torch, with the data on the device."""
    return plain_ppo(width, batch, device) if algorithm == "PPO" else PlainSAC(algorithm, width, batch, device).update


def plain_ppo(width: int, batch: int, device: str) -> Callable[[], int]:
    """Return a function that makes the update of PPO: four epochs of eight minibatches."""
    actor, critic, rows = mlp(OBS, width, ACTIONS).to(device), mlp(OBS, width, 1).to(device), 8 * batch
    log_std = nn.Parameter(torch.zeros(ACTIONS, device=device))
    params = [*actor.parameters(), *critic.parameters(), log_std]
    optimizer = torch.optim.Adam(params, 3e-4, fused=True)
    obs, action = torch.randn(rows, OBS, device=device), torch.randn(rows, ACTIONS, device=device)
    old_logp, advantage, target = (torch.randn(rows, device=device) for _ in range(3))

    def update() -> int:
        for _ in range(4):
            for index in torch.randperm(rows, device=device).split(batch):
                normal = torch.distributions.Normal(actor(obs[index]), log_std.exp(), validate_args=False)
                ratio = (normal.log_prob(action[index]).sum(1) - old_logp[index]).clamp(-20.0, 20.0).exp()
                gain = torch.minimum(ratio * advantage[index], ratio.clamp(0.8, 1.2) * advantage[index]).mean()
                loss = 0.5 * F.mse_loss(critic(obs[index]).squeeze(1), target[index]) - gain - 0.01 * normal.entropy().sum(1).mean()
                optimizer.zero_grad()
                loss.backward()
                nn.utils.clip_grad_norm_(params, 0.5)
                optimizer.step()
        return 32

    return update


class PlainSAC:
    """SAC or CrossQ of plain torch, with a replay buffer of random transitions. Arguments are the same as those of `plain`."""

    def __init__(self, algorithm: str, width: int, batch: int, device: str) -> None:
        self.crossq, self.rows, self.batch, self.device = algorithm == "CrossQ", 8 * batch, batch, device
        self.actor = mlp(OBS, width, 2 * ACTIONS, norm=self.crossq).to(device)
        self.critics = nn.ModuleList([mlp(OBS + ACTIONS, width, 1, norm=self.crossq) for _ in range(2)]).to(device)
        self.targets = copy.deepcopy(self.critics)
        self.log_alpha = torch.zeros(1, device=device, requires_grad=True)
        self.params: list[list[Tensor]] = [[*self.actor.parameters()], [*self.critics.parameters()], [self.log_alpha]]
        self.optimizers = [torch.optim.Adam(params, 3e-4, fused=True) for params in self.params]
        self.obs, self.next_obs = torch.randn(self.rows, OBS, device=device), torch.randn(self.rows, OBS, device=device)
        self.action, self.reward = torch.rand(self.rows, ACTIONS, device=device), torch.randn(self.rows, device=device)
        self.continues = torch.ones(self.rows, device=device)

    def act(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return sampled actions and their log-probabilities."""
        loc, log_std = self.actor(x).chunk(2, dim=1)
        noise, log_std = torch.randn_like(loc), log_std.clamp(-10.0, 2.0)
        squashed = torch.tanh(loc + noise * log_std.exp())
        return squashed, (-0.5 * noise.square() - log_std - 0.919 - torch.log(1.0 - squashed.square() + 1e-6)).sum(1)

    def values(self, x: Tensor, a: Tensor, next_x: Tensor, next_a: Tensor) -> tuple[Tensor, Tensor]:
        """Return the values of the current critics and the values for the targets, each [2, batch]."""
        if not self.crossq:
            return q_values(self.critics, x, a), q_values(self.targets, next_x, next_a)
        q, next_q = q_values(self.critics, torch.cat((x, next_x)), torch.cat((a, next_a))).split(self.batch, dim=1)
        return q, next_q

    def step(self, loss: Tensor, which: int) -> None:
        """Make a gradient step of the actor (0), the critics (1) or the temperature (2)."""
        self.optimizers[which].zero_grad()
        loss.backward()
        if which < 2:
            nn.utils.clip_grad_norm_(self.params[which], 0.5)
        self.optimizers[which].step()

    def update(self) -> int:
        """Make ENVS updates, and return their number."""
        for _ in range(ENVS):
            index = torch.randint(self.rows, (self.batch,), device=self.device)
            x, a, next_x = self.obs[index], self.action[index], self.next_obs[index]
            with torch.no_grad():
                next_a, next_logp = self.act(next_x)
            q, next_q = self.values(x, a, next_x, next_a)
            soft = next_q.detach().min(0).values - self.log_alpha.detach().exp() * next_logp
            target = self.reward[index] + 0.99 * self.continues[index] * soft
            self.step(2.0 * F.mse_loss(q, target.expand_as(q)), 1)
            new_a, logp = self.act(x)
            self.step((self.log_alpha.detach().exp() * logp - q_values(self.critics, x, new_a).min(0).values).mean(), 0)
            self.step(-(self.log_alpha * (logp.detach().mean() - ACTIONS)).sum(), 2)
            if not self.crossq:
                with torch.no_grad():
                    torch._foreach_lerp_(list(self.targets.parameters()), list(self.critics.parameters()), 0.005)
        return ENVS


def q_values(nets: nn.ModuleList, x: Tensor, a: Tensor) -> Tensor:
    """Return the value of each critic, [critics, batch]."""
    return torch.stack([net(torch.cat((x, a), dim=1)).squeeze(1) for net in nets])


def rate(update: Callable[[], int], device: str, seconds: float) -> float:
    """Return the gradient steps per second of complete updates."""

    def wait() -> None:
        if device != "cpu":
            torch.cuda.synchronize(device)

    if device != "cpu":
        update()  # loads and selects the kernels
    wait()
    begin = time.perf_counter()
    steps = update()
    while time.perf_counter() - begin < seconds:
        steps += update()
    wait()
    return steps / (time.perf_counter() - begin)


def measure(device: str, dry: bool) -> Iterator[dict[str, Any]]:
    """Yield a row for each algorithm and size."""
    sizes = [("tiny", 8, 16)] if dry else [("small", 256, 256), ("large", 1024, 1024)]
    for algorithm in ("PPO", "SoftActorCritic", "CrossQ"):
        for size, width, batch in sizes:
            row: dict[str, Any] = {"algorithm": algorithm, "net": f"{size}, {width} × {width}", "batch": batch}
            for name, make, where in (("cpu", ours, "cpu"), ("device", ours, device), ("plain torch", plain, device)):
                with paths_of(device if where != "cpu" else "cpu", dry):
                    place = "cpu" if dry else where
                    row[name] = rate(make(algorithm, width, batch, place), place, 0.0 if dry else 4.0)
            yield row


def print_speeds(device: str, dry: bool) -> list[dict[str, Any]]:
    """Run the measurements, print a table, and return its rows."""
    rows = []
    sys.stdout.write(f"\n{'gradient steps/s':<38}{'CPU':>10}{'device':>10}{'plain':>10}{'device/CPU':>12}{'device/plain':>14}\n")
    for row in measure(device, dry):
        rows.append(row)
        cpu, there, loop = (row[key] for key in ("cpu", "device", "plain torch"))
        name = f"{row['algorithm']}, {row['net']}, {row['batch']}"
        sys.stdout.write(f"{name:<38}{cpu:>10,.0f}{there:>10,.0f}{loop:>10,.0f}{there / cpu:>12.2f}{there / loop:>14.2f}\n")
        sys.stdout.flush()
    return rows


def main(arguments: list[str] | None = None) -> int:
    """Run the checks and measurements; return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m bench.gpu", description="Test and measure slm_lab on a CUDA device.")
    parser.add_argument("--device", default="cuda:0", help="CUDA device (default: cuda:0)")
    parser.add_argument("--out", type=Path, metavar="FILE", default=Path("gpu.json"), help="JSON file to write (default: gpu.json)")
    parser.add_argument("--dry-run", action="store_true", help="use the code paths of a device on the CPU, with tiny sizes")
    asked = parser.parse_args(arguments)
    device, dry = asked.device, asked.dry_run
    if not dry and not torch.cuda.is_available():
        sys.stderr.write(f"bench.gpu: torch {torch.__version__} finds no CUDA device here; --dry-run runs on the CPU\n")
        return 2
    torch.set_num_threads(1)
    chip = "CPU (dry run)" if dry else torch.cuda.get_device_name(device)
    out: dict[str, Any] = {"date": date.today().isoformat(), "chip": chip, "torch": torch.__version__, "cuda": torch.version.cuda}
    sys.stdout.write(f"{out['date']}, {chip}, torch {torch.__version__}; host {torch.backends.cpu.get_cpu_capability()}\n")
    begin = time.perf_counter()
    out["checks"], out["rows"] = run_checks(device, dry), print_speeds(device, dry)
    out["seconds"] = time.perf_counter() - begin
    asked.out.write_text(json.dumps(out, indent=1) + "\n")
    return int(any(result != "ok" for result in out["checks"].values()))


if __name__ == "__main__":
    sys.exit(main())
