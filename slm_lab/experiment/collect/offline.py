"""Source of experience for algorithms that learn from recorded episodes, without env steps."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from slm_lab.experiment.collect.local import EnvSource
from slm_lab.experiment.execute.heartbeat import TRAINING
from slm_lab.experiment.training.experience import Experience


class OfflineSource(EnvSource):
    """Source of experience that counts each gradient step as a frame.

    The env is never stepped. It only defines the observation and action spaces.
    """

    def begin(self) -> None:
        """Do nothing, since an offline source needs no preparation."""

    def __iter__(self) -> Iterator[Experience]:
        while not (self.learner.has_finished or self.stop.requested):
            self.beat(TRAINING)
            yield Experience(0, 1, [], None)

    def state_dict(self) -> dict[str, Any]:
        return {"open": {}}

    def load_state_dict(self, state: dict[str, Any]) -> bool:
        return True
