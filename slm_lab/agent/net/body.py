"""Bodies: networks that map observations to features."""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import pairwise

import torch
from torch import Tensor, nn

from slm_lab.agent.net.arc import ArcGraph
from slm_lab.agent.net.hypersphere import UnitBlock, UnitEmbedding, UnitLastHiddenLayer
from slm_lab.agent.net.layers import (
    BatchNorm2d,
    ImageToFloat,
    LeadingColumns,
    UnpackObservations,
    init_layer,
    init_layers,
    make_activation,
    mlp,
)
from slm_lab.agent.net.residual import ResidualBlock
from slm_lab.agent.ops.device import upload
from slm_lab.agent.ops.linear import MatmulMode
from slm_lab.lib.records import ObservationSpace
from slm_lab.spec.models.net import (
    ConvNetSpec,
    DuelingConvNetSpec,
    DuelingMLPNetSpec,
    HydraMLPNetSpec,
    MLPNetSpec,
    NetSpec,
    RecurrentNetSpec,
    SimbaNetSpec,
    SimbaV2NetSpec,
    TorchArcNetSpec,
)
from slm_lab.spec.report import Problem, SpecError


class Body(nn.Module):
    """Network that maps observations [B, *shape] to features [B, features]."""

    features: int
    """Number of output features."""
    state_size: int = 0
    """Size of the hidden state. The size is 0 for feed-forward nets."""

    def __init__(self, layers: nn.Sequential, features: int) -> None:
        super().__init__()
        self.layers = layers
        self.features = features
        self.matmul_mode = MatmulMode()
        """Mode in which the matrix products of linear layers are computed."""
        self._size = max((layer.weight.numel() for layer in layers.modules() if isinstance(layer, nn.Linear)), default=0)
        """Number of weights of the largest linear layer."""

    def forward(self, obs_B: Tensor) -> Tensor:
        return self.run_layers(obs_B)

    def run_layers(self, x_B: Tensor) -> Tensor:
        """Apply the layers of the body. The matrix products of linear layers are computed as `matmul_mode` specifies."""
        matmul_mode = self.matmul_mode
        if not matmul_mode.bfloat16 and (
            not matmul_mode.onednn or torch.compiler.is_compiling() or len(x_B) * self._size < matmul_mode.onednn
        ):
            return self.layers(x_B)  # all products are too small for oneDNN
        return matmul_mode.call_with_mode(self.layers, x_B)


class RecurrentBody(Body):
    """Body with a recurrent cell after its other layers. The method `unroll` runs the body over a sequence of steps."""

    def __init__(self, layers: nn.Sequential, cell: nn.RNNBase) -> None:
        super().__init__(layers, cell.hidden_size)
        self.cell = cell
        self.is_lstm = isinstance(cell, nn.LSTM)
        self.state_size = cell.num_layers * cell.hidden_size * (2 if self.is_lstm else 1)

    def unroll(self, obs_TN: Tensor, first_TN: Tensor, state_NS: Tensor) -> tuple[Tensor, Tensor]:
        """Run the body over T steps, beginning with the hidden state `state_NS`. Return features [T, N, F] and the new hidden state [N, S].

        The hidden state of an env is set to zero before the first step of each episode, where `first_TN` is true. If `first_TN` is on the
        CPU, this method does not wait for a CUDA device.
        """
        T, N = obs_TN.shape[:2]
        x_TN = self.run_layers(obs_TN.flatten(0, 1)).unflatten(0, (T, N))
        # one call of the cell for each sequence of steps between episode starts
        starts = [0, *(() if T == 1 else (first_TN[1:].any(dim=1).nonzero().flatten() + 1).tolist()), T]
        first_TN, out = upload(first_TN, x_TN.device), []
        for begin, end in pairwise(starts):
            state_NS = torch.where(first_TN[begin].unsqueeze(1), 0.0, state_NS)
            out_TN, state_NS = self.run_cell(x_TN[begin:end], state_NS)
            out.append(out_TN)
        return torch.cat(out), state_NS

    def run_cell(self, x_TN: Tensor, state_NS: Tensor) -> tuple[Tensor, Tensor]:
        """Run the recurrent cell on [T, N, D] without hidden state resets. Return features [T, N, F] and the new hidden state [N, S]."""
        N = state_NS.shape[0]  # not len(), which torch.export treats as a constant
        parts = state_NS.view(N, -1, self.cell.num_layers, self.cell.hidden_size).permute(1, 2, 0, 3).contiguous()
        out_TN, state = self.cell(x_TN, (parts[0], parts[1]) if self.is_lstm else parts[0])
        new_state = torch.stack(state) if self.is_lstm else state.unsqueeze(0)
        return out_TN, new_state.permute(2, 0, 1, 3).reshape(N, -1)


CELLS: dict[str, Callable[..., nn.RNNBase]] = {"RNN": nn.RNN, "LSTM": nn.LSTM, "GRU": nn.GRU}


def _mlp_body(spec: MLPNetSpec, obs: ObservationSpace, role: str) -> Body:
    flatten, size = _flattening_modules(obs)
    sizes = [size, *spec.hid_layers]
    return Body(nn.Sequential(*flatten, *mlp(spec, sizes, spec.dropout if role == "critic" else 0.0)), sizes[-1])


def _simba_body(spec: SimbaNetSpec, obs: ObservationSpace, role: str) -> Body:
    """Build the SimBa net of arXiv:2410.09754, section 4.1.

    The normalisation of observations in arXiv:2410.09754 is a separate option, env.normalize_obs.
    """
    flatten, size = _flattening_modules(obs)
    embedding = nn.Linear(size, spec.width)
    init_layer(embedding, "orthogonal_", gain=1.0)
    blocks = [ResidualBlock(spec.width) for _ in range(spec.blocks)]
    return Body(nn.Sequential(*flatten, embedding, *blocks, nn.LayerNorm(spec.width)), spec.width)


def _simba_v2_body(spec: SimbaV2NetSpec, obs: ObservationSpace, role: str) -> Body:
    """Build the SimbaV2 net of arXiv:2502.15280, section 4, without its output layer.

    The normalisation of observations in arXiv:2502.15280 is a separate option, env.normalize_obs.
    """
    flatten, size = _flattening_modules(obs)
    blocks = [UnitBlock(spec.width, spec.blocks) for _ in range(spec.blocks)]
    return Body(nn.Sequential(*flatten, UnitEmbedding(size, spec.width), *blocks, UnitLastHiddenLayer(spec.width, spec.width)), spec.width)


class ConcatenatedHeads(nn.Module):
    """Module that runs several nets on the same input x [B, D] and concatenates the outputs to [B, F]."""

    def __init__(self, heads: list[nn.Sequential]) -> None:
        super().__init__()
        self.heads = nn.ModuleList(heads)

    def forward(self, x_BD: Tensor) -> Tensor:
        return torch.cat([head(x_BD) for head in self.heads], dim=1)


def _hydra_body(spec: HydraMLPNetSpec, obs: ObservationSpace, role: str) -> Body:
    """Build the body of a HydraMLPNet, which consists of heads, shared layers and a tail.

    Each head receives the full observation. The shared layers receive the concatenated outputs of the heads.
    """
    heads, common, _ = spec.hid_layers
    flatten, size = _flattening_modules(obs)
    branches = [nn.Sequential(*mlp(spec, [size, *units])) for units in heads]
    joined: nn.Module = branches[0] if len(branches) == 1 else ConcatenatedHeads(branches)  # with a single head the modules form a chain
    sizes = [sum([size, *units][-1] for units in heads), *common]
    tail, features = build_tail(spec, sizes[-1], role)
    return Body(nn.Sequential(*flatten, joined, *mlp(spec, sizes), *tail), features)


def build_tail(spec: NetSpec, features: int, role: str) -> tuple[list[nn.Module], int]:
    """Build the tail of a net: the hidden layers that only the actor or only the critic uses.

    Of all nets, only HydraMLPNet has tails. The first tail in the spec is for the actor (or for action values), the second tail for the
    critic. If the spec lists only one tail, actor and critic have tails with the same layer sizes and separate weights. With
    `role="shared"`, the result has no layers, because a body that actor and critic share contains no tail.

    Args: features: number of inputs of the tail.

    Returns the layers of the tail, and the number of outputs of the tail.
    """
    if not isinstance(spec, HydraMLPNetSpec) or role == "shared":
        return [], features
    tails = spec.hid_layers[2] or [[]]
    sizes = [features, *tails[-1 if role == "critic" else 0]]
    return mlp(spec, sizes), sizes[-1]


def _flattening_modules(obs: ObservationSpace) -> tuple[list[nn.Module], int]:
    """Return the modules that convert observations to flat vectors [B, size], and the size of these vectors."""
    if obs.parts:
        return [UnpackObservations(obs.parts)], sum(math.prod(part.shape) for part in obs.parts)
    scaling = _image_scaling_modules(obs, normalize=True)
    return [*scaling, nn.Flatten()] if len(obs.shape) != 1 else scaling, math.prod(obs.shape)


def _image_scaling_modules(obs: ObservationSpace, normalize: bool) -> list[nn.Module]:
    """Return a list with the module that scales images, or an empty list if observations are float32 and need no scaling."""
    return [ImageToFloat(obs, normalize)] if obs.dtype == "uint8" or (normalize and obs.divisor != 1.0) else []


NATURE_CONVS: list[list[int | list[int]]] = [[32, 8, 4], [64, 4, 2], [64, 3, 1]]
"""Default convolutions for images of at least 36 × 36 pixels, as in DQN (Mnih et al., 2015)."""
SMALL_IMAGE_CONVS: list[list[int | list[int]]] = [[32, 3, 2, 1], [64, 3, 2, 1], [64, 3, 1, 1]]
"""Default convolutions for images with a side of fewer than 36 pixels."""


def _conv_body(spec: ConvNetSpec, obs: ObservationSpace, role: str) -> Body:
    if obs.parts:
        encoders, features = [], 0
        for part in obs.parts:
            size = math.prod(part.shape)
            if len(part.shape) == 3:
                layers, size = _build_conv_layers(spec, part.shape)
                encoders.append(nn.Sequential(*layers, nn.Flatten()))
            features += size
        sizes = [features, *spec.fc_hid_layers]
        return Body(nn.Sequential(UnpackObservations(obs.parts, spec.normalize, encoders), *mlp(spec, sizes)), sizes[-1])
    if len(obs.shape) != 3:
        message = f"ConvNet needs observations of shape [channels, height, width], but this env has {list(obs.shape)}; use MLPNet"
        raise SpecError("agent", [Problem("agent.net.name", message)])
    layers, features = _build_conv_layers(spec, obs.shape)
    sizes = [features, *spec.fc_hid_layers]
    return Body(nn.Sequential(ImageToFloat(obs, spec.normalize), *layers, nn.Flatten(), *mlp(spec, sizes)), sizes[-1])


def _build_conv_layers(spec: ConvNetSpec, shape: tuple[int, ...]) -> tuple[list[nn.Module], int]:
    """Return the convolutional layers for images of `shape`, and the number of output features.

    Raises SpecError if the images are too small for the kernels.
    """
    layers: list[nn.Module] = []
    channels, features = shape[0], math.prod(shape)
    for index, (out_channels, *geometry) in enumerate(spec.conv_hid_layers or (SMALL_IMAGE_CONVS if min(shape[1:]) < 36 else NATURE_CONVS)):
        names = ("kernel_size", "stride", "padding", "dilation")
        conv = nn.Conv2d(channels, out_channels, **dict(zip(names, map(_as_tuple, geometry), strict=False)))  # type: ignore[arg-type]  # pairs
        init_layer(conv, spec.init_fn, spec.hid_layers_activation.lower())
        layers.append(conv)
        channels = conv.out_channels
        if spec.batch_norm == "before":
            layers.append(BatchNorm2d(channels))
        layers.append(make_activation(spec.hid_layers_activation))
        if spec.batch_norm is True and index > 0:
            layers.append(BatchNorm2d(channels))
        features = _conv_features(layers, shape, index)
    return layers, features


def _as_tuple(value: int | list[int]) -> int | tuple[int, ...]:
    return tuple(value) if isinstance(value, list) else value


def _conv_features(layers: list[nn.Module], shape: tuple[int, ...], index: int) -> int:
    """Return the number of output features of `layers`. The last convolution of `layers` is number `index` in the spec.

    Raises SpecError if images of `shape` are too small for the last convolution.
    """
    net = nn.Sequential(*layers).eval()
    try:
        with torch.inference_mode():
            features = net(torch.zeros(1, *shape)).numel()
    except RuntimeError as error:
        path = f"agent.net.conv_hid_layers[{index}]"
        raise SpecError("agent", [Problem(path, f"does not fit images of shape {list(shape)}: {error}")]) from error
    net.train()
    return int(features)


def _recurrent_body(spec: RecurrentNetSpec, obs: ObservationSpace, role: str) -> RecurrentBody:
    if spec.batch_norm:
        message = "not supported by RecurrentNet (padding would enter the batch statistics); use layer_norm"
        raise SpecError("agent", [Problem("agent.net.batch_norm", message)])
    flatten, size = _flattening_modules(obs)
    sizes = [size, *spec.fc_hid_layers]
    layers = mlp(spec, sizes)
    cell = CELLS[spec.cell_type](sizes[-1], spec.rnn_hidden_size, spec.rnn_num_layers)
    init_layers(cell, spec.init_fn, spec.hid_layers_activation)
    return RecurrentBody(nn.Sequential(*flatten, *layers), cell)


def _arc_body(spec: TorchArcNetSpec, obs: ObservationSpace, role: str) -> Body:
    role_key = "critic_arc" if role == "critic" else "actor_arc"
    key = role_key if getattr(spec, role_key) is not None else "arc"
    graph = ArcGraph(getattr(spec, key) or {}, f"agent.net.{key}")
    scaling = _image_scaling_modules(obs, spec.normalize)
    layers = nn.Sequential(*([UnpackObservations(obs.parts, spec.normalize)] if obs.parts else scaling), graph)
    features = graph.initialize_lazy_layers(layers, obs)
    init_layers(layers, spec.init_fn, spec.hid_layers_activation)
    return Body(layers, features)


BODIES: dict[type[NetSpec], Callable[..., Body]] = {
    MLPNetSpec: _mlp_body,
    DuelingMLPNetSpec: _mlp_body,
    SimbaNetSpec: _simba_body,
    SimbaV2NetSpec: _simba_v2_body,
    ConvNetSpec: _conv_body,
    DuelingConvNetSpec: _conv_body,
    RecurrentNetSpec: _recurrent_body,
    HydraMLPNetSpec: _hydra_body,
    TorchArcNetSpec: _arc_body,
}


def _check_input(spec: NetSpec, obs: ObservationSpace) -> None:
    """Raise SpecError if observations contradict `spec.input`, or have ambiguities that affect the net, such as an unclear channel axis."""
    if spec.input == "image" and not obs.has_images:
        raise SpecError("agent", [Problem("agent.net.input", f"cannot be 'image': the observation is a {obs.text}; remove the key")])
    if obs.ambiguities and (spec.images or not isinstance(spec, _FLATTENING)):
        raise SpecError("agent", [Problem(ambiguity.key, ambiguity.message) for ambiguity in obs.ambiguities])


_FLATTENING = (MLPNetSpec, SimbaNetSpec, SimbaV2NetSpec, HydraMLPNetSpec, RecurrentNetSpec)
"""Specs of the nets that flatten images to vectors."""


def build_body(spec: NetSpec, obs: ObservationSpace, role: str) -> Body:
    """Build the body for `role`, which is "actor", "critic", or "shared" for a body that actor and critic share.

    Raises SpecError if the spec of the net does not fit the observations.

    For a user-defined net, `implementation()` of the spec model returns a class, which is called with (spec, observation space, role). The
    class of a user-defined net must be an nn.Module that maps observations [B, *shape] to features [B, F], and must have the attribute
    `features` with the value F. The observations that the user-defined module receives do not contain the action mask.
    """
    _check_input(spec, obs)
    if role == "shared" and obs.has_critic_only_entries:
        message = "true lets actor and critic read the same inputs; env.critic_keys needs separate nets: set false"
        raise SpecError("agent", [Problem("agent.net.shared", message)])
    role_obs = obs.space_for(critic=role == "critic")
    if type(spec) in BODIES:
        body = BODIES[type(spec)](spec, role_obs, role)
    else:
        module = type(spec).implementation()(spec, role_obs, role)  # a user's net
        body = Body(nn.Sequential(module), module.features)
    if role_obs.shape != obs.shape:
        body.layers.insert(0, LeadingColumns(role_obs.shape[0]))
    body.matmul_mode = MatmulMode(bfloat16=spec.dtype == "bfloat16")
    return body
