"""slm_lab: reinforcement learning experiments from JSON specs.

The public names of the package are imported on first use (PEP 562), so that `import slm_lab` and `slm-lab --help` do not import large
libraries such as torch.
"""

from importlib import import_module
from typing import Any

__version__ = "0.2.1.dev0"

_PUBLIC = {
    "load_spec": "slm_lab.spec.load.loader:load_spec",
    "Spec": "slm_lab.spec.models.spec:Spec",
    "SpecError": "slm_lab.spec.report:SpecError",
    "Observer": "slm_lab.experiment.training.observers.base:Observer",
    "Session": "slm_lab.experiment.session.session:Session",
    "Trial": "slm_lab.experiment.run.trial:Trial",
    "load_run": "slm_lab.experiment.report.run:load_run",
    "load_agent": "slm_lab.experiment.deploy.load:load_agent",
    "export": "slm_lab.experiment.deploy.register:export",
}
__all__ = ["Observer", "Session", "Spec", "SpecError", "Trial", "export", "load_agent", "load_run", "load_spec"]


def __getattr__(name: str) -> Any:
    if name not in _PUBLIC:
        raise AttributeError(f"module 'slm_lab' has no attribute '{name}'")
    module, _, attribute = _PUBLIC[name].partition(":")
    return getattr(import_module(module), attribute)


def __dir__() -> list[str]:
    return sorted(__all__)
