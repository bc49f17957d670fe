"""A new task is two files, a class and an evaluation, and an entry in the list of tasks: every command then knows it.

The test adds the two files in ``new_task`` to a copy of the package and changes nothing else in it.
"""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

import torchcaps

FILES = {"shares.py": "tasks/shares.py", "shares_evaluation.py": "analysis/shares.py"}
LIST = "ObjectDiscovery())"
NARROW = "--conv-channels 8 --primary-types 2 --capsule-dim 4 --decoder-hidden 16 --max-shift 0 --batch-size 16"
RUN = f"train sabour2017 --task shares --data npz:data.npz {NARROW} --epochs 2 --out run"
COMMANDS = {
    RUN: ["3 shares", "overlap"],
    "evaluate run": ["red", "mean error"],
    "evaluate run --json": ['"errors"'],
    "evaluate run --figure e.png": ["wrote e.png"],
    "predict run image.png": ["red 0."],
    "predict run image.png --out answers.csv": ["wrote answers.csv"],
    "reconstruct run --count 3 --figure r.png": ["wrote r.png"],
    "curves run --figure c.png": ["wrote c.png"],
    "datasets npz:data.npz --task shares --sample 2": ["Labels", "red "],
    "export run --format folder --out shared": ["wrote shared"],
    "train --resume run --epochs 3 --no-figures": ["3"],
    "train baseline-cnn --task shares --data npz:data.npz --channels 8,8 --hidden 16 --pool 2 --epochs 1 --out cnn": [
        "overlap"
    ],
}
REFUSED = {
    "routing run": "torchcaps routing works for the task classes or ordinal; this network was trained for",
    "explore run --save site": "works for the task classes",
    "evaluate run --data npz:classes.npz": "classes.npz: y must be rows of shares from 0 to 1",
    "train sabour2017 --task share --data npz:data.npz": "'shares'",
}
MAIN = """
import contextlib, io, json, sys
from torchcaps.cli.app import main
results = {}
for line in json.load(sys.stdin):
    out = io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):
        code = main(line.split())
    results[line] = (code, out.getvalue())
json.dump(results, sys.stdout)
"""


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, tuple[int, str]]:
    """Exit code and output of each command."""
    folder, source = tmp_path_factory.mktemp("package"), Path(torchcaps.__file__).parent
    package = shutil.copytree(source, folder / "torchcaps", ignore=shutil.ignore_patterns("__pycache__"))
    for name, place in FILES.items():
        shutil.copyfile(Path(__file__).parent / "new_task" / name, package / place)
    listed = package / "tasks" / "__init__.py"
    text = listed.read_text("utf-8")
    assert text.count(LIST) == 1
    text = text.replace(LIST, f"{LIST[:-1]}, Shares())").replace(
        "TASKS.update", "from torchcaps.tasks.shares import Shares\n\nTASKS.update", 1
    )
    listed.write_text(text, "utf-8")

    random = np.random.default_rng(0)
    shares = random.dirichlet((1, 1, 1), 80)
    images = np.zeros((80, 18, 18), np.uint8)
    for image, (red, green, _) in zip(images, shares, strict=True):
        image[: round(18 * red)] = 250
        image[round(18 * red) : round(18 * (red + green))] = 120
    names = np.array(["red", "green", "blue"])
    np.savez(folder / "data.npz", x=images, y=shares, class_names=names)
    np.savez(folder / "classes.npz", x=images, y=shares.argmax(1), class_names=names)
    Image.fromarray(images[0]).save(folder / "image.png")
    run = subprocess.run(
        [sys.executable, "-c", MAIN],
        cwd=folder,
        env=os.environ | {"PYTHONPATH": str(folder)},
        input=json.dumps([*COMMANDS, *REFUSED]),
        capture_output=True,
        text=True,
        check=True,
    )
    found: Mapping[str, tuple[int, str]] = json.loads(run.stdout)
    return found


@pytest.mark.slow
@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_takes_a_new_task(results: Mapping[str, tuple[int, str]], command: str) -> None:
    code, out = results[command]
    assert (code, [words for words in COMMANDS[command] if words not in out]) == (0, []), out


@pytest.mark.slow
@pytest.mark.parametrize("command", REFUSED)
def test_a_command_refuses_a_new_task_in_a_sentence(results: Mapping[str, tuple[int, str]], command: str) -> None:
    code, out = results[command]
    assert code == 2, out
    assert REFUSED[command] in out
    assert "Traceback" not in out
