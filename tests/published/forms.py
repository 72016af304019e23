"""The forms of the spec files that SLM Lab v5.3 publishes: algorithm × memory × net × kind of env, with the keys of those files.

The specs follow the style of those files: `net.type`, all keys that SLM Lab needs, `max_t` null, one object for each schedule.
"""

from __future__ import annotations

from typing import Any, NamedTuple

Keys = dict[str, Any]

ENVS: dict[str, Keys] = {
    "classic": {"name": "CartPole-v1", "num_envs": 4},
    "classic, 1 env": {"name": "CartPole-v1"},
    "acrobot": {"name": "Acrobot-v1", "num_envs": 4},
    "pendulum": {"name": "Pendulum-v1", "num_envs": 4},
    "pendulum, 1 env": {"name": "Pendulum-v1"},
    "box2d": {"name": "LunarLander-v3", "num_envs": 8},
    "box2d, 1 env": {"name": "LunarLander-v3"},
    "box2d, continuous": {"name": "LunarLander-v3", "num_envs": 8, "continuous": True},
    "bipedal": {"name": "BipedalWalker-v3", "num_envs": 4},
    "mujoco": {"name": "Hopper-v5", "num_envs": 4, "normalize_obs": True},
    "mujoco, normalised": {"name": "HalfCheetah-v5", "num_envs": 4, "normalize_obs": True, "normalize_reward": True, "clip_obs": 10.0},
    "atari": {"name": "ALE/Pong-v5", "num_envs": 4, "life_loss_info": True},
    "atari, sticky": {"name": "ALE/Breakout-v5", "num_envs": 4, "repeat_action_probability": 0.25},
    "atari, old id": {"name": "VideoPinball-v0", "num_envs": 4},
}
DECAY = {"name": "linear_decay", "start_val": 1.0, "end_val": 0.05, "start_step": 0, "end_step": 500}
ENTROPY = {"name": "linear_decay", "start_val": 0.01, "end_val": 0.001, "start_step": 0, "end_step": 500}
CLIP = {"name": "no_decay", "start_val": 0.2, "end_val": 0.0, "start_step": 0, "end_step": 0}
PLAIN = {"action_pdtype": "default", "action_policy": "default", "gamma": 0.98}
GREEDY = {"action_pdtype": "Argmax", "action_policy": "epsilon_greedy", "explore_var_spec": DECAY, "gamma": 0.99}
BOLTZMANN = {"action_pdtype": "Categorical", "action_policy": "boltzmann", "explore_var_spec": DECAY, "gamma": 0.99}
ACTOR = {**PLAIN, "explore_var_spec": None, "entropy_coef_spec": ENTROPY}
GAE = {"name": "ActorCritic", **ACTOR, "lam": 0.95, "num_step_returns": None, "policy_loss_coef": 1.0, "val_loss_coef": 0.5}
NSTEP = {**GAE, "lam": None, "num_step_returns": 5}
PPO = {
    "name": "PPO", **ACTOR, "lam": 0.95, "clip_eps_spec": CLIP, "val_loss_coef": 0.5, "time_horizon": 32, "minibatch_size": 64,
    "training_epoch": 2, "training_frequency": 1,
}  # fmt: skip
IMITATION = {"sil_policy_loss_coef": 1.0, "sil_val_loss_coef": 0.01, "training_batch_iter": 2, "training_iter": 2}
OFTEN = {"training_batch_iter": 1, "training_iter": 1, "training_frequency": 4, "training_start_step": 64}
SAC = {"name": "SoftActorCritic", **PLAIN, "training_frequency": 4, "training_iter": 2, "training_start_step": 128}
CROSSQ = {**SAC, "name": "CrossQ", "policy_delay": 3, "log_alpha_max": 0.5}

BATCH, EPISODES = {"name": "OnPolicyBatchReplay"}, {"name": "OnPolicyReplay"}
BEST = {"name": "OnPolicyCrossEntropy", "cross_entropy": 0.5}
SIL_BATCH = {**BATCH, "sil_replay_name": "Replay", "batch_size": 32, "max_size": 1000, "use_cer": True}
SIL_EPISODES = {**SIL_BATCH, "name": "OnPolicyReplay"}
REPLAY = {"name": "Replay", "batch_size": 32, "max_size": 1000, "use_cer": False}
CER = {**REPLAY, "use_cer": True}
PER = {**REPLAY, "name": "PrioritizedReplay", "alpha": 0.6, "epsilon": 0.0001}

ADAM = {"name": "Adam", "lr": 0.001}
TO_ZERO = {"name": "LinearToZero", "frame": 1000}
LEARNING: Keys = {
    "clip_grad_val": 0.5, "init_fn": "orthogonal_", "hid_layers_activation": "relu", "gpu": "auto", "loss_spec": {"name": "MSELoss"},
    "optim_spec": ADAM, "lr_scheduler_spec": None,
}  # fmt: skip
BOTH = {"use_same_optim": False, "actor_optim_spec": ADAM, "critic_optim_spec": ADAM}
SEPARATE: Keys = {**{key: value for key, value in LEARNING.items() if key != "optim_spec"}, "shared": False, **BOTH}
SHARED: Keys = {**LEARNING, "shared": True, "use_same_optim": True, "lr_scheduler_spec": TO_ZERO}
POLYAK = {"update_type": "polyak", "update_frequency": 1, "polyak_coef": 0.005}
COPIES = {"update_type": "replace", "update_frequency": 100}
LAYERS = {"type": "MLPNet", "hid_layers": [64, 64]}
DUELING = {"type": "DuelingMLPNet", "shared": False, "hid_layers": [64]}
HYDRA = {"type": "HydraMLPNet", "hid_layers": [[[32], [32]], [64], []]}
GRU = {
    "type": "RecurrentNet", "cell_type": "GRU", "fc_hid_layers": [], "rnn_hidden_size": 32, "rnn_num_layers": 1, "bidirectional": False,
    "seq_len": 4,
}  # fmt: skip
CONV = {
    "type": "ConvNet", "conv_hid_layers": [[16, 8, 4, 0, 1], [32, 4, 2, 0, 1]], "fc_hid_layers": [64], "normalize": True,
    "batch_norm": False,
}  # fmt: skip
DUELING_CONV = {**CONV, "type": "DuelingConvNet"}
ARC = {
    "type": "TorchArcNet",
    "arc": {
        "modules": {"body": {"Sequential": [{"LazyLinear": {"out_features": 64}}, {"Tanh": None}, {"LazyLinear": {"out_features": 64}}]}},
        "graph": {"input": "x", "modules": {"body": ["x"]}, "output": "body"},
    },
}
ARC_CONV = {
    "type": "TorchArcNet",
    "normalize": True,
    "arc": {
        "modules": {
            "body": {
                "Sequential": [
                    {"LazyConv2d": {"out_channels": 16, "kernel_size": 8, "stride": 4}},
                    {"ReLU": None},
                    {"Flatten": None},
                    {"LazyLinear": {"out_features": 64}},
                    {"ReLU": None},
                ]
            }
        },
        "graph": {"input": "x", "modules": {"body": ["x"]}, "output": "body"},
    },
}
NORMED = {
    "type": "TorchArcNet",
    "arc": {
        "modules": {
            "body": {
                "Sequential": [
                    {"LazyLinear": {"out_features": 64}},
                    {"LazyBatchRenorm1d": {"momentum": 0.01, "eps": 0.001, "warmup_steps": 10000}},
                    {"ReLU": None},
                ]
            }
        },
        "graph": {"input": "x", "modules": {"body": ["x"]}, "output": "body"},
    },
}
ARC_PLAIN = {key: value for key, value in LEARNING.items() if key != "hid_layers_activation"}
ARC_SEPARATE = {key: value for key, value in SEPARATE.items() if key != "hid_layers_activation"}


class Form(NamedTuple):
    """A spec in the style of the published files."""

    algorithm: Keys
    memory: Keys
    net: Keys | None
    env: str
    meta: Keys = {}
    critic_net: Keys | None = None

    def raw(self) -> Keys:
        """Return the raw spec without the number of frames."""
        agent = {"name": "theirs", "algorithm": self.algorithm, "memory": self.memory, "net": self.net or {}}
        if self.critic_net is not None:
            agent["critic_net"] = self.critic_net
        meta = {"distributed": False, "log_frequency": 10_000, "eval_frequency": 10_000, "max_session": 2, "max_trial": 1, **self.meta}
        return {"agent": agent, "env": {**ENVS[self.env], "max_t": None, "max_frame": 1_000_000}, "meta": meta}


def q_learning(name: str, policy: Keys = GREEDY) -> Keys:
    """Return the keys of an algorithm of the DQN family."""
    return {"name": name, **policy, **OFTEN}


REINFORCE = {"name": "Reinforce", **ACTOR, "center_return": True, "training_frequency": 1}
SARSA = {"name": "SARSA", **GREEDY, "training_frequency": 10}
MLP, MLP_SHARED, MLP_SEPARATE = {**LAYERS, **LEARNING}, {**LAYERS, **SHARED}, {**LAYERS, **SEPARATE}
RNN, RNN_SHARED, RNN_SEPARATE = {**GRU, **LEARNING}, {**GRU, **SHARED}, {**GRU, **SEPARATE}
VALUES: Keys = {**LEARNING, "loss_spec": {"name": "SmoothL1Loss"}}
EPISODE = {"training_frequency": 1}
ROLLOUT = {"training_frequency": 16}
SYNCED, HOGWILD = {"distributed": "synced"}, {"distributed": "shared"}
GLOBAL = {"optim_spec": {"name": "GlobalAdam", "lr": 0.001}}
GLOBAL_BOTH = {"actor_optim_spec": GLOBAL["optim_spec"], "critic_optim_spec": GLOBAL["optim_spec"]}
FORMS: dict[str, Form] = {
    # random actions
    "random, episodes, classic": Form({"name": "Random"}, EPISODES, None, "classic"),
    "random, prioritised, one env": Form({"name": "Random"}, PER, None, "classic, 1 env"),
    "random, atari": Form({"name": "Random"}, EPISODES, None, "atari"),
    # REINFORCE
    "reinforce, classic": Form({**REINFORCE, "training_frequency": 32}, BATCH, MLP, "classic"),
    "reinforce, episodes, pendulum": Form(REINFORCE, EPISODES, MLP, "pendulum, 1 env"),
    "reinforce, best episodes": Form({**REINFORCE, "training_frequency": 4, "action_pdtype": "Categorical"}, BEST, MLP, "classic, 1 env"),
    "reinforce, recurrent, episodes, box2d": Form(REINFORCE, EPISODES, RNN, "box2d, 1 env"),
    "reinforce, arc": Form({**REINFORCE, "training_frequency": 32}, BATCH, {**ARC, **ARC_PLAIN}, "acrobot"),
    # A2C
    "a2c gae, classic": Form({**GAE, **ROLLOUT}, BATCH, MLP_SEPARATE, "classic"),
    "a2c gae, episodes, shared": Form({**GAE, **EPISODE}, EPISODES, MLP_SHARED, "classic, 1 env"),
    "a2c n-step, episodes, box2d": Form({**NSTEP, **EPISODE}, EPISODES, MLP_SEPARATE, "box2d, 1 env"),
    "a2c gae, normalised targets, pendulum": Form({**GAE, **ROLLOUT, "normalize_v_targets": True}, BATCH, MLP_SEPARATE, "pendulum"),
    "a2c gae, box2d continuous": Form({**GAE, **ROLLOUT}, BATCH, MLP_SEPARATE, "box2d, continuous"),
    "a2c n-step, mujoco": Form({**NSTEP, **ROLLOUT}, BATCH, {**MLP_SEPARATE, "log_std_init": 0.0}, "mujoco"),
    "a2c gae, atari": Form({**GAE, **ROLLOUT}, BATCH, {**CONV, **SHARED}, "atari"),
    "a2c n-step, atari, old id": Form({**NSTEP, **ROLLOUT}, BATCH, {**CONV, **SHARED}, "atari, old id"),
    "a2c gae, arc, atari": Form({**GAE, **ROLLOUT}, BATCH, {**ARC_CONV, **ARC_PLAIN, "shared": True, "use_same_optim": True}, "atari"),
    "a2c gae, arc, classic": Form({**GAE, **ROLLOUT}, BATCH, {**ARC, **ARC_SEPARATE}, "classic"),
    "a2c gae, recurrent, episodes": Form({**GAE, **EPISODE}, EPISODES, RNN_SHARED, "classic, 1 env"),
    "a2c n-step, recurrent, separate, pendulum": Form({**NSTEP, **EPISODE}, EPISODES, RNN_SEPARATE, "pendulum, 1 env"),
    "a2c gae, both, lam wins": Form({**GAE, **ROLLOUT, "num_step_returns": 10}, BATCH, MLP_SHARED, "classic"),
    # A3C
    "a3c gae, synced, atari": Form({**GAE, **ROLLOUT}, BATCH, {**CONV, **SHARED, **GLOBAL}, "atari", SYNCED),
    "a3c n-step, hogwild, atari": Form({**NSTEP, **ROLLOUT}, BATCH, {**CONV, **SHARED, **GLOBAL}, "atari", HOGWILD),
    "a3c gae, synced, episodes": Form({**GAE, **EPISODE}, EPISODES, {**MLP_SEPARATE, **GLOBAL_BOTH}, "classic, 1 env", SYNCED),
    "a3c gae, synced, recurrent": Form({**GAE, **EPISODE}, EPISODES, {**RNN_SHARED, **GLOBAL}, "classic, 1 env", SYNCED),
    # PPO
    "ppo, classic": Form(PPO, BATCH, MLP_SEPARATE, "classic"),
    "ppo, one env, shared": Form(PPO, BATCH, MLP_SHARED, "classic, 1 env"),
    "ppo, percentile, symlog": Form({**PPO, "normalize_advantages": "percentile", "symlog": True}, BATCH, MLP_SEPARATE, "classic"),
    "ppo, box2d continuous": Form(PPO, BATCH, {**MLP_SEPARATE, "log_std_init": 0.0}, "box2d, continuous"),
    "ppo, bipedal, normalised targets": Form({**PPO, "normalize_v_targets": True}, BATCH, MLP_SEPARATE, "bipedal"),
    "ppo, mujoco, normalised": Form(
        {**PPO, "normalize_v_targets": True, "normalize_advantages": "percentile"},
        BATCH,
        {**MLP_SEPARATE, "log_std_init": 0.0, "actor_init_std": 0.01, "critic_init_std": 1.0},
        "mujoco, normalised",
    ),
    "ppo, atari, clipped values": Form({**PPO, "clip_vloss": True}, BATCH, {**CONV, **SHARED, "actor_init_std": 0.01}, "atari"),
    "dppo, synced, atari": Form(PPO, BATCH, {**CONV, **SHARED, **GLOBAL}, "atari, sticky", SYNCED),
    "ppo, recurrent, pendulum": Form(PPO, BATCH, RNN_SEPARATE, "pendulum, 1 env"),
    "ppo, recurrent, shared": Form(PPO, BATCH, RNN_SHARED, "classic, 1 env"),
    "ppo, arc, classic": Form(PPO, BATCH, {**ARC, **ARC_SEPARATE}, "classic"),
    "ppo, arc, mujoco": Form(
        {**PPO, "normalize_v_targets": True}, BATCH, {**ARC, **ARC_SEPARATE, "log_std_init": 0.0}, "mujoco, normalised"
    ),
    "ppo, arc, Normal by name": Form(
        {**{key: value for key, value in PPO.items() if key != "action_policy"}, "action_pdtype": "Normal"},
        BATCH,
        {**ARC, **ARC_SEPARATE},
        "mujoco",
    ),
    # self-imitation
    "sil, episodes": Form({**GAE, **EPISODE, **IMITATION, "name": "SIL"}, SIL_EPISODES, MLP_SEPARATE, "classic, 1 env"),
    "sil, n-step, box2d": Form({**NSTEP, **EPISODE, **IMITATION, "name": "SIL"}, SIL_EPISODES, MLP_SHARED, "box2d, 1 env"),
    "sil, recurrent": Form({**GAE, **EPISODE, **IMITATION, "name": "SIL"}, SIL_EPISODES, RNN_SHARED, "classic, 1 env"),
    "ppo sil, acrobot": Form({**PPO, **IMITATION, "name": "PPOSIL", "normalize_v_targets": True}, SIL_BATCH, MLP_SEPARATE, "acrobot"),
    "ppo sil, recurrent": Form({**PPO, **IMITATION, "name": "PPOSIL"}, SIL_BATCH, RNN_SEPARATE, "classic, 1 env"),
    # SARSA
    "sarsa, greedy": Form(SARSA, BATCH, MLP, "classic"),
    "sarsa, boltzmann over Argmax": Form({**SARSA, **BOLTZMANN, "action_pdtype": "Argmax"}, BATCH, MLP, "classic, 1 env"),
    "sarsa, arc": Form(SARSA, BATCH, {**ARC, **ARC_PLAIN}, "classic"),
    # DQN
    "vanilla dqn, boltzmann": Form(q_learning("VanillaDQN", BOLTZMANN), REPLAY, {**LAYERS, **VALUES}, "classic"),
    "vanilla dqn, videopinball": Form(q_learning("VanillaDQN", BOLTZMANN), REPLAY, {**CONV, **VALUES, "shared": True}, "atari, old id"),
    "dqn, replace": Form(q_learning("DQN"), CER, {**LAYERS, **VALUES, **COPIES}, "classic"),
    "dqn, polyak, one env, box2d": Form(q_learning("DQN"), CER, {**LAYERS, **VALUES, **POLYAK}, "box2d, 1 env"),
    "dqn, dueling, boltzmann": Form(q_learning("DQN", BOLTZMANN), CER, {**DUELING, **VALUES, **POLYAK}, "classic, 1 env"),
    "dqn, per, atari": Form(q_learning("DQN"), PER, {**CONV, **VALUES, **COPIES}, "atari"),
    "dqn, dueling, atari": Form(q_learning("DQN"), REPLAY, {**DUELING_CONV, **VALUES, **COPIES}, "atari"),
    "dqn, recurrent": Form(q_learning("DQN"), REPLAY, {**GRU, **VALUES, **POLYAK}, "classic, 1 env"),
    "dqn, arc": Form(q_learning("DQN", BOLTZMANN), REPLAY, {**ARC, **ARC_PLAIN, **COPIES}, "classic"),
    "hydra dqn": Form(q_learning("HydraDQN", BOLTZMANN), REPLAY, {**HYDRA, **VALUES, **POLYAK}, "classic, 1 env"),
    "ddqn, per, box2d": Form(q_learning("DoubleDQN"), PER, {**LAYERS, **VALUES, **COPIES}, "box2d"),
    "ddqn, per, dueling, atari": Form(q_learning("DoubleDQN"), PER, {**DUELING_CONV, **VALUES, **COPIES}, "atari"),
    "ddqn, recurrent, boltzmann": Form(q_learning("DoubleDQN", BOLTZMANN), REPLAY, {**GRU, **VALUES, **POLYAK}, "classic, 1 env"),
    "ddqn, per, arc": Form(q_learning("DoubleDQN"), PER, {**ARC, **ARC_PLAIN, **COPIES}, "classic"),
    # soft actor-critic
    "sac, classic": Form({**SAC, "action_pdtype": "Categorical"}, REPLAY, {**LAYERS, **LEARNING, **POLYAK}, "classic"),
    "sac, pendulum": Form({**SAC, "action_pdtype": "Normal"}, REPLAY, {**LAYERS, **LEARNING, **POLYAK}, "pendulum"),
    "sac, mujoco": Form(SAC, REPLAY, {**LAYERS, **LEARNING, **POLYAK}, "mujoco"),
    "sac, atari": Form({**SAC, "action_pdtype": "Categorical"}, REPLAY, {**CONV, **LEARNING, **POLYAK}, "atari"),
    "async sac, box2d": Form(
        {**SAC, "action_pdtype": "GumbelSoftmax"}, CER, {**LAYERS, **LEARNING, **POLYAK, **GLOBAL}, "box2d", HOGWILD
    ),
    "sac, arc, mujoco": Form({**SAC, "policy_delay": 2, "symlog": True}, REPLAY, {**ARC, **ARC_PLAIN, **POLYAK}, "mujoco"),
    "sac, discrete features": Form(
        {
            **SAC, "entropy_anneal": {"start_ratio": 0.9, "end_ratio": 0.3, "frames": 500}, "entropy_penalty_coef": 0.5,
            "spectral_norm": True,
        },
        REPLAY,
        {**LAYERS, **LEARNING, **POLYAK},
        "classic",
    ),
    "crossq, box2d continuous": Form(CROSSQ, REPLAY, {**ARC, **ARC_PLAIN}, "box2d, continuous", {}, {**NORMED, **ARC_PLAIN}),
    "crossq, mujoco": Form(CROSSQ, REPLAY, {**ARC, **ARC_PLAIN}, "mujoco", {"rigorous_eval": 2}, {**NORMED, **ARC_PLAIN}),
    "crossq, batch norm": Form({**CROSSQ, "action_pdtype": "Categorical"}, REPLAY, {**LAYERS, **LEARNING, "batch_norm": True}, "classic"),
}  # fmt: skip
"""Name → form."""
