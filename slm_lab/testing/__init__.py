"""Contract suites and fakes for a package that extends slm_lab: subclass a suite in your tests, and pytest runs it on your class."""

from slm_lab.testing.executor_contract import ExecutorContract, FakeExecutor
from slm_lab.testing.spec_contract import SpecContract

__all__ = ["ExecutorContract", "FakeExecutor", "SpecContract"]
