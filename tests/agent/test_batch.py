"""Tests of minibatches of rollouts: values, bootstrapping, sequences, and the removal of dummy rows."""

import numpy as np
import pytest
import torch

from slm_lab.agent.net.actor_critic_net import ActorCriticNet
from slm_lab.agent.rollout.minibatch import RolloutBatch, SequenceInputs, compute_critic_outputs
from slm_lab.agent.rollout.rollout import OnPolicyBatchReplay, Rollout
from slm_lab.lib.records import EnvInfo
from slm_lab.spec.models.net import MLPNetSpec, RecurrentNetSpec
from tests.agent.helpers import ToyEnv, info
from tests.agent.test_memory import gather

MLP_SPEC = MLPNetSpec(name="MLPNet", hid_layers=[8])
RNN_SPEC = RecurrentNetSpec(name="RecurrentNet", rnn_hidden_size=6)


def make(spec: MLPNetSpec | RecurrentNetSpec, T: int = 18, next_step: bool = False) -> tuple[ActorCriticNet, Rollout, EnvInfo]:
    env_info = info(3)
    net = ActorCriticNet(spec, env_info.observation, 3).eval()
    memory = OnPolicyBatchReplay(env_info, T, net.state_size)
    gather(memory, ToyEnv(env_info, 11, next_step), net.state_size)
    rollout = memory.rollout()
    if net.state_size:
        _fill_states(net, rollout)
    return net, rollout, env_info


@torch.no_grad()
def _fill_states(net: ActorCriticNet, rollout: Rollout) -> None:
    """Set the hidden state of each truncated row to the state that the net itself computes for it."""
    state, never = rollout.state_NS, torch.zeros(1, rollout.obs_TN.shape[1], dtype=torch.bool)
    cut = rollout.truncations
    for t in range(len(rollout.reward_TN)):
        state = torch.where(rollout.first_TN[t].unsqueeze(1), 0.0, state)
        _, _, state = net.unroll(rollout.obs_TN[t : t + 1], never, state)
        for k in (cut.t_K == t).nonzero().flatten():
            cut.state_KS[k] = state[cut.n_K[k]]


def test_next_values_feed_forward() -> None:
    """A truncated row is bootstrapped from the last observation of its own episode, not from the first one of the next episode."""
    net, rollout, _ = make(MLP_SPEC)
    values = compute_critic_outputs(net, rollout, 1)
    cut = {
        (int(t), int(n)): obs for t, n, obs in zip(rollout.truncations.t_K, rollout.truncations.n_K, rollout.truncations.obs_K, strict=True)
    }
    assert cut
    with torch.no_grad():
        for t in range(18):
            for n in range(3):
                following = cut.get((t, n), rollout.obs_TN[t + 1, n])
                assert float(values.next_output_TN[t, n]) == pytest.approx(float(net.critic(following.unsqueeze(0))), abs=1e-6)
                assert float(values.output_TN[t, n]) == pytest.approx(float(net.critic(rollout.obs_TN[t, n].unsqueeze(0))), abs=1e-6)


@pytest.mark.parametrize("seq_len", [5, 6, 18, 40])
def test_recurrent_values_do_not_depend_on_the_cut(seq_len: int) -> None:
    net, rollout, _ = make(RNN_SPEC)
    values = compute_critic_outputs(net, rollout, seq_len)
    with torch.no_grad():
        _, whole, _ = net.unroll(rollout.obs_TN, rollout.first_TN, rollout.state_NS)
        assert torch.allclose(values.output_TN, whole[:-1], atol=1e-6)
        cut = rollout.truncations
        assert len(cut.t_K)
        for t, n, obs, state in zip(cut.t_K, cut.n_K, cut.obs_K, cut.state_KS, strict=True):
            alone = net.unroll(obs.view(1, 1, -1), torch.zeros(1, 1, dtype=torch.bool), state.unsqueeze(0))[1]
            assert float(values.next_output_TN[t, n]) == pytest.approx(float(alone), abs=1e-6)


def batch_of(rollout: Rollout, net: ActorCriticNet, seq_len: int) -> RolloutBatch:
    values = compute_critic_outputs(net, rollout, seq_len)
    labels = torch.arange(rollout.reward_TN.numel(), dtype=torch.float32).view_as(rollout.reward_TN)
    return RolloutBatch(rollout, values, labels, rollout.reward_TN, seq_len)


@pytest.mark.parametrize(("spec", "seq_len"), [(MLP_SPEC, 1), (RNN_SPEC, 5), (RNN_SPEC, 6), (RNN_SPEC, 40)])
def test_every_epoch_sees_each_valid_transition_once(spec: MLPNetSpec | RecurrentNetSpec, seq_len: int) -> None:
    net, rollout, _ = make(spec, next_step=True)
    batch = batch_of(rollout, net, seq_len)
    valid = torch.arange(rollout.reward_TN.numel()).view_as(rollout.reward_TN)[rollout.valid_TN].tolist()
    assert len(valid) < rollout.reward_TN.numel()  # there were dummy rows
    assert sorted(next(batch.microbatches())[0].advantage_B.tolist()) == valid
    minibatches = list(batch.epoch_minibatches(2, 16, np.random.default_rng(0)))
    half = len(minibatches) // 2
    epochs = [[x for m in part for x in m.advantage_B.tolist()] for part in (minibatches[:half], minibatches[half:])]
    assert sorted(epochs[0]) == sorted(epochs[1]) == valid
    if seq_len < 18:
        assert epochs[0] != epochs[1]
    again = list(batch.epoch_minibatches(2, 16, np.random.default_rng(0)))
    assert all(torch.equal(a.advantage_B, b.advantage_B) for a, b in zip(minibatches, again, strict=True))


@pytest.mark.parametrize(("spec", "seq_len"), [(MLP_SPEC, 1), (RNN_SPEC, 5), (RNN_SPEC, 18)])
def test_rows_stay_together(spec: MLPNetSpec | RecurrentNetSpec, seq_len: int) -> None:
    """The observation, action, old value and target in a row of a minibatch belong to the same transition."""
    net, rollout, _ = make(spec, next_step=True)
    batch = batch_of(rollout, net, seq_len)
    values = compute_critic_outputs(net, rollout, seq_len)
    for minibatch in batch.epoch_minibatches(1, 16, np.random.default_rng(1)):
        index = minibatch.advantage_B.long()
        t, n = index // 3, index % 3
        assert torch.equal(minibatch.action_B, rollout.action_TN[t, n])
        assert torch.equal(minibatch.logp_B, rollout.logp_TN[t, n])
        assert torch.equal(minibatch.target_B, rollout.reward_TN[t, n])
        assert torch.equal(minibatch.value_B, values.output_TN[t, n])
        _, value_B = minibatch.forward(net)
        assert torch.allclose(value_B, values.output_TN[t, n], atol=1e-5)  # the initial states of sequences are correct


def test_minibatch_sizes_are_even() -> None:
    net, rollout, _ = make(MLP_SPEC)  # 54 transitions
    sizes = [len(m.advantage_B) for m in batch_of(rollout, net, 1).epoch_minibatches(1, 16, np.random.default_rng(0))]
    assert sum(sizes) == 54
    assert max(sizes) - min(sizes) <= 1
    assert len(sizes) == 3
    assert [len(m.advantage_B) for m in batch_of(rollout, net, 1).epoch_minibatches(1, 1000, np.random.default_rng(0))] == [54]


def test_sequences_carry_their_state() -> None:
    net, rollout, _ = make(RNN_SPEC)
    whole, weight = next(batch_of(rollout, net, 6).microbatches())
    assert weight == 1.0
    assert isinstance(whole.inputs, SequenceInputs)
    assert whole.inputs.obs_LM.shape[:2] == (6, 9)
    assert torch.equal(whole.inputs.state_MS[:3], rollout.state_NS)


@pytest.mark.parametrize(("spec", "seq_len"), [(MLP_SPEC, 1), (RNN_SPEC, 5)])
def test_microbatches_add_up_to_the_whole(spec: MLPNetSpec | RecurrentNetSpec, seq_len: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The sum of the gradients of many microbatches, weighted by their sizes, equals the gradient of one batch."""
    net, rollout, _ = make(spec, next_step=True)
    gradients = []
    for limit in (2**20, 16 * 4 * seq_len):
        monkeypatch.setattr("slm_lab.agent.rollout.minibatch.MICROBATCH_BYTES", limit)
        net.zero_grad()
        parts = list(batch_of(rollout, net, seq_len).microbatches())
        for part, weight in parts:
            (weight * part.forward(net)[1].square().mean()).backward()
        gradients.append(torch.cat([p.grad.flatten() for p in net.parameters() if p.grad is not None]))
        assert sum(weight for _, weight in parts) == pytest.approx(1.0)
    assert len(parts) > 2
    assert torch.allclose(*gradients, atol=1e-5)


def test_sequences_of_nothing_are_dropped() -> None:
    net, rollout, _ = make(RNN_SPEC)
    rollout.valid_TN[6:12, 1] = False
    batch = batch_of(rollout, net, 6)
    assert batch.size == 9 - 1
    assert all(len(m.action_B) for m in batch.epoch_minibatches(2, 1, np.random.default_rng(0)))
