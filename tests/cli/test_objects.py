"""Commands for the task ``objects``: pictures without labels, and what is refused."""

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from cli_support import Cli
from torchcaps.datasets import load_dataset


@pytest.mark.slow
def test_pictures_without_labels_are_trained_evaluated_and_predicted(cli: Cli, tmp_path: Path) -> None:
    scenes = load_dataset("tetrominoes", limit_test=30).test.images.numpy().transpose(0, 2, 3, 1)
    (tmp_path / "pictures" / "more").mkdir(parents=True)
    for number, scene in enumerate(scenes):
        Image.fromarray(scene).save(tmp_path / "pictures" / ("more" if number % 2 else "") / f"{number}.png")
    run = tmp_path / "run"
    sizes = "--stack-channels 6,6,6 --broadcast-channels 8,8 --feature-width 8 --mlp-width 8 --capsule-dim 8"
    trained = cli(
        "train",
        "slots-small",
        "--data",
        f"folder:{tmp_path / 'pictures'}",
        "--num-capsules",
        "3",
        *sizes.split(),
        "--epochs",
        "1",
        "--out",
        run,
    )
    assert trained.code == 0, trained.err
    assert "FG-ARI is unknown" in trained.out + trained.err
    masks = cli("predict", run, tmp_path / "pictures" / "0.png", "--out", tmp_path / "masks")
    assert masks.code == 0, masks.err
    assert set(np.unique(Image.open(tmp_path / "masks" / "0.png"))) <= {0, 1, 2}
    figure = cli("evaluate", run, "--figure", tmp_path / "objects.png")
    assert (figure.code, (tmp_path / "objects.png").exists()) == (0, True), figure.err
    assert cli("train", "--resume", run).code == 0
    for command in ("routing", "perturb", "reconstruct", "robustness", "detect", "explore"):
        refused = cli(command, run)
        assert (refused.code, "this network was trained for the task objects" in refused.err) == (2, True), command
    empty = tmp_path / "empty"
    empty.mkdir()
    nothing = cli("train", "slots-small", "--data", f"folder:{empty}", "--out", tmp_path / "none")
    assert (nothing.code, "there are no train pictures in" in nothing.err) == (2, True)
