"""``torchcaps explore``: what it opens, what it says, and that it talks to nobody."""

from __future__ import annotations

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
from torchcaps.training import load_run

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


def test_the_page_is_opened(cli: Cli, run_folder: Path, served: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[str] = []
    monkeypatch.setattr(webbrowser, "open", opened.append)
    result = cli("explore", run_folder)
    for thread in threading.enumerate():
        if thread is not threading.current_thread() and thread.daemon:
            thread.join(5)
    title = "run: sabour2017, trained on UCI handwritten digits, 8×8 brought to 28×28"
    assert (result.code, result.out) == (0, f"Exploring {title} at http://127.0.0.1:7860\nCtrl-C ends it.\n")
    assert opened == ["http://127.0.0.1:7860"]
    [(explorer, port)] = served
    assert (explorer.title, port) == (title, None)
    assert explorer.images is not None


def test_which_networks_are_opened(cli: Cli, run_folder: Path, served: list[Any]) -> None:
    assert cli("explore", "--no-browser").code == 0
    assert served[-1][0].name == "compact"
    for which in ("best", "last"):
        assert cli("explore", run_folder, "--no-browser", "--which", which, "--port", "8000").code == 0
        wanted, got = load_run(run_folder, which).model.state_dict(), served[-1][0].model.state_dict()
        assert all(bool((got[name] == wanted[name]).all()) for name in wanted)
        assert served[-1][1] == 8000
    shutil.copytree(run_folder, "other")
    result = cli("explore", run_folder, "other", "--no-browser")
    assert [explorer.name for explorer, _ in served[-2:]] == ["run", "other"]
    assert " and other: sabour2017, trained on " in result.out
    shutil.copytree(run_folder, "there/run")
    assert cli("explore", run_folder, "there/run", "--no-browser").code == 0
    assert served[-1][0].name == "there/run"


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


def ask(port: int, method: str, path: str, body: bytes | None = None) -> http.client.HTTPResponse:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=20)
    connection.request(method, path, body, {} if body is None else {"Content-Type": "application/json"})
    return connection.getresponse()


@pytest.mark.slow
@pytest.mark.skipif(sys.platform == "win32", reason="on Windows no Ctrl-C can be sent to another process alone")
@pytest.mark.parametrize("how_it_ends", [signal.SIGINT, signal.SIGTERM])
def test_it_talks_to_nobody_and_ends_quietly(
    run_folder: Path, environment: dict[str, str], tmp_path: Path, how_it_ends: signal.Signals
) -> None:
    (temporary := tmp_path / "temporary").mkdir()
    environment |= {"TMPDIR": str(temporary)}
    command = [sys.executable, "-c", WATCHED, "explore", run_folder, "--no-browser", "--port", "0"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        address, port = line.rpartition(" at ")[2].strip(), int(line.rpartition(":")[2])
        assert address == f"http://127.0.0.1:{port}"
        assert process.stdout.readline() == "Ctrl-C ends it.\n"
        response = ask(port, "GET", "/")
        assert (response.status, b"torchcaps explorer" in response.read()) == (200, True)
        assert list(json.load(ask(port, "POST", "/ask/pick", b'{"index": 0}'))) == ["pixels", "label"]
    finally:
        process.send_signal(how_it_ends)
        out, err = process.communicate(timeout=20)
    assert (process.returncode, out, err) == (0, "", "")
    assert list(temporary.iterdir()) == []


@pytest.mark.slow
@pytest.mark.skipif(sys.platform == "win32", reason="on Windows no Ctrl-C can be sent to another process alone")
@pytest.mark.parametrize("when", ["while it trains", "afterwards"])
def test_a_network_is_watched_and_ctrl_c_ends_both(environment: dict[str, str], tmp_path: Path, when: str) -> None:
    small = {"conv_channels": 8, "primary_types": 2, "decoder_hidden": (16,)}
    small |= {"epochs": 1000 if when == "while it trains" else 1}
    code = "import functools, torchcaps.training as t; "
    code += f"t.make_config = functools.partial(t.make_config, **{small}); "
    code += "import sys; from torchcaps.cli import main; sys.exit(main(sys.argv[1:]))"
    command = [sys.executable, "-c", code, "explore", "--train", "digits", "--no-browser", "--port", "0"]
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    process = subprocess.Popen(command, env=environment, cwd=tmp_path, **pipes)
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        assert line.startswith("Exploring first: learning on UCI handwritten digits")
        port = int(line.rpartition(":")[2])
        awaited = "epoch 2/" if when == "while it trains" else "Next"
        while awaited not in process.stdout.readline():
            pass
        now = json.load(ask(port, "POST", "/ask/progress", b"{}"))
        assert now["isRunning"] is (when == "while it trains")
        assert len(now["loss"]) > 1
        assert [len(now[name]) for name in ("scores", "seen", "right", "decoded")] == [10] * 4
        assert len(now["accuracy"]) >= 1
    finally:
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=60)
    assert process.returncode == (130 if when == "while it trains" else 0)
    assert "Traceback" not in err
    run = tmp_path / "runs" / "first-digits-1"
    assert (run / "last.ckpt").exists()
    assert (run / "summary.json").exists() is (when == "afterwards")
    if when == "while it trains":
        assert "go on with: torchcaps train --resume runs/first-digits-1" in err
