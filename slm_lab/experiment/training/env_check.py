"""Check of the env before a run: the env is stepped once, and the returned values are checked before any file is written."""

from __future__ import annotations

import traceback

import gymnasium as gym

from slm_lab.env.goals import GoalReward, check_goal_rewards
from slm_lab.env.gym_workers import EnvWorkerError
from slm_lab.env.make import make_env
from slm_lab.env.outcome import InvalidOutcome
from slm_lab.env.vec import Env
from slm_lab.experiment.execute.heartbeat import BUILDING, CLOSING, RESETTING, STEPPING
from slm_lab.experiment.execute.local.user_code import close_env
from slm_lab.experiment.files.bundle import rng_state, set_rng_state
from slm_lab.experiment.training.experience import Beat
from slm_lab.lib.log import error_summary, logger
from slm_lab.lib.records import VecStep
from slm_lab.spec.models.memory import HindsightReplaySpec
from slm_lab.spec.models.spec import Spec
from slm_lab.spec.report import Problem, SpecError


def check_env(spec: Spec, seed: int, beat: Beat, num_envs: int | None = None, device: str = "cpu") -> None:
    """Build the envs of a spec, reset and step the envs once, and close the envs.

    The states of the process-wide random generators, including the generator of the device, are restored afterwards. State that an env
    stores in its module or class is not restored.

    Raises SpecError if an env raises an error, or if an env returns values that its spaces or Gymnasium's interface do not allow. With
    HindsightReplay, SpecError is also raised if the rewards of the step differ from the rewards that are computed from its goals.
    """
    saved = rng_state(device)
    try:
        env = make_env(
            spec.env,
            seed,
            num_envs=num_envs,
            training=False,
            minimal_num_envs=True,
            input=spec.agent.input,
            defer_normalization=spec.defers_normalization,
        )
        try:
            step = _trial_step(env, spec, beat)
            if spec.agent.algorithm.learns and isinstance(spec.agent.memory, HindsightReplaySpec):
                _check_goals(spec, env, step)
        finally:
            beat(CLOSING)
            close_env(env.close)
            beat(BUILDING)
    finally:
        set_rng_state(saved, device)


def _check_goals(spec: Spec, env: Env, step: VecStep) -> None:
    """Raise SpecError if the env has goals and the rewards of a step differ from the rewards that are computed from its goals."""
    assert isinstance(spec.agent.memory, HindsightReplaySpec)
    if env.info.observation.goals is None:
        return
    rewards = GoalReward(spec.env, spec.agent.memory.goal_threshold)
    try:
        check_goal_rewards(spec.env, rewards, env, step)
    finally:
        close_env(rewards.close)


def _trial_step(env: Env, spec: Spec, beat: Beat) -> VecStep:
    call = "reset"
    try:
        beat(RESETTING)
        env.reset()
        call = "step"
        beat(STEPPING)
        return env.step(env.sample())
    except InvalidOutcome as error:
        raise SpecError(spec.name, [Problem(_faulty_key(error, spec), str(error))]) from error
    except Exception as error:
        logger.info("the trial step of the env failed", exc_info=True)
        cause = error.cause if isinstance(error, EnvWorkerError) else error_summary(error)
        message = f"{spec.env.name}: {call} raised {cause}"
        raise SpecError(spec.name, [Problem(_faulty_key(error, spec), message)]) from error


def _faulty_key(error: BaseException, spec: Spec) -> str:
    """Return the key in the spec of the wrapper that raised an error, such as "env.wrappers[0]", or "env.name" if the env raised it.

    If several wrappers have the same class, the key is "env.wrappers". If the traceback does not show which object raised the error, as
    with errors of worker processes, the key is "env.name".
    """
    causes = [error]
    while (cause := causes[-1].__cause__) is not None:
        causes.append(cause)
    frames = [frame for cause in causes for frame, _ in traceback.walk_tb(cause.__traceback__)]
    innermost = next((owner for frame in reversed(frames) if isinstance(owner := frame.f_locals.get("self"), gym.Env)), None)
    names, name = [wrapper.name.rpartition(":")[2] for wrapper in spec.env.wrappers], type(innermost).__name__
    if not isinstance(innermost, gym.Wrapper) or name not in names:
        return "env.name"
    return f"env.wrappers[{names.index(name)}]" if names.count(name) == 1 else "env.wrappers"
