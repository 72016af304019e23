"""Confirmation of a search: train the best trials again, with seeds that the search has not used.

A confirmation is needed because the best of many trials is partly the luckiest trial, whose metric is too high. The confirmations have a
separate run folder inside the run folder of the search.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from slm_lab.experiment.files.paths import RunPaths
from slm_lab.experiment.files.search_state import TrialState
from slm_lab.lib.files import indented_json, replace_file
from slm_lab.spec.load.loader import dump_spec
from slm_lab.spec.models.spec import Spec

SESSIONS = 4
"""Number of Sessions with which a trial is trained again to confirm it. Each Session has a different seed."""
_STREAM = 1_000_003
"""Entry of the numpy SeedSequence that separates the seeds of confirmations from the seeds of trials."""


def fresh_seed(random_seed: int) -> int:
    """Return the random_seed for the confirmations of a search, given the random_seed of the search."""
    return int(np.random.SeedSequence([random_seed, _STREAM]).generate_state(1)[0]) & 0x7FFFFFFF


def confirmation_spec(spec: Spec, random_seed: int) -> Spec:
    """Return the spec of a confirmation, without search and scheduler, with the given random_seed and with SESSIONS Sessions.

    With meta.distributed, the number of Sessions is not changed, because all Sessions train one net.
    """
    sessions = spec.meta.max_session if spec.meta.distributed else SESSIONS
    changed = spec.with_meta(random_seed=random_seed, max_session=sessions, search_scheduler=None)
    return changed.model_copy(update={"search": None})


def add_confirmations(ranked: Sequence[TrialState], count: int, confirmations: list[TrialState]) -> list[TrialState]:
    """Return the states of the confirmations of the best `count` trials.

    For a trial without a confirmation, a new state is created and added to `confirmations`.

    Args:
        ranked: trials of the search, from best to worst.
        confirmations: states of all confirmations so far.
    """
    confirmed = {state.trial for state in confirmations}
    confirmations += [TrialState(trial.trial, trial.values) for trial in ranked[:count] if trial.trial not in confirmed]
    best = {trial.trial for trial in ranked[:count]}
    return [state for state in confirmations if state.trial in best]


def create_run_folder(paths: RunPaths, spec: Spec) -> RunPaths:
    """Create the run folder of the confirmations if it does not exist yet, and return its paths. Raises OSError if the folder cannot be
    written."""
    runs = RunPaths(paths.confirmation, paths.spec_name)
    runs.root.mkdir(exist_ok=True)
    runs.make_dirs()
    runs.remove_temporaries()
    replace_file(runs.spec, indented_json(dump_spec(spec)))
    return runs
