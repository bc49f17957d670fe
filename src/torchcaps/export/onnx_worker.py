"""Open and run an ONNX file for `OnnxModel` in a separate process. This script does not import torchcaps.

Usage: ``python onnx_worker.py FILE THREADS MEMORY SECONDS``. The script reads arrays from standard input and answers on
standard output, once when the file is open, then once for each array. A message is a line of JSON with the dtype and
shape of each array, followed by the bytes of the arrays.
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
"""Error message if the memory is not sufficient."""
STACK_BYTES = 8 * 2**20
"""Address space for the stack of a thread."""


def main(path: str, threads: int, memory: int, seconds: float) -> None:
    """Open a file and run it for each array on standard input, until the input ends.

    Args:
        path: The ONNX file.
        threads: Number of threads; 0: one for each core.
        memory: Bytes that this process may take from now on; enforced on Linux.
        seconds: Time limit of an answer. After it, the caller ends this process; if the caller has ended, an alarm
            does.
    """
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "wb")
    with Path(os.devnull).open("wb") as nowhere:
        os.dup2(nowhere.fileno(), sys.stdout.fileno())  # so that prints of libraries do not disturb the answers
    import onnxruntime

    onnxruntime.set_default_logger_severity(4)  # no log of errors, which are raised as exceptions too
    options: Any = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    options.intra_op_num_threads = threads
    grow_as_requested(onnxruntime)
    options.add_session_config_entry("session.use_env_allocators", "1")
    limit_memory(memory + STACK_BYTES * (threads or os.cpu_count() or 1))
    alarm(seconds)
    try:
        session = onnxruntime.InferenceSession(Path(path).read_bytes(), options, providers=["CPUExecutionProvider"])
        metadata = session.get_modelmeta().custom_metadata_map
        inputs = [[each.name, each.shape] for each in session.get_inputs()]
        outputs = [each.name for each in session.get_outputs()]
    except Exception as error:  # onnxruntime's exceptions have no common base class
        send(answers, error=message_of(error))
        return
    alarm(0)
    send(answers, metadata=metadata, inputs=inputs, outputs=outputs)
    while (images := receive(sys.stdin.buffer)) is not None:
        alarm(seconds)
        try:
            send(answers, *session.run(None, {inputs[0][0]: images[1][0]}))
        except Exception as error:  # as above
            send(answers, error=message_of(error))
        alarm(0)


def send(stream: IO[bytes], *arrays: np.ndarray, **facts: Any) -> None:
    """Write facts and arrays.

    Raises:
        TypeError: An array is not an array of numbers; then nothing is written.
    """
    if any(not isinstance(each, np.ndarray) or each.dtype.hasobject for each in arrays):
        raise TypeError("an output is not an array of numbers")
    kinds = [[each.dtype.str, each.shape] for each in arrays]
    stream.write(json.dumps({"arrays": kinds, **facts}).encode() + b"\n")
    for each in arrays:
        stream.write(np.ascontiguousarray(each).data.cast("B") if each.size else b"")
    stream.flush()


def receive(stream: IO[bytes]) -> tuple[dict[str, Any], list[np.ndarray]] | None:
    """Read facts and arrays; return None if the stream ends before or within a message."""
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
    """End this process after twice the seconds; 0 cancels the alarm. Windows has no alarm."""
    if hasattr(signal, "setitimer"):
        signal.setitimer(signal.ITIMER_REAL, 2 * seconds)


def limit_memory(more: int) -> None:
    """Limit the further memory of this process, bytes; only on Linux."""
    if sys.platform != "linux":
        return
    import resource

    data = int(Path("/proc/self/statm").read_text().split()[5]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_DATA, (data + more, data + more))


def grow_as_requested(onnxruntime: Any) -> None:
    """Let onnxruntime allocate memory as requested instead of in powers of two."""
    where = onnxruntime.OrtMemoryInfo(
        "Cpu", onnxruntime.OrtAllocatorType.ORT_ARENA_ALLOCATOR, 0, onnxruntime.OrtMemType.DEFAULT
    )
    no_limit, as_requested, default = 0, 1, -1
    growth = onnxruntime.OrtArenaCfg(no_limit, as_requested, default, default)
    onnxruntime.create_and_register_allocator(where, growth)


def message_of(error: Exception) -> str:
    """Return the first line of an error, or ``OUT_OF_MEMORY`` for any of the messages about memory."""
    message = str(error).strip().partition("\n")[0] or type(error).__name__
    return OUT_OF_MEMORY if isinstance(error, MemoryError) or "alloc" in message.lower() else message


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), float(sys.argv[4]))
