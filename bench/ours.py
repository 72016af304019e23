"""One speed case in slm_lab, as a user runs it (rows, CSV and checkpoints on): `python -m bench.ours CASE [FRAMES [THREADS [CLUSTER]]]`.

Prints {"fps": ..., "frames": ..., "version": ...} as its last line.
"""

import csv
import json
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

import slm_lab
from slm_lab.experiment.plan import Plan


def frames_and_seconds(run_csv: Path) -> tuple[int, float]:
    """Transitions and seconds between the first row and the last; what came before the first row counts as start-up.

    A backend may spend a frame on each reset, which is not a transition: one frame per episode is not counted, whether it does or not.
    """
    with run_csv.open(newline="") as file:
        rows = list(csv.DictReader(file))
    first, last = rows[0], rows[-1]
    frames, resets = (int(last[key]) - int(first[key]) for key in ("frame", "epi"))
    return frames - resets, float(last["wall_t"]) - float(first["wall_t"])


def main(case: str, frames: str = "", threads: str = "", cluster: str = "") -> None:
    sets = [f"{key}={value}" for key, value in (("env.max_frame", frames), ("meta.threads", threads)) if value]
    spec = slm_lab.load_spec(str(Path(__file__).parent / "specs.json"), case, sets)
    with TemporaryDirectory() as folder:
        slm_lab.Trial(spec, plan=Plan(data_dir=Path(folder), cluster=cluster or None)).run()
        sessions = [frames_and_seconds(table) for table in Path(folder).glob("*/info/*_session_df_train.csv")]
    fps, frames = sum(frames / seconds for frames, seconds in sessions), sum(frames for frames, _ in sessions)
    sys.stdout.write(json.dumps({"fps": fps, "frames": frames, "version": slm_lab.__version__}) + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
