from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from threading import Thread
from typing import Any

import pytest

from child_work import answer, die_at, fail, number_or_wait, threads, wait_for_a_signal, wait_for_two_signals
from torchcaps.errors import InputError
from torchcaps.machine import usable_cores
from torchcaps.reproduce import Interrupted, Workers, workers

posix = pytest.mark.skipif(sys.platform == "win32", reason="on Windows no signal reaches another process: it just ends")
one_and_two = pytest.mark.parametrize("jobs", [1, 2])


def wait_until(done: Callable[[], bool], otherwise: str) -> None:
    deadline = time.monotonic() + 100
    while not done():
        assert time.monotonic() < deadline, otherwise
        time.sleep(0.01)


def wait_for(file: Path) -> None:
    wait_until(file.exists, f"there is no {file.name}")


def interrupt_when(*events: Callable[[], bool]) -> None:
    """Send this process a Ctrl-C each time that one of these has happened, in their order."""

    def interrupt() -> None:
        for event in events:
            wait_until(event, "what Ctrl-C waits for did not happen")
            os.kill(os.getpid(), signal.SIGINT)

    Thread(target=interrupt, daemon=True).start()


@one_and_two
def test_each_call_has_a_process_of_its_own(jobs: int) -> None:
    answers = dict(Workers(jobs).each(answer, [1, 2, 3]))
    assert [answers[number][1] for number in (1, 2, 3)] == [2, 3, 4]  # type: ignore[index]
    assert len({os.getpid(), *(pid for pid, _ in answers.values())}) == 4  # type: ignore[misc]


def test_calls_at_a_time_share_the_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    assert list(Workers(1).each(threads, [0])) == [(0, None)]
    assert list(Workers(2).each(threads, [0])) == [(0, str(max(1, usable_cores() // 2)))]
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    assert list(Workers(2).each(threads, [0])) == [(0, "7")]


def test_what_a_call_raises_is_its_answer() -> None:
    ((_, error),) = Workers().each(fail, ["this is wrong"])
    assert isinstance(error, InputError)
    assert str(error) == "this is wrong"
    assert any("in fail" in note for note in error.__notes__), "where it was raised is kept"


@posix
@one_and_two
def test_a_process_that_is_killed_takes_no_other_with_it(jobs: int) -> None:
    answers = dict(Workers(jobs).each(die_at, [0, 1, 2]))
    killed = answers.pop(1)
    assert isinstance(killed, ChildProcessError)
    assert "code -9" in str(killed)
    assert answers == {0: 0, 2: 2}


@posix
@one_and_two
def test_a_signal_is_passed_on_and_the_work_is_waited_for(tmp_path: Path, jobs: int) -> None:
    interrupt_when((tmp_path / "started").exists)
    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(Interrupted) as caught:
        list(Workers(jobs).each(wait_for_a_signal, [str(tmp_path)]))
    assert caught.value.exit_code == 130
    assert (tmp_path / "stopped").exists()
    assert signal.getsignal(signal.SIGINT) is before


@posix
@one_and_two
def test_a_second_signal_ends_the_work_at_once(tmp_path: Path, jobs: int) -> None:
    interrupt_when((tmp_path / "started").exists, (tmp_path / "noted").exists)
    with pytest.raises(Interrupted) as caught:
        list(Workers(jobs).each(wait_for_two_signals, [str(tmp_path)]))
    assert caught.value.exit_code == 130


@posix
def test_who_leaves_the_answers_stops_the_calls(tmp_path: Path) -> None:
    answers = Workers(2).each(number_or_wait, [1, str(tmp_path)])
    assert next(answers) == (1, 2)
    wait_for(tmp_path / "started")
    answers.close()
    assert (tmp_path / "stopped").exists()


@posix
def test_a_call_stops_when_its_caller_is_killed(tmp_path: Path) -> None:
    script = (
        "from child_work import wait_for_a_signal\n"
        "from torchcaps.reproduce import Workers\n"
        f"list(Workers().each(wait_for_a_signal, [{str(tmp_path)!r}]))\n"
    )
    path = os.pathsep.join(filter(None, sys.path))
    caller = subprocess.Popen([sys.executable, "-c", script], env=os.environ | {"PYTHONPATH": path})
    wait_for(tmp_path / "started")
    caller.kill()
    caller.wait()
    wait_for(tmp_path / "stopped")


# clusters


def test_without_its_package_a_cluster_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "distributed", None)
    with pytest.raises(InputError, match=r'needs the package distributed: pip install "torchcaps\[cluster\]"'):
        Workers(cluster="tcp://127.0.0.1:8786")


@pytest.fixture
def no_scheduler(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The address of a server that never answers."""
    pytest.importorskip("distributed")
    monkeypatch.setattr(workers, "PATIENCE", 0.5)
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen()
        yield f"tcp://127.0.0.1:{server.getsockname()[1]}"


@pytest.mark.parametrize("address", [None, "tcp://127.0.0.1:1", "nonsense", "", "foo://x:1", "tcp://x:y", "tls://x:1"])
def test_an_address_without_a_scheduler(no_scheduler: str, address: str | None) -> None:
    with pytest.raises(InputError, match="no dask scheduler answers at ") as caught:
        Workers(cluster=no_scheduler if address is None else address)
    assert "\n" not in str(caught.value)


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    """A scheduler with two workers on this machine."""
    distributed = pytest.importorskip("distributed")
    with distributed.LocalCluster(n_workers=2, threads_per_worker=1, dashboard_address=None) as made:
        yield made


def test_a_scheduler_needs_workers_of_this_version(cluster: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workers, "__version__", "another")
    with pytest.raises(InputError, match="each worker of the cluster must have torchcaps another, got: "):
        Workers(cluster=cluster.scheduler_address)


def test_a_scheduler_without_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    distributed = pytest.importorskip("distributed")
    monkeypatch.setattr(workers, "PATIENCE", 2)
    with (
        distributed.LocalCluster(n_workers=0, dashboard_address=None) as empty,
        pytest.raises(InputError, match="has no workers; start some by the command dask worker tcp"),
    ):
        Workers(cluster=empty.scheduler_address)


@posix
def test_the_workers_of_a_cluster_make_the_calls(cluster: Any) -> None:
    with Workers(cluster=cluster.scheduler_address) as made:
        answers = dict(made.each(answer, [1, 2, 3]))
        assert [answers[number][1] for number in (1, 2, 3)] == [2, 3, 4]  # type: ignore[index]
        assert len({pid for pid, _ in answers.values()}) == 3, "each call has its own process there, too"  # type: ignore[misc]
        answers = dict(made.each(die_at, [0, 1, 2]))
        assert isinstance(answers.pop(1), ChildProcessError)
        assert answers == {0: 0, 2: 2}


@posix
def test_a_signal_stops_the_calls_on_the_cluster(cluster: Any, tmp_path: Path) -> None:
    folders = [tmp_path / name for name in "abc"]
    for folder in folders:
        folder.mkdir()

    def begun() -> list[Path]:
        return [folder for folder in folders if (folder / "started").exists()]

    interrupt_when(lambda: len(begun()) >= 2)  # threads hand out the calls, in any order
    with Workers(cluster=cluster.scheduler_address) as made, pytest.raises(Interrupted) as caught:
        list(made.each(wait_for_a_signal, [str(folder) for folder in folders]))
    assert caught.value.exit_code == 130
    assert len(begun()) == 2, "what waits for a worker never begins"
    assert all((folder / "stopped").exists() for folder in begun())


@posix
def test_a_cluster_that_is_lost_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("distributed")
    monkeypatch.setattr(workers, "PATIENCE", 100)
    file = tmp_path / "scheduler.json"

    def start(role: str, *options: str) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", f"distributed.cli.dask_{role}", "--scheduler-file", str(file), *options]
        path = {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        command.append("--no-dashboard")
        return subprocess.Popen(command, stderr=subprocess.DEVNULL, cwd=tmp_path, env=os.environ | path)

    scheduler = start("scheduler", "--port", "0", "--host", "127.0.0.1")
    wait_for(file)
    worker = start("worker", "--no-nanny", "--nthreads", "1")

    def lose() -> None:
        wait_for(tmp_path / "started")
        scheduler.kill()

    Thread(target=lose, daemon=True).start()
    try:
        with Workers(cluster=json.loads(file.read_text())["address"]) as lost:
            ((_, error),) = lost.each(wait_for_a_signal, [str(tmp_path)])
        assert isinstance(error, ChildProcessError)
        assert "the cluster did not finish the run" in str(error)
        assert (tmp_path / "started").exists()
    finally:
        for process in (scheduler, worker):
            process.kill()
            process.wait()
    wait_for(tmp_path / "stopped")
