"""The policy: a net, an action distribution and an action rule. Rollout workers and evaluations need only a policy.

Small feed-forward nets act in numpy (NumpyActor). The numpy code reads the weights through views of the net's flat vectors (see
FlatParams), so that the current weights are always used. For 8 envs and two hidden layers, the numpy code takes about a fifth of the time
that torch needs to dispatch the same operations. If a user has changed the modules of the net, the modules are called instead of the numpy
code (see validity.py).
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from slm_lab.agent.net.actor_critic_net import ActorCriticNet, ActorHead, build_actor_sequence
from slm_lab.agent.net.body import Body
from slm_lab.agent.net.distributional import DistributionalHead, build_q_net
from slm_lab.agent.net.noisy import NoiseSource
from slm_lab.agent.net.passes.direct import GraphFreeSequence
from slm_lab.agent.net.passes.validity import ModuleMonitor
from slm_lab.agent.net.q_nets import QNet
from slm_lab.agent.ops.arrays import clip
from slm_lab.agent.ops.device import set_tf32
from slm_lab.agent.ops.distributions import (
    ACTOR_DISTRIBUTIONS,
    DEFAULT_DISTRIBUTION,
    DISTRIBUTIONS,
    MULTI_DISCRETE,
    ActionDistribution,
    Product,
)
from slm_lab.agent.ops.masks import ActionMask, valid_actions
from slm_lab.agent.optim.flat import FlatParams
from slm_lab.lib.log import notice
from slm_lab.lib.masks import uniform_logp
from slm_lab.lib.random_actions import draw_uniform_actions
from slm_lab.lib.records import ActionSpace, ActOut, EnvInfo
from slm_lab.spec.models.algorithm import ALGORITHMS, ActionPolicy, AlgorithmSpec, EntropyAnneal, Exploration, SoftActorCriticSpec
from slm_lab.spec.models.net import NetSpec
from slm_lab.spec.models.spec import AgentSpec
from slm_lab.spec.report import Problem, SpecError

NUMPY_ACTING = True
"""Whether small nets act in numpy. If NUMPY_ACTING is False, all nets act in torch."""

CHECK_EVERY = 16
"""Number of acting steps between two complete checks for changes of the net's modules. One check takes a quarter of the time of an acting
step with one env."""

RARE_CHECK_EVERY = 1024
"""Number of acting steps between two complete checks after `Agent.set_rare_checks(True)`."""


class NumpyActor:
    """Function that maps observations, float32 [N, D], to distribution parameters, float32 [N, P], and computes in numpy.

    The computation uses the layers of a net's body and head. If the modules of the net were changed after the NumpyActor was built, the
    NumpyActor calls the modules instead.
    """

    def __init__(self, body: Body, head: ActorHead, sequence: GraphFreeSequence, mask: ActionMask | None = None) -> None:
        self._body, self._head, self.layers, self._mask = body, head, sequence.outputs, mask
        if isinstance(head, DistributionalHead):
            self.layers = lambda obs_N: head.distribution_means(sequence.outputs(obs_N))
        """`layers` is the function that computes the outputs in numpy, without a check for changes of the modules."""
        self._monitor = ModuleMonitor([*body.modules(), *head.modules()], data=True)
        self._calls_until_check, self.check_every = 0, CHECK_EVERY

    def __call__(self, obs_N: np.ndarray, exact: bool = True) -> np.ndarray:
        """Compute the distribution parameters [N, P] of observations.

        Args: exact: whether to check now for every kind of change of the net's modules. With exact=False, added hooks are noticed
        immediately, and other changes after at most `check_every` calls.
        """
        params_NP = self._compute_parameters(obs_N, exact)
        return params_NP if self._mask is None else self._mask(params_NP, obs_N)

    def _compute_parameters(self, obs_N: np.ndarray, exact: bool) -> np.ndarray:
        self._calls_until_check -= 1
        if exact or self._calls_until_check < 0 or RemovableHandle.next_id != self._monitor.handles:
            unchanged = self._monitor.is_unchanged()
            self._calls_until_check = self.check_every if unchanged else 0
            if not unchanged:
                return self._compute_with_modules(obs_N)
        return self.layers(obs_N)

    @torch.inference_mode()
    def _compute_with_modules(self, obs_N: np.ndarray) -> np.ndarray:
        params_NP: np.ndarray = self._head(self._body(torch.from_numpy(obs_N))).numpy()
        return params_NP


def build_numpy_actor(body: Body, head: ActorHead, mask: ActionMask | None = None) -> NumpyActor | None:
    """Return a NumpyActor for the body, the head and the action mask of a net, or None if the net has no numpy implementation."""
    if not NUMPY_ACTING or body.matmul_mode.bfloat16:
        return None
    sequence = None if isinstance(head, DistributionalHead) and head.state is not None else build_actor_sequence(body, head)
    return None if sequence is None else NumpyActor(body, head, sequence, mask)


class Policy:
    """Policy π(a|s), which chooses actions with its own random stream.

    Args:
        action: the action space.
        rng: random generator that draws the actions.
        net: the net, or None for uniformly random actions.
        distribution: the action distribution given the net's outputs, or None for uniformly random actions.
        action_policy: "default" samples the distribution; "epsilon_greedy" takes a random action with probability `explore_var`, otherwise
            the mode of the distribution; "boltzmann" divides the logits by `explore_var`; "gaussian" adds noise with standard deviation
            `explore_var` to the mode; "random" ignores the distribution.
        logp: whether `act` computes the log-probabilities of sampled actions. With logp=False, `act` returns NaN as log-probabilities. With
            few envs, computing log-probabilities would take as long as drawing the actions.
        flat: the parameters of the net in one vector.
        mask: the action mask of the observations, or None if every action is always valid.
    """

    def __init__(
        self,
        action: ActionSpace,
        rng: np.random.Generator,
        net: ActorCriticNet | QNet | None = None,
        distribution: ActionDistribution | None = None,
        action_policy: ActionPolicy | Exploration = "default",
        logp: bool = True,
        flat: FlatParams | None = None,
        mask: ActionMask | None = None,
    ) -> None:
        self.action, self.rng, self.net, self.distribution, self.logp, self.flat = action, rng, net, distribution, logp, flat
        self.mask = mask
        self.action_policy: ActionPolicy | Exploration = "random" if net is None else action_policy
        self.explore_var: float = 0.0
        self.uniform = False
        """Whether the policy ignores the distribution and acts uniformly at random. `clone` does not copy this attribute."""
        self.acts_noisily = False
        """Whether a noisy net acts with noise, unless `deterministic=True`. `clone` does not copy this attribute."""
        self._noise = NoiseSource(net)
        self.version = 0
        """Number of updates of the weights so far."""
        self.state_size = 0 if net is None else net.state_size
        self._nvec = np.array(action.nvec or (2,) * action.dim)
        self._choices = float(self._nvec.prod(dtype=np.float64))
        """Number of different actions, if all components are discrete."""
        # noisy nets act through `forward`, which draws their noise; a NumpyActor would not
        self._numpy_actor = None if net is None or self._noise else build_numpy_actor(net.actor_body, net.actor_head, mask)
        self._unknown_N = np.zeros(0, np.float32)
        self.env_action: Callable[[np.ndarray], np.ndarray] = (
            (lambda action_N: action_N) if distribution is None else distribution.env_action
        )
        """Function that converts the actions of ActOut to the form that the env accepts."""
        self._choose: Callable[[np.ndarray], tuple[np.ndarray, np.ndarray]] = {
            "default": self._sample if logp else self._sample_without_logp,
            "boltzmann": self._boltzmann,
            "epsilon_greedy": self._epsilon_greedy,
            "gaussian": self._gaussian,
            "random": lambda params_NP: self._uniform(len(params_NP), self._masks_from_outputs(params_NP)),
        }[self.action_policy]

    def set_rare_checks(self, rarely: bool) -> None:
        """Set whether the policy checks the modules of the net only rarely for changes (see Agent.set_rare_checks)."""
        if self._numpy_actor is not None:
            self._numpy_actor.check_every = RARE_CHECK_EVERY if rarely else CHECK_EVERY

    def clone(self, rng: np.random.Generator) -> Policy:
        """Return a policy with the same net and the random stream `rng`."""
        other = Policy(self.action, rng, self.net, self.distribution, self.action_policy, self.logp, self.flat, self.mask)
        other.explore_var = self.explore_var
        return other

    def initial_state(self, num_envs: int) -> np.ndarray | None:
        """Return the hidden state [N, S] at the start of episodes, or None for a feed-forward policy."""
        return np.zeros((num_envs, self.state_size), np.float32) if self.state_size else None

    def act(self, obs_N: np.ndarray, state_N: np.ndarray | None = None, deterministic: bool = False) -> ActOut:
        """Choose actions for the observations obs_N [N, *shape].

        Args: state_N: hidden state, zero for an env at the start of an episode. deterministic: whether to take the mode of the distribution
        (no effect on random policies).
        """
        if self.action_policy == "random" or self.uniform:
            if self.state_size and self.action_policy != "random":  # update the hidden state, with which replayed sequences begin
                _, state_N = self.forward(obs_N, state_N)
            return ActOut(*self._uniform(len(obs_N), None if self.mask is None else self.mask.valid_choices(obs_N)), state_N, self.version)
        choose = self._greedy if deterministic else self._choose
        if self._numpy_actor is not None:
            action_N, logp_N = choose(self._numpy_actor(obs_N, deterministic))
            return ActOut(action_N, logp_N, None, self.version)
        params_NP, state_N = self.forward(obs_N, state_N, deterministic)
        return ActOut(*choose(params_NP), state_N, self.version)

    def act_from_params(self, params_NP: np.ndarray, state_N: np.ndarray | None) -> ActOut:
        """Choose actions, given the distribution parameters and the hidden state that `forward` returned, possibly in another process."""
        if self.uniform:
            return ActOut(*self._uniform(len(params_NP), self._masks_from_outputs(params_NP)), state_N, self.version)
        return ActOut(*self._choose(params_NP), state_N, self.version)

    def _masks_from_outputs(self, params_NP: np.ndarray) -> np.ndarray | None:
        """Return the action masks, bool [N, A], which are read from the masked outputs of the net, or None for an env without masks."""
        return None if self.mask is None else valid_actions(params_NP[:, : self._nvec.sum()])

    def action_function(self, rng: np.random.Generator, deterministic: bool = False) -> Callable[..., np.ndarray]:
        """Return a function (obs_N, first_N, acts_N=None) that returns the actions of this policy in the form that the env accepts.

        The returned function keeps the hidden state of the policy between its calls. Its argument acts_N, bool [N], says which envs act in
        this step, or is None if all envs act. The hidden states of envs that do not act are not changed.

        Args: rng: random stream of the function. deterministic: whether to take the mode of the distribution.
        """
        policy = self.clone(rng)
        state_N: np.ndarray | None = None

        def act(obs_N: np.ndarray, first_N: np.ndarray, acts_N: np.ndarray | None = None) -> np.ndarray:
            nonlocal state_N
            if policy.state_size:
                before_N = policy.initial_state(len(obs_N)) if state_N is None else np.where(first_N[:, None], np.float32(0.0), state_N)
                out = policy.act(obs_N, before_N, deterministic)
                state_N = out.state_N
                if acts_N is not None and state_N is not None and before_N is not None:
                    state_N = np.where(acts_N[:, None], state_N, before_N)
            else:
                out = policy.act(obs_N, None, deterministic)
            return policy.env_action(out.action_N)

        return act

    def weights(self) -> dict[str, torch.Tensor]:
        """Return copies of the net's parameters and buffers on the CPU. The result is empty for a policy without a net."""
        return {} if self.net is None else {name: value.detach().to("cpu", copy=True) for name, value in self.net.state_dict().items()}

    def load_weights(self, weights: dict[str, torch.Tensor]) -> None:
        """Load weights that `weights` returned. Raises RuntimeError if names or shapes of the weights do not match the net."""
        if self.net is not None:
            self.net.load_state_dict(weights)
        if self.flat is not None:
            self.flat.push()

    @property
    def param_dim(self) -> int:
        """Number P of distribution parameters for one observation, or 0 if actions are random."""
        return 0 if self.distribution is None or self.action_policy == "random" else self.distribution.param_dim

    @torch.inference_mode()
    def forward(self, obs_N: np.ndarray, state_N: np.ndarray | None, deterministic: bool = False) -> tuple[np.ndarray, np.ndarray | None]:
        """Return the distribution parameters [N, P], and the next hidden state [N, S] or None.

        Args: deterministic: whether noisy nets are evaluated without noise.
        """
        assert self.net is not None
        if self.acts_noisily and not deterministic:
            self._noise.draw(self.rng)
        else:
            self._noise.remove()
        device = next(self.net.parameters()).device
        obs = torch.from_numpy(obs_N).to(device)
        if state_N is None:
            return self.net.actor(obs).cpu().numpy(), None
        first = torch.zeros(1, len(obs_N), dtype=torch.bool, device=device)
        params, _, state = self.net.unroll(obs.unsqueeze(0), first, torch.from_numpy(state_N).to(device))
        return params[0].cpu().numpy(), state.cpu().numpy()

    def _sample(self, params_NP: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        assert self.distribution is not None
        return self.distribution.sample(params_NP, self.rng)

    def _sample_without_logp(self, params_NP: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        assert self.distribution is not None
        if len(self._unknown_N) != len(params_NP):
            self._unknown_N = np.full(len(params_NP), np.nan, np.float32)
        return self.distribution.sample_actions(params_NP, self.rng), self._unknown_N

    def _greedy(self, params_NP: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        assert self.distribution is not None
        return self.distribution.mode(params_NP), np.full(len(params_NP), np.nan, np.float32)

    def _boltzmann(self, params_NP: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        return self._sample(params_NP / np.float32(max(self.explore_var, 1e-6)))

    def _gaussian(self, params_NP: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the mode plus Gaussian noise, clipped to the action bounds (arXiv:1802.09477, Algorithm 1), and NaN log-probabilities."""
        action_ND, unknown_N = self._sample_without_logp(params_NP)
        noise_ND = self.rng.standard_normal(action_ND.shape, np.float32)
        noise_ND *= self.explore_var
        noise_ND += action_ND
        return clip(noise_ND, -1.0, 1.0), unknown_N

    def _epsilon_greedy(self, params_NP: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        assert self.distribution is not None
        greedy_N = self.distribution.mode(params_NP)
        explore_N = self.rng.random(len(params_NP)) < self.explore_var
        valid_NP, random_p = self._masks_from_outputs(params_NP), np.float32(self.explore_var / self._choices)
        if explore_N.any():
            wide_N = explore_N if greedy_N.ndim == 1 else explore_N[:, None]
            action_N = np.where(wide_N, self._uniform(len(params_NP), valid_NP)[0], greedy_N)
            is_greedy_N = (action_N == greedy_N).reshape(len(action_N), -1).all(axis=1)
        else:
            action_N, is_greedy_N = greedy_N, True
        if valid_NP is not None:
            random_p = np.float32(self.explore_var) * np.exp(uniform_logp(valid_NP, self._nvec))
        # a random action may equal the greedy action
        return action_N, np.log(np.full(len(action_N), random_p, np.float32) + np.float32(1.0 - self.explore_var) * is_greedy_N)

    def _uniform(self, num_envs: int, valid_NA: np.ndarray | None = None) -> tuple[np.ndarray, np.ndarray]:
        return draw_uniform_actions(self.action, num_envs, self.rng, valid_NA)


def supports_action_space(algorithm: type[AlgorithmSpec], action: ActionSpace) -> bool:
    """Return whether an algorithm can act in an action space."""
    return action.kind in algorithm.action_kinds and (action.kind != "continuous" or action.bounded or not algorithm.bounded_only)


def supported_algorithm_names(action: ActionSpace) -> str:
    """Return the names of the built-in algorithms that can learn in an action space, separated by commas."""
    return ", ".join(name for name, model in ALGORITHMS.items() if model.learns and supports_action_space(model, action))


def check_action_space(algorithm: AlgorithmSpec, action: ActionSpace) -> None:
    """Raise SpecError if an algorithm cannot act in an action space."""
    if supports_action_space(type(algorithm), action):
        return
    kinds = {"discrete": "a discrete action", "continuous": f"{'bounded ' if algorithm.bounded_only else ''}continuous actions"}
    needs = " or ".join(kinds.get(kind, f"{kind.replace('_', '-')} actions") for kind in algorithm.action_kinds)
    space = _describe_actions(action)
    message = f"{algorithm.name!r} requires {needs}; this env has {space}; allowed: {supported_algorithm_names(action)}"
    raise SpecError("agent", [Problem("agent.algorithm.name", message)])


def build_distribution(spec: AlgorithmSpec, action: ActionSpace) -> ActionDistribution:
    """Build the action distribution that the algorithm's spec names.

    Raises SpecError if the distribution or the action policy does not support the action space.
    """
    name, parts = spec.action_pdtype, action.parts
    requested = [_distribution_class(name, part) for part in parts]
    # with several kinds of components, action_pdtype applies to the components that it fits, and the others keep their default
    if None in requested and (len(parts) == 1 or not any(requested)):
        fitting = dict.fromkeys(fit for part in parts for fit in _supported_distributions(part))
        message = f"{name!r} is not supported for {_describe_actions(action)}; allowed: default, {', '.join(fitting)}"
        raise SpecError("agent", [Problem("agent.algorithm.action_pdtype", message)])
    if spec.action_policy in ("boltzmann", "epsilon_greedy") and action.kind in ("continuous", "hybrid"):
        message = f"{spec.action_policy!r} is not supported for {action.kind} actions; allowed: default, random"
        raise SpecError("agent", [Problem("agent.algorithm.action_policy", message)])
    if name == "NormalTanh" and spec.action_policy == "random":
        message = "'random' is not supported with NormalTanh; allowed: default"
        raise SpecError("agent", [Problem("agent.algorithm.action_policy", message)])
    built = [kind or _distribution_class("default", part) for kind, part in zip(requested, parts, strict=True)]
    distributions = [kind(part) for kind, part in zip(built, parts, strict=True) if kind is not None]
    return distributions[0] if len(parts) == 1 else Product(action, distributions)


def _distribution_class(name: str, part: ActionSpace) -> type[ActionDistribution] | None:
    """Return the distribution class with the name `name`, or None if the class does not support the action space `part`.

    Args: part: an action space in which all actions are of one kind.
    """
    return _supported_distributions(part).get(DEFAULT_DISTRIBUTION[part.kind] if name == "default" else name)


def _supported_distributions(part: ActionSpace) -> dict[str, type[ActionDistribution]]:
    """Return the distribution classes that support an action space with actions of one kind, as name → class."""
    kinds = DISTRIBUTIONS | MULTI_DISCRETE if part.kind == "multi_discrete" else DISTRIBUTIONS
    return {name: kind for name, kind in kinds.items() if part.kind in kind.kinds and (part.bounded or not kind.needs_bounds)}


def _describe_actions(action: ActionSpace) -> str:
    """Describe the actions of a space, such as "unbounded continuous actions" or "hybrid actions (multi-discrete and continuous)"."""
    kinds = [part.kind.replace("_", "-") for part in action.parts]
    text = kinds[0] + " actions" if len(kinds) == 1 else f"hybrid actions ({' and '.join(kinds)})"
    return text if action.bounded else f"unbounded {text}"


def check_soft_actor_critic(spec: SoftActorCriticSpec, action: ActionSpace) -> None:
    """Raise SpecError with a problem for each key of soft actor-critic that does not fit the env's actions.

    Print a notice for each key of soft actor-critic that has no effect with the env's actions.
    """
    discrete = action.kind == "discrete"
    problems = []
    names = ("default", "Categorical", "GumbelSoftmax") if discrete else ("default", "Normal")
    if spec.action_pdtype not in names:
        message = f"{spec.action_pdtype!r} is not supported by {spec.name} for {action.kind} actions; allowed: {', '.join(names)}"
        problems.append(Problem("agent.algorithm.action_pdtype", message))
    if discrete:
        problems += _target_entropy_problems(spec, action.nvec[0])
    if problems:
        raise SpecError("agent", problems)
    unused = {
        "entropy_penalty_coef": not discrete and spec.entropy_penalty_coef > 0,
        "entropy_anneal": not discrete and isinstance(spec.entropy_anneal, EntropyAnneal),
    }
    for key in [key for key, is_unused in unused.items() if is_unused]:
        notice(f"agent.algorithm.{key}: has no effect with {action.kind} actions; ignored")


def _target_entropy_problems(spec: SoftActorCriticSpec, actions: int) -> list[Problem]:
    """Return a problem for each target entropy in the spec that no policy over `actions` discrete actions can have."""
    greatest = math.log(actions)
    bounds = f"the entropy of {actions} discrete actions lies between 0 and ln {actions} = {greatest:.3g} nats"
    given = {"target_entropy": spec.target_entropy, "entropy_anneal": spec.entropy_anneal}
    automatic = {"target_entropy": "auto", "entropy_anneal": "true"}
    return [
        Problem(f"agent.algorithm.{key}", f"invalid value {value:g}: {bounds}; use a value in this range, or {automatic[key]}")
        for key, value in given.items()
        if isinstance(value, float) and not 0.0 <= value <= greatest
    ]


def build_policy(agent: AgentSpec, info: EnvInfo, rng: np.random.Generator, device: str = "cpu") -> Policy:
    """Build the policy of an agent, with weights drawn from torch's global random generator.

    Args: rng: random generator that draws actions. device: device of the net.

    Raises SpecError if algorithm, net and env do not fit each other.
    """
    algorithm, mask = agent.algorithm, ActionMask.from_observation_space(info.observation)
    if not algorithm.learns:
        return Policy(info.action, rng, mask=mask)
    assert agent.net is not None  # checked by the rules of specs
    set_tf32(device, agent.net.tf32)
    check_action_space(algorithm, info.action)
    net: ActorCriticNet | QNet
    if algorithm.values:
        net = build_q_net(agent.net, info.observation, info.action.nvec, algorithm.value_distribution())
        distribution = build_distribution(algorithm, info.action)
    else:
        if isinstance(algorithm, SoftActorCriticSpec):
            check_soft_actor_critic(algorithm, info.action)
        distribution, log_std = _build_actor_distribution(agent, agent.net, info.action)
        critic = algorithm.has_critic and not algorithm.own_critics
        net = ActorCriticNet(agent.net, info.observation, distribution.param_dim, log_std, critic)
    parts = optimizer_group_names(agent)
    groups = [getattr(net, f"{part}_parameters")() for part in parts] if len(parts) > 1 else None
    flat = FlatParams(net, groups, device)
    net.eval()
    return Policy(info.action, rng, net, distribution, algorithm.action_policy, algorithm.needs_logp, flat, mask)


def optimizer_group_names(agent: AgentSpec) -> tuple[str, ...]:
    """Return the names of the parts of the policy's net that have separate optimizer keys in the spec.

    The result ("actor", "critic") means that actor and critic have separate optimizers. The result ("actor",) means that the net has one
    optimizer, which may use the actor's keys. The result () means that the net has one optimizer because the algorithm has no critic.
    """
    assert agent.net is not None
    if not agent.algorithm.has_critic:
        return ()
    separate = not agent.algorithm.own_critics and not agent.net.shared and not agent.net.use_same_optim
    return ("actor", "critic") if separate else ("actor",)


def actor_critic_gradients(net: nn.Module | None, flat: FlatParams) -> list[list[Tensor]] | None:
    """Return the gradients of the actor and of the critic, as views of `flat.grad`, or None if actor and critic share a body."""
    if not isinstance(net, ActorCriticNet) or net.critic_body is None:
        return None
    return [[flat.grad[flat.param_slice(parameters)]] for parameters in (net.actor_parameters(), net.critic_parameters())]


def _build_actor_distribution(agent: AgentSpec, net: NetSpec, action: ActionSpace) -> tuple[ActionDistribution, nn.Parameter | None]:
    """Return the action distribution and the learned log standard deviation [D].

    The log standard deviation is None if net.log_std_init is absent or has no effect.
    """
    required = agent.algorithm.actor_distribution(action.kind)
    if required is None:
        distribution = build_distribution(agent.algorithm, action)
    else:
        distribution = ACTOR_DISTRIBUTIONS[required[0]](action, **required[1])
    if net.log_std_init is None:
        return distribution, None
    if distribution.gaussian_part is None:
        notice(f"agent.net.log_std_init: has no effect with {distribution.name}, only with Normal; ignored")
        return distribution, None
    log_std = nn.Parameter(torch.full((distribution.gaussian_part.action.dim,), net.log_std_init))
    return distribution.with_log_std(log_std), log_std
