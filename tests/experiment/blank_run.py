"""run_lab.py with blank pictures: drawing takes most of the time of a short run."""

import sys

from slm_lab.cli import main
from slm_lab.experiment.analysis import writer
from tests.blank import BlankRenderer

writer.PNGRenderer = BlankRenderer  # type: ignore[assignment,misc]
if __name__ == "__main__":
    sys.exit(main())
