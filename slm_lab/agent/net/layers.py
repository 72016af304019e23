"""Layers, activation functions and weight initialisations, selected by their names in a spec."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from itertools import pairwise

import torch
from torch import Tensor, nn

from slm_lab.agent.net.hypersphere import constrain_row_norms
from slm_lab.agent.net.noisy import NoisyLinear
from slm_lab.agent.net.normalization import WeightNormLinear
from slm_lab.agent.ops.device import is_asynchronous
from slm_lab.lib.records import ObservationPart, ObservationSpace
from slm_lab.spec.models.net import ConvNetSpec, HydraMLPNetSpec, LayersSpec, MLPNetSpec, NetSpec, RecurrentNetSpec, SimbaV2NetSpec

ACTIVATIONS: dict[str, type[nn.Module]] = {
    name.lower(): vars(nn)[name] for name in [*nn.modules.activation.__all__, "Identity"] if name != "MultiheadAttention"
}
"""Mapping from lower-case name to class, for all activation modules of torch.nn."""

INITS: dict[str, Callable[..., Tensor]] = {
    name: fn for name, fn in vars(nn.init).items() if name.endswith("_") and not name.startswith("_")
}
"""Mapping from name to in-place initialisation function, for all functions of torch.nn.init."""


def make_activation(name: str) -> nn.Module:
    """Return a new activation module by its case-insensitive name. Raises KeyError if torch.nn has no activation with this name."""
    return ACTIVATIONS[name.lower()]()


def init_layer(layer: nn.Module, init_fn: str | None, nonlinearity: str | None = None, gain: float | None = None) -> None:
    """Initialise a Linear or Conv layer in place: the weights by `init_fn`, the biases with 0. `init_fn=None` keeps torch's defaults.

    The weights are scaled by `gain`. If `gain` is None, the weights are scaled by torch's recommended gain for `nonlinearity`, or by 1 if
    torch recommends none.
    """
    weight = getattr(layer, "weight", None)
    if init_fn is None or weight is None or weight.dim() < 2:
        return
    init_weight(weight, init_fn, nonlinearity, gain)
    if isinstance(layer.bias, Tensor):
        nn.init.zeros_(layer.bias)


def init_weight(weight: Tensor, init_fn: str, nonlinearity: str | None = None, gain: float | None = None) -> None:
    """Initialise a weight in place by `init_fn`.

    If `init_fn` accepts a gain or a nonlinearity, the weight is scaled as described in `init_layer`.
    """
    function = INITS[init_fn]
    accepted = inspect.signature(function).parameters
    nonlinearity = nonlinearity and {"identity": "linear"}.get(nonlinearity.lower(), nonlinearity.lower())
    if "gain" in accepted:
        function(weight, gain=_recommended_gain(nonlinearity) if gain is None else gain)
    elif "nonlinearity" in accepted and nonlinearity in ("linear", "relu", "tanh", "sigmoid", "selu"):
        function(weight, nonlinearity=nonlinearity)
    else:
        function(weight)


def _recommended_gain(nonlinearity: str | None) -> float:
    try:
        name = (nonlinearity or "linear").lower()
        return float(nn.init.calculate_gain({"leakyrelu": "leaky_relu"}.get(name, name)))  # type: ignore[arg-type]  # ValueError for others
    except ValueError:
        return 1.0


def init_layers(net: nn.Module, init_fn: str | None, nonlinearity: str | None = None) -> None:
    """Initialise the layers of `net` in place, as SLM Lab does: the weights by `init_fn`, the biases with 0.

    Weights and biases of Linear, Conv and GRU layers are initialised. Of weight-normalised layers, only the biases are initialised. Other
    layers, such as LSTM, keep torch's default initialisation. If `init_fn` is None, all layers keep torch's default initialisation.
    """
    if init_fn is None:
        return
    for module in net.modules():
        if isinstance(module, nn.Linear | nn.modules.conv._ConvNd):
            init_layer(module, init_fn, nonlinearity)
        elif isinstance(module, nn.GRU | nn.GRUCell):
            for name, parameter in module.named_parameters():
                if "weight" in name:
                    init_weight(parameter, init_fn, nonlinearity)
                else:
                    nn.init.zeros_(parameter)
        elif isinstance(module, WeightNormLinear) and module.bias is not None:
            nn.init.zeros_(module.bias)


def init_output(layer: nn.Linear, spec: NetSpec, std: float | None) -> None:
    """Initialise an output layer, and mark its weight with the attribute `is_output`. (Muon is used only for unmarked weights.)

    Args: std: gain of an orthogonal initialisation. If `std` is None, the output layer is initialised like hidden layers.
    """
    layer.weight.is_output = True  # type: ignore[attr-defined]  # Muon is meant for hidden layers only
    if isinstance(spec, SimbaV2NetSpec):
        init_layer(layer, "orthogonal_", gain=1.0)
        constrain_row_norms(layer.weight)
    elif std is not None:
        init_layer(layer, "orthogonal_", gain=std)
    else:
        init_layer(layer, getattr(spec, "init_fn", None), getattr(spec, "hid_layers_activation", None))


def linear_layer(spec: NetSpec, n_in: int, n_out: int) -> nn.Linear:
    """Return a NoisyLinear layer if the spec requests a noisy net, otherwise nn.Linear."""
    return NoisyLinear(n_in, n_out, spec.noisy_sigma) if isinstance(spec, LayersSpec) and spec.noisy else nn.Linear(n_in, n_out)


class CriticDropout(nn.Module):
    """Dropout in critics: set each element to 0 with probability `rate`, and divide the other elements by 1 − rate (arXiv:2110.02034).

    This layer drops elements in evaluation mode too, because targets and the actor's gradient also use dropout in the critics. Random
    numbers are drawn from torch's global generator.
    """

    def __init__(self, rate: float) -> None:
        super().__init__()
        self.rate = rate

    def forward(self, x_BF: Tensor) -> Tensor:
        return nn.functional.dropout(x_BF, self.rate, training=True)


def mlp(spec: MLPNetSpec | HydraMLPNetSpec | ConvNetSpec | RecurrentNetSpec, sizes: Sequence[int], dropout: float = 0.0) -> list[nn.Module]:
    """Build linear layers, each followed by dropout if `dropout` > 0, by the normalisation layers of the spec, and by an activation.

    Args: sizes: number of inputs, followed by the number of outputs of each layer.
    """
    layers: list[nn.Module] = []
    batch_norm = spec.batch_norm == "before" if isinstance(spec, ConvNetSpec) else spec.batch_norm
    for n_in, n_out in pairwise(sizes):
        linear = linear_layer(spec, n_in, n_out)
        init_layer(linear, spec.init_fn, spec.hid_layers_activation.lower())
        layers.append(linear)
        if dropout:
            layers.append(CriticDropout(dropout))
        if spec.layer_norm:
            layers.append(nn.LayerNorm(n_out))
        if batch_norm:
            layers.append(BatchNorm(n_out))
        layers.append(make_activation(spec.hid_layers_activation))
    return layers


class BatchNorm(nn.BatchNorm1d):
    """BatchNorm1d that normalises a batch of a single sample by running statistics, because a single sample has no variance."""

    def forward(self, x_BF: Tensor) -> Tensor:
        if self.training and len(x_BF) < 2:
            return nn.functional.batch_norm(x_BF, self.running_mean, self.running_var, self.weight, self.bias, eps=self.eps)
        return super().forward(x_BF)


class BatchNorm2d(nn.BatchNorm2d):
    """BatchNorm2d that normalises a single image of 1 × 1 pixels by running statistics, because a single pixel has no variance."""

    def forward(self, x_BCHW: Tensor) -> Tensor:
        if self.training and x_BCHW.shape[0] * x_BCHW.shape[2] * x_BCHW.shape[3] < 2:
            return nn.functional.batch_norm(x_BCHW, self.running_mean, self.running_var, self.weight, self.bias, eps=self.eps)
        return super().forward(x_BCHW)


def conv_memory_format(images_B: Tensor) -> torch.memory_format:
    """Return the memory format in which convolutions are fastest: channels last for images [B, C, H, W] on the CPU.

    With channels last, a gradient step on 256 Atari observations takes 110 to 120 ms instead of 170 to 190 ms. Most of the difference is
    the gradient of the first convolution's weight, which takes 14 ms instead of 51 ms. A forward pass takes the same time with channels
    last and channels first.
    """
    return torch.preserve_format if images_B.dim() != 4 or is_asynchronous(images_B) else torch.channels_last


class ImageToFloat(nn.Module):
    """Layer that converts images to float32. If `normalize` is true, the images are divided by their upper bound."""

    def __init__(self, obs: ObservationSpace, normalize: bool) -> None:
        super().__init__()
        self.scale, self.bytes = 1.0 / obs.divisor if normalize else 1.0, obs.dtype == "uint8"

    def forward(self, obs_B: Tensor) -> Tensor:
        if obs_B.dtype != torch.uint8:
            return obs_B if self.bytes or self.scale == 1.0 else obs_B * self.scale
        # scale in place: allocating a second tensor of this size would take longer than the other operations together
        return obs_B.to(torch.float32, memory_format=conv_memory_format(obs_B)).mul_(self.scale)


class LeadingColumns(nn.Module):
    """Layer that returns the first `size` columns of its input [B, F]."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.size = size

    def forward(self, x_BF: Tensor) -> Tensor:
        return x_BF[:, : self.size]


def unpack(obs_B: Tensor, parts: Sequence[ObservationPart], normalize: bool = True) -> list[Tensor]:
    """Split observations whose entries are packed as bytes, uint8 [B, bytes]. Return a list of the entries, float32 [B, *shape] each.

    With `normalize=True`, images are divided by their upper bound.
    """
    entries = []
    for part in parts:
        bytes_B, scale = obs_B[:, part.begin : part.end], 1.0 / part.divisor if normalize else 1.0
        entry_B = bytes_B.view(torch.float32) if part.dtype == "float32" else bytes_B.to(torch.float32)
        if scale != 1.0:
            entry_B = entry_B * scale if part.dtype == "float32" else entry_B.mul_(scale)
        entries.append(entry_B.reshape(-1, *part.shape))
    return entries


class UnpackObservations(nn.Module):
    """Layer that converts observations whose entries are packed as bytes, uint8 [B, bytes], to vectors [B, F].

    Each vector is the concatenation of all entries of an observation. An encoder maps each image to a vector. If `encoders` is empty,
    images are flattened.

    Args: encoders: one module for each image.
    """

    def __init__(self, parts: Sequence[ObservationPart], normalize: bool = True, encoders: Sequence[nn.Module] = ()) -> None:
        super().__init__()
        self.parts, self.normalize = parts, normalize
        self.encoders = nn.ModuleList(encoders)

    def forward(self, obs_B: Tensor) -> Tensor:
        return self.encode_and_concatenate(unpack(obs_B, self.parts, self.normalize))

    def encode_and_concatenate(self, entries: Sequence[Tensor]) -> Tensor:
        """Encode images, flatten other entries, and return the concatenation of all entries [B, F].

        Args: entries: the entries of an observation, float32 [B, *shape] each.
        """
        encoders = iter(self.encoders)
        encoded = [
            next(encoders)(x_B.contiguous(memory_format=conv_memory_format(x_B))) if self.encoders and x_B.dim() == 4 else x_B.flatten(1)
            for x_B in entries
        ]
        return torch.cat(encoded, dim=1)
