"""The process that opens and runs an ONNX file for `OnnxModel`: a script that imports nothing of torchcaps.

Usage: ``python onnx_worker.py FILE THREADS MEMORY SECONDS``. It reads arrays from standard input and answers on
standard output: once when the file is open, then once for each array. A message is a line of JSON with the dtype and
shape of each of its arrays, followed by their bytes.
"""

from __future__ import annotations

import json
import math
import os
import signal
import sys
from pathlib import Path
from typing import IO, Any

import numpy as np

OUT_OF_MEMORY = "memory"
"""An error's word for memory that does not suffice."""
STACK = 8 * 2**20
"""Bytes of address space for the stack of a thread."""


def main(path: str, threads: int, memory: int, seconds: float) -> None:
    """Open a file and run it for each array on standard input; end with the input.

    Args:
        path: The ONNX file.
        threads: How many threads compute; 0 stands for one a core.
        memory: Bytes that this process may take from now on; enforced on Linux.
        seconds: How long an answer may take. The caller ends this process then; if the caller is gone, an alarm does.
    """
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "wb")
    with Path(os.devnull).open("wb") as nowhere:
        os.dup2(nowhere.fileno(), sys.stdout.fileno())  # libraries that print do not disturb the answers
    import onnxruntime

    onnxruntime.set_default_logger_severity(4)  # what goes wrong comes as an exception too
    options: Any = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    options.intra_op_num_threads = threads
    grow_as_requested(onnxruntime)
    options.add_session_config_entry("session.use_env_allocators", "1")
    limit_memory(memory + STACK * (threads or os.cpu_count() or 1))
    alarm(seconds)
    try:
        session = onnxruntime.InferenceSession(Path(path).read_bytes(), options, providers=["CPUExecutionProvider"])
        about = session.get_modelmeta().custom_metadata_map
        inputs = [[each.name, each.shape] for each in session.get_inputs()]
        outputs = [each.name for each in session.get_outputs()]
    except Exception as error:  # onnxruntime's exceptions have no common class of their own
        send(answers, error=words_of(error))
        return
    alarm(0)
    send(answers, metadata=about, inputs=inputs, outputs=outputs)
    while (images := receive(sys.stdin.buffer)) is not None:
        alarm(seconds)
        try:
            send(answers, *session.run(None, {inputs[0][0]: images[1][0]}))
        except Exception as error:  # likewise
            send(answers, error=words_of(error))
        alarm(0)


def send(stream: IO[bytes], *arrays: np.ndarray, **facts: Any) -> None:
    """Write facts and arrays.

    Raises:
        TypeError: An array is none, or one of objects; nothing is written then.
    """
    if any(not isinstance(each, np.ndarray) or each.dtype.hasobject for each in arrays):
        raise TypeError("an output is no array of numbers")
    kinds = [[each.dtype.str, each.shape] for each in arrays]
    stream.write(json.dumps({"arrays": kinds, **facts}).encode() + b"\n")
    for each in arrays:
        stream.write(np.ascontiguousarray(each).data.cast("B") if each.size else b"")
    stream.flush()


def receive(stream: IO[bytes]) -> tuple[dict[str, Any], list[np.ndarray]] | None:
    """Read facts and arrays; None if the stream ended before or within a message."""
    line = stream.readline()
    if not line.endswith(b"\n"):
        return None
    facts, arrays = json.loads(line), []
    for name, shape in facts["arrays"]:
        dtype = np.dtype(name)
        contents = stream.read(size := dtype.itemsize * math.prod(shape))
        if len(contents) < size:
            return None
        arrays.append(np.frombuffer(contents, dtype).reshape(shape))
    return facts, arrays


def alarm(seconds: float) -> None:
    """End this process after twice the seconds; 0 calls it off. Windows has no alarm."""
    if hasattr(signal, "setitimer"):
        signal.setitimer(signal.ITIMER_REAL, 2 * seconds)


def limit_memory(more: int) -> None:
    """Let this process take so many bytes more, where the system can hold it to that: on Linux."""
    if sys.platform != "linux":
        return
    import resource

    data = int(Path("/proc/self/statm").read_text().split()[5]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_DATA, (data + more, data + more))


def grow_as_requested(onnxruntime: Any) -> None:
    """Let the memory that onnxruntime keeps grow by what is needed, not by powers of two."""
    where = onnxruntime.OrtMemoryInfo(
        "Cpu", onnxruntime.OrtAllocatorType.ORT_ARENA_ALLOCATOR, 0, onnxruntime.OrtMemType.DEFAULT
    )
    no_limit, as_requested, default = 0, 1, -1
    growth = onnxruntime.OrtArenaCfg(no_limit, as_requested, default, default)
    onnxruntime.create_and_register_allocator(where, growth)


def words_of(error: Exception) -> str:
    """The first line of an error; one word for memory that does not suffice, which has many texts."""
    words = str(error).strip().partition("\n")[0] or type(error).__name__
    return OUT_OF_MEMORY if isinstance(error, MemoryError) or "alloc" in words.lower() else words


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), float(sys.argv[4]))
