"""meta: number of Sessions, logging, checkpoints, distribution; and its section sampler."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, Strict

from slm_lab.spec.models.base import PATTERN, Count, Flag, Fraction, NonNegative, Positive, PositiveReal, Seed, SpecModel


class SearchResources(SpecModel):
    """Resources of one trial of a search."""

    cpu: PositiveReal = 1
    """Number of CPU cores."""
    gpu: NonNegative = 0
    """Number of GPUs; may be a fraction."""


class SearchScheduler(SpecModel):
    """Early stopping of a search (ASHA)."""

    grace_period: Positive = 1
    """Minimum frames of a trial before it can be stopped."""
    reduction_factor: Annotated[float, Strict(), Field(gt=1)] = 3
    """At each comparison, one out of this many trials continues."""


SearchMetric = Literal[
    "current_return", "final_strength", "strength", "max_strength", "total_reward_ma", "final_return", "sample_efficiency",
    "training_efficiency", "stability", "consistency",
]  # fmt: skip
"""Metrics of a trial; for each, higher is better."""


StartMethod = Literal["auto", "forkserver", "spawn"]


class MetaSpec(SpecModel):
    """How the experiment runs."""

    distributed: Literal[False, "shared", "synced"] = False
    """Train one global net with all Sessions (Hogwild!), each for env.max_frame / max_session frames. "shared": Sessions always use the
    latest weights (async SAC); "synced": a Session pulls the weights after each of its own updates, so its policy is constant within a
    rollout (A3C); false: each Session trains its own net."""
    hogwild_lock: Flag = False
    """Lock the global net during updates, so that only one Session updates it at a time."""
    max_restart: Count = 1
    """Maximum restarts of a killed or hanging process: a Session of a global net or a rollout worker; on a cluster every Session (also if
    its node is lost) and the parameter server."""
    sampler: SamplerSpec | None = None
    """Collect with rollout workers while a learner trains, synchronously or asynchronously; default: each Session steps its own envs."""
    self_play: SelfPlaySpec | None = None
    """Self-play in a game of several agents; default: no snapshots, the current policies play each other."""
    max_session: Positive = 1
    """Number of Sessions of a trial, each with its own seed."""
    max_trial: Positive = 1
    """Number of trials of a search; train does not use it. A search whose keys are all grid_search has one trial for each combination of
    their values; a max_trial above 1 limits this number."""
    log_frequency: Positive = 10_000
    """Frames between rows of a Session's table; default: 10,000, or a fiftieth of the Session's frames if these are fewer than 500,000."""
    eval_episodes: Count | Literal["auto"] = "auto"
    """Number of episodes in each evaluation of the deterministic policy; each episode has its own env. Eight evaluations are evenly spaced
    over a Session. 0: no evaluations. "auto": 3 to 5 episodes, as many as take at most 3 % of the run's time; no evaluations if 3 would
    take more, if the length of an episode is not limited, in a search, or if rigorous_eval is given."""
    eval_frequency: Positive = 10_000
    """Number of frames between evaluations, if rigorous_eval is set. With distributed, each worker counts its own frames, and the workers
    evaluate the net in turn."""
    rigorous_eval: Count = 0
    """Number of evaluation envs, each of which plays one episode per evaluation. All metrics are then computed from these episodes. 0:
    compute metrics from training episodes."""
    eval_deterministic: Flag = False
    """Evaluate with the mode of the action distribution instead of a sample."""
    track_info: list[str] = []
    """Entries of the env's `info` to log, by key or dotted path, such as "is_success": the value in the last step of an episode. In EnvPool
    also with the suffix ":max", ":min", ":sum" or ":mean" ("success:max"), which is computed over all steps of the episode. The mean over
    the last 100 episodes is written to the column info_{key} of the tables, which the page of the run draws. If the key is absent,
    success is logged for envs of EnvPool that report it, and nothing for other envs."""
    max_seconds: PositiveReal | None = None
    """Seconds of training after which a Session saves a checkpoint and ends, even before env.max_frame; default: no limit."""
    random_seed: Seed = 0
    """Random seed of the first Session; each further Session, trial and restart has its own, derived from it."""
    save_interval: NonNegative = 10.0
    """Minimum seconds between checkpoints."""
    save_replay: Flag = False
    """Also save the replay buffer in checkpoints (some 7 GB for 1 M Atari frames). If it is not saved, a resumed run collects
    training_start_step transitions again before it trains."""
    checkpoint_frequency: Positive | None = None
    """Frames between numbered checkpoints of the weights, all of which are kept; default: no numbered checkpoints. The best and the last
    weights are always kept."""
    init_from: str | None = None
    """The folder of a run, search or study, a checkpoint file, or the name of a model or pretrained agent: training starts from its best
    weights and observation statistics, where names and shapes match. With agent.policies, each policy starts from the policy of the same
    name. Default: random weights."""
    demonstrations: str | None = None
    """Recorded episodes to learn from: a file of `enjoy --record`, "minari:ID" (a data set of Minari), or a folder or HDF5 file in Minari's
    format; default: none. BC and IQL learn only from the recorded episodes; off-policy algorithms learn from their replay buffer and the
    recorded episodes (memory.demonstration_fraction)."""
    stall_notice: PositiveReal = 30.0
    """Print a notice if a Session or worker makes no progress for this many seconds."""
    stall_limit: PositiveReal | None = None
    """Seconds without progress after which a process is restarted or, after max_restart restarts, ended with an error; default: 300 for
    rollout workers, no limit for Sessions."""
    observers: list[Annotated[str, Field(pattern=f"^{PATTERN}$")]] = []
    """User observers, each "package.module:Class", a subclass of slm_lab.Observer, which is called with steps, updates and rows."""
    track: list[Literal["wandb", "mlflow", "trackio", "tensorboard"]] = []
    """Experiment trackers to which each Session also writes its rows, the spec and its final metrics. Each needs the extra of its name. A
    tracker that fails or blocks is switched off with a notice, and never affects the run."""
    start_method: StartMethod = "auto"
    """How child processes start. "forkserver": as copies of one process that has loaded torch and slm_lab, in about 0.02 s each, on Linux;
    "spawn": each process loads torch and slm_lab itself, in 2 s; "auto": "forkserver" if the system supports it. meta.run records the
    choice; results are the same."""
    matmul: Literal["auto", "mkl", "onednn"] = "auto"
    """Library of the float32 matrix products of fully connected layers on the CPU. "onednn": oneDNN for products of at least 128 rows,
    inputs and outputs (512 on AMD processors with AVX-512 before Zen 5), MKL for others; "mkl": MKL for all; "auto": "onednn" on AMD
    processors with AVX-512 (on Zen 5 it is twice as fast), otherwise torch's default library. meta.run records the choice; results with
    different libraries differ by rounding."""
    threads: Positive | Literal["auto"] = "auto"
    """Number of threads of an update on the CPU; acting uses one thread. "auto": for nets with convolutions, the number of cores per
    concurrent Session, at most 8; one thread for other nets, and if other processes learn or act at the same time (distributed, an
    asynchronous sampler) or may do so (--jobs, a search, a study). meta.run records the number. Results with different numbers of threads
    differ by rounding; with the same number they are equal."""
    search_resources: SearchResources = SearchResources()
    """Resources of one trial of a search; train does not use it."""
    search_scheduler: SearchScheduler | None = None
    """Early stopping of a search; default: none. train does not use it."""
    search_algorithm: Literal["optuna", "random", "grid", "pbt"] = "optuna"
    """How a search proposes values; train does not use it. "optuna": by a tree-structured Parzen estimator (TPE) from the results so far,
    after 10 random trials; "random": independently at random; "grid": all combinations of the values of grid_search keys, other keys at
    random; "pbt": population-based training. A search whose keys are all grid_search is a grid with "optuna" and "random" too."""
    search_metric: SearchMetric | None = None
    """Metric of a trial (the mean over its Sessions) that a search maximises; default: current_return. train does not use it."""
    search_keep: Count | Literal["all"] = 10
    """Number of best trials of a search whose checkpoints are kept, in addition to the trials of --confirm; "all": checkpoints of all
    trials are kept. train does not use it."""
    run: list[dict[str, Any]] | None = None
    """One entry for each start or continuation of the run, written by slm_lab: time, command, versions, host, backend, changes. Ignored on
    load."""

    @property
    def evaluates_by_default(self) -> bool:
        """Return whether `eval_episodes="auto"` may lead to evaluations: not if only keys of the other form of evaluation are given."""
        given = self.model_fields_set
        return self.eval_episodes == "auto" and ("eval_episodes" in given or not given & {"rigorous_eval", "eval_frequency"})

    @property
    def may_evaluate(self) -> bool:
        """Return whether Sessions may be evaluated."""
        return bool(self.rigorous_eval) or self.evaluates_by_default or self.eval_episodes not in (0, "auto")


Factor = Annotated[float, Strict(), Field(gt=1)]


class PBTSpec(SpecModel):
    """Population-based training (arXiv:1711.09846): replace the worst policies by copies of the best, and perturb hyperparameters.

    Learning rate, entropy coefficient and, with optimize_gamma, gamma are perturbed, but never for policy 0 and for the best policies.
    """

    period: Positive = 5_000_000
    """Frames of a policy between rounds."""
    start: Count = 20_000_000
    """Frames of a policy before its first round."""
    replace_fraction: Fraction = 0.3
    """Fraction of the population that counts as worst, and may be replaced by policies from a best fraction of the same size."""
    mutation_rate: Fraction = 0.15
    """Probability of perturbing a hyperparameter in a round."""
    reward_gap: NonNegative = 0.1
    """Minimum relative difference in total_reward for a replacement."""
    reward_gap_absolute: NonNegative = 1e-6
    """Minimum absolute difference in total_reward for a replacement."""
    perturb_min: Factor = 1.1
    """Minimum factor by which a perturbed hyperparameter is multiplied or divided."""
    perturb_max: Factor = 1.5
    """Maximum factor by which a perturbed hyperparameter is multiplied or divided."""
    optimize_gamma: Flag = False
    """Perturb 1 − gamma too."""


class SelfPlaySpec(SpecModel):
    """Train against earlier weights of the same policy, in a game of several agents. Snapshots of the weights get Elo ratings."""

    pool: Positive = 10
    """Number of newest snapshots that are kept as opponents."""
    snapshot_frequency: Positive | None = None
    """Frames between snapshots; default: a twentieth of env.max_frame."""
    opponent: Literal["latest", "uniform", "prioritized"] = "uniform"
    """Opponents in a game: the policy itself ("latest"), a snapshot drawn uniformly, or a snapshot drawn in proportion to (1 − p)², where
    p is the mean score of the policy against it (arXiv:1912.06680; prioritised fictitious self-play, AlphaStar)."""
    past_fraction: Fraction = 0.5
    """Fraction of the games that are played against snapshots. In all other games, and with opponent "latest", the policy plays for every
    agent and learns from each of them."""
    rating_games: Count = 32
    """Games of each snapshot against each of up to four opponents (uniformly random actions, and earlier snapshots), from which its Elo
    rating is computed; random actions have the rating 0. 0: no ratings."""
    fixed_opponents: list[Annotated[str, Field(pattern=f"^{PATTERN}$")]] = []
    """Scripted players, each "package.module:Class", such as slm_lab.env.board_players:OnePlyConnectFour. Each snapshot also plays
    rating_games games against each of them; the mean scores are the columns score_CLASS in the table of snapshots."""


class SamplerSpec(SpecModel):
    """Rollout workers step envs, and a learner trains, synchronously or asynchronously."""

    async_rl: Flag = True
    """true: asynchronous (workers collect while the learner trains, with policy lag); false: synchronous (collecting and training
    alternate, without lag)."""
    num_workers: Positive = 2
    """Number of worker processes."""
    num_envs_per_worker: Positive = 8
    """Envs of each worker."""
    worker_num_splits: Positive = 2
    """Central inference: number of groups into which each worker's envs are divided; one group steps while another waits for its actions.
    No effect with local inference."""
    num_batches_per_epoch: Positive = 1
    """Number of minibatches per dataset: an epoch has minibatch_size × num_batches_per_epoch transitions. With several agents, this is the
    number of env steps, each with the transitions of all agents."""
    num_batches_to_accumulate: Positive = 2
    """async_rl: pause collection while this many datasets wait for the learner."""
    max_policy_lag: Positive = 1000
    """Maximum policy lag in gradient steps; older transitions are discarded."""
    serial_mode: Flag = False
    """Run workers and learner synchronously in one process, for debugging and exact reproducibility."""
    inference: Literal["auto", "local", "central"] = "auto"
    """Compute actions in each worker (local), or in batches in one process for all workers (central); auto: central for nets on a GPU."""
    num_policies: Positive = 1
    """Number of policies, each trained for env.max_frame frames; each episode (with several agents, each agent of each episode) is played
    by one of them, drawn at random."""
    pbt: PBTSpec | None = None
    """Population-based training; default: policies learn independently."""

    @property
    def num_envs(self) -> int:
        """Return the number of envs of all workers."""
        return self.num_workers * self.num_envs_per_worker
