"""Check of the env before a run: the env is stepped once, and the returned values are checked before any file is written."""

from __future__ import annotations

import traceback
from pathlib import Path

import slm_lab
from slm_lab.env.goals import GoalReward, check_goal_rewards
from slm_lab.env.make import make_env
from slm_lab.env.outcome import InvalidOutcome
from slm_lab.env.vec import Env
from slm_lab.experiment.execute.heartbeat import BUILDING, CLOSING, RESETTING, STEPPING
from slm_lab.experiment.execute.local.user_code import close_env
from slm_lab.experiment.files.bundle import rng_state, set_rng_state
from slm_lab.experiment.training.experience import Beat
from slm_lab.lib.log import logger
from slm_lab.lib.records import VecStep
from slm_lab.spec.models.memory import HindsightReplaySpec
from slm_lab.spec.models.spec import Spec
from slm_lab.spec.report import Problem, SpecError

_NOT_USER_CODE = (str(Path(slm_lab.__file__).parent), str(Path(traceback.__file__).parent))
"""Folders whose code does not belong to the user: the package slm_lab and the standard library."""


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
        raise SpecError(spec.name, [Problem("env.name", str(error))]) from error
    except Exception as error:
        logger.info("the trial step of the env failed", exc_info=True)
        message = f"{spec.env.name}: {call} raised {type(error).__name__}: {error}{_last_user_line(error)}"
        raise SpecError(spec.name, [Problem("env.name", message)]) from error


def _last_user_line(error: Exception) -> str:
    """Return the file and line of the innermost user code in the traceback of an error, or "" if the traceback contains no user code."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if not frame.filename.startswith(_NOT_USER_CODE)]
    return f" (file {frames[-1].filename}, line {frames[-1].lineno})" if frames else ""
