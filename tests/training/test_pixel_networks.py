"""Capsule networks for pixels in whole runs: they learn, resume exactly, and are checked for memory first."""

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import torchcaps.training.run as training_run
from pixel_support import discs
from support import assert_raises
from tiny_runs import StopAt, go_on, is_same, run
from torchcaps import create_model, fit, load_pretrained
from torchcaps.analysis import evaluate
from torchcaps.datasets import PatchSet
from torchcaps.errors import InputError
from torchcaps.models import get_preset, list_presets
from torchcaps.models.segmentation import FIXED_BYTES
from torchcaps.training import Interrupted, Progress, Recipe, TrainConfig, load_run, make_config
from torchcaps.training.run import check_training_memory

SMALL: dict[str, dict[str, Any]] = {
    "segcaps": {"capsule_dim": 4, "pixel_channels": (4,), "layer_types": 2, "decoder_hidden": (4,)},
    "unet-twin": {"channels": (4, 6), "parameters_of": None},
}


@pytest.fixture
def data(tmp_path: Path) -> str:
    images, masks = discs(24, (16, 16))
    np.savez(tmp_path / "discs.npz", x=images, y=masks)
    return f"npz:{tmp_path / 'discs.npz'}"


def config_of(preset: str, data: str) -> TrainConfig:
    recipe: dict[str, Any] = {"epochs": 2, "batch_size": 4, "learning_rate": 1e-2, "class_weights": None}
    return make_config(preset, data=data, task="pixels", **SMALL[preset], **recipe)


@pytest.mark.parametrize("preset", SMALL)
def test_a_run_that_was_stopped_ends_as_one_that_was_not(preset: str, data: str, tmp_path: Path) -> None:
    config = config_of(preset, data)
    summary = run(config, tmp_path / "whole")
    with pytest.raises(Interrupted):
        run(config, tmp_path / "stopped", StopAt(3))
    go_on(tmp_path / "stopped")
    assert is_same(tmp_path / "whole", tmp_path / "stopped")
    assert 0 <= summary["test"]["best"]["accuracy"] <= 1
    network = load_pretrained(tmp_path / "whole" / "best")
    assert network.in_shape == load_run(tmp_path / "whole").model.in_shape == (1, 16, 16)


PIXEL_PRESETS = [name for name in list_presets() if dict(get_preset(name).network).get("task") == "pixels"]


@pytest.mark.slow
@pytest.mark.parametrize("preset", PIXEL_PRESETS)
@pytest.mark.parametrize("side", [12, 16, 24], ids=["smaller", "as large", "larger"])
def test_images_of_any_size_are_validated_with_each_published_network(preset: str, side: int) -> None:
    """Images beyond the patch are seen in windows, without capsules and reconstructions."""
    images, masks = discs(4, (side, side))
    values = [tuple(torch.from_numpy(each) for each in part) for part in (images[:, None], masks)]
    data = PatchSet(*values, patch=(16, 16))
    network = create_model(preset, (1, 16, 16), 3)
    recipe = Recipe(epochs=1, batch_size=4, learning_rate=1e-3)
    (row,) = fit(network, data, recipe, validation=data.for_evaluation(), progress=Progress())
    assert math.isfinite(row["validation_loss"])
    assert evaluate(network, data.for_evaluation()).loss == pytest.approx(row["validation_loss"], rel=1e-4)


def test_memory_is_checked_before_training(monkeypatch: pytest.MonkeyPatch) -> None:
    with torch.device("meta"):
        network = create_model("segcaps", (1, 512, 512), 2)
    assert network.training_bytes(8) == pytest.approx(7 * 2**30, rel=0.05)
    assert network.training_bytes(4) < network.training_bytes(8)
    monkeypatch.setattr(training_run, "free_memory_mib", lambda: 4096.0)
    check_training_memory(network, Recipe(batch_size=4), "segcaps", torch.device("cpu"))
    check_training_memory(create_model("first"), Recipe(batch_size=4096), "first", torch.device("cpu"))
    says = (
        "segcaps at 512×512 with batch 8 needs about 6.9 GiB of memory, but 4.0 GiB are left; set --patch 256, or a "
        "smaller --batch-size"
    )
    assert_raises(
        InputError, check_training_memory, network, Recipe(batch_size=8), "segcaps", torch.device("cpu"), say=says
    )


def test_a_step_takes_about_the_memory_that_was_estimated() -> None:
    """Of the maps, that is: the numbers that autograd keeps for the gradient."""
    for preset in SMALL:
        network, kept = create_model(preset, (1, 96, 96), 3, **SMALL[preset]), dict[int, int]()

        def keep(tensor: Tensor, kept: dict[int, int] = kept) -> Tensor:
            kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
            return tensor

        images, masks = torch.rand(4, 1, 96, 96), torch.zeros(4, 96, 96, dtype=torch.uint8)
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            output = network(images, network.decoder_targets(masks))
            total = network.loss(output, images, masks).total
        assert total.requires_grad
        estimate = network.training_bytes(4)
        assert 0.5 * (estimate - FIXED_BYTES) < sum(kept.values()) < estimate
