"""env: which environment, how many, and how its observations and rewards are treated."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field

from slm_lab.spec.base import Flag, Positive, PositiveReal, SpecModel

Backend = Literal["auto", "ale", "native", "envpool", "sync", "async"]
OwnBackend = Annotated[str, Field(pattern=r"^[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*$")]


class EnvSpec(SpecModel):
    """Keys beyond these go to the env's constructor."""

    model_config = ConfigDict(extra="allow")
    name: str
    """A Gymnasium id (CartPole-v1, ALE/Pong-v5), or package.module:EnvId to import a registration first."""
    num_envs: Positive = 1
    """Envs that step together."""
    max_t: Positive | None = None
    """Truncate episodes after so many steps; absent: as the env says."""
    max_frame: Positive
    """Frames of a Session; one vector step counts num_envs frames."""
    normalize_obs: Flag = False
    """Normalise observations by their running mean and standard deviation."""
    normalize_reward: Flag = False
    """Divide rewards by the running standard deviation of the discounted return."""
    clip_obs: PositiveReal | None = None
    """Clip observations (after normalising) to ± this; absent: ±10 where normalised, else not."""
    clip_reward: PositiveReal | Flag | None = None
    """Clip training rewards to ± this; true: their sign; absent: ±10 where normalised, ±1 (sign) in Atari, else not; false: never."""
    reward_scale: PositiveReal | Literal["sign"] = 1.0
    """Multiply training rewards; "sign": take their sign."""
    backend: Backend | OwnBackend = "auto"
    """What steps the envs: ale (ALE's C++ vector env), native (Gymnasium's own vector env of that id), envpool, sync or async (Gymnasium);
    auto: the first that applies; "package.module:Class": your own subclass of slm_lab.env.Backend."""

    @property
    def kwargs(self) -> dict[str, Any]:
        """Arguments of the env's constructor."""
        return dict(self.model_extra or {})
