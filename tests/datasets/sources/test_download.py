from __future__ import annotations

import hashlib
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from torchcaps.datasets.sources import source
from torchcaps.errors import InputError

CONTENTS = b"seven capsules" * 1000
SHA256 = hashlib.sha256(CONTENTS).hexdigest()
ADVICE = "name a folder with its files: --data-dir FOLDER, or TORCHCAPS_DATA"


class Mirrors(BaseHTTPRequestHandler):
    """Serves what the first part of the address says: good, corrupt, half; anything else is not found."""

    requests: list[str]

    def do_GET(self) -> None:
        self.requests.append(self.path)
        bodies = {"good": CONTENTS, "corrupt": CONTENTS[:-1] + b"x", "half": CONTENTS[:100], "empty": b""}
        body = bodies.get(self.path.split("/")[1])
        self.send_response(404 if body is None else 200)
        length = len(CONTENTS) if self.path.startswith("/half") else len(body or b"")
        self.send_header("Content-Length", str(length))
        self.end_headers()
        self.wfile.write(body or b"")

    def log_message(self, format: str, *args: object) -> None:
        """Says nothing."""


@pytest.fixture
def server() -> Iterator[str]:
    Mirrors.requests = []
    with ThreadingHTTPServer(("127.0.0.1", 0), Mirrors) as http:
        threading.Thread(target=http.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
        yield f"http://127.0.0.1:{http.server_port}"
        http.shutdown()


def fetch(server: str, folder: Path, *mirrors: str) -> Path:
    addresses = tuple(f"{server}/{mirror}/" for mirror in mirrors)
    return source.Source(name="a", mirrors=addresses, sha256={"a.gz": SHA256}).fetch("a.gz", folder)


def test_mirrors_are_tried_until_one_has_the_right_file(server: str, tmp_path: Path) -> None:
    folder = tmp_path / "new" / "cache"
    path = fetch(server, folder, "missing", "corrupt", "half", "empty", "good", "never")
    assert path == folder / "a.gz"
    assert path.read_bytes() == CONTENTS
    assert list(folder.iterdir()) == [path]
    assert Mirrors.requests == [f"/{mirror}/a.gz" for mirror in ("missing", "corrupt", "half", "empty", "good")]


def test_a_file_that_is_there_is_not_fetched_again(server: str, tmp_path: Path) -> None:
    fetch(server, tmp_path, "good")
    fetch(server, tmp_path, "good")
    assert len(Mirrors.requests) == 1


@pytest.mark.parametrize("there", [b"", CONTENTS[:50], b"another" * 2000])
def test_a_broken_file_in_the_cache_is_replaced(server: str, tmp_path: Path, there: bytes) -> None:
    (tmp_path / "a.gz").write_bytes(there)
    assert fetch(server, tmp_path, "good").read_bytes() == CONTENTS


def test_nothing_stays_when_no_mirror_is_right(server: str, tmp_path: Path) -> None:
    with pytest.raises(InputError) as raised:
        fetch(server, tmp_path / "cache", "missing", "corrupt", "half")
    message = str(raised.value)
    assert f"{server}/missing/: HTTP status 404" in message
    assert f"{server}/corrupt/: not the expected contents" in message
    assert f"{server}/half/: " in message
    assert message.endswith(ADVICE)
    assert "\n" not in message
    assert list((tmp_path / "cache").iterdir()) == []


def test_without_a_network_one_sentence_names_the_mirrors(tmp_path: Path) -> None:
    closed = "http://127.0.0.1:9"  # the discard port, where nobody listens
    with pytest.raises(InputError, match=f"a.gz could not be downloaded .*{closed}/x/: ConnectionError.*{ADVICE}"):
        fetch(closed, tmp_path, "x")
    assert list(tmp_path.glob("a*")) == []


def test_a_silent_mirror_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import socket

    monkeypatch.setattr(source, "TIMEOUT", 0.1)
    with socket.create_server(("127.0.0.1", 0)) as silent, pytest.raises(InputError, match="ReadTimeout"):
        fetch(f"http://127.0.0.1:{silent.getsockname()[1]}", tmp_path, "x")


def test_a_folder_that_cannot_be_written_is_no_matter_of_mirrors(server: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(OSError, match="file"):
        fetch(server, tmp_path / "file" / "cache", "good")
