"""Python processes that start in a moment: forked from a server that imported torchcaps once.

A new interpreter needs about five seconds of processor time to import what training needs. The forked process is as
much a process of its own: with its own standard output, folder, environment and signals. Without fork, on Windows, an
interpreter is started.
"""

from __future__ import annotations

import atexit
import multiprocessing
import os
import runpy
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from unittest import mock

PRELOADED = [
    *("torchcaps.cli.train", "torchcaps.cli.explore", "torchcaps.training.run", "torchcaps.explorer"),
    *("torchcaps.datasets.sources", "sklearn.datasets", "sklearn.model_selection", "torch._dynamo"),
]
HAS_FORK = "forkserver" in multiprocessing.get_all_start_methods()


class Forked:
    """The parts of ``subprocess.Popen`` that tests use; standard error goes to ``stdout`` too."""

    def __init__(self, words: Sequence[str], environment: Mapping[str, str]) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(PRELOADED)
        reader, writer = context.Pipe(duplex=False)
        given = (list(words), dict(environment), str(Path.cwd()), writer)
        self._process = context.Process(target=_enter, args=given, daemon=True)
        with mock.patch.dict(os.environ, OMP_NUM_THREADS="1"):  # read by the server when it imports torch
            self._process.start()
        writer.close()
        self.pid: int = self._process.pid
        self.stdout = os.fdopen(os.dup(reader.fileno()), encoding="utf-8")
        reader.close()

    @property
    def returncode(self) -> int | None:
        return self._process.exitcode

    def poll(self) -> int | None:
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        self._process.join(timeout)
        assert self.returncode is not None, f"the process has not ended within {timeout} s"
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self._process.kill()

    def communicate(self, timeout: float) -> tuple[str, None]:
        """Return all output that was not read yet; after so many seconds the process is killed."""
        killer = threading.Timer(timeout, self.kill)
        killer.start()
        with self.stdout:
            said = self.stdout.read()
        self.wait(timeout)
        killer.cancel()
        return said, None


def start(*words: object, environment: Mapping[str, str] = os.environ) -> Forked | subprocess.Popen[str]:
    """Start Python with words as on its command line: ``-m MODULE …``, ``-c CODE …`` or ``SCRIPT …``."""
    texts, environment = [os.fspath(word) if isinstance(word, Path) else str(word) for word in words], dict(environment)
    environment |= {"OMP_NUM_THREADS": "1"}
    if HAS_FORK:
        return Forked(texts, environment)
    pipe, both = subprocess.PIPE, subprocess.STDOUT
    return subprocess.Popen([sys.executable, *texts], env=environment, stdout=pipe, stderr=both, text=True)


def _enter(words: list[str], environment: dict[str, str], folder: str, writer: Connection) -> None:
    """Become the process: all as a new interpreter would have it."""
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    for output in (1, 2):
        os.dup2(writer.fileno(), output)
    writer.close()
    sys.stdout = open(1, "w", closefd=False)  # noqa: SIM115  the server's are of its files
    sys.stderr = open(2, "w", buffering=1, errors="backslashreplace", closefd=False)  # noqa: SIM115
    first, *rest = words
    if first in ("-m", "-c"):
        what, *rest = rest
        sys.argv = [first, *rest]
    try:
        if first == "-m":
            runpy.run_module(what, run_name="__main__", alter_sys=True)
        elif first == "-c":
            exec(compile(what, "<string>", "exec"), {"__name__": "__main__"})
        else:
            sys.argv, sys.path = words, [str(Path(first).parent), *sys.path]
            runpy.run_path(first, run_name="__main__")
    finally:
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
