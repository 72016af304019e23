"""Records that layers exchange. Suffixes of names give the axes: T = time, N = envs, B = batch, K = a sparse subset."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NamedTuple

import numpy as np

ActionKind = Literal["discrete", "continuous", "multi_discrete", "multi_binary", "hybrid"]
Dtype = Literal["float32", "uint8"]
InputKind = Literal["image", "vector"]
Use = Literal["all", "critic", "mask"]
"""Use of a part of an observation: "all": actor and critic read it; "critic": only the critic reads it; "mask": it is the action mask."""
Channels = Literal["first", "last"]


class Ambiguity(NamedTuple):
    """A property that a space does not determine."""

    key: str
    """Key of a spec that determines the property."""
    message: str


@dataclass(frozen=True)
class ActionSpace:
    """Space of actions, per env.

    discrete: one integer in [0, nvec[0]); action_N is int64 [N].
    multi_discrete: one integer in [0, nvec[i]) per component; action_N is int64 [N, len(nvec)].
    multi_binary: 0 or 1 per component; action_N is int64 [N, dim].
    continuous: action_N is float32 [N, dim]. If both bounds of a component are finite, the env scales [-1, 1] to these bounds. Components
    are clipped to finite bounds. The Box is flattened to dim components.
    hybrid: several of these kinds; action_N is float32 [N, dim], with the multi_discrete components first, then multi_binary, then
    continuous.
    """

    kind: ActionKind
    nvec: tuple[int, ...] = ()
    """Number of choices: (n,) for discrete; one number per discrete component for multi_discrete and hybrid; otherwise empty."""
    dim: int = 1
    """Number of components of one action; 1 for discrete."""
    bounded: bool = True
    """continuous, hybrid: whether every continuous component has finite bounds."""
    bits: int = 0
    """hybrid: number of binary components."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of one action in the agent's form."""
        return () if self.kind == "discrete" else (self.dim,)

    @property
    def dtype(self) -> type[np.float32 | np.int64]:
        """dtype of actions in the agent's form."""
        return np.float32 if self.kind in ("continuous", "hybrid") else np.int64

    @property
    def parts(self) -> tuple[ActionSpace, ...]:
        """The parts of a hybrid space, in the order of their components; for any other space, the space itself."""
        if self.kind != "hybrid":
            return (self,)
        choices = ActionSpace("multi_discrete", self.nvec, len(self.nvec))
        rest = ActionSpace("continuous", dim=self.dim - choices.dim - self.bits, bounded=self.bounded)
        return tuple(part for part in (choices, ActionSpace("multi_binary", dim=self.bits), rest) if part.dim)


def _divisor(dtype: Dtype, high: float | None) -> float:
    return (255.0 if dtype == "uint8" else 1.0) if high is None else high


@dataclass(frozen=True)
class ObservationPart:
    """One entry of a packed observation: bytes [begin, end) of the observation contain an array."""

    name: str
    """Key in the Dict ("0", "1", … in a Tuple); a nested entry is named with its parents: "hand/camera"."""
    shape: tuple[int, ...]
    """[C, H, W] of an image, else [n]."""
    dtype: Dtype
    begin: int
    end: int
    high: float | None = None
    """See ObservationSpace."""
    text: str = field(default="", compare=False)
    """See ObservationSpace."""
    use: Use = "all"

    @property
    def divisor(self) -> float:
        """Number by which a net divides the array, so that its values are at most 1."""
        return _divisor(self.dtype, self.high)


@dataclass(frozen=True)
class ObservationSpace:
    """Space of one env's observations. An observation is always one array.

    Discrete and MultiDiscrete observations are one-hot encoded. A Dict or Tuple becomes the concatenation of its flattened entries. If an
    entry is an image, the Dict or Tuple is packed instead: it becomes one uint8 vector with the bytes of all entries, whose positions are
    in `parts`. Entries for the critic only come after entries for both nets, and an action mask comes last.
    """

    shape: tuple[int, ...]
    dtype: Dtype = "float32"
    """uint8 for images of integers up to 255, else float32."""
    stack: int = 1
    """Number of frames stacked along the first axis, the newest last. Within an episode, each observation is the previous observation,
    shifted by one frame."""
    parts: tuple[ObservationPart, ...] = ()
    """Entries of a packed observation, in the env's order; float32 entries occupy the first bytes. Empty: not packed."""
    high: float | None = None
    """Upper bound of an image; None: 255 for uint8, 1 for float32."""
    critic_begin: int | None = None
    """First column of the entries for the critic only; None: there are none, or the observation is packed (see ObservationPart.use)."""
    mask: tuple[int, int] | None = None
    """Columns of the action mask (see ActionMask): numbers, or bytes if the observation is packed; None: every action is always valid."""
    goals: tuple[tuple[int, int], tuple[int, int]] | None = field(default=None, compare=False)
    """Columns of achieved_goal and of desired_goal, if the observation has these entries with unchanged numbers."""
    ambiguities: tuple[Ambiguity, ...] = field(default=(), compare=False)
    """Properties that the env's space does not determine, and that were guessed. They matter only for nets that treat images and vectors
    differently."""
    text: str = field(default="", compare=False)
    """Readable description: "image 24 × 20, 6 channels last, 0 to 255"."""

    @property
    def divisor(self) -> float:
        """Number by which a net divides an image, so that values are at most 1."""
        return _divisor(self.dtype, self.high)

    @property
    def has_images(self) -> bool:
        """Whether the observation is an image, or contains one."""
        return any(len(part.shape) == 3 for part in self.parts or (self,))

    def seen_by(self, critic: bool) -> ObservationSpace:
        """Return the space of the part of observations that the critic, or the actor, reads: the leading columns, without a mask."""
        uses = ("all", "critic") if critic else ("all",)
        if self.parts:
            return replace(self, parts=tuple(part for part in self.parts if part.use in uses), mask=None)
        ends = [None if critic else self.critic_begin, None if self.mask is None else self.mask[0]]
        size = next((end for end in ends if end is not None), None)
        return self if size is None else replace(self, shape=(size,), critic_begin=None, mask=None)

    @property
    def for_critic_only(self) -> bool:
        """Whether some entries are for the critic only."""
        return self.critic_begin is not None or any(part.use == "critic" for part in self.parts)

    @property
    def packed_floats(self) -> int:
        """Number of float32 values at the start of a packed observation."""
        return max((part.end for part in self.parts if part.dtype == "float32"), default=0) // 4


@dataclass(frozen=True)
class EnvInfo:
    """Description of an env for its agent."""

    num_envs: int
    """Number of rows: the number of envs, or with several agents per env the number of agents of all envs."""
    observation: ObservationSpace
    action: ActionSpace
    backend: str = "sync"
    """The resolved backend."""
    max_frame: int = 2**62
    """Frames collected in total."""
    time_limit: int | None = None
    """Maximum steps of an episode; None if not limited."""
    agents: tuple[str, ...] = ()
    """Names of the agents of each env; the rows of one env's agents are consecutive. Empty: one agent per env."""
    spaces: dict[str, Any] | None = field(default=None, compare=False)
    """The env's own spaces in plain Python, {"observation": …, "action": …} (see slm_lab.env.spaces.space_to_dict), with which observations
    can be encoded and actions decoded without the env."""
    groups: tuple[EnvInfo, ...] = ()
    """If the agents' spaces differ: the info of each group of agents with equal spaces. `observation` and `action` then describe arrays for
    all rows, in which the rows of each group are padded with zeros (see lib.padding). Empty: all agents have the same spaces."""

    @property
    def frames(self) -> int:
        """Number of frames in a vector step: one per env, regardless of the number of agents."""
        return self.num_envs // max(1, len(self.agents))

    def of_envs(self, count: int) -> EnvInfo:
        """Return the info of `count` envs."""
        return replace(self, num_envs=count * max(1, len(self.agents)))

    def rows_of(self, names: Collection[str]) -> np.ndarray:
        """Return the rows of the named agents of all envs, int64 [K] ascending."""
        chosen = np.array([i for i, agent in enumerate(self.agents) if agent in names], np.int64)
        rows: np.ndarray = (np.arange(self.frames)[:, None] * len(self.agents) + chosen).ravel()
        return rows

    def for_agents(self, names: Collection[str]) -> EnvInfo:
        """Return the info of the rows of the named agents. Raises ValueError if their spaces differ."""
        agents = tuple(agent for agent in self.agents if agent in names)
        groups = [group for group in self.groups if not set(agents).isdisjoint(group.agents)] or [self]
        if len(groups) > 1 or groups[0].groups:
            raise ValueError(f"the spaces of the agents {', '.join(agents)} differ")
        return replace(groups[0], agents=agents, num_envs=self.frames * len(agents))

    @property
    def max_transitions(self) -> int:
        """Maximum number of transitions collected in total."""
        return self.max_frame * max(1, len(self.agents))


class Episode(NamedTuple):
    """A finished episode (in Atari a complete game)."""

    env: int
    total_reward: float
    """Sum of raw rewards, i.e. before clipping, scaling and normalising."""
    length: int
    """Number of steps."""
    info: dict[str, float] = {}
    """Numbers from the env's `info` in the last step, by the names given to `make_env(track_info=…)`."""
    truncated: bool = False
    """Whether the episode was truncated, for example by a time limit, instead of terminated."""


class VecStep(NamedTuple):
    """One step of a vector env. Arrays are new in each step, so they can be kept without copying."""

    reward_N: np.ndarray
    """float32 [N]: rewards for training (clipped, scaled and normalised according to the spec)."""
    terminated_N: np.ndarray
    """bool [N]: whether the episode terminated; its return is not bootstrapped."""
    truncated_N: np.ndarray
    """bool [N]: whether the episode was truncated; its return is bootstrapped. Never true together with terminated_N."""
    last_obs_N: np.ndarray
    """[N, *shape]: the true next observation, never the first observation after a reset. The same array as `obs_N` if no episode ended."""
    obs_N: np.ndarray
    """[N, *shape]: observations for the next actions."""
    first_N: np.ndarray
    """bool [N]: whether obs_N begins an episode, so that the hidden state must be reset."""
    valid_N: np.ndarray
    """bool [N]: false if the row is not a transition (e.g. the dummy row of NEXT_STEP autoreset)."""
    episodes: list[Episode]
    """Episodes that finished in this step; with several agents, one entry for each agent."""
    acts_N: np.ndarray | None = None
    """With several agents, bool [N]: the rows whose action the next step uses; None: all rows. Other rows wait for their turn, or their
    agent is absent."""


class ActOut(NamedTuple):
    """Actions of a policy for one vector step."""

    action_N: np.ndarray
    """[N] or [N, dim], see ActionSpace: actions as used for learning. `Policy.env_action` converts them to the form that the env takes."""
    logp_N: np.ndarray
    """float32 [N]: log-probability of the action under the policy that chose it; NaN unless requested."""
    state_N: np.ndarray | None = None
    """float32 [N, S]: hidden state after this observation; None for a policy without memory."""
    version: int | np.ndarray = 0
    """Version of the policy's weights: number of updates so far (int64 [N] if it differs between envs)."""


@dataclass
class Metrics:
    """Report of one update: means over its minibatches. None: not defined for the algorithm."""

    loss: float
    grad_norm: float | None = None
    """L2, before clipping."""
    entropy: float | None = None
    extra: dict[str, float] = field(default_factory=dict)
