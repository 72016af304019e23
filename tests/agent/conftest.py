"""Use one torch thread, as in every Session: small nets are slower with more threads."""

import pytest
import torch


@pytest.fixture(autouse=True, scope="session")
def _one_thread() -> None:
    torch.set_num_threads(1)
