"""Tests of rows and state on disk, also after the process that wrote them was killed."""

from __future__ import annotations

from pathlib import Path

import pytest

from slm_lab.experiment.events import CheckpointWritten, Event, Notice, Row
from slm_lab.experiment.files import bundle as state
from slm_lab.experiment.files.paths import RunPaths, new_run
from slm_lab.experiment.files.sink import LocalSink, MemorySink, complete_rows
from slm_lab.experiment.training.observers.base import COLUMNS

HEADER = "frame,epi,t,wall_t,opt_step,total_reward"
ROWS = ("200,3,100,1.500,12,20.5", "400,5,200,2.500,25,", "600,9,300,3.250,37,31.5")
SIX = HEADER.split(",")


@pytest.fixture
def paths(tmp_path: Path) -> RunPaths:
    return new_run(tmp_path, "small")


def test_rows_have_their_columns_in_order_and_one_format(paths: RunPaths) -> None:
    """Rows are on disk immediately; a later process appends rows without a second header."""
    sink = LocalSink(paths)
    row = dict.fromkeys(COLUMNS) | {"frame": 1000, "wall_t": 1.23456, "fps": 999.96, "total_reward": 1 / 3, "loss": 1e-9}
    sink(Row(0, "train", row))
    lines = paths.session_df(0).read_text().splitlines()
    returns = (
        "total_reward,total_reward_ma,epi_new,return_new,current_return,current_return_se,current_epi,epi_len,epi_len_max,epi_truncated"
    )
    assert lines[0] == f"frame,epi,t,wall_t,fps,opt_step,{returns},loss,lr,grad_norm,entropy,explore_var,entropy_coef"
    assert lines[1] == "1000,,,1.235,1000.0,,0.33333333,,,,,,,,,,1e-09,,,,,"
    assert not paths.session_df(0, "eval").exists()
    sink.close()
    sink = LocalSink(paths)
    sink(Row(0, "train", row | {"frame": 2000}))
    sink(Row(0, "eval", row))
    sink(Row(1, "train", row))
    sink.close()
    assert [line.split(",")[0] for line in paths.session_df(0).read_text().splitlines()] == ["frame", "1000", "2000"]
    assert [len(sink.read_rows(table, mode)) for table, mode in ((0, "train"), (0, "eval"), (1, "train"), (2, "train"))] == [2, 1, 1, 0]  # type: ignore[arg-type]


def test_a_table_that_an_older_version_began_keeps_its_columns(paths: RunPaths) -> None:
    paths.session_df(0).write_text("frame,epi,lr\n100,2,0.5\n")
    sink = LocalSink(paths)
    sink(Row(0, "train", dict.fromkeys(COLUMNS) | {"frame": 200, "lr": 0.25}))
    sink(Row(0, "train", dict.fromkeys(COLUMNS) | {"frame": 300, "epi": 5}))
    sink.close()
    assert paths.session_df(0).read_text() == "frame,epi,lr\n100,2,0.5\n200,,0.25\n300,5,\n"


@pytest.mark.parametrize("torn", ["800,1", "800,12,400,4.000,50,40.0", "8"])
def test_a_torn_line_is_cut_off(torn: str, paths: RunPaths) -> None:
    """A line that lacks only its line end is removed too, since its last number may be cut off. The next row starts a new line."""
    path, sink = paths.session_df(0), LocalSink(paths)
    path.write_text("\n".join([HEADER, *ROWS, torn]))
    assert [row["frame"] for row in sink.read_rows(0, "train")] == ["200", "400", "600"]
    assert path.read_text() == "\n".join([HEADER, *ROWS, ""])
    sink(Row(0, "train", {"frame": 800, "epi": 12, "t": 400, "wall_t": 4.0, "opt_step": 50, "total_reward": None}))
    sink.close()
    assert path.read_text().splitlines() == [HEADER, *ROWS, "800,12,400,4.000,50,"]


@pytest.mark.parametrize("text", ["", "frame,ep", HEADER, f"{HEADER}\n", f"{HEADER}\n200,3"])
def test_a_table_without_a_whole_row(text: str, paths: RunPaths) -> None:
    path, sink = paths.session_df(0), LocalSink(paths)
    assert complete_rows(path) == []
    assert not path.exists()
    path.write_text(text)
    assert complete_rows(path) == []
    sink(Row(0, "train", dict.fromkeys(SIX, 1)))
    sink.close()
    assert path.read_text() == f"{HEADER}\n1,1,1,1.000,1,1\n".replace("1.000", "1")


def test_other_events_are_handed_on_and_memory_keeps_rows_alone(paths: RunPaths) -> None:
    """A sink that writes to files must not keep rows in memory; a memory sink keeps only rows."""
    seen: list[Event] = []
    row, events = Row(0, "train", {"frame": 1}), [Notice("it rains"), CheckpointWritten(0, 1)]
    local, memory = LocalSink(paths, forward=seen.append), MemorySink()
    for event in (row, *events):
        local(event)
        memory(event)
    local.close()
    assert seen == events
    assert memory.table_rows(0, "train") == [{"frame": 1}]
    assert memory.table_rows(1, "train") == memory.table_rows(0, "eval") == []
    assert memory.read_rows(0, "train") == []


def test_the_state_before_the_last_is_kept(paths: RunPaths) -> None:
    """The previous state is kept as a hard link if its frame differs and if it is exact and small.

    The last checkpoint must never be absent.
    """

    def saved(frame: int, lost: tuple[str, ...] = ()) -> list[int]:
        sink.save(0, "last", {"version": state.VERSION, "frames": [frame], "lost": list(lost), "tables": {}})
        files = (Path(str(paths.checkpoint(0, which))) for which in ("last", "previous"))
        return [state.read_header(file, check=True)["frames"][0] for file in files if file.exists()]

    sink = LocalSink(paths)
    assert [saved(100), saved(100), saved(200), saved(200), saved(300)] == [[100], [100], [200, 100], [200, 100], [300, 200]]
    assert saved(400, ("open episodes are dropped",)) == [400, 300]
    assert saved(500) == [500, 300], "the state at frame 400 is not exact"
    assert sorted(path.name for path in paths.model_dir.iterdir()) == ["small_t0_s0_ckpt-last.pt", "small_t0_s0_ckpt-previous.pt"]


@pytest.mark.parametrize("error", [OSError(95, "Operation not supported"), FileExistsError()])
def test_a_file_system_without_hard_links(error: OSError, paths: RunPaths, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*arguments: object) -> None:
        raise error

    monkeypatch.setattr("os.link", refuse)
    sink = LocalSink(paths)
    for frame in (100, 200):
        sink.save(0, "last", {"version": state.VERSION, "frames": [frame], "lost": [], "tables": {}})
    assert state.read_header(paths.checkpoint(0, "last"))["frames"] == [200]
    assert [path.name for path in paths.model_dir.iterdir()] == ["small_t0_s0_ckpt-last.pt"]


def test_a_large_state_is_not_kept(paths: RunPaths, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("slm_lab.experiment.files.sink._KEPT_BYTES", 100)
    sink = LocalSink(paths)
    for frame in (100, 200):
        sink.save(0, "last", {"version": state.VERSION, "frames": [frame], "lost": [], "tables": {}})
    assert not Path(str(paths.checkpoint(0, "previous"))).exists()
