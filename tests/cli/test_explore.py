"""``torchcaps explore``: what it opens, what it says, and that it talks to nobody."""

from __future__ import annotations

import base64
import http.client
import json
import shutil
import signal
import subprocess
import sys
import threading
import webbrowser
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import pytest

from explorer_support import served as really_served
from explorer_support import small_network
from torchcaps.explorer import Explorer
from torchcaps.models.pretrained import SHIPPED

Cli = Callable[..., Any]


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Explorer, int | None]]:
    """What would have been served, and where."""
    calls: list[tuple[Explorer, int | None]] = []

    @contextmanager
    def serving(explorers: Sequence[Explorer], port: int | None) -> Iterator[str]:
        calls.extend((explorer, port) for explorer in explorers)
        yield "http://127.0.0.1:7860"

    monkeypatch.setattr("torchcaps.explorer.serving", serving)
    monkeypatch.setattr("torchcaps.cli.explore.until_stopped", nullcontext)
    return calls


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What the browser was asked to open."""
    addresses: list[str] = []
    monkeypatch.setattr(webbrowser, "open", addresses.append)
    return addresses


def test_the_page_is_opened(cli: Cli, run_folder: Path, served: list[Any], opened: list[str]) -> None:
    result = cli("explore", run_folder)
    for thread in threading.enumerate():
        if thread is not threading.current_thread() and thread.daemon:
            thread.join(5)
    title = "run: sabour2017, trained on UCI handwritten digits, 8×8 brought to 28×28"
    assert (result.code, result.out) == (
        0,
        f"Exploring {title} at http://127.0.0.1:7860\nCtrl-C ends it.\n",
    )
    assert opened == ["http://127.0.0.1:7860"]
    [(explorer, port)] = served
    assert (explorer.title, port) == (title, None)
    assert explorer.images is not None


def test_the_browser_may_be_left_out(cli: Cli, run_folder: Path, served: list[Any], opened: list[str]) -> None:
    assert cli("explore", run_folder, "--no-browser", "--port", "8000", "--which", "last").code == 0
    assert opened == []
    assert served[0][1] == 8000


def test_without_a_run_the_shipped_network_is_shown(
    cli: Cli, served: list[Any], opened: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(SHIPPED, "compact", tmp_path / "compact")
    small_network(num_classes=10, in_shape=(1, 28, 28)).save_pretrained(tmp_path / "compact")
    assert cli("explore", "--no-browser").code == 0
    [(explorer, _)] = served
    assert explorer.name == "compact"
    assert explorer.images is not None
    assert explorer.images.in_shape == (1, 28, 28)


def test_two_networks_are_opened(cli: Cli, run_folder: Path, served: list[Any], opened: list[str]) -> None:
    shutil.copytree(run_folder, "other")
    result = cli("explore", run_folder, "other", "--no-browser")
    assert result.code == 0
    assert [explorer.name for explorer, _ in served] == ["run", "other"]
    assert " and other: sabour2017, trained on " in result.out
    shutil.copytree(run_folder, "there/run")
    assert cli("explore", run_folder, "there/run", "--no-browser").code == 0
    assert served[-1][0].name == "there/run"


def test_last_is_another_network_than_best(cli: Cli, run_folder: Path, served: list[Any], opened: list[str]) -> None:
    from torchcaps.training import load_run

    for which in ("best", "last"):
        assert cli("explore", run_folder, "--no-browser", "--which", which).code == 0
        wanted = load_run(run_folder, which).model.state_dict()
        got = served[-1][0].model.state_dict()
        assert all(bool((got[name] == wanted[name]).all()) for name in wanted)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["RUN", "RUN"], "each run may be given once"),
        (["RUN", "RUN", "RUN"], "one network is explored, or two side by side, got 3"),
        (["RUN", "--train", "digits"], "--train trains a network of its own; leave RUN or --train out"),
        (["--train", "digits", "--data", "mnist"], "--data does not go with --train; leave it out"),
        (["--train", "digit"], 'there is no data set "digit"; did you mean "digits"?'),
        (["nothing"], "there is no run folder nothing"),
        (["RUN", "--data", "mnits"], 'there is no data set "mnits"; did you mean "mnist"?'),
        (["RUN", "--port", "99999"], "it must be 0 to 65535, got 99999"),
        (["RUN", "--which", "worst"], "Invalid value for '--which'"),
    ],
)
def test_wrong_input(cli: Cli, run_folder: Path, served: list[Any], arguments: list[str], message: str) -> None:
    result = cli("explore", *(run_folder if argument == "RUN" else argument for argument in arguments))
    assert (result.code, served) == (2, [])
    assert message in result.err
    assert result.err.count("\n") == 1


def test_a_port_that_is_taken(cli: Cli, run_folder: Path) -> None:
    with really_served(Explorer(small_network())) as address:
        port = address.rpartition(":")[2].strip("/")
        result = cli("explore", run_folder, "--no-browser", "--port", port)
    assert (result.code, result.out) == (2, "")
    assert f"port {port} cannot be used: " in result.err


# Says on stderr whom the process looks up or connects to.
WATCHED = """
import sys
def watch(event, arguments):
    if event in ("socket.connect", "socket.getaddrinfo", "socket.gethostbyname"):
        print("TALKS", event, arguments[1:] if event == "socket.connect" else arguments, file=sys.stderr, flush=True)
sys.addaudithook(watch)
from torchcaps.cli import main
sys.exit(main(sys.argv[1:]))
"""


def get(port: int, **headers: str) -> http.client.HTTPResponse:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=20)
    connection.request("GET", "/", headers=headers)
    return connection.getresponse()


UPLOAD = (
    b'--x\r\nContent-Disposition: form-data; name="files"; filename="a.txt"\r\n\r\n' + bytes(2**20) + b"\r\n--x--\r\n"
)


def post(port: int, path: str, body: bytes, kind: str) -> http.client.HTTPResponse:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=20)
    connection.request("POST", path, body, {"Content-Type": kind})
    return connection.getresponse()


@pytest.mark.skipif(sys.platform == "win32", reason="on Windows no Ctrl-C can be sent to another process alone")
@pytest.mark.parametrize("how_it_ends", [signal.SIGINT, signal.SIGTERM])
def test_it_serves_this_machine_only_talks_to_nobody_and_ends_quietly(
    run_folder: Path, digit_file: Path, environment: dict[str, str], tmp_path: Path, how_it_ends: signal.Signals
) -> None:
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    environment |= {"TMPDIR": str(temporary)}
    command = [sys.executable, "-c", WATCHED, "explore", run_folder, "--no-browser", "--port", "0"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        address, port = line.rpartition(" at ")[2].strip(), int(line.rpartition(":")[2])
        assert address == f"http://127.0.0.1:{port}"
        assert process.stdout.readline() == "Ctrl-C ends it.\n"
        response = get(port)
        assert response.status == 200
        policy = response.headers["Content-Security-Policy"]
        assert "default-src 'none'" in policy
        assert "connect-src 'self'" in policy
        assert "http" not in policy
        assert b"torchcaps explorer" in response.read()
        assert get(port, Host="evil.example").status == 400
        assert get(port, Host=f"localhost:{port}").status == 200
        assert post(port, "/upload", UPLOAD, "multipart/form-data; boundary=x").status == 404
        question = {"name": "x.png", "data": base64.b64encode(digit_file.read_bytes()).decode()}
        response = post(port, "/ask/read", json.dumps(question).encode(), "application/json")
        assert list(json.load(response)) == ["pixels", "changes"]
    finally:
        process.send_signal(how_it_ends)
        out, err = process.communicate(timeout=20)
    assert (process.returncode, out) == (0, "")
    assert err == ""
    assert list(temporary.iterdir()) == []


@pytest.mark.skipif(sys.platform == "win32", reason="on Windows no Ctrl-C can be sent to another process alone")
@pytest.mark.parametrize("when", ["while it trains", "afterwards"])
def test_a_network_is_watched_and_ctrl_c_ends_both(environment: dict[str, str], tmp_path: Path, when: str) -> None:
    small = "import torchcaps.cli.explore as e; e.WATCHED |= {'conv_channels': 8, 'primary_types': 2, "
    small += f"'decoder_hidden': (16,), 'epochs': {1000 if when == 'while it trains' else 1}}}; "
    code = small + "import sys; from torchcaps.cli import main; sys.exit(main(sys.argv[1:]))"
    command = [sys.executable, "-c", code, "explore", "--train", "digits", "--no-browser", "--port", "0"]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment, cwd=tmp_path
    )
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        assert line.startswith("Exploring sabour2017: learning on UCI handwritten digits")
        port = int(line.rpartition(":")[2])
        awaited = "epoch 2/" if when == "while it trains" else "Next"
        while awaited not in process.stdout.readline():
            pass
        now = json.load(post(port, "/ask/progress", b"{}", "application/json"))
        assert now["isRunning"] is (when == "while it trains")
        assert len(now["loss"]) > 1
        assert [len(now[name]) for name in ("scores", "seen", "right", "decoded")] == [10] * 4
        assert len(now["accuracy"]) >= 1
    finally:
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=60)
    assert process.returncode == (130 if when == "while it trains" else 0)
    assert "Traceback" not in err
    run = tmp_path / "runs" / "sabour2017-digits-1"
    assert (run / "last.ckpt").exists()
    assert (run / "summary.json").exists() is (when == "afterwards")
    if when == "while it trains":
        assert "go on with: torchcaps train --resume runs/sabour2017-digits-1" in err
