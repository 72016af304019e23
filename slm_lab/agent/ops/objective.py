"""Objectives of the on-policy algorithms (in numpy) and of soft actor-critic (in torch), with closed-form gradients.

For minibatches of a few hundred samples, the overhead of the 25 autograd nodes of an objective exceeds the time of the arithmetic. Loss and
gradient for a minibatch of 256 samples take 400 µs with autograd, and 100 µs in closed form. The modules `losses` and `distributions`
contain the same formulas for autograd.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from slm_lab.agent.ops.arrays import A, as_array, as_tensor, filled_vector
from slm_lab.agent.ops.device import is_asynchronous, to_floats
from slm_lab.agent.ops.distributions import (
    LOG_2PI,
    LOG_STD_MAX,
    LOG_STD_MIN,
    ActionDistribution,
    Argmax,
    Bernoulli,
    Categorical,
    MultiArgmax,
    MultiCategorical,
    Normal,
    Product,
)
from slm_lab.agent.ops.losses import SOFT_BOUND
from slm_lab.agent.ops.returns import MEAN_ROUNDING

CLOSED_FORM = True
"""Whether to compute gradients in closed form for objectives that have closed-form gradients. If CLOSED_FORM is False, autograd is always
used."""


class ObjectiveTerms(NamedTuple):
    """Loss and the values of its terms."""

    loss: Tensor | float
    """Value of the objective. If autograd computes the gradients, `loss` is a tensor with an autograd graph."""
    policy_loss: Tensor | float
    value_loss: Tensor | float
    entropy: Tensor | float
    logp_B: Tensor
    """Log-probabilities log π(a|s) [B] of the actions."""
    bounds_loss: Tensor | float = 0.0
    """Bounds loss (see `losses.bounds_loss`), not multiplied by the weight `ObjectiveCoefficients.bounds`."""


VALUE_LIMIT = 10.0
"""Bound to which values and targets are clipped after their division by `ObjectiveCoefficients.value_std`."""


class ObjectiveCoefficients(NamedTuple):
    """Weights and parameters of the terms of an Objective."""

    value: float
    entropy: float
    policy: float = 1.0
    clip_eps: float | None = None
    """ε of the clipped surrogate loss, or None to use the policy gradient loss."""
    value_std: float | None = None
    """Standard deviation by which values and targets are divided in the value loss before they are clipped to ±VALUE_LIMIT, or None to use
    unchanged values and targets."""
    dual_clip: float | None = None
    """c in the lower bound c Â of the clipped surrogate objective for Â < 0 (dual-clip PPO), or None for no lower bound."""
    bounds: float = 0.0
    """Weight of the bounds loss. The distribution must be Normal if the weight is not 0."""


Gradient = Callable[[np.ndarray, float], tuple[np.ndarray, np.ndarray | None]]
"""Function that backpropagates derivatives of a loss to the distribution parameters. The arguments of a Gradient function are the
derivatives with respect to log π(a|s) [B], and the derivative with respect to each entropy (one number for all samples). The function
returns the gradient with respect to the parameters [B, P], and the gradient with respect to a state-independent log_std [D] or None."""


def _evaluate_categorical(
    distribution: Categorical, params_BP: np.ndarray, action_B: np.ndarray
) -> tuple[np.ndarray, np.ndarray, Gradient]:
    # transposed, because there are few parameters, and numpy is slow on short rows
    logp_PB = np.subtract(params_BP.T, np.maximum.reduce(params_BP.T, axis=0), order="C")
    p_PB = np.exp(logp_PB)
    total_B = np.add.reduce(p_PB, axis=0)
    p_PB /= total_B
    logp_PB -= np.log(total_B)
    row_B = np.arange(len(action_B))
    entropy_B = -np.add.reduce(p_PB * logp_PB, axis=0)

    def gradient(grad_logp_B: np.ndarray, grad_entropy: float) -> tuple[np.ndarray, None]:
        # ∂ log π(a) / ∂ z = onehot(a) − π;  ∂ H / ∂ z = −π (log π + H)
        grad_PB = logp_PB + entropy_B
        grad_PB *= -grad_entropy
        grad_PB -= grad_logp_B
        grad_PB *= p_PB
        grad_PB[action_B, row_B] += grad_logp_B
        return grad_PB.T, None

    return logp_PB[action_B, row_B], entropy_B, gradient


def _evaluate_normal(distribution: Normal, params_BP: np.ndarray, action_BD: np.ndarray) -> tuple[np.ndarray, np.ndarray, Gradient]:
    # transposed, as in _evaluate_categorical; sums over components are products with a vector, in a tenth of the time of np.add.reduce
    loc_BD, log_std_BD = distribution.loc_and_log_scale(params_BP)  # log_std_BD is [1, D] if log σ does not depend on the state
    state_independent, dim = distribution.log_std is not None, distribution.action.dim
    unclipped_BD = distribution.log_std_array() if state_independent else params_BP[:, dim:]
    inside_DB = ((unclipped_BD > LOG_STD_MIN) & (unclipped_BD < LOG_STD_MAX)).T
    inv_std_DB = np.exp(-log_std_BD).T
    z_DB = np.subtract(action_BD.T, loc_BD.T, order="C")
    z_DB *= inv_std_DB
    volume_B = np.dot(log_std_BD, filled_vector(1.0, dim))
    constant = 0.5 * LOG_2PI * dim
    logp_B = np.dot(filled_vector(-0.5, dim), z_DB * z_DB)
    logp_B -= volume_B + constant
    entropy_B = np.zeros(len(params_BP), np.float32)  # np.broadcast_to takes longer
    entropy_B += volume_B + (constant + 0.5 * dim)

    def gradient(grad_logp_B: np.ndarray, grad_entropy: float) -> tuple[np.ndarray, np.ndarray | None]:
        # ∂ log π(a) / ∂ μ = z / σ, ∂ log π(a) / ∂ log σ = z² − 1;  ∂ H / ∂ log σ = 1
        grad_loc_DB = grad_logp_B * z_DB
        grad_log_std_DB = grad_loc_DB * z_DB
        grad_log_std_DB -= grad_logp_B
        grad_log_std_DB += grad_entropy
        grad_loc_DB *= inv_std_DB
        if state_independent:
            return grad_loc_DB.T, np.dot(grad_log_std_DB, filled_vector(1.0, len(grad_logp_B))) * inside_DB[:, 0]
        grad_log_std_DB *= inside_DB
        return np.concatenate((grad_loc_DB, grad_log_std_DB)).T, None

    return logp_B, entropy_B, gradient


def _evaluate_multi_categorical(
    distribution: MultiCategorical, params_BP: np.ndarray, action_BD: np.ndarray
) -> tuple[np.ndarray, np.ndarray, Gradient]:
    # as in _evaluate_categorical; the logits of component d are the rows from first_D[d] on
    nvec = distribution.action.nvec
    first_D = np.cumsum((0, *nvec[:-1]))
    logp_PB = params_BP.T - np.repeat(np.maximum.reduceat(params_BP.T, first_D, axis=0), nvec, axis=0)
    p_PB = np.exp(logp_PB)
    total_DB = np.add.reduceat(p_PB, first_D, axis=0)
    p_PB /= np.repeat(total_DB, nvec, axis=0)
    logp_PB -= np.repeat(np.log(total_DB), nvec, axis=0)
    chosen = (action_BD.T + first_D[:, None], np.arange(len(action_BD)))
    entropy_DB = -np.add.reduceat(p_PB * logp_PB, first_D, axis=0)

    def gradient(grad_logp_B: np.ndarray, grad_entropy: float) -> tuple[np.ndarray, None]:
        grad_PB = logp_PB + np.repeat(entropy_DB, nvec, axis=0)
        grad_PB *= -grad_entropy
        grad_PB -= grad_logp_B
        grad_PB *= p_PB
        grad_PB[chosen] += grad_logp_B
        return grad_PB.T, None

    return np.add.reduce(logp_PB[chosen], axis=0), np.add.reduce(entropy_DB, axis=0), gradient


def _evaluate_bernoulli(distribution: Bernoulli, params_BD: np.ndarray, action_BD: np.ndarray) -> tuple[np.ndarray, np.ndarray, Gradient]:
    # log π(a) = a z − log(1 + exp z);  H = log(1 + exp z) − z σ(z), with logits z
    softplus_BD = np.logaddexp(np.float32(0.0), params_BD)
    p_BD = np.exp(params_BD - softplus_BD)
    chosen_BD = action_BD.astype(np.float32)

    def gradient(grad_logp_B: np.ndarray, grad_entropy: float) -> tuple[np.ndarray, None]:
        # ∂ log π(a) / ∂ z = a − σ(z);  ∂ H / ∂ z = −z σ(z) (1 − σ(z))
        return grad_logp_B[:, None] * (chosen_BD - p_BD) - grad_entropy * params_BD * p_BD * (1.0 - p_BD), None

    logp_B = np.add.reduce(chosen_BD * params_BD - softplus_BD, axis=1)
    return logp_B, np.add.reduce(softplus_BD - params_BD * p_BD, axis=1), gradient


def _evaluate_product(distribution: Product, params_BP: np.ndarray, action_BD: np.ndarray) -> tuple[np.ndarray, np.ndarray, Gradient]:
    # log π and H are sums over the factors of the product, so each factor has its own gradient
    rows = zip(distribution.split_params(params_BP), distribution.split_actions(action_BD), strict=True)
    logps, entropies, gradients = zip(*(EVALUATE[type(part)](part, params, a) for (part, params), a in rows), strict=True)

    def gradient(grad_logp_B: np.ndarray, grad_entropy: float) -> tuple[np.ndarray, np.ndarray | None]:
        pairs = [part_gradient(grad_logp_B, grad_entropy) for part_gradient in gradients]
        grad_log_std_D = next((grad_D for _, grad_D in pairs if grad_D is not None), None)
        return np.concatenate([grad_BP for grad_BP, _ in pairs], axis=1), grad_log_std_D

    return np.add.reduce(logps), np.add.reduce(entropies), gradient


EVALUATE: dict[type[ActionDistribution], Callable[[Any, np.ndarray, np.ndarray], tuple[np.ndarray, np.ndarray, Gradient]]] = {
    Categorical: _evaluate_categorical,
    Argmax: _evaluate_categorical,
    MultiCategorical: _evaluate_multi_categorical,
    MultiArgmax: _evaluate_multi_categorical,
    Bernoulli: _evaluate_bernoulli,
    Normal: _evaluate_normal,
    Product: _evaluate_product,
}
"""Mapping from the class of a distribution to a function (distribution, parameters [B, P], actions [B]) that returns log π(a|s) [B], the
entropy [B], and the Gradient."""


class TermsAndGradients(NamedTuple):
    """An objective, its terms, and its gradients."""

    terms: ObjectiveTerms
    """The objective and its terms, without an autograd graph."""
    outputs: tuple[Any, ...]
    """Gradients of the objective with respect to the net's outputs, which are distribution parameters [B, P] and values [B]."""
    log_std_D: np.ndarray | None = None
    """Gradient of the objective with respect to a state-independent log_std, or None."""


def differentiate(
    objective: Callable[..., ObjectiveTerms], outputs: Sequence[Tensor | np.ndarray], weight: float = 1.0
) -> TermsAndGradients:
    """Return the terms of objective(*outputs), and `weight` times the gradients with respect to the outputs, computed by autograd.

    If the objective depends directly on parameters, such as a state-independent log_std, the gradients of these parameters are added to
    `Parameter.grad`.
    """
    leaves = [as_tensor(out).detach().requires_grad_() for out in outputs]
    terms = objective(*leaves)
    loss = terms.loss
    assert isinstance(loss, Tensor)
    if loss.requires_grad:
        # no gradient argument: torch would import sympy (0.5 s) to check the argument
        (loss if weight == 1.0 else weight * loss).backward()
    detached: list[Any] = [term.detach() if isinstance(term, Tensor) else term for term in terms]
    return TermsAndGradients(ObjectiveTerms(*detached), tuple(leaf.grad for leaf in leaves))


class Objective:
    """Objective of the on-policy algorithms: weighted sum of policy loss, mean squared error of the value, entropy bonus and bounds loss.

    The class `ObjectiveCoefficients` contains the weights of the terms. The policy loss is `losses.clipped_surrogate_loss`, or
    `losses.policy_gradient_loss` if `clip_eps` is None. The bounds loss is `losses.bounds_loss`.
    """

    def __init__(self, distribution: ActionDistribution) -> None:
        self.distribution, self.evaluate = distribution, EVALUATE[type(distribution)]

    @staticmethod
    def supports(distribution: ActionDistribution, device: str) -> bool:
        """Return whether Objective supports `distribution` and `device`. The CPU is the only supported device."""
        parts = distribution.parts if isinstance(distribution, Product) else (distribution,)
        has_closed_form = all(type(part) in EVALUATE for part in (distribution, *parts))
        return CLOSED_FORM and has_closed_form and not is_asynchronous(torch.device(device))

    def __call__(
        self,
        outputs: Sequence[Tensor | np.ndarray],
        action_B: Tensor | np.ndarray,
        old_logp_B: Tensor | np.ndarray,
        advantage_B: Tensor | np.ndarray,
        target_B: Tensor | np.ndarray,
        coefs: ObjectiveCoefficients,
        weight: float = 1.0,
    ) -> TermsAndGradients:
        """Return the objective of a minibatch, and `weight` times its gradients.

        Call this method inside `ignore_float_errors()`.

        Args: outputs: distribution parameters [B, P] and values [B].
        """
        params_BP, value_B = map(as_array, outputs)
        B = len(value_B)
        logp_B, entropy_B, gradient = self.evaluate(self.distribution, params_BP, as_array(action_B))
        if coefs.clip_eps is None:
            loss_B, grad_logp_B = _policy_gradient(logp_B, as_array(advantage_B))
        else:
            loss_B, grad_logp_B = _clipped_surrogate(logp_B, as_array(old_logp_B), as_array(advantage_B), coefs.clip_eps, coefs.dual_clip)
        grad_logp_B *= coefs.policy * weight / B
        grad_params_BP, grad_log_std_D = gradient(grad_logp_B, -coefs.entropy * weight / B)
        error_B, grad_error_B = _value_error(value_B, as_array(target_B), coefs.value_std)
        policy_loss, entropy = float(np.add.reduce(loss_B)) / B, float(np.add.reduce(entropy_B)) / B
        value_loss = float(error_B.dot(error_B)) / B
        error_B *= 2.0 * coefs.value * weight / B
        error_B *= grad_error_B
        total, bounds_loss = coefs.policy * policy_loss + coefs.value * value_loss - coefs.entropy * entropy, 0.0
        if coefs.bounds:
            assert isinstance(self.distribution, Normal)
            bounds_loss, grad_loc_BD = _bounds_loss(self.distribution.loc_and_log_scale(params_BP)[0])
            total += coefs.bounds * bounds_loss
            grad_params_BP[:, : grad_loc_BD.shape[1]] += (coefs.bounds * weight) * grad_loc_BD
        terms = ObjectiveTerms(float(np.float32(total)), policy_loss, value_loss, entropy, torch.from_numpy(logp_B), bounds_loss)
        return TermsAndGradients(terms, (grad_params_BP, error_B), grad_log_std_D)


def _policy_gradient(logp_B: np.ndarray, advantage_B: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the policy gradient loss of each sample [B], and the derivative of this loss with respect to log π(a|s) [B]."""
    return -logp_B * advantage_B, -advantage_B


def _value_error(value_B: np.ndarray, target_B: np.ndarray, std: float | None) -> tuple[np.ndarray, np.ndarray | float]:
    """Return the differences between values and targets [B], and the derivatives of the differences with respect to the values.

    If `std` is not None, values and targets are first divided by `std` and clipped to ±VALUE_LIMIT.
    """
    if std is None:
        return value_B - target_B, 1.0
    scaled_B = value_B / std
    limited_B = np.clip(scaled_B, -VALUE_LIMIT, VALUE_LIMIT)
    return limited_B - np.clip(target_B / std, -VALUE_LIMIT, VALUE_LIMIT), (limited_B == scaled_B) / np.float32(std)


def _bounds_loss(loc_BD: np.ndarray) -> tuple[float, np.ndarray]:
    """Return `losses.bounds_loss`, and its gradient with respect to the means [B, D]."""
    outside_BD = loc_BD - np.clip(loc_BD, -SOFT_BOUND, SOFT_BOUND)
    return float(np.add.reduce(outside_BD * outside_BD, axis=None)) / len(loc_BD), outside_BD * np.float32(2.0 / len(loc_BD))


def _clipped_surrogate(
    logp_B: np.ndarray, old_logp_B: np.ndarray, advantage_B: np.ndarray, clip_eps: float, dual_clip: float | None
) -> tuple[np.ndarray, np.ndarray]:
    """Return the clipped surrogate loss of each sample [B], and the derivative of this loss with respect to log π(a|s) [B]."""
    log_ratio_B = logp_B - old_logp_B
    inside_B = np.abs(log_ratio_B) < 20.0
    unclipped_B = np.exp(np.minimum(np.maximum(log_ratio_B, -20.0), 20.0))
    unclipped_B *= advantage_B
    bound_B = np.abs(advantage_B)
    bound_B *= clip_eps
    bound_B += advantage_B
    inside_B &= unclipped_B <= bound_B  # unclipped_B and bound_B are equal only if both are 0
    surrogate_B = np.minimum(unclipped_B, bound_B)
    if dual_clip is not None:
        lowest_B = np.where(advantage_B < 0.0, np.float32(dual_clip) * advantage_B, -np.inf)
        inside_B &= surrogate_B >= lowest_B
        surrogate_B = np.maximum(surrogate_B, lowest_B)
    return -surrogate_B, -unclipped_B * inside_B


Reduction = Callable[[Tensor], Tensor]

REDUCTIONS: dict[str, Reduction] = {
    "min": lambda q_CX: torch.minimum(*q_CX),
    "mean": lambda q_CX: q_CX.mean(0),
    "quantiles": lambda q_CXM: q_CXM.mean((0, -1)),
}
"""Functions that combine the values of several critics into one value, by the names that the spec key `critic_reduction` uses. The function
"min" requires the values of two critics [2, …]. The function "mean" accepts the values of C critics [C, …]. The function "quantiles"
computes the mean […] of M quantiles of C critics [C, …, M]."""

REDUCTION_GRADIENTS: dict[str, Reduction] = {
    "min": lambda q_CX: torch.stack((lower_X := (q_CX[0] <= q_CX[1]).float(), 1.0 - lower_X)),
    "mean": lambda q_CX: torch.full_like(q_CX, 1.0 / len(q_CX)),
    "quantiles": lambda q_CXM: torch.full_like(q_CXM, 1.0 / (len(q_CXM) * q_CXM.shape[-1])),
}
"""Functions that return the derivative of each function in REDUCTIONS with respect to the function's argument."""


def reduction_gradient(reduce: Reduction, q_CX: Tensor) -> Tensor:
    """Return the derivative of reduce(q_CX) with respect to q_CX, the values [C, …] of C critics.

    If `reduce` is not in REDUCTIONS, autograd computes the derivative.
    """
    for name, function in REDUCTIONS.items():
        if reduce is function:
            return REDUCTION_GRADIENTS[name](q_CX)
    leaf_CX = q_CX.detach().requires_grad_()
    return torch.autograd.grad(reduce(leaf_CX).sum(), leaf_CX)[0]


def discrete_soft_value(params_BA: Tensor, q_BA: Tensor, alpha: Tensor | float) -> Tensor:
    """Return V(s) = Σ π(a|s) (Q(s, a) − α log π(a|s)) [B] for a categorical policy with logits [B, A] (arXiv:1910.07207, equation 10)."""
    logp_BA = F.log_softmax(params_BA, dim=1)
    return (logp_BA.exp() * (q_BA - alpha * logp_BA)).sum(1)


class DiscreteActorLoss(NamedTuple):
    """The loss of a categorical policy in soft actor-critic, and the gradient of this loss."""

    loss: Tensor
    entropy: Tensor
    """Mean entropy of the policy over the batch."""
    grad_params_BA: Tensor
    mean_entropy: Tensor | None
    """Moving average of the policy's entropy over updates. If the penalty is 0, the previous moving average is returned."""


def discrete_actor_loss(
    params_BA: Tensor, q_BA: Tensor, alpha: Tensor | float, penalty: float = 0.0, mean_entropy: Tensor | None = None
) -> DiscreteActorLoss:
    """Return the actor loss of discrete soft actor-critic, E[Σ π(a|s) (α log π(a|s) − Q(s, a))] (arXiv:1910.07207, equation 12).

    The loss also contains `penalty` / 2 times the squared difference between the mean entropy and its moving average over previous updates
    (adapted from arXiv:2209.10081, equation 11).

    Args: params_BA: logits of the policy. mean_entropy: moving average that the previous call returned, or None in the first call.
    """
    logp_BA = F.log_softmax(params_BA, dim=1)
    p_BA = logp_BA.exp()
    entropy_B = -(p_BA * logp_BA).sum(1)
    cost_BA = alpha * logp_BA - q_BA
    cost_B = (p_BA * cost_BA).sum(1)
    loss, entropy, new_average = cost_B.mean(), entropy_B.mean(), mean_entropy
    grad_BA = p_BA * (cost_BA - cost_B.unsqueeze(1))
    if penalty:
        average = entropy if mean_entropy is None else mean_entropy
        average = torch.where(average.isfinite(), average, entropy)
        loss = loss + penalty * 0.5 * (average - entropy).square()
        # ∂ H / ∂ z = −π (log π + H), with logits z
        grad_BA += penalty * (average - entropy) * p_BA * (logp_BA + entropy_B.unsqueeze(1))
        new_average = torch.where(entropy.isfinite(), torch.lerp(average, entropy, 0.01), average)
    return DiscreteActorLoss(loss, entropy, grad_BA.div_(len(params_BA)), new_average)


def explained_variance(value_TN: A, return_TN: A, valid_TN: A) -> float:
    """Return the explained variance of a critic, 1 − Var[return − value] / Var[return], over the steps where `valid_TN` is true.

    The explained variance is 1 for a perfect critic and 0 for a constant prediction. If all returns are equal, the result is 0. If a return
    or value is not finite, the result is NaN.
    """
    value, target, valid = as_array(value_TN).ravel(), as_array(return_TN).ravel(), as_array(valid_TN)
    if b"\0" in valid.tobytes():  # a sixth of the time of .all()
        value, target = value[valid.ravel()], target[valid.ravel()]
        if not len(target):
            return 0.0
    if not math.isfinite(target.dot(target)) or not math.isfinite(value.dot(value)):  # cheaper than np.errstate
        return math.nan
    error, count = target - value, len(target)
    error -= np.add.reduce(error) / count
    mean = np.add.reduce(target) / count
    target = target - mean
    spread = float(target.dot(target))
    if spread <= count * (MEAN_ROUNDING * float(mean)) ** 2:
        return 0.0
    return 1.0 - float(error.dot(error)) / spread


def ratio_diagnostics(logps: Sequence[Tensor], old_logps: Sequence[Tensor], clip_eps: float) -> tuple[float, float]:
    """Return the diagnostics approx_kl and clip_fraction over all minibatches of an update.

    approx_kl is the mean of (r − 1) − log r, an estimate of KL[π_old, π] with r = π/π_old (http://joschu.net/blog/kl-approx.html);
    clip_fraction is the fraction of transitions with |r − 1| > ε.
    """
    log_ratio_B = torch.cat(list(logps)) - torch.cat(list(old_logps))
    change_B = torch.expm1(log_ratio_B.clamp(-20.0, 20.0))  # as in clipped_surrogate_loss
    clipped_B = (change_B.abs() > clip_eps).float()
    approx_kl, clip_fraction = to_floats([(change_B - log_ratio_B).mean(), clipped_B.mean()])
    return approx_kl, clip_fraction


def value_diagnostics(q: Tensor | np.ndarray, target: Tensor | np.ndarray) -> tuple[Tensor | float, Tensor | float]:
    """Return the mean absolute temporal-difference error, |target − q|, and the mean value q."""
    if isinstance(q, Tensor) and isinstance(target, Tensor) and is_asynchronous(q):
        return (target - q.detach()).abs().mean(), q.detach().mean()
    q_B, target_B = (
        as_array(q.detach() if isinstance(q, Tensor) else q),
        as_array(target),
    )  # a numpy call has less overhead than a torch call
    if q_B.ndim > 1:
        q_B, target_B = q_B.reshape(-1), target_B.reshape(-1)
    return float(np.add.reduce(np.abs(target_B - q_B))) / len(q_B), float(np.add.reduce(q_B)) / len(q_B)
