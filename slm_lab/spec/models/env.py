"""Models of the section env of a spec: the environment, the number of parallel envs, and transformations of observations and rewards."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field, model_validator

from slm_lab.spec.models.base import PATTERN, Flag, Positive, PositiveReal, Real, SpecModel
from slm_lab.spec.models.env_schedule import Scheduled

Backend = Literal["auto", "ale", "native", "pettingzoo", "envpool", "sync", "async"] | Annotated[str, Field(pattern=f"^{PATTERN}$")]


class WrapperSpec(SpecModel):
    """A wrapper that is applied to each env. Keys other than `name` are passed to the constructor of the wrapper."""

    model_config = ConfigDict(extra="allow")
    name: str
    """Name of the wrapper: a class of gymnasium.wrappers (such as RescaleAction), or "package.module:Class" for another
    gymnasium.Wrapper."""

    @model_validator(mode="before")
    @classmethod
    def _from_name(cls, value: Any) -> Any:
        return {"name": value} if isinstance(value, str) else value

    @property
    def kwargs(self) -> dict[str, Any]:
        """Return the arguments of the wrapper's constructor."""
        return dict(self.model_extra or {})


def _allow_wrapper_names(schema: dict[str, Any]) -> None:
    """Change the JSON Schema of a list of wrappers in place, so that names of wrappers are also valid items."""
    schema["items"] = {"anyOf": [{"type": "string"}, schema["items"]]}


class EnvSpec(SpecModel):
    """Settings of the environment. Keys that this section does not define are passed to the constructor of the env."""

    model_config = ConfigDict(extra="allow")
    name: str
    """Env id of Gymnasium (CartPole-v1, ALE/Pong-v5) or EnvPool (CheetahRun-v1, MuJoCoPlayground/Go1Getup-v1), package.module:EnvId to
    first import the module that registers the env, or pettingzoo:NAME or pettingzoo:package.module:Class for an env with PettingZoo's
    API."""
    num_envs: Positive = 1
    """Number of parallel envs."""
    max_t: Positive | None = None
    """Number of steps after which an episode is truncated, by default the env's own limit."""
    stagger_episodes: Flag = False
    """Whether the first training episode of each env is truncated early, so that the envs are at different points of an episode. The first
    episode of env i (counted from 0) is truncated after (i + 1) / num_envs of the time limit. This key is useful if all episodes have the
    same length, as in DeepMind Control. Otherwise, all envs are always at the same point of an episode, and a rollout that is
    shorter than an episode contains only one part of the episode. Table rows contain no returns or lengths of the episodes that are
    truncated early. This key requires the backend envpool and an env with one agent and a time limit."""
    max_frame: Positive
    """Number of frames of training. One vector step has num_envs frames. In BC and IQL, which do not step envs in training, a frame is a
    gradient step."""
    normalize_obs: Flag = False
    """Whether to normalise observations by their running mean and standard deviation. The replay buffer of an
    off-policy algorithm stores observations before normalisation and clipping, and each batch is normalised with the newest mean and
    standard deviation. The replay buffer of SIL and PPOSIL stores observations as they were normalised when they were collected."""
    normalize_reward: Flag = False
    """Whether to divide rewards by the running standard deviation of the discounted return. The replay buffer
    of an off-policy algorithm stores rewards before normalisation and clipping, and each batch is normalised with the newest standard
    deviation. SIL and PPOSIL do not support this key."""
    clip_obs: PositiveReal | None = None
    """Absolute value to which observations are clipped, after normalisation. By default, observations are clipped to ±10 if they are
    normalised, and are not clipped if they are not normalised."""
    clip_reward: PositiveReal | Annotated[list[Real], Field(min_length=2, max_length=2)] | Flag | None = None
    """Absolute value, or range [lo, hi], to which training rewards are clipped. With true, training rewards are replaced by their signs.
    With false, training rewards are not clipped. The default is 10 if rewards are normalised, true in Atari, and otherwise false."""
    reward_scale: PositiveReal | Literal["sign"] = 1.0
    """Factor by which training rewards are multiplied, or "sign" to replace rewards by their signs."""
    backend: Backend = "auto"
    """Implementation of the vector env: ale (ALE's C++ vector env), native (the vector env that Gymnasium registers for the id),
    pettingzoo, envpool, sync (Gymnasium's SyncVectorEnv), async (each env runs in its own process, and the random generators of this
    process are seeded), or "package.module:Class" (a user's own class). auto selects the first of these implementations that supports the
    env."""

    wrappers: Annotated[list[WrapperSpec], Field(json_schema_extra=_allow_wrapper_names)] = []
    """Wrappers of each env, applied in the given order. A wrapper is given by its name, or as {"name": …, arguments}. The name of a wrapper
    is a class of gymnasium.wrappers ("RescaleAction"), or "package.module:Class" for another wrapper. Rewards and returns are measured on
    the wrapped env, and max_t counts steps of the env without wrappers. Each env has its own wrapper state, which is not shared with
    evaluation or checkpoints (use normalize_obs instead of NormalizeObservation)."""
    channels: Literal["first", "last"] | None = None
    """Axis of the channels of an image. By default, the channels are the first or the last axis, whichever has size 1, 3 or 4. If both axes
    or neither axis have size 1, 3 or 4, the default is the axis whose removal makes height and width more similar."""
    obs_keys: Annotated[list[str], Field(min_length=1)] | None = None
    """Entries of a Dict observation (of a Tuple observation: "0", "1", …) to keep, after the wrappers are applied. If only one entry is
    kept, this entry itself becomes the observation. An action mask is always kept, unless `action_mask` is false. By default, all entries
    are kept."""

    action_mask: Annotated[str, Field(min_length=1)] | Literal[False] | None = None
    """Name of the entry that contains the mask of valid actions: an entry of the Dict observation or, if the observation has no such entry,
    of the env's info. The agent never takes an action that the mask marks as invalid. With false, no action mask is used. By default, the
    entry action_mask or legal_action_mask of the observation is used, if the observation has one of these entries."""
    critic_keys: Annotated[list[str], Field(min_length=1)] | None = None
    """Entries of a Dict observation that only the critic reads, such as privileged_state. In PettingZoo's envs, "state" adds the state of
    the env to the observation or, if the env has no state, the observations of all agents (a central critic). By default, the critic reads
    the same entries as the actor."""

    schedule: Annotated[dict[str, Scheduled], Field(min_length=1)] | None = None
    """A curriculum, given as {name: rule}. When an episode ends, each rule changes an argument of the env's constructor (the env is rebuilt
    after each change) or an attribute of the env. A rule is a list [[frame, value], …], a schedule of a number over frames such as {"name":
    "linear_decay", …}, or {"by": "return", "start": value, "steps": [[return, value], …], "episodes": 20}. A rule by return switches to the
    value of the next step when the mean return of the last episodes with the current value reaches the return of the next step. The frames
    in a rule count the frames of all workers together. Evaluation and enjoy use the last value of each rule. By default, arguments and
    attributes do not change."""

    @property
    def kwargs(self) -> dict[str, Any]:
        """Return the arguments of the env's constructor."""
        return dict(self.model_extra or {})
