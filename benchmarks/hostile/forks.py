"""Trials in processes of their own: forked from one that has imported everything, watched, and ended where need be."""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from hostile.trials import INTERRUPTED, TEMPORARY, Ended, Snapshot, Trial, most_processes, snapshot

MOST_ADDRESSES = 8 * 2**30
"""Bytes that a process may ask for on top of what it began with, so that a trial cannot take the whole machine."""
LOOK_EVERY = 0.005
COUNT_EVERY = 0.25
"""Seconds between two counts of a trial's processes."""


@dataclass
class _Live:
    trial: Trial
    before: Snapshot
    start: float = field(default_factory=time.monotonic)
    counted: float = field(default_factory=time.monotonic)
    interrupted: float | None = None
    hung: bool = False
    processes: int = 1


def run(trials: Iterator[Trial], jobs: int) -> Iterator[tuple[Trial, Ended, Snapshot]]:
    """Run trials, so many at a time.

    Returns:
        Each with how it ended, and what lay in its folder before it began; in the order in which they end.
    """
    live: dict[int, _Live] = {}
    try:
        while True:
            while len(live) < jobs and (trial := next(trials, None)) is not None:
                (trial.folder / TEMPORARY).mkdir(exist_ok=True)
                before = snapshot(trial.folder)
                live[start(partial(_measured, trial), trial.folder, _streams(trial.folder))] = _Live(trial, before)
            if not live:
                return
            time.sleep(LOOK_EVERY)
            for pid, each in list(live.items()):
                ended, status, usage = os.wait4(pid, os.WNOHANG)
                if ended == 0:
                    _watch(pid, each)
                    continue
                del live[pid]
                _end_session(pid)
                yield each.trial, _ended(each, os.waitstatus_to_exitcode(status), usage.ru_maxrss / 1024), each.before
    finally:
        for pid in live:
            _end_session(pid)
            os.waitpid(pid, 0)


def start(work: Callable[[], int], folder: Path, streams: tuple[Path, Path]) -> int:
    """Fork a process that works in a folder and ends with the code that ``work`` returns.

    Args:
        work: What it does.
        folder: Where; its temporary folder is in there.
        streams: Where stdout and stderr go.

    Returns:
        The process, which leads a session of its own.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    if pid := os.fork():
        return pid
    code = 1
    try:
        os.setsid()
        _set_up(folder, streams)
        code = work()
    except KeyboardInterrupt:  # what is tried has ended already, or not begun
        code = INTERRUPTED
    except BaseException:
        traceback.print_exc()
    finally:
        with contextlib.suppress(BaseException):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


def _set_up(folder: Path, streams: tuple[Path, Path]) -> None:
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    for number, path in enumerate(streams, start=1):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND), number)
    # as a terminal in the user's language would be, but for its kind: what is no UTF-8 is for the program to bring over
    sys.stdin = open(0, encoding="utf-8", closefd=False)  # noqa: SIM115  a descriptor, kept for good
    sys.stdout = open(1, "w", encoding="utf-8", closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", encoding="utf-8", errors="backslashreplace", closefd=False, buffering=1)  # noqa: SIM115
    os.chdir(folder)
    os.environ["TMPDIR"] = str(folder / TEMPORARY)
    tempfile.tempdir = None
    signal.signal(signal.SIGINT, signal.default_int_handler)
    most = _address_bytes() + MOST_ADDRESSES
    resource.setrlimit(resource.RLIMIT_AS, (most, most))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def _streams(folder: Path) -> tuple[Path, Path]:
    """Beside the folder, for they are no files of the trial's."""
    return folder.with_suffix(".out"), folder.with_suffix(".err")


def _base(folder: Path) -> Path:
    """Says how much memory a trial began with, MiB."""
    return folder.with_suffix(".base")


def _measured(trial: Trial) -> int:
    # what is in files and mapped is not counted before it is used: the process itself says what it began with
    _base(trial.folder).write_text(str(_status("VmRSS") / 1024))
    return trial.work()


def _ended(live: _Live, code: int, peak_mib: float) -> Ended:
    out, err = (path.read_text(encoding="utf-8", errors="replace") for path in _streams(live.trial.folder))
    seconds = time.monotonic() - live.start
    memory = max(0.0, peak_mib - float(_base(live.trial.folder).read_text()))
    return Ended(code, seconds, memory, out, err, live.hung, live.interrupted is not None, live.processes)


def _watch(pid: int, live: _Live) -> None:
    """Interrupt or kill a trial where its time is up, or where it starts processes without end."""
    rules, now = live.trial.rules, time.monotonic()
    if now - live.counted > COUNT_EVERY:
        live.counted, live.processes = now, max(live.processes, _count_session(pid))
    begin = live.interrupted or live.start
    if rules.interrupt is not None and live.interrupted is None:
        if now - live.start > rules.interrupt:
            live.interrupted = now
            os.kill(pid, signal.SIGINT)
    elif now - begin > rules.timeout:
        live.hung = True
    if live.hung or live.processes > most_processes():
        live.hung = True
        _end_session(pid)


def _end_session(pid: int) -> None:
    """Kill a trial and what it has started."""
    for _ in range(100):  # they may start others meanwhile
        members = _session(pid)
        for member in (pid, *members):
            with contextlib.suppress(ProcessLookupError):
                if member != pid or os.getpgid(pid) == pid:
                    os.kill(member, signal.SIGKILL)
        if not members - {pid}:
            return
        time.sleep(0.01)


def _count_session(pid: int) -> int:
    return max(1, len(_session(pid)))


def _session(leader: int) -> set[int]:
    """The living processes of a session, where the system lists them."""
    found = set()
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            # after the name, which may hold anything: state, parent, group, session
            state, _, _, session = (entry / "stat").read_text(errors="replace").rpartition(")")[2].split()[:4]
            if int(session) == leader and state != "Z":
                found.add(int(entry.name))
    return found


def _address_bytes() -> int:
    return _status("VmSize") * 1024


def _status(name: str) -> int:
    """A number of /proc/self/status, KiB."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1])
    raise LookupError(name)
