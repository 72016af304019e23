"""Tests of seeds and random generators."""

import numpy as np

from slm_lab.lib.rng import generator_state, session_seeds, set_generator_state, worker_seeds


def test_seeds_differ_by_every_part() -> None:
    """A Session's seeds depend on random_seed, trial and session only, and differ if one of them differs."""
    assert session_seeds(1, 0, 0) == session_seeds(1, 0, 0)
    several = [session_seeds(seed, trial, session) for seed in range(3) for trial in range(3) for session in range(3)]
    flat = [value for seeds in several for value in (seeds.net, seeds.act, seeds.update, seeds.env, seeds.eval_env)]
    assert len(set(flat)) == len(flat)
    assert all(0 <= value < 2**31 for value in flat)


def test_workers_and_their_restarts_have_streams_of_their_own() -> None:
    """The first worker uses the seeds of the Session. A restarted worker has other seeds, since the same steps could end it again."""
    seeds = session_seeds(1, 0, 0)
    assert worker_seeds(seeds, 0) == seeds
    several = [worker_seeds(seeds, worker, restart) for worker in range(3) for restart in range(3)]
    assert len({value for one in several for value in (one.env, one.act)}) == 2 * len(several)
    assert {(one.net, one.update, one.eval_env) for one in several} == {(seeds.net, seeds.update, seeds.eval_env)}


def test_generator_state_round_trip() -> None:
    rng = np.random.default_rng(3)
    rng.random(5)
    state = generator_state(rng)
    expected = rng.random(4)
    other = np.random.default_rng(99)
    set_generator_state(other, state)
    assert np.array_equal(other.random(4), expected)
