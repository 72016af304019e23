"""Keys of SLM Lab v5.3, their defaults, and other differences from this program: data for docs/from_slm_lab.md (tools/from_slm_lab.py)."""

from __future__ import annotations

from typing import Any, NamedTuple


class DefaultText(NamedTuple):
    """A default described in words, because it depends on other keys or is hidden in the code of SLM Lab."""

    there: str
    here: str = ""
    """Default in this program; "": the same."""


NEEDED = DefaultText("required", "model")
"""The key is required in SLM Lab, and has the default of the model in this program."""
ACTING = {"action_pdtype": "default", "action_policy": "default", "explore_var_spec": None, "gamma": NEEDED}
GRADIENT = {**ACTING, "entropy_coef_spec": DefaultText("none")}
CRITIC = {
    **GRADIENT,
    "lam": DefaultText("required, may be null", "default null"),
    "num_step_returns": DefaultText("required if `lam` is null", "default null"),
    "policy_loss_coef": 1.0,
    "val_loss_coef": 1.0,
    "training_frequency": NEEDED,
}
IMITATION = {"sil_policy_loss_coef": NEEDED, "sil_val_loss_coef": NEEDED, "training_iter": NEEDED, "training_batch_iter": NEEDED}
PPO = {
    **GRADIENT,
    "lam": NEEDED,
    "val_loss_coef": 1.0,
    "clip_eps_spec": NEEDED,
    "minibatch_size": 4,
    "time_horizon": NEEDED,
    "training_epoch": NEEDED,
    "clip_vloss": False,
    "symlog": False,
    "normalize_advantages": "standardize",
    "normalize_v_targets": False,
}
EXPLORING = {
    "action_pdtype": DefaultText("Categorical, in effect", "default `Argmax`"),
    "action_policy": DefaultText("`default`, in effect", "default `epsilon_greedy`"),
    "explore_var_spec": None,
}
REPLAYING = {"training_frequency": NEEDED, "training_iter": NEEDED, "training_batch_iter": NEEDED}
Q_LEARNING = {**ACTING, **EXPLORING, **REPLAYING, "training_start_step": DefaultText("`memory.batch_size`")}
SOFT = {
    "action_pdtype": "default",
    "action_policy": "default",
    "gamma": NEEDED,
    "training_frequency": NEEDED,
    "training_iter": DefaultText("`env.num_envs`"),
    "training_start_step": DefaultText("max(1000, `memory.batch_size`)"),
    "policy_delay": 1,
    "target_entropy": "auto",
    "entropy_anneal": DefaultText("none"),
    "entropy_penalty_coef": 0.0,
    "symlog": False,
    "log_alpha_min": -5.0,
    "log_alpha_max": 2.0,
    "alpha_lr": None,
    "fixed_alpha": None,
    "alpha_anneal_frames": DefaultText("0: constant"),
    "spectral_norm": False,
}
REPLAY = {"batch_size": NEEDED, "max_size": NEEDED, "use_cer": False}
NET = {
    "hid_layers_activation": NEEDED,
    "init_fn": None,
    "clip_grad_val": None,
    "loss_spec": DefaultText("MSELoss"),
    "optim_spec": DefaultText("Adam"),
    "lr_scheduler_spec": None,
    "update_type": "replace",
    "update_frequency": 1,
    "polyak_coef": 0.0,
    "gpu": "auto",
    "cuda_id": DefaultText("by trial and session"),
}
SEPARATE = {
    "shared": NEEDED,
    "use_same_optim": NEEDED,
    "actor_optim_spec": DefaultText("`optim_spec`"),
    "critic_optim_spec": DefaultText("`optim_spec`"),
    "actor_lr_scheduler_spec": DefaultText("`lr_scheduler_spec`"),
    "critic_lr_scheduler_spec": DefaultText("`lr_scheduler_spec`"),
}
POLICY = {**NET, **SEPARATE, "out_layer_activation": None, "log_std_init": None}
INIT_STD = {"actor_init_std": None, "critic_init_std": None}
CONV = {"conv_hid_layers": NEEDED, "fc_hid_layers": NEEDED, "normalize": False}
DECAY = {"start_val": NEEDED, "end_val": DefaultText("`start_val`", "required"), "start_step": NEEDED, "end_step": NEEDED}

KEYS: dict[str, dict[str, dict[str, Any]]] = {
    "agent.algorithm": {
        "Reinforce": {**GRADIENT, "center_return": False, "policy_loss_coef": 1.0, "training_frequency": NEEDED},
        "ActorCritic": {**CRITIC, "normalize_v_targets": False},
        "PPO": {**PPO, "training_frequency": DefaultText("no effect")},
        "SIL": {**CRITIC, **IMITATION, "normalize_v_targets": False},
        "PPOSIL": {**PPO, **IMITATION},
        "SARSA": {**ACTING, "training_frequency": NEEDED},
        "VanillaDQN": Q_LEARNING,
        "DQN": Q_LEARNING,
        "DoubleDQN": Q_LEARNING,
        "SoftActorCritic": SOFT,
        "CrossQ": SOFT,
    },
    "agent.memory": {
        "OnPolicyCrossEntropy": {"cross_entropy": 1.0},
        "Replay": REPLAY,
        "PrioritizedReplay": {**REPLAY, "alpha": NEEDED, "epsilon": NEEDED},
        "OnPolicyReplay": {"sil_replay_name": NEEDED},
        "OnPolicyBatchReplay": {"sil_replay_name": NEEDED},
    },
    "agent.net": {
        "MLPNet": {**POLICY, **INIT_STD, "hid_layers": NEEDED, "layer_norm": False, "batch_norm": False},
        "DuelingMLPNet": {**NET, "shared": NEEDED, "hid_layers": NEEDED},
        "HydraMLPNet": {**{key: default for key, default in POLICY.items() if key != "log_std_init"}, "hid_layers": NEEDED},
        "ConvNet": {**POLICY, **INIT_STD, **CONV, "batch_norm": True},
        "DuelingConvNet": {**NET, **CONV, "batch_norm": False},
        "RecurrentNet": {
            **POLICY,
            "fc_hid_layers": NEEDED,
            "cell_type": "GRU",
            "rnn_hidden_size": NEEDED,
            "rnn_num_layers": 1,
            "bidirectional": False,
            "seq_len": NEEDED,
        },
        "TorchArcNet": {
            **POLICY,
            **INIT_STD,
            "shared": False,
            "hid_layers_activation": "relu",
            "arc": NEEDED,
            "arc_file": None,
            "normalize": False,
        },
    },
    "schedule": {"no_decay": DECAY, "linear_decay": DECAY, "rate_decay": DECAY, "periodic_decay": DECAY},
    "env": {
        "": {
            "name": NEEDED,
            "num_envs": 1,
            "max_t": None,
            "max_frame": NEEDED,
            "normalize_obs": False,
            "normalize_reward": False,
            "clip_obs": DefaultText("10 with `normalize_obs`"),
            "clip_reward": DefaultText("10 with `normalize_reward`; ±1 in Atari"),
            "reward_scale": 1.0,
        }
    },
    "meta": {
        "": {
            "distributed": NEEDED,
            "max_session": NEEDED,
            "max_trial": NEEDED,
            "log_frequency": 10_000,
            "eval_frequency": 10_000,
            "rigorous_eval": 0,
            "random_seed": DefaultText("always the wall clock", "default `0`: equal runs give equal numbers"),
            "search_resources": DefaultText("1 core, no GPU"),
            "search_scheduler": None,
        }
    },
}
"""Section → component ("" if the section has none) → key → default."""

NOTES: dict[tuple[str, str], str] = {
    ("agent.algorithm", "action_pdtype"): "NormalTanh is also possible.",
    ("agent.algorithm", "action_policy"): "With epsilon_greedy, each env explores independently; in SLM Lab, all envs or none explore"
    " in a vector step. In the DQN family, SLM Lab overwrites its defaults, and samples from softmax(Q).",
    ("agent.algorithm", "entropy_coef_spec"): "In PPO, 0 if absent; in SLM Lab, it is then NaN, so that the policy is never updated.",
    ("agent.algorithm", "num_step_returns"): "Every step has an n-step return; in SLM Lab with OnPolicyReplay, only the first n steps"
    " of a batch have one.",
    ("agent.algorithm", "clip_vloss"): "If true, `loss_spec` and `normalize_v_targets` have no effect, as in SLM Lab.",
    ("agent.algorithm", "explore_var_spec"): "DQN family: if absent, ε decreases from 1 to 0.05 over the first tenth of `max_frame`.",
    ("agent.algorithm", "sil_policy_loss_coef"): "Actor and critic learn from the returns of complete past episodes; in SLM Lab, from"
    " sums over shuffled transitions.",
    ("agent.algorithm", "minibatch_size"): "Reduced to the size of a rollout if it is larger, with a notice. A rollout is divided"
    " into equal parts; in SLM Lab, the last minibatch is smaller.",
    ("agent.algorithm", "normalize_advantages"): "May also be rollout; false means no normalisation. In SLM Lab, every value except"
    " percentile means standardize.",
    ("agent.algorithm", "entropy_anneal"): "May also be true, or a target in nats.",
    ("agent.algorithm", "training_start_step"): "Training is due when this number of transitions is reached, and then at multiples of"
    " `training_frequency`; in SLM Lab, one transition later, also with SoftActorCritic and CrossQ.",
    ("agent.memory", "alpha"): "Batches are drawn from equal parts of the sum of priorities; in SLM Lab, each transition is drawn"
    " independently. With a RecurrentNet, `beta` is 0.4 and `initial_error` is greatest if they are absent; SLM Lab has no importance"
    " weights, and a new transition has the priority of an error of 100,000 with any net.",
    ("agent.memory", "sil_replay_name"): "The keys of this replay buffer are also in `agent.memory`.",
    ("agent.memory", "max_size"): "Vectors are stored as float32, images as uint8; SLM Lab rounds vectors to float16. Memory is"
    " allocated for at most as many transitions as the Session has frames.",
    ("agent.memory", "batch_size"): "With a RecurrentNet, it is the number of sequences.",
    ("agent.net", "seq_len"): "The net carries a hidden state from step to step of an episode, and learns from sequences of `seq_len`"
    " steps; in SLM Lab, it reads one observation `seq_len` times, and carries no state.",
    ("agent.net", "bidirectional"): "true is an error, because future observations are unknown when acting.",
    ("agent.net", "actor_init_std"): "Used; SLM Lab ignores it for algorithms with actor and critic, and otherwise uses it only for"
    " nets with several outputs.",
    ("agent.net", "critic_init_std"): "Used; SLM Lab ignores it for algorithms with actor and critic, and otherwise uses it only for"
    " nets with several outputs.",
    ("agent.net", "log_std_init"): "SLM Lab ignores it for actions with one dimension, and in a shared net.",
    ("agent.net", "batch_norm"): "Acting and targets use moving averages; SLM Lab uses the statistics of the batch, and ignores the"
    " key in a DuelingMLPNet.",
    ("agent.net", "layer_norm"): "SLM Lab ignores it in a DuelingMLPNet, and together with `batch_norm`.",
    ("agent.net", "normalize"): "Divides observations of type uint8; in SLM Lab, all observations.",
    ("agent.net", "arc"): "Batch normalisation and dropout are in evaluation mode when acting and for targets; in SLM Lab, in"
    " training mode.",
    ("agent.net", "actor_optim_spec"): "In a file written for SLM Lab, the key has no effect for algorithms without a critic, as in SLM"
    " Lab. SoftActorCritic and CrossQ use this key and the next three keys; SLM Lab ignores all four for these two algorithms.",
    ("agent.net", "out_layer_activation"): "Applied to the output of the policy, or to action values (in a dueling net, to"
    " advantages); SLM Lab also applies it to the critic's values, and ignores it in a dueling net.",
    ("agent.net", "lr_scheduler_spec"): "LinearToZero follows the number of collected frames; in SLM Lab, it is one update behind,"
    " and with a replay buffer and a training_frequency above 1 it reaches 0 earlier.",
    ("agent.net", "update_frequency"): "SoftActorCritic copies in the first training after each multiple of `update_frequency`. SLM Lab"
    " copies only if a training takes place at a frame f with f mod `update_frequency` < `num_envs`, so it skips copies if it does not"
    " train in every vector step.",
    ("agent.net", "polyak_coef"): "With 0, the target net never changes.",
    ("schedule", "start_val"): "In a file written for SLM Lab, no_decay has the value `end_val` if `end_val` is given, as in SLM Lab.",
    ("schedule", "end_val"): "A value of 0 is used; SLM Lab ignores it. Rising schedules rise; in SLM Lab, they are at `end_val` from"
    " `start_step` on. rate_decay ends without a jump. periodic_decay is periodic; in SLM Lab, it is constant.",
    ("env", "name"): "Old ids are replaced, with a notice. See old Atari ids above.",
    ("env", "max_t"): "Truncates episodes; in SLM Lab, it has no effect.",
    ("env", "clip_obs"): "null is the same as absent; in SLM Lab, null turns clipping off.",
    ("env", "clip_reward"): "May also be true or false. In Atari, the given value is used; SLM Lab always clips at ±1 with several"
    " envs, and never with one env. null is the same as absent (no clipping: false); in SLM Lab, null turns clipping off, except in"
    " Atari with several envs.",
    ("env", "normalize_reward"): "The discounted return restarts after each episode; in SLM Lab, it continues over time limits, and"
    " at a terminal step it is only the reward of that step.",
    ("env", "reward_scale"): "May also be \"sign\". Scales the rewards of every env; in SLM Lab, only those of MuJoCo Playground.",
    ("meta", "distributed"): "Schedules and learning rates count the frames of all Sessions, and each update uses only its own"
    " gradient; in SLM Lab, they count the frames of each Session, and \"synced\" accumulates gradients.",
    ("meta", "log_frequency"): "If it is absent and a Session has fewer than 500,000 frames, it is a fiftieth of these frames."
    " total_reward_ma is a mean over 100 rows: compare it with SLM Lab only if log_frequency is equal.",
    ("meta", "rigorous_eval"): "Number of evaluation environments; in SLM Lab, this number is num_envs. The score is the mean over the"
    " episodes of an evaluation; in SLM Lab, over the last 100 episodes of all evaluations. Observations are normalised by the statistics"
    " of training; in SLM Lab, by separate statistics. SoftActorCritic evaluates its policy from the beginning.",
}  # fmt: skip
"""(section, key) → differences other than the default."""

OLD = {
    "spec_params": "the same: one spec for each combination of values, without a notice",
    "meta.search": "`meta.search_algorithm`: `RandomSearch` is `grid` if the search has `grid_search` keys, and otherwise `random`; other"
    " values are an error",
}
"""Key of SLM Lab v4 that is converted, rather than renamed or removed → description of the conversion."""
