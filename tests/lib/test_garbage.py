import gc
from collections.abc import Iterator

import pytest

from slm_lab.lib.process import THIS_PROCESS, delay_garbage_collection, freeze_objects


@pytest.fixture(autouse=True)
def thresholds(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Start each test without postponed collections, whatever other tests did, and restore the thresholds at its end."""
    monkeypatch.setattr(THIS_PROCESS, "gc_thresholds", None)
    before = gc.get_threshold()
    yield
    gc.set_threshold(*before)
    gc.unfreeze()


def test_collections_are_rare_until_objects_are_frozen() -> None:
    gc.set_threshold(500, 5, 7)
    delay_garbage_collection()
    delay_garbage_collection()
    assert gc.get_threshold()[0] > 100_000
    freeze_objects()
    assert gc.get_threshold() == (500, 5, 7)
    assert gc.get_freeze_count() > 0


def test_thresholds_of_a_program_that_did_not_postpone_stay() -> None:
    gc.set_threshold(600, 5, 7)
    freeze_objects()
    assert gc.get_threshold() == (600, 5, 7)
