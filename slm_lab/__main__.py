"""Entry point of `python -m slm_lab`, which does the same as the command `slm-lab`."""

import sys

from slm_lab.cli import console

if __name__ == "__main__":
    sys.argv[0] = "python -m slm_lab"  # the name in usage lines
    console()
