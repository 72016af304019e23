"""env: the environment, the number of parallel copies, and how observations and rewards are transformed."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field, model_validator

from slm_lab.spec.models.base import PATTERN, Flag, Positive, PositiveReal, Real, SpecModel
from slm_lab.spec.models.env_schedule import Scheduled

Backend = Literal["auto", "ale", "native", "pettingzoo", "envpool", "sync", "async"] | Annotated[str, Field(pattern=f"^{PATTERN}$")]


class WrapperSpec(SpecModel):
    """A wrapper of each env. Other keys are passed to its constructor."""

    model_config = ConfigDict(extra="allow")
    name: str
    """Class of gymnasium.wrappers (RescaleAction), or "package.module:Class" for another gymnasium.Wrapper."""

    @model_validator(mode="before")
    @classmethod
    def _from_name(cls, value: Any) -> Any:
        return {"name": value} if isinstance(value, str) else value

    @property
    def kwargs(self) -> dict[str, Any]:
        """Return the arguments of the wrapper's constructor."""
        return dict(self.model_extra or {})


def _allow_names(schema: dict[str, Any]) -> None:
    """Let the JSON Schema of a list of wrappers accept names."""
    schema["items"] = {"anyOf": [{"type": "string"}, schema["items"]]}


class EnvSpec(SpecModel):
    """The environment. Other keys are passed to the env's constructor."""

    model_config = ConfigDict(extra="allow")
    name: str
    """Gymnasium id (CartPole-v1, ALE/Pong-v5), or package.module:EnvId, which first imports the module that registers the env; or
    pettingzoo:NAME, or pettingzoo:package.module:Class, for an env of PettingZoo's kind."""
    num_envs: Positive = 1
    """Number of parallel envs."""
    max_t: Positive | None = None
    """Truncate episodes after this many steps; default: the env's own limit."""
    max_frame: Positive
    """Frames to train for; one vector step is num_envs frames. In BC and IQL, which step no env, a frame is a gradient step."""
    normalize_obs: Flag = False
    """Normalise observations by their running mean and standard deviation."""
    normalize_reward: Flag = False
    """Divide rewards by the running standard deviation of the discounted return."""
    clip_obs: PositiveReal | None = None
    """Clip observations, after normalisation, to ± this value; default: ±10 if they are normalised, otherwise no clipping."""
    clip_reward: PositiveReal | Annotated[list[Real], Field(min_length=2, max_length=2)] | Flag | None = None
    """Clip training rewards to ± this value, or to [lo, hi]; true: their sign; false: no clipping; default: ±10 if rewards are normalised,
    their sign in Atari, otherwise no clipping."""
    reward_scale: PositiveReal | Literal["sign"] = 1.0
    """Factor of training rewards; "sign": their sign."""
    backend: Backend = "auto"
    """Vector env implementation: ale (ALE's C++ vector env), native (Gymnasium's own vector env of that id), pettingzoo, envpool, sync or
    async (Gymnasium; async: each env in its own process, whose random generators are seeded), or "package.module:Class" for your own; auto:
    the first that supports the env."""

    wrappers: Annotated[list[WrapperSpec], Field(json_schema_extra=_allow_names)] = []
    """Wrappers of each env, applied in this order: names, or {"name": …, arguments}: Gymnasium's own by class name ("RescaleAction"),
    others as "package.module:Class". Rewards and returns are those of the wrapped env; max_t counts steps of the env itself.
    Each env has its own wrapper state, which is not shared with evaluation or checkpoints (instead of NormalizeObservation, use
    normalize_obs)."""
    channels: Literal["first", "last"] | None = None
    """Axis of the channels of an image; default: the first or last axis, whichever has 1, 3 or 4 channels; if that does not decide, the one
    that leaves the squarer image."""
    obs_keys: Annotated[list[str], Field(min_length=1)] | None = None
    """Parts of a Dict (or Tuple: "0", "1", …) observation to keep, after the wrappers; a single one becomes the observation itself.
    An action mask is always kept, unless `action_mask` is false. Default: all."""

    action_mask: Annotated[str, Field(min_length=1)] | Literal[False] | None = None
    """Entry of the observation (a Dict), or else of the env's info, that says which actions are valid; invalid ones are never taken. false:
    none; default: action_mask or legal_action_mask, if the observation has such an entry."""
    critic_keys: Annotated[list[str], Field(min_length=1)] | None = None
    """Entries of a Dict observation that only the critic reads, such as privileged_state. "state" in PettingZoo's envs: the state of the
    env, or without one the observations of all agents, which is added to the observation (a central critic). Default: none."""

    schedule: Annotated[dict[str, Scheduled], Field(min_length=1)] | None = None
    """A curriculum: arguments of the env's constructor (the env is built anew) or attributes of the env (set) that change when an episode
    ends. For each a list [[frame, value], …], a schedule of a number over frames such as {"name": "linear_decay", …}, or {"by": "return",
    "start": value, "steps": [[return, value], …], "episodes": 20}, which goes on to the next value when the mean return of the last
    episodes with the present one reaches its number. Frames are those of all workers. Evaluation and enjoy use the last values. Absent:
    nothing changes."""

    @property
    def kwargs(self) -> dict[str, Any]:
        """Return the arguments of the env's constructor."""
        return dict(self.model_extra or {})
