"""Actor-critic network of the policy-gradient algorithms. A body maps observations to features, and a head maps features to outputs."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor, nn

from slm_lab.agent.net.body import Body, RecurrentBody, build_body, build_tail
from slm_lab.agent.net.layers import init_output, linear_layer, make_activation
from slm_lab.agent.net.passes.direct import GraphFreeNet, GraphFreePass, GraphFreeSequence, flatten_sequential
from slm_lab.agent.ops.arrays import as_array, as_tensor
from slm_lab.agent.ops.autograd import ForwardPass, GraphPass
from slm_lab.agent.ops.linear import FLOAT32
from slm_lab.agent.ops.masks import ActionMask, MaskedPass
from slm_lab.lib.records import ObservationSpace
from slm_lab.spec.models.net import NetSpec


class ActorHead(nn.Module):
    """Output layer of the actor, which maps features to the parameters of the action distribution.

    Args: features: number of inputs. params: number of outputs. log_std: learned, state-independent log standard deviations of the action
    distribution, or None. tail: hidden layers of the actor after a body that actor and critic share.
    """

    def __init__(
        self, features: int, params: int, spec: NetSpec, log_std: nn.Parameter | None = None, tail: nn.Sequential | None = None
    ) -> None:
        super().__init__()
        self.tail = tail
        out_activation = getattr(spec, "out_layer_activation", None)
        self.linear = linear_layer(spec, features, params)
        init_output(self.linear, spec, spec.actor_init_std)
        self.activation = make_activation(out_activation) if out_activation else None
        self.log_std = log_std

    def forward(self, features_BF: Tensor) -> Tensor:
        params_BP = self.linear(features_BF if self.tail is None else self.tail(features_BF))
        return params_BP if self.activation is None else self.activation(params_BP)

    def output_modules(self) -> list[nn.Module]:
        """Return the modules that map features to outputs, in the order in which they run."""
        tail = flatten_sequential(self.tail) if self.tail is not None else []
        return [*tail, self.linear, *([self.activation] if self.activation is not None else [])]


def build_actor_sequence(body: Body, head: ActorHead) -> GraphFreeSequence | None:
    """Return the GraphFreeSequence that maps observations to the outputs of `head` without an autograd graph.

    Returns None if the body is recurrent, or if GraphFreeSequence does not support one of the modules.
    """
    if isinstance(body, RecurrentBody):
        return None
    return GraphFreeSequence.from_modules([*flatten_sequential(body.layers), *head.output_modules()], body.matmul_mode)


def build_sequences_with_trunk(
    body: Body, head: Sequence[nn.Module], second_head: Sequence[nn.Module], single: bool
) -> Sequence[GraphFreeSequence] | None:
    """Return the GraphFreeSequences of two heads that share a body. The body is the trunk of both sequences.

    Returns None if the body is recurrent, or if GraphFreeSequence does not support one of the modules.

    Args: head, second_head: modules of each head, in the order in which they run. single: whether the second head returns its single output
    as [B] instead of [B, 1].
    """
    if isinstance(body, RecurrentBody):
        return None
    trunk = GraphFreeSequence.from_modules(flatten_sequential(body.layers), body.matmul_mode, last_is_hidden=True)
    if trunk is None:
        return None
    first = GraphFreeSequence.from_modules(head, FLOAT32, trunk=trunk)
    second = GraphFreeSequence.from_modules(second_head, FLOAT32, single, trunk)
    return None if first is None or second is None else [first, second]


class ActorCriticNet(GraphFreeNet):
    """Net with an actor, which outputs distribution parameters, and a critic, which outputs the state value.

    Actor and critic have separate bodies or share a body.

    Args: params: number of actor outputs. log_std: see ActorHead. critic: whether the net has a critic. Without a critic, all state values
    are 0.
    """

    def __init__(self, spec: NetSpec, obs: ObservationSpace, params: int, log_std: nn.Parameter | None = None, critic: bool = True) -> None:
        super().__init__()
        shared = spec.shared and critic
        self.actor_body: Body = build_body(spec, obs, "shared" if shared else "actor")
        # hidden layers that only one output uses (the tail) are not part of a shared body
        tail, features = build_tail(spec, self.actor_body.features, "actor") if shared else ([], self.actor_body.features)
        self.actor_head = ActorHead(features, params, spec, log_std, nn.Sequential(*tail) if tail else None)
        self.critic_body: Body | None = None
        self.critic_head: nn.Linear | nn.Sequential | None = None
        if critic:
            self.critic_body = None if shared else build_body(spec, obs, "critic")
            features = (self.critic_body or self.actor_body).features
            tail, features = build_tail(spec, features, "critic") if shared else ([], features)
            linear = nn.Linear(features, 1)
            init_output(linear, spec, spec.critic_init_std)
            self.critic_head = nn.Sequential(*tail, linear) if tail else linear
        self.mask = ActionMask.from_observation_space(obs)
        self.state_size = sum(body.state_size for body in self.bodies)
        """Size of the concatenated hidden states of all bodies. The size is 0 for feed-forward nets."""

    @property
    def bodies(self) -> list[Body]:
        return [body for body in (self.actor_body, self.critic_body) if body is not None]

    def actor_parameters(self) -> list[nn.Parameter]:
        """Return the parameters of the actor's body and head. A body that actor and critic share is included."""
        return [*self.actor_body.parameters(), *self.actor_head.parameters()]

    def critic_parameters(self) -> list[nn.Parameter]:
        body = list(self.critic_body.parameters()) if self.critic_body else []
        return [*body, *(self.critic_head.parameters() if self.critic_head else [])]

    def actor(self, obs_B: Tensor) -> Tensor:
        """Return distribution parameters [B, P]. The net must be feed-forward."""
        return self._mask_outputs(self.actor_head(self.actor_body(obs_B)), obs_B)

    def _mask_outputs(self, params: Tensor, obs: Tensor) -> Tensor:
        """Return `params` [..., P] with the outputs for actions that are invalid in `obs` replaced by MASKED (−1e30)."""
        return params if self.mask is None else self.mask(params, obs)

    def critic(self, obs_B: Tensor) -> Tensor:
        """Return state values [B]. The net must be feed-forward."""
        if self.critic_head is None:
            return obs_B.new_zeros(len(obs_B), dtype=torch.float32)
        return self.critic_head((self.critic_body or self.actor_body)(obs_B)).squeeze(1)

    def build_graph_free_sequences(self) -> Sequence[GraphFreeSequence] | None:
        """Return the GraphFreeSequences of actor and critic, which compute outputs without an autograd graph.

        Returns None if GraphFreeSequence does not support a module of the net.
        """
        if self.critic_head is not None and self.critic_body is None:
            return build_sequences_with_trunk(self.actor_body, self.actor_head.output_modules(), flatten_sequential(self.critic_head), True)
        actor = build_actor_sequence(self.actor_body, self.actor_head)
        if actor is None or self.critic_head is None or self.critic_body is None:
            return None if actor is None else [actor]
        modules = [*flatten_sequential(self.critic_body.layers), *flatten_sequential(self.critic_head)]
        critic = GraphFreeSequence.from_modules(modules, self.critic_body.matmul_mode, single=True)
        return None if critic is None else [actor, critic]

    def forward_pass(self, obs_B: Tensor | np.ndarray, learn: bool = True) -> ForwardPass:
        """Compute a forward pass, which outputs distribution parameters [B, P] and state values [B]. The net must be feed-forward.

        Args: learn: whether gradients of the parameters are needed.
        """
        sequences = self.direct.get(learn)
        if sequences is None:
            with torch.set_grad_enabled(learn):
                return GraphPass(*self(as_tensor(obs_B)))
        graph_free = GraphFreePass(sequences, as_array(obs_B))
        if self.critic_head is None:
            graph_free.values += (np.zeros(len(obs_B), np.float32),)
        return graph_free if self.mask is None else MaskedPass(graph_free, self.mask.valid_choices(as_array(obs_B)))

    def values(self, obs_B: Tensor) -> Tensor:
        """Return state values [B] without gradients. The net must be feed-forward.

        Call this method inside `ignore_float_errors()`.
        """
        sequences = None if self.critic_head is None else self.direct.get(learn=False)
        if sequences is None:
            with torch.no_grad():
                return self.critic(obs_B)
        return torch.from_numpy(sequences[1].outputs(obs_B.numpy()))

    def forward(self, obs_B: Tensor) -> tuple[Tensor, Tensor]:
        """Return distribution parameters [B, P] and state values [B]. The net must be feed-forward."""
        if self.critic_head is None or self.critic_body is not None:
            return self.actor(obs_B), self.critic(obs_B)
        features_BF = self.actor_body(obs_B)
        return self._mask_outputs(self.actor_head(features_BF), obs_B), self.critic_head(features_BF).squeeze(1)

    def unroll(self, obs_TN: Tensor, first_TN: Tensor, state_NS: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Run a recurrent net over T steps.

        Return distribution parameters [T, N, P], state values [T, N] and the final hidden state [N, S].
        """
        T, N = obs_TN.shape[:2]
        features, states = [], []
        for body, state in zip(self.bodies, state_NS.split([body.state_size for body in self.bodies], dim=1), strict=True):
            assert isinstance(body, RecurrentBody)
            out_TN, after_N = body.unroll(obs_TN, first_TN, state)
            features.append(out_TN.flatten(0, 1))
            states.append(after_N)
        params = self._mask_outputs(self.actor_head(features[0]).unflatten(0, (T, N)), obs_TN)
        value = self.critic_head(features[-1]).view(T, N) if self.critic_head else params.new_zeros(T, N)
        return params, value, torch.cat(states, dim=1)
