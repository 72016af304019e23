"""agent.net: the networks, their optimizers and learning rate schedules."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import ConfigDict, Field

from slm_lab.spec.base import Component, Count, Flag, Fraction, Positive, PositiveReal, Real, SpecModel


class _Named(SpecModel):
    """A name of something in torch, and its arguments."""

    model_config = ConfigDict(extra="allow")
    name: str

    @property
    def kwargs(self) -> dict[str, Any]:
        """The arguments beside the name."""
        return dict(self.model_extra or {})


class OptimSpec(_Named):
    """An optimizer of torch.optim, GlobalAdam, GlobalRMSprop, or Lookahead, with its arguments."""

    name: str = "Adam"
    lr: PositiveReal = 1e-3
    """Learning rate."""


class LRSchedulerSpec(_Named):
    """A scheduler of torch.optim.lr_scheduler with its arguments in frames; LinearToZero {frame}; LinearToMin {frame, min_factor}."""


class LossSpec(_Named):
    """A regression loss of torch.nn for the value function."""

    name: str = "MSELoss"


class NetSpec(Component):
    """Keys of every net, and what rules need to know of it."""

    recurrent: ClassVar[bool] = False
    """Carries a hidden state over steps."""
    dueling: ClassVar[bool] = False
    """Splits action values into a state's value and advantages."""

    shared: Flag = False
    """Actor and critic share one body."""
    use_same_optim: Flag = True
    """One optimizer (optim_spec) and one gradient norm for actor and critic; else actor_* and critic_* specs each their own."""
    log_std_init: Real | None = None
    """Normal: the log standard deviation is a free parameter that starts here; absent: it is an output of the net."""
    actor_init_std: PositiveReal | None = None
    """Gain of the orthogonal initialisation of the actor's output layer."""
    critic_init_std: PositiveReal | None = None
    """Gain of the orthogonal initialisation of the critic's output layer."""
    clip_grad_val: PositiveReal | None = None
    """Largest L2 norm of a gradient; longer ones are scaled down."""
    loss_spec: LossSpec = LossSpec()
    """Loss of the value function."""
    optim_spec: OptimSpec = OptimSpec()
    """Optimizer."""
    actor_optim_spec: OptimSpec | None = None
    """The actor's optimizer, where use_same_optim is false."""
    critic_optim_spec: OptimSpec | None = None
    """The critic's optimizer, where use_same_optim is false."""
    lr_scheduler_spec: LRSchedulerSpec | None = None
    """Learning rate over frames; absent: constant."""
    actor_lr_scheduler_spec: LRSchedulerSpec | None = None
    """The actor's, where use_same_optim is false."""
    critic_lr_scheduler_spec: LRSchedulerSpec | None = None
    """The critic's, where use_same_optim is false."""
    update_type: Literal["replace", "polyak"] = "polyak"
    """How a target net follows: a copy of the net now and then, or an average that moves towards it."""
    update_frequency: Positive = 1
    """Frames between two updates of the target net."""
    polyak_coef: Fraction = 0.005
    """polyak: weight of the net in each update of the target net."""
    gpu: Flag | Literal["auto"] = False
    """Compute on cuda; "auto": where there is one."""
    cuda_id: Count | None = None
    """Which cuda device; absent: Sessions take turns over all of them."""


class _LayersSpec(NetSpec):
    hid_layers_activation: str = "relu"
    """Activation after each hidden layer: a torch.nn activation, in any case (relu, tanh, selu, SiLU, …)."""
    out_layer_activation: str | None = None
    """Activation of the output layer; absent: none."""
    init_fn: str | None = None
    """Initialisation of weights: a function of torch.nn.init (orthogonal_, xavier_uniform_, …); absent: torch's default."""
    layer_norm: Flag = False
    """LayerNorm before each hidden activation."""
    batch_norm: Flag = False
    """BatchNorm before each hidden activation."""


class MLPNetSpec(_LayersSpec):
    """Fully connected layers."""

    name: Literal["MLPNet"]
    hid_layers: list[Positive] = [64, 64]
    """Units of each hidden layer."""


class DuelingMLPNetSpec(MLPNetSpec):
    """Fully connected layers, then a stream for the state's value and one for the advantages of actions (arXiv:1511.06581)."""

    dueling = True

    name: Literal["DuelingMLPNet"]  # type: ignore[assignment]  # narrower: the tag of the union


class HydraMLPNetSpec(_LayersSpec):
    """Fully connected layers with several heads on the observation, a common body, and a tail for each output."""

    name: Literal["HydraMLPNet"]
    hid_layers: Annotated[list[Any], Field(min_length=3, max_length=3)]
    """[heads, body, tails]: heads and tails are lists of lists of units ([[32], [32]]; tails may be []), the body a list of units."""


class ConvNetSpec(_LayersSpec):
    """Convolutions, then fully connected layers."""

    name: Literal["ConvNet"]
    conv_hid_layers: Annotated[list[Annotated[list[Count | list[Count]], Field(min_length=2, max_length=5)]], Field(min_length=1)]
    """Each [out_channels, kernel, stride, padding, dilation]; the last three may be left out."""
    fc_hid_layers: list[Positive] = [512]
    """Units of each fully connected hidden layer."""
    normalize: Flag = True
    """Divide uint8 observations by 255."""


class DuelingConvNetSpec(ConvNetSpec):
    """Convolutions and fully connected layers, then a stream for the state's value and one for the advantages (arXiv:1511.06581)."""

    dueling = True

    name: Literal["DuelingConvNet"]  # type: ignore[assignment]  # narrower: the tag of the union


class RecurrentNetSpec(_LayersSpec):
    """Fully connected layers, then a recurrent cell whose hidden state is carried over steps and reset at episode ends."""

    recurrent = True

    name: Literal["RecurrentNet"]
    fc_hid_layers: list[Positive] = []
    """Units of each layer before the cell."""
    cell_type: Literal["RNN", "LSTM", "GRU"] = "GRU"
    """Kind of cell."""
    rnn_hidden_size: Positive = 64
    """Units of the hidden state."""
    rnn_num_layers: Positive = 1
    """Cells stacked."""
    bidirectional: Literal[False] = False
    """A net that acts cannot see the future: only false."""
    seq_len: Positive = 16
    """Steps over which gradients flow; rollouts are cut into pieces of this length, each with its hidden state."""


class TorchArcNetSpec(NetSpec):
    """A net described as a graph of torch.nn layers."""

    name: Literal["TorchArcNet"]
    arc: dict[str, Any] | None = None
    """{modules, graph} of the body; output layers are added to it."""
    actor_arc: dict[str, Any] | None = None
    """The actor's body, where it differs from the critic's."""
    critic_arc: dict[str, Any] | None = None
    """The critic's body, where it differs from the actor's."""
    init_fn: str | None = None
    """Initialisation of weights: a function of torch.nn.init; absent: torch's default."""
    normalize: Flag = True
    """Divide uint8 observations by 255."""


Net = Annotated[
    MLPNetSpec | DuelingMLPNetSpec | HydraMLPNetSpec | ConvNetSpec | DuelingConvNetSpec | RecurrentNetSpec | TorchArcNetSpec,
    Field(discriminator="name"),
]
