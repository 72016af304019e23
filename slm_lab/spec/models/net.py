"""agent.net: networks, optimizers and learning rate schedules."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from pydantic import ConfigDict, Field, Strict, model_validator

from slm_lab.spec.models.base import (
    Component,
    Count,
    Extensible,
    Flag,
    Fraction,
    Positive,
    PositiveReal,
    SpecModel,
    models_by_name,
    to_integer,
)

LogStd = Annotated[float, Strict(), Field(gt=-5, lt=2)]
"""Log standard deviation, strictly inside the bounds at which the Normal distribution clips it, where its gradient would be 0."""
WHOLE = frozenset({
    "step_size", "T_max", "T_0", "T_mult", "frame", "total_iters", "total_steps", "epochs", "steps_per_epoch", "step_size_up",
    "step_size_down", "milestones", "k",
})  # fmt: skip
"""Arguments of schedulers and optimizers that are integers."""


class NamedClass(SpecModel):
    """The name of a torch class, and the arguments of the class. Integers may be written as 1e6."""

    model_config = ConfigDict(extra="allow")
    name: str
    """Name of the class; other keys are its arguments."""

    @model_validator(mode="before")
    @classmethod
    def _whole_numbers(cls, raw: Any) -> Any:
        if not isinstance(raw, dict):
            return raw
        return {
            key: value if key not in WHOLE else [to_integer(item) for item in value] if isinstance(value, list) else to_integer(value)
            for key, value in raw.items()
        }

    @property
    def kwargs(self) -> dict[str, Any]:
        """Return the arguments without the name."""
        return dict(self.model_extra or {})


class OptimSpec(NamedClass):
    """An optimizer of torch.optim, GlobalAdam, GlobalRMSprop, or Lookahead, with its arguments."""

    name: str = "Adam"
    """Name of the optimizer; other keys are its arguments."""
    lr: PositiveReal | None = None
    """Learning rate; default: torch's default for the optimizer (Adam 0.001, RMSprop 0.01, …)."""

    @property
    def rate(self) -> float:
        """Return lr, or the default of the optimizer (of Lookahead: of the inner optimizer)."""
        name = str(self.kwargs.get("optimizer", "Adam")) if self.name == "Lookahead" else self.name
        return LEARNING_RATES.get(name.removeprefix("Global"), 1e-3) if self.lr is None else self.lr


SHAPED = ("Muon", "Adafactor")
"""Optimizers that need each parameter in its own shape, not all parameters as one flat vector."""


class LRSchedulerSpec(NamedClass):
    """A scheduler of torch.optim.lr_scheduler, which steps once per training call; LinearToZero {frame}; LinearToMin {frame, min_factor}.

    A training call learns from one rollout, or takes training_iter × training_batch_iter gradient steps on replayed batches.
    """

    unit: Literal["training_calls", "frames"] | None = None
    """Unit of the schedule's arguments; default: frames for LinearToZero and LinearToMin, training calls for torch's schedulers. With
    meta.distributed, the frames or training calls of all Sessions are counted together."""

    @property
    def counts_calls(self) -> bool:
        """Whether the rate is a function of the number of training calls so far, not of the frame."""
        return self.name not in ("LinearToZero", "LinearToMin") if self.unit is None else self.unit == "training_calls"


class LossSpec(NamedClass):
    """A regression loss of torch.nn for the value function."""

    name: str = "MSELoss"
    """Name of the loss; other keys are its arguments."""


class NetSpec(Component):
    """Keys of every network, and the properties that rules need."""

    recurrent: ClassVar[bool] = False
    """Whether the net has a hidden state, which it carries from step to step."""
    dueling: ClassVar[bool] = False
    """Whether the net splits action values into state value and advantages."""

    images: ClassVar[bool] = False
    """Whether the net has convolutions, so that observations that can be images are treated as images."""

    input: Literal["image", "vector"] | None = None
    """How observations with two or more axes are encoded: as images or flat vectors. Default: as images if the net has convolutions,
    otherwise depending on the env's space (integers from 0 to 255, and bools and floats from 0 to 1, -1 to 1 or 0 to 255 with three axes,
    are images)."""
    shared: Flag = False
    """Share one body between actor and critic."""
    use_same_optim: Flag = True
    """Use one optimizer for actor and critic: actor_optim_spec if it is given, otherwise optim_spec; false: separate optimizers (actor_*
    and critic_* specs). A shared net always has one optimizer."""
    log_std_init: LogStd | None = None
    """Normal, NormalTanh: initial value of the log standard deviation (above -5, below 2) as a state-independent parameter; default: an
    output of the network."""
    actor_init_std: PositiveReal | None = None
    """Gain of the orthogonal initialisation of the actor's output layer."""
    critic_init_std: PositiveReal | None = None
    """Gain of the orthogonal initialisation of the critic's output layer."""
    clip_grad_val: PositiveReal | None = None
    """Clip gradients to this L2 norm. The gradients of actor and critic, and of each of several critics, are clipped separately, each by
    its own norm. A net that actor and critic share is clipped by one norm."""
    loss_spec: LossSpec = LossSpec()
    """Loss of the value function."""
    optim_spec: OptimSpec = OptimSpec()
    """Optimizer."""
    actor_optim_spec: OptimSpec | None = None
    """The actor's optimizer; with use_same_optim or a shared net, also the critic's."""
    critic_optim_spec: OptimSpec | None = None
    """The critic's optimizer, if use_same_optim and shared are false."""
    lr_scheduler_spec: LRSchedulerSpec | None = None
    """Learning rate schedule: of frames (LinearToZero, LinearToMin) or of training calls (torch's schedulers); default: constant."""
    actor_lr_scheduler_spec: LRSchedulerSpec | None = None
    """The actor's learning rate schedule; with use_same_optim or a shared net, also the critic's."""
    critic_lr_scheduler_spec: LRSchedulerSpec | None = None
    """The critic's learning rate schedule, if use_same_optim and shared are false."""
    update_type: Literal["replace", "polyak"] = "replace"
    """How target networks are updated: replace copies the network every update_frequency frames; polyak moves the target network towards
    the network by polyak_coef, in SoftActorCritic, TD3 and DDPG after each gradient step that updates the policy, in the DQN family after
    each vector step, and in IQL after each gradient step."""
    update_frequency: Positive = 1
    """replace: frames between updates of target networks. SoftActorCritic, TD3 and DDPG make the copies after the gradient steps of the
    next training."""
    polyak_coef: Fraction = 0.005
    """polyak: weight of the network in each update of its target network."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Type in which the matrix products of hidden layers are computed, forward and backward; RecurrentNet: float32 only. "bfloat16":
    inputs, weights and products are rounded to bfloat16. Weights, gradients, norms, losses and optimizers remain float32, and so do output
    layers, the tails above a shared HydraMLPNet, and activations, except inside nets with several heads, TorchArc graphs that branch,
    encoders of a Dict's images and your own nets, where they are bfloat16 too. Small nets then learn and act with torch instead of numpy;
    an agent that is loaded from a run (enjoy, export) acts in float32. A processor without bfloat16 instructions (AVX-512 BF16 or AMX)
    takes about ten times as long as with float32."""
    gpu: Flag | Literal["auto"] = "auto"
    """Compute on a CUDA device. "auto": use one if the machine has one. true: if the machine has none, compute on the CPU, with a
    notice."""
    cuda_id: Count | None = None
    """Index of the CUDA device; default: Sessions are spread over all devices."""
    tf32: Flag = False
    """On a CUDA device: round the inputs of matrix products and convolutions to 10 bits of mantissa (TensorFloat-32), which is faster on
    Ampere and later; false: full float32 precision, also in convolutions. true is an error if the device is the CPU."""


class LayersSpec(NetSpec):
    """Keys of networks with hidden layers."""

    hid_layers_activation: str = "relu"
    """Activation of hidden layers: a class of torch.nn, in upper or lower case (relu, tanh, selu, SiLU, …)."""
    out_layer_activation: str | None = None
    """Activation of the output layer; default: none."""
    init_fn: str | None = None
    """Weight initialisation of all layers, output layers and GRUs included: a function of torch.nn.init (orthogonal_, xavier_uniform_, …)
    with torch's gain for hid_layers_activation (1 if torch has none); biases are 0. Default: torch's default, which LSTM and RNN layers
    always use."""
    layer_norm: Flag = False
    """Apply LayerNorm before each hidden activation."""
    batch_norm: Flag = False
    """Apply BatchNorm before each hidden activation."""
    noisy: Flag = False
    """For the DQN family and PQN: add noise with a learned scale to the weights of all linear layers (arXiv:1706.10295). New noise is drawn
    for each vector step and each gradient step. The default of explore_var_spec is then ε = 0; evaluation, enjoy and export act without
    noise."""
    noisy_sigma: PositiveReal = 0.5
    """noisy: initial scale σ₀ of the noise; each weight has the standard deviation σ₀ / √inputs."""


class MLPNetSpec(LayersSpec):
    """Fully connected layers."""

    name: Literal["MLPNet"]
    hid_layers: list[Positive] = [64, 64]
    """Units of each hidden layer; default: two layers of 64, with tanh unless hid_layers_activation is given."""
    dropout: Annotated[float, Strict(), Field(ge=0, lt=1)] = 0.0
    """Fraction of the units of each hidden layer that are set to 0 at random, before layer_norm, in the critics of SoftActorCritic and
    CrossQ and in their target nets (DroQ, arXiv:2110.02034: 0.01 with layer_norm)."""

    @model_validator(mode="before")
    @classmethod
    def _default_layers(cls, keys: Any) -> Any:
        """Complete a net without hid_layers, whose default activation differs from that of a net with hid_layers."""
        if isinstance(keys, dict) and keys.get("hid_layers") is None and keys.get("hid_layers_activation") is None:
            return {**keys, "hid_layers_activation": "tanh"}
        return keys


class DuelingMLPNetSpec(MLPNetSpec):
    """Fully connected layers, then separate streams for state value and advantages (arXiv:1511.06581)."""

    dueling = True

    name: Literal["DuelingMLPNet"]  # type: ignore[assignment]  # narrower: the tag of the union


class SimbaNetSpec(NetSpec):
    """SimBa (arXiv:2410.09754): a linear layer, residual blocks with LayerNorm, and a final LayerNorm."""

    name: Literal["SimbaNet"]
    width: Positive = 128
    """Units of the residual stream; the hidden layer of each block has four times as many."""
    blocks: Positive = 1
    """Number of residual blocks."""
    actor_init_std: PositiveReal | None = 1.0
    """Gain of the orthogonal initialisation of the actor's output layer."""
    critic_init_std: PositiveReal | None = 1.0
    """Gain of the orthogonal initialisation of the critic's output layer."""


class SimbaV2NetSpec(NetSpec):
    """SimbaV2 (arXiv:2502.15280): SimBa on a hypersphere. Features and the weights of each unit are scaled to norm 1."""

    name: Literal["SimbaV2Net"]
    width: Positive = 128
    """Units of the residual stream; the hidden layer of each block has four times as many."""
    blocks: Positive = 1
    """Number of residual blocks."""


class HydraMLPNetSpec(LayersSpec):
    """Fully connected layers: several heads on the observation, one body, and a tail for each output."""

    name: Literal["HydraMLPNet"]
    hid_layers: Annotated[list[Any], Field(min_length=3, max_length=3)]
    """[heads, body, tails]: heads and tails are lists of lists of units ([[32], [32]]; tails may be []), the body a list of units."""


class ConvNetSpec(LayersSpec):
    """Convolutions, then fully connected layers."""

    images = True

    name: Literal["ConvNet"]
    conv_hid_layers: (
        Annotated[list[Annotated[list[Count | list[Count]], Field(min_length=2, max_length=5)]], Field(min_length=1)] | None
    ) = None
    """Layers [out_channels, kernel, stride, padding, dilation]; the last three are optional. Default: the layers of Mnih et al. 2015, [[32,
    8, 4], [64, 4, 2], [64, 3, 1]]; for images below 36 pixels, which are too small for them, [[32, 3, 2, 1], [64, 3, 2, 1], [64, 3, 1, 1]].
    Each image of a Dict or Tuple has its own convolutional layers; their outputs and all other entries enter the fully connected layers."""
    fc_hid_layers: list[Positive] = [512]
    """Units of each fully connected hidden layer."""
    normalize: Flag = False
    """Divide images by the upper bound of their space (255 for most)."""
    batch_norm: Flag | Literal["before"] = True  # type: ignore[assignment]  # wider than in other nets
    """true: apply BatchNorm after the activation of each convolution except the first; fully connected layers have no BatchNorm. "before":
    apply it before the activation of every hidden layer."""


class DuelingConvNetSpec(ConvNetSpec):
    """Convolutions and fully connected layers, then separate streams for state value and advantages (arXiv:1511.06581)."""

    dueling = True

    name: Literal["DuelingConvNet"]  # type: ignore[assignment]  # narrower: the tag of the union
    batch_norm: Flag | Literal["before"] = False
    """As in ConvNet, where it is true by default."""


class RecurrentNetSpec(LayersSpec):
    """Fully connected layers, then recurrent layers with a hidden state that is reset at episode ends."""

    recurrent = True

    name: Literal["RecurrentNet"]
    fc_hid_layers: list[Positive] = []
    """Units of each layer before the recurrent layers."""
    cell_type: Literal["RNN", "LSTM", "GRU"] = "GRU"
    """Type of recurrent layer."""
    rnn_hidden_size: Positive = 64
    """Units of the hidden state."""
    rnn_num_layers: Positive = 1
    """Number of recurrent layers."""
    bidirectional: Literal[False] = False
    """Must be false: future observations are unknown when acting."""
    seq_len: Positive = 16
    """Steps of truncated backpropagation through time; rollouts are split into sequences of this length with stored hidden states."""


class TorchArcNetSpec(NetSpec):
    """A network described as a graph of torch.nn layers."""

    name: Literal["TorchArcNet"]
    arc: dict[str, Any] | None = None
    """{modules, graph} of the body; output layers are added. Available are the layers of torch.nn, including lazy ones, and BatchRenorm1d
    and LazyBatchRenorm1d {eps, momentum, r_max, d_max, warmup_steps}, WeightNormLinear and LazyWeightNormLinear, NormalTanh."""
    arc_file: str | None = None
    """YAML or JSON file with the arc, relative to the spec file or to the working directory; the saved spec contains the arc itself."""
    actor_arc: dict[str, Any] | None = None
    """The actor's body, if different from the critic's."""
    critic_arc: dict[str, Any] | None = None
    """The critic's body, if different from the actor's."""
    init_fn: str | None = None
    """Weight initialisation of Linear, Conv and GRU layers and of output layers: a function of torch.nn.init with torch's gain for
    hid_layers_activation; biases are 0. Default: torch's default, which other layers always use."""
    hid_layers_activation: str = "relu"
    """Activation whose gain init_fn uses: identity, sigmoid (1), tanh (5/3), relu, leaky_relu (√2) or selu (3/4). The activations
    themselves are in the arc."""
    out_layer_activation: str | None = None
    """Activation of the actor's output layer; default: none."""
    normalize: Flag = False
    """Divide images by the upper bound of their space (255 for most)."""


Net = Annotated[
    MLPNetSpec
    | DuelingMLPNetSpec
    | SimbaNetSpec
    | SimbaV2NetSpec
    | HydraMLPNetSpec
    | ConvNetSpec
    | DuelingConvNetSpec
    | RecurrentNetSpec
    | TorchArcNetSpec,
    Field(discriminator="name"),
    Extensible(NetSpec),
]
NETS: dict[str, type[NetSpec]] = models_by_name(Net)
"""Name → model."""


_FILE: dict[str, Any] = json.loads(Path(__file__).with_name("torch_names.json").read_text(encoding="utf-8"))
NAMES: dict[str, dict[str, str]] = {table: entries for table, entries in _FILE.items() if table != "_learning_rates"}
"""Table → names in torch → their arguments in one string, required ones marked with !."""
LEARNING_RATES: dict[str, float] = _FILE["_learning_rates"]
"""Optimizer → its default learning rate."""
