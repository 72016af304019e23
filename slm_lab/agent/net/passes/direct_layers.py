"""Linear layers, normalisation layers and activations of GraphFreeSequence, with forward and backward passes on numpy arrays."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from slm_lab.agent.net.layers import CriticDropout
from slm_lab.agent.net.noisy import NoisyLinear
from slm_lab.agent.net.normalization import BatchRenorm1d, renorm_corrections
from slm_lab.agent.net.residual import ResidualBlock
from slm_lab.agent.ops.arrays import filled_vector
from slm_lab.agent.ops.device import is_asynchronous
from slm_lab.agent.ops.linear import MatmulMode

TORCH_ACTIVATION_SIZE = 16384
"""Minimum number of elements for which torch computes a ReLU, an ELU or the derivative of an activation. For fewer elements, numpy is
faster than torch, because numpy has less overhead per call."""
VECTORIZED_EXPM1 = sys.platform == "linux" and torch.backends.cpu.get_cpu_capability().startswith("AVX512")
"""Whether numpy computes expm1 with vector instructions, as it does on Linux with AVX-512. Without vector instructions, expm1 takes ten
times as long as exp."""
NUMPY_ELU_SIZE = 2048
"""Minimum number of elements for which numpy computes an ELU as exp(x) - 1 if expm1 has no vector instructions. (For x <= 0, exp(x) - 1
differs from expm1(x) by less than 2e-7.) For 2,048 elements, numpy takes 1.1 times as long as torch. But after the step of an env that
fills the processor's caches, an acting step of a net with three ELU layers takes 0.7 times as long with numpy."""


class Activation(NamedTuple):
    """An activation function of float32 arrays, and the derivative of the function in terms of the function's output."""

    forward: Callable[[np.ndarray, np.ndarray], object]
    """`forward(x, x)` applies the activation to x in place. The signature of `forward` is that of a numpy ufunc."""
    backward: Callable[[np.ndarray, np.ndarray], object] | None = None
    """`backward(grad, out)` multiplies `grad` in place by the derivative, given the output `out`. The field `backward` is None if the
    derivative cannot be computed from the output."""


def _relu(x: np.ndarray, out: np.ndarray) -> None:
    if x.size < TORCH_ACTIVATION_SIZE:
        np.maximum(x, 0.0, out=x)
    else:
        torch.relu_(torch.from_numpy(x))


def _relu_backward(grad: np.ndarray, out: np.ndarray) -> None:
    if grad.size < TORCH_ACTIVATION_SIZE:
        np.multiply(grad, out > 0.0, out=grad)
    else:
        grad_out = torch.from_numpy(grad)
        _aten.threshold_backward.grad_input(grad_out, torch.from_numpy(out), 0.0, grad_input=grad_out)


def _tanh_backward(grad: np.ndarray, out: np.ndarray) -> None:
    if grad.size < TORCH_ACTIVATION_SIZE:
        np.multiply(grad, 1.0 - out * out, out=grad)
    else:
        grad_out = torch.from_numpy(grad)
        _aten.tanh_backward.grad_input(grad_out, torch.from_numpy(out), grad_input=grad_out)


def _sigmoid(x: np.ndarray, out: np.ndarray) -> None:
    np.divide(1.0, 1.0 + np.exp(np.minimum(-x, 80.0)), out=x)  # avoids overflow


def _sigmoid_backward(grad: np.ndarray, out: np.ndarray) -> None:
    np.multiply(grad, out * (1.0 - out), out=grad)


def _elu(x: np.ndarray, out: np.ndarray) -> None:
    if not VECTORIZED_EXPM1 and x.size < NUMPY_ELU_SIZE:
        torch.nn.functional.elu_(torch.from_numpy(x))
    elif x.size < TORCH_ACTIVATION_SIZE:
        saturated = np.minimum(x, 0.0)
        if VECTORIZED_EXPM1:
            np.expm1(saturated, out=saturated)
        else:
            np.exp(saturated, out=saturated)
            saturated -= 1.0
        np.maximum(x, saturated, out=x)
    else:
        # for 262,144 elements, expm1 of numpy takes 0.5 times as long as torch's ELU if vectorised; otherwise, exp(x) - 1 takes 0.62 times
        # as long as torch's ELU
        inputs = torch.from_numpy(x)
        negative = torch.clamp_max(inputs, 0.0)
        if VECTORIZED_EXPM1:
            np.expm1(negative.numpy(), out=negative.numpy())
        else:
            negative.exp_().sub_(1.0)
        torch.maximum(inputs, negative, out=inputs)


def _elu_backward(grad: np.ndarray, out: np.ndarray) -> None:
    grad_out = torch.from_numpy(grad)
    _aten.elu_backward.grad_input(grad_out, 1.0, 1.0, 1.0, True, torch.from_numpy(out), grad_input=grad_out)


def _selu(x: np.ndarray, out: np.ndarray) -> None:
    np.copyto(x, 1.6732632423543772 * np.expm1(np.minimum(x, 0.0)), where=x < 0)
    np.multiply(x, 1.0507009873554805, out=x)


def _silu(x: np.ndarray, out: np.ndarray) -> None:
    np.divide(x, 1.0 + np.exp(np.minimum(-x, 80.0)), out=x)


_aten: Any = torch.ops.aten
ACTIVATIONS: dict[type[nn.Module], Activation] = {
    nn.Tanh: Activation(np.tanh, _tanh_backward),  # on the CPU, numpy takes a seventh of torch's time with AVX-512, half of it with AVX2
    nn.ReLU: Activation(_relu, _relu_backward),
    nn.Sigmoid: Activation(_sigmoid, _sigmoid_backward),
    nn.ELU: Activation(_elu, _elu_backward),
    nn.SELU: Activation(_selu),
    nn.SiLU: Activation(_silu),
}
_PLAIN = {repr(kind()) for kind in ACTIVATIONS} | {repr(kind(inplace=True)) for kind in (nn.ReLU, nn.ELU, nn.SELU, nn.SiLU)}


def _dropout(rate: float) -> Activation:
    """Return CriticDropout as an Activation, which draws the same random numbers as the module.

    The backward pass treats each output of 0 as dropped.
    """

    def forward(x: np.ndarray, out: np.ndarray) -> None:
        torch.dropout_(torch.from_numpy(x), rate, True)

    def backward(grad: np.ndarray, out: np.ndarray) -> None:
        np.multiply(grad, (out != 0.0) * np.float32(1.0 / (1.0 - rate)), out=grad)

    return Activation(forward, backward)


def array_activation(module: nn.Module) -> Activation | None:
    """Return the Activation that computes the same function as an activation module.

    Returns None if the module is not supported or has non-default arguments.
    """
    if type(module) is CriticDropout:
        return _dropout(module.rate)
    return ACTIVATIONS.get(type(module)) if repr(module) in _PLAIN else None


NUMPY_PRODUCT_SIZE, NUMPY_PRODUCT_ROWS = 64 * 64 * 512, 512
"""Limits up to which numpy instead of torch computes the gradients of a layer: the maximum of the product (number of rows × number of
weights), and the maximum number of rows. With layers of 64 × 64, a PPO update on a batch of 256 takes 0.92 times as long in numpy as in
torch, and an A2C update on a batch of 32 takes 0.85 times as long."""
NUMPY_FORWARD_SIZE = NUMPY_PRODUCT_SIZE // 2
"""Maximum of (number of rows × number of weights) up to which numpy instead of torch computes the outputs of a layer. This limit is lower
than the limit for gradients because numpy multiplies by transposed weights more slowly than torch."""


class GraphFreeLinear:
    """Forward and backward pass of a linear layer, or of a stack of C linear layers. The layer's arrays are views of FlatParams.

    The shapes are x [B, I], weight [O, I] and bias [O]. For a stack, they are x [C, B, I], weight [C, O, I] and bias [C, 1, O].

    Args: params: weight and bias. grads: gradients of weight and bias. If `grads` is empty, `backward` cannot be called. matmul_mode: how
    torch computes matrix products that are too large for numpy.
    """

    def __init__(self, params: Sequence[Tensor], grads: Sequence[Tensor], matmul_mode: MatmulMode) -> None:
        self.params, self.grads, self.matmul_mode = [p.detach() for p in params], grads, matmul_mode
        self.weight, bias = (p.numpy() for p in self.params)
        self.is_stack = self.weight.ndim == 3
        self.bias = bias if self.is_stack else bias[None]  # [1, O]: for one row, addition without broadcasting takes half the time
        self.grad_weight: Any
        self.grad_bias: Any
        self.grad_weight, self.grad_bias = [grad.numpy() for grad in grads] or (None, None)
        self.weight_t = self.weight.swapaxes(-1, -2)
        self.numpy_rows, self.numpy_forward_rows = (
            0 if matmul_mode.bfloat16 else min(NUMPY_PRODUCT_ROWS, max_size // self.weight.size)
            for max_size in (NUMPY_PRODUCT_SIZE, NUMPY_FORWARD_SIZE)
        )
        """Maximum number of rows for which numpy instead of torch computes gradients (`numpy_rows`) and outputs (`numpy_forward_rows`)."""

    def critic_layer(self, index: int) -> GraphFreeLinear:
        """Return critic number `index` of this stack as a separate layer. The layer's arrays are views of the stack's arrays."""
        params, grads = ([weight[index], bias[index, 0]] for weight, bias in (self.params, self.grads))
        return GraphFreeLinear(params, grads, self.matmul_mode)

    def forward(self, x: np.ndarray) -> np.ndarray:
        """Return the outputs of the layer as a new array."""
        if x.shape[-2] > self.numpy_forward_rows:
            return self.matmul_mode.linear(torch.from_numpy(x), *self.params).numpy()
        # dot takes two thirds of the time of matmul
        out: np.ndarray = np.matmul(x, self.weight_t) if self.is_stack else x.dot(self.weight_t)
        out += self.bias
        return out

    def backward(self, grad: np.ndarray, x: np.ndarray, weights: bool, columns: slice | None) -> np.ndarray | None:
        """Backpropagate `grad`, the gradient with respect to the outputs.

        Return the gradient with respect to those columns of the input x that `columns` selects.

        `grad` may be modified in place.

        Args: x: input of the forward pass. weights: whether to accumulate the gradients of weight and bias. columns: columns of x whose
        gradient is returned, or None if no gradient is to be returned.
        """
        if grad.shape[-2] <= self.numpy_rows:
            if weights:
                self.grad_weight += _matmul(grad.swapaxes(-1, -2), x)
                self.grad_bias += _sum_of_rows(grad)
            return None if columns is None else _matmul(grad, self.weight if columns is ALL else self.weight[..., columns])
        grad_out, weight = torch.from_numpy(grad), self.params[0]
        if weights:
            self.matmul_mode.add_weight_grad(self.grads[0], grad_out, torch.from_numpy(x))
            self.grad_bias += _sum_of_rows(grad)
        return (
            None if columns is None else self.matmul_mode.input_grad(grad_out, weight if columns is ALL else weight[..., columns]).numpy()
        )


ALL = slice(None)
"""Value of the argument `columns` that selects all columns."""


def _matmul(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    product: np.ndarray = a.dot(b) if a.ndim == 2 else np.matmul(a, b)
    return product


def _sum_of_rows(grad: np.ndarray) -> np.ndarray:
    """Sum gradients over the batch: [B, O] → [O], or [C, B, O] → [C, 1, O] for a stack.

    The sum is computed as a matrix product with a vector of ones, which takes a quarter to half the time of np.add.reduce.
    """
    ones = filled_vector(1.0, grad.shape[-2])
    return ones.dot(grad) if grad.ndim == 2 else np.matmul(ones[None], grad)


class GraphFreeLayerNorm:
    """Forward and backward pass of layer normalisation (arXiv:1607.06450), with the interface of GraphFreeLinear."""

    def __init__(self, params: Sequence[Tensor], grads: Sequence[Tensor], eps: float) -> None:
        weight, bias = params
        self.params, self.grads = (weight.detach(), bias.detach()), grads
        self.shape, self.eps = list(weight.shape), eps

    def forward(self, x: np.ndarray) -> np.ndarray:
        out: np.ndarray = torch.native_layer_norm(torch.from_numpy(x), self.shape, *self.params, self.eps)[0].numpy()
        return out

    def backward(self, grad: np.ndarray, x: np.ndarray, weights: bool, columns: slice | None) -> np.ndarray | None:
        grad_out, inputs = torch.from_numpy(grad), torch.from_numpy(x)
        _, mean, rstd = torch.native_layer_norm(inputs, self.shape, *self.params, self.eps)
        needed = [columns is not None, weights, weights]
        grad_x, *param_grads = torch.ops.aten.native_layer_norm_backward(grad_out, inputs, self.shape, mean, rstd, *self.params, needed)
        if weights:
            for total, param_grad in zip(self.grads, param_grads, strict=True):
                total += param_grad
        return None if columns is None else grad_x[..., columns].numpy()


class BatchRenormState(NamedTuple):
    """Values that the forward pass of batch renormalisation in training mode keeps for the backward pass."""

    x: np.ndarray
    mean: Tensor
    inverse_std: Tensor
    """Reciprocal of the batch's standard deviation [F]."""
    r: np.ndarray
    d: np.ndarray


class GraphFreeBatchRenorm:
    """Forward and backward pass of batch renormalisation (arXiv:1702.03275), with the interface of GraphFreeLinear.

    In training mode, each output row depends on all rows of the batch, so that `backward` requires the complete batch of the last call of
    `forward`.
    """

    def __init__(self, module: BatchRenorm1d, grads: Sequence[Tensor]) -> None:
        self.module, self.grads = module, grads
        self.params, self._moving = (module.weight.detach(), module.bias.detach()), (module.running_mean, module.running_var)
        self.weight, self.bias, self.running_mean, self.running_var = (x.numpy() for x in (*self.params, *self._moving))
        self.steps = module.steps.numpy()
        self._batch: BatchRenormState | None = None
        """Values of the last forward pass in training mode, or None before the first forward pass in training mode."""

    def forward(self, x: np.ndarray) -> np.ndarray:
        module, inputs = self.module, torch.from_numpy(x)
        if module.uses_batch_statistics(inputs):
            mean, var = torch.batch_norm_update_stats(inputs, None, None, 0.0)  # takes half the time of separate mean and variance
            mean_F, var_F, moving = mean.numpy(), var.numpy(), (self.running_mean, self.running_var)
            r_F, d_F = renorm_corrections(mean_F, var_F, *moving, module.correction_bounds(self.steps), module.eps)
            for average, batch_F in zip(moving, (mean_F, var_F), strict=True):
                average += module.momentum * (batch_F - average)
            self.steps += 1.0
            inverse_std_F = 1.0 / np.sqrt(var_F + module.eps)
            self._batch = BatchRenormState(x, mean, torch.from_numpy(inverse_std_F), r_F, d_F)
            scale_F = r_F * self.weight * inverse_std_F
            shift_F = self.bias + d_F * self.weight - mean_F * scale_F
        else:
            scale_F = self._moving_scale()
            shift_F = self.bias - self.running_mean * scale_F
        return torch.addcmul(torch.from_numpy(shift_F), inputs, torch.from_numpy(scale_F)).numpy()

    def backward(self, grad: np.ndarray, x: np.ndarray, weights: bool, columns: slice | None) -> np.ndarray | None:
        batch, eps, (weight, _) = self._batch, self.module.eps, self.params
        grad_out, inputs, needed = torch.from_numpy(grad), torch.from_numpy(x), [columns is not None, weights, weights]
        if batch is not None and x is batch.x:
            scale = torch.from_numpy(batch.r * self.weight)
            grad_x, grad_scale, grad_shift = _renorm_backward(
                grad_out, inputs, scale, None, None, batch.mean, batch.inverse_std, True, eps, needed
            )
            if weights:  # out = x̂ (r · weight) + (bias + d · weight)
                grad_scale = grad_scale * torch.from_numpy(batch.r) + grad_shift * torch.from_numpy(batch.d)
        else:
            assert not self.module.uses_batch_statistics(inputs), "needs all rows of the last forward pass in training mode"
            if weights:
                grad_x, grad_scale, grad_shift = _renorm_backward(grad_out, inputs, weight, *self._moving, None, None, False, eps, needed)
            else:
                grad_x = grad_out.mul_(torch.from_numpy(self._moving_scale()))
        if weights:
            for total, param_grad in zip(self.grads, (grad_scale, grad_shift), strict=True):
                total += param_grad
        return None if columns is None else grad_x[..., columns].numpy()

    def _moving_scale(self) -> np.ndarray:
        """Return the weight divided by the moving standard deviation [F]."""
        scale_F: np.ndarray = self.weight / np.sqrt(self.running_var + self.module.eps)
        return scale_F


_renorm_backward: Any = torch.ops.aten.native_batch_norm_backward


class GraphFreeResidualBlock:
    """Forward and backward pass of the residual block of SimBa (arXiv:2410.09754), with the interface of GraphFreeLinear."""

    def __init__(self, norm: GraphFreeLayerNorm, expand: GraphFreeLinear, contract: GraphFreeLinear) -> None:
        self.norm, self.expand, self.contract = norm, expand, contract
        self.grads = [*norm.grads, *expand.grads, *contract.grads]
        self._last: tuple[np.ndarray, np.ndarray, np.ndarray] | None = None
        """Inputs of the block, of `expand` and of `contract` in the last forward pass, or None before the first forward pass."""

    def _hidden_inputs(self, x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the inputs of the layers `expand` and `contract`, given the input x of the block."""
        normed = self.norm.forward(x)
        hidden = self.expand.forward(normed)
        _relu(hidden, hidden)
        return normed, hidden

    def forward(self, x: np.ndarray) -> np.ndarray:
        normed, hidden = self._hidden_inputs(x)
        self._last = x, normed, hidden
        out = self.contract.forward(hidden)
        out += x
        return out

    def backward(self, grad: np.ndarray, x: np.ndarray, weights: bool, columns: slice | None) -> np.ndarray | None:
        normed, hidden = self._last[1:] if self._last is not None and self._last[0] is x else self._hidden_inputs(x)
        grad_hidden = self.contract.backward(grad, hidden, weights, ALL)
        assert grad_hidden is not None
        _relu_backward(grad_hidden, hidden)
        grad_normed = self.expand.backward(grad_hidden, normed, weights, ALL)
        assert grad_normed is not None
        grad_x = self.norm.backward(grad_normed, x, weights, columns)
        if grad_x is not None:
            grad_x += grad[..., columns]
        return grad_x


class GraphFreeNoisyLinear:
    """Forward and backward pass of NoisyLinear, with the interface of GraphFreeLinear.

    `backward` must be called before new noise is drawn.
    """

    def __init__(self, module: NoisyLinear, grads: Sequence[Tensor], matmul_mode: MatmulMode) -> None:
        self.module, self.grads = module, grads
        self._params = [p.detach() for p in (module.weight, module.bias, module.weight_sigma, module.bias_sigma)]
        self._without_noise = GraphFreeLinear(self._params[:2], grads[:2], matmul_mode)
        empty, zeros = ([make(p) for p in self._params[:2]] for make in (torch.empty_like, torch.zeros_like))
        self._with_noise = GraphFreeLinear(empty, zeros, matmul_mode)
        """Layer whose weight and bias include the noise, and whose gradients are those of the last call of `backward`."""
        self._noise: tuple[Tensor, Tensor] | None = None
        """Noise of the last call of `forward`."""
        self._weight_noise = torch.empty(0)
        """The noise ε_w = ε_out ε_inᵀ of the weight in the last call of `forward` that used noise."""

    def forward(self, x: np.ndarray) -> np.ndarray:
        noise = self.module.noise
        if noise is None:
            self._noise = None
            return self._without_noise.forward(x)
        if noise is not self._noise:
            self._noise, self._weight_noise = noise, torch.outer(noise[1], noise[0])
        weight, bias, weight_sigma, bias_sigma = self._params
        torch.addcmul(weight, weight_sigma, self._weight_noise, out=self._with_noise.params[0])
        torch.addcmul(bias, bias_sigma, noise[1], out=self._with_noise.params[1])
        return self._with_noise.forward(x)

    def backward(self, grad: np.ndarray, x: np.ndarray, weights: bool, columns: slice | None) -> np.ndarray | None:
        if self._noise is not self.module.noise:
            raise RuntimeError("new noise was drawn between the forward and the backward pass of a noisy layer")
        if self._noise is None:
            return self._without_noise.backward(grad, x, weights, columns)
        grad_weight, grad_bias = self._with_noise.grads
        grad_weight.zero_()
        grad_bias.zero_()
        grad_x = self._with_noise.backward(grad, x, weights, columns)
        if weights:
            self.grads[0].add_(grad_weight)
            self.grads[1].add_(grad_bias)
            self.grads[2].addcmul_(grad_weight, self._weight_noise)
            self.grads[3].addcmul_(grad_bias, self._noise[1])
        return grad_x


AnyLayer = GraphFreeLinear | GraphFreeLayerNorm | GraphFreeBatchRenorm | GraphFreeResidualBlock | GraphFreeNoisyLinear


def is_supported(module: nn.Module) -> bool:
    """Return whether `make_graph_free_layer` supports the type and the settings of a module."""
    if type(module) is nn.Linear:
        return module.bias is not None
    if type(module) is nn.LayerNorm:
        return len(module.normalized_shape) == 1 and module.elementwise_affine and module.bias is not None
    return type(module) in (BatchRenorm1d, NoisyLinear, ResidualBlock)


def make_graph_free_layer(module: nn.Module, matmul_mode: MatmulMode) -> AnyLayer | None:
    """Return the layer that computes a supported module without autograd, or None if the module's parameters are not on the CPU."""
    if isinstance(module, ResidualBlock):
        return _make_residual_block(module, matmul_mode)
    assert isinstance(module, nn.Linear | nn.LayerNorm | BatchRenorm1d)
    params = [module.weight, module.bias, *([module.weight_sigma, module.bias_sigma] if isinstance(module, NoisyLinear) else [])]
    if any(map(is_asynchronous, params)):
        return None
    grads = existing_gradients(params)
    if isinstance(module, nn.LayerNorm):
        return GraphFreeLayerNorm(params, grads, module.eps)
    if isinstance(module, BatchRenorm1d):
        return GraphFreeBatchRenorm(module, grads)
    if isinstance(module, NoisyLinear):
        return GraphFreeNoisyLinear(module, grads, matmul_mode)
    return GraphFreeLinear(params, grads, matmul_mode)


def _make_residual_block(module: ResidualBlock, matmul_mode: MatmulMode) -> GraphFreeResidualBlock | None:
    parts = [module.norm, module.expand, module.contract]
    layers = [make_graph_free_layer(part, matmul_mode) if is_supported(part) else None for part in parts]
    norm, expand, contract = layers
    if isinstance(norm, GraphFreeLayerNorm) and isinstance(expand, GraphFreeLinear) and isinstance(contract, GraphFreeLinear):
        return GraphFreeResidualBlock(norm, expand, contract)
    return None


def existing_gradients(params: Sequence[Tensor]) -> list[Tensor]:
    """Return the gradients of all parameters, or an empty list if FlatParams does not hold the parameters."""
    grads = [parameter.grad for parameter in params if parameter.grad is not None]
    return grads if len(grads) == len(params) else []
