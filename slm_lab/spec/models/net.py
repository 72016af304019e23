"""Models of the section agent.net of a spec: networks, optimizers and learning rate schedules."""

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
"""Log standard deviation between −5 and 2. The Normal distribution clips log standard deviations to these bounds, at which the gradient is
0."""
INTEGER_ARGUMENTS = frozenset({
    "step_size", "T_max", "T_0", "T_mult", "frame", "total_iters", "total_steps", "epochs", "steps_per_epoch", "step_size_up",
    "step_size_down", "milestones", "k",
})  # fmt: skip
"""Arguments of schedulers and optimizers that are integers."""


class TorchClassSpec(SpecModel):
    """The name of a torch class, and the arguments of the class. An integer argument may be written as 1e6."""

    model_config = ConfigDict(extra="allow")
    name: str
    """Name of the class. All other keys are arguments of the class."""

    @model_validator(mode="before")
    @classmethod
    def _convert_integers(cls, raw: Any) -> Any:
        if not isinstance(raw, dict):
            return raw

        def convert(value: Any) -> Any:
            return [to_integer(item) for item in value] if isinstance(value, list) else to_integer(value)

        return {key: convert(value) if key in INTEGER_ARGUMENTS else value for key, value in raw.items()}

    @property
    def kwargs(self) -> dict[str, Any]:
        """Return the arguments of the class, which are all keys except `name`."""
        return dict(self.model_extra or {})


class OptimSpec(TorchClassSpec):
    """An optimizer of torch.optim, GlobalAdam, GlobalRMSprop, or Lookahead, with its arguments."""

    name: str = "Adam"
    """Name of the optimizer. All other keys are arguments of the optimizer."""
    lr: PositiveReal | None = None
    """Learning rate, by default torch's default for the optimizer (Adam 0.001, RMSprop 0.01, …)."""

    @property
    def learning_rate(self) -> float:
        """Return the learning rate: `lr` or, if `lr` is None, the default of the optimizer (for Lookahead, of the optimizer that it
        wraps)."""
        name = str(self.kwargs.get("optimizer", "Adam")) if self.name == "Lookahead" else self.name
        return LEARNING_RATES.get(name.removeprefix("Global"), 1e-3) if self.lr is None else self.lr


SHAPED = ("Muon", "Adafactor")
"""Optimizers to which each parameter tensor is passed in its own shape. All other optimizers receive one flat vector of all parameters."""


class LRSchedulerSpec(TorchClassSpec):
    """A learning rate schedule: a scheduler of torch.optim.lr_scheduler, LinearToZero {frame}, or LinearToMin {frame, min_factor}.

    LinearToZero decreases the learning rate linearly to 0 at `frame`. LinearToMin decreases the learning rate linearly until
    `frame`, where the learning rate is min_factor (default 0.1) times the initial rate. After `frame`, the learning rate is constant.

    By default, a scheduler of torch makes one step per training call. A training call learns from one rollout, or makes training_iter ×
    training_batch_iter gradient steps on replayed batches.
    """

    unit: Literal["training_calls", "frames"] | None = None
    """Unit of the arguments of the schedule. The default unit is frames for LinearToZero and LinearToMin, and training calls for torch's
    schedulers. With meta.distributed, the frames or training calls of all Sessions are counted together."""

    @property
    def counts_training_calls(self) -> bool:
        """Whether the learning rate is a function of the number of training calls, and not of the number of frames."""
        return self.name not in ("LinearToZero", "LinearToMin") if self.unit is None else self.unit == "training_calls"


class LossSpec(TorchClassSpec):
    """A regression loss of torch.nn for the value function."""

    name: str = "MSELoss"
    """Name of the loss. All other keys are arguments of the loss."""


class NetSpec(Component):
    """Base class of the sections agent.net and agent.critic_net: the keys of every net, and class attributes that describe a kind of
    net."""

    recurrent: ClassVar[bool] = False
    """Whether the net has a hidden state that persists from step to step."""
    dueling: ClassVar[bool] = False
    """Whether the net splits action values into state value and advantages."""

    images: ClassVar[bool] = False
    """Whether the net has convolutions, so that observations that can be images are treated as images."""

    input: Literal["image", "vector"] | None = None
    """How observations with two or more axes are encoded: as images or as flat vectors. By default, nets with convolutions encode these
    observations as images. For other nets, the observation space determines the encoding: images are integers from 0 to 255, and arrays of
    bools or floats that have three axes and values from 0 to 1, -1 to 1 or 0 to 255."""
    shared: Flag = False
    """Whether actor and critic share the hidden layers (body) of the network."""
    use_same_optim: Flag = True
    """Whether actor and critic have one optimizer, which is actor_optim_spec if the spec gives this key, otherwise optim_spec. With false,
    actor and critic have separate optimizers (actor_optim_spec, critic_optim_spec). The default is false if the spec gives optimizers or
    schedules of the actor or the critic. A net that actor and critic share always has one optimizer."""
    log_std_init: LogStd | None = None
    """Initial value (above -5, below 2) of the log standard deviation of Normal and NormalTanh. With log_std_init, the log standard
    deviation is a parameter that does not depend on the state. By default, the log standard deviation is an output of the network."""
    actor_init_std: PositiveReal | None = None
    """Gain of the orthogonal initialisation of the actor's output layer."""
    critic_init_std: PositiveReal | None = None
    """Gain of the orthogonal initialisation of the critic's output layer."""
    clip_grad_val: PositiveReal | None = None
    """Maximum L2 norm to which gradients are clipped. The gradients of the actor and of each critic are clipped separately, each by its own
    norm. The gradients of a net that actor and critic share are clipped by their common norm."""
    loss_spec: LossSpec = LossSpec()
    """Loss function with which the value function is learned."""
    optim_spec: OptimSpec = OptimSpec()
    """Optimizer of the networks, unless actor_optim_spec or critic_optim_spec replaces it."""
    actor_optim_spec: OptimSpec | None = None
    """Optimizer of the actor or, with use_same_optim or a shared net, of actor and critic."""
    critic_optim_spec: OptimSpec | None = None
    """Optimizer of the critic if use_same_optim and shared are false."""
    lr_scheduler_spec: LRSchedulerSpec | None = None
    """Learning rate schedule over frames (LinearToZero, LinearToMin) or over training calls (torch's schedulers). By default, the learning
    rate is constant."""
    actor_lr_scheduler_spec: LRSchedulerSpec | None = None
    """Learning rate schedule of the actor or, with use_same_optim or a shared net, of actor and critic."""
    critic_lr_scheduler_spec: LRSchedulerSpec | None = None
    """Learning rate schedule of the critic if use_same_optim and shared are false."""
    update_type: Literal["replace", "polyak"] = "replace"
    """How target networks are updated. With "replace", the network is copied every update_frequency frames. With "polyak", the target
    network moves towards the network by polyak_coef: in SoftActorCritic, TD3 and DDPG after each gradient step that updates the policy, in
    the DQN family after each vector step, and in IQL after each gradient step."""
    update_frequency: Positive = 1
    """Number of frames between updates of target networks with update_type "replace". SoftActorCritic, TD3 and DDPG copy the networks in
    the first training after each multiple of this number. In that training, they copy after each gradient step that updates the policy."""
    polyak_coef: Fraction = 0.005
    """Weight of the network in each update of its target network with update_type "polyak"."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Type in which the matrix products of hidden layers are computed, forward and backward. RecurrentNet supports only "float32". With
    "bfloat16", inputs, weights and products are rounded to bfloat16 in the matrix products. The stored weights, gradients, norms, losses,
    optimizers, output layers and the tails above a shared HydraMLPNet remain float32. Activations also remain float32, except inside nets
    with several heads, TorchArc graphs that branch, encoders of the images of a Dict observation, and user-defined nets. With "bfloat16",
    small nets learn and act with torch instead of numpy. An agent that is loaded from a run (enjoy, export) acts in float32. On a processor
    without bfloat16 instructions (AVX-512 BF16 or AMX), training with "bfloat16" takes about ten times as long as with "float32"."""
    gpu: Flag | Literal["auto"] = "auto"
    """Whether to compute on a CUDA device. With "auto", a CUDA device is used if the machine has one. With true, if the machine has no CUDA
    device, the CPU is used and a notice is printed."""
    cuda_id: Count | None = None
    """Index of the CUDA device. By default, Sessions are distributed over all CUDA devices."""
    tf32: Flag = False
    """Whether to round the inputs of matrix products and convolutions on a CUDA device to 10 bits of mantissa (TensorFloat-32), which is
    faster on Ampere and later GPUs. With false, matrix products and convolutions have full float32 precision. tf32=true is an error if the
    device is the CPU."""


class LayersSpec(NetSpec):
    """Base class of the sections of nets with hidden layers."""

    hid_layers_activation: str = "relu"
    """Activation of hidden layers, the name of a class of torch.nn in upper or lower case (relu, tanh, selu, SiLU, …)."""
    out_layer_activation: str | None = None
    """Activation of the output layer. By default, the output layer has no activation."""
    init_fn: str | None = None
    """Function of torch.nn.init (orthogonal_, xavier_uniform_, …) that initialises the weights of all layers, including output layers and
    GRUs, with torch's gain for hid_layers_activation (or 1 if torch has no gain for this activation). With init_fn, biases are initialised
    to 0. By default, layers have torch's default initialisation, which LSTM and RNN layers always have."""
    layer_norm: Flag = False
    """Whether to apply LayerNorm before each hidden activation."""
    batch_norm: Flag = False
    """Whether to apply BatchNorm before each hidden activation."""
    noisy: Flag = False
    """Whether to add noise with a learned scale to the weights of all linear layers (arXiv:1706.10295), for the DQN family and PQN. New
    noise is drawn for each vector step and each gradient step. With noisy=true, the default of explore_var_spec is ε = 0. Evaluation, enjoy
    and export act without noise."""
    noisy_sigma: PositiveReal = 0.5
    """Initial scale σ₀ of the noise of a noisy net. The noise of each weight has the standard deviation σ₀ / √(number of inputs)."""


class MLPNetSpec(LayersSpec):
    """Network of fully connected layers."""

    name: Literal["MLPNet"]
    hid_layers: list[Positive] = [64, 64]
    """Number of units of each hidden layer. By default, the net has two layers of 64 units, with tanh unless the spec gives
    hid_layers_activation."""
    dropout: Annotated[float, Strict(), Field(ge=0, lt=1)] = 0.0
    """Fraction of the units of each hidden layer that are set to 0 at random, before layer_norm, in the critics of
    algorithms with separate critics and in their target nets (DroQ, arXiv:2110.02034: 0.01 with layer_norm)."""

    @model_validator(mode="before")
    @classmethod
    def _set_default_activation(cls, keys: Any) -> Any:
        """Set the activation to tanh for a net whose spec gives neither hid_layers nor hid_layers_activation."""
        if isinstance(keys, dict) and keys.get("hid_layers") is None and keys.get("hid_layers_activation") is None:
            return {**keys, "hid_layers_activation": "tanh"}
        return keys


class DuelingMLPNetSpec(MLPNetSpec):
    """Network of fully connected layers, followed by separate streams for state value and advantages (arXiv:1511.06581)."""

    dueling = True

    name: Literal["DuelingMLPNet"]  # type: ignore[assignment]  # narrower: the tag of the union


class SimbaNetSpec(NetSpec):
    """SimBa (arXiv:2410.09754): a linear layer, residual blocks with LayerNorm, and a final LayerNorm."""

    name: Literal["SimbaNet"]
    width: Positive = 128
    """Number of units of the residual stream. The hidden layer of each residual block has four times this number of units."""
    blocks: Positive = 1
    """Number of residual blocks."""
    actor_init_std: PositiveReal | None = 1.0
    """Gain of the orthogonal initialisation of the actor's output layer."""
    critic_init_std: PositiveReal | None = 1.0
    """Gain of the orthogonal initialisation of the critic's output layer."""


class SimbaV2NetSpec(NetSpec):
    """SimbaV2 (arXiv:2502.15280), SimBa on a hypersphere: the features, and the weights of each unit, are scaled to norm 1."""

    name: Literal["SimbaV2Net"]
    width: Positive = 128
    """Number of units of the residual stream. The hidden layer of each residual block has four times this number of units."""
    blocks: Positive = 1
    """Number of residual blocks."""


class HydraMLPNetSpec(LayersSpec):
    """Network of fully connected layers with several heads that read the observation, one common body, and a tail for each output."""

    name: Literal["HydraMLPNet"]
    hid_layers: Annotated[list[Any], Field(min_length=3, max_length=3, examples=[[[[32], [32]], [64], []]])]
    """Layer sizes in the form [heads, body, tails]. `heads` and `tails` contain a list of layer sizes for each head or tail, such as [[32],
    [32]] (`tails` may be []), and `body` is a list of layer sizes."""


class ConvNetSpec(LayersSpec):
    """Network of convolutions, followed by fully connected layers."""

    images = True

    name: Literal["ConvNet"]
    conv_hid_layers: (
        Annotated[list[Annotated[list[Count | list[Count]], Field(min_length=2, max_length=5)]], Field(min_length=1)] | None
    ) = None
    """List of convolutional layers [out_channels, kernel, stride, padding, dilation]. Stride, padding and dilation are optional. The
    default layers are those of Mnih et al. (2015), [[32, 8, 4], [64, 4, 2], [64, 3, 1]] or, for images smaller than 36 pixels, which are
    too small for these layers, [[32, 3, 2, 1], [64, 3, 2, 1], [64, 3, 1, 1]]. Each image of a Dict or Tuple has its own convolutional
    layers. The outputs of all convolutional layers and all other entries of the observation enter the fully connected layers."""
    fc_hid_layers: list[Positive] = [512]
    """Number of units of each fully connected hidden layer."""
    normalize: Flag = False
    """Whether to divide images by the upper bound of their space, which usually is 255."""
    batch_norm: Flag | Literal["before"] = True  # type: ignore[assignment]  # wider than in other nets
    """Where to apply BatchNorm. With true, BatchNorm follows the activation of each convolution except the first convolution, and is not
    applied in fully connected layers. With "before", BatchNorm precedes the activation of every hidden layer."""


class DuelingConvNetSpec(ConvNetSpec):
    """Convolutions and fully connected layers, followed by separate streams for state value and advantages (arXiv:1511.06581)."""

    dueling = True

    name: Literal["DuelingConvNet"]  # type: ignore[assignment]  # narrower: the tag of the union
    batch_norm: Flag | Literal["before"] = False
    """Where to apply BatchNorm, as in ConvNet (false, true or "before"). In DuelingConvNet the default is false, and in ConvNet it is
    true."""


class RecurrentNetSpec(LayersSpec):
    """Network of fully connected layers, followed by recurrent layers with a hidden state that is reset at the end of an episode."""

    recurrent = True

    name: Literal["RecurrentNet"]
    fc_hid_layers: list[Positive] = []
    """Number of units of each fully connected layer before the recurrent layers."""
    cell_type: Literal["RNN", "LSTM", "GRU"] = "GRU"
    """Type of the recurrent layers."""
    rnn_hidden_size: Positive = 64
    """Number of units of the hidden state."""
    rnn_num_layers: Positive = 1
    """Number of recurrent layers."""
    bidirectional: Literal[False] = False
    """Key of torch's recurrent layers that must be false, because future observations are unknown when the agent acts."""
    seq_len: Positive = 16
    """Number of steps of truncated backpropagation through time. Rollouts are split into sequences of seq_len steps, whose initial hidden
    states are stored."""


class TorchArcNetSpec(NetSpec):
    """A network described as a graph of torch.nn layers."""

    name: Literal["TorchArcNet"]
    arc: dict[str, Any] | None = None
    """Architecture {modules, graph} of the body of the net, to which output layers are added. The modules of an architecture can be layers
    of torch.nn (including lazy layers), BatchRenorm1d and LazyBatchRenorm1d {eps, momentum, r_max, d_max, warmup_steps}, WeightNormLinear,
    LazyWeightNormLinear, and NormalTanh."""
    arc_file: str | None = None
    """Path of a YAML or JSON file with the value of `arc`, relative to the spec file or to the working directory. The spec that a run saves
    contains the content of the file."""
    actor_arc: dict[str, Any] | None = None
    """Architecture of the actor's body if the critic's body has another architecture."""
    critic_arc: dict[str, Any] | None = None
    """Architecture of the critic's body if the actor's body has another architecture."""
    init_fn: str | None = None
    """Function of torch.nn.init that initialises the weights of Linear, Conv and GRU layers and of output layers, with torch's gain for
    hid_layers_activation. With init_fn, biases are initialised to 0. By default, layers have torch's default initialisation, which layers
    of other types always have."""
    hid_layers_activation: str = "relu"
    """Activation whose gain init_fn uses: identity, sigmoid (1), tanh (5/3), relu, leaky_relu (√2) or selu (3/4). The activations of the
    net are modules of `arc`. hid_layers_activation does not change them."""
    out_layer_activation: str | None = None
    """Activation of the actor's output layer. By default, the output layer has no activation."""
    normalize: Flag = False
    """Whether to divide images by the upper bound of their space, which usually is 255."""


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
"""Maps the names of nets to their models."""


_FILE: dict[str, Any] = json.loads(Path(__file__).with_name("torch_names.json").read_text(encoding="utf-8"))
NAMES: dict[str, dict[str, str]] = {table: entries for table, entries in _FILE.items() if table != "_learning_rates"}
"""Maps each kind of torch class (such as "_optimizers") to a dict from names of classes to their arguments. The arguments are in one
string, in which required arguments end with `!`."""
LEARNING_RATES: dict[str, float] = _FILE["_learning_rates"]
"""Maps the names of optimizers to their default learning rates."""
