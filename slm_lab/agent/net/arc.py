"""Nets defined in a spec as graphs of torch.nn layers.

    {"modules": {"body": {"Sequential": [{"LazyLinear": {"out_features": 64}}, {"Tanh": null}]}},
     "graph": {"input": "x", "modules": {"body": ["x"]}, "output": "body"}}

The key `modules` defines modules by name. The key `graph` lists the inputs of each module, and names the module whose output is the net's
output. The inputs of a module are the net's input or outputs of other modules, without cycles. If `modules` contains a single module,
`graph` is not needed. The names and the structure of a graph are checked when the spec is loaded (spec/rules/torch_check.py).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from slm_lab.agent.net.normalization import BatchRenorm1d, LazyBatchRenorm1d, LazyWeightNormLinear, WeightNormLinear
from slm_lab.lib.records import ObservationSpace
from slm_lab.spec.report import Problem, SpecError


class NormalTanh(nn.Module):
    """Layer that normalises each input vector to zero mean and unit standard deviation, and then applies tanh."""

    def forward(self, x_BF: Tensor) -> Tensor:
        return torch.tanh((x_BF - x_BF.mean(-1, keepdim=True)) / (x_BF.std(-1, keepdim=True) + 1e-6))


LAYERS: dict[str, type[nn.Module]] = {
    **{name: item for name, item in vars(nn).items() if isinstance(item, type) and issubclass(item, nn.Module)},
    "NormalTanh": NormalTanh,
    "BatchRenorm1d": BatchRenorm1d,
    "LazyBatchRenorm1d": LazyBatchRenorm1d,
    "WeightNormLinear": WeightNormLinear,
    "LazyWeightNormLinear": LazyWeightNormLinear,
}
"""Mapping from name to class, for all layers of torch.nn and the layers of this package."""


def build_module(description: Any, path: str) -> nn.Module:
    """Build a module from a description {ClassName: arguments}.

    The arguments are a dict of keyword arguments, a list of positional arguments, or null. The arguments of Sequential are a list of
    descriptions of layers.

    Args: path: path of the description in the spec, for error messages.
    """
    ((name, arguments),) = ({description: None} if isinstance(description, str) else description).items()
    if name == "Sequential":
        return nn.Sequential(*(build_module(item, f"{path}.Sequential[{i}]") for i, item in enumerate(arguments or [])))
    try:
        if isinstance(arguments, dict):
            return LAYERS[name](**arguments)
        return LAYERS[name](*([] if arguments is None else arguments if isinstance(arguments, list) else [arguments]))
    except (TypeError, ValueError) as error:
        raise _spec_error(f"{path}.{name}", str(error)) from error


def _spec_error(path: str, message: str) -> SpecError:
    return SpecError("agent", [Problem(path, message)])


class ArcGraph(nn.Module):
    """A directed acyclic graph of modules with one input and one output."""

    def __init__(self, arc: dict[str, Any], path: str) -> None:
        super().__init__()
        self.path = path
        modules, graph = arc["modules"], arc.get("graph")
        self.nodes = nn.ModuleDict({name: build_module(item, f"{path}.modules.{name}") for name, item in modules.items()})
        if graph is None and len(modules) == 1:
            only = next(iter(modules))
            graph = {"input": "x", "modules": {only: ["x"]}, "output": only}
        self.input, self.output, self.order = self._topological_order(graph)

    def _topological_order(self, graph: Any) -> tuple[str, str, list[tuple[str, list[str]]]]:
        """Return the names of the graph's input and output, and a list of (module name, input names) in topological order."""
        path = f"{self.path}.graph"
        source, output = graph.get("input", "x"), graph["output"]
        if not isinstance(source, str) or not isinstance(output, str):
            raise _spec_error(path, f"input and output must each be one name, not {source!r} and {output!r}")
        waiting = {name: [inputs] if isinstance(inputs, str) else list(inputs) for name, inputs in graph["modules"].items()}
        if unused := [name for name in self.nodes if name not in waiting]:
            raise _spec_error(f"{self.path}.modules.{unused[0]}", "unused module; add it to graph.modules or remove it")
        available, order = {source}, []
        while waiting:
            ready = [name for name, inputs in waiting.items() if available.issuperset(inputs)]
            if not ready:
                missing = sorted({i for inputs in waiting.values() for i in inputs} - available)
                raise _spec_error(f"{path}.modules", f"modules {', '.join(waiting)} lack inputs: no module produces {', '.join(missing)}")
            order += [(name, waiting.pop(name)) for name in ready]
            available.update(ready)
        if output not in available:
            raise _spec_error(f"{path}.output", f"unknown module {output!r}; expected one of {', '.join(sorted(available))}")
        return source, output, order

    @property
    def is_chain(self) -> bool:
        """Whether the modules run in sequence, so that the only input of each module is the output of the previous module."""
        names = [self.input, *(name for name, _ in self.order)]
        return names[-1] == self.output and all(inputs == [before] for before, (_, inputs) in zip(names, self.order, strict=False))

    def forward(self, x_B: Tensor) -> Tensor:
        values = {self.input: x_B}
        for name, inputs in self.order:
            values[name] = self.nodes[name](*(values[i] for i in inputs))
        return values[self.output]

    def initialize_lazy_layers(self, net: nn.Module, obs: ObservationSpace) -> int:
        """Initialise the lazy layers of `net`, which contains this graph, by a forward pass on zeros.

        Returns the number of output features.
        """
        training = net.training
        try:
            with torch.no_grad():
                out = net.eval()(torch.zeros(2, *obs.shape, dtype=torch.uint8 if obs.dtype == "uint8" else torch.float32))
        except (RuntimeError, TypeError, ValueError, IndexError) as error:
            raise _spec_error(self.path, f"cannot run on observations of shape {list(obs.shape)}: {error}") from error
        net.train(training)
        if not isinstance(out, Tensor) or out.dim() != 2:
            shape = list(out.shape[1:]) if isinstance(out, Tensor) else type(out).__name__
            raise _spec_error(f"{self.path}.graph.output", f"must be a vector per observation, not {shape}; add a Flatten layer")
        return int(out.shape[1])
