"""Tests of action masks and entries for the critic only: their columns in an observation, and what an env must return."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces

from slm_lab.agent.net.layers import unpack
from slm_lab.env import make_env
from slm_lab.env.agent_spaces import agent_spaces
from slm_lab.env.outcome import InvalidOutcome
from slm_lab.spec.load.loader import load_spec
from slm_lab.spec.models.env import EnvSpec
from slm_lab.spec.report import Problem, SpecError

SEEN = spaces.Box(-1, 1, (2,), np.float32)
FORBIDDING = "tests.env.masked:Forbidding-v0"


def spec(**keys: Any) -> EnvSpec:
    return EnvSpec.model_validate({"name": FORBIDDING, "max_frame": 100, "num_envs": 2, **keys})


def space(**entries: Any) -> spaces.Dict:
    return spaces.Dict({"z": SEEN, **entries})


def test_the_mask_comes_last_and_entries_for_the_critic_before_it() -> None:
    entries = space(action_mask=spaces.Box(0, 1, (3,), np.int8), extra=spaces.Box(-1, 1, (1,)), a=spaces.Discrete(2))
    found = agent_spaces(spec(critic_keys=["extra"]), entries, spaces.Discrete(3))
    assert list(found.space.spaces) == ["a", "z", "extra", "action_mask"]
    known = found.observation
    assert (known.shape, known.critic_begin, known.mask) == ((8,), 4, (5, 8))
    assert known.space_for(critic=False).shape == (4,)
    assert known.space_for(critic=True).shape == (5,)
    row = {"action_mask": np.array([[0, 1, 1]], np.int8), "extra": np.array([[0.5]]), "a": np.array([1]), "z": np.array([[0.1, 0.2]])}
    np.testing.assert_allclose(found.encode(row), [[0, 1, 0.1, 0.2, 0.5, 0, 1, 1]], rtol=1e-6)
    del row["extra"]  # a trained agent acts without the critic's entry
    np.testing.assert_allclose(found.encode(row), [[0, 1, 0.1, 0.2, 0.0, 0, 1, 1]], rtol=1e-6)


def test_beside_an_image_the_mask_is_one_byte_per_action() -> None:
    image = spaces.Box(0, 255, (3, 9, 9), np.uint8)
    found = agent_spaces(spec(critic_keys=["z"]), space(action_mask=spaces.MultiBinary(3), i=image), spaces.Discrete(3))
    known = found.observation
    assert known.mask is not None
    obs = {"i": np.full((1, 3, 9, 9), 7, np.uint8), "z": np.array([[0.1, 0.2]]), "action_mask": np.array([[1, 0, 1]])}
    packed = found.encode(obs)
    assert packed[0, slice(*known.mask)].tolist() == [1, 0, 1]
    uses = {part.name: part.use for part in known.parts}
    assert uses == {"i": "all", "z": "critic", "action_mask": "mask"}
    for critic, names in ((False, ["i"]), (True, ["i", "z"])):
        seen = known.space_for(critic)
        assert [part.name for part in seen.parts] == names
        entries = unpack(torch.from_numpy(packed), seen.parts, normalize=False)
        np.testing.assert_allclose(entries[-1].flatten()[:1], [0.1 if critic else 7])


def test_a_mask_of_all_combinations_makes_one_choice() -> None:
    """The choice numbers the combinations in C order, as numpy does; the env gets the components."""
    entries, action = space(action_mask=spaces.MultiBinary([3, 4])), spaces.MultiDiscrete([3, 4], start=[1, 0])
    found = agent_spaces(spec(), entries, action)
    assert found.joint
    assert (found.action.kind, found.action.nvec) == ("discrete", (12,))
    assert found.decode(np.array([0, 7, 11])).tolist() == [[1, 0], [2, 3], [3, 3]]
    each = agent_spaces(spec(), space(action_mask=spaces.MultiBinary(7)), action)
    assert (each.joint, each.action.kind, each.observation.mask) == (False, "multi_discrete", (2, 9))
    rows = agent_spaces(spec(), space(action_mask=spaces.MultiBinary([2, 2])), spaces.MultiDiscrete([2, 2]))
    assert not rows.joint, "a row per component"


@pytest.mark.parametrize(
    ("keys", "action", "mask", "path"),
    [
        ({}, spaces.Discrete(3), spaces.MultiBinary(4), "env.action_mask"),
        ({}, spaces.Discrete(3), spaces.Discrete(3), "env.action_mask"),
        ({}, spaces.MultiDiscrete([3, 4]), spaces.MultiBinary([4, 3]), "env.action_mask"),
        ({"action_mask": "action_mask"}, spaces.Box(-1, 1, (3,)), spaces.MultiBinary(3), "env.action_mask"),
        ({"action_mask": "mask"}, spaces.Discrete(3), spaces.MultiBinary(3), "env.action_mask"),
        ({"critic_keys": ["z", "x"]}, spaces.Discrete(3), spaces.MultiBinary(3), "env.critic_keys[1]"),
        ({"critic_keys": ["z"]}, spaces.Discrete(3), spaces.MultiBinary(3), "env.critic_keys"),
    ],
)
def test_masks_and_keys_that_do_not_fit(keys: dict[str, Any], action: Any, mask: Any, path: str) -> None:
    with pytest.raises(SpecError) as caught:
        agent_spaces(spec(**keys), space(action_mask=mask), action)
    assert [problem.path for problem in caught.value.problems] == [path]


def test_a_mask_of_continuous_actions_says_which_actions_have_masks() -> None:
    with pytest.raises(SpecError, match="masks Discrete and MultiDiscrete actions, and the actions of this env are Box"):
        agent_spaces(spec(action_mask="action_mask"), space(action_mask=spaces.MultiBinary(3)), spaces.Box(-1, 1, (3,)))


def test_false_and_continuous_actions_leave_an_ordinary_entry() -> None:
    for keys, action in (({"action_mask": False}, spaces.Discrete(3)), ({}, spaces.Box(-1, 1, (3,)))):
        assert agent_spaces(spec(**keys), space(action_mask=spaces.MultiBinary(3)), action).observation.mask is None


def valid(obs: np.ndarray) -> np.ndarray:
    return obs[:, 2:] != 0


@pytest.mark.parametrize("backend", ["sync", pytest.param("async", marks=pytest.mark.slow)])
def test_random_actions_obey_masks_of_observations_and_infos(backend: str) -> None:
    """Masks in observations and in infos give the same transitions, without invalid actions; normalize_obs does not change masks."""
    steps = []
    for keys in ({}, {"where": "info", "action_mask": "action_mask"}):
        env = make_env(spec(length=5, backend=backend, normalize_obs=True, **keys), 3)
        obs = env.reset()
        assert valid(obs).sum(axis=1).tolist() == [2, 2]
        steps.append([env.step(env.sample()) for _ in range(12)])
        env.close()
    for one, other in zip(*steps, strict=True):
        np.testing.assert_allclose(one.obs_N, other.obs_N)
        assert set(one.obs_N[:, 2:].ravel()) == {0.0, 1.0}


def test_an_empty_mask_names_env_and_step_but_may_end_an_episode() -> None:
    env = make_env(spec(length=4, empty_after=4), 3)
    env.reset()
    steps = [env.step(env.sample()) for _ in range(9)]
    assert valid(steps[3].last_obs_N).all(), "the last observation of an episode: no action follows"
    assert valid(steps[3].obs_N).sum(axis=1).tolist() == [2, 2]
    env = make_env(spec(length=9, max_t=4), 3)
    env.reset()
    cut = [env.step(env.sample()) for _ in range(4)][-1]
    assert cut.truncated_N.all()
    assert valid(cut.last_obs_N).sum(axis=1).tolist() == [2, 2], "values of this observation are bootstrapped"
    env = make_env(spec(length=4, empty_after=2), 3)
    env.reset()
    env.step(env.sample())
    with pytest.raises(InvalidOutcome, match="env 0, step 2"):
        env.step(env.sample())


@pytest.mark.parametrize(("keys", "fails"), [({}, True), ({"action_mask": False}, False), ({"action_mask": "other"}, True)])
def test_a_mask_in_info_is_never_ignored_silently(keys: dict[str, Any], fails: bool) -> None:
    env = make_env(spec(where="info", **keys), 3)
    if fails:
        with pytest.raises(InvalidOutcome, match=r"env\.action_mask"):
            env.reset()
    else:
        assert env.reset().shape == (2, 2)


def test_the_last_info_of_an_episode_needs_no_mask() -> None:
    env = make_env(spec(where="info", action_mask="action_mask", length=3, silent_end=True), 3)
    env.reset()
    ended = [env.step(env.sample()).terminated_N.all() for _ in range(6)]
    assert ended == [False, False, True] * 2


@pytest.mark.parametrize(("keys", "fails"), [({}, True), ({"action_mask": False}, False)])
def test_a_mask_in_the_info_of_a_vector_env_is_an_error(keys: dict[str, Any], fails: bool) -> None:
    env = make_env(spec(name="tests.env.masked:ForbiddingVector-v0", **keys), 3)
    if fails:
        with pytest.raises(InvalidOutcome, match=r"env\.action_mask"):
            env.reset()
    else:
        assert env.reset().shape == (2, 2)


@pytest.mark.parametrize("key", [None, "action_mask"])
def test_a_vector_env_may_have_its_mask_in_the_observation(key: str | None) -> None:
    env = make_env(spec(name="tests.env.masked:ForbiddingVector-v0", where="obs", action_mask=key), 3)
    assert env.reset().shape == (2, 42)
    env.step(env.sample())


def test_a_vector_env_without_the_entry_says_that_its_info_is_not_read() -> None:
    (problem,) = problems(name="tests.env.masked:ForbiddingVector-v0", action_mask="action_mask")
    assert problem.path == "env.action_mask"
    assert problem.message.endswith("the observation is not a Dict; this backend reads no masks from info")


def problems(**keys: Any) -> list[Problem]:
    with pytest.raises(SpecError) as caught:
        make_env(spec(**keys), 3)
    return caught.value.problems


def test_an_unknown_mask_names_the_entries_and_the_nearest() -> None:
    env = make_env(spec(where="info", action_mask="action_masks"), 3)
    expected = "no entry 'action_masks' in the observation or info; did you mean 'action_mask'?"
    with pytest.raises(
        InvalidOutcome, match=rf"env\.action_mask: {re.escape(expected)} entries of the observation: none; of info: action_mask"
    ):
        env.reset()
    with pytest.raises(InvalidOutcome, match=r"entries of the observation: (seen, action_mask|action_mask, seen); of info: none"):
        make_env(spec(action_mask="legal"), 3).reset()


@pytest.mark.parametrize(
    ("name", "nearest"),
    [
        ("Play2048-v1", "; did you mean 'legal_action_mask'?"),
        ("Jumanji/Snake-v1", " entries of the observation: grid, step_count, action_mask;"),
    ],
)
def test_an_unknown_mask_of_envpool(name: str, nearest: str) -> None:
    pytest.importorskip("envpool")
    (problem,) = problems(name=name, action_mask="legal_actions_mask")
    assert problem.path == "env.action_mask"
    assert nearest in problem.message


@pytest.mark.parametrize("backend", ["sync", pytest.param("async", marks=pytest.mark.slow)])
@pytest.mark.parametrize(("keys", "mask"), [({}, (2, 42)), ({"action_mask": "action_mask"}, (2, 42)), ({"action_mask": False}, None)])
def test_obs_keys_keep_the_mask(backend: str, keys: dict[str, Any], mask: tuple[int, int] | None) -> None:
    env = make_env(spec(obs_keys=["seen"], backend=backend, **keys), 3)
    assert env.info.observation.mask == mask
    assert env.reset().shape == (2, 42 if mask else 2)
    env.close()


def test_obs_keys_keep_the_mask_of_envpool() -> None:
    pytest.importorskip("envpool")
    env = make_env(spec(name="Jumanji/Game2048-v1", obs_keys=["board"]), 3)
    assert env.info.observation.mask is not None
    env.reset()
    env.step(env.sample())


def test_taxi_has_a_mask_on_request() -> None:
    plain, masked = (
        make_env(EnvSpec.model_validate({"name": "Taxi-v4", "max_frame": 9, **keys}), 0) for keys in ({}, {"action_mask": "action_mask"})
    )
    assert plain.reset().shape == (1, 500)
    obs = masked.reset()
    assert obs.shape == (1, 506)
    for _ in range(50):
        assert masked.step(masked.sample()).reward_N[0] != -10 or obs[0, 504:].any(), "a pickup where there is nobody"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "kind", "size"),
    [
        ("Jumanji/Snake-v1", "discrete", 4),
        ("Play2048-v1", "discrete", 4),  # the mask is in info
        ("Jumanji/BinPack-v2", "discrete", 800),  # a mask of all combinations
        ("Jumanji/Connector-v2", "multi_discrete", 50),  # a row per component
        ("Jumanji/Maze-v0", "discrete", 4),  # the first masks are empty
    ],
)
def test_masks_of_envpool(name: str, kind: str, size: int) -> None:
    env = make_env(spec(name=name, num_envs=16), 0)
    assert (env.info.action.kind, sum(env.info.action.nvec)) == (kind, size)
    env.reset()
    steps = [env.step(env.sample()) for _ in range(200)]
    assert env.info.observation.mask is not None
    masks = np.stack([step.obs_N[:, slice(*env.info.observation.mask)] for step in steps])
    assert 0.0 < masks.mean() < 1.0


def test_backends_without_wrappers() -> None:
    with pytest.raises(SpecError) as caught:
        make_env(spec(name="CartPole-v1", backend="native", action_mask="x"), 0)
    assert caught.value.problems[0].path == "env.backend"


def test_entries_for_a_critic_need_one() -> None:
    env = {"name": "CartPole-v1", "max_frame": 100, "critic_keys": ["z"]}
    with pytest.raises(SpecError) as caught:
        load_spec({"values": {"agent": {"algorithm": {"name": "DQN"}}, "env": env}}, "values")
    assert [problem.path for problem in caught.value.problems] == ["env.critic_keys"]
