"""Tests of meta.init_from, which initialises the weights from another run."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from slm_lab import load_spec
from slm_lab.experiment.files.paths import RunPaths
from slm_lab.experiment.files.sink import LocalSink
from slm_lab.experiment.plan import Plan, UserError
from slm_lab.experiment.session.build import SessionContext
from slm_lab.experiment.session.session import Session
from slm_lab.experiment.session.session_process import make_shared_arrays
from slm_lab.lib.store import create_shared_file
from tests.experiment.test_agents import two_policies
from tests.resume.runs import NET, bundle, small, train


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> RunPaths:
    """Return a run from which other runs take their weights."""
    return train(small("PPO", "CartPole-v1", net=NET, env={"normalize_obs": True}), tmp_path_factory.mktemp("source") / "run")[1]


def built(where: str | Path, name: str = "PPO", **sections: Any) -> Session:
    """Return a built Session that starts from the weights of `where`, before its first step."""
    meta = {"init_from": str(where), **sections.pop("meta", {})}
    session = Session(small(name, "CartPole-v1", **{"net": NET, **sections}, meta=meta)).build()
    session.close()
    return session


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> dict[str, bool]:
    return {name: bool(torch.equal(value, other[name])) for name, value in one.items() if name in other}


def test_weights_and_statistics_of_the_best_checkpoint(source: RunPaths) -> None:
    best = bundle(source, which="best")
    session = built(source.root, env={"normalize_obs": True})
    assert all(same(best["weights"], session.agent.weights()).values())
    saved, own = best["normalizers"]["obs_stats"], session.learners[0].normalizers.state_dict()["obs_stats"]
    assert saved is not None
    assert str(saved) == str(own)
    other = built(source.root, meta={"random_seed": 77})  # the seed of the net has no effect on the loaded weights
    assert all(same(session.agent.weights(), other.agent.weights()).values())


@pytest.mark.slow
def test_lookahead_starts_from_the_weights(source: RunPaths) -> None:
    """Lookahead's slow weights must be set to the loaded weights, instead of those of the newly built net."""
    lookahead = {"optim_spec": {"name": "Lookahead", "lr": 1e-9, "k": 1, "alpha": 0.5}}
    session = built(source.root, net={**NET, **lookahead})
    before, trainer = session.agent.weights(), session.agent.algorithm.trainer
    assert all(same(bundle(source, which="best")["weights"], before).values())
    trainer.groups[0].optimizer.step()
    for name, value in session.agent.weights().items():
        torch.testing.assert_close(value, before[name])


def test_a_checkpoint_file(source: RunPaths) -> None:
    path = source.checkpoint(0, "last")
    assert all(same(bundle(source)["policies"][0]["weights"], built(path).agent.weights()).values())


def test_weights_of_other_shapes_stay_as_they_are(source: RunPaths, capsys: pytest.CaptureFixture[str]) -> None:
    """If the second layer has another width, the first layer is loaded, the rest is not, and both are listed."""
    taken = built(source.root, net={**NET, "hid_layers": [16, 8]})
    fresh = Session(small("PPO", "CartPole-v1", net={**NET, "hid_layers": [16, 8]})).build()
    fresh.close()
    kept = same(fresh.agent.weights(), taken.agent.weights())
    equal = same(bundle(source, which="best")["weights"], taken.agent.weights())
    assert any(equal.values())
    assert any(kept[name] for name in kept if not equal.get(name, False))
    assert not any(kept[name] for name in kept if equal.get(name, False) and "weight" in name)


def test_nothing_that_fits(source: RunPaths) -> None:
    with pytest.raises(UserError, match=r"meta\.init_from"):
        built(source.root, net={"type": "RecurrentNet", "cell_type": "GRU", "rnn_hidden_size": 8, "seq_len": 4})
    with pytest.raises(UserError, match=r"meta\.init_from"):
        built(source.root / "nowhere")


@pytest.fixture(scope="module")
def policies(tmp_path_factory: pytest.TempPathFactory) -> RunPaths:
    """Return a run with two policies."""
    spec = load_spec({"run": two_policies(good=["left"], evil=["right"])}, "run")
    return train(spec, tmp_path_factory.mktemp("policies") / "run")[1]


def with_policies(where: str | Path, *names: str) -> Session:
    body = two_policies(**{name: [agent] for name, agent in zip(names, ("right", "left"), strict=True)})
    session = Session(load_spec({"run": {**body, "meta": {**body["meta"], "init_from": str(where)}}}, "run")).build()
    session.close()
    return session


@pytest.mark.parametrize("file", [False, True])
def test_each_policy_starts_from_that_with_its_name(policies: RunPaths, file: bool) -> None:
    """Policies are matched by name, regardless of their order and of the agents they act for."""
    session = with_policies(policies.checkpoint(0, "last") if file else policies.root, "evil", "good")
    for learner, index in zip(session.learners, (1, 0), strict=True):
        saved = bundle(policies)["policies"][index] if file else bundle(policies, index, "best")
        assert all(same(saved["weights"], learner.agent.weights()).values())


def test_all_policies_start_from_one(policies: RunPaths) -> None:
    session = with_policies(policies.checkpoint(1, "best"), "evil", "good")
    for learner in session.learners:
        assert all(same(bundle(policies, 1, "best")["weights"], learner.agent.weights()).values())


def test_which_policy(policies: RunPaths) -> None:
    with pytest.raises(UserError, match=r"meta\.init_from: .* no policy 'godo'; did you mean 'good'\?"):
        with_policies(policies.root, "evil", "godo")
    with pytest.raises(UserError, match=r"meta\.init_from: .* has the policies good, evil; give the file"):
        built(policies.root)


def test_every_session_of_one_net(source: RunPaths) -> None:
    """Weights shared by several Sessions also start from the run."""
    spec = small("PPO", "CartPole-v1", net=NET, meta={"init_from": str(source.root), "distributed": "shared", "max_session": 2})
    store = make_shared_arrays(spec, create_shared_file())
    session = Session(spec, context=SessionContext(store=store)).build()
    session.close()
    assert all(same(bundle(source, which="best")["weights"], session.agent.weights()).values())


def test_a_continued_run_does_not_need_the_source(source: RunPaths, tmp_path: Path) -> None:
    """A Session with a checkpoint continues from it; without one it starts from the source again."""
    root = tmp_path / "copy"
    shutil.copytree(source.root, root)
    spec = small("PPO", "CartPole-v1", net=NET, meta={"init_from": str(root), "random_seed": 5})
    _, straight = train(spec, tmp_path / "straight")
    continued = RunPaths(tmp_path / "continued", spec.name)
    continued.root.mkdir()
    continued.make_dirs()

    def resume() -> Session:
        return Session(spec, plan=Plan(), context=SessionContext(resumed=continued)).build()

    first = resume()
    assert all(same(bundle(source, which="best")["weights"], first.agent.weights()).values())
    sink = LocalSink(continued)
    first.run(sink)
    sink.close()
    assert all(same(first.agent.weights(), bundle(straight)["policies"][0]["weights"]).values())
    shutil.rmtree(root)
    second = resume()
    second.close()
    assert all(same(first.agent.weights(), second.agent.weights()).values())
    shutil.rmtree(continued.model_dir)
    with pytest.raises(UserError, match=r"meta\.init_from"):
        resume()


def test_the_values_of_a_normalised_critic_are_kept(tmp_path: Path) -> None:
    """The critic's outputs are converted to values with statistics, without which its weights have no meaning."""
    normal: dict[str, Any] = {"algorithm": {"normalize_values": True}}
    paths = train(small("PPO", "CartPole-v1", net=NET, **normal), tmp_path / "run")[1]
    session, saved = built(paths.root, **normal), bundle(paths, which="best")
    assert saved["value_statistics"][0] > 0
    assert session.agent.value_statistics == saved["value_statistics"]


def test_a_critic_on_another_scale_is_named(source: RunPaths, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    scale = "meta.init_from: the critic of"
    normalised = train(small("PPO", "CartPole-v1", net=NET, algorithm={"normalize_values": True}), tmp_path / "run")[1]
    built(source.root, env={"normalize_obs": True})
    built(normalised.root, "Reinforce")  # has no critic
    assert scale not in caplog.text
    built(source.root, env={"normalize_obs": True}, algorithm={"normalize_values": True})
    assert scale in caplog.text
