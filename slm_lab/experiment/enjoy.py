"""Mode enjoy: the best checkpoint of a run plays some episodes."""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Any

from slm_lab.experiment import checkpoint
from slm_lab.experiment.evaluate import play
from slm_lab.experiment.paths import RunPaths, runs
from slm_lab.experiment.plan import Plan, Stop, UserError, cores
from slm_lab.lib.clock import Clock
from slm_lab.lib.rng import session_seeds
from slm_lab.spec.loader import load_spec

EPISODES = 10


def find_run(where: str, spec_name: str, data_dir: Path) -> RunPaths:
    """The run of `spec_name` in a folder (as given, or under the data folder), or its latest one. Raises UserError."""
    known = runs(data_dir, spec_name)
    if where == "latest":
        if not known:
            raise UserError(f"no run of '{spec_name}' in {data_dir}: train it first")
        return RunPaths(known[-1], spec_name)
    for folder in (Path(where), data_dir / where):
        paths = RunPaths(folder, spec_name)
        if paths.spec.is_file():
            return paths
    latest = f"; the latest is {known[-1]}" if known else ""
    raise UserError(f"no run of '{spec_name}' in the folder '{where}'{latest}")


def best_checkpoint(paths: RunPaths) -> tuple[Path, dict[str, Any]]:
    """The best weights over all Sessions of trial 0. Raises UserError where there are none."""
    found = []
    for session in paths.sessions():
        path = paths.checkpoint(session, "best")
        if path.is_file():
            found.append((path, checkpoint.load(path)))
    if not found:
        raise UserError(f"no checkpoint in {paths.model_dir}")
    return max(found, key=lambda one: -float("inf") if one[1]["total_reward_ma"] is None else one[1]["total_reward_ma"])


def enjoy(where: str, spec_name: str, plan: Plan) -> tuple[Path, list[float]]:
    """Play EPISODES episodes with the best weights of a run. Returns the checkpoint and the returns.

    The saved spec of the run counts. Raises SpecError or UserError.
    """
    paths = find_run(where, spec_name, plan.data_dir)
    path, best = best_checkpoint(paths)
    from slm_lab.agent.build import build_agent
    from slm_lab.env.make import make_env
    from slm_lab.experiment.session import device_of

    spec = load_spec(paths.spec, spec_name)
    seeds = session_seeds(spec.meta.random_seed or 0, 0, 0)
    gamma = spec.agent.algorithm.gamma
    env = make_env(spec.env, seeds.eval_env, num_envs=EPISODES, gamma=gamma, training=False, threads=cores())
    try:
        clock = Clock()
        clock.frame = best.get("global_frame", best["frame"])  # explores as it did then
        agent = build_agent(spec, env.info, seeds, clock, device_of(spec, plan, 0))
        agent.load_weights(best["weights"])
        env.copy_statistics(best["env"])
        return path, play(env, agent.evaluator(), Stop())
    finally:
        env.close()


def summary(returns: list[float]) -> str:
    """Mean ± standard deviation, and the extremes."""
    deviation = statistics.pstdev(returns)
    return f"{len(returns)} episodes: {statistics.fmean(returns):.5g} ± {deviation:.4g} (min {min(returns):.5g}, max {max(returns):.5g})"
