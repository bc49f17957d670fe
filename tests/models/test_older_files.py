"""Files in the format of before, whose weights had the axes of the equation and whose losses short names."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tiny_runs import same_weights
from torchcaps import create_model, fit, load_pretrained
from torchcaps.models import CapsNet
from torchcaps.models.older_files import SHORT_NAMES
from torchcaps.models.pretrained import checksum
from torchcaps.nn.transforms import WeightTransform
from torchcaps.parts import PARTS
from torchcaps.training import Progress, Recipe
from torchcaps.training.checkpoint import read_checkpoint

SMALL = {"conv_channels": 8, "primary_types": 2, "primary_dim": 4, "capsule_dim": 4, "decoder": None}
TRANSFORMS = sorted(name for name, made in PARTS["transform"].items() if issubclass(made, WeightTransform))


def to_old_axes(network: torch.nn.Module, name: str, values: Tensor) -> Tensor:
    """What was in the place of ``values``, of the parameter ``name``, in the old format."""
    module = network.get_submodule(name.rpartition(".")[0])
    is_weight = isinstance(module, WeightTransform) and name.endswith(".weight") and module.axes is not None
    return values.permute(module.axes).contiguous() if is_weight else values


def to_old_weights(network: torch.nn.Module, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    old = {name: to_old_axes(network, name, values) for name, values in tensors.items()}
    return {SHORT_NAMES.get(name, name): values for name, values in old.items()}


@pytest.mark.parametrize("has_checksum", [True, False])
@pytest.mark.parametrize("transform", TRANSFORMS)
def test_an_old_network_is_read(transform: str, has_checksum: bool, tmp_path: Path) -> None:
    network = create_model("sabour2017", (1, 28, 28), 5, **SMALL, transform=transform)
    network.save_pretrained(tmp_path)
    weights = tmp_path / "model.safetensors"
    old = to_old_weights(network, load_file(weights))
    save_file(old, weights, metadata={"sha256": checksum(old)} if has_checksum else None)
    assert same_weights(load_pretrained(tmp_path).state_dict(), network.state_dict())


def test_sizes_that_could_be_either_go_by_the_format(tmp_path: Path) -> None:
    """A weight of as many input as output capsules and components has one shape in both formats."""
    layers = ({"name": "dense", "num_capsules": 8, "capsule_dim": 8}, {"name": "dense", "num_capsules": 8},
              {"name": "dense", "capsule_dim": 8})  # fmt: skip
    sizes: Any = {**SMALL, "layers": layers}
    del sizes["capsule_dim"]
    network = create_model("sabour2017", (1, 28, 28), 8, **sizes)
    assert isinstance(network, CapsNet)
    transform = network.layers[2].transform
    assert isinstance(transform, WeightTransform)
    assert len(set(transform.weight.shape)) <= 2
    network.save_pretrained(tmp_path)
    assert same_weights(load_pretrained(tmp_path).state_dict(), network.state_dict())
    weights = tmp_path / "model.safetensors"
    old = to_old_weights(network, load_file(weights))
    save_file(old, weights, metadata={"sha256": checksum(old)})
    assert same_weights(load_pretrained(tmp_path).state_dict(), network.state_dict())


def test_an_old_run_goes_on_with_the_same_bits(tmp_path: Path) -> None:
    images, labels = torch.rand(24, 1, 28, 28), torch.arange(24) % 5

    def train(epochs: int, out: Path) -> dict[str, Tensor]:
        torch.manual_seed(0)
        network = create_model(
            "sabour2017", (1, 28, 28), 5, **SMALL, classification_loss="score-cross-entropy", learn_score_scale=True
        )
        fit(network, (images, labels), Recipe(epochs=epochs, batch_size=8), out, progress=Progress())
        return network.state_dict()

    whole = train(2, tmp_path / "whole")
    begun = train(1, tmp_path / "old")
    path, model = tmp_path / "old" / "last.ckpt", create_model("sabour2017", (1, 28, 28), 5, **SMALL)
    checkpoint = read_checkpoint(path)
    names = [name for name, _ in model.named_parameters()]
    moments = checkpoint["optimizer"]["state"]
    for number, name in enumerate(names):
        moments[number] |= {key: to_old_axes(model, name, moments[number][key]) for key in ("exp_avg", "exp_avg_sq")}
    checkpoint["model"] = to_old_weights(model, checkpoint["model"])
    assert "score_scale" in checkpoint["model"]
    del checkpoint["format"]
    torch.save(checkpoint, path)
    best = tmp_path / "old" / "best" / "model.safetensors"
    old = to_old_weights(model, load_file(best))
    save_file(old, best, metadata={"sha256": checksum(old)})
    assert read_checkpoint(path)["format"] == 1
    assert same_weights(train(1, tmp_path / "old"), begun), "a finished run gives its best weights"
    assert same_weights(train(2, tmp_path / "old"), whole)
