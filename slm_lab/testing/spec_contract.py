"""`SpecContract`, tests of training that every spec must pass.

If your tests define a subclass of SpecContract with a spec that names your algorithm, net, memory or env backend, pytest runs the contract
tests with this spec.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from pathlib import Path
from typing import Any

import numpy as np

import slm_lab
from slm_lab.experiment.files.bundle import load as load_bundle
from slm_lab.experiment.plan import Interrupted, Stop
from slm_lab.experiment.run.trial import TrialResult
from slm_lab.experiment.training.observers.base import Observer
from slm_lab.lib.records import Episode
from slm_lab.spec.models.spec import Spec

_MEASURED = ("wall_t", "fps", "rollout_busy", "inference_busy", "learner_busy", "lock_wait")
"""Names of table columns whose values depend on the speed of the machine."""


class SpecContract:
    """Tests of training with a spec. The tests run trials with one session in this process.

    Attributes:
        exact: whether a run that is stopped and continued equals an uninterrupted run byte for byte, which requires that the env can be
            saved in the middle of an episode. With exact=False, the checkpoint must say which state is lost when the run is continued.
    """

    exact = True
    _straight: TrialResult | None = None

    @abstractmethod
    def spec(self) -> Spec:
        """Return a spec of one session with a fixed meta.random_seed.

        Training with the returned spec should take 1,000 to 10,000 frames, make several updates and write several rows of the training
        table.
        """

    def _trained_result(self, tmp_path_factory: Any) -> TrialResult:
        """Return the result of an uninterrupted training run. The run takes place once for all tests of a class."""
        if "_straight" not in vars(type(self)):
            type(self)._straight = slm_lab.Trial(self.spec(), tmp_path_factory.mktemp("trained")).run()
        assert self._straight is not None
        return self._straight

    def test_it_trains_and_every_number_is_finite(self, tmp_path_factory: Any) -> None:
        table = _training_rows(self._trained_result(tmp_path_factory).paths.root)
        assert len(table) >= 2, "meta.log_frequency is too large for a test"
        assert [row["frame"] for row in table] == sorted(row["frame"] for row in table)
        assert any(row.get("opt_step", 0) > 0 for row in table), "no update was made"
        for row in table:
            assert not any(math.isinf(value) for value in row.values()), row

    def test_every_diagnostic_of_the_algorithm_is_a_column(self) -> None:
        session = slm_lab.Session(self.spec())
        rows = session.run().rows
        missing = set(session.agent.algorithm.diagnostics) - set(rows[-1])
        assert not missing

    def test_equal_seeds_give_equal_rows_and_weights(self, tmp_path: Path, tmp_path_factory: Any) -> None:
        straight, other = self._trained_result(tmp_path_factory).paths, slm_lab.Trial(self.spec(), tmp_path).run().paths
        assert _training_rows(straight.root) == _training_rows(other.root)
        weights = [load_bundle(paths.checkpoint(0, "last"))["policies"][0]["weights"] for paths in (straight, other)]
        assert weights[0].keys() == weights[1].keys()
        assert all(weights[0][name].equal(weights[1][name]) for name in weights[0])

    def test_another_seed_gives_other_rows(self, tmp_path: Path, tmp_path_factory: Any) -> None:
        spec = self.spec()
        seed = spec.meta.random_seed + 1
        changed = spec.with_meta(random_seed=seed)
        other = slm_lab.Trial(changed, tmp_path).run().paths
        assert _training_rows(self._trained_result(tmp_path_factory).paths.root) != _training_rows(other.root)

    def test_a_run_that_is_stopped_and_continued_equals_one_without_a_break(self, tmp_path: Path, tmp_path_factory: Any) -> None:
        spec, stop = self.spec(), Stop()

        class Half(Observer):
            def on_step(self, episodes: list[Episode]) -> None:
                stop.requested = stop.requested or 2 * self.context.clock.frame >= spec.env.max_frame

        straight, data = self._trained_result(tmp_path_factory).paths, tmp_path / "stopped"  # a fixture may write to tmp_path
        try:
            slm_lab.Trial(spec, data, observers=[Half], stop=stop).run()
        except Interrupted:
            pass
        else:
            raise AssertionError("the run was not stopped: it has too few steps")
        (folder,) = data.iterdir()
        slm_lab.Trial.resume(folder).run()
        if self.exact:
            assert _training_rows(folder) == _training_rows(straight.root)
        else:
            assert _training_rows(folder)[-1]["frame"] == _training_rows(straight.root)[-1]["frame"]
            assert load_bundle(straight.checkpoint(0, "last"))["lost"], "set `exact`: nothing is lost when a run is continued"

    def test_the_trained_agent_acts_without_its_environment(self, tmp_path_factory: Any) -> None:
        agent = self._trained_result(tmp_path_factory).agent()
        agent.observation_space.seed(0)
        for deterministic in (False, True):
            action, _ = agent.act(agent.observation_space.sample(), deterministic=deterministic)
            assert agent.action_space.contains(action)


def _training_rows(folder: Path) -> list[dict[str, float]]:
    """Return the rows of a run's training table, without columns that depend on the speed of the machine and without undefined values."""
    table = slm_lab.load_run(folder).train.select_dtypes(include=np.number)
    rows = table.drop(columns=[name for name in _MEASURED if name in table]).to_dict("records")
    return [{str(name): value for name, value in row.items() if not math.isnan(value)} for row in rows]
