"""Rules for nets in combination with the algorithm and the memory of their agent."""

from __future__ import annotations

from typing import Any

from slm_lab.spec.models.algorithm import ALGORITHMS, AlgorithmSpec
from slm_lab.spec.models.net import (
    NETS,
    ConvNetSpec,
    HydraMLPNetSpec,
    LayersSpec,
    NetSpec,
    RecurrentNetSpec,
    SimbaV2NetSpec,
    TorchArcNetSpec,
)
from slm_lab.spec.models.spec import AgentSpec
from slm_lab.spec.report import KeyPath, Report, format_json
from slm_lab.spec.rules.keys import ALGORITHM, reject_non_defaults
from slm_lab.spec.rules.torch_check import OPTIMIZER_KEYS


def check_net_in_agent(agent: AgentSpec, net: NetSpec, location: KeyPath, report: Report) -> None:
    """Check that a net fits the algorithm and the memory of an agent.

    Args: location: path of the net in the spec.
    """
    algorithm = agent.algorithm
    if isinstance(net, TorchArcNetSpec):
        _check_arcs(agent, net, location, report)
    fitting = [name for name, model in NETS.items() if model.recurrent <= algorithm.recurrent and model.dueling <= algorithm.values]
    allowed = f"allowed: {', '.join(fitting)}"
    if net.recurrent:
        _check_recurrent(agent, net, location, report, allowed)
    if net.images and net.input == "vector":
        report.add_problem(
            (*location, "input"), f"'vector' contradicts {net.name}, whose convolutions need images; remove it, or use MLPNet"
        )
    if net is agent.critic_net and net.input is not None and net.input != agent.input:
        report.add_problem(
            (*location, "input"), f"must be that of agent.net ({agent.input!r}), not {net.input!r}: both nets read the same observation"
        )
    if net.dueling and algorithm.learns and not algorithm.values:
        report.add_problem(
            (*location, "name"), f"'{net.name}' is a dueling network, and {algorithm.name} does not learn action values; {allowed}"
        )
    if isinstance(net, LayersSpec) and (net.noisy or net.noisy_sigma != LayersSpec.model_fields["noisy_sigma"].default):
        _check_noisy(algorithm, net, location, report)
    if getattr(net, "dropout", 0.0) and algorithm.learns and not algorithm.own_critics:
        names = [name for name, model in ALGORITHMS.items() if model.own_critics]
        report.add_problem((*location, "dropout"), f"is for the critics of {', '.join(names)} only; {algorithm.name} needs 0")
    if net.shared and algorithm.own_critics:
        report.note_ineffective_key(
            (*location, "shared"), f"has no effect: the actor and the critics of {algorithm.name} have separate bodies; ignored"
        )
    if isinstance(net, SimbaV2NetSpec):
        _check_simba_v2(agent, net, location, report)
    if isinstance(net, HydraMLPNetSpec):
        _check_hydra(net, location, report)
    if isinstance(net, ConvNetSpec):
        _check_convolutions(net, location, report)


def _check_recurrent(agent: AgentSpec, net: NetSpec, location: KeyPath, report: Report, allowed: str) -> None:
    """Check the keys of a recurrent net.

    Args: allowed: text of a message that lists the nets that fit the algorithm.
    """
    algorithm = agent.algorithm
    if not algorithm.recurrent:
        why = f"is recurrent, and {algorithm.name} learns from single transitions, not from sequences"
        report.add_problem((*location, "name"), f"'{net.name}' {why}; {allowed}")
    if net is agent.critic_net and algorithm.recurrent and agent.net is not None and not agent.net.recurrent:
        why = f"needs a recurrent agent.net, whose sequences the critics learn from; agent.net is {agent.net.name}"
        report.add_problem((*location, "name"), f"'{net.name}' {why}")
    if net.dtype != "float32":
        report.add_problem((*location, "dtype"), f"'{net.dtype}' is not supported by {net.name}; allowed: float32")
    if isinstance(net, RecurrentNetSpec) and agent.memory.on_policy and not agent.memory.episodes:
        rollout = agent.rollout_len
        if "seq_len" in net.model_fields_set and net.seq_len > rollout:
            report.add_problem((*location, "seq_len"), f"must be at most {rollout}, the length of a rollout, not {net.seq_len}")


def _check_simba_v2(agent: AgentSpec, net: SimbaV2NetSpec, location: KeyPath, report: Report) -> None:
    """Add a problem for each key that would change the norm of a SimbaV2Net's weights, which must be 1."""
    if getattr(agent.algorithm, "spectral_norm", False) and net is (agent.critic_net or agent.net):
        report.add_problem((*ALGORITHM, "spectral_norm"), "must be false, not true, with SimbaV2Net, whose weights have norm 1")
    why = "the weights of each output have norm 1"
    reject_non_defaults(net, ("actor_init_std", "critic_init_std"), location, why, report)


def _check_convolutions(net: ConvNetSpec, location: KeyPath, report: Report) -> None:
    """Check that no convolution has a channel count, kernel size or stride of 0."""
    for index, layer in enumerate(net.conv_hid_layers or []):
        for part, what in ((0, "channels"), (1, "kernel size"), (2, "stride")):
            sizes = layer[part] if part < len(layer) else 1
            if 0 in (sizes if isinstance(sizes, list) else [sizes]) or sizes == []:
                report.add_problem((*location, "conv_hid_layers", index, part), f"{what} must be > 0, not {format_json(sizes)}")


def _check_noisy(algorithm: AlgorithmSpec, net: LayersSpec, location: KeyPath, report: Report) -> None:
    """Add a problem if the net has noisy layers but the algorithm does not support noisy layers, or if the spec gives noisy_sigma for a net
    without noisy layers."""
    if not net.noisy:
        report.add_problem((*location, "noisy_sigma"), "has no effect: noisy is false")
    elif algorithm.learns and not algorithm.noisy:
        fitting = ", ".join(name for name, model in ALGORITHMS.items() if model.noisy)
        report.add_problem((*location, "noisy"), f"true is not supported by {algorithm.name}; allowed with {fitting}")


def check_global_nets(agent: AgentSpec, report: Report) -> None:
    """Add a problem for each Lookahead optimizer, because several Sessions (parallel training processes) cannot train a shared net with
    Lookahead."""
    for location, net in agent.nets.items():
        for key in OPTIMIZER_KEYS:
            if (optim := getattr(net, key)) is not None and optim.name == "Lookahead":
                why = "'Lookahead' would reset the global net to the slow weights of one Session; use GlobalAdam"
                report.add_problem(("agent", location, key, "name"), why)


def _check_hydra(net: HydraMLPNetSpec, location: KeyPath, report: Report) -> None:
    """Check that `hid_layers` of a HydraMLPNet has the form [units of each head, units of the body, units of each tail], such as [[[32],
    [32]], [64], []]."""

    def is_unit_list(value: Any) -> bool:
        return isinstance(value, list) and all(isinstance(n, int) and not isinstance(n, bool) and n > 0 for n in value)

    heads, body, tails = net.hid_layers
    for index, (part, what) in enumerate(((heads, "head"), (tails, "tail"))):
        if not isinstance(part, list) or not all(is_unit_list(item) for item in part) or (what == "head" and not part):
            report.add_problem(
                (*location, "hid_layers", 2 * index),
                f"must be a list with the units of each {what}, such as [[32], [32]], not {format_json(part)}",
            )
    if not is_unit_list(body):
        report.add_problem((*location, "hid_layers", 1), f"must be a list of units of the body, such as [64], not {format_json(body)}")
    if isinstance(tails, list) and len(tails) > 2:
        report.add_problem((*location, "hid_layers", 2), f"must have at most two tails, the actor's and the critic's, not {len(tails)}")


def _check_arcs(agent: AgentSpec, net: TorchArcNetSpec, location: KeyPath, report: Report) -> None:
    """Check that the spec of a TorchArcNet gives either the architecture `arc`, or the separate architectures `actor_arc` and
    `critic_arc`."""
    if net.arc is not None or (location[-1] == "critic_net" and net.critic_arc is not None):
        return
    if location[-1] == "critic_net":
        report.add_problem((*location, "arc"), "missing; the critics' TorchArcNet needs arc or critic_arc", "missing")
    elif net.actor_arc is None:
        report.add_problem((*location, "arc"), "missing; a TorchArcNet needs arc, or actor_arc and critic_arc", "missing")
    elif net.critic_arc is None and agent.algorithm.has_critic and agent.critic_net is None:
        report.add_problem((*location, "critic_arc"), "missing; a critic needs critic_arc beside actor_arc, or arc for both", "missing")
    if net.shared and net.actor_arc is not None and net.critic_arc is not None:
        report.add_problem((*location, "shared"), "a shared body needs arc, not actor_arc and critic_arc")
