"""save_pretrained and from_pretrained: exact, readable, and strict about what does not fit."""

import copy
import dataclasses
import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load, load_file, save_file
from torch import Tensor, nn

from support import assert_raises, registered_for_now, small
from torchcaps import create_model, load_pretrained
from torchcaps.analysis import calibrate, evaluate
from torchcaps.datasets import Preparation, load_dataset
from torchcaps.errors import InputError
from torchcaps.models import BaselineCNN, CapsNet, Network
from torchcaps.models.files import SHIPPED
from torchcaps.models.files.weights import checksum, weights_file
from torchcaps.parts import register
from torchcaps.training import load_run

SHAPE, CLASSES = (3, 18, 21), 4
FILES = {"config.json", "model.safetensors", "classes.json", "README.md"}


def network(preset: str = "sabour2017", seed: int | None = None, **overrides: Any) -> Network:
    if seed is not None:
        torch.manual_seed(seed)
    return create_model(preset, SHAPE, CLASSES, **small(preset, **overrides)).eval()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    network().save_pretrained(tmp_path)
    return tmp_path


def test_weights_that_are_damaged_or_do_not_fit(folder: Path) -> None:
    weights = folder / "model.safetensors"
    content = weights.read_bytes()
    tensors = load(content)
    for kept in (0, 7, 100, len(content) // 2, len(content) - 1):
        weights.write_bytes(content[:kept])
        assert_raises(InputError, CapsNet.from_pretrained, folder, say=f"weights file {weights} is damaged")
    name = "backbone.conv.bias"
    for other, said in (
        (
            {key: tensor for key, tensor in tensors.items() if key != name},
            f"{name} is missing, but must be floats (8,)",
        ),
        (tensors | {name: torch.zeros(5)}, f"{name} is floats (5,), but must be floats (8,)"),
        (tensors | {name: torch.zeros(8).long()}, f"{name} is torch.int64 (8,), but must be floats (8,)"),
        (tensors | {"more": torch.zeros(5)}, "more is floats (5,), but must be absent"),
        (tensors | {name: torch.full((8,), float("nan"))}, f"{weights} cannot be used: {name} holds NaN"),
    ):
        save_file(other, weights)
        assert_raises(InputError, CapsNet.from_pretrained, folder, say=said)


def test_configurations_that_do_not_fit(folder: Path) -> None:
    config = folder / "config.json"
    before = json.loads(config.read_text())
    for change, said in (
        ({"num_iteratons": 3}, 'network "capsules" "num_iteratons"; did you mean "num_iterations"?'),
        ({"num_iterations": "3"}, "num_iterations must be 0 to 1000, got '3'"),
        ({"num_classes": 1}, "does not describe a network: CapsNet: num_classes must be 2 to 1000000000, got 1"),
        ({"in_shape": [3, 9, 9]}, "does not describe a network: images of 9×9 are too small"),
        *(({"layers": wild}, "does not describe a network: ") for wild in (5, [5], [[[]]], [{"routing": [1]}], {})),
        ({"name": ["capsules"]}, "does not describe a network: network must have a"),
        ({"num_classes": 5}, "do not fit the network"),
        ({"decoder_hidden": [65_536] * 100}, "do not fit the network"),  # 2 TB, for which nothing is asked
        (
            {"num_classes": 10**9, "capsule_dim": 65_536, "primary_dim": 65_536},
            "more parameters than PyTorch can count",
        ),
    ):
        config.write_text(json.dumps(before | change))
        assert_raises(InputError, CapsNet.from_pretrained, folder, say=said)
    del before["in_shape"]
    for text, said in (
        ("{bad", "is damaged or no configuration"),
        ("[]", "must hold a JSON object"),
        (json.dumps(before), "in_shape"),
    ):
        config.write_text(text)
        assert_raises(InputError, CapsNet.from_pretrained, folder, say=said)


def test_reading_draws_no_random_numbers(folder: Path) -> None:
    torch.manual_seed(0)
    wanted = torch.rand(1)
    torch.manual_seed(0)
    again = CapsNet.from_pretrained(folder)
    assert torch.equal(torch.rand(1), wanted)
    assert all(parameter.requires_grad for parameter in again.parameters())


def test_what_is_missing(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "model.safetensors").unlink()
    assert_raises(InputError, CapsNet.from_pretrained, folder, say="there is no weights file")
    (folder / "config.json").unlink()
    assert_raises(InputError, CapsNet.from_pretrained, folder, say="there is no configuration")
    monkeypatch.chdir(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr("huggingface_hub.snapshot_download", lambda *_, **__: pytest.fail("asked the hub"))
        assert_raises(InputError, load_pretrained, Path("run/best"), say="there is no folder run/best")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    said = "there is no folder runs/sabuor, and the hub has no repository runs/sabuor that you may read, or could not"
    assert_raises(InputError, CapsNet.from_pretrained, "runs/sabuor", cache_dir=tmp_path, say=said)
    with pytest.raises(TypeError, match="no_such_option"):
        CapsNet.from_pretrained("runs/sabuor", no_such_option=1)


def test_the_wrong_kind_of_network(folder: Path) -> None:
    assert_raises(InputError, BaselineCNN.from_pretrained, folder, say=f"{folder} holds a CapsNet, not a BaselineCNN")
    network("baseline-cnn").save_pretrained(folder)
    assert_raises(InputError, CapsNet.from_pretrained, folder, say=f"{folder} holds a BaselineCNN, not a CapsNet")

    assert isinstance(load_pretrained(str(folder)), BaselineCNN), "any kind"


def test_class_names_and_card_stand_beside_the_weights(tmp_path: Path) -> None:
    network().save_pretrained(tmp_path, class_names="abcd", source="someone/net")
    assert {path.name for path in tmp_path.iterdir()} == FILES
    assert load_run(tmp_path).class_names == ("a", "b", "c", "d")
    card = (tmp_path / "README.md").read_text(encoding="utf-8")
    assert "Classes: a, b, c, d." in card
    assert 'load_pretrained("someone/net")' in card
    network(num_iterations=2).save_pretrained(tmp_path)
    assert load_run(tmp_path).class_names == ("0", "1", "2", "3"), "saving again replaces the names too"
    assert load_pretrained(tmp_path).class_capsules.routing.num_iterations == 2
    said = "class_names must be 4 names, one for each class, got 3"
    assert_raises(InputError, network().save_pretrained, tmp_path / "x", class_names="abc", say=said)
    assert not (tmp_path / "x").exists()


# weights that have changed since they were written


def test_one_wrong_bit_in_any_weight_is_noticed(tmp_path: Path) -> None:
    weights = tmp_path / "model.safetensors"
    for dtype in (None, torch.float16):
        network().save_pretrained(tmp_path, dtype=dtype)
        whole = weights.read_bytes()
        begin = 8 + int.from_bytes(whole[:8], "little")  # where the header ends
        places = range(begin, len(whole), (len(whole) - begin) // 6)
        for place, bit in (*((place, bit) for place in places for bit in (0, 6)), (len(whole) - 4, 0)):
            contents = bytearray(whole)
            contents[place] ^= 1 << bit
            weights.write_bytes(contents)
            assert_raises(InputError, load_pretrained, tmp_path, say=str(weights))
        with pytest.raises(InputError, match="its weights have changed since they were written"):
            load_pretrained(tmp_path)
    save_file(load(whole), weights)  # without a checksum
    load_pretrained(tmp_path)


@pytest.mark.parametrize("version", [None, "1", "3"])
def test_weights_of_another_format_are_refused(version: str | None, folder: Path) -> None:
    """Format 1 has other axes, of the same sizes if the sizes of a weight are equal."""
    weights = folder / "model.safetensors"
    tensors = load_file(weights)
    metadata = {"sha256": checksum(tensors)} | ({} if version is None else {"format": version})
    save_file(tensors, weights, metadata=metadata)
    said = f"weights file {weights} has format {version or 1}, but this version of torchcaps reads format 2 only"
    assert_raises(InputError, load_pretrained, folder, say=said)


def test_equal_weights_are_equal_bytes(tmp_path: Path) -> None:
    """In each process: safetensors writes metadata in the order of a hash that changes from call to call."""
    files = []
    for number in range(12):
        network(seed=0).save_pretrained(tmp_path / str(number), class_names="abcd")
        files.append({path.name: path.read_bytes() for path in (tmp_path / str(number)).iterdir()})
    assert all(each == files[0] for each in files)
    tensors = load(files[0]["model.safetensors"])
    reordered = dict(reversed(tensors.items()))
    assert weights_file(reordered) == weights_file(tensors) == files[0]["model.safetensors"]


# modules with several names


class Twice(nn.Module):
    """A backbone whose convolution is used under two names."""

    def __init__(self, in_channels: int, *, share_twice: bool = True) -> None:
        super().__init__()
        self.share_twice = share_twice
        self.first = nn.Conv2d(in_channels, in_channels, 3, padding=1)
        self.second = self.first if share_twice else nn.Conv2d(in_channels, in_channels, 3, padding=1)
        self.last = nn.Conv2d(in_channels, 8, 5)

    def forward(self, images: Tensor) -> Tensor:
        return self.last(self.second(self.first(images)))


def test_a_module_under_two_names_stays_one(tmp_path: Path) -> None:
    with registered_for_now():
        register("backbone", "twice")(Twice)
        model = network(backbone="twice")
        model.save_pretrained(tmp_path)
        again = load_pretrained(tmp_path)
        assert again.backbone.first is again.backbone.second
        images = torch.rand(2, *SHAPE)
        assert torch.equal(again(images).scores, model(images).scores)
        model.backbone.second = copy.deepcopy(model.backbone.first)
        said = "backbone.second.weight and backbone.first.weight are one parameter in one of them, and two in the other"
        assert_raises(InputError, model.save_pretrained, tmp_path / "x", say=said)
        model = network(backbone={"name": "twice", "share_twice": False})
        model.backbone.second = model.backbone.first
        assert_raises(InputError, model.save_pretrained, tmp_path / "x", say=said)
        assert not (tmp_path / "x").exists()


# half precision


def test_half_precision_takes_half_the_room_and_is_read_into_float32(folder: Path, tmp_path: Path) -> None:
    model = network()
    model.save_pretrained(tmp_path / "half", dtype=torch.float16)
    whole, half = ((each / "model.safetensors").stat().st_size for each in (folder, tmp_path / "half"))
    assert half < 0.55 * whole
    for ours, theirs in zip(load_pretrained(tmp_path / "half").parameters(), model.parameters(), strict=True):
        assert ours.dtype == torch.float32
        assert torch.equal(ours, theirs.half().float())
    assert "half precision" in (tmp_path / "half" / "README.md").read_text(encoding="utf-8")
    assert "half precision" not in (folder / "README.md").read_text(encoding="utf-8")
    with torch.no_grad():
        model.backbone.conv.bias[0] = 1e5
    said = "backbone.conv.bias has weights that torch.float16 cannot hold; store them with dtype=None"
    assert_raises(InputError, model.save_pretrained, tmp_path / "x", dtype=torch.float16, say=said)
    assert not (tmp_path / "x").exists()


# networks that come with torchcaps


def test_a_shipped_network_is_loaded_by_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    network(num_iterations=1).save_pretrained(tmp_path / "shipped", class_names="abcd", dtype=torch.float16)
    monkeypatch.setitem(SHIPPED, "compact", tmp_path / "shipped")
    monkeypatch.chdir(tmp_path)
    network(num_iterations=2).save_pretrained("compact")
    for model in (load_pretrained(), load_pretrained("compact"), CapsNet.from_pretrained("compact")):
        assert model.class_capsules.routing.num_iterations == 1, "the name is that of the shipped one"
        assert model.training is False
    for folder in ("./compact", Path("compact")):
        assert load_pretrained(folder).class_capsules.routing.num_iterations == 2


@pytest.mark.parametrize("name", SHIPPED)
def test_what_is_shipped_is_small_whole_and_described(name: str) -> None:
    folder = SHIPPED[name]
    assert {path.name for path in folder.iterdir()} == FILES
    assert sum(path.stat().st_size for path in folder.iterdir()) <= 3_000_000
    load_run(folder)
    weights = load_file(folder / "model.safetensors")
    assert {tensor.dtype for tensor in weights.values()} == {torch.float16}
    with safe_open(folder / "model.safetensors", framework="pt") as file:
        assert file.metadata()["sha256"] == checksum(weights)
    card = (folder / "README.md").read_text(encoding="utf-8")
    for heading in ("## Results", "## Training", "## Limits", "## Citation", "measured after rounding"):
        assert heading in card


@pytest.mark.slow
@pytest.mark.mnist
@pytest.mark.parametrize("name", SHIPPED)
def test_what_is_shipped_is_as_good_as_its_card_says_and_says_what_is_usual(name: str) -> None:
    run, data = load_run(SHIPPED[name]), load_dataset("mnist")
    card = (SHIPPED[name] / "README.md").read_text(encoding="utf-8")
    said = re.search(r"have ([\d.]+) % test error, measured after rounding", card)
    assert said is not None
    assert 100 * evaluate(run.model, data.test).error == pytest.approx(float(said[1]), abs=0.011)  # an image is 0.01 %
    assert (run.images.preparation, run.images.calibration is None) == (Preparation(), False)
    found, usual = calibrate(run.model, data.validation.images), run.images.calibration
    assert dataclasses.asdict(found) == pytest.approx(dataclasses.asdict(usual), abs=0.001)  # type: ignore[arg-type]
