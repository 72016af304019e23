"""The curriculum of a vector env: constructor arguments and attributes of its envs that change when an episode ends (env.schedule)."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Mapping
from typing import Any

import gymnasium as gym
import numpy as np

from slm_lab.env.arguments import WrapperError
from slm_lab.spec.models.env_schedule import Rule, StepRule, parse_rule
from slm_lab.spec.report import nearest_hint

Values = dict[str, Any]
"""Maps the names of scheduled constructor arguments and attributes of an env to their values."""


class Curriculum:
    """Curriculum of a vector env: the current values of the scheduled arguments and attributes (env.schedule) of each env, and the values
    that each env receives with its next reset.

    Args:
        schedule: the spec's env.schedule.
        constructor_arguments: names of the env constructor's arguments. All other keys of `schedule` name attributes of the env.
        final: whether every scheduled key always has the last value of its schedule, as in evaluation.
    """

    def __init__(self, schedule: Mapping[str, Any], constructor_arguments: Collection[str], num_envs: int, final: bool) -> None:
        self.rules: dict[str, Rule] = {key: parse_rule(value) for key, value in schedule.items()}
        self.constructor_arguments, self._final = tuple(constructor_arguments), final
        self.arguments = tuple(key for key in schedule if key in constructor_arguments)
        """Keys of the schedule that are constructor arguments. An env must be rebuilt to change a constructor argument."""
        self.frame = 0
        """Current number of env steps of the training run. Rules that depend on the number of steps are evaluated at this number."""
        self._by_return = {key: rule for key, rule in self.rules.items() if isinstance(rule, StepRule) and rule.by == "return"}
        self._levels = dict.fromkeys(self._by_return, 0)
        """For each scheduled key whose value depends on returns: index of the current value in the list of the key's values."""
        self._returns: dict[str, deque[float]] = {key: deque(maxlen=rule.episodes) for key, rule in self._by_return.items()}
        self.held: list[Values] = [self.current_values() for _ in range(num_envs)]
        """Current scheduled values of each env."""
        self._played = list(self.held)
        """Scheduled values of each env during its most recently ended episode."""
        self._restored: list[Values] | None = None
        """Loaded scheduled values of each env, from the call of `load_state_dict` until the call of `finish_restoration`, else None."""
        self.seeds, self._rebuilt = [0] * num_envs, [0] * num_envs
        """Seed of each env, and the number of times that each env was rebuilt."""

    def current_values(self) -> Values:
        """Return the scheduled values for an env that begins an episode now."""
        if self._final:
            return {key: rule.values[-1] for key, rule in self.rules.items()}
        levels = self._levels
        return {key: rule.values[levels[key]] if key in levels else rule.at(self.frame) for key, rule in self.rules.items()}

    def next_values(self, row: int) -> Values:
        """Return the scheduled values that an env receives with its next reset."""
        return self.current_values() if self._restored is None else self._restored[row]

    def record_episode_start(self, row: int, values: Values) -> None:
        """Record that the env with index `row` begins an episode with the scheduled values `values`."""
        self._played[row], self.held[row] = self.held[row], values

    def next_seed(self, row: int) -> int:
        """Return a new seed for the env with index `row`, which was rebuilt with other constructor arguments."""
        self._rebuilt[row] += 1
        return int(np.random.SeedSequence([self.seeds[row], self._rebuilt[row]]).generate_state(1)[0]) & 0x7FFFFFFF

    def end_episode(self, row: int, total_reward: float) -> dict[str, float]:
        """Record the return of an episode that has just ended in the env with index `row`. Call this method after the env has been reset.

        Returns a dict from keys of `Episode.info` to the scheduled values with which the episode was played, as numbers.
        """
        played = self._played[row]
        for key, rule in self._by_return.items():
            level, returns = self._levels[key], self._returns[key]
            if level + 1 == len(rule.values) or played[key] != rule.values[level]:
                continue
            returns.append(total_reward)
            if len(returns) == rule.episodes and sum(returns) / len(returns) >= rule.bounds[level + 1]:
                self._levels[key] = level + 1
                returns.clear()
        return {episode_info_key(key): rule.to_number(played[key]) for key, rule in self.rules.items()}

    def state_dict(self) -> dict[str, Any]:
        return {
            "frame": self.frame,
            "levels": dict(self._levels),
            "returns": {key: list(returns) for key, returns in self._returns.items()},
            "held": [dict(values) for values in self.held],
            "seeds": list(self.seeds),
            "rebuilt": list(self._rebuilt),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load a state that `state_dict` returned. Until `finish_restoration` is called, resets give each env the scheduled values that
        the env had when the state was saved."""
        self.frame, self._levels = state["frame"], dict(state["levels"])
        for key, returns in state["returns"].items():
            self._returns[key].extend(returns)
        self.seeds, self._rebuilt = list(state["seeds"]), list(state["rebuilt"])
        self._restored = state["held"] if len(state["held"]) == len(self.held) else None

    def finish_restoration(self, state: dict[str, Any]) -> None:
        """End the restoration that `load_state_dict` began, so that later resets give the envs new scheduled values.

        Args: state: the loaded state, whose seeds replace the seeds that resets after `load_state_dict` have changed.
        """
        self._restored, self.seeds, self._rebuilt = None, list(state["seeds"]), list(state["rebuilt"])

    def next_values_and_rebuild(self, row: int) -> tuple[Values, bool]:
        """Return the scheduled values that an env receives with its next reset, and whether the env must be rebuilt because a constructor
        argument changes."""
        wanted, held = self.next_values(row), self.held[row]
        return wanted, any(wanted[key] != held[key] for key in self.arguments)

    def attributes(self, values: Mapping[str, Any]) -> Values:
        """Return the scheduled values of attributes of an env, without the scheduled values of constructor arguments."""
        return {key: value for key, value in values.items() if key not in self.arguments}


def episode_info_key(key: str) -> str:
    """Return the key of `Episode.info` that contains the value of a scheduled argument or attribute."""
    return f"env.{key}"


def set_attributes(env: gym.Env[Any, Any], values: Mapping[str, Any], arguments: Collection[str] = ()) -> None:
    """Set attributes of an env or of its wrappers. Raises WrapperError if an attribute does not exist or cannot be set.

    Args: arguments: names of the arguments of the env's constructor, for the error message.
    """
    for key, value in values.items():
        if not env.has_wrapper_attr(key):
            attributes = [name for name, attribute in vars(env.unwrapped).items() if not name.startswith("_") and _is_plain(attribute)]
            names = sorted({*arguments, *attributes})
            near = nearest_hint(key, names) or ";"
            message = f"the env has no argument and no attribute {key!r}{near} it has {', '.join(names) or 'none'}"
            raise WrapperError(f"schedule.{key}", message)
        try:
            env.set_wrapper_attr(key, value)
        except Exception as error:  # a property without a setter, or an error that the env's own setter raises
            message = f"the env's attribute {key!r} cannot be set to {value!r}: {type(error).__name__}: {error}"
            raise WrapperError(f"schedule.{key}", message) from error


def _is_plain(value: Any) -> bool:
    return value is None or isinstance(value, bool | int | float | str | list | np.number)


def check_spaces(env: gym.Env[Any, Any], observation: gym.Space[Any], action: gym.Space[Any], values: Mapping[str, Any]) -> None:
    """Raise WrapperError if the spaces of an env differ from the expected spaces.

    Args: values: scheduled values of the env, for the error message.
    """
    for kind, actual, expected in (("observation", env.observation_space, observation), ("action", env.action_space, action)):
        if actual != expected:
            given = ", ".join(f"{key} = {value!r}" for key, value in values.items())
            message = f"with {given} the {kind} space is {actual}; expected {expected}: a schedule cannot change the spaces"
            raise WrapperError(f"schedule.{next(iter(values))}", message)
