"""The model of a complete spec, properties of a spec that depend on several sections, and functions that return the models and keys that
each section can have."""

from __future__ import annotations

import types
from typing import TYPE_CHECKING, Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel, Field, model_validator
from pydantic.fields import FieldInfo

from slm_lab.spec.models.algorithm import EPOCHS, Algorithm, AlgorithmSpec, EpsilonGreedySpec, ReplayAlgorithmSpec
from slm_lab.spec.models.base import (
    Component,
    ExtensionError,
    LinearDecay,
    SpecModel,
    component_base,
    constant_schedule,
    import_model,
    is_extension,
)
from slm_lab.spec.models.env import EnvSpec
from slm_lab.spec.models.memory import MEMORIES, Memory
from slm_lab.spec.models.meta import MetaSpec
from slm_lab.spec.models.net import Net, NetSpec
from slm_lab.spec.report import KeyPath, value_at

if TYPE_CHECKING:
    from slm_lab.lib.records import InputKind

REPLAY_ROWS = 16
"""Number of vector steps of each rollout that a rollout worker collects for a replay buffer. This number is small, because rollout workers
update their policy after each rollout."""


def default_memory(algorithm: AlgorithmSpec | None) -> Any:
    """Return the default memory of an algorithm, which is the first built-in memory in the attribute `memories` of the algorithm.

    Args: algorithm: the algorithm, or None if the algorithm of the spec is invalid.
    """
    if algorithm is None:
        return MEMORIES["OnPolicyBatchReplay"].model_validate({"name": "OnPolicyBatchReplay"})
    name = next((name for name in algorithm.memories if name in MEMORIES), "OnPolicyBatchReplay")
    keys = {} if algorithm.batch_size is None else {"batch_size": algorithm.batch_size}
    return MEMORIES[name].model_validate({"name": name, **keys})


SPEC_VERSION = 3
"""Version of the format in which runs save specs. The version is stored as spec_version in meta.run. Loading a saved spec with another
version raises SpecError."""


class AgentSpec(SpecModel):
    """The agent: algorithm, memory and networks."""

    name: str = ""
    """Label of the agent (A2C, PPO, …)."""
    algorithm: Algorithm
    """Algorithm and its hyperparameters."""
    memory: Memory = Field(default_factory=lambda data: default_memory(data.get("algorithm")))
    """Memory from which the algorithm learns, by default the memory that is recommended for the algorithm."""
    net: Net | None = None
    """Networks, optimizers and learning rates. The default is a net that is recommended for the algorithm and the spaces of the env. (The
    algorithm Random needs no net.)"""
    critic_net: Net | None = None
    """Network of the critics if the algorithm has an actor and separate critics (SoftActorCritic, CrossQ, TQC, DistributionalSAC, TD3,
    DDPG, IQL). By default, the keys of agent.net also define the network of the critics."""

    policies: Annotated[dict[str, Annotated[list[str], Field(min_length=1)]], Field(min_length=1)] | None = None
    """For envs with several agents, an object that maps the name of each policy to the names of the agents for which the policy acts, such
    as {"good": ["agent_0"], "bad": ["adversary_0", "adversary_1"]}. Each policy has its own weights, memory and logs. All agents of a
    policy must have equal spaces. By default, one policy acts for all agents."""

    @property
    def nets(self) -> dict[str, NetSpec]:
        """Return a dict from the keys "net" and "critic_net" to the specs of these nets. Keys that the spec does not give are left out."""
        return {key: net for key, net in (("net", self.net), ("critic_net", self.critic_net)) if net is not None}

    @property
    def input(self) -> InputKind | None:
        """Return whether the nets encode observations as "image" or "vector", or None if the observation space determines the encoding."""
        given = next((net.input for net in self.nets.values() if net.input is not None), None)
        return given or ("image" if any(net.images for net in self.nets.values()) else None)

    @property
    def rollout_len(self) -> int:
        """Return the number of vector steps (or, if the memory stores episodes, the number of episodes) between two trainings."""
        if not self.algorithm.learns:
            return 1
        return self.algorithm.rollout_len(1 if self.memory.episodes else 32)

    @property
    def training_start(self) -> int:
        """Return the number of transitions to collect before the first update from a replay buffer, or 0 for an on-policy algorithm."""
        algorithm = self.algorithm
        if not isinstance(algorithm, ReplayAlgorithmSpec):
            return 0
        if algorithm.training_start_step is not None:
            return algorithm.training_start_step
        return max(algorithm.min_start, getattr(self.memory, "batch_size", 1))


class Spec(SpecModel):
    """A spec: the complete description of a training run or search, with the sections agent, env, meta and search."""

    name: str
    """Name of the spec in its file."""
    agent: AgentSpec
    """Settings of the agent: algorithm, memory and networks."""
    env: EnvSpec
    """Settings of the environment."""
    meta: MetaSpec = MetaSpec()
    """Settings of Sessions, logging, checkpoints and distributed training."""
    search: dict[str, Any] | None = None
    """Search space, with keys of the form "key__distribution": [arguments], nested like the spec (items of a list by position) or with
    dotted paths. The arguments of choice and grid_search are the values to try. If one of these values is an object, the object may also
    contain search keys, which are searched only if the value is used. The arguments of uniform and loguniform are [low, high], the
    arguments of randint and lograndint are integers [low, high], where high is not a possible value, and the arguments of randn and normal
    are [mean, deviation]. If the name of the distribution begins with q (quniform, qloguniform, qrandint, qlograndint, qrandn), the third
    argument is a step, values are multiples of the step, and the bound high is a possible value. Mode train does not use the search
    space."""

    @model_validator(mode="after")
    def _set_default_exploration(self) -> Spec:
        """Set the default value of explore_var_spec for algorithms that act on action values. The default value depends on agent.net and
        env.max_frame."""
        algorithm = self.agent.algorithm
        if isinstance(algorithm, EpsilonGreedySpec):
            change: dict[str, Any] = {}
            if algorithm.action_policy == "epsilon_greedy" and algorithm.explore_var_spec is None:
                decay = LinearDecay(name="linear_decay", start_val=1.0, end_val=0.05, end_step=0.1 * self.env.max_frame)
                change["explore_var_spec"] = constant_schedule(0.0) if getattr(self.agent.net, "noisy", False) else decay
            if algorithm.action_policy == "boltzmann" and "action_pdtype" not in algorithm.model_fields_set:
                change["action_pdtype"] = "Categorical"
            if change:
                agent = self.agent.model_copy(update={"algorithm": algorithm.model_copy(update=change)})
                object.__setattr__(self, "agent", agent)  # assignment is not possible, because the model is frozen
        return self

    def with_meta(self, **changes: Any) -> Spec:
        """Return a copy of the spec in which keys of `meta` have the values in `changes`. The values are not validated."""
        return self.model_copy(update={"meta": self.meta.model_copy(update=changes)})

    @property
    def lacks_net(self) -> bool:
        """Return whether agent.net is absent although the algorithm learns, so that rules.resolve.complete_short_spec has to add a net."""
        return self.agent.net is None and self.agent.algorithm.learns

    @property
    def defers_normalization(self) -> bool:
        """Whether envs return observations and rewards before normalisation, because a replay buffer stores them: observations are
        normalised whenever the policy acts, and observations and rewards whenever a batch is sampled."""
        return (self.env.normalize_obs or self.env.normalize_reward) and not self.agent.algorithm.on_policy

    @property
    def session_frames(self) -> int:
        """Return the number of training frames of each Session and policy, which is env.max_frame or, with meta.distributed, the Session's
        share of env.max_frame."""
        if not self.meta.distributed:
            return self.env.max_frame
        return -(-self.env.max_frame // (self.meta.max_session * self.env.num_envs)) * self.env.num_envs

    @property
    def trial_frames(self) -> int:
        """Return the number of frames of each independent training run of a trial.

        The returned number is session_frames or, with meta.distributed (all Sessions train one net), the sum of the frames of all Sessions.
        """
        return self.session_frames * (self.meta.max_session if self.meta.distributed else 1)

    @property
    def worker_rollout_len(self) -> int:
        """Return the number of vector steps of a rollout that a rollout worker collects."""
        return self.agent.rollout_len if self.agent.algorithm.on_policy else REPLAY_ROWS

    @property
    def rollouts_per_dataset(self) -> int:
        """Return the number of rollouts, each of one env, in a dataset. A dataset is the data that rollout workers (meta.sampler) collect
        for an update."""
        algorithm, sampler = self.agent.algorithm, self.meta.sampler
        assert sampler is not None
        if isinstance(algorithm, EPOCHS):
            return algorithm.minibatch_size * sampler.num_batches_per_epoch // self.worker_rollout_len
        return sampler.num_envs

    @property
    def policies(self) -> int:
        """Return the number of policies that a Session trains."""
        if self.agent.policies is not None:
            return len(self.agent.policies)
        return 1 if self.meta.sampler is None else self.meta.sampler.num_policies

    @property
    def policy_names(self) -> list[str]:
        """Return the names of the policies that a Session trains, which are the keys of agent.policies or, if the spec does not give
        agent.policies, "0", "1", …."""
        return [*map(str, range(self.policies))] if self.agent.policies is None else [*self.agent.policies]


_UNSUPPORTED_ENV_KEYS = frozenset({"device"})
"""Keys that occur in the section env of published specs, but that this version of the package does not support."""


def union_members(annotation: Any) -> list[Any]:
    """Return the member types of a union annotation, without None and without Annotated.

    For any other annotation, return a list that contains only this annotation.
    """
    if isinstance(annotation, FieldInfo):
        annotation = annotation.annotation
    if get_origin(annotation) is Annotated:
        return union_members(get_args(annotation)[0])
    if get_origin(annotation) in (Union, types.UnionType):
        return [inner for member in get_args(annotation) for inner in union_members(member)]
    return [] if annotation is type(None) else [annotation]


def models_at(path: KeyPath, raw: Any, root: type[BaseModel] = Spec) -> list[type[BaseModel]]:
    """Return the pydantic models that may describe the section at `path` of a raw spec, or only one model if the raw spec names this
    model."""
    annotations: list[Any] = [root]
    for key in (None, *path):
        if key is not None:
            annotations = [inner for annotation in annotations for inner in annotations_below(annotation, key)]
            raw = value_at(raw, (key,))
        annotations = chosen_models(annotations, raw)
    return [a for a in annotations if is_model(a)]


def chosen_models(annotations: list[Any], raw: Any) -> list[Any]:
    """Return a list of the one model that the key `name` of `raw` selects, or all `annotations` if `raw` does not select a model."""
    name = raw.get("name") if isinstance(raw, dict) else None
    kinds = [component_base(a) for a in annotations if is_model(a) and issubclass(a, Component)] if is_extension(name) else []
    if kinds:
        try:
            return [import_model(str(name), kinds[0])]
        except ExtensionError:
            return annotations
    named = [a for a in annotations if is_model(a) and isinstance(name, str) and name in component_names([a])]
    return named or annotations


def component_names(annotations: list[Any]) -> list[str]:
    """Return the values of the key `name` that select the models in `annotations`."""
    fields = [a.model_fields["name"].annotation for a in annotations if is_model(a) and "name" in a.model_fields]
    return [value for field in fields if get_origin(field) is Literal for value in get_args(field)]


def annotations_below(annotation: Any, key: str | int) -> list[Any]:
    """Return the types that the value at `key` may have, inside a value with the type `annotation`."""
    if is_model(annotation) and isinstance(key, str) and key in annotation.model_fields:
        return union_members(annotation.model_fields[key])
    if get_origin(annotation) is list and isinstance(key, int):
        return union_members(get_args(annotation)[0])
    return []


def is_model(annotation: Any) -> bool:
    return isinstance(annotation, type) and issubclass(annotation, BaseModel)


_SECTIONS: dict[KeyPath, FieldInfo] = {
    **{("agent", key): AgentSpec.model_fields[key] for key in ("algorithm", "memory", "net", "critic_net")},
    **{(key,): Spec.model_fields[key] for key in ("agent", "env", "meta")},
}
SECTION_KEYS = {
    location: frozenset[str](name for model in union_members(section) for name in model.model_fields)
    for location, section in _SECTIONS.items()
}
"""Maps the path of each section to the keys of all components that the section can have."""


def ineffective_keys(location: KeyPath, raw: dict[str, Any]) -> frozenset[str]:
    """Return those keys of a section that have no effect with the component (such as an algorithm) that the raw spec names."""
    models = models_at(location, raw)
    known = SECTION_KEYS.get(location, frozenset()) | (_UNSUPPORTED_ENV_KEYS if location == ("env",) else frozenset())
    return known - models[0].model_fields.keys() if len(models) == 1 else frozenset()
