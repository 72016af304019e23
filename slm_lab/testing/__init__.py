"""Contract suites (tests that a class must pass) and fakes, for packages that extend slm_lab.

If your tests define a subclass of a contract suite, pytest runs the tests of the suite on your class.
"""

from slm_lab.testing.executor_contract import ExecutorContract, FakeExecutor
from slm_lab.testing.spec_contract import SpecContract

__all__ = ["ExecutorContract", "FakeExecutor", "SpecContract"]
