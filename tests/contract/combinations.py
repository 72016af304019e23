"""Small specs of every algorithm with each memory and net that it supports."""

from __future__ import annotations

from typing import Any, NamedTuple

from slm_lab.lib.records import ActionSpace, EnvInfo, ObservationSpace
from slm_lab.spec.models.algorithm import ALGORITHMS, Algorithm
from slm_lab.spec.models.memory import Memory
from slm_lab.spec.models.net import Net
from slm_lab.spec.models.spec import Spec, union_members
from slm_lab.spec.report import Report
from slm_lab.spec.rules.check import check_rules
from slm_lab.spec.rules.resolve import resolve_spec

DISCRETE, CONTINUOUS = ActionSpace("discrete", (3,), 1), ActionSpace("continuous", (), 2)
HYBRID = ActionSpace("hybrid", (3, 2), 5, bits=1)


def names(union: Any) -> list[str]:
    """Return the names of the members of a union of spec models."""
    return [model.model_fields["name"].annotation.__args__[0] for model in union_members(union)]


OFFLINE = ("BC", "IQL")
"""Algorithms that learn from recorded episodes only, so tests cannot train them by env steps: see tests/agent/test_offline.py."""
GOALS = "HindsightReplay"
"""A memory for envs with goals: see tests/agent/test_hindsight.py."""
ALGORITHM_NAMES, MEMORIES, NETS = names(Algorithm), names(Memory), names(Net)

ARC = {"modules": {"body": {"Sequential": [{"LazyLinear": {"out_features": 8}}, {"Tanh": None}]}}}
NEEDS: dict[str, dict[str, Any]] = {
    "HydraMLPNet": {"hid_layers": [[[8]], [8], []]},
    "ConvNet": {"conv_hid_layers": [[4, 3, 2]]},
    "DuelingConvNet": {"conv_hid_layers": [[4, 3, 2]]},
    "TorchArcNet": {"arc": ARC},
}
"""Keys that a net requires."""


def fitting(algorithm: str, memory: str, net: str) -> bool:
    """Return whether the rules must allow a combination, written out by hand."""
    replays = memory in ("Replay", "PrioritizedReplay") or (memory == GOALS and net != "RecurrentNet")
    if algorithm == "Random":
        return True
    if algorithm in OFFLINE:
        return memory == "Replay" and net != "RecurrentNet" and "Dueling" not in net
    if algorithm in ("VanillaDQN", "DQN", "DoubleDQN", "QRDQN", "C51", "TD3", "DDPG") or soft(algorithm):
        fits = replays and (net != "RecurrentNet" or algorithm != "CrossQ")
    elif algorithm in ("PPO", "PPOSIL", "PQN"):
        fits = memory == "OnPolicyBatchReplay"
    else:
        fits = not replays
    return fits and (acts_on_values(algorithm) or "Dueling" not in net)


def soft(algorithm: str) -> bool:
    return algorithm in ("SoftActorCritic", "CrossQ", "TQC", "DistributionalSAC")


def acts_on_values(algorithm: str) -> bool:
    return "DQN" in algorithm or algorithm in ("SARSA", "PQN", "C51")


ON_POLICY = {"training_frequency": 10}
IMITATION = {"training_iter": 2}
ROLLOUT = {"time_horizon": 10, "minibatch_size": 10, "training_epoch": 2}
REPLAYING = {"training_frequency": 8, "training_start_step": 12, "training_iter": 2}
SMALL: dict[str, dict[str, Any]] = {
    "Random": {},
    "Reinforce": ON_POLICY,
    "ActorCritic": ON_POLICY | {"lam": 0.9},
    "PPO": ROLLOUT,
    "SIL": ON_POLICY | IMITATION,
    "PPOSIL": ROLLOUT | IMITATION,
    "SARSA": ON_POLICY,
    "VanillaDQN": REPLAYING,
    "DQN": REPLAYING,
    "DoubleDQN": REPLAYING,
    "QRDQN": REPLAYING | {"num_quantiles": 5},
    "C51": REPLAYING | {"num_atoms": 5, "v_min": -2, "v_max": 2},
    "PQN": ROLLOUT,
    "SoftActorCritic": REPLAYING,
    "CrossQ": REPLAYING,
    "TQC": REPLAYING | {"num_critics": 3, "num_quantiles": 4, "dropped_quantiles": 1},
    "DistributionalSAC": REPLAYING | {"num_atoms": 5},
    "TD3": REPLAYING,
    "DDPG": REPLAYING,
    "BC": {},
    "IQL": {},
}
"""Keys that let an algorithm train after 10 vector steps of 2 envs; a new algorithm must be added here."""
KEYS: dict[str, dict[str, Any]] = {
    "MLPNet": {"hid_layers": [8]},
    "DuelingMLPNet": {"hid_layers": [8]},
    "SimbaNet": {"width": 8},
    "SimbaV2Net": {"width": 8},
    "RecurrentNet": {"rnn_hidden_size": 4, "seq_len": 5},
    "ConvNet": {"fc_hid_layers": [8]},
    "DuelingConvNet": {"fc_hid_layers": [8]},
}
MEMORY_KEYS = {"Replay": {"batch_size": 8, "max_size": 50}, "PrioritizedReplay": {"batch_size": 8, "max_size": 50}}


class Case(NamedTuple):
    """A combination of algorithm, memory, net and kind of actions."""

    algorithm: str
    memory: str
    net: str
    continuous: bool = False
    hybrid: bool = False

    def __str__(self) -> str:
        return "-".join([self.algorithm, self.memory, self.net] + ["continuous"] * self.continuous + ["hybrid"] * self.hybrid)

    def info(self, num_envs: int = 2) -> EnvInfo:
        images = "Conv" in self.net
        observation = ObservationSpace((1, 7, 7), "uint8") if images else ObservationSpace((4,))
        action = HYBRID if self.hybrid else CONTINUOUS if self.continuous else DISCRETE
        return EnvInfo(num_envs, observation, action, max_frame=10_000)

    def spec(self, num_envs: int = 2, net: dict[str, Any] | None = None) -> Spec:
        algorithm = {"name": self.algorithm} | SMALL[self.algorithm]
        if self.memory in ("OnPolicyReplay", "OnPolicyCrossEntropy") and self.algorithm in ("Reinforce", "ActorCritic", "SIL", "SARSA"):
            algorithm["training_frequency"] = 4  # in episodes: those of 10 steps of two envs of Beat
        memory: dict[str, Any] = {"name": self.memory} | MEMORY_KEYS.get(self.memory, {})
        if "SIL" in self.algorithm:
            memory |= {"batch_size": 8, "max_size": 50}
        if self.memory == "OnPolicyCrossEntropy":
            memory["cross_entropy"] = 0.5
        own = {"name": self.net, "optim_spec": {"name": "Adam", "lr": 0.01}} | NEEDS.get(self.net, {}) | KEYS.get(self.net, {})
        if self.net not in ("TorchArcNet", "SimbaNet", "SimbaV2Net"):
            own["hid_layers_activation"] = "tanh"  # tanh has no dead units
        agent = {"algorithm": algorithm, "memory": memory, "net": own | (net or {})}
        env = {"name": "CartPole-v1", "num_envs": num_envs, "max_frame": 10_000}
        spec, report = Spec.model_validate({"name": "small", "agent": agent, "env": env}), Report()
        check_rules(spec, report)
        assert not report.problems, report.problems
        return resolve_spec(spec, report)


def cases() -> list[Case]:
    """Return each algorithm with each memory and MLPNet, with each net and its first memory, and with continuous and hybrid actions."""
    found = []
    for algorithm in ALGORITHM_NAMES:
        if algorithm in ("Random", *OFFLINE):
            continue
        fits = [(memory, net) for memory in MEMORIES if memory != GOALS for net in NETS if fitting(algorithm, memory, net)]
        only = ALGORITHMS[algorithm].action_kinds == ("continuous",)
        found += [Case(algorithm, memory, net, only) for memory, net in fits if net == "MLPNet" or memory == fits[0][0]]
        if not acts_on_values(algorithm) and not only:
            found.append(Case(algorithm, fits[0][0], "MLPNet", continuous=True))
        if algorithm in ("Reinforce", "ActorCritic", "PPO", "SIL", "PPOSIL"):
            found += [Case(algorithm, fits[0][0], net, hybrid=True) for net in ("MLPNet", "RecurrentNet")]
    return found
