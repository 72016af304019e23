"""Action-value networks Q(s, ·) of the value-based algorithms, and critics Q(s, a) or Q(s, ·) of the actor-critic algorithms."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.utils.parametrizations import spectral_norm

from slm_lab.agent.net.actor_critic_net import ActorHead, build_actor_sequence, build_sequences_with_trunk
from slm_lab.agent.net.body import Body, RecurrentBody, build_body
from slm_lab.agent.net.hypersphere import UnitLastHiddenLayer
from slm_lab.agent.net.layers import init_layer, init_output, linear_layer, make_activation
from slm_lab.agent.net.passes import direct
from slm_lab.agent.net.passes.direct import CriticsPass, DuelingPass, GraphFreeNet, GraphFreePass, GraphFreeSequence, flatten_sequential
from slm_lab.agent.net.passes.direct_layers import GraphFreeLinear, array_activation, existing_gradients
from slm_lab.agent.net.passes.validity import ParameterVector
from slm_lab.agent.ops.arrays import as_array, as_tensor
from slm_lab.agent.ops.autograd import ForwardPass, GraphPass
from slm_lab.agent.ops.device import is_asynchronous
from slm_lab.agent.ops.linear import FLOAT32, LinearFunction, MatmulMode
from slm_lab.agent.ops.masks import ActionMask, MaskedPass
from slm_lab.lib.records import ActionSpace, ObservationSpace
from slm_lab.spec.models.net import SHAPED, ConvNetSpec, DuelingConvNetSpec, DuelingMLPNetSpec, MLPNetSpec, NetSpec, SimbaV2NetSpec
from slm_lab.spec.report import Problem, SpecError


class QNet(GraphFreeNet):
    """Net that outputs the action values Q(s, ·), with or without the dueling architecture.

    For multi-discrete actions, the outputs are the concatenated values of all components, with `nvec[i]` values for component i.

    In a dueling net (arXiv:1511.06581, equation 9), one head outputs advantages and another head outputs the state value. A dueling net
    chooses actions by the advantages alone. Because the state value is the same for all actions, it affects neither the greedy action nor a
    Boltzmann distribution. For multi-discrete actions, each component has its own advantages, and all components share the state value
    (arXiv:1711.08946, equation 1).
    """

    def __init__(self, spec: NetSpec, obs: ObservationSpace, nvec: tuple[int, ...]) -> None:
        super().__init__()
        self.nvec, self.mask = nvec, ActionMask.from_observation_space(obs)
        self.actor_body: Body = build_body(spec, obs, "actor")
        self.actor_head = ActorHead(self.actor_body.features, sum(nvec), spec)
        self.value_head: nn.Linear | None = None
        if isinstance(spec, (DuelingMLPNetSpec, DuelingConvNetSpec)):
            self.value_head = linear_layer(spec, self.actor_body.features, 1)
            init_output(self.value_head, spec, spec.critic_init_std)

    @property
    def state_size(self) -> int:
        """Size of the hidden state. The size is 0 for feed-forward nets."""
        return self.actor_body.state_size

    def actor(self, obs_B: Tensor) -> Tensor:
        """Return the outputs [B, A] by which actions are chosen: action values, or advantages if the net is dueling.

        The net must be feed-forward.
        """
        return self._mask_invalid_actions(self.actor_head(self.actor_body(obs_B)), obs_B)

    def _mask_invalid_actions(self, q: Tensor, obs: Tensor) -> Tensor:
        """Return action values q [..., A] with the values of actions that are invalid in `obs` replaced by MASKED (−1e30)."""
        return q if self.mask is None else self.mask(q, obs)

    def critic(self, obs_B: Tensor) -> Tensor:
        """Return action values [B, A]. The net must be feed-forward."""
        return self._values(self.actor_body(obs_B), obs_B)

    def build_graph_free_sequences(self) -> Sequence[GraphFreeSequence] | None:
        """Return one GraphFreeSequence for the action values or, for a dueling net, one for the advantages and one for the state value.

        Returns None if GraphFreeSequence does not support a module of the net, or if a dueling net has an action mask or actions with
        several components.
        """
        if self.value_head is not None:
            if self.mask is not None or len(self.nvec) > 1:
                return None
            return build_sequences_with_trunk(self.actor_body, self.actor_head.output_modules(), [self.value_head], single=False)
        actor = build_actor_sequence(self.actor_body, self.actor_head)
        return None if actor is None else [actor]

    def forward_pass(self, obs_B: Tensor | np.ndarray, learn: bool = True) -> ForwardPass:
        """Compute a forward pass whose output is the action values [B, A]. The net must be feed-forward.

        Args: learn: whether gradients of the parameters are needed.
        """
        sequences = self.direct.get(learn)
        if sequences is not None:
            graph_free = GraphFreePass(sequences, as_array(obs_B))
            if self.value_head is not None:
                return DuelingPass(graph_free)
            return graph_free if self.mask is None else MaskedPass(graph_free, self.mask.valid_choices(as_array(obs_B)))
        with torch.set_grad_enabled(learn):
            return GraphPass(self.critic(as_tensor(obs_B)))

    def values(self, obs_B: Tensor) -> Tensor | np.ndarray:
        """Return action values [B, A] without gradients. The net must be feed-forward.

        Call this method inside `ignore_float_errors()`.
        """
        sequences = self.direct.get(learn=False)
        if sequences is None:
            with torch.no_grad():
                return self.critic(obs_B)
        if self.value_head is not None:
            return DuelingPass(GraphFreePass(sequences, obs_B.numpy())).values[0]
        q_BA = sequences[0].outputs(obs_B.numpy())
        return q_BA if self.mask is None else self.mask(q_BA, obs_B.numpy())

    def forward(self, obs_B: Tensor) -> tuple[Tensor, Tensor]:
        """Return the action values [B, A] twice, as the actor's outputs and as the critic's values. The net must be feed-forward."""
        q_BA = self.critic(obs_B)
        return q_BA, q_BA

    def unroll(self, obs_TN: Tensor, first_TN: Tensor, state_NS: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Run a recurrent net over T steps.

        Return the action values [T, N, A] twice, as the actor's outputs and as the critic's values, and the final hidden state [N, S].
        """
        assert isinstance(self.actor_body, RecurrentBody)
        features_TN, state_NS = self.actor_body.unroll(obs_TN, first_TN, state_NS)
        q_TNA = self._values(features_TN.flatten(0, 1), obs_TN.flatten(0, 1)).unflatten(0, features_TN.shape[:2])
        return q_TNA, q_TNA, state_NS

    def _values(self, features_BF: Tensor, obs_B: Tensor) -> Tensor:
        q_BA = self.actor_head(features_BF)
        if self.value_head is not None:
            q_BA = torch.add(self.value_head(features_BF), self._center_advantages(q_BA, obs_B))
        return self._mask_invalid_actions(q_BA, obs_B)

    def _center_advantages(self, advantage_BA: Tensor, obs_B: Tensor) -> Tensor:
        """Return advantages [B, A] minus their means, which are computed over the valid actions of each action component."""
        parts = advantage_BA.split(self.nvec, dim=1) if len(self.nvec) > 1 else (advantage_BA,)
        if self.mask is None:
            centred = [part - part.mean(dim=1, keepdim=True) for part in parts]
        else:
            weights = self.mask.valid_choices(obs_B).to(advantage_BA.dtype).split(self.nvec, dim=1)
            means = [(part * w).sum(1, True) / w.sum(1, True).clamp_min(1.0) for part, w in zip(parts, weights, strict=True)]
            centred = [part - mean for part, mean in zip(parts, means, strict=True)]
        return centred[0] if len(centred) == 1 else torch.cat(centred, dim=1)


ELEMENTWISE = (nn.ReLU, nn.Tanh, nn.ELU, nn.SELU, nn.SiLU, nn.GELU, nn.LeakyReLU, nn.Mish, nn.Softplus, nn.Sigmoid, nn.Identity)
"""Element-wise activations. StackedCritics can apply element-wise activations to tensors [C, B, F]."""


class QCritic(nn.Module):
    """Critic that consists of a body and an output layer.

    For discrete actions, the critic has one output per action, and the action is not an input. For continuous actions, the body receives
    the concatenation of a vector observation and the action. If the observation contains images, or the net is recurrent, the body receives
    the observation alone, and one more hidden layer receives the concatenation of the body's features and the action. The hidden state of a
    recurrent critic depends only on observations.

    Args: spectral: whether to apply spectral normalisation to the last hidden layer. outputs: number of outputs for a continuous action.
    """

    def __init__(self, spec: NetSpec, obs: ObservationSpace, action: ActionSpace, spectral: bool = False, outputs: int = 1) -> None:
        super().__init__()
        init_fn, actions = getattr(spec, "init_fn", None), action.dim if action.kind == "continuous" else 0
        body_gets_obs_only = spec.recurrent or obs.dtype == "uint8" or isinstance(spec, ConvNetSpec) or len(obs.shape) == 3
        self.action_after_body = bool(actions) and body_gets_obs_only
        if actions and not self.action_after_body:
            obs = ObservationSpace((torch.Size(obs.shape).numel() + actions,))
        self.body = build_body(spec, obs, "critic")
        features = self.body.features
        self.joint = nn.Sequential()
        if self.action_after_body:
            act = make_activation(getattr(spec, "hid_layers_activation", "relu"))
            if isinstance(spec, SimbaV2NetSpec):
                self.joint = nn.Sequential(UnitLastHiddenLayer(features + actions, features), act)
            else:
                self.joint = nn.Sequential(nn.Linear(features + actions, features), act)
                init_layer(self.joint[0], init_fn, type(act).__name__.lower())
        self.head = nn.Linear(features, outputs if actions else action.nvec[0])
        init_output(self.head, spec, spec.critic_init_std)
        if spectral:  # only the last hidden layer: optimal values are not smooth (Gogianu et al., 2021)
            hidden = [layer for layer in [*self.body.modules(), *self.joint.modules()] if isinstance(layer, nn.Linear)]
            if not hidden:
                message = "true needs a fully connected hidden layer in the critics; add one, or remove spectral_norm"
                raise SpecError("agent", [Problem("agent.algorithm.spectral_norm", message)])
            spectral_norm(hidden[-1])

    def forward(self, obs_B: Tensor, action_B: Tensor | None = None) -> Tensor:
        """Return the outputs [B, O] for continuous actions [B, D]. If action_B is None, return Q [B, A] of all discrete actions."""
        if action_B is not None and not self.action_after_body:
            return self.head(self.body(_concatenate_inputs(obs_B, action_B)))
        return self.forward_from_features(self.body(obs_B), action_B)

    def forward_from_features(self, features_BF: Tensor, action_B: Tensor | None) -> Tensor:
        """Return the outputs of the critic, given the features that the critic's body returned.

        This method does not support critics whose body receives the action.
        """
        if action_B is not None:
            features_BF = self.body.matmul_mode.call_with_mode(self.joint, torch.cat((features_BF, action_B), dim=1))
        return self.head(features_BF)

    def build_graph_free_sequence(self) -> GraphFreeSequence | None:
        """Return the GraphFreeSequence of this critic, or None if a module of the critic is not supported."""
        if self.action_after_body or isinstance(self.body, RecurrentBody):
            return None
        return GraphFreeSequence.from_modules([*flatten_sequential(self.body.layers), self.head], self.body.matmul_mode)


def _concatenate_inputs(obs_B: Tensor, action_B: Tensor | None) -> Tensor:
    """Return the concatenation of flattened observations and actions, or only the flattened observations if action_B is None."""
    return obs_B.flatten(1) if action_B is None else torch.cat((obs_B.flatten(1), action_B), dim=1)


class QCritics(GraphFreeNet):
    """Base class of nets that contain C critics.

    The critics map observations and continuous actions to Q [C, B], or observations to Q [C, B, A] of discrete actions.

    If each critic has O > 1 outputs for a continuous action, such as quantiles of the return, the outputs have shape [C, B, O].
    """

    outputs = 1
    """O, the number of outputs of each critic for a continuous action."""

    def forward_pass(
        self, obs_B: Tensor, action_B: Tensor | None, learn: bool = True, for_action_grad: bool = False, number: int | None = None
    ) -> CriticsPass | GraphPass:
        """Compute a forward pass of the critics. The output is Q [C, B], [C, B, O] or [C, B, A].

        Args: learn: whether gradients of the parameters are needed. for_action_grad: whether the only gradient that is needed is the
        gradient with respect to the actions, which `input_grad` of the returned pass computes. number: number of critics to compute,
        beginning with the first critic, or None to compute all critics.
        """
        sequences = self.direct.get(learn)
        if sequences is not None:
            return self._graph_free_pass(
                sequences, _concatenate_inputs(obs_B, action_B), 0 if action_B is None else action_B.shape[1], number
            )
        if not for_action_grad:
            with torch.set_grad_enabled(learn):
                return GraphPass(self(obs_B, action_B, number))
        assert action_B is not None
        leaf_B = action_B.detach().requires_grad_()
        trained = [parameter for parameter in self.parameters() if parameter.requires_grad]
        for parameter in trained:  # so that autograd does not compute gradients of parameters
            parameter.requires_grad_(False)
        values = self(obs_B, leaf_B, number)
        for parameter in trained:
            parameter.requires_grad_()
        return GraphPass(values, inputs=leaf_B)

    def _graph_free_pass(self, sequences: Sequence[GraphFreeSequence], x_BI: Tensor, actions: int, number: int | None) -> CriticsPass:
        return CriticsPass(sequences[:number], x_BI.numpy(), actions, self._has_single_output(actions))

    def _has_single_output(self, actions: int | None) -> bool:
        """Return whether each critic has a single output.

        Args: actions: number of inputs for the action, which is 0 or None for discrete actions.
        """
        return bool(actions) and self.outputs == 1


class SeparateCritics(QCritics):
    """C critics that are computed one after the other."""

    def __init__(self, critics: Sequence[QCritic]) -> None:
        super().__init__()
        self.critics = nn.ModuleList(critics)

    def build_graph_free_sequences(self) -> Sequence[GraphFreeSequence] | None:
        results = [critic.build_graph_free_sequence() for critic in self.critics if isinstance(critic, QCritic)]
        sequences = [sequence for sequence in results if sequence is not None]
        return sequences if len(sequences) == len(results) else None

    def forward(self, obs_B: Tensor, action_B: Tensor | None = None, number: int | None = None) -> Tensor:
        """Return Q [C, B] of continuous actions [B, D]. If action_B is None, return Q [C, B, A] of all discrete actions.

        Args: number: see QCritics.forward_pass.
        """
        q_CBO = torch.stack([critic(obs_B, action_B) for critic in self.critics[:number]])
        return q_CBO if action_B is None or self.outputs > 1 else q_CBO.squeeze(2)


class RecurrentCritics(SeparateCritics):
    """C recurrent critics, each of which has its own hidden state.

    The method `unroll` maps sequences of observations to features. The method `forward` maps features from `unroll` and an action to Q.
    """

    def __init__(self, critics: Sequence[QCritic]) -> None:
        super().__init__(critics)
        self._sizes = [critic.body.state_size for critic in critics]
        self.state_size = sum(self._sizes)
        """Size of the concatenated hidden states of all critics."""

    @property
    def _critic_list(self) -> Sequence[Any]:
        return list(self.critics)

    def unroll(self, obs_TN: Tensor, first_TN: Tensor, state_NS: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Run the bodies of the critics over T steps. Return features [T, N, C × F] twice, and the hidden state [N, S] after the last step.

        The features are returned twice, because ActorCriticNet.unroll also returns two results before the hidden state. Features and hidden
        states are concatenated over all critics.
        """
        states = state_NS.split(self._sizes, dim=1)
        outputs = [critic.body.unroll(obs_TN, first_TN, state) for critic, state in zip(self._critic_list, states, strict=True)]
        features = torch.cat([features for features, _ in outputs], dim=2)
        return features, features, torch.cat([state for _, state in outputs], dim=1)

    def forward(self, features_BF: Tensor, action_B: Tensor | None = None, number: int | None = None) -> Tensor:
        """Return Q [C, B] or [C, B, O] of continuous actions [B, D]. If action_B is None, return Q [C, B, A] of all discrete actions.

        Args: features_BF: concatenated features of all critics [B, C × F], as returned by `unroll`.
        """
        pairs = zip(self._critic_list[:number], features_BF.chunk(len(self.critics), dim=1), strict=False)
        q_CBO = torch.stack([critic.forward_from_features(features, action_B) for critic, features in pairs])
        return q_CBO if action_B is None or self.outputs > 1 else q_CBO.squeeze(2)


class StackedCritics(QCritics):
    """C critics of fully connected layers. Each layer is computed for all critics by one batched matrix product.

    Args: critics: critics from which the initial weights are copied.
    """

    def __init__(self, critics: Sequence[QCritic]) -> None:
        super().__init__()
        self._indices: list[int] = []
        self.activations: list[nn.Module] = []
        for index, layers in enumerate(zip(*(_critic_layers(critic) for critic in critics), strict=True)):
            if isinstance(layers[0], nn.Linear):
                # [O, I] as in nn.Linear: the product with the transposed weight is a fifth faster, forward and backward
                weight = nn.Parameter(torch.stack([layer.weight.detach() for layer in layers]))
                bias = nn.Parameter(torch.stack([layer.bias.detach() for layer in layers]).unsqueeze(1))
                self.register_parameter(f"weight_{index}", weight)
                self.register_parameter(f"bias_{index}", bias)
                self._indices.append(index)
            else:
                self.activations.append(layers[0])
        self._largest = max(weight[0].numel() for weight, _ in self.layer_parameters)
        """Number of weights of the largest layer of one critic."""
        self.matmul_mode = critics[0].body.matmul_mode
        """Mode in which the matrix products of the hidden layers are computed. The output layer always uses float32, because bfloat16
        values above 2,048 are multiples of 16."""

    @property
    def layer_parameters(self) -> list[tuple[nn.Parameter, nn.Parameter]]:
        """Weight [C, O, I] and bias [C, 1, O] of each layer."""
        return [(getattr(self, f"weight_{index}"), getattr(self, f"bias_{index}")) for index in self._indices]

    def build_graph_free_sequences(self) -> Sequence[GraphFreeSequence] | None:
        """Return one GraphFreeSequence of all critics together, followed by one GraphFreeSequence for each critic.

        Returns None if a module of the critics is not supported.
        """
        params, activations = self.layer_parameters, [array_activation(module) for module in self.activations]
        if None in activations or any(map(is_asynchronous, params[0])):
            return None
        modes = [*(self.matmul_mode for _ in activations), FLOAT32]
        layers = [GraphFreeLinear(pair, existing_gradients(pair), mode) for pair, mode in zip(params, modes, strict=True)]
        critics = [[layer.critic_layer(index) for layer in layers] for index in range(len(params[0][0]))]
        return [GraphFreeSequence([*zip(part, [*activations, None], strict=True)]) for part in (layers, *critics)]

    def enable_graph_free_pass(self, vector: ParameterVector, data: bool = False, others: Iterable[nn.Module] = ()) -> None:
        super().enable_graph_free_pass(vector, data, [*others, *self.activations])

    def _graph_free_pass(self, sequences: Sequence[GraphFreeSequence], x_BI: Tensor, actions: int, number: int | None) -> CriticsPass:
        stack, *critics = sequences
        if number is None and len(x_BI) * self._largest < direct.SEPARATE_CRITICS_SIZE:
            return CriticsPass([stack], x_BI.expand(len(critics), -1, -1).numpy(), actions, self._has_single_output(actions))
        return super()._graph_free_pass(critics, x_BI, actions, number)

    def forward(self, obs_B: Tensor, action_B: Tensor | None = None, number: int | None = None) -> Tensor:
        """Return Q [C, B] of continuous actions [B, D]. If action_B is None, return Q [C, B, A] of all discrete actions.

        Args: number: see QCritics.forward_pass.
        """
        layers: Sequence[tuple[Tensor, Tensor]] = self.layer_parameters
        if number is not None:
            layers = [(weight[:number], bias[:number]) for weight, bias in layers]
        x_CBF = _concatenate_inputs(obs_B, action_B).expand(len(layers[0][0]), -1, -1)
        for (weight, bias), act in zip(layers, self.activations, strict=False):
            x_CBF = act(_stacked_linear(x_CBF, weight, bias, self.matmul_mode))
        q_CBO = _stacked_linear(x_CBF, *layers[-1], FLOAT32)
        return q_CBO if action_B is None or self.outputs > 1 else q_CBO.squeeze(2)


def _stacked_linear(x_CBI: Tensor, weight: Tensor, bias: Tensor, matmul_mode: MatmulMode) -> Tensor:
    if matmul_mode == FLOAT32:
        return torch.baddbmm(bias, x_CBI, weight.transpose(1, 2))
    out_CBO: Tensor = LinearFunction.apply(x_CBI, weight, bias, matmul_mode)
    return out_CBO


def _critic_layers(critic: QCritic) -> list[nn.Module]:
    return [layer for layer in [*critic.body.layers, critic.head] if not isinstance(layer, nn.Flatten)]


def build_critics(
    spec: NetSpec, obs: ObservationSpace, action: ActionSpace, spectral: bool = False, number: int = 2, outputs: int = 1
) -> QCritics:
    """Build `number` critics with separate weights. Raises SpecError if the spec of the net does not fit the observations.

    Args: outputs: number of outputs of each critic for a continuous action.
    """
    critics = [QCritic(spec, obs, action, spectral, outputs) for _ in range(number)]
    layers = _critic_layers(critics[0]) if type(spec) is MLPNetSpec and not spectral else []
    plain = layers and not critics[0].action_after_body and all(type(layer) in (nn.Linear, *ELEMENTWISE) for layer in layers)
    plain = plain and (spec.critic_optim_spec or spec.optim_spec).name not in SHAPED  # these optimizers need separate weight matrices
    built = StackedCritics(critics) if plain else (RecurrentCritics if spec.recurrent else SeparateCritics)(critics)
    built.outputs = outputs
    return built
