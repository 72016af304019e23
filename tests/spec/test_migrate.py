"""Tests of the migration of spec files of older versions."""

from __future__ import annotations

import pytest

from slm_lab.spec.compat import env_ids
from slm_lab.spec.compat.migrate import migrate_spec
from slm_lab.spec.load.files import spec_names
from slm_lab.spec.load.loader import load_spec
from slm_lab.spec.report import Report
from tests.spec.conftest import PPO, Specs, changed

V4 = """{
  "ppo_pong": {
    "agent": [{
      "name": "PPO",
      "algorithm": {
        "name": "PPO", "action_pdtype": "default", "action_policy": "multi_default", "explore_var_spec": null,
        "lam": 0.95, "clip_val_loss": true,
        "clip_eps_spec": {"name": "no_decay", "start_val": 0.10, "end_val": 0.10, "start_step": 0, "end_step": 0},
        "time_horizon": 128, "minibatch_size": 4096, "training_epoch": 4, "training_frequency": 1,
      },
      "memory": {"name": "OnPolicyBatchReplay",},
      "net": {
        "type": "ConvNet", "shared": true, "conv_hid_layers": [[32, 8, 4, 0, 1], [64, 4, 2, 0, 1]], "fc_hid_layers": [512],
        "update_type": "replace", "loss_spec": {"name": "MSELoss"}, "use_same_optim": false,
        "actor_optim_spec": {"name": "Adam", "lr": 2.5e-4,}, "critic_optim_spec": {"name": "Adam", "lr": 2.5e-4,},
      }
    }],
    "env": [{"name": "PongNoFrameskip-v4", "frame_op": "concat", "frame_op_len": 4, "image_downsize": [84, 84], "normalize_state": false,
      "reward_scale": "sign", "num_envs": 8, "max_t": null, "max_frame": 1e7}],
    "body": {"product": "outer", "num": 1},
    "meta": {"distributed": false, "num_cpus": 4, "num_gpus": 1, "train_mode": true, "max_session": 4},
    "search": {"agent": [{"algorithm": {"lam__grid_search": [0.7, 0.9], "clip_eps__uniform": [0.1, 0.3]}}]}
  }
}"""


def test_v4_file_with_one_notice_for_each_change(specs: Specs) -> None:
    spec = load_spec(specs.file(V4), "ppo_pong")
    assert spec.agent.algorithm.model_dump(include={"action_policy", "clip_vloss", "minibatch_size", "training_frequency"}) == {
        "action_policy": "default",
        "clip_vloss": True,
        "minibatch_size": 1024,
        "training_frequency": None,
    }
    assert (spec.env.name, spec.env.max_frame, spec.env.normalize_obs, spec.env.kwargs) == ("ALE/Pong-v5", 10_000_000, False, {})
    assert (spec.meta.search_resources.cpu, spec.meta.search_resources.gpu) == (4, 1)
    assert spec.search == {"agent": {"algorithm": {"lam__grid_search": [0.7, 0.9]}}}
    assert specs.notices() == [
        "agent",
        "env",
        "search.agent",
        "agent[0].algorithm.clip_val_loss",
        "env[0].normalize_state",
        "meta.num_cpus",
        "meta.num_gpus",
        "body",
        "env[0].frame_op",
        "env[0].frame_op_len",
        "env[0].image_downsize",
        "meta.train_mode",
        "agent[0].algorithm.action_policy",
        "env[0].name",
        "env[0].name",  # sticky actions
        "env[0].name",  # lost lives
        "search.agent[0].algorithm.clip_eps__uniform",
        "env[0].num_envs",
        "agent[0].net.batch_norm",
        "agent[0].algorithm.minibatch_size",
        "agent[0].algorithm.training_frequency",
    ]
    assert all(notice.startswith("ppo_pong: ") for notice in specs.told())


V4_RUN = {
    "experiment": 0,
    "trial": 0,
    "session": -1,
    "cuda_offset": 0,
    "resume": False,
    "experiment_ts": "2020_04_01_120000",
    "ckpt": None,
    **{f"{folder}prepath": "data/x/ppo_t0" for folder in ("", "graph_", "info_", "log_", "model_")},
    "predir": "data/x",
    "git_sha": "5fa5ee3d",
    "eval_model_prepath": "data/x/model/ppo_t0",
    "random_seed": 1585742400,
}
"""Keys that SLM Lab adds to meta of the spec that it saves with a run."""


def test_a_spec_that_slm_lab_saved_with_a_run(specs: Specs) -> None:
    """The file holds the body of the spec without its name as key. A null gives no notice, and the seed is used."""
    body = changed(PPO, {f"meta.{key}": value for key, value in V4_RUN.items()})
    saved = {**body, "agent": [body["agent"]], "env": [body["env"]], "body": {"product": "outer", "num": 1}, "name": "ppo", "search": None}
    file = specs.file(saved, "ppo_spec.json")
    assert spec_names(file) == ["ppo"]
    spec = load_spec(file, "ppo")
    assert (spec.name, spec.meta.random_seed, spec.env.max_frame) == ("ppo", 1585742400, 1000)
    written = [f"meta.{key}" for key in V4_RUN if key not in ("ckpt", "random_seed")]
    notices = specs.notices()
    assert sorted(notice for notice in notices if notice.startswith("meta.")) == sorted(written)
    assert {"agent", "env", "body"} <= set(notices)


@pytest.mark.parametrize("place", ["meta", "env"])
@pytest.mark.parametrize("unit", [None, "total_t", "frame"])
def test_max_tick_counts_frames(unit: str | None, place: str, specs: Specs) -> None:
    spec = specs.load({"env.max_frame": ..., "env.max_tick": 3e4, f"{place}.max_tick_unit": unit})
    assert spec.env.max_frame == 30_000
    assert specs.notices() == ["env.max_tick"] + [f"{place}.max_tick_unit"] * (unit is not None)


def test_max_tick_that_counts_episodes_is_refused(specs: Specs) -> None:
    (problem,) = specs.messages({"env.max_frame": ..., "env.max_tick": 500, "meta.max_tick_unit": "epi"})
    assert problem.startswith('env.max_tick: counts in units of "epi"')
    assert "env.max_frame" in problem


def test_hydra_dqn_is_dqn(specs: Specs) -> None:
    net = {"type": "HydraMLPNet", "hid_layers": [[[32], [32]], [64], []]}
    spec = specs.load({"agent.algorithm": {"name": "HydraDQN"}, "agent.memory": {"name": "Replay"}, "agent.net": net})
    assert spec.agent.algorithm.name == "DQN"
    assert specs.notices() == ["agent.algorithm.name"]


def test_problems_stand_at_the_path_in_the_old_file(specs: Specs) -> None:
    bad = V4.replace('"lam": 0.95', '"lam": 2').replace('"normalize_state": false', '"normalize_state": 3').replace('"MSELoss"', '"MSE"')
    assert specs.found(load_spec, specs.file(bad), "ppo_pong") == [
        "agent[0].algorithm.lam",
        "env[0].normalize_state",
        "agent[0].net.loss_spec.name",
    ]


@pytest.mark.parametrize("count", [0, 2])
def test_a_list_of_several_agents_is_refused(specs: Specs, count: int) -> None:
    """It is read only if the env is a list too, a form that only SLM Lab v4 has."""
    assert specs.problems({"agent": [PPO["agent"]] * count}) == ["agent"]


def test_migrating_twice_changes_nothing_more() -> None:
    raw = changed(PPO, {"env.name": "LunarLander-v2", "agent.algorithm.clip_val_loss": True, "meta.num_cpus": 2})
    first, second = Report(), Report()
    migrate_spec(raw, first)
    once = changed(raw, {})
    migrate_spec(raw, second)
    assert raw == once
    assert first.notes
    assert not second.notes


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("LunarLander-v2", "LunarLander-v3"),
        ("BipedalWalker-v2", "BipedalWalker-v3"),
        ("Pendulum-v0", "Pendulum-v1"),
        ("HalfCheetah-v2", "HalfCheetah-v5"),
        ("PongNoFrameskip-v4", "ALE/Pong-v5"),
        ("BreakoutDeterministic-v0", "ALE/Breakout-v5"),
        ("VideoPinball-v0", "ALE/VideoPinball-v5"),
        ("RoboschoolAnt-v1", "Ant-v5"),
        ("RoboschoolWalker2d-v1", "Walker2d-v5"),
        ("Walker2DBulletEnv-v0", "Walker2d-v5"),
        ("InvertedPendulumBulletEnv-v0", "InvertedPendulum-v5"),
        ("Hopper-v3", "Hopper-v5"),
        ("PongDeterministic-v4", "ALE/Pong-v5"),
        ("Pong-v0", "ALE/Pong-v5"),
        ("CartPole-v0", "CartPole-v0"),  # the installed Gymnasium can make these
        ("Blackjack-v1", "Blackjack-v1"),
        ("Hopper-v4", "Hopper-v4"),
        ("Pusher-v4", "Pusher-v5"),
        ("CartPole-v1", "CartPole-v1"),
        ("Pong-v6", "Pong-v6"),
        ("Pong-ram-v4", "Pong-ram-v4"),
        ("Blackjack-v0", "Blackjack-v1"),
        ("ALE/Pong-v5", "ALE/Pong-v5"),
        ("my.envs:CartPole-v0", "my.envs:CartPole-v0"),
        ("CartPole-v9", "CartPole-v9"),
        ("RoboschoolHumanoidFlagrun-v1", "RoboschoolHumanoidFlagrun-v1"),
        ("cartpole-v0", "cartpole-v0"),
        ("Nothing", "Nothing"),
        ("Pong-v5", "ALE/Pong-v5"),
        ("Taxi-v3", "Taxi-v4"),
        ("CheetahRun-v1", "CheetahRun-v1"),
        ("playground/CheetahRun", "CheetahRun-v1"),
        ("playground/Go1Getup", "MuJoCoPlayground/Go1Getup-v1"),
        ("playground/BallInCup", "BallInCupCatch-v1"),
        ("playground/PointMass", "PointMassEasy-v1"),
        ("playground/Nothing", "playground/Nothing"),
        ("dm_control/cheetah-run", "CheetahRun-v1"),
        ("dm_control/ball_in_cup-catch-v0", "BallInCupCatch-v1"),
        ("dm_control/humanoid_CMU-run", "HumanoidCMURun-v1"),
        ("dm_control/go1-getup", "dm_control/go1-getup"),
    ],
)
def test_old_env_ids(old: str, new: str) -> None:
    assert env_ids.current_id(old) == new


def test_env_ids_are_the_same_once_gymnasium_is_imported() -> None:
    import gymnasium

    assert "Hopper-v3" in gymnasium.registry  # but it needs mujoco_py, which Gymnasium no longer supports
    assert env_ids.current_id("Hopper-v3") == "Hopper-v5"
    gymnasium.register("LunarLander-v2", entry_point="gymnasium.envs.classic_control:CartPoleEnv")
    try:
        assert env_ids.current_id("LunarLander-v2") == "LunarLander-v2"
    finally:
        del gymnasium.registry["LunarLander-v2"]


@pytest.mark.parametrize(
    ("name", "short"),
    [
        ("ALE/Pong-v5", "pong"),
        ("PongNoFrameskip-v4", "pong"),
        ("HalfCheetah-v5", "halfcheetah"),
        ("my.envs:My-Env-v0", "my_env"),
        ("phys2d/CartPole-v1", "cartpole"),
    ],
)
def test_short_names(name: str, short: str) -> None:
    assert env_ids.short_name(name) == short
