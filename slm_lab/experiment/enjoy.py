"""Mode enjoy: the best checkpoint of a run plays some episodes."""

from __future__ import annotations

import statistics
from pathlib import Path

import numpy as np

from slm_lab.experiment.evaluate import play
from slm_lab.experiment.paths import RunPaths, belongs_to_other_spec, names_with_runs, run_paths_in, runs
from slm_lab.experiment.plan import Plan, Stop, UserError
from slm_lab.lib.limits import cores
from slm_lab.lib.rng import session_seeds
from slm_lab.spec.loader import load_spec

EPISODES = 10


def find_run(where: str, spec_name: str, data_dir: Path) -> RunPaths:
    """The run of `spec_name` in a folder (as given, or under the data folder), or its latest one. Raises UserError."""
    known = runs(data_dir, spec_name)
    if where == "latest":
        if not known:
            others = names_with_runs(data_dir, spec_name)
            hint = f"did you mean {' or '.join(others)}?" if others else "train it first"
            raise UserError(f"no run of '{spec_name}' in {data_dir}; {hint}")
        return RunPaths(known[-1], spec_name)
    for folder in (Path(where), data_dir / where):
        paths = RunPaths(folder, spec_name)
        if paths.spec.is_file() and not belongs_to_other_spec(folder, spec_name):
            return paths
        if folder.name and (other := run_paths_in(folder)) and other.stem.startswith(f"{paths.stem}_"):
            raise UserError(f"no run of '{spec_name}' in the folder '{where}'; did you mean {other.spec_name}?")
    latest = f"; the latest is {known[-1]}" if known else ""
    raise UserError(f"no run of '{spec_name}' in the folder '{where}'{latest}")


def enjoy(where: str, spec_name: str, plan: Plan) -> tuple[Path, list[float]]:
    """Play EPISODES episodes with the best weights of a run, as its saved spec says. Returns the checkpoint and the returns.

    Raises SpecError or UserError.
    """
    paths = find_run(where, spec_name, plan.data_dir)
    from slm_lab.env.make import make_env
    from slm_lab.experiment.load import load_checkpoint_agent
    from slm_lab.experiment.session import select_device

    spec = load_spec(paths.spec, spec_name)
    seeds = session_seeds(spec.meta.random_seed or 0, 0, 0)
    agent = load_checkpoint_agent(paths, spec_name, device=select_device(spec, plan, 0))
    env = make_env(spec.env, seeds.eval_env, num_envs=EPISODES, gamma=spec.agent.algorithm.gamma, training=False, threads=cores())
    try:
        env.normalizers.copy_obs_statistics(agent.normalizers.state_dict())
        return agent.path, play(env, agent.policy.evaluator(np.random.default_rng(seeds.eval_env)), Stop())
    finally:
        env.close()


def summary(returns: list[float]) -> str:
    """Mean ± standard deviation, minimum and maximum."""
    deviation = statistics.pstdev(returns)
    return f"{len(returns)} episodes: {statistics.fmean(returns):.5g} ± {deviation:.4g} (min {min(returns):.5g}, max {max(returns):.5g})"
