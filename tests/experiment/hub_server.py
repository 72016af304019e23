"""A server, in a thread of this process, that implements the upload and download calls of the Hugging Face Hub."""

from __future__ import annotations

import base64
import hashlib
import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import pytest

TOKEN = "hf_good"


class Repo:
    """A repository with one branch."""

    def __init__(self, private: bool = False) -> None:
        self.files: dict[str, bytes] = {}
        self.sizes: dict[str, int] = {}
        """Sizes to report instead of the true ones."""
        self.private, self.commits = private, list[str]()

    @property
    def sha(self) -> str:
        return hashlib.sha1(str(sorted((name, hashlib.sha1(data).hexdigest()) for name, data in self.files.items())).encode()).hexdigest()


class Hub(ThreadingHTTPServer):
    """The server; a test can read and change its state."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.repos: dict[str, Repo] = {}
        self.blobs: dict[str, bytes] = {}
        self.requests: list[str] = []
        threading.Thread(target=self.serve_forever, daemon=True, kwargs={"poll_interval": 0.01}).start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class Handler(BaseHTTPRequestHandler):
    """Handler of one request."""

    server: Hub
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: Any) -> None:
        """Print nothing."""

    def reply(self, content: Any, status: int = 200, **headers: str) -> None:
        body = content if isinstance(content, bytes) else json.dumps(content).encode()
        self.send_response(status)
        for name, value in {"Content-Length": str(len(body)), **headers}.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def refuse(self, status: int, code: str) -> None:
        self.reply({"error": code}, status, X_Error_Code=code, X_Error_Message=code)

    def body(self) -> bytes:
        return self.rfile.read(int(self.headers.get("Content-Length") or 0))

    def known(self) -> bool:
        return self.headers.get("Authorization") == f"Bearer {TOKEN}"

    def repo(self, name: str) -> Repo | None:
        """Return a repository that the token may read; otherwise refuse the request."""
        found = self.server.repos.get(name)
        if found is None or (found.private and not self.known()):
            self.refuse(404, "RepoNotFound")
            return None
        return found

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        path = unquote(urlsplit(self.path).path)
        self.server.requests.append(f"{self.command} {path}")
        if match := re.fullmatch(r"/api/models/([^/]+/[^/]+)(?:/revision/(.+))?", path):
            if (repo := self.repo(match[1])) is not None:
                if match[2] not in (None, "main", repo.sha):
                    self.refuse(404, "RevisionNotFound")
                    return
                sizes = {name: repo.sizes.get(name, len(data)) for name, data in repo.files.items()}
                siblings = [{"rfilename": name, "size": size, "blobId": "0"} for name, size in sizes.items()]
                about = {"id": match[1], "modelId": match[1], "sha": repo.sha, "siblings": siblings, "tags": [], "downloads": 0, "likes": 0}
                self.reply({**about, "private": repo.private, "disabled": False, "gated": False})
        elif match := re.fullmatch(r"/([^/]+/[^/]+)/resolve/([^/]+)/(.+)", path):
            if (repo := self.repo(match[1])) is not None:
                if match[3] not in repo.files:
                    self.refuse(404, "EntryNotFound")
                    return
                data = repo.files[match[3]]
                self.reply(data, ETag=f'"{hashlib.sha1(data).hexdigest()}"', X_Repo_Commit=repo.sha)
        else:
            self.refuse(404, "NotFound")

    def do_PUT(self) -> None:
        data = self.body()
        self.server.blobs[hashlib.sha256(data).hexdigest()] = data
        self.reply({})

    def do_POST(self) -> None:
        path, body = unquote(urlsplit(self.path).path), self.body()
        self.server.requests.append(f"POST {path}")
        if path == "/api/validate-yaml":
            self.reply({"errors": [], "warnings": []})
        elif not self.known():
            self.refuse(401, "InvalidToken")
        elif path == "/api/repos/create":
            self._create(json.loads(body))
        elif match := re.fullmatch(r"/api/models/(.+)/preupload/main", path):
            modes = [
                {"path": one["path"], "uploadMode": "lfs" if one["path"].endswith((".onnx", ".safetensors")) else "regular"}
                for one in json.loads(body)["files"]
            ]
            self.reply({"files": [{**one, "shouldIgnore": False} for one in modes]})
        elif path.endswith("/info/lfs/objects/batch"):
            objects = json.loads(body)["objects"]
            actions = [{**one, "actions": {"upload": {"href": f"{self.server.url}/lfs/{one['oid']}"}}} for one in objects]
            self.reply({"transfer": "basic", "objects": actions})
        elif match := re.fullmatch(r"/api/models/(.+)/commit/main", path):
            self._commit(match[1], [json.loads(line) for line in body.splitlines()])
        else:
            self.refuse(404, "NotFound")

    def _create(self, wanted: dict[str, Any]) -> None:
        name = f"{wanted.get('organization') or 'me'}/{wanted['name']}"
        if not name.startswith("me/"):
            self.refuse(403, "Forbidden")
        elif name in self.server.repos:
            self.reply({"error": "exists", "url": f"{self.server.url}/{name}"}, 409)
        else:
            self.server.repos[name] = Repo(wanted.get("visibility") == "private" or bool(wanted.get("private")))
            self.reply({"url": f"{self.server.url}/{name}", "name": name})

    def _commit(self, name: str, lines: list[dict[str, Any]]) -> None:
        if (repo := self.repo(name)) is None:
            return
        for line in lines:
            value = line["value"]
            match line["key"]:
                case "header":
                    repo.commits.append(value["summary"])
                case "file":
                    repo.files[value["path"]] = base64.b64decode(value["content"])
                case "lfsFile":
                    repo.files[value["path"]] = self.server.blobs[value["oid"]]
                case "deletedFile":
                    del repo.files[value["path"]]
        self.reply({"commitUrl": f"{self.server.url}/{name}/commit/{repo.sha}", "commitOid": repo.sha})


@contextmanager
def running_hub(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """Run a server in place of the Hugging Face Hub; the user's token and cache are replaced by those in `folder`."""
    constants = pytest.importorskip("huggingface_hub.constants")
    server = Hub()
    monkeypatch.setenv("HF_ENDPOINT", server.url)
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(folder / "token"))
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(folder / "cache"))
    yield server
    server.shutdown()
    server.server_close()
