"""Probability distributions of actions, parametrised by the actor's outputs.

Actions are sampled in numpy, which takes 13 µs instead of 276 µs with torch.distributions and needs only one random number generator. For
learning, log-probabilities and entropies are computed in torch.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from slm_lab.agent.ops.arrays import A, clip, exp, filled_vector, stack, tanh, where
from slm_lab.lib.records import ActionKind, ActionSpace

LOG_2PI = math.log(2.0 * math.pi)
LOG_STD_MIN, LOG_STD_MAX = -5.0, 2.0
"""Bounds of log standard deviations. Beyond these bounds, samples would be almost constant or could overflow."""


class ActionDistribution(ABC):
    """Base class of action distributions π(·|s) over the actions of an ActionSpace, with parameters params_BP [B, P]."""

    kinds: tuple[ActionKind, ...]
    """Kinds of action spaces that the distribution supports."""
    needs_bounds = False
    """Whether the distribution requires that all components of the actions are bounded."""

    def __init__(self, action: ActionSpace) -> None:
        self.action = action
        self.param_dim = 2 * action.dim
        """P, the number of distribution parameters, which is the number of the actor's outputs."""

    @property
    def name(self) -> str:
        """Name of the distribution in messages."""
        return type(self).__name__

    @property
    def gaussian_part(self) -> Normal | None:
        """The distribution of the Gaussian components of the action, or None if no component is Gaussian."""
        return None

    def with_log_std(self, log_std: Tensor) -> ActionDistribution:
        """Return a copy of this distribution with the learned log standard deviations `log_std` [D].

        The Gaussian components of the copy use `log_std`, which does not depend on the state.
        """
        raise TypeError(f"{self.name} has no Gaussian components")

    def sample(self, params_NP: np.ndarray, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
        """Sample actions [N] for parameters float32 [N, P]. Return the actions and their log-probabilities [N]."""
        action_N = self.sample_actions(params_NP, rng)
        with torch.inference_mode():
            logp_N = self.log_prob(torch.from_numpy(params_NP), torch.from_numpy(action_N)).numpy()
        return action_N, logp_N

    @abstractmethod
    def sample_actions(self, params_NP: np.ndarray, rng: np.random.Generator) -> np.ndarray:
        """Sample actions [N] without computing log-probabilities."""

    @abstractmethod
    def mode(self, params_BP: A) -> A:
        """Return actions [B]. Each component is the mode of its distribution."""

    def env_action(self, action_B: A) -> A:
        """Convert actions [B], as sampled and stored, to the form that `env.step` accepts."""
        return action_B

    @abstractmethod
    def log_prob(self, params_BP: Tensor, action_B: Tensor) -> Tensor:
        """Return the log-probabilities of actions, log π(a|s) [B], summed over the action components."""

    @abstractmethod
    def entropy(self, params_BP: Tensor) -> Tensor:
        """Return the entropy of the distribution [B] in nats."""

    def evaluate(self, params_BP: Tensor, action_B: Tensor) -> tuple[Tensor, Tensor]:
        """Return the results of `log_prob` and `entropy`, [B] each."""
        return self.log_prob(params_BP, action_B), self.entropy(params_BP)


class Categorical(ActionDistribution):
    """Distribution over n discrete actions. The parameters are logits."""

    kinds = ("discrete",)

    def __init__(self, action: ActionSpace) -> None:
        super().__init__(action)
        self.param_dim = action.nvec[0]

    def sample(self, params_NP: np.ndarray, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
        action_N = self.sample_actions(params_NP, rng)
        return action_N, categorical_logp(params_NP, action_N)

    def sample_actions(self, params_NP: np.ndarray, rng: np.random.Generator) -> np.ndarray:
        # Gumbel-max trick: argmax(logits + Gumbel noise) is a sample of softmax(logits)
        noise_NP = rng.gumbel(size=params_NP.shape)
        noise_NP += params_NP.astype(np.float64)  # adding mixed dtypes takes longer than conversion and sum
        return noise_NP.argmax(axis=1)

    def mode(self, params_BP: A) -> A:
        return params_BP.argmax(1)

    def log_prob(self, params_BP: Tensor, action_B: Tensor) -> Tensor:
        return F.log_softmax(params_BP, dim=1).gather(1, action_B.unsqueeze(1)).squeeze(1)

    def entropy(self, params_BP: Tensor) -> Tensor:
        logp_BP = F.log_softmax(params_BP, dim=1)
        return -(logp_BP.exp() * logp_BP).sum(dim=1)

    def evaluate(self, params_BP: Tensor, action_B: Tensor) -> tuple[Tensor, Tensor]:
        logp_BP = F.log_softmax(params_BP, dim=1)  # computed once for both results
        return logp_BP.gather(1, action_B.unsqueeze(1)).squeeze(1), -(logp_BP.exp() * logp_BP).sum(dim=1)


class Argmax(Categorical):
    """Categorical distribution whose samples are always the action with the greatest logit."""

    def sample_actions(self, params_NP: np.ndarray, rng: np.random.Generator) -> np.ndarray:
        return self.mode(params_NP)


def categorical_logp(logits_NA: np.ndarray, action_N: np.ndarray) -> np.ndarray:
    """Return the log-probabilities of actions, log softmax(logits)[action], float32 [N]."""
    # logaddexp is numerically stable and a single call; with few envs, the number of calls determines the time
    return np.asarray(logits_NA[np.arange(len(action_N)), action_N] - np.logaddexp.reduce(logits_NA, axis=1))


class MultiCategorical(ActionDistribution):
    """Independent categorical distributions, one per action component. The parameters are the concatenated logits of all components."""

    kinds = ("multi_discrete",)

    def __init__(self, action: ActionSpace) -> None:
        super().__init__(action)
        self.param_dim = sum(action.nvec)

    def _split_logits(self, params_BP: A) -> Sequence[A]:
        if isinstance(params_BP, np.ndarray):
            return np.split(params_BP, np.cumsum(self.action.nvec)[:-1], axis=1)
        return params_BP.split(self.action.nvec, dim=1)

    def sample_actions(self, params_NP: np.ndarray, rng: np.random.Generator) -> np.ndarray:
        return np.stack([(logits + rng.gumbel(size=logits.shape)).argmax(axis=1) for logits in self._split_logits(params_NP)], axis=1)

    def mode(self, params_BP: A) -> A:
        return stack([logits.argmax(1) for logits in self._split_logits(params_BP)], 1)

    def log_prob(self, params_BP: Tensor, action_B: Tensor) -> Tensor:
        parts = zip(self._split_logits(params_BP), action_B.unbind(1), strict=True)
        return torch.stack([F.log_softmax(logits, dim=1).gather(1, a.unsqueeze(1)).squeeze(1) for logits, a in parts]).sum(0)

    def entropy(self, params_BP: Tensor) -> Tensor:
        logps = [F.log_softmax(logits, dim=1) for logits in self._split_logits(params_BP)]
        return torch.stack([-(logp.exp() * logp).sum(dim=1) for logp in logps]).sum(0)


class MultiArgmax(MultiCategorical):
    """MultiCategorical distribution whose samples always consist of the choices with the greatest logits."""

    def sample_actions(self, params_NP: np.ndarray, rng: np.random.Generator) -> np.ndarray:
        return self.mode(params_NP)


class Bernoulli(ActionDistribution):
    """Independent Bernoulli distributions, one per action component. The parameters are the logits of the value 1."""

    kinds = ("multi_binary",)

    def __init__(self, action: ActionSpace) -> None:
        super().__init__(action)
        self.param_dim = action.dim

    def sample_actions(self, params_NP: np.ndarray, rng: np.random.Generator) -> np.ndarray:
        return (rng.logistic(size=params_NP.shape) < params_NP).astype(np.int64)

    def mode(self, params_BP: A) -> A:
        return where(params_BP > 0, 1, 0)

    def log_prob(self, params_BP: Tensor, action_B: Tensor) -> Tensor:
        return -F.binary_cross_entropy_with_logits(params_BP, action_B.to(params_BP.dtype), reduction="none").sum(1)

    def entropy(self, params_BP: Tensor) -> Tensor:
        return F.binary_cross_entropy_with_logits(params_BP, params_BP.sigmoid(), reduction="none").sum(1)


class _LocationScale(ActionDistribution):
    """Base class of distributions with independent components. The parameters are the locations, followed by the log scales."""

    kinds = ("continuous",)

    def loc_and_log_scale(self, params_BP: A) -> tuple[A, A]:
        """Return the locations [B, D] and the log scales [B, D], which are clipped to [LOG_STD_MIN, LOG_STD_MAX]."""
        return params_BP[:, : self.action.dim], _clip_log_std(params_BP[:, self.action.dim :])

    def mode(self, params_BP: A) -> A:
        return params_BP[:, : self.action.dim]


def _clip_log_std(log_std: A) -> A:
    if isinstance(log_std, np.ndarray):
        return np.minimum(np.maximum(log_std, LOG_STD_MIN), LOG_STD_MAX)  # a third of the time of np.clip
    return F.hardtanh(log_std, LOG_STD_MIN, LOG_STD_MAX)  # a clamp whose backward is one kernel


class Normal(_LocationScale):
    """Independent Gaussian distributions, one per action component. The env clips actions to the action bounds.

    Args: log_std: learned log standard deviations that do not depend on the state, float32 [D]. With `log_std`, the actor outputs only
    means. If `log_std` is None, the actor outputs means and log standard deviations. (If a learned `log_std` were concatenated with the
    actor's outputs, a gradient step on HalfCheetah would take 5 % longer.)
    """

    def __init__(self, action: ActionSpace, log_std: Tensor | None = None) -> None:
        super().__init__(action)
        self.log_std = log_std
        self._view: tuple[int, np.ndarray] | None = None
        """Tuple of the memory address of `log_std` and an array that is a view of `log_std`, or None if no view exists."""
        if log_std is not None:
            self.param_dim = action.dim

    @property
    def gaussian_part(self) -> Normal:
        return self

    def with_log_std(self, log_std: Tensor) -> Normal:
        return type(self)(self.action, log_std)

    def log_std_array(self) -> np.ndarray:
        """Return `log_std` as an array [1, D], which must not be modified. If `log_std` is on the CPU, the array is a view of `log_std`."""
        assert self.log_std is not None
        if self._view is not None and self._view[0] == self.log_std.data_ptr():
            return self._view[1]
        log_std_1D: np.ndarray = self.log_std.detach().cpu().numpy()[None]
        self._view = (self.log_std.data_ptr(), log_std_1D) if self.log_std.device.type == "cpu" else None
        return log_std_1D

    def loc_and_log_scale(self, params_BP: A) -> tuple[A, A]:
        """Return the means [B, D] and the clipped log standard deviations [B, D], or [1, D] if `log_std` is not None."""
        if self.log_std is None:
            return super().loc_and_log_scale(params_BP)
        if isinstance(params_BP, np.ndarray):
            return params_BP, _clip_log_std(self.log_std_array())
        return params_BP, _clip_log_std(self.log_std).unsqueeze(0)

    def sample(self, params_NP: np.ndarray, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
        loc_ND, log_std_ND = self.loc_and_log_scale(params_NP)
        noise_ND, dim = rng.standard_normal(loc_ND.shape, dtype=np.float32), self.action.dim
        # sums over short rows are computed as products with a vector, which take less time than np.add.reduce
        logp_N = np.dot(noise_ND * noise_ND, filled_vector(-0.5, dim))
        logp_N -= np.dot(log_std_ND, filled_vector(1.0, dim)) + np.float32(0.5 * LOG_2PI * dim)
        action_ND = np.exp(log_std_ND) * noise_ND
        action_ND += loc_ND
        return action_ND, logp_N

    def sample_actions(self, params_NP: np.ndarray, rng: np.random.Generator) -> np.ndarray:
        return self.sample(params_NP, rng)[0]

    def log_prob(self, params_BP: Tensor, action_B: Tensor) -> Tensor:
        return self.evaluate(params_BP, action_B)[0]

    def entropy(self, params_BP: Tensor) -> Tensor:
        return (self.loc_and_log_scale(params_BP)[1].sum(1) + 0.5 * (1.0 + LOG_2PI) * self.action.dim).expand(len(params_BP))

    def evaluate(self, params_BP: Tensor, action_B: Tensor) -> tuple[Tensor, Tensor]:
        loc_BD, log_std_BD = self.loc_and_log_scale(params_BP)
        z_BD = (action_B - loc_BD) * torch.exp(-log_std_BD)
        volume_B, constant = log_std_BD.sum(1), 0.5 * LOG_2PI * self.action.dim
        entropy_B = (volume_B + constant + 0.5 * self.action.dim).expand(len(params_BP))
        return -0.5 * z_BD.square().sum(1) - volume_B - constant, entropy_B


def _log_tanh_derivative(u: A) -> A:
    """Return log(1 - tanh²(u)) for u of any shape.

    The formula 2 (log 2 - u - log(1 + exp(-2u))) is precise even if tanh(u) is near ±1.
    """
    softplus = np.logaddexp(np.float32(0.0), -2.0 * u) if isinstance(u, np.ndarray) else F.softplus(-2.0 * u)
    return 2.0 * (math.log(2.0) - u - softplus)


class NormalTanh(Normal):
    """Distribution of tanh(u) for independent Gaussian variables u. Rollouts store u, and the env receives tanh(u).

    log π is the log-density of tanh(u) in [-1, 1], as in SquashedNormal. Because rollouts store u, u need not be computed from actions near
    ±1, where float32 is too imprecise.
    """

    needs_bounds = True
    NODES = 32
    """Number of nodes of the Gauss-Hermite quadrature for the entropy. The error of the entropy is below 1e-6 nats for standard deviations
    up to 1, and 0.1 nats for the greatest possible standard deviation."""

    def __init__(self, action: ActionSpace, log_std: Tensor | None = None) -> None:
        super().__init__(action, log_std)
        node_K, weight_K = np.polynomial.hermite_e.hermegauss(self.NODES)
        self._node_K, self._weight_K = node_K.tolist(), (weight_K / math.sqrt(2.0 * math.pi)).tolist()

    def sample(self, params_NP: np.ndarray, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
        u_ND, logp_N = super().sample(params_NP, rng)
        return u_ND, logp_N - np.add.reduce(_log_tanh_derivative(u_ND), axis=1)

    def env_action(self, action_B: A) -> A:
        return tanh(action_B)

    def log_prob(self, params_BP: Tensor, action_B: Tensor) -> Tensor:
        return super().evaluate(params_BP, action_B)[0] - _log_tanh_derivative(action_B).sum(1)

    def entropy(self, params_BP: Tensor) -> Tensor:
        """Return the entropy [B] of tanh(u), which is the entropy of u plus the mean of log(1 − tanh²(u)), computed by quadrature."""
        loc_BD, log_std_BD = self.loc_and_log_scale(params_BP)
        std_BD, entropy_B = log_std_BD.exp(), super().entropy(params_BP)
        for node, weight in zip(self._node_K, self._weight_K, strict=True):
            entropy_B = entropy_B + weight * _log_tanh_derivative(loc_BD + node * std_BD).sum(1)
        return entropy_B

    def evaluate(self, params_BP: Tensor, action_B: Tensor) -> tuple[Tensor, Tensor]:
        return self.log_prob(params_BP, action_B), self.entropy(params_BP)


class SquashedSample(NamedTuple):
    """Reparametrised actions tanh(μ + σ ε) for given noise ε (arXiv:1812.05905, section 4.2).

    The fields of a SquashedSample are either all tensors or all arrays.
    """

    action_BD: Any
    logp_B: Any
    """Log-probabilities log π(a|s)."""
    shift_BD: Any
    """Scaled noise σ ε."""
    log_std_BD: Any
    """Clipped log σ [B, D], or [1, D] for a state-independent log σ."""
    state_dependent: bool
    """Whether log σ depends on the state."""

    def parameter_gradient(self, grad_action_BD: Any, grad_logp: Any) -> tuple[Any, Any]:
        """Return the gradient of a loss with respect to the distribution parameters [B, P], and with respect to log σ [D].

        The gradient with respect to log σ is None if log σ depends on the state, because the parameters then contain log σ.

        Args: grad_action_BD: gradient with respect to the actions. grad_logp: gradient with respect to log π(a|s), the same number for all
        samples of the batch.
        """
        # ∂ tanh(u) / ∂ u = 1 − tanh²(u);  ∂ log π / ∂ u = 2 tanh(u), for fixed ε;  ∂ log π / ∂ log σ = −1
        action_BD = self.action_BD
        grad_u_BD = grad_action_BD * (1.0 - action_BD * action_BD) + (2.0 * grad_logp) * action_BD
        grad_log_std_BD = grad_u_BD * self.shift_BD - grad_logp
        grad_log_std_BD *= (self.log_std_BD > LOG_STD_MIN) & (self.log_std_BD < LOG_STD_MAX)
        if self.state_dependent:
            join: Any = np.concatenate if isinstance(grad_u_BD, np.ndarray) else torch.cat
            return join((grad_u_BD, grad_log_std_BD), 1), None
        return grad_u_BD, grad_log_std_BD.sum(0)


class SquashedNormal(NormalTanh):
    """Distribution of tanh(u) for independent Gaussian variables u (arXiv:1812.05905, appendix C). Rollouts store tanh(u), in [-1, 1]."""

    MARGIN = 1e-6
    """Minimum distance from ±1 to which actions are clamped before atanh is computed, because atanh is infinite at ±1. If the epsilon of
    the actions' dtype is greater than MARGIN, the epsilon is used."""

    def sample(self, params_NP: np.ndarray, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
        u_ND, logp_N = super().sample(params_NP, rng)
        return np.tanh(u_ND), logp_N

    def mode(self, params_BP: A) -> A:
        """Return tanh of the Gaussian's mean, which is the median (not the mode) of each component."""
        return tanh(super().mode(params_BP))

    def env_action(self, action_B: A) -> A:
        return action_B

    @torch.no_grad()
    def rsample(self, params_BP: A, noise_BD: A) -> SquashedSample:
        """Return the reparametrised actions tanh(μ + σ ε) for standard normal noise ε [B, D], without an autograd graph."""
        loc_BD, log_std_BD = self.loc_and_log_scale(params_BP)
        shift_BD = exp(log_std_BD) * noise_BD
        u_BD, constant = loc_BD + shift_BD, 0.5 * LOG_2PI * self.action.dim
        # log N(u), with (u - loc) / std = noise, minus the log of the derivative of tanh
        logp_B: Any
        if isinstance(u_BD, np.ndarray):
            size_BD = np.abs(u_BD)
            slope_BD = 2.0 * (math.log(2.0) - size_BD - np.log1p(np.exp(-2.0 * size_BD)))  # faster than np.logaddexp
            logp_B = -np.add.reduce(0.5 * noise_BD * noise_BD + log_std_BD + slope_BD, axis=1) - np.float32(constant)
        else:
            logp_B = -(0.5 * noise_BD * noise_BD + log_std_BD + _log_tanh_derivative(u_BD)).sum(1) - constant
        return SquashedSample(tanh(u_BD), logp_B, shift_BD, log_std_BD, self.log_std is None)

    def log_prob(self, params_BP: Tensor, action_B: Tensor) -> Tensor:
        edge = 1.0 - max(self.MARGIN, torch.finfo(action_B.dtype).eps)
        return super().log_prob(params_BP, torch.atanh(action_B.clamp(-edge, edge)))


class Deterministic(ActionDistribution):
    """Deterministic policy whose action is tanh of the actor's outputs, in [-1, 1], without a density (arXiv:1509.02971, section 7)."""

    kinds = ("continuous",)
    needs_bounds = True

    def __init__(self, action: ActionSpace) -> None:
        super().__init__(action)
        self.param_dim = action.dim

    def sample_actions(self, params_NP: np.ndarray, rng: np.random.Generator) -> np.ndarray:
        return self.mode(params_NP)

    def mode(self, params_BP: A) -> A:
        return tanh(params_BP)

    def parameter_gradient(self, action_BD: A, grad_action_BD: A) -> A:
        """Return the gradient of a loss with respect to the parameters [B, P], given the loss's gradient with respect to the actions.

        The derivative of tanh is ∂ tanh(u) / ∂ u = 1 − tanh²(u).
        """
        return grad_action_BD * (1.0 - action_BD * action_BD)

    def log_prob(self, params_BP: Tensor, action_B: Tensor) -> Tensor:
        """Return NaN [B], because a deterministic policy has no density."""
        return params_BP.new_full((len(params_BP),), math.nan)

    def entropy(self, params_BP: Tensor) -> Tensor:
        """Return NaN [B], because a deterministic policy has no density."""
        return params_BP.new_full((len(params_BP),), math.nan)


class LogNormal(_LocationScale):
    """Distribution of exp(u) for independent Gaussian variables u. All actions are positive."""

    def sample_actions(self, params_NP: np.ndarray, rng: np.random.Generator) -> np.ndarray:
        loc_ND, log_std_ND = self.loc_and_log_scale(params_NP)
        return np.exp(loc_ND + np.exp(log_std_ND) * rng.standard_normal(loc_ND.shape, dtype=np.float32))

    def mode(self, params_BP: A) -> A:
        loc_BD, log_std_BD = self.loc_and_log_scale(params_BP)
        return exp(loc_BD - exp(2.0 * log_std_BD))

    def log_prob(self, params_BP: Tensor, action_B: Tensor) -> Tensor:
        loc_BD, log_std_BD = self.loc_and_log_scale(params_BP)
        log_a_BD = action_B.clamp_min(1e-30).log()
        z_BD = (log_a_BD - loc_BD) * torch.exp(-log_std_BD)
        return (-0.5 * z_BD * z_BD - log_std_BD - log_a_BD - 0.5 * LOG_2PI).sum(1)

    def entropy(self, params_BP: Tensor) -> Tensor:
        loc_BD, log_std_BD = self.loc_and_log_scale(params_BP)
        return (loc_BD + log_std_BD + 0.5 * (1.0 + LOG_2PI)).sum(1)


class Gumbel(_LocationScale):
    """Independent Gumbel distributions, one per action component."""

    EULER = 0.5772156649015329

    def sample_actions(self, params_NP: np.ndarray, rng: np.random.Generator) -> np.ndarray:
        loc_ND, log_scale_ND = self.loc_and_log_scale(params_NP)
        return np.asarray(loc_ND + np.exp(log_scale_ND) * rng.gumbel(size=loc_ND.shape), dtype=np.float32)

    def log_prob(self, params_BP: Tensor, action_B: Tensor) -> Tensor:
        loc_BD, log_scale_BD = self.loc_and_log_scale(params_BP)
        z_BD = (action_B - loc_BD) * torch.exp(-log_scale_BD)
        return (-z_BD - torch.exp(-z_BD) - log_scale_BD).sum(1)

    def entropy(self, params_BP: Tensor) -> Tensor:
        return (self.loc_and_log_scale(params_BP)[1] + 1.0 + self.EULER).sum(1)


class Beta(ActionDistribution):
    """Independent Beta distributions scaled to [-1, 1] (Chou et al., 2017). α and β are above 1, so that each component has one mode."""

    kinds = ("continuous",)
    needs_bounds = True
    EDGE = 1e-6

    def _alpha_beta(self, params_BP: A) -> tuple[A, A]:
        """Return the parameters α and β of the Beta distributions, [B, D] each."""
        shape_BP = (np.logaddexp(0.0, params_BP) if isinstance(params_BP, np.ndarray) else F.softplus(params_BP)) + 1.0
        return shape_BP[:, : self.action.dim], shape_BP[:, self.action.dim :]

    def _dist(self, params_BP: Tensor) -> torch.distributions.Beta:
        return torch.distributions.Beta(*self._alpha_beta(params_BP), validate_args=False)

    def sample_actions(self, params_NP: np.ndarray, rng: np.random.Generator) -> np.ndarray:
        unit_ND = np.clip(rng.beta(*self._alpha_beta(params_NP)), self.EDGE, 1.0 - self.EDGE)
        return np.asarray(2.0 * unit_ND - 1.0, dtype=np.float32)

    def mode(self, params_BP: A) -> A:
        alpha_BD, beta_BD = self._alpha_beta(params_BP)
        return 2.0 * (alpha_BD - 1.0) / clip(alpha_BD + beta_BD - 2.0, 1e-6, math.inf) - 1.0

    def log_prob(self, params_BP: Tensor, action_B: Tensor) -> Tensor:
        unit_BD = ((action_B + 1.0) / 2.0).clamp(self.EDGE, 1.0 - self.EDGE)
        return (self._dist(params_BP).log_prob(unit_BD) - math.log(2.0)).sum(1)

    def entropy(self, params_BP: Tensor) -> Tensor:
        return (self._dist(params_BP).entropy() + math.log(2.0)).sum(1)


class MultivariateNormal(ActionDistribution):
    """Gaussian distribution with covariance LLᵀ.

    The parameters are the mean, the log of the diagonal of L, and the entries of L below the diagonal, in row order.
    """

    kinds = ("continuous",)

    def __init__(self, action: ActionSpace) -> None:
        super().__init__(action)
        self.param_dim = 2 * action.dim + action.dim * (action.dim - 1) // 2
        self._below = np.tril_indices(action.dim, -1)

    def _scale_tril(self, params_BP: Tensor) -> Tensor:
        dim = self.action.dim
        scale_BDD = torch.diag_embed(params_BP[:, dim : 2 * dim].clamp(LOG_STD_MIN, LOG_STD_MAX).exp())
        below_BDD = torch.zeros_like(scale_BDD)
        below_BDD[:, self._below[0], self._below[1]] = params_BP[:, 2 * dim :]
        return scale_BDD + below_BDD

    def sample_actions(self, params_NP: np.ndarray, rng: np.random.Generator) -> np.ndarray:
        with torch.inference_mode():
            scale_NDD = self._scale_tril(torch.from_numpy(params_NP)).numpy()
        noise_ND1 = rng.standard_normal((len(params_NP), self.action.dim, 1), dtype=np.float32)
        return params_NP[:, : self.action.dim] + (scale_NDD @ noise_ND1)[:, :, 0]

    def mode(self, params_BP: A) -> A:
        return params_BP[:, : self.action.dim]

    def _dist(self, params_BP: Tensor) -> torch.distributions.MultivariateNormal:
        loc_BD, scale_BDD = params_BP[:, : self.action.dim], self._scale_tril(params_BP)
        return torch.distributions.MultivariateNormal(loc_BD, scale_tril=scale_BDD, validate_args=False)

    def log_prob(self, params_BP: Tensor, action_B: Tensor) -> Tensor:
        return self._dist(params_BP).log_prob(action_B)

    def entropy(self, params_BP: Tensor) -> Tensor:
        return self._dist(params_BP).entropy()


class Product(ActionDistribution):
    """Product of independent distributions (its factors), one for each action space that a hybrid action space combines.

    The log-probabilities and entropies of the factors are added.

    The parameters of the product are the concatenated parameters of the factors. The components of a hybrid action are the concatenated
    action components of the factors.
    """

    kinds = ("hybrid",)

    def __init__(self, action: ActionSpace, parts: Sequence[ActionDistribution]) -> None:
        super().__init__(action)
        self.parts = tuple(parts)
        self.param_dim = sum(part.param_dim for part in parts)
        self._params, self._actions = (
            _consecutive_slices(sizes) for sizes in ([p.param_dim for p in parts], [p.action.dim for p in parts])
        )

    @property
    def name(self) -> str:
        return " and ".join(part.name for part in self.parts)

    @property
    def gaussian_part(self) -> Normal | None:
        return next((part.gaussian_part for part in self.parts if part.gaussian_part is not None), None)

    def with_log_std(self, log_std: Tensor) -> Product:
        return Product(self.action, [part if part.gaussian_part is None else part.with_log_std(log_std) for part in self.parts])

    def split_params(self, params_BP: A) -> list[tuple[Any, A]]:
        """Return a list of pairs (factor of the product, parameters of the factor)."""
        return [(part, params_BP[:, columns]) for part, columns in zip(self.parts, self._params, strict=True)]

    def split_actions(self, action_BD: A) -> list[A]:
        """Return the actions of each factor of the product, in the dtype of the factor's action space."""
        actions = [action_BD[:, columns] for columns in self._actions]
        return [a if part.action.dtype is np.float32 else _to_int64(a) for part, a in zip(self.parts, actions, strict=True)]

    def sample(self, params_NP: np.ndarray, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
        drawn = [part.sample(np.ascontiguousarray(params), rng) for part, params in self.split_params(params_NP)]
        return _concatenate_actions([action_N for action_N, _ in drawn]), np.add.reduce([logp_N for _, logp_N in drawn])

    def sample_actions(self, params_NP: np.ndarray, rng: np.random.Generator) -> np.ndarray:
        return _concatenate_actions([part.sample_actions(params, rng) for part, params in self.split_params(params_NP)])

    def mode(self, params_BP: A) -> A:
        return _concatenate_actions([part.mode(params) for part, params in self.split_params(params_BP)])

    def env_action(self, action_B: A) -> A:
        return _concatenate_actions([part.env_action(action_B[:, cols]) for part, cols in zip(self.parts, self._actions, strict=True)])

    def log_prob(self, params_BP: Tensor, action_B: Tensor) -> Tensor:
        rows = zip(self.split_params(params_BP), self.split_actions(action_B), strict=True)
        return torch.stack([part.log_prob(params, a) for (part, params), a in rows]).sum(0)

    def entropy(self, params_BP: Tensor) -> Tensor:
        return torch.stack([part.entropy(params) for part, params in self.split_params(params_BP)]).sum(0)


def _consecutive_slices(sizes: Sequence[int]) -> list[slice]:
    return [slice(sum(sizes[:index]), sum(sizes[: index + 1])) for index in range(len(sizes))]


def _to_int64(x: A) -> A:
    return x.astype(np.int64) if isinstance(x, np.ndarray) else x.long()


def _concatenate_actions(parts: Sequence[A]) -> A:
    """Concatenate the actions of all factors of a hybrid action along the last axis, as float32."""
    if isinstance(parts[0], np.ndarray):
        return np.concatenate(parts, axis=1, dtype=np.float32)
    return torch.cat([part.to(torch.float32) for part in parts], 1)


DISTRIBUTIONS: dict[str, type[ActionDistribution]] = {
    "Categorical": Categorical,
    "Argmax": Argmax,
    "GumbelSoftmax": Categorical,  # its samples are those of a Categorical by the Gumbel-max trick
    "MultiCategorical": MultiCategorical,
    "Bernoulli": Bernoulli,
    "Normal": Normal,
    "NormalTanh": NormalTanh,
    "Beta": Beta,
    "Gumbel": Gumbel,
    "LogNormal": LogNormal,
    "MultivariateNormal": MultivariateNormal,
}
ACTOR_DISTRIBUTIONS: dict[str, type[ActionDistribution]] = {
    "Categorical": Categorical,
    "SquashedNormal": SquashedNormal,
    "Deterministic": Deterministic,
}
"""Distributions that an algorithm can require by AlgorithmSpec.actor_distribution."""
MULTI_DISCRETE: dict[str, type[ActionDistribution]] = {"Argmax": MultiArgmax}
"""Distributions for multi-discrete actions that have the same name in specs as a distribution for discrete actions."""
DEFAULT_DISTRIBUTION: dict[ActionKind, str] = {
    "discrete": "Categorical",
    "multi_discrete": "MultiCategorical",
    "multi_binary": "Bernoulli",
    "continuous": "Normal",
}
