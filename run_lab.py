"""Run slm_lab from a checkout: `python run_lab.py SPEC_FILE SPEC_NAME MODE`; the same as the command `slm-lab`."""

import sys

from slm_lab.cli import main

if __name__ == "__main__":
    sys.exit(main())
