"""Commands for the task ``objects``: pictures without labels, and what is refused."""

import csv
import json
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from cli_support import Cli, Result
from torchcaps.datasets import load_dataset

pytestmark = pytest.mark.slow

SMALL = "--stack-channels 6,6,6 --broadcast-channels 8,8 --feature-width 8 --mlp-width 8 --capsule-dim 8"
TRAIN = f"train slots-small --num-capsules 3 {SMALL} --epochs 1"
WORKING = {
    "evaluate": "evaluate RUN --figure objects.png --json --out answers.csv",
    "evaluate two": "evaluate RUN RUN/../run",
    "predict": "predict RUN PICTURES --out masks --figure p.png",
    "curves": "curves RUN --figure c.png",
    "datasets": "datasets folder:PICTURES --task objects --sample 3 --figure s.png",
    "export folder": "export RUN --format folder --out folder",
    "export torch": "export RUN --format torch --out m.pt2",
    "resume": "train --resume RUN --no-figures",
    "init-from": f"{TRAIN} --data folder:PICTURES --init-from RUN --out r",
}
OTHER_TASKS = "works for the task classes"
REFUSED = {
    "routing": ("routing RUN", OTHER_TASKS),
    "perturb": ("perturb RUN", OTHER_TASKS),
    "reconstruct": ("reconstruct RUN", OTHER_TASKS),
    "robustness": ("robustness RUN", OTHER_TASKS),
    "probe": ("probe RUN", OTHER_TASKS),
    "detect": ("detect RUN", OTHER_TASKS),
    "explore --save": ("explore RUN --save site", "a page without a server computes networks with name 'capsules'"),
    "predict --poses": ("predict RUN PICTURES --poses p.npz", "--poses is for networks that give one answer"),
    "empty folder": ("train slots-small --data folder:EMPTY --out none", "there are no train pictures in"),
}


@pytest.fixture(scope="module")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("objects") / "pictures"
    (folder / "more").mkdir(parents=True)
    scenes = load_dataset("tetrominoes", limit_test=30).test.images.numpy().transpose(0, 2, 3, 1)
    for number, scene in enumerate(scenes):
        Image.fromarray(scene).save(folder / ("more" if number % 2 else "") / f"{number}.png")
    return folder


@pytest.fixture(scope="module")
def run(pictures: Path, cli: Cli) -> Path:
    """A run on pictures without labels, with another number of slots than there are names of outputs."""
    run = pictures.parent / "run"
    trained = cli(*TRAIN.split(), "--data", f"folder:{pictures}", "--out", run)
    assert trained.code == 0, trained.err
    assert "FG-ARI is unknown" in trained.out + trained.err
    assert "3×24×24, 3 slots" in trained.out
    assert json.loads((run / "summary.json").read_text())["test"]["best"]["accuracy"] is None
    return run


def call(cli: Cli, line: str, run: Path, pictures: Path, tmp_path: Path) -> Result:
    named = {"RUN": run, "PICTURES": pictures, "EMPTY": tmp_path}
    for word, value in named.items():
        line = line.replace(word, str(value))
    return cli(*line.split())


@pytest.mark.parametrize("name", WORKING)
def test_a_command_works(run: Path, pictures: Path, cli: Cli, tmp_path: Path, name: str) -> None:
    result = call(cli, WORKING[name], run, pictures, tmp_path)
    assert result.code == 0, result.err
    if name == "predict":
        assert set(np.unique(Image.open("masks/0.png"))) <= {0, 1, 2}
    if name == "evaluate":
        values = json.loads(result.out)
        assert (values["accuracy"], values["class_names"]) == (None, ["0", "1", "2"]), "no masks, and three slots"
        rows = list(csv.DictReader(Path("answers.csv").read_text("utf-8").splitlines()))
        assert (len(rows), {row["FG-ARI"] for row in rows}) == (values["num_images"], {""})
        assert np.mean([float(row["squared error"]) for row in rows]) == pytest.approx(values["squared_error"], 1e-4)
    if name == "evaluate two":
        assert "0.00 %" not in result.out, "an unknown number is not 0"
    if name == "export folder":
        card = Path("folder/README.md").read_text("utf-8")
        assert "with 3 slots" in card
        assert not [words for words in ("0.00 %", "value:") if words in card]


@pytest.mark.parametrize("name", REFUSED)
def test_a_command_is_refused_in_one_sentence(run: Path, pictures: Path, cli: Cli, tmp_path: Path, name: str) -> None:
    line, sentence = REFUSED[name]
    result = call(cli, line, run, pictures, tmp_path)
    assert (result.code, len(result.err.splitlines())) == (2, 1), result.err
    assert sentence in result.err


def test_an_onnx_file_gives_the_masks_of_the_run(run: Path, pictures: Path, cli: Cli) -> None:
    pytest.importorskip("onnxruntime")
    assert cli("export", run, "--format", "onnx", "--out", "m.onnx").code == 0
    words = pictures / "0.png", pictures / "2.png"
    assert cli.out("predict", "m.onnx", *words) == cli.out("predict", run, *words)
    assert cli.json("predict", "m.onnx", *words) == cli.json("predict", run, *words)
    for network, folder in (("m.onnx", "exported"), (run, "own")):
        assert cli("predict", network, *words, "--out", folder).code == 0
    for name in ("0.png", "2.png"):
        assert Path("exported", name).read_bytes() == Path("own", name).read_bytes()
