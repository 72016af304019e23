"""Run slm_lab from a checkout: `python run_lab.py SPEC_FILE SPEC_NAME MODE`; the same as the command `slm-lab`."""

import sys
from importlib.util import find_spec

PACKAGES = ("rich", "torch", "gymnasium", "matplotlib", "numpy", "pandas", "PIL", "plotly", "pydantic", "ruamel")
ADVICE = "run `make setup` and use .venv/bin/python"


def main() -> int:
    """Run the command line; return 2 if this Python lacks slm_lab's packages."""
    if sys.version_info < (3, 11):  # noqa: UP036 - older Pythons run this line
        sys.stderr.write("slm_lab needs Python 3.11 or newer, not {}.{}: {}\n".format(*sys.version_info[:2], ADVICE))
        return 2
    missing = [name for name in PACKAGES if find_spec(name) is None]
    if missing:
        sys.stderr.write(f"missing package '{missing[0]}': {ADVICE}\n")
        return 2
    from slm_lab.cli import console

    console()


if __name__ == "__main__":
    sys.exit(main())
