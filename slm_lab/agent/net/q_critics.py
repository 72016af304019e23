"""The two critics of soft actor-critic: Q(s, a), or Q(s, ·) over discrete actions."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrizations import spectral_norm

from slm_lab.agent.net.body import build_body
from slm_lab.agent.net.fused import ACTIVATIONS, FUSED, FusedChain, Layer
from slm_lab.agent.net.layers import activation, init_layer, init_output
from slm_lab.agent.net.validity import Watch
from slm_lab.agent.ops.linear import FLOAT32, Products
from slm_lab.lib.records import ActionSpace, ObservationSpace
from slm_lab.spec.models.net import SHAPED, ConvNetSpec, MLPNetSpec, NetSpec
from slm_lab.spec.report import Problem, SpecError

ELEMENTWISE = (nn.ReLU, nn.Tanh, nn.ELU, nn.SELU, nn.SiLU, nn.GELU, nn.LeakyReLU, nn.Mish, nn.Softplus, nn.Sigmoid, nn.Identity)
"""Activations that act on each number by itself, so that batches can be stacked."""


class QCritic(nn.Module):
    """One critic: a body, and outputs on top of it.

    A vector of observations is concatenated with the action before the body, the features of an image after it, with one more hidden layer.
    For discrete actions the critic has one output per action instead.
    """

    def __init__(self, spec: NetSpec, obs: ObservationSpace, action: ActionSpace, spectral: bool = False) -> None:
        super().__init__()
        init_fn, actions = getattr(spec, "init_fn", None), action.dim if action.kind == "continuous" else 0
        self.action_after_body = bool(actions) and (obs.dtype == "uint8" or isinstance(spec, ConvNetSpec) or len(obs.shape) == 3)
        if actions and not self.action_after_body:
            obs = ObservationSpace((torch.Size(obs.shape).numel() + actions,))
        self.body = build_body(spec, obs, "critic")
        features = self.body.features
        self.joint = nn.Sequential()
        if self.action_after_body:
            act = activation(getattr(spec, "hid_layers_activation", "relu"))
            self.joint = nn.Sequential(nn.Linear(features + actions, features), act)
            init_layer(self.joint[0], init_fn, type(act).__name__.lower())
        self.head = nn.Linear(features, 1 if actions else action.nvec[0])
        init_output(self.head, spec, spec.critic_init_std)
        if spectral:  # one layer only, the one before the outputs: optimal values are not smooth (Gogianu et al. 2021)
            hidden = [layer for layer in [*self.body.modules(), *self.joint.modules()] if isinstance(layer, nn.Linear)]
            if not hidden:
                message = "true needs a fully connected hidden layer in the critics; add one, or remove spectral_norm"
                raise SpecError("agent", [Problem("agent.algorithm.spectral_norm", message)])
            spectral_norm(hidden[-1])

    def forward(self, obs_B: Tensor, action_B: Tensor | None = None) -> Tensor:
        """Return Q [B, 1] of actions [B, D]; without actions Q [B, A]."""
        if action_B is None:
            return self.head(self.body(obs_B))
        if not self.action_after_body:
            return self.head(self.body(torch.cat((obs_B.flatten(1), action_B), dim=1)))
        return self.head(self.body.products.run(self.joint, torch.cat((self.body(obs_B), action_B), dim=1)))


class SeparateCritics(nn.Module):
    """C critics that run one after the other."""

    def __init__(self, critics: Sequence[QCritic]) -> None:
        super().__init__()
        self.critics = nn.ModuleList(critics)

    def forward(self, obs_B: Tensor, action_B: Tensor | None = None) -> Tensor:
        """Return Q [C, B] of actions [B, D]; without actions Q [C, B, A]."""
        q_CBA = torch.stack([critic(obs_B, action_B) for critic in self.critics])
        return q_CBA if action_B is None else q_CBA.squeeze(2)


class StackedCritics(nn.Module):
    """C critics of plain fully connected layers, as one batched product per layer, with the weights of `critics`."""

    def __init__(self, critics: Sequence[QCritic]) -> None:
        super().__init__()
        self._indices: list[int] = []
        self.activations: list[nn.Module] = []
        for index, layers in enumerate(zip(*(_chain(critic) for critic in critics), strict=True)):
            if isinstance(layers[0], nn.Linear):
                # laid out as in nn.Linear: the transposed product is a fifth faster forward and backward
                weight = nn.Parameter(torch.stack([layer.weight.detach() for layer in layers]))
                bias = nn.Parameter(torch.stack([layer.bias.detach() for layer in layers]).unsqueeze(1))
                self.register_parameter(f"weight_{index}", weight)
                self.register_parameter(f"bias_{index}", bias)
                self._indices.append(index)
            else:
                self.activations.append(layers[0])
        self.products = critics[0].body.products
        """How products of the hidden layers are computed; must be set before the first pass. The output layer is float32: numbers above
        2,048 are 16 apart in bfloat16."""

    @property
    def layers(self) -> list[tuple[nn.Parameter, nn.Parameter]]:
        """Weight and bias of each layer."""
        return [(getattr(self, f"weight_{index}"), getattr(self, f"bias_{index}")) for index in self._indices]

    @cached_property
    def _watch(self) -> Watch:
        return Watch([self, *self.activations])

    @cached_property
    def fused(self) -> list[Layer]:
        """The layers as FusedChain takes them; empty if one of their activations is not supported."""
        activations = [ACTIVATIONS.get(type(act)) for act in self.activations]
        if not FUSED or not all(activations):
            return []
        return [*(Layer(act, self.products) for act in activations), Layer(None, FLOAT32)]

    def forward(self, obs_B: Tensor, action_B: Tensor | None = None) -> Tensor:
        """Return Q [C, B] of actions [B, D]; without actions Q [C, B, A]."""
        x_BF = obs_B.flatten(1) if action_B is None else torch.cat((obs_B.flatten(1), action_B), dim=1)
        layers = self.layers
        x_CBF = x_BF.expand(len(layers[0][0]), -1, -1)
        if self.fused and self._watch.holds():
            q_CBA: Tensor = FusedChain.apply(x_CBF, self.fused, *(parameter for layer in layers for parameter in layer))
        else:
            for (weight, bias), act in zip(layers, self.activations, strict=False):
                x_CBF = act(_stacked_linear(x_CBF, weight, bias, self.products))
            q_CBA = _stacked_linear(x_CBF, *layers[-1], FLOAT32)
        return q_CBA if action_B is None else q_CBA.squeeze(2)


def _stacked_linear(x_CBI: Tensor, weight: Tensor, bias: Tensor, products: Products) -> Tensor:
    if products == FLOAT32:
        return torch.baddbmm(bias, x_CBI, weight.transpose(1, 2))
    out_CBO: Tensor = FusedChain.apply(x_CBI, [Layer(None, products)], weight, bias)
    return out_CBO


QCritics = SeparateCritics | StackedCritics


def _chain(critic: QCritic) -> list[nn.Module]:
    return [layer for layer in [*critic.body.layers, critic.head] if not isinstance(layer, nn.Flatten)]


def build_critics(spec: NetSpec, obs: ObservationSpace, action: ActionSpace, spectral: bool = False, number: int = 2) -> QCritics:
    """Build critics with separate weights. Raises SpecError if the spec does not fit the observations."""
    critics = [QCritic(spec, obs, action, spectral) for _ in range(number)]
    layers = _chain(critics[0]) if type(spec) is MLPNetSpec and not spectral else []
    plain = layers and not critics[0].action_after_body and all(type(layer) in (nn.Linear, *ELEMENTWISE) for layer in layers)
    plain = plain and (spec.critic_optim_spec or spec.optim_spec).name not in SHAPED  # these need the weight matrices apart
    return StackedCritics(critics) if plain else SeparateCritics(critics)
