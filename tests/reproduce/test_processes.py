from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path
from threading import Thread

import pytest

from child_work import answer, die, fail, wait_for_a_signal, wait_for_two_signals
from torchcaps.errors import InputError
from torchcaps.reproduce.processes import Interrupted, in_process


def test_a_function_answers_from_a_process_of_its_own() -> None:
    pid, number = in_process(answer, 3, plus=4)
    assert number == 7
    assert pid != os.getpid()


def test_what_it_raises_is_raised_here() -> None:
    with pytest.raises(InputError, match="this is wrong") as caught:
        in_process(fail, "this is wrong")
    assert any("in fail" in note for note in caught.value.__notes__), "where it was raised is kept"


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no kill -9")
def test_a_process_that_is_killed_is_an_error() -> None:
    with pytest.raises(ChildProcessError, match="code -9"):
        in_process(die)


@pytest.mark.skipif(sys.platform == "win32", reason="on Windows no signal reaches another process: it just ends")
def test_a_signal_is_passed_on_and_the_work_is_waited_for(tmp_path: Path) -> None:
    started, stopped = tmp_path / "started", tmp_path / "stopped"

    def interrupt() -> None:
        while not started.exists():
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGINT)

    Thread(target=interrupt, daemon=True).start()
    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(Interrupted) as caught:
        in_process(wait_for_a_signal, str(started), str(stopped))
    assert caught.value.exit_code == 130
    assert stopped.exists()
    assert signal.getsignal(signal.SIGINT) is before


@pytest.mark.skipif(sys.platform == "win32", reason="on Windows no signal reaches another process: it just ends")
def test_a_second_signal_ends_the_work_at_once(tmp_path: Path) -> None:
    started, noted = tmp_path / "started", tmp_path / "noted"

    def interrupt_twice() -> None:
        for file in (started, noted):
            while not file.exists():
                time.sleep(0.01)
            os.kill(os.getpid(), signal.SIGINT)

    Thread(target=interrupt_twice, daemon=True).start()
    with pytest.raises(Interrupted) as caught:
        in_process(wait_for_two_signals, str(started), str(noted))
    assert caught.value.exit_code == 130
