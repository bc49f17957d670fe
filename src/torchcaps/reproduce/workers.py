"""Calls that have a process each, several at a time: on this machine, or on the workers of a dask cluster.

A process of its own gives a run its own peak memory, and no run can break another. joblib hands out the calls. Its own
worker processes would not do: each takes many calls, one that is killed takes all others with it, and Ctrl-C kills them
before a run has written its checkpoint. So each of joblib's threads starts a process, or lets a dask worker start it,
and waits for it.
"""

from __future__ import annotations

import asyncio
import logging
import os
import pickle
import signal
import subprocess
import sys
import traceback
import warnings
from collections import defaultdict
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from concurrent.futures import CancelledError
from contextlib import suppress
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from threading import Thread
from typing import TYPE_CHECKING, Any, Self, TypeVar
from uuid import uuid4

from torchcaps._version import __version__
from torchcaps.errors import InputError, reason_of, shown
from torchcaps.machine import usable_cores
from torchcaps.plugins import load_plugin, loaded_plugins
from torchcaps.training.signals import noted_signals

if TYPE_CHECKING:
    from distributed import Client

A = TypeVar("A")
T = TypeVar("T")

#: Seconds within which a scheduler must answer and have a worker.
PATIENCE = 10.0
#: What dask raises where the scheduler is lost.
_LOST = (OSError, CancelledError)

#: The processes that this process has started, by the group of calls that they belong to; and groups that were stopped.
_RUNNING: defaultdict[str, set[subprocess.Popen[bytes]]] = defaultdict(set)
_STOPPED: set[str] = set()


class Interrupted(Exception):  # noqa: N818  no error: the user asked for it
    """A signal stopped the work; what was done is kept.

    Args:
        exit_code: 128 + the signal's number.
    """

    def __init__(self, exit_code: int) -> None:
        super().__init__(exit_code)
        self.exit_code = exit_code


class Workers:
    """Where calls are made. It is a context, whose end closes the connection to a cluster.

    Args:
        jobs: How many calls this machine makes at a time. They share its cores, unless the environment variable
            ``OMP_NUM_THREADS`` says how many threads each of them has.
        cluster: The address of a dask scheduler, whose workers make the calls; this machine makes them if None.

    Raises:
        InputError: The package ``distributed`` is missing, no scheduler answers, it has no workers, or they have no
            torchcaps or another version.
    """

    def __init__(self, jobs: int = 1, cluster: str | None = None) -> None:
        self._jobs, self._client = jobs, None if cluster is None else _connect(cluster)
        self._environment = {"OMP_NUM_THREADS": str(max(1, usable_cores() // jobs))} if jobs > 1 else {}

    @property
    def share_output(self) -> bool:
        """Whether several calls may print to one place at a time."""
        return self._jobs > 1 or self._client is not None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._client is not None:
            self._client.close()

    def each(
        self, function: Callable[[A], T], arguments: Iterable[A]
    ) -> Generator[tuple[A, T | Exception], None, None]:
        """Call a function with each argument, in a fresh process each time.

        A stop signal, or closing this generator, stops the calls as SIGTERM would, and waits for them: a run that
        trains writes its checkpoint then. A second signal ends them at once; each file is then as it was, or whole.

        Args:
            function: One that can be pickled, as can what it takes, returns and raises.
            arguments: What it is called with.

        Yields:
            An argument with what the function returned or raised for it, which is a ``ChildProcessError`` where the
            process was killed or the cluster was lost; in the order in which the calls end.

        Raises:
            Interrupted: Ctrl-C or SIGTERM.
        """
        from joblib import Parallel, delayed

        arguments, group = list(arguments), uuid4().hex
        call = partial(_call, group, self._environment, loaded_plugins(), function)
        if self._client is None:
            jobs = self._jobs
        else:  # a thread waits for each call, and the scheduler gives them to its workers
            jobs, call = max(1, len(arguments)), partial(_call_on_cluster, self._client, call)
        parallel = Parallel(
            jobs, backend="threading", batch_size=1, pre_dispatch="all", return_as="generator_unordered"
        )

        def react() -> None:
            if len(received) == 1:
                raise Interrupted(128 + received[0])
            self._everywhere(_terminate, group)

        with noted_signals(react) as received:
            answers: Generator[tuple[A, T | Exception], None, None] | None = None
            try:
                answers = parallel(delayed(call)(argument) for argument in arguments)
                for answer in answers:  # noqa: UP028  yield from would close them before their processes are ended
                    yield answer
            except BaseException:
                self._everywhere(_stop, group)
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")  # joblib's, about answers that nobody takes any more
                    if answers is not None:
                        answers.close()
                raise

    def _everywhere(self, function: Callable[[str], None], group: str) -> None:
        """Let this machine, or each worker of the cluster, do something with its processes of a group."""
        if self._client is None:
            function(group)
        elif self._client.status == "running":  # else the workers end, and with them what they started
            with suppress(*_LOST):
                self._client.run(asyncio.to_thread, function, group)


def _connect(address: str) -> Client:
    """Connect to a dask scheduler whose workers can make calls."""
    try:
        from distributed import Client
    except ImportError:
        raise InputError('--cluster needs the package distributed: pip install "torchcaps[cluster]"') from None
    logging.getLogger("distributed").setLevel(logging.CRITICAL)  # its messages repeat what is raised
    try:
        asyncio.run(_greet(address))
        client = Client(address, timeout=PATIENCE, set_as_default=False)
    except (OSError, ValueError, TypeError) as error:
        raise InputError(
            f"no dask scheduler answers at {shown(address)}: {reason_of(error)}; start one by the command dask "
            "scheduler, and give the address that it shows, such as tcp://192.168.0.1:8786"
        ) from None
    try:
        client.wait_for_workers(1, timeout=PATIENCE)
        found = set(client.run(_version, on_error="return").values())
    except _LOST:
        client.close()
        raise InputError(
            f"the dask scheduler at {address} has no workers; start some by the command dask worker {address}"
        ) from None
    if found != {__version__}:
        client.close()
        others = ", ".join(sorted(f"{reason_of(each)}" if isinstance(each, Exception) else str(each) for each in found))
        raise InputError(f"each worker of the cluster must have torchcaps {__version__}, got: {others}")
    return client


async def _greet(address: str) -> None:
    """See that a dask scheduler answers: ``Client`` would wait for ever for another kind of server."""
    from distributed.comm.core import connect
    from distributed.security import Security

    arguments = Security().get_connection_args("client")
    comm = await asyncio.wait_for(connect(address, timeout=PATIENCE, **arguments), PATIENCE)
    await comm.close()


def _version() -> str:
    return __version__


def _call_on_cluster(client: Client, call: Callable[[A], tuple[A, Any]], argument: A) -> tuple[A, Any]:
    """Let a worker of a cluster make a call."""
    try:
        return client.submit(call, argument, pure=False).result()
    except Interrupted:  # as below
        raise
    except (Exception, CancelledError) as error:
        reason = f"the cluster did not finish the run: {reason_of(error)}; the same command goes on from its checkpoint"
        return argument, ChildProcessError(reason)


def _call(
    group: str, environment: Mapping[str, str], plugins: Sequence[str], function: Callable[[A], T], argument: A
) -> tuple[A, Any]:
    """Make a call in a process of its own; what it raises comes back as what it returns does."""
    variables = {**environment, **os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    if group in _STOPPED:
        return argument, ChildProcessError("the run was stopped before it began")
    try:
        call = pickle.dumps((function, argument))
        with TemporaryDirectory() as folder:
            file = Path(folder, "answer")
            # a process group of its own: the terminal's Ctrl-C reaches only this process, which passes it on
            with subprocess.Popen(
                [sys.executable, "-P", "-m", __name__, str(file), *plugins],
                stdin=subprocess.PIPE,
                env=variables,
                process_group=0,
            ) as process:
                assert process.stdin is not None
                with suppress(BrokenPipeError):  # it was killed already
                    process.stdin.write(call)
                    process.stdin.flush()
                _RUNNING[group].add(process)
                if group in _STOPPED:
                    process.stdin.close()
                process.wait()
            _RUNNING[group].discard(process)
            if file.exists():
                return argument, pickle.loads(file.read_bytes())
    except Interrupted:  # in the main thread, which joblib uses where there is one call
        raise
    except Exception as error:
        return argument, error
    reason = f"the process of the run ended with code {process.returncode} before its work was done"
    return argument, ChildProcessError(f"{reason}, perhaps for want of memory; the same command goes on from there")


def _stop(group: str) -> None:
    """Stop the processes that this process has started for a group, and wait for them."""
    _STOPPED.add(group)
    running = list(_RUNNING[group])
    for process in running:
        assert process.stdin is not None
        process.stdin.close()
    for process in running:
        process.wait()


def _terminate(group: str) -> None:
    """End the processes of a group at once; without waiting, as a signal handler calls this in the midst of a wait."""
    for process in list(_RUNNING[group]):
        process.terminate()


# in the process of a call


def _serve(file: Path, plugins: Sequence[str]) -> None:
    """Make the call that stands on the standard input, and write its answer, whole, to a file."""
    for plugin in plugins:
        load_plugin(plugin)
    function, argument = pickle.load(sys.stdin.buffer)
    Thread(target=_end_with_caller, daemon=True).start()
    try:
        answer = function(argument)
    except Exception as error:
        error.add_note(traceback.format_exc())  # pickling leaves the traceback out
        answer = error
    part = file.with_suffix(".part")
    with suppress(FileNotFoundError):  # nobody waits for it any more
        part.write_bytes(pickle.dumps(answer))
        part.rename(file)


def _end_with_caller() -> None:
    """Stop this process once its standard input is closed: its caller wants it to stop, or is gone."""
    os.read(sys.stdin.fileno(), 1)
    signal.raise_signal(signal.SIGTERM)


if __name__ == "__main__":
    _serve(Path(sys.argv[1]), sys.argv[2:])
