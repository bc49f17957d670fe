"""The command line in this process, and surroundings in which it reaches nothing outside its folder."""

from __future__ import annotations

import importlib
import os
import re
import sys
from collections.abc import Sequence
from pathlib import Path

LAUNCHER = "torchcaps-command.py"
"""A script that is the command line, for what the command line starts anew by itself."""

PACKAGES = (
    *("matplotlib.pyplot", "matplotlib.backends.backend_agg", "onnxruntime", "scipy.io", "sklearn.datasets", "torch"),
    *("torchcaps.cli", "torchcaps.analysis", "torchcaps.export", "torchcaps.explorer", "torchcaps.reproduce"),
    *("torchcaps.training", "torchcaps.training.loop", "torchcaps.training.report", "torchcaps.datasets"),
    *("gradio", "uvicorn", "fastapi"),
    *("PIL.PngImagePlugin", "PIL.JpegImagePlugin", "PIL.TiffImagePlugin", "PIL.BmpImagePlugin", "PIL.GifImagePlugin"),
)


def isolate(folder: Path) -> None:
    """Set what keeps torchcaps to this folder, off the network, and to one thread; before torch is imported."""
    home = folder / "home"
    home.mkdir()
    (folder / LAUNCHER).write_text("import sys\n\nfrom torchcaps.cli import main\n\nsys.exit(main())\n")
    for name in ("RANK", "LOCAL_RANK", "NODE_RANK", "WORLD_SIZE", "TORCHCAPS_DATA", "HF_TOKEN", "DISPLAY"):
        os.environ.pop(name, None)
    nowhere = "http://127.0.0.1:9"  # nothing listens there
    os.environ |= {
        "HOME": str(home),
        "XDG_CACHE_HOME": str(home / "cache"),
        "HF_HOME": str(home / "hub"),
        "MPLCONFIGDIR": str(home / "matplotlib"),
        "MPLBACKEND": "Agg",
        "HF_HUB_OFFLINE": "1",
        "HF_HUB_DISABLE_TELEMETRY": "1",
        "GRADIO_ANALYTICS_ENABLED": "False",
        "OMP_NUM_THREADS": "1",
        "COLUMNS": "100",
        **dict.fromkeys(("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY"), nowhere),
        "no_proxy": "127.0.0.1,localhost",
    }
    # the launcher imports what this process imports
    os.environ["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path and Path(path).is_dir())


def import_all() -> None:
    """Import whatever a command may need, so that a forked process need not."""
    for name in PACKAGES:
        module = importlib.import_module(name)
        for each in dir(module):
            getattr(module, each)  # what is imported when it is first asked for
    importlib.import_module("torch").set_num_threads(1)  # a forked process has none of the others


WRITERS = ("--out", "--figure", "--page", "--results", "--show")
"""Options that name what is written."""
OUTSIDE = re.compile(r"(^|[=:])[/~]|(^|[/=:])\.\.(/|$)")


def keep_inside(arguments: Sequence[str]) -> list[str]:
    """A command line that writes nowhere outside the folder that it works in.

    A campaign may be run by somebody who may write anywhere. So where something is written to a place that is named,
    no path leads out of the folder.
    """
    if not any(word.startswith(WRITERS) for word in arguments):
        return list(arguments)
    return [f"inside{OUTSIDE.sub('-', word)}" if OUTSIDE.search(word) else word for word in arguments]


def call(arguments: Sequence[str]) -> int:
    """Run the command line in this process; the exit code."""
    from torchcaps.cli import main

    folder = Path(os.environ["HOME"]).parent
    sys.argv = [str(folder / LAUNCHER), *arguments]  # what lightning starts for each further device
    sys.modules["__main__"].__spec__ = None
    return main(arguments)
