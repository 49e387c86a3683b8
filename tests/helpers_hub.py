"""A Hugging Face Hub on this machine: what its own library needs of its HTTP interface to write and read files."""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

LARGE = 10_000
"""Files of more bytes are uploaded as the Hub's large files, outside the commit."""
COMMIT = "a" * 40


class Hub(ThreadingHTTPServer):
    """Models by their name, such as ada/flowers; a model that is not there is answered as the Hub does."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Answer)
        self.models: dict[str, dict[str, bytes]] = {}
        self.commits: list[list[str]] = []
        """The paths of each commit, in order."""
        self.large: dict[str, bytes] = {}

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


@contextmanager
def running_hub() -> Iterator[Hub]:
    with Hub() as hub:
        thread = Thread(target=hub.serve_forever, args=(0.05,))
        thread.start()
        yield hub
        hub.shutdown()
        thread.join()


class _Answer(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Hub

    def log_message(self, *_: object) -> None:
        """Print nothing."""

    def send(self, content: Any, code: int = 200, **headers: str) -> None:
        body = content if isinstance(content, bytes) else json.dumps(content).encode()
        self.send_response(code)
        self.send_header("content-length", str(len(body)))
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def body(self) -> bytes:
        return self.rfile.read(int(self.headers.get("content-length", 0)))

    def model(self) -> tuple[dict[str, bytes] | None, list[str]]:
        """The files of the model that the path names, and the rest of the path."""
        words = unquote(urlsplit(self.path).path).strip("/").removeprefix("api/models/").split("/")
        name = "/".join(words[:2]).removesuffix(".git")
        return self.server.models.get(name), words[2:]

    def do_GET(self) -> None:
        files, words = self.model()
        if files is None:
            return self.send({"error": "Repository not found"}, 404, X_Error_Code="RepoNotFound")
        match words:
            case []:
                self.send({"id": "/", "sha": COMMIT, "private": False, "tags": [], "downloads": 0, "siblings": []})
            case ["tree", "main", *folder]:
                self.send(_listed(files, "/".join(folder)))
            case ["resolve", "main", *path] if (content := files.get("/".join(path))) is not None:
                self.send_range(content)
            case _:
                self.send({"error": "Entry not found"}, 404, X_Error_Code="EntryNotFound")

    do_HEAD = do_GET  # noqa: N815

    def send_range(self, content: bytes) -> None:
        headers = {"X_Repo_Commit": COMMIT, "ETag": f'"{hashlib.sha256(content).hexdigest()}"'}
        if (wanted := self.headers.get("range")) is None:
            return self.send(content, **headers)
        first, last = wanted.removeprefix("bytes=").split("-")
        self.send(content[int(first) : int(last) + 1 if last else None], 206, **headers)

    def do_POST(self) -> None:
        body = self.body()
        if self.path == "/api/validate-yaml":
            return self.send({"warnings": [], "errors": []})
        files, words = self.model()
        if files is None:
            return self.send({"error": "Repository not found"}, 404, X_Error_Code="RepoNotFound")
        match words:
            case ["preupload", "main"]:
                modes = [(file["path"], file["size"] > LARGE) for file in json.loads(body)["files"]]
                answer = [
                    {"path": path, "uploadMode": "lfs" if large else "regular", "shouldIgnore": False, "oid": None}
                    for path, large in modes
                ]
                self.send({"files": answer})
            case ["info", "lfs", "objects", "batch"]:
                objects = [{"oid": item["oid"], "size": item["size"]} for item in json.loads(body)["objects"]]
                uploads = [
                    item | {"actions": {"upload": {"href": f"{self.server.url}/large/{item['oid']}"}}}
                    for item in objects
                ]
                self.send({"transfer": "basic", "objects": uploads})
            case ["commit", "main"]:
                self.commit(files, [json.loads(line) for line in body.splitlines()])
            case ["paths-info", "main"]:
                paths = parse_qs(body.decode())["paths"]
                self.send([entry for path in paths for entry in _entry(files, path)])
            case _:
                self.send({"error": "not found"}, 404)

    def commit(self, files: dict[str, bytes], lines: list[dict[str, Any]]) -> None:
        values = [(line["key"], line["value"]) for line in lines if line["key"] != "header"]
        for key, value in values:
            content = base64.b64decode(value["content"]) if key == "file" else self.server.large[value["oid"]]
            files[value["path"]] = content
        self.server.commits.append([value["path"] for _, value in values])
        name = "/".join(self.path.removeprefix("/api/models/").split("/")[:2])
        self.send({"commitUrl": f"{self.server.url}/{name}/commit/{COMMIT}", "commitOid": COMMIT, "hookOutput": ""})

    def do_PUT(self) -> None:
        self.server.large[self.path.rsplit("/", 1)[1]] = self.body()
        self.send(b"")


def _entry(files: dict[str, bytes], path: str) -> list[dict[str, Any]]:
    if path in files:
        content = files[path]
        return [{"type": "file", "path": path, "size": len(content), "oid": hashlib.sha1(content).hexdigest()}]
    if any(name.startswith(f"{path}/") for name in files):
        return [{"type": "directory", "path": path, "oid": "d" * 40}]
    return []


def _listed(files: dict[str, bytes], folder: str) -> list[dict[str, Any]]:
    start = f"{folder}/" if folder else ""
    inside = {start + name.removeprefix(start).split("/")[0] for name in files if name.startswith(start)}
    return [entry for path in sorted(inside) for entry in _entry(files, path)]
