"""A stand-in for the Hugging Face hub on this machine: repositories in memory, as far as uploads and downloads go."""

from __future__ import annotations

import base64
import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

COMMIT = "0" * 40


class Hub:
    """What a stub was asked, and what it holds."""

    def __init__(self) -> None:
        self.url = ""
        self.token = "hf_of_the_tests"
        self.files: dict[str, dict[str, bytes]] = {}
        """Of each repository, by path."""
        self.private: dict[str, bool] = {}
        self.messages: list[str] = []
        self.refuse_with: int | None = None
        """Answer everything with this status."""


@contextmanager
def hub_stub() -> Iterator[Hub]:
    hub = Hub()

    class Handler(BaseHTTPRequestHandler):
        def log_message(self, *_: object) -> None:
            pass

        def answer(self, status: int, body: Any, headers: dict[str, str] | None = None) -> None:
            content = body if isinstance(body, bytes) else json.dumps(body).encode()
            self.send_response(status)
            for name, value in {"Content-Length": str(len(content)), **(headers or {})}.items():
                self.send_header(name, value)
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(content)

        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"])).decode()
            path = self.path.strip("/").split("/")
            if hub.refuse_with is not None:
                self.answer(hub.refuse_with, {"error": "refused"})
            elif path[:2] == ["api", "validate-yaml"]:
                self.answer(200, {"errors": [], "warnings": []})
            elif self.headers.get("Authorization") != f"Bearer {hub.token}":
                self.answer(401, {"error": "Invalid credentials"})
            elif path[:3] == ["api", "repos", "create"]:
                asked = json.loads(body)
                name = "/".join(filter(None, (asked.get("organization"), asked["name"])))
                if name in hub.files:
                    self.answer(409, {"error": "You already created this model repo", "url": f"{hub.url}/{name}"})
                    return
                # newer clients ask for a visibility
                private = asked.get("private", False) or asked.get("visibility") == "private"
                hub.files[name], hub.private[name] = {}, private
                self.answer(200, {"url": f"{hub.url}/{name}", "name": name, "id": name})
            elif "preupload" in path:
                modes = [
                    {"path": file["path"], "uploadMode": "regular", "shouldIgnore": False, "oid": None}
                    for file in json.loads(body)["files"]
                ]
                self.answer(200, {"files": modes})
            elif "commit" in path:
                name = "/".join(path[2:4])
                for line in map(json.loads, body.splitlines()):
                    if line["key"] == "header":
                        hub.messages.append(line["value"]["summary"])
                    else:
                        hub.files[name][line["value"]["path"]] = base64.b64decode(line["value"]["content"])
                self.answer(200, {"commitUrl": f"{hub.url}/{name}/commit/{COMMIT}", "commitOid": COMMIT})
            else:
                self.answer(404, {"error": self.path})

        def do_GET(self) -> None:
            path = self.path.partition("?")[0].strip("/").split("/")
            in_api = path[:2] == ["api", "models"]
            name = "/".join(path[2:4] if in_api else path[:2])
            files = hub.files.get(name)
            if files is None:
                self.answer(401, {"error": "no such repository"}, {"X-Error-Code": "RepoNotFound"})
            elif "tree" in path:
                entries = [
                    {"type": "file", "path": file, "size": len(content), "oid": etag(content)}
                    for file, content in files.items()
                ]
                self.answer(200, entries)
            elif in_api:
                siblings = [{"rfilename": file} for file in files]
                self.answer(200, {"id": name, "sha": COMMIT, "siblings": siblings, "tags": [], "downloads": 0})
            else:
                content = files["/".join(path[4:])]
                self.answer(200, content, {"ETag": f'"{etag(content)}"', "X-Repo-Commit": COMMIT})

        do_HEAD = do_GET  # noqa: N815  the name that http.server calls

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    hub.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)  # seconds till it sees its end
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def etag(content: bytes) -> str:
    return hashlib.sha1(content).hexdigest()
