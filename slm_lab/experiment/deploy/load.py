"""Load a trained agent from a run folder: `agent = load_agent(folder); action, state = agent.act(obs)`."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np

from slm_lab.agent.policy.policy import Policy, build_policy
from slm_lab.env.agent_spaces import AgentSpaces, agent_spaces, image_channels
from slm_lab.env.layout import BoxLayout
from slm_lab.env.nested_actions import first_action
from slm_lab.env.normalize import Normalizers, make_normalizers
from slm_lab.env.spaces import batch_of_one, entry_layouts, space_from_dict
from slm_lab.experiment.files import bundle as state
from slm_lab.experiment.files.find import CheckpointName, Training, TrainingChoice, checkpoint_names, find_training, readable_checkpoint
from slm_lab.experiment.files.storage import Location
from slm_lab.experiment.plan import UserError
from slm_lab.experiment.session.resume import changed_keys, is_changeable_key, trained_spec
from slm_lab.lib.log import notice
from slm_lab.lib.records import EnvInfo
from slm_lab.lib.text import last_line
from slm_lab.spec.load.loader import load_spec
from slm_lab.spec.models.spec import Spec
from slm_lab.spec.report import format_json


class LoadedAgent:
    """A trained policy with its observation normaliser and the spaces of its env. A LoadedAgent can act without creating an env.

    Attributes:
        policy: the policy.
        normalizers: the observation normaliser of the policy.
        observation_space, action_space: Gymnasium spaces of a single env.
        path: path of the loaded checkpoint.
        description: one-line description of the agent.
        saved: the entries of the checkpoint that are needed to act.
        spaces: spaces of the policy's inputs and outputs, and functions that convert between these spaces and the spaces of the env.
        layouts: one item for each entry of a Dict or Tuple observation (or one item for the observation): the image or vector to which the
            entry is converted for the policy, or None if the space of the entry is not a Box.
    """

    def __init__(
        self,
        policy: Policy,
        normalizers: Normalizers,
        spaces: AgentSpaces,
        action_space: gym.Space[Any],
        path: Location,
        layouts: Sequence[BoxLayout | None],
        obs_keys: Sequence[str] | None = None,
    ) -> None:
        self.policy, self.normalizers, self.path = policy, normalizers, path
        self._obs_key = obs_keys[0] if obs_keys is not None and len(obs_keys) == 1 else None
        self.observation_space, self.action_space = spaces.space, action_space
        self.spaces, self.layouts = spaces, layouts
        self.description, self.saved = str(path), dict[str, Any]()

    @property
    def acting_space(self) -> gym.Space[Any]:
        """The observation space without the entries that only the critic uses, which are not needed to choose actions."""
        space, uses = self.observation_space, self.spaces.uses
        if "critic" not in uses.values():
            return space
        assert isinstance(space, gym.spaces.Dict)
        return gym.spaces.Dict(OrderedDict((key, inner) for key, inner in space.spaces.items() if uses.get(key) != "critic"))

    def __repr__(self) -> str:
        return f"<LoadedAgent {self.description}>"

    def act(self, obs: Any, state: np.ndarray | None = None, deterministic: bool = False) -> tuple[Any, np.ndarray | None]:
        """Choose the action for one observation, or the actions for a batch of observations.

        Args:
            obs: an element of `observation_space` (an observation after the wrappers of the spec), or a batch of elements with a leading
                axis. If env.obs_keys keeps one entry of a Dict or Tuple, the complete observation of the env is accepted too.
            state: hidden state [N, S] of a recurrent net after the previous observation, or None at the start of an episode.
            deterministic: whether to use the mode of the action distribution instead of a sample.

        Returns: (action, hidden state). The action is an element of `action_space`, or a batch of elements for a batch of observations. The
        returned hidden state is None if the policy is not recurrent.
        """
        if self._obs_key is not None and isinstance(obs, Mapping | tuple) and not _has_entries_of(self.observation_space, obs):
            obs = obs[self._obs_key] if isinstance(obs, Mapping) else obs[int(self._obs_key)]
        batched = _is_batch(self.acting_space, obs)
        obs_N = self.encode(obs if batched else batch_of_one(obs))
        if state is None:
            state = self.policy.initial_state(len(obs_N))
        out = self.policy.act(obs_N, state, deterministic)
        action_N = self.spaces.decode(self.policy.env_action(out.action_N))
        if batched:
            return action_N, out.state_N
        return first_action(self.action_space, action_N), out.state_N

    def encode(self, obs_N: Any) -> np.ndarray:
        """Convert a batch of observations of the env to the input of the policy, which is one normalised array."""
        encoded_N = self.spaces.encode(obs_N)
        return encoded_N if self.normalizers.obs is None else self.normalizers.obs(encoded_N)


def load_agent(
    folder: str | Path,
    which: CheckpointName = "best",
    session: int | None = None,
    device: str = "cpu",
    *,
    trial: int | None = None,
    entry: str | None = None,
    env: str | None = None,
    seed: int | None = None,
    policy: str | None = None,
) -> LoadedAgent:
    """Load a trained agent.

    Args:
        folder: the folder of a run, search or study, the name of a model in data/models (or the folder of the model), or the name of a
            pretrained agent.
        which: "best" or "last" weights, or the frame of a numbered checkpoint.
        session: index of the Session (training with one seed) of the run, or None for the Session with the best weights. If
            meta.sampler.num_policies is above 1, `session` is the number of the table of a Session and policy (see events.Row).
        trial: index of a trial of a search, or None for the best confirmed trial or, if no trial was confirmed, the best trial.
        entry, env, seed: label of the entry, label of the env, and seed of a run of a study, or None for the best run. If the study has
            several envs, `env` is required.
        policy: name of the policy in agent.policies, which is required if there are several policies.

    Raises UserError if the folder, model, trial, run or policy does not exist, or if there is no usable checkpoint.
    """
    return load_trained(find_training(folder, None, Path("data"), TrainingChoice(trial, entry, env, seed, policy)), which, session, device)


def load_trained(training: Training, which: CheckpointName = "best", session: int | None = None, device: str = "cpu") -> LoadedAgent:
    """Load the agent of a training from a checkpoint.

    If the best checkpoint cannot be used but another checkpoint can, log a notice and load the other checkpoint. Raises UserError if no
    checkpoint can be used, if the training has several policies and training.policy is None, or if keys of the saved spec that affect the
    agent or its env have been edited since the training.

    Args: session: index of the Session, or None for the Session with the best weights (see bundle.weights_sort_key).
    """
    if training.policy is None and len(names := training.policies) > 1:
        raise UserError(f"{training.paths.root} has several policies; choose one of {', '.join(names)} (--policy, or policy=…)")
    problems: list[str] = []
    readable = _readable_checkpoints(training, which, session, problems)
    if not readable:
        raise UserError(_problems_text(problems, training, session) or _no_checkpoint_message(training, which, session))
    spec = load_spec(training.spec_file, training.spec_name, for_search=False, builds_env=False)
    _check_spec_is_unchanged(training, spec)
    for path, bundle in readable:
        try:
            agent = build_loaded_agent(spec, path, bundle, device, training.name)
        except state.BundleError as error:
            problems.append(str(error))
            continue
        for problem in problems:
            notice(f"{problem}; using {path.name}")
        return agent
    raise UserError(_problems_text(problems, training, session))


def _check_spec_is_unchanged(training: Training, spec: Spec) -> None:
    """Raise UserError if the spec file in the run folder was changed after training.

    The sections agent and env are compared with the spec in the last checkpoint. Keys that can be changed when a run is continued are not
    compared.
    """
    paths = training.paths
    for index in _table_numbers(training, None):
        path = paths.checkpoint(index, "last", training.trial)
        try:
            header = state.read_header(path) if path.is_file() else {}
        except (state.BundleError, OSError):
            continue
        if not header.get("spec"):
            continue
        changes = changed_keys(trained_spec(header, spec, builds_env=False), spec)
        edited = {key: values for key, values in changes.items() if key.startswith(("agent.", "env.")) and not is_changeable_key(key)}
        if edited:
            listed = "".join(f"\n  {key}: {format_json(new)}; trained with {format_json(old)}" for key, (old, new) in edited.items())
            raise UserError(f"{training.spec_file} was edited after the agent had been trained; restore these keys:{listed}")
        return


def build_loaded_agent(spec: Spec, path: Location, bundle: dict[str, Any], device: str = "cpu", name: str = "") -> LoadedAgent:
    """Build the agent of a spec with the weights of a checkpoint. Raises BundleError if the weights do not fit the spec.

    Args:
        path: path of the checkpoint.
        bundle: content of the checkpoint.
        name: name of the training in its search or study, for the description of the agent.
    """
    if "weights" not in bundle:
        raise state.BundleError(f"{path} has no weights")
    observation_space, action_space = (space_from_dict(bundle["spaces"][kind]) for kind in ("observation", "action"))
    spaces = agent_spaces(spec.env, observation_space, action_space, spec.agent.input)
    info = EnvInfo(1, spaces.observation, spaces.action)
    net = spec.agent.net  # a loaded agent acts in float32, the dtype of its weights, on any processor and in an exported file
    float32 = spec.agent.model_copy(update={"net": None if net is None else net.model_copy(update={"dtype": "float32"})})
    policy = build_policy(float32, info, np.random.default_rng(), device)
    try:
        policy.load_weights(bundle["weights"])
    except RuntimeError as error:
        raise state.BundleError(f"{path} does not fit the net of {spec.name}: {last_line(str(error))}") from None
    policy.explore_var = bundle.get("explore_var") or 0.0
    normalizers = make_normalizers(spec.env, info, spec.agent.algorithm.gamma, training=False)
    normalizers.copy_obs_statistics(bundle["normalizers"])
    layouts = [layout for _, _, layout in entry_layouts(spaces.space, spec.agent.input, image_channels(spec.env))]
    agent = LoadedAgent(policy, normalizers, spaces, action_space, path, layouts, spec.env.obs_keys)
    agent.description, agent.saved = _description(spec, path, bundle, name), {key: bundle[key] for key in state.PLAYABLE if key in bundle}
    return agent


def _description(spec: Spec, path: Location, bundle: Mapping[str, Any], name: str) -> str:
    from slm_lab.experiment.report.progress import format_with_error

    parts = [f"{spec.agent.algorithm.name} of {spec.name} for {spec.env.name}", *([name] if name else [])]
    parts += [f"policy {bundle['policy']}"] if "policy" in bundle else []
    parts += [f"frame {bundle['frame']:,}"] if "frame" in bundle else []
    if (value := bundle.get("current_return")) is not None:
        over = f"{bundle['current_epi']} {'evaluation ' if bundle['mode'] == 'eval' else ''}episodes"
        parts.append(f"return {format_with_error(value, bundle['current_return_se'])} ({over})")
    return f"{', '.join(parts)}: {path}"


def _problems_text(problems: Sequence[str], training: Training, session: int | None) -> str:
    """Return a text with the reasons why checkpoints cannot be used (`problems`), and the path of a readable checkpoint if there is one.

    If `problems` is empty, "" is returned.
    """
    index = None if session is None else _table_numbers(training, session)[0]
    other = readable_checkpoint(training.paths, index, training.trial) if problems else None
    return "; ".join([*problems, *([] if other is None else [f"this one can be read: {other}"])])


def _no_checkpoint_message(training: Training, which: CheckpointName, session: int | None) -> str:
    """Return the message that a checkpoint does not exist, with a list of the existing checkpoints."""
    paths, trial = training.paths, training.trial
    if not (existing := checkpoint_names(paths, None, trial)):
        return f"no checkpoint in {paths.checkpoint_dir}"
    if session is not None and not (existing := checkpoint_names(paths, _table_numbers(training, session)[0], trial)):
        count = max(1, len(training.policies))  # policies without names are numbered like sessions
        sessions = sorted({index // count for index in paths.table_numbers(t=trial) if checkpoint_names(paths, index, trial)})
        return f"no checkpoint of session {session} in {paths.checkpoint_dir}; sessions: {', '.join(map(str, sessions))}"
    of_session = "" if session is None else f" of session {session}"
    return f"no checkpoint '{which}'{of_session} in {paths.checkpoint_dir}; expected one of {', '.join(existing)}"


def _readable_checkpoints(
    training: Training, which: CheckpointName, session: int | None, problems: list[str]
) -> list[tuple[Location, dict[str, Any]]]:
    """Return (path, content) of each readable checkpoint of a training, best first.

    For each checkpoint that cannot be read, the reason is added to `problems`.
    """
    readable, paths, trial = [], training.paths, training.trial
    for index in _table_numbers(training, session):
        path = paths.checkpoint(index, which, trial)
        try:
            if path.is_file():
                bundle = state.load(path)
                bundle = bundle["policies"][index % paths.policies] if "policies" in bundle else bundle
                readable.append((path, bundle if training.policy is None else {**bundle, "policy": training.policy}))
        except state.BundleError as error:
            problems.append(str(error))
        except OSError as error:
            problems.append(f"{path} cannot be read: {error.strerror or error}")
    return sorted(readable, key=lambda item: state.weights_sort_key(item[1]), reverse=True)


def _table_numbers(training: Training, session: int | None) -> list[int]:
    """Return the numbers of those tables of a training (see events.Row) for which checkpoints may be used.

    Each Session or, if the training has several policies, each policy of each Session has separate tables and checkpoints.
    """
    if not (names := training.policies):
        return training.paths.table_numbers(t=training.trial) if session is None else [session]
    policy = 0 if training.policy is None else names.index(training.policy)
    existing = [index for index in training.paths.table_numbers(t=training.trial) if index % len(names) == policy]
    return existing if session is None else [session * len(names) + policy]


def _has_entries_of(space: gym.Space[Any], obs: Mapping[str, Any] | tuple[Any, ...]) -> bool:
    """Return whether an observation has exactly the entries of a Dict or Tuple space."""
    if isinstance(space, gym.spaces.Dict):
        return isinstance(obs, Mapping) and obs.keys() == space.spaces.keys()
    return isinstance(space, gym.spaces.Tuple) and isinstance(obs, tuple) and len(obs) == len(space.spaces)


def _is_batch(space: gym.Space[Any], obs: Any) -> bool:
    """Return whether `obs` has a leading batch axis."""
    match space:
        case gym.spaces.Dict():
            key = next(iter(space.spaces))
            return _is_batch(space.spaces[key], obs[key])
        case gym.spaces.Tuple():
            return _is_batch(space.spaces[0], obs[0])
    return np.ndim(obs) == len(space.shape or ()) + 1
