"""A torch module that contains a complete policy, from observations of the env to actions of the env. It can be exported to a file."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
from gymnasium import spaces
from torch import Tensor, nn

from slm_lab.agent.net.body import Body, RecurrentBody
from slm_lab.agent.net.layers import UnpackObservations
from slm_lab.agent.ops.distributions import ActionDistribution
from slm_lab.agent.ops.masks import MASKED
from slm_lab.env.layout import BoxLayout
from slm_lab.env.nested_actions import action_leaves
from slm_lab.env.spaces import action_columns, box_scale, leaves, observation_codec
from slm_lab.experiment.deploy.load import LoadedAgent
from slm_lab.experiment.plan import UserError
from slm_lab.lib.records import Use


class InputEntry(NamedTuple):
    """One input of an exported policy: the observation, or an entry of a Dict or Tuple observation."""

    name: str
    path: tuple[Any, ...]
    """Keys that lead to the entry, or () if the observation is not a Dict or Tuple."""
    space: spaces.Space[Any]
    encode: Callable[[Tensor], Tensor]
    """Function that converts a batch of observations from the form of the env to the form of the policy, without normalisation."""
    floats: slice
    """Slice of the normaliser's statistics for this entry. `floats` is an empty slice if the entry is not normalised."""
    is_image: bool
    use: Use


class ExportedPolicy(nn.Module):
    """Module that computes the actions of a policy. The constructor raises UserError if the policy cannot be exported.

    The input of `forward` is a batch of observations [B, …] in the form of the env. For a Dict or Tuple observation, there is one input for
    each entry. A recurrent policy has a hidden state [B, S] as an additional last input. `forward` returns (action, params) or, for a
    recurrent policy, (action, params, next hidden state). The action [B, …] is the mode of the action distribution, in the form in which
    the env receives actions. For a Dict or Tuple action space, there is one action output for each entry (`action_names`). The output
    params [B, P] contains the parameters of the action distribution.
    """

    mean: Tensor | None
    inv_std: Tensor | None

    def __init__(self, agent: LoadedAgent) -> None:
        super().__init__()
        policy = agent.policy
        if policy.net is None or policy.distribution is None or policy.action_policy == "random":
            raise UserError("it acts at random, without a net")
        self.head = copy.deepcopy(policy.net.actor_head)
        self.distribution = copy.copy(policy.distribution)
        if self.distribution.gaussian_part is not None and self.distribution.gaussian_part.log_std is not None:
            assert self.head.log_std is not None
            self.distribution = self.distribution.with_log_std(self.head.log_std)
        self.body: Body = copy.deepcopy(policy.net.actor_body)
        self.state_size = self.body.state_size
        self.entries = [entry for entry in _input_entries(agent) if entry.use != "critic"]
        mask = next((entry for entry in self.entries if entry.use == "mask"), None)
        self.masked = mask is not None
        self.unmasked = 0 if mask is None else self.distribution.param_dim - math.prod(mask.space.shape or ())
        """Number of distribution parameters, at the end of the parameter vector, to which the action mask does not apply."""
        self.packed = len(self.entries) > 1 and any(entry.is_image for entry in self.entries)
        if self.packed:
            first = next(iter(self.body.layers), None)
            if not isinstance(first, UnpackObservations):
                raise UserError(f"{type(first).__name__} reads packed observations (a Dict or Tuple with images) itself")
            self.body.layers[0] = _JoinEntries(first)
        normalizer = agent.normalizers.obs
        self.clip = math.inf if normalizer is None else normalizer.clip
        stats = None if normalizer is None else normalizer.stats
        self.register_buffer("mean", None if stats is None else torch.from_numpy(stats.mean.ravel().copy()))
        self.register_buffer("inv_std", None if stats is None else torch.from_numpy(stats.inv_std.ravel().copy()))
        self.decode = _joint_decoder(agent.action_space) if agent.spaces.joint else _decoder(agent.action_space)
        self.action_names = [".".join(["action", *map(str, path)]) for path, _ in leaves(agent.action_space)]
        self.eval().requires_grad_(False)

    def forward(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        encoded = [self._normalize(entry, entry.encode(x)) for entry, x in zip(self.entries, inputs, strict=False)]
        mask_BA = encoded.pop().flatten(1) if self.masked else None  # the action mask is the last entry
        flat = self.packed or len(encoded) > 1
        obs_B = torch.cat([x.to(torch.float32).flatten(1) for x in encoded], dim=1) if flat else encoded[0]
        if isinstance(self.body, RecurrentBody):
            features_1B, state_BS = self.body.run_cell(self.body.run_layers(obs_B).unsqueeze(0), inputs[-1])
            return (*self._actions(features_1B[0], mask_BA), state_BS)
        return self._actions(self.body(obs_B), mask_BA)

    def _normalize(self, entry: InputEntry, x: Tensor) -> Tensor:
        if entry.floats.start == entry.floats.stop or (self.mean is None and self.clip == math.inf):
            return x
        if self.mean is not None and self.inv_std is not None:  # in float64, as the env does
            shape = x.shape[1:]
            x = (x.to(torch.float64) - self.mean[entry.floats].view(shape)) * self.inv_std[entry.floats].view(shape)
        return x.clamp(-self.clip, self.clip).to(torch.float32)

    def _actions(self, features_BF: Tensor, mask_BA: Tensor | None) -> tuple[Tensor, ...]:
        """Return (*action outputs, params), given the features of the body and the action mask."""
        params_BP = self.head(features_BF)
        if mask_BA is not None:
            # not `mask_outputs`: a trace cannot compare sizes
            valid_BP = nn.functional.pad(mask_BA != 0, (0, self.unmasked), value=True)
            params_BP = torch.where(valid_BP, params_BP, MASKED)
        action_B = self.decode(self.distribution.env_action(self.distribution.mode(params_BP)))
        return *action_B, append_log_std(self.distribution, params_BP)


def append_log_std(distribution: ActionDistribution, params_BP: Tensor) -> Tensor:
    """Return the parameters [B, P] of the action distribution.

    The parameters are the outputs of the actor, followed by the log standard deviation if it does not depend on the observation.
    """
    if distribution.gaussian_part is None or distribution.gaussian_part.log_std is None:
        return params_BP
    log_std_BD = distribution.gaussian_part.log_std.detach().unsqueeze(0).expand(params_BP.shape[0], -1)
    return torch.cat([params_BP, log_std_BD], dim=1)


class _JoinEntries(nn.Module):
    """Layer that replaces the layer UnpackObservations of a net, and reads a float32 tensor [B, F] of concatenated entries instead of
    packed bytes."""

    def __init__(self, unpack: UnpackObservations) -> None:
        super().__init__()
        self.unpack = unpack

    def forward(self, x_BF: Tensor) -> Tensor:
        parts, normalize = self.unpack.parts, self.unpack.normalize
        columns = torch.split(x_BF, [math.prod(part.shape) for part in parts], dim=1)
        scales = [1.0 / part.divisor if normalize else 1.0 for part in parts]
        return self.unpack.encode_and_concatenate(
            [(x * scale).reshape(-1, *part.shape) for x, scale, part in zip(columns, scales, parts, strict=True)]
        )


def _input_entries(agent: LoadedAgent) -> list[InputEntry]:
    entries, at, uses = list[InputEntry](), 0, agent.spaces.uses
    for (path, leaf), layout in zip(leaves(agent.observation_space), agent.layouts, strict=True):
        use = uses.get(path[0], "all") if path else "all"
        encoded = observation_codec(leaf)[0] if layout is None else layout
        size = math.prod(encoded.shape) if encoded.dtype == "float32" and use != "mask" else 0
        name, is_image = ".".join(["obs", *map(str, path)]), layout is not None and layout.is_image
        entries.append(InputEntry(name, path, leaf, _make_observation_encoder(leaf, layout), slice(at, at + size), is_image, use))
        at += size
    return entries


def _make_observation_encoder(space: spaces.Space[Any], layout: BoxLayout | None) -> Callable[[Tensor], Tensor]:
    """Return a function, implemented in torch, that encodes observations of `space` as `observation_codec` does."""
    if layout is not None and layout.is_image:
        target, last, dtype = layout.shape, layout.channels_last, torch.uint8 if layout.dtype == "uint8" else torch.float32
        return lambda x: (x.movedim(x.dim() - 1, x.dim() - 3) if last else x).to(dtype).reshape(-1, *target)
    if layout is not None and layout.scale is not None:
        count, scale = layout.shape[0], torch.from_numpy(layout.scale)
        return lambda x: x.to(torch.float32).reshape(-1, count) * scale
    match space:
        case spaces.Discrete():
            return _make_one_hot_encoder(np.array([space.n]), np.array([space.start]))
        case spaces.MultiDiscrete():
            return _make_one_hot_encoder(space.nvec.ravel(), space.start.ravel())
    size = math.prod(space.shape or ())
    return lambda x: x.to(torch.float32).reshape(-1, size)


def _make_one_hot_encoder(nvec: np.ndarray, start: np.ndarray) -> Callable[[Tensor], Tensor]:
    """Return a function that encodes K integers as concatenated one-hot vectors. Integer k has nvec[k] possible values from start[k] on."""
    offset = torch.from_numpy(np.concatenate([[0], np.cumsum(nvec)[:-1]]) - start).long()
    count, columns = len(nvec), torch.arange(int(nvec.sum()))

    def encode(x: Tensor) -> Tensor:
        index_BK = x.to(torch.int64).reshape(-1, count) + offset
        return (index_BK.unsqueeze(2) == columns).to(torch.float32).sum(1)

    return encode


Decoder = Callable[[Tensor], list[Tensor]]
"""Function that converts a batch of actions from the form of the policy to the form of the env: one batch for each entry of a Dict or
Tuple action space, or one batch for any other space."""


def _joint_decoder(space: spaces.Space[Any]) -> Decoder:
    """Return a function that converts the index of a combination of MultiDiscrete actions to the components of the action."""
    assert isinstance(space, spaces.MultiDiscrete)
    nvec, first = torch.from_numpy(space.nvec.ravel()).long(), torch.from_numpy(space.start.ravel()).long()
    below = torch.cat([nvec[1:].flip(0).cumprod(0).flip(0), torch.ones(1, dtype=torch.int64)])
    shape, dtype = space.shape, torch_dtype(space)
    return lambda a: [(a.unsqueeze(-1) // below % nvec + first).reshape(-1, *shape).to(dtype)]


def _decoder(space: spaces.Space[Any]) -> Decoder:
    """Return a function, implemented in torch, that decodes actions of `space` as `action_codec` does."""
    if not isinstance(space, spaces.Dict | spaces.Tuple):
        decode = _leaf_decoder(space)
        return lambda a: [decode(a)]
    parts = [(at, _leaf_decoder(leaf)) for at, leaf in zip(action_columns(space), action_leaves(space), strict=True)]
    return lambda a: [decode((a.unsqueeze(1) if a.dim() == 1 else a)[:, at]) for at, decode in parts]


def _leaf_decoder(space: spaces.Space[Any]) -> Callable[[Tensor], Tensor]:
    shape = space.shape or ()
    match space:
        case spaces.Discrete():
            start = int(space.start)
            return lambda a: a.to(torch.int64).reshape(-1) + start
        case spaces.MultiDiscrete():
            first, dtype = torch.from_numpy(space.start.ravel()).long(), torch_dtype(space)
            return lambda a: (a.to(torch.int64) + first).reshape(-1, *shape).to(dtype)
        case spaces.MultiBinary():
            return lambda a: a.to(torch.int8).reshape(-1, *shape)
    assert isinstance(space, spaces.Box)
    low, high, half, center = (torch.from_numpy(values) for values in box_scale(space))
    dtype, whole = torch_dtype(space), np.issubdtype(space.dtype, np.integer)

    def decode(action: Tensor) -> Tensor:
        clipped = torch.minimum(torch.maximum(action.to(torch.float64) * half + center, low), high)
        return (clipped.round() if whole else clipped).to(dtype).reshape(-1, *shape)

    return decode


def torch_dtype(space: spaces.Space[Any]) -> torch.dtype:
    """Return the torch dtype of the values of a space. Raises UserError if torch has no dtype for the space."""
    try:
        return torch.from_numpy(np.zeros(1, space.dtype)).dtype
    except TypeError:
        raise UserError(f"torch does not support the dtype {space.dtype} of the space {space}") from None
