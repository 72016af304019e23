"""Tests that the view refuses other hosts and origins, paths outside the data folder and all changes, and handles damaged folders."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

pytest.importorskip("starlette", reason="the extra view is not installed")
pytest.importorskip("httpx")
from starlette.testclient import TestClient

from slm_lab.experiment.files.paths import RunPaths
from slm_lab.experiment.view import index as index_module
from slm_lab.experiment.view.folders import DataFolder
from slm_lab.experiment.view.index import Index
from slm_lab.experiment.view.server import make_app
from tests.experiment.view.folders import HOSTILE, make_run, make_search, make_study, training

PORT = 8123
SECRET = "secret of the machine"
Headers = dict[str, str]


@pytest.fixture
def data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the data folder; the files beside it must not be served."""
    monkeypatch.setattr(index_module, "_FRESH", 0.0)
    (tmp_path / "secret.json").write_text(json.dumps({"secret": {"agent": SECRET}}))
    (tmp_path / "secret.log").write_text(SECRET)
    (tmp_path / "data").mkdir()
    return tmp_path / "data"


@pytest.fixture
def client(data: Path) -> Iterator[TestClient]:
    with TestClient(make_app(Index(DataFolder(data)), PORT), base_url=f"http://127.0.0.1:{PORT}") as client:
        yield client


# ---- requests from other sites


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({}, 200),
        ({"host": f"localhost:{PORT}"}, 200),
        ({"host": f"LOCALHOST:{PORT}"}, 200),
        ({"host": f"[::1]:{PORT}"}, 200),
        ({"host": "evil.example"}, 403),
        ({"host": f"evil.example:{PORT}"}, 403),
        ({"host": f"127.0.0.1.evil.example:{PORT}"}, 403),
        ({"host": "127.0.0.1"}, 403),  # means port 80
        ({"host": f"127.0.0.1:{PORT + 1}"}, 403),
        ({"host": ""}, 403),
        ({"origin": f"http://127.0.0.1:{PORT}"}, 200),
        ({"origin": f"http://localhost:{PORT}"}, 403),  # another origin than that of the view's pages
        ({"origin": "http://evil.example"}, 403),
        ({"origin": "null"}, 403),
        ({"origin": f"http://127.0.0.1:{PORT + 1}"}, 403),
        ({"sec-fetch-site": "same-origin"}, 200),
        ({"sec-fetch-site": "cross-site"}, 403),
        ({"sec-fetch-site": "same-site"}, 403),
        ({"sec-fetch-site": "cross-site", "sec-fetch-mode": "navigate"}, 403),  # a link to data, not to a page
    ],
)
def test_other_hosts_and_origins(client: TestClient, headers: Headers, status: int) -> None:
    assert client.get("/api/runs", headers=headers).status_code == status


def test_a_link_to_the_page_is_followed(client: TestClient) -> None:
    assert client.get("/", headers={"sec-fetch-site": "cross-site", "sec-fetch-mode": "navigate"}).status_code == 200
    assert client.get("/static/page.js", headers={"sec-fetch-site": "cross-site", "sec-fetch-mode": "no-cors"}).status_code == 403


@pytest.mark.parametrize("method", ["POST", "PUT", "PATCH", "DELETE", "OPTIONS"])
def test_only_reading(client: TestClient, method: str) -> None:
    assert client.request(method, "/api/runs").status_code == 405


@pytest.mark.parametrize("path", ["/", "/api/runs", "/api/run?path=nowhere", "/static/page.js", "/nowhere"])
def test_headers(client: TestClient, path: str) -> None:
    headers = client.get(path).headers
    policy = dict(part.strip().split(" ", 1) for part in headers["content-security-policy"].split(";"))
    assert policy["default-src"] == "'none'"
    assert policy["script-src"] == policy["connect-src"] == "'self'"
    assert policy["frame-ancestors"] == "'none'"
    assert headers["x-content-type-options"] == "nosniff"
    assert headers["cross-origin-resource-policy"] == "same-origin"
    assert "server" not in headers
    assert client.get(path, headers={"host": "evil.example"}).headers["content-security-policy"]


# ---- paths out of the data folder

PATHS = [
    "..",
    "../",
    "../data2",
    "a/../..",
    ".",
    "",
    "/etc",
    "//etc",
    "run/../../secret",
    "..\\secret",
    "~",
    "run\0",
    "a" * 5000,
    "C:/",
    "%2e%2e",
]


@pytest.mark.parametrize("path", PATHS)
def test_paths_out_of_the_folder(client: TestClient, data: Path, path: str) -> None:
    make_run(data.parent, name="data2")
    for route in ("kind", "run", "search", "study", "log", "video"):
        answer = client.get(f"/api/{route}", params={"path": path, "name": "secret.log"})
        assert answer.status_code == 404
        assert SECRET not in answer.text
    assert client.get("/api/compare", params={"run": f":{path}"}).status_code == 404
    assert not any(client.get("/api/sparklines", params={"path": path}).json().values())


@pytest.mark.parametrize(
    "name", ["../../../secret.log", "../secret.log", "/etc/passwd", "..", "", "secret.log\0", "ppo_cartpole_spec.json"]
)
def test_names_of_logs_and_videos(client: TestClient, data: Path, name: str) -> None:
    paths = make_run(data)
    for route in ("log", "video"):
        answer = client.get(f"/api/{route}", params={"path": paths.root.name, "name": name})
        assert answer.status_code == 404
        assert SECRET not in answer.text


@pytest.mark.parametrize(
    "path", ["/static/../server.py", "/static/..%2fserver.py", "/static/server.py", "/static/%2e%2e/guard.py", "/static/"]
)
def test_other_static_files(client: TestClient, path: str) -> None:
    assert client.get(path).status_code == 404


def test_a_link_out_of_the_data_folder_is_no_run(client: TestClient, data: Path) -> None:
    outside = make_run(data.parent / "elsewhere")
    (data / "link").symlink_to(outside.root)
    inside = make_run(data, 1)
    (data / "second").symlink_to(inside.root)
    assert sorted(run["path"] for run in client.get("/api/runs").json()["runs"]) == [inside.root.name, "second"]
    assert client.get("/api/run", params={"path": "link"}).status_code == 404
    assert client.get("/api/run", params={"path": "second"}).status_code == 200


def _link(path: Path, target: Path) -> None:
    path.parent.mkdir(exist_ok=True)
    path.unlink(missing_ok=True)
    path.symlink_to(target)


@pytest.mark.parametrize(
    "file", ["ppo_cartpole_spec.json", "log/x.log", "info/ppo_cartpole_t0_s0_session_df_train.csv", "video/x.mp4", "info"]
)
def test_a_run_with_a_file_that_leads_out_is_not_shown(client: TestClient, data: Path, file: str) -> None:
    paths = make_run(data)
    if file == "info":
        shutil.rmtree(paths.info_dir)
    _link(paths.root / file, data.parent / ("" if file == "info" else "secret.json"))
    for route in ("kind", "run", "log", "video", "compare", "sparklines"):
        parameters = {"path": paths.root.name, "run": f":{paths.root.name}", "name": Path(file).name}
        answer = client.get(f"/api/{route}", params=parameters)
        assert answer.status_code == 403 or answer.json() == {paths.root.name: []}
        assert SECRET not in answer.text
    answer = client.get("/api/runs")
    assert SECRET not in answer.text
    (entry,) = answer.json()["runs"]
    assert entry["status"] == ("done" if file.startswith(("log", "video")) else "unreadable")


def test_a_link_inside_the_data_folder_is_followed(client: TestClient, data: Path) -> None:
    paths = make_run(data)
    shutil.move(paths.log_dir, data / "logs")
    paths.log_dir.symlink_to(data / "logs")
    name = paths.session_log(0).name
    assert client.get("/api/log", params={"path": paths.root.name, "name": name}).json()["text"] == "begins: index 0\n"


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="this system has no named pipes")
@pytest.mark.parametrize("place", ["info/ppo_cartpole_t0_s0_session_df_train.csv", "log/x.log"])
def test_a_named_pipe_does_not_block(client: TestClient, data: Path, place: str) -> None:
    paths = make_run(data, ended=False)
    (paths.root / place).unlink(missing_ok=True)
    os.mkfifo(paths.root / place)
    assert len(client.get("/api/runs").json()["runs"]) == 1
    assert client.get("/api/run", params={"path": paths.root.name}).status_code == 403


def test_a_hostile_folder_name_is_data(client: TestClient, data: Path) -> None:
    paths = make_run(data)
    folder = data / HOSTILE.replace("/", "")
    paths.root.rename(folder)
    answer = client.get("/api/runs")
    assert answer.headers["content-type"] == "application/json"
    assert answer.json()["runs"][0]["path"] == folder.name
    assert client.get("/api/run", params={"path": folder.name}).json()["entry"]["path"] == folder.name


def test_nothing_is_changed(client: TestClient, data: Path) -> None:
    run, search, study = make_run(data), make_search(data), make_study(data)

    def state() -> list[tuple[str, int, int]]:
        return sorted((str(path), path.stat().st_mtime_ns, path.stat().st_size) for path in data.rglob("*"))

    before = state()
    for path in (run.root.name, search.root.name, study.root.name):
        for route in ("runs", "sparklines", "run", "search", "study", "log", "video"):
            client.get(f"/api/{route}", params={"path": path, "name": "search_t1.log"})
        client.get("/api/compare", params={"run": f":{path}"})
    assert state() == before


# ---- damaged folders


def _cut_table(paths: RunPaths) -> None:
    paths.session_df(0).write_text(paths.session_df(0).read_text()[:-20])


def _strange_table(paths: RunPaths) -> None:
    paths.session_df(0).write_bytes(bytes(range(256)) * 20)


DAMAGES: dict[str, Callable[[RunPaths], object]] = {
    "cut table": _cut_table,
    "strange table": _strange_table,
    "no table": lambda paths: paths.session_df(0).unlink(),
    "empty table": lambda paths: paths.session_df(0).write_text(""),
    "no tables": lambda paths: shutil.rmtree(paths.info_dir),
    "no metrics": lambda paths: paths.trial_metrics().unlink(),
    "cut metrics": lambda paths: paths.trial_metrics().write_text('{"current_ret'),
    "list of metrics": lambda paths: paths.trial_metrics().write_text("[1, 2]"),
    "infinite metrics": lambda paths: paths.trial_metrics().write_text('{"current_return": Infinity, "frame": NaN}'),
    "cut spec": lambda paths: paths.spec.write_text(paths.spec.read_text()[:100]),
    "empty spec": lambda paths: paths.spec.write_text("{}"),
    "deep spec": lambda paths: paths.spec.write_text('{"a":' * 100_000),
    "words for numbers": lambda paths: paths.spec.write_text(
        '{"ppo_cartpole": {"env": {"max_frame": "many"}, "meta": {"max_session": []}}}'
    ),
    "huge numbers": lambda paths: paths.spec.write_text('{"ppo_cartpole": {"env": {"max_frame": 1e999}, "meta": {"max_session": 2}}}'),
}
SHOWN = ("cut table", "strange table", "no table", "empty table", "no metrics")
"""Damages after which the page of the run is still shown."""


@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_runs(client: TestClient, data: Path, damage: str) -> None:
    """The list has all runs; the page of the damaged run shows the remaining data or reports the problem."""
    paths, healthy = make_run(data), make_run(data, 1)
    DAMAGES[damage](paths)
    for lock in (False, True):
        if lock:
            with training(paths):
                answer = client.get("/api/runs")
        else:
            answer = client.get("/api/runs")
        assert answer.status_code == 200
        found = {run["path"]: run for run in answer.json()["runs"]}
        assert set(found) == {paths.root.name, healthy.root.name}
        assert found[healthy.root.name]["value"] == 100.0
    assert client.get("/api/sparklines", params={"path": paths.root.name}).status_code == 200
    page = client.get("/api/run", params={"path": paths.root.name})
    assert page.status_code == 200 if damage in SHOWN else page.status_code in (200, 404, 500)
    assert page.status_code == 200 or page.json()["error"]
    compare = client.get("/api/compare", params=[("run", f":{paths.root.name}"), ("run", f":{healthy.root.name}")])
    assert compare.status_code == 200 or compare.json()["error"]


def test_an_incomplete_row_is_not_shown(client: TestClient, data: Path) -> None:
    paths = make_run(data, ended=False)
    with paths.session_df(0).open("a") as file:
        file.write("1100,11.0,100,110,9999,9")
    assert client.get("/api/runs").json()["runs"][0]["value"] == 100.0
    assert client.get("/api/run", params={"path": paths.root.name}).json()["report"]["tables"]["train"]["0"]["frame"][-1] == 1000


def test_damaged_searches_and_studies(client: TestClient, data: Path) -> None:
    search, study = make_search(data), make_study(data)
    search.search_state.write_text(search.search_state.read_text()[:-30])
    study.study.write_text("{")
    found = {run["kind"]: run for run in client.get("/api/runs").json()["runs"]}
    assert {kind: run["status"] for kind, run in found.items()} == {"search": "unreadable", "study": "unreadable"}
    assert str(search.search_state.name) in found["search"]["text"]
    assert client.get("/api/search", params={"path": search.root.name}).status_code == 404


def test_a_folder_that_is_deleted_while_it_is_open(client: TestClient, data: Path) -> None:
    paths = make_run(data)
    known = client.get("/api/run", params={"path": paths.root.name}).json()["version"]
    shutil.rmtree(paths.root)
    answer = client.get("/api/run", params={"path": paths.root.name, "version": known})
    assert answer.status_code == 404
    assert "deleted" in answer.json()["error"]
    assert client.get("/api/runs").json()["runs"] == []
    shutil.rmtree(data)
    assert client.get("/api/runs").json()["runs"] == []


def test_other_ways_to_a_folder_are_refused(client: TestClient, data: Path) -> None:
    """Path components must be plain names, even if the path ends inside the data folder."""
    name, log = make_run(data).root.name, "ppo_cartpole_t0_s0.log"
    for path in (f"{name}/../{name}", f"./{name}", f"{name}/", f"/{name}", f"{data}/{name}"):
        assert client.get("/api/run", params={"path": path}).status_code == 404
    assert client.get("/api/log", params={"path": name, "name": log}).status_code == 200
    assert client.get("/api/log", params={"path": name, "name": f"../log/{log}"}).status_code == 404
