"""Source of experience for algorithms that learn from recorded episodes, without env steps."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from slm_lab.env.vec import Env
from slm_lab.experiment.execute.heartbeat import CLOSING, TRAINING
from slm_lab.experiment.plan import Stop
from slm_lab.experiment.training.experience import Beat, Experience, no_beat
from slm_lab.experiment.training.learner import PolicyLearner


class OfflineSource:
    """Counts each gradient step as a frame. The env is not stepped; it only defines the spaces."""

    between_rounds = True
    lost_reason = ""

    def __init__(self, env: Env, learner: PolicyLearner, stop: Stop, beat: Beat = no_beat) -> None:
        self.env, self.learner, self.stop, self.beat, self.backend = env, learner, stop, beat, env.backend

    def begin(self) -> None:
        """Do nothing, since no preparation is needed."""

    def __iter__(self) -> Iterator[Experience]:
        while not (self.learner.finished or self.stop.requested):
            self.beat(TRAINING)
            yield Experience(0, 1, [], None)

    def spans(self) -> None:
        return None

    def close(self) -> None:
        self.beat(CLOSING)
        self.env.close()

    def state_dict(self) -> dict[str, Any]:
        return {"open": {}}

    def load_state_dict(self, state: dict[str, Any]) -> bool:
        return True
