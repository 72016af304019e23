"""Contract tests of the components in this folder, which a user could have written, and of some components of the library."""

from __future__ import annotations

from pathlib import Path

import slm_lab
from slm_lab.spec.models.spec import Spec
from slm_lab.testing import SpecContract
from tests.resume.runs import small

FILE = Path(__file__).with_name("spec.json")


class TestAUsersAlgorithmNetAndBackend(SpecContract):
    exact = False  # the state of the backend cannot be saved

    def spec(self) -> Spec:
        return slm_lab.load_spec(FILE, "corridor", ["env.max_frame=3000", "meta.log_frequency=500"])


class TestPPO(SpecContract):
    def spec(self) -> Spec:
        return small("PPO", "CartPole-v1", 1200, algorithm={"time_horizon": 64, "minibatch_size": 32})


class TestSoftActorCritic(SpecContract):
    def spec(self) -> Spec:
        algorithm = {"training_frequency": 4, "training_start_step": 100}
        meta = {"save_replay": True}
        return small("SoftActorCritic", "Pendulum-v1", 800, algorithm=algorithm, memory={"name": "Replay", "batch_size": 32}, meta=meta)
