"""A Hugging Face hub on this machine, as far as downloading goes: enough of its API for the real client to work with.

Answers are the hub's own in form: status, X-Error-Code, X-Repo-Commit, ETag.
"""

from __future__ import annotations

import hashlib
import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlsplit


@dataclass
class Repository:
    """branches and tags -> commit; commit -> files by name. trouble: 'gated', 'down' or 'silent'."""

    revisions: dict[str, str]
    commits: dict[str, dict[str, bytes]]
    trouble: str = ""


@dataclass
class Hub:
    repositories: dict[str, Repository] = field(default_factory=dict)
    asked: list[str] = field(default_factory=list)  # method and path of every request
    address: str = ""
    closing: threading.Event = field(default_factory=threading.Event)

    def add(self, name: str, folder: Path | dict[str, bytes], *, trouble: str = "", revision: str = "main") -> str:
        """Make the folder's files a commit of the repository; returns the commit."""
        files = folder if isinstance(folder, dict) else files_of(folder)
        commit = hashlib.sha1(b"".join(k.encode() + v for k, v in sorted(files.items()))).hexdigest()
        repository = self.repositories.setdefault(name, Repository({}, {}, trouble))
        repository.revisions[revision] = commit
        repository.commits[commit] = files
        return commit


def files_of(folder: Path) -> dict[str, bytes]:
    return {p.relative_to(folder).as_posix(): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


@contextmanager
def serve() -> Iterator[Hub]:
    hub = Hub()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            self._answer()

        def do_HEAD(self) -> None:
            self._answer()

        def log_message(self, format: str, *args: object) -> None:
            pass

        def _answer(self) -> None:
            path = unquote(urlsplit(self.path).path)
            hub.asked.append(f"{self.command} {path}")
            if found := re.fullmatch(r"/([^/]+/[^/]+)/resolve/([^/]+)/(.+)", path):
                self._file(*found.groups())
            elif found := re.fullmatch(r"/api/models/([^/]+/[^/]+)(?:/(revision|tree)/([^/]+))?", path):
                self._listing(found[1], found[2] or "revision", found[3] or "main")
            else:
                self._send(404, b"{}")

        def _repository(self, name: str) -> Repository | None:
            repository = hub.repositories.get(name)
            if repository is None:
                self._send(401, b"{}", {"X-Error-Code": "RepoNotFound", "X-Error-Message": "Repository not found"})
            elif repository.trouble == "silent":
                hub.closing.wait(30)
                self.close_connection = True
            elif repository.trouble == "down":
                self._send(500, b"{}")
            else:
                return repository
            return None

        def _commit(self, repository: Repository, revision: str) -> str | None:
            commit = repository.revisions.get(revision, revision)
            if commit in repository.commits:
                return commit
            self._send(404, b"{}", {"X-Error-Code": "RevisionNotFound", "X-Error-Message": "Invalid rev id"})
            return None

        def _listing(self, name: str, kind: str, revision: str) -> None:
            repository = self._repository(name)
            commit = repository and self._commit(repository, revision)
            if not repository or not commit:
                return
            files = repository.commits[commit]
            if kind == "tree":
                rows = [{"type": "file", "path": n, "size": len(d), "oid": _etag(d)} for n, d in files.items()]
                self._send(200, json.dumps(rows).encode())
            else:
                model = {"id": name, "modelId": name, "sha": commit, "private": False, "tags": []}
                rows = [{"rfilename": n} for n in files]
                self._send(200, json.dumps({**model, "siblings": rows, "downloads": 0, "likes": 0}).encode())

        def _file(self, name: str, revision: str, file: str) -> None:
            repository = self._repository(name)
            if repository is None:
                return
            if repository.trouble == "gated":
                self._send(
                    401, b"{}", {"X-Error-Code": "GatedRepo", "X-Error-Message": f"Access to {name} is restricted"}
                )
                return
            commit = self._commit(repository, revision)
            if commit is None:
                return
            data = repository.commits[commit].get(file)
            if data is None:
                self._send(404, b"{}", {"X-Error-Code": "EntryNotFound", "X-Repo-Commit": commit})
            else:
                self._send(200, data, {"X-Repo-Commit": commit, "ETag": f'"{_etag(data)}"'})

        def _send(self, status: int, body: bytes, headers: dict[str, str] | None = None) -> None:
            self.send_response(status)
            for key, value in {"Content-Type": "application/json", **(headers or {})}.items():
                self.send_header(key, value)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(body)

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    hub.address = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        hub.closing.set()
        server.shutdown()
        server.server_close()
        thread.join()


def _etag(data: bytes) -> str:
    return hashlib.sha1(data).hexdigest()
