"""Models of the section meta of a spec: number of Sessions, logging, checkpoints, distributed training, and rollout workers."""

from __future__ import annotations

import math
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, Strict

from slm_lab.spec.models.base import PATTERN, Count, Flag, Fraction, NonNegative, Positive, PositiveReal, Seed, SpecModel, to_integer


class SearchResources(SpecModel):
    """Resources of one trial of a hyperparameter search."""

    cpu: PositiveReal = 1
    """Number of CPU cores of one trial."""
    gpu: NonNegative = 0
    """Number of GPUs of one trial, which may be a fraction."""


class SearchScheduler(SpecModel):
    """Early stopping of the trials of a hyperparameter search (ASHA)."""

    grace_period: Positive = 1
    """Minimum number of frames of a trial before the trial can be stopped."""
    reduction_factor: Annotated[float, Strict(), Field(gt=1)] = 3
    """Reduction factor f of the number of trials: at each comparison of trials, one out of f trials continues."""


SearchMetric = Literal[
    "current_return", "final_strength", "strength", "max_strength", "total_reward_ma", "final_return", "sample_efficiency",
    "training_efficiency", "stability", "consistency",
]  # fmt: skip
"""Metrics by which a search compares trials. For all of these metrics, higher values are better."""


Threads = Annotated[int, Strict(), Field(gt=0, le=1024), BeforeValidator(to_integer)]
StartMethod = Literal["auto", "forkserver", "spawn"]


class MetaSpec(SpecModel):
    """Keys that determine how a training or search runs: Sessions, processes, logging, evaluation and checkpoints."""

    distributed: Literal[False, "shared", "synced"] = False
    """Whether all Sessions train one global net (Hogwild!), each for env.max_frame / max_session frames. With "shared", Sessions always use
    the latest weights (async SAC). With "synced", a Session copies the weights of the global net after each of its own updates, so that the
    Session's policy is constant within a rollout (A3C). With false, each Session trains its own net."""
    hogwild_lock: Flag = False
    """Whether to lock the global net during updates, so that only one Session at a time updates the net."""
    max_restart: Count = 1
    """Maximum number of restarts of a process that was killed or hangs. On one machine, rollout workers and the Sessions of a global net
    are restarted. On a cluster, every Session (including Sessions whose node is lost) and the parameter server are restarted."""
    sampler: SamplerSpec | None = None
    """Settings of rollout workers, which collect transitions for a learner, synchronously or asynchronously. By default, each Session steps
    its own envs."""
    self_play: SelfPlaySpec | None = None
    """Settings of self-play in a game with several agents. By default, the current policies play each other, without snapshots."""
    max_session: Positive = 1
    """Number of Sessions of a trial, each with its own seed."""
    max_trial: Positive = 1
    """Number of trials of a search. Mode train does not use max_trial. If all keys of a search are grid_search, the search has one trial
    for each combination of the values, and a max_trial above 1 limits the number of trials."""
    log_frequency: Positive = 10_000
    """Number of frames between the rows of a Session's log. The default number is 10,000 or, if the Session has fewer than 500,000 frames,
    a fiftieth of the Session's frames."""
    eval_episodes: Count | Literal["auto"] = "auto"
    """Number of episodes in each evaluation of the deterministic policy. Each evaluation episode has its own env. Eight evaluations are
    evenly spaced over a Session. With 0, policies are not evaluated. With "auto", an evaluation has 3 to 5 episodes, so that all
    evaluations together take at most 3 % of the run's time. With "auto", policies are not evaluated if evaluations with 3 episodes would
    take more time, if the length of an episode is not limited, in self-play, or in a search. If the spec gives rigorous_eval or
    eval_frequency but not eval_episodes, the default is 0 instead of "auto"."""
    eval_frequency: Positive = 10_000
    """Number of frames between evaluations, if rigorous_eval is above 0. With meta.distributed, each worker counts its own frames, and the
    workers evaluate the net in turn."""
    rigorous_eval: Count = 0
    """Number of evaluation envs, each of which plays one episode per evaluation. If rigorous_eval is above 0, all metrics are computed from
    the evaluation episodes. With 0, metrics are computed from training episodes. An exception is current_return if there are
    evaluations with eval_episodes: current_return is then the mean return of the last evaluation."""
    eval_deterministic: Flag = False
    """Whether evaluations with rigorous_eval use the mode of the action distribution instead of a sample. Evaluations with eval_episodes
    always use the mode."""
    track_info: list[str] = []
    """Entries of the env's `info` to log, by key or dotted path, such as "is_success". The logged value is the value in the last step of an
    episode. In EnvPool, with the suffix ":max", ":min", ":sum" or ":mean" (such as "success:max"), the logged value is the maximum,
    minimum, sum or mean over all steps of the episode. The mean of an entry over the last 100 episodes is logged in the column info_{key},
    and plotted on the page of the run. If the spec does not give track_info, success is logged for envs of EnvPool that report success, and
    no entry is logged for other envs."""
    max_seconds: PositiveReal | None = None
    """Seconds of training after which a Session saves a checkpoint and ends, even before env.max_frame. By default, training time is not
    limited."""
    random_seed: Seed = 0
    """Random seed of the run. The seeds of all Sessions, trials and restarts are derived from this seed."""
    save_interval: NonNegative = 10.0
    """Minimum number of seconds between checkpoints."""
    save_replay: Flag = False
    """Whether checkpoints also contain the replay buffer (about 7 GB for 1 M Atari frames). If the replay buffer is not saved, a resumed
    run collects training_start_step transitions again before it trains."""
    checkpoint_frequency: Positive | None = None
    """Number of frames between numbered checkpoints of the weights, all of which are kept. By default, a run saves no numbered checkpoints.
    The best and the last weights are always kept."""
    init_from: str | None = None
    """Folder of a run, search or study, checkpoint file, or name of a model or pretrained agent, from which the initial weights are loaded.
    Training starts with the best weights and the observation statistics that the folder, file or model contains. Weights and statistics
    whose names or shapes do not match are not used. With agent.policies, each policy starts from the policy of the same name. By default,
    training starts with random weights."""
    demonstrations: str | None = None
    """Recorded episodes to learn from: a file of `enjoy --record`, "minari:ID" (a data set of Minari), or a folder or HDF5 file in Minari's
    format. BC and IQL learn only from the recorded episodes. Off-policy algorithms learn from their replay buffer and the recorded episodes
    (memory.demonstration_fraction). By default, no recorded episodes are used."""
    stall_notice: PositiveReal = 30.0
    """Seconds without progress of a Session or worker after which a notice is printed."""
    stall_limit: PositiveReal | None = None
    """Seconds without progress after which a process is restarted or, after max_restart restarts, ended with an error. By default, the
    limit is 300 for rollout workers, and Sessions have no limit."""
    observers: list[Annotated[str, Field(pattern=f"^{PATTERN}$")]] = []
    """User-defined observers, as "package.module:Class". Each class is a subclass of slm_lab.Observer, whose methods are called for steps,
    updates and rows of the log."""
    track: list[Literal["wandb", "mlflow", "trackio", "tensorboard"]] = []
    """Experiment trackers to which each Session also writes the rows of its log, the spec and its final metrics. Each tracker needs the
    extra of slm-lab that has the name of the tracker, such as `pip install slm-lab[wandb]`. A tracker that fails or blocks is switched off
    with a notice, and never affects the run."""
    start_method: StartMethod = "auto"
    """How child processes start. With "forkserver" (on Linux), child processes are copies of one process that has loaded torch and slm_lab,
    and each copy takes about 0.02 s. With "spawn", each child process loads torch and slm_lab itself, which takes 2 s. With "auto",
    "forkserver" is used if the system supports it. The start method does not affect results. meta.run records the start method."""
    matmul: Literal["auto", "mkl", "onednn"] = "auto"
    """Library that computes the float32 matrix products of fully connected layers on the CPU. With "onednn", oneDNN computes products for
    which rows × inputs × outputs is at least 2^21 (2^29 on AMD processors with AVX-512 before Zen 5), and MKL computes smaller products.
    With "mkl", MKL computes all products. With "auto", "onednn" is used on AMD processors with AVX-512 (oneDNN is twice as fast on Zen 5),
    and torch's default library on other processors. Results with different libraries differ by rounding. meta.run records the library."""
    threads: Threads | Literal["auto"] = "auto"
    """Number of threads of an update on the CPU. Acting always uses one thread. With "auto", the update of a net with
    convolutions uses as many threads as there are cores per concurrent Session, at most 8. All other nets use one thread. Nets with
    convolutions also use one thread with distributed training, an asynchronous sampler, --jobs, a search or a study. Results with the
    same number of threads are equal, and results with different numbers of threads differ by rounding. meta.run records the number of
    threads."""
    search_resources: SearchResources = SearchResources()
    """Resources of one trial of a search. Mode train does not use search_resources."""
    search_scheduler: SearchScheduler | None = None
    """Early stopping of the trials of a search. Mode train does not use search_scheduler. By default, trials do not stop early."""
    search_algorithm: Literal["optuna", "random", "grid", "pbt"] = "optuna"
    """How a search proposes values. Mode train does not use search_algorithm. With "optuna", a tree-structured Parzen estimator (TPE)
    proposes values from the results so far, after 10 random trials. With "random", values are drawn independently at random. With "grid", a
    search tries all combinations of the values of grid_search keys, with random values of other keys. "pbt" is population-based training.
    If all keys of a search are grid_search, "optuna" and "random" also try all combinations."""
    search_metric: SearchMetric | None = None
    """Metric of a trial (the mean over its Sessions) that a search maximises. Mode train does not use search_metric. The default metric is
    current_return."""
    search_keep: Count | Literal["all"] = 10
    """Number of best trials of a search whose checkpoints are kept, in addition to the trials of --confirm. With "all", checkpoints of all
    trials are kept. Mode train does not use search_keep."""
    run: list[dict[str, Any]] | None = None
    """Record that slm_lab writes, with one entry for each start or continuation of the run: time, command, versions, host, backend,
    changes. When a spec is loaded, the record meta.run is ignored."""

    @property
    def evaluates_by_default(self) -> bool:
        """Return whether eval_episodes is "auto", so that policies may be evaluated.

        The result is False if the spec gives rigorous_eval or eval_frequency but not eval_episodes.
        """
        given = self.model_fields_set
        return self.eval_episodes == "auto" and ("eval_episodes" in given or not given & {"rigorous_eval", "eval_frequency"})

    @property
    def may_evaluate(self) -> bool:
        """Return whether policies may be evaluated in separate episodes during training."""
        return bool(self.rigorous_eval) or self.evaluates_by_default or self.eval_episodes not in (0, "auto")


Factor = Annotated[float, Strict(), Field(gt=1)]


class PBTSpec(SpecModel):
    """Population-based training (arXiv:1711.09846), which replaces the worst policies by copies of the best policies, and perturbs
    hyperparameters.

    The perturbed hyperparameters are the learning rate, the entropy coefficient and, with optimize_gamma, gamma. The hyperparameters of
    policy 0 and of the best policies are never perturbed.
    """

    period: Positive = 5_000_000
    """Number of frames of a policy between two rounds of replacement and perturbation."""
    start: Count = 20_000_000
    """Number of frames of a policy before the policy's first round of replacement and perturbation."""
    replace_fraction: Fraction = 0.3
    """Fraction f of the policies that may be replaced. Each policy in the worst fraction f may be replaced by a copy of a policy in the
    best fraction f."""
    mutation_rate: Fraction = 0.15
    """Probability that a hyperparameter is perturbed in a round."""
    reward_gap: NonNegative = 0.1
    """Minimum relative difference in total_reward between two policies for a replacement."""
    reward_gap_absolute: NonNegative = 1e-6
    """Minimum absolute difference in total_reward between two policies for a replacement."""
    perturb_min: Factor = 1.1
    """Minimum factor by which a perturbed hyperparameter is multiplied or divided."""
    perturb_max: Factor = 1.5
    """Maximum factor by which a perturbed hyperparameter is multiplied or divided."""
    optimize_gamma: Flag = False
    """Whether the discount factor gamma is also perturbed, as 1 − gamma."""

    def replaced_policies(self, count: int) -> int:
        """Return how many of `count` policies are selected as the worst, and as the best, policies: the fraction replace_fraction of them,
        rounded up."""
        return math.ceil(round(self.replace_fraction * count, 9))


class SelfPlaySpec(SpecModel):
    """Training against earlier weights of the same policy, in a game with several agents. Snapshots of the weights get Elo ratings."""

    pool: Positive = 10
    """Number of newest snapshots that are kept as opponents."""
    snapshot_frequency: Positive | None = None
    """Number of frames between snapshots of the weights, by default a twentieth of env.max_frame."""
    opponent: Literal["latest", "uniform", "prioritized"] = "uniform"
    """Opponent of the policy in a game. With "latest", the opponent is the policy itself. With "uniform", all snapshots in the pool are
    equally probable. With "prioritized", the probability of a snapshot is proportional to (1 − p)², where p is the mean score of the policy
    against the snapshot (prioritised fictitious self-play of AlphaStar, arXiv:1912.06680)."""
    past_fraction: Fraction = 0.5
    """Fraction of the games that are played against snapshots. In all other games, and with opponent "latest", the policy plays for every
    agent and learns from the steps of all agents."""
    rating_games: Count = 32
    """Number of games that each snapshot plays against each of up to four opponents (uniformly random actions, and earlier snapshots). The
    Elo rating of the snapshot is computed from these games. Uniformly random actions have the rating 0. With rating_games = 0, ratings are
    not computed."""
    fixed_opponents: list[Annotated[str, Field(pattern=f"^{PATTERN}$")]] = []
    """Scripted players, as "package.module:Class", such as slm_lab.env.board_players:OnePlyConnectFour. Each snapshot also plays
    rating_games games against each scripted player. The mean scores of a snapshot against the scripted players are written to the columns
    score_CLASS in the table of snapshots."""


class SamplerSpec(SpecModel):
    """Training with rollout workers, which step envs and collect transitions for a learner, synchronously or asynchronously."""

    async_rl: Flag = True
    """Whether rollout workers are asynchronous. Asynchronous workers collect while the learner trains, with policy lag. With false,
    collecting and training alternate, without policy lag."""
    num_workers: Positive = 2
    """Number of rollout workers, each of which is a process."""
    num_envs_per_worker: Positive = 8
    """Number of envs of each rollout worker."""
    worker_num_splits: Positive = 2
    """With central inference, the number of groups into which the envs of each worker are divided. One group of envs steps while another
    group waits for actions. worker_num_splits has no effect with local inference."""
    num_batches_per_epoch: Positive = 1
    """Number of minibatches per dataset. An epoch has minibatch_size × num_batches_per_epoch transitions. In envs with several agents, an
    epoch has minibatch_size × num_batches_per_epoch env steps, each of which contains the transitions of all agents, and therefore more
    minibatches."""
    num_batches_to_accumulate: Positive = 2
    """Number of datasets that can wait for the learner before the collection of transitions pauses (only with async_rl)."""
    max_policy_lag: Positive = 1000
    """Maximum policy lag of a transition in gradient steps. Transitions with a greater policy lag are discarded."""
    serial_mode: Flag = False
    """Whether the workers and the learner run synchronously in one process, for debugging and exact reproducibility."""
    inference: Literal["auto", "local", "central"] = "auto"
    """Where actions are computed: in each worker (local), or in batches in one process for all workers (central). With auto, actions are
    computed centrally for nets on a GPU, otherwise locally."""
    num_policies: Positive = 1
    """Number of policies, each of which is trained for env.max_frame frames. In each episode, one policy, drawn at random, acts in an env.
    In envs with several agents, a policy is drawn for each agent."""
    pbt: PBTSpec | None = None
    """Settings of population-based training of the policies. By default, policies learn independently."""

    @property
    def num_envs(self) -> int:
        """Return the total number of envs of all rollout workers."""
        return self.num_workers * self.num_envs_per_worker
