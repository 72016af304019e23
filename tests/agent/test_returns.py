"""Tests of returns and advantages against brute force, with truncations and terminations inside rollouts."""

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from slm_lab.agent.algorithm.value_scale import standardize_valid
from slm_lab.agent.ops import device, returns
from slm_lab.agent.ops.objective import explained_variance
from slm_lab.agent.ops.returns import discounted_returns, discounted_scan, gae, nstep_returns, standardize, vtrace

GAMMA, LAM = 0.9, 0.8


def random_rollout(seed: int, T: int, N: int) -> dict[str, torch.Tensor]:
    rng = np.random.default_rng(seed)
    terminated = rng.random((T, N)) < 0.2
    truncated = (rng.random((T, N)) < 0.2) & ~terminated
    return {
        "reward": torch.from_numpy(rng.normal(size=(T, N))),
        "value": torch.from_numpy(rng.normal(size=(T, N))),
        "next_value": torch.from_numpy(rng.normal(size=(T, N))),
        "terminated": torch.from_numpy(terminated),
        "done": torch.from_numpy(terminated | truncated),
    }


def brute_nstep(r: dict[str, torch.Tensor], t: int, n: int, steps: int, gamma: float) -> float:
    """Return the n-step return at (t, n), computed forwards as in the definition."""
    total, discount = 0.0, 1.0
    T = len(r["reward"])
    for k in range(steps):
        total += discount * float(r["reward"][t + k, n])
        discount *= gamma
        if r["terminated"][t + k, n]:
            return total
        if r["done"][t + k, n] or t + k == T - 1 or k == steps - 1:
            return total + discount * float(r["next_value"][t + k, n])
    raise AssertionError


def brute_gae(r: dict[str, torch.Tensor], t: int, n: int, gamma: float, lam: float) -> float:
    """Return Σ (γλ)^l δ_{t+l} up to the end of the episode or the rollout, eq. 16 of arXiv:1506.02438."""
    total, weight = 0.0, 1.0
    for k in range(t, len(r["reward"])):
        bootstrap = 0.0 if r["terminated"][k, n] else float(r["next_value"][k, n])
        total += weight * (float(r["reward"][k, n]) + gamma * bootstrap - float(r["value"][k, n]))
        weight *= gamma * lam
        if r["done"][k, n]:
            break
    return total


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 10_000), T=st.integers(1, 20), N=st.integers(1, 3), steps=st.integers(1, 25))
def test_arrays_as_tensors(seed: int, T: int, N: int, steps: int) -> None:
    """Arrays, from which small nets learn, give the same numbers as tensors, bit for bit, in float32."""
    tensors = {name: x.float() if x.is_floating_point() else x for name, x in random_rollout(seed, T, N).items()}
    arrays = {name: x.numpy() for name, x in tensors.items()}
    valid = torch.from_numpy(np.random.default_rng(seed).random((T, N)) < 0.8)

    def computed(r: dict[str, Any], valid: Any) -> list[Any]:
        rows = (r["reward"], r["value"], r["next_value"], r["terminated"], r["done"])
        reward, value, next_value, terminated, done = rows
        return [
            gae(*rows, GAMMA, LAM),
            nstep_returns(reward, next_value, terminated, done, GAMMA, steps),
            discounted_returns(reward, next_value, terminated, done, GAMMA),
            *vtrace(value - reward, *rows, GAMMA, LAM, 1.0, 1.0),
            standardize_valid(value, valid),
            standardize_valid(value, valid | True),
        ]

    for x, y in zip(computed(arrays, valid.numpy()), computed(tensors, valid), strict=True):
        assert isinstance(x, np.ndarray)
        assert isinstance(y, torch.Tensor)
        assert x.dtype == np.float32
        np.testing.assert_array_equal(x, y.numpy())
    assert explained_variance(arrays["value"], arrays["reward"], valid.numpy()) == explained_variance(
        tensors["value"], tensors["reward"], valid
    )


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 10_000), T=st.integers(1, 20), N=st.integers(1, 3), steps=st.integers(1, 25))
def test_against_brute_force(seed: int, T: int, N: int, steps: int) -> None:
    """Neither returns nor GAE use values from after a truncation."""
    r = random_rollout(seed, T, N)
    nstep = nstep_returns(r["reward"], r["next_value"], r["terminated"], r["done"], GAMMA, steps)
    plain = discounted_returns(r["reward"], r["next_value"], r["terminated"], r["done"], GAMMA)
    advantage = gae(r["reward"], r["value"], r["next_value"], r["terminated"], r["done"], GAMMA, LAM)
    for t in range(T):
        for n in range(N):
            assert float(nstep[t, n]) == pytest.approx(brute_nstep(r, t, n, steps, GAMMA))
            assert float(plain[t, n]) == pytest.approx(brute_nstep(r, t, n, T + 1, GAMMA))
            assert float(advantage[t, n]) == pytest.approx(brute_gae(r, t, n, GAMMA, LAM))


def test_gae_on_tensors_equals_gae_on_arrays(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = torch.Generator().manual_seed(0)
    reward, value, next_value = (torch.randn(17, 3, generator=rng) for _ in range(3))
    terminated, truncated = (torch.rand(17, 3, generator=rng) < 0.2 for _ in range(2))
    inputs = (reward, value, next_value, terminated, terminated | truncated)
    before = [tensor.clone() for tensor in inputs]
    advantage = gae(*inputs, 1.0, 0.9)
    assert all(torch.equal(tensor, copy) for tensor, copy in zip(inputs, before, strict=True)), "left as they were"
    monkeypatch.setattr(returns, "_as_numpy_on_cpu", lambda *tensors: list(tensors))  # as on a GPU
    torch.testing.assert_close(gae(*inputs, 1.0, 0.9), advantage)
    assert all(torch.equal(tensor, copy) for tensor, copy in zip(inputs, before, strict=True))


def test_returns_that_diverge_are_told_elsewhere(recwarn: pytest.WarningsRecorder) -> None:
    infinite, no = torch.full((4, 1), torch.inf), torch.zeros(4, 1, dtype=torch.bool)
    assert gae(infinite, infinite, infinite, no, no, 0.9, 0.9).isnan().any()
    assert gae(infinite, infinite - infinite, 3e38 + infinite, no, no, 0.9, 0.9).isnan().any()
    assert not recwarn.list


def test_shapes_are_checked() -> None:
    with pytest.raises(ValueError, match="the same shape"):
        discounted_scan(torch.zeros(3), torch.zeros(3))
    with pytest.raises(ValueError, match="the same shape"):
        discounted_scan(torch.zeros(3, 2), torch.zeros(3, 1))
    no = torch.zeros(3, 2, dtype=torch.bool)
    with pytest.raises(ValueError, match="the same shape"):
        gae(torch.zeros(3, 2), torch.zeros(3, 2), torch.zeros(3, 1), no, no, 0.9, 0.9)


@pytest.mark.parametrize("asynchronous", [False, True])
def test_standardize(monkeypatch: pytest.MonkeyPatch, asynchronous: bool) -> None:
    monkeypatch.setattr(device, "ON_CPU", asynchronous)
    x = standardize(torch.tensor([[1.0, 2.0], [3.0, 4.0]]))
    assert float(x.mean()) == pytest.approx(0.0, abs=1e-6)
    assert float(x.std()) == pytest.approx(1.0, abs=1e-4)
    assert standardize(torch.full((4,), 7.0)).abs().max() == 0.0
    for value, count in ((0.1, 128), (1 / 3, 128), (3.7, 32), (100.3, 1000)):  # the float32 mean has a rounding error
        assert standardize(torch.full((count,), value)).abs().max() == 0.0
        assert np.abs(standardize(np.full(count, value, np.float32))).max() == 0.0
    assert standardize(torch.tensor([100.0, 100.1])).tolist() == pytest.approx([-(0.5**0.5), 0.5**0.5], rel=1e-4)
    assert standardize(torch.tensor([7.0])).tolist() == [7.0], "a single one keeps its signal"
