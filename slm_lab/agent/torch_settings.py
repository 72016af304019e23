"""Settings of torch, and the choice of the library for matrix products, which depends on the processor."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from slm_lab.agent.net.body import Body
from slm_lab.agent.net.q_nets import StackedCritics
from slm_lab.lib.limits import processor_description, processor_name
from slm_lab.lib.log import notice
from slm_lab.spec.report import Problem, SpecError

ONEDNN_MIN_SIZE, ONEDNN_MIN_SIZE_HALF_WIDTH = 2**21, 2**29
"""Minimum size of a matrix product that oneDNN computes: rows × inputs × outputs. A call of oneDNN has an overhead of about 10 µs, in which
MKL computes a product of size 2^19. On Zen 5, products of size 2^21 take 0.7 times as long with oneDNN as with MKL (gradients of weights
0.7 to 1.1 times, because oneDNN copies a transposed factor), and products of size 2^24 take 0.46 to 0.6 times as long. The second number is
for AMD processors that execute an AVX-512 instruction in two halves. On these processors, both libraries reach 100 to 105 GFLOP/s with
256 × 256 × 256, and a SAC update takes 8.8 ms with oneDNN and 8.2 ms with MKL. With 512 × 1024 × 1024, oneDNN reaches 111 GFLOP/s and MKL
101."""
FULL_WIDTH_FAMILY = 26
"""CPU family of the first AMD processors that execute AVX-512 instructions at full width (Zen 5)."""


def prefers_onednn(processor: str, capability: str) -> bool:
    """Return whether oneDNN computes large matrix products faster than MKL, which does not use AVX-512 on AMD processors.

    In products of 256 × 256 × 256 on EPYC processors with AVX-512 at full width, oneDNN reaches 226 GFLOP/s and MKL 108. With AVX2 instead
    of AVX-512, oneDNN reaches 67 GFLOP/s and MKL 70 to 77.

    Args: processor: text returned by `lib.limits.processor_description`. capability: instruction set that torch uses, such as "AVX2" or
    "AVX512".
    """
    return "AuthenticAMD" in processor and capability.startswith("AVX512")


def onednn_min_size(processor: str, capability: str) -> int:
    """Return the minimum size (see ONEDNN_MIN_SIZE) of the matrix products that oneDNN computes if the library is "onednn".

    Args: processor, capability: see `prefers_onednn`.
    """
    family = re.search(r"^cpu family\s*: (\d+)", processor, re.MULTILINE)
    half_width = prefers_onednn(processor, capability) and family is not None and int(family[1]) < FULL_WIDTH_FAMILY
    return ONEDNN_MIN_SIZE_HALF_WIDTH if half_width else ONEDNN_MIN_SIZE


def resolve_matmul_library(requested: str, device: str = "cpu") -> str:
    """Return the library for float32 matrix products: "onednn" (for large products), "mkl", or "torch" (torch's default on the device).

    Args: requested: value of meta.matmul. Raises SpecError if the requested library cannot be used.
    """
    cpu = device == "cpu"
    usable = {"mkl": cpu and torch.backends.mkl.is_available(), "onednn": cpu and torch.backends.mkldnn.is_available()}
    if requested in usable:
        if not usable[requested]:
            why = "torch was built without it" if cpu else f"it computes on the CPU, and the device is {device}"
            allowed = ", ".join(["auto", *(name for name, is_usable in usable.items() if is_usable)])
            raise SpecError("meta", [Problem("meta.matmul", f"cannot use '{requested}': {why}; allowed: {allowed}")])
        return requested
    if usable["onednn"] and prefers_onednn(processor_description(), torch.backends.cpu.get_cpu_capability()):
        return "onednn"
    return "mkl" if usable["mkl"] else "torch"


def set_matmul_library(net: nn.Module, requested: str, device: str) -> None:
    """Let a net compute its matrix products with the library that `resolve_matmul_library` returns."""
    if resolve_matmul_library(requested, device) == "onednn":
        min_size = onednn_min_size(processor_description(), torch.backends.cpu.get_cpu_capability())
        for module in net.modules():
            if isinstance(module, Body | StackedCritics):
                module.matmul_mode.onednn = min_size


def cpu_name() -> str:
    """Return the name of the processor and the instruction set that torch uses, both of which influence the rounding of results."""
    return f"{processor_name()}, {torch.backends.cpu.get_cpu_capability()}"


def has_bfloat16(processor: str) -> bool:
    """Return whether the processor has instructions for bfloat16."""
    checks = ("_is_avx512_bf16_supported", "_is_amx_tile_supported")  # missing in some versions of torch
    x86 = any(getattr(torch.cpu, name)() for name in checks if hasattr(torch.cpu, name))
    return x86 or not {"avx512_bf16", "amx_bf16", "bf16"}.isdisjoint(processor.split())


_SETTINGS: dict[str, tuple[Callable[[], Any], Callable[[Any], Any]]] = {
    "default dtype": (torch.get_default_dtype, torch.set_default_dtype),
    "gradient mode": (torch.is_grad_enabled, torch.set_grad_enabled),
    "number of threads": (torch.get_num_threads, torch.set_num_threads),
}


class TorchSettings:
    """Values of torch settings that affect results, saved at construction: default dtype, gradient mode, number of threads."""

    def __init__(self) -> None:
        self._values = _current_settings()
        self._noticed: set[str] = set()

    def restore(self) -> None:
        """Restore the settings that were changed since construction. The first change of each setting is reported in a notice.

        A call takes 0.3 µs if no setting has changed.
        """
        if (values := _current_settings()) == self._values:
            return
        for (name, (_, setter)), before, now in zip(_SETTINGS.items(), self._values, values, strict=True):
            if now == before:
                continue
            setter(before)
            if name not in self._noticed:
                self._noticed.add(name)
                notice(f"the env, or what it imports, changed torch's {name} from {before} to {now}; training uses {before}")


def _current_settings() -> tuple[Any, ...]:
    return torch.get_default_dtype(), torch.is_grad_enabled(), torch.get_num_threads()
