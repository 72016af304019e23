"""Run run_lab.py with blank pictures, because drawing takes most of the time of a short run."""

from slm_lab.cli import console
from slm_lab.experiment.report import writer
from tests.blank import BlankRenderer

writer.PNGRenderer = BlankRenderer  # type: ignore[assignment,misc]
if __name__ == "__main__":
    console()
