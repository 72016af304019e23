"""Check the names and arguments of torch's optimizers, schedulers, losses, activations and layers in a spec, without importing torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from slm_lab.spec.models.net import INTEGER_ARGUMENTS, NAMES, LayersSpec, NetSpec, OptimSpec, TorchArcNetSpec, TorchClassSpec
from slm_lab.spec.report import KeyPath, Report, format_json, nearest_hint

LOSSES, ACTIVATIONS = NAMES["_losses"], NAMES["_activations"]
OPTIMIZERS = NAMES["_optimizers"] | {f"Global{name}": NAMES["_optimizers"][name] for name in ("Adam", "RMSprop")}
"""Maps names of optimizers to the names of their arguments. Lookahead, which wraps another optimizer, is not included."""
LOOKAHEAD = ("optimizer", "k", "alpha")
"""Arguments of Lookahead (arXiv:1907.08610): name of the wrapped optimizer, number of steps, step size. All other arguments are passed to
the wrapped optimizer."""
SCHEDULERS = NAMES["_schedulers"] | {"LinearToZero": "frame!", "LinearToMin": "frame! min_factor"}
_RENORM = "eps momentum r_max d_max warmup_steps"
LAYERS = NAMES["_layers"] | {
    "BatchRenorm1d": f"num_features! {_RENORM}",
    "LazyBatchRenorm1d": _RENORM,
    "WeightNormLinear": "in_features! out_features! bias",
    "LazyWeightNormLinear": "out_features! bias",
    "NormalTanh": "",
}
INIT_FUNCTIONS = {name: args for name, args in NAMES["_init_functions"].items() if "!" not in args}
"""Functions of torch.nn.init that have no required arguments besides the tensor."""
GAINS = ("Identity", "Sigmoid", "Tanh", "ReLU", "LeakyReLU", "SELU")
"""Activations for which torch.nn.init.calculate_gain returns a gain (torch.nn.init calls Identity "linear")."""

_CALLABLE = "needs a function, which a spec cannot contain"
_NOT_ALLOWED = {
    "LBFGS": "re-evaluates the loss several times per step, which algorithms here do not support",
    "SparseAdam": "needs sparse gradients",
    "ReduceLROnPlateau": "needs a metric at each step; learning rates here are functions of the frame",
    "SequentialLR": "needs other schedulers, which a spec cannot contain",
    "ChainedScheduler": "needs other schedulers, which a spec cannot contain",
    "LambdaLR": _CALLABLE,
    "MultiplicativeLR": _CALLABLE,
    "constant_": "makes all units of a layer equal",
    "sparse_": "needs an argument",
}
OPTIMIZER_KEYS = ("optim_spec", "actor_optim_spec", "critic_optim_spec")
"""Keys of a net's spec that name an optimizer."""


def activation_class(name: str) -> str | None:
    """Return the name of the torch.nn class of an activation, or None if the activation is unknown.

    The names of an activation with and without underscores and capital letters, such as leaky_relu, leakyrelu and LeakyReLU, are
    equivalent.
    """
    by_lower = {activation.lower(): activation for activation in ACTIVATIONS}
    return by_lower.get(name.lower().replace("_", "").replace("-", ""))


def check_torch_names(net: NetSpec, location: KeyPath, report: Report, *, has_loss: bool = True) -> None:
    """Add a problem for each name or argument of the net at `location` that does not exist in torch.

    Args: has_loss: whether the algorithm uses the key loss_spec of the net. If `has_loss` is False, an unknown loss causes a note instead
    of a problem.
    """
    for key in OPTIMIZER_KEYS:
        if (optim := getattr(net, key)) is not None:
            _check_optimizer(optim, (*location, key), report)
    for key in ("lr_scheduler_spec", "actor_lr_scheduler_spec", "critic_lr_scheduler_spec"):
        if (scheduler := getattr(net, key)) is not None:
            _check_class(scheduler, SCHEDULERS, "scheduler of torch.optim.lr_scheduler", (*location, key), report)
    if has_loss:
        _check_class(net.loss_spec, LOSSES, "regression loss of torch.nn", (*location, "loss_spec"), report)
    elif net.loss_spec.name not in LOSSES:
        report.note_ineffective_key(
            (*location, "loss_spec", "name"), f"'{net.loss_spec.name}' has no effect: the algorithm learns no values; ignored"
        )
    if isinstance(net, LayersSpec | TorchArcNetSpec):
        if net.init_fn is not None:
            _check_name(net.init_fn, INIT_FUNCTIONS, "function of torch.nn.init", location, report, key="init_fn")
        for key, name in (("hid_layers_activation", net.hid_layers_activation), ("out_layer_activation", net.out_layer_activation)):
            if name is not None and activation_class(name) is None:
                report.add_problem((*location, key), f"unknown activation of torch.nn '{name}'{nearest_hint(name, ACTIVATIONS)}")
    if isinstance(net, TorchArcNetSpec):
        _check_gain(net, location, report)
        for key in ("arc", "actor_arc", "critic_arc"):
            if (arc := getattr(net, key)) is not None:
                _check_arc(arc, (*location, key), report)


def _check_gain(net: TorchArcNetSpec, location: KeyPath, report: Report) -> None:
    """Check that torch defines a gain for hid_layers_activation if the initialisation function init_fn needs a gain."""
    activation = activation_class(net.hid_layers_activation)
    scaled = {"gain", "nonlinearity"} & set(INIT_FUNCTIONS.get(net.init_fn or "", "").split())
    if scaled and activation is not None and activation not in GAINS:
        message = f"{net.init_fn} has no gain for '{net.hid_layers_activation}'; allowed with it: {', '.join(GAINS)}"
        report.add_problem((*location, "hid_layers_activation"), message)


def _check_name(name: str, allowed: Mapping[str, str], what: str, location: KeyPath, report: Report, key: str = "name") -> bool:
    if name in allowed:
        return True
    reason = f"; {name} {_NOT_ALLOWED[name]}" if name in _NOT_ALLOWED else nearest_hint(name, allowed)
    report.add_problem((*location, key), f"unsupported {what} '{name}'{reason or '; allowed: ' + ', '.join(sorted(allowed))}")
    return False


def _check_class(given: TorchClassSpec, allowed: Mapping[str, str], what: str, location: KeyPath, report: Report) -> None:
    """Check that `allowed` contains the class that `given` names, and that the class has the arguments in `given`.

    Args: allowed: maps the names of classes to their arguments (see `NAMES`).
    """
    if _check_name(given.name, allowed, what, location, report):
        _check_arguments(given.kwargs, allowed[given.name], given.name, location, report)


def _check_optimizer(optim: OptimSpec, location: KeyPath, report: Report) -> None:
    if optim.name != "Lookahead":
        _check_class(optim, OPTIMIZERS, "optimizer of torch.optim", location, report)
        return
    inner = optim.kwargs.get("optimizer", "Adam")
    if not isinstance(inner, str):
        report.add_problem((*location, "optimizer"), f"must be the name of an optimizer, not {format_json(inner)}")
    elif _check_name(inner, OPTIMIZERS, "optimizer of torch.optim", location, report, key="optimizer"):
        others = {key: value for key, value in optim.kwargs.items() if key not in LOOKAHEAD}
        _check_arguments(others, OPTIMIZERS[inner], f"Lookahead with {inner}", location, report)


def _check_arguments(given: Mapping[str, Any], allowed: str, name: str, location: KeyPath, report: Report) -> None:
    """Check that the torch class `name` has all arguments in `given`, and that `given` contains all required arguments.

    Args: allowed: names of the arguments of the class, in the form of `NAMES`.
    """
    words = {word.rstrip("!"): word.endswith("!") for word in allowed.split()}
    for key in given:
        if key not in words and "**" not in words:
            hint = nearest_hint(key, words) or f"; allowed: {', '.join(words) or 'none'}"
            report.add_problem((*location, key), f"unknown argument of {name}{hint}", "unknown")
        elif key in INTEGER_ARGUMENTS:
            numbers, what = (given[key], "whole numbers") if isinstance(given[key], list) else ([given[key]], "a whole number")
            if any(not isinstance(number, int) or isinstance(number, bool) for number in numbers):
                report.add_problem((*location, key), f"must be {what}, not {format_json(given[key])}")
    for key, must in words.items():
        if must and key not in given:
            report.add_problem((*location, key), f"missing; required by {name}", "missing")


def _check_arc(arc: dict[str, Any], location: KeyPath, report: Report) -> None:
    """Check the architecture of a TorchArcNet, which has the form `{modules: {name: layer}, graph: {input, modules: {name: [inputs]},
    output}}`."""
    modules, graph = arc.get("modules"), arc.get("graph")
    for key in arc:
        if key not in ("modules", "graph"):
            report.add_problem(
                (*location, key), f"unknown key{nearest_hint(key, ('modules', 'graph')) or '; allowed: modules, graph'}", "unknown"
            )
    if not isinstance(modules, dict) or not modules:
        report.add_problem((*location, "modules"), f"must be an object of named layers, not {format_json(modules)}")
        return
    for name, layer in modules.items():
        _check_layer(layer, (*location, "modules", name), report)
    if graph is None and len(modules) == 1:
        return  # an architecture with a single module needs no graph
    if not isinstance(graph, dict):
        report.add_problem((*location, "graph"), f"must be an object with input, modules and output, not {format_json(graph)}")
    else:
        _check_graph(graph, modules, (*location, "graph"), report)


def _check_layer(layer: Any, location: KeyPath, report: Report) -> None:
    """Check a layer of an architecture. A layer has the form "Tanh", {Tanh: null}, {LazyLinear: {out_features: 64}} or {Sequential:
    [layers]}."""
    if isinstance(layer, str):
        layer = {layer: None}
    name, args = next(iter(layer.items())) if isinstance(layer, dict) and len(layer) == 1 else (None, None)
    if name is None:
        report.add_problem(location, f"must be one layer, such as {{LazyLinear: {{out_features: 64}}}}, not {format_json(layer)}")
    elif name not in LAYERS:
        report.add_problem((*location, name), f"unknown layer of torch.nn{nearest_hint(name, LAYERS)}")
    elif name in ("Sequential", "ModuleList") and isinstance(args, list):
        for index, inner in enumerate(args):
            _check_layer(inner, (*location, name, index), report)
    elif isinstance(args, dict) or args is None:
        _check_arguments(args or {}, LAYERS[name], name, (*location, name), report)


def _check_graph(graph: dict[str, Any], modules: Mapping[str, Any], location: KeyPath, report: Report) -> None:
    for key in ("input", "modules", "output"):
        if graph.get(key) in (None, {}, []):
            report.add_problem((*location, key), "missing; a graph needs input, modules and output", "missing")
    steps = graph.get("modules")
    for name in steps if isinstance(steps, dict) else ():
        if name not in modules:
            report.add_problem((*location, "modules", name), f"unknown module{nearest_hint(name, modules)}")
