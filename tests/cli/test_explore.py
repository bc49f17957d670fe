"""``torchcaps explore``: what it opens, what it says, and that it talks to nobody."""

import http.client
import json
import shutil
import signal
import sys
import threading
import webbrowser
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import pytest

import processes
from cli_support import Cli
from tiny_runs import same_weights
from torchcaps.explorer import Explorer
from torchcaps.training import load_run


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
    opened = threading.Event()
    monkeypatch.setattr(webbrowser, "open", lambda url: opened.set() if url == "http://127.0.0.1:7860" else None)
    result = cli("explore", run_folder)
    title = "run: first, trained on UCI handwritten digits, 8×8 resized to 28×28"
    assert (result.code, result.out) == (0, f"Exploring {title} at http://127.0.0.1:7860\nCtrl-C ends it.\n")
    assert opened.wait(5)
    [(explorer, port)] = served
    assert (explorer.title, port) == (title, None)
    assert explorer.images is not None


def test_which_networks_are_opened(cli: Cli, run_folder: Path, served: list[Any]) -> None:
    cli("explore", "--no-browser")
    assert served[-1][0].name == "compact"
    for which in ("best", "last"):
        assert cli("explore", run_folder, "--no-browser", "--which", which, "--port", "8000").code == 0
        assert same_weights(served[-1][0].model.state_dict(), load_run(run_folder, which).model.state_dict())
        assert served[-1][1] == 8000
    shutil.copytree(run_folder, "there/run")
    result = cli("explore", run_folder, "there/run", "--no-browser")
    assert served[-1][0].name == "there/run"
    assert " and there/run: first, trained on " in result.out


WATCHED = """
import sys
def watch(event, arguments):
    if event in ("socket.connect", "socket.getaddrinfo", "socket.gethostbyname"):
        print("TALKS", event, arguments[1:] if event == "socket.connect" else arguments, file=sys.stderr, flush=True)
sys.addaudithook(watch)
from torchcaps.cli import main
sys.exit(main(sys.argv[1:]))
"""
"""Says whom the process looks up or connects to."""


def ask(port: int, question: str, body: bytes) -> dict[str, Any]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=20)
    connection.request("POST", f"/ask/{question}", body, {"Content-Type": "application/json"})
    return json.load(connection.getresponse())


@pytest.mark.slow
@pytest.mark.skipif(sys.platform == "win32", reason="on Windows no Ctrl-C can be sent to another process alone")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_it_talks_to_nobody_and_a_signal_ends_it(run_folder: Path, environment: dict[str, str], number: int) -> None:
    words = ("explore", run_folder, "--no-browser", "--port", "0")
    process = processes.start("-c", WATCHED, *words, environment=environment)
    said = []
    try:
        line = process.stdout.readline()
        port = int(line.rpartition(" at http://127.0.0.1:")[2])
        for each in process.stdout:
            said.append(each)
            if "Ctrl-C ends it." in each:
                break
        assert ask(port, "pick", b'{"index": 0}').keys() == {"pixels", "label"}
    finally:
        process.send_signal(number)
        rest, _ = process.communicate(timeout=60)
    assert process.returncode == 0
    assert not [word for word in ("Traceback", "TALKS") if word in "".join([*said, rest])]
