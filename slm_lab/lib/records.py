"""Data classes that envs, agents and experiments exchange.

The suffix of an array's name gives the array's axes: T = time, N = envs, B = batch, K = a subset.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NamedTuple

import numpy as np

ActionKind = Literal["discrete", "continuous", "multi_discrete", "multi_binary", "hybrid"]
Dtype = Literal["float32", "uint8"]
InputKind = Literal["image", "vector"]
Use = Literal["all", "critic", "mask"]
"""Use of one entry of a Dict observation. An entry with the use "all" is an input of actor and critic, an entry with the use "critic" is an
input of the critic only, and the entry with the use "mask" is the action mask."""
Channels = Literal["first", "last"]


class Ambiguity(NamedTuple):
    """A property of observations that the env's observation space does not determine, such as the order of image axes."""

    key: str
    """Spec key that determines the property."""
    message: str


@dataclass(frozen=True)
class ActionSpace:
    """Space of the actions of one env, as the agent chooses and stores actions.

    discrete: an action is one integer in [0, nvec[0]), and the actions of N envs are int64 [N]. multi_discrete: component i of an action is
    an integer in [0, nvec[i]), and the actions of N envs are int64 [N, len(nvec)]. multi_binary: each component of an action is 0 or 1, and
    the actions of N envs are int64 [N, dim]. continuous: the actions of N envs are float32 [N, dim], where dim is the number of elements of
    the Box. If both bounds of a component are finite, the env scales [-1, 1] to these bounds. The env clips continuous components to finite
    bounds. hybrid: an action has components of several kinds, and the actions of N envs are float32 [N, dim], with the multi_discrete
    components first, then the multi_binary components, then the continuous components.
    """

    kind: ActionKind
    nvec: tuple[int, ...] = ()
    """Number of choices of each discrete component: (n,) for a discrete space, one number per discrete component for a multi_discrete or
    hybrid space, () for other spaces."""
    dim: int = 1
    """Number of components of one action, which is 1 for a discrete space."""
    bounded: bool = True
    """For continuous and hybrid spaces, whether every continuous component has finite bounds."""
    bits: int = 0
    """For hybrid spaces, the number of binary components."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of one action in the form in which the agent stores actions."""
        return () if self.kind == "discrete" else (self.dim,)

    @property
    def dtype(self) -> type[np.float32 | np.int64]:
        """dtype of the arrays in which the agent stores actions."""
        return np.float32 if self.kind in ("continuous", "hybrid") else np.int64

    @property
    def parts(self) -> tuple[ActionSpace, ...]:
        """The multi_discrete, multi_binary and continuous parts of a hybrid space as separate spaces, in this order.

        For a space of another kind, `parts` contains only the space itself.
        """
        if self.kind != "hybrid":
            return (self,)
        choices = ActionSpace("multi_discrete", self.nvec, len(self.nvec))
        rest = ActionSpace("continuous", dim=self.dim - choices.dim - self.bits, bounded=self.bounded)
        return tuple(part for part in (choices, ActionSpace("multi_binary", dim=self.bits), rest) if part.dim)


def _divisor(dtype: Dtype, high: float | None) -> float:
    return (255.0 if dtype == "uint8" else 1.0) if high is None else high


@dataclass(frozen=True)
class ObservationPart:
    """One entry of a packed observation, an array that is stored in the bytes [begin, end) of the observation."""

    name: str
    """Key of the entry in the Dict space, or "0", "1", … in a Tuple space. The name of a nested entry contains the keys of its parents, as
    in "hand/camera"."""
    shape: tuple[int, ...]
    """Shape of the entry, which is [C, H, W] for an image and [n] for a vector."""
    dtype: Dtype
    begin: int
    end: int
    high: float | None = None
    """Upper bound of the values of an image, see `ObservationSpace.high`."""
    text: str = field(default="", compare=False)
    """Description of the entry for messages, see `ObservationSpace.text`."""
    use: Use = "all"

    @property
    def divisor(self) -> float:
        """Number by which a net divides the values of the entry, so that the values are at most 1."""
        return _divisor(self.dtype, self.high)


@dataclass(frozen=True)
class ObservationSpace:
    """Space of the observations that the agent receives from one env. An observation of the agent is always a single array.

    Discrete and MultiDiscrete observations of the env are one-hot encoded. A Dict or Tuple observation without images becomes the
    concatenation of its flattened entries. A Dict or Tuple observation with an image becomes a packed observation: one uint8 vector that
    contains the bytes of all entries. `parts` describes the positions of the entries. In concatenated observations, entries that only the
    critic reads follow the entries that actor and critic read, and an action mask comes last.
    """

    shape: tuple[int, ...]
    dtype: Dtype = "float32"
    """dtype of observations: uint8 for packed observations and for images of integers up to 255, otherwise float32."""
    stack: int = 1
    """Number of frames that are stacked along the first axis of an observation, with the newest frame last. Within an episode, each
    observation is the previous observation shifted by one frame."""
    parts: tuple[ObservationPart, ...] = ()
    """Entries of a packed observation, in the order of the env's space, or () if the observation is not packed. In a packed observation,
    the float32 entries occupy the first bytes."""
    high: float | None = None
    """Upper bound of the values of an image, or None if the bound is 255 for uint8 or 1 for float32."""
    critic_begin: int | None = None
    """First column of the entries that only the critic reads. `critic_begin` is None if the critic reads the same entries as the actor, or
    if the observation is packed (see ObservationPart.use)."""
    mask: tuple[int, int] | None = None
    """Columns [begin, end) of the action mask (see ActionMask) in observations, or None if every action is always valid. The columns of a
    packed observation are bytes."""
    goals: tuple[tuple[int, int], tuple[int, int]] | None = field(default=None, compare=False)
    """Columns [begin, end) of the entries achieved_goal and desired_goal, or None if observations do not contain both entries with
    unchanged values."""
    ambiguities: tuple[Ambiguity, ...] = field(default=(), compare=False)
    """Properties of observations that the env's space does not determine, and that were guessed. A wrong guess of a property affects only
    nets that treat images and vectors differently."""
    text: str = field(default="", compare=False)
    """Description of the observation space for messages, such as "image 24 × 20, 6 channels last, 0 to 255"."""

    @property
    def divisor(self) -> float:
        """Number by which a net divides the values of an image, so that the values are at most 1."""
        return _divisor(self.dtype, self.high)

    @property
    def has_images(self) -> bool:
        """Whether the observation is an image, or contains an image."""
        return any(len(part.shape) == 3 for part in self.parts or (self,))

    def space_for(self, critic: bool) -> ObservationSpace:
        """Return the space of those entries of an observation that the critic or the actor reads.

        If observations are not packed, the entries that the critic or the actor reads are the first columns. The returned space does not
        include the action mask.

        Args: critic: whether to return the space for the critic instead of the actor.
        """
        uses = ("all", "critic") if critic else ("all",)
        if self.parts:
            return replace(self, parts=tuple(part for part in self.parts if part.use in uses), mask=None)
        ends = [None if critic else self.critic_begin, None if self.mask is None else self.mask[0]]
        size = next((end for end in ends if end is not None), None)
        return self if size is None else replace(self, shape=(size,), critic_begin=None, mask=None)

    @property
    def has_critic_only_entries(self) -> bool:
        """Whether observations contain entries that only the critic reads."""
        return self.critic_begin is not None or any(part.use == "critic" for part in self.parts)

    @property
    def packed_float_count(self) -> int:
        """Number of float32 values in a packed observation. The float32 values are at the start of a packed observation."""
        return max((part.end for part in self.parts if part.dtype == "float32"), default=0) // 4


@dataclass(frozen=True)
class EnvInfo:
    """Description of a vector env for its agent."""

    num_envs: int
    """Number N of rows of observations and actions. N is the number of envs or, if each env has several agents, the total number of agents
    of all envs."""
    observation: ObservationSpace
    action: ActionSpace
    backend: str = "sync"
    """Name of the backend that runs the envs."""
    max_frame: int = 2**62
    """Total number of frames (env steps) that the training run collects."""
    time_limit: int | None = None
    """Maximum number of steps of an episode, or None if the length of episodes is not limited."""
    agents: tuple[str, ...] = ()
    """Names of the agents of each env, or () if each env has a single agent. The agents of one env have consecutive rows in batches."""
    spaces: dict[str, Any] | None = field(default=None, compare=False)
    """The Gymnasium spaces of the env as plain Python objects, {"observation": …, "action": …} (see slm_lab.env.spaces.space_to_dict). With
    these spaces, observations can be encoded for the agent, and actions can be decoded for the env, without building the env."""
    groups: tuple[EnvInfo, ...] = ()
    """One EnvInfo for each group of agents with equal spaces, if the spaces of the agents of an env differ. If `groups` is not empty,
    `observation` and `action` describe arrays for all agents, in which the row of each agent is padded with zeros (see lib.padding).
    `groups` is () if all agents have the same spaces."""

    @property
    def frames(self) -> int:
        """Number of frames in one step of the vector env, which is the number of envs, regardless of the number of agents per env."""
        return self.num_envs // max(1, len(self.agents))

    def with_num_envs(self, count: int) -> EnvInfo:
        """Return a copy of this EnvInfo for `count` envs."""
        return replace(self, num_envs=count * max(1, len(self.agents)))

    def agent_rows(self, names: Collection[str]) -> np.ndarray:
        """Return the indices of the rows that belong to the agents `names`, in ascending order, int64 [K]."""
        chosen = np.array([i for i, agent in enumerate(self.agents) if agent in names], np.int64)
        rows: np.ndarray = (np.arange(self.frames)[:, None] * len(self.agents) + chosen).ravel()
        return rows

    def for_agents(self, names: Collection[str]) -> EnvInfo:
        """Return an EnvInfo that describes only the agents `names`. Raises ValueError if the spaces of these agents differ."""
        agents = tuple(agent for agent in self.agents if agent in names)
        groups = [group for group in self.groups if not set(agents).isdisjoint(group.agents)] or [self]
        if len(groups) > 1 or groups[0].groups:
            raise ValueError(f"the spaces of the agents {', '.join(agents)} differ")
        return replace(groups[0], agents=agents, num_envs=self.frames * len(agents))

    @property
    def max_transitions(self) -> int:
        """Maximum number of transitions that the training run collects from all agents together."""
        return self.max_frame * max(1, len(self.agents))


class Episode(NamedTuple):
    """A finished episode. For Atari, an episode is a complete game, not a single life."""

    env: int
    total_reward: float
    """Sum of the episode's raw rewards, before clipping, scaling and normalisation."""
    length: int
    """Number of steps of the episode."""
    info: dict[str, float] = {}
    """Numbers from the env's `info` dict in the last step, for the keys that were passed to `make_env(track_info=…)`."""
    truncated: bool = False
    """Whether the episode was truncated, for example by a time limit, instead of terminated."""


class VecStep(NamedTuple):
    """Result of one step of a vector env. The arrays are new in each step, so that callers can keep an array without copying it.

    With `make_env(defer_normalization=True)`, observations and rewards are not normalised.
    """

    reward_N: np.ndarray
    """float32 [N]: rewards for training (scaled, normalised and clipped according to the spec)."""
    terminated_N: np.ndarray
    """bool [N]: whether the episode terminated. The return of a terminated episode is not bootstrapped."""
    truncated_N: np.ndarray
    """bool [N]: whether the episode was truncated. The return of a truncated episode is bootstrapped. No episode is both terminated and
    truncated."""
    last_obs_N: np.ndarray
    """[N, *shape]: next observation of each transition, which is the last observation of an episode that ended. If no episode ended,
    `last_obs_N` and `obs_N` are the same array."""
    obs_N: np.ndarray
    """[N, *shape]: observations on which the next actions are based. After the end of an episode, `obs_N` contains the first observation of
    the next episode."""
    first_N: np.ndarray
    """bool [N]: whether the observation in `obs_N` is the first observation of an episode, so that the policy's hidden state must be
    reset."""
    valid_N: np.ndarray
    """bool [N]: whether the step of each env is a transition. For example, the step in which Gymnasium's autoreset mode NEXT_STEP resets an
    env is not a transition."""
    episodes: list[Episode]
    """Episodes that ended in this step. If an env has several agents, the list contains one Episode for each agent whose episode ended."""
    acts_N: np.ndarray | None = None
    """For envs with several agents, bool [N]: whether the next step uses the action of each agent, or None if all actions are used. Agents
    whose actions are not used wait for their turn, or are absent."""


class ActOut(NamedTuple):
    """Actions of a policy for one vector step."""

    action_N: np.ndarray
    """[N] or [N, dim]: actions in the form in which the agent stores actions (see ActionSpace). `Policy.env_action` converts these actions
    to the form that the env accepts."""
    logp_N: np.ndarray
    """float32 [N]: log-probability of each action under the policy that chose the action, or NaN if log-probabilities were not
    requested."""
    state_N: np.ndarray | None = None
    """float32 [N, S]: hidden state after the current observation, or None if the net is not recurrent."""
    version: int | np.ndarray = 0
    """Version of the policy's weights, which is the number of updates so far. If the actions of the envs were computed with different
    versions, `version` is an array, int64 [N]."""


@dataclass
class Metrics:
    """Metrics of one update, as means over the minibatches of the update. A metric that the algorithm does not define is None."""

    loss: float
    grad_norm: float | None = None
    """L2 norm of the gradient before gradient clipping."""
    entropy: float | None = None
    extra: dict[str, float] = field(default_factory=dict)
