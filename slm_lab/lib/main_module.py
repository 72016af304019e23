"""The user's `__main__` module while child processes start."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType


@contextmanager
def hidden_main() -> Iterator[None]:
    """Keep multiprocessing from running the user's script again in a child that is started inside this block.

    Children of the start methods spawn and forkserver import the parent's `__main__`. Ours need nothing of it, so a script without
    `if __name__ == "__main__"`, a notebook and `python -c` can start them.
    """
    main = sys.modules["__main__"]
    sys.modules["__main__"] = ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = main
