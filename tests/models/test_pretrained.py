"""save_pretrained and from_pretrained: exact, readable, and strict about what does not fit."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import sys
import types
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError, RepositoryNotFoundError
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from support import assert_close, assert_raises, small
from torchcaps import create_model, load_pretrained
from torchcaps.analysis import calibrate, evaluate
from torchcaps.datasets import Preparation, load_dataset
from torchcaps.errors import InputError
from torchcaps.models import BaselineCNN, CapsNet, Network, pretrained
from torchcaps.models.pretrained import SHIPPED
from torchcaps.training import load_run

SHAPE, CLASSES = (3, 18, 21), 4


def network(preset: str = "sabour2017", **overrides: Any) -> Network:
    return create_model(preset, SHAPE, CLASSES, **small(preset, **overrides)).eval()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    network().save_pretrained(tmp_path)
    return tmp_path


def test_the_files_are_readable(folder: Path) -> None:
    assert {path.name for path in folder.iterdir()} == {"config.json", "model.safetensors", "README.md"}
    description = json.loads((folder / "config.json").read_text())
    assert description["in_shape"] == [3, 18, 21]
    assert description["num_classes"] == 4
    assert description["name"] == "capsules"
    assert description["layers"][0]["routing"]["softmax_over"] == "outputs"
    assert load_file(folder / "model.safetensors")["layers.0.transform.weight"].shape[1:] == (4, 16, 8)
    assert "torchcaps" in (folder / "README.md").read_text(encoding="utf-8")


def test_saving_again_replaces(folder: Path) -> None:
    model = network(num_iterations=2)
    model.save_pretrained(folder)
    again = CapsNet.from_pretrained(folder)
    assert again.class_capsules.routing.num_iterations == 2
    assert_close(again.backbone.conv.weight, model.backbone.conv.weight, 0)


def read_weights(path: Path) -> dict[str, torch.Tensor]:
    """Copies: what is mapped from a file keeps it from being written on Windows."""
    return {name: tensor.clone() for name, tensor in load_file(path).items()}


def test_damaged_weights(folder: Path) -> None:
    weights = folder / "model.safetensors"
    content = weights.read_bytes()
    for kept in (0, 7, 100, len(content) // 2, len(content) - 1):
        weights.write_bytes(content[:kept])
        assert_raises(InputError, CapsNet.from_pretrained, folder, say=f"weights file {weights} is damaged")


def test_weights_that_do_not_fit(folder: Path) -> None:
    weights = folder / "model.safetensors"
    tensors = read_weights(weights)
    name = "backbone.conv.bias"
    for other, said in (
        ({key: tensor for key, tensor in tensors.items() if key != name}, f"{name} is nothing, wanted floats (8,)"),
        (tensors | {name: torch.zeros(5)}, f"{name} is floats (5,), wanted floats (8,)"),
        (tensors | {name: torch.zeros(8).long()}, f"{name} is torch.int64 (8,), wanted floats (8,)"),
        (tensors | {"more": torch.zeros(5)}, "more is floats (5,), wanted nothing"),
        *(
            (tensors | {name: torch.full((8,), odd)}, f"{weights} cannot be used: {name} holds numbers that are NaN")
            for odd in (float("nan"), float("inf"), -float("inf"))
        ),
    ):
        save_file(other, weights)
        assert_raises(InputError, CapsNet.from_pretrained, folder, say=said)


def test_configurations_that_do_not_fit(folder: Path) -> None:
    config = folder / "config.json"
    before = config.read_text()
    for change, said in (
        ({"num_iteratons": 3}, 'network "capsules" "num_iteratons"; did you mean "num_iterations"?'),
        ({"num_iterations": "3"}, "num_iterations must be 0 to 1000, got '3'"),
        ({"num_classes": 1}, "does not describe a network: CapsNet: num_classes must be 2 to 1000000000, got 1"),
        ({"in_shape": [3, 9, 9]}, "does not describe a network: images of 9×9 are too small"),
        *(({"layers": wild}, "does not describe a network: ") for wild in (5, [5], [[[]]], [{"routing": [1]}], {})),
        ({"name": ["capsules"]}, "does not describe a network: network must have a"),
        ({"num_classes": 5}, "do not fit the network"),
        ({"decoder_hidden": [65_536] * 100}, "do not fit the network"),  # 2 TB, for which nothing is asked
        ({"num_classes": 10**9, "capsule_dim": 65_536, "primary_dim": 65_536}, "more parameters than can be counted"),
        ({"decoder_hidden": [10**12, 10**12]}, "decoder_hidden must be 1 to 65536, got 1000000000000"),
    ):
        config.write_text(json.dumps(json.loads(before) | change))
        assert_raises(InputError, CapsNet.from_pretrained, folder, say=said)


def test_a_path_is_never_looked_for_on_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("huggingface_hub.snapshot_download", lambda *_, **__: pytest.fail("asked the hub"))
    assert_raises(InputError, load_pretrained, Path("run/best"), say="there is no folder run/best")


def test_reading_draws_no_random_numbers(folder: Path) -> None:
    torch.manual_seed(0)
    wanted = torch.rand(1)
    torch.manual_seed(0)
    again = CapsNet.from_pretrained(folder)
    assert torch.equal(torch.rand(1), wanted)
    made = network()
    for (name, read), new in zip(again.named_parameters(), made.parameters(), strict=True):
        assert (read.requires_grad, read.stride()) == (True, new.stride()), name


def test_names_of_classes_go_with_the_network_they_were_of(tmp_path: Path) -> None:
    network().save_pretrained(tmp_path, class_names=["ant", "bee", "cat", "dog"])
    network().save_pretrained(tmp_path)
    assert load_run(tmp_path).class_names == ("0", "1", "2", "3")


def test_missing_pieces(folder: Path, tmp_path: Path) -> None:
    description = json.loads((folder / "config.json").read_text())
    del description["in_shape"]
    for text, said in (
        ("{bad", "is damaged or no configuration"),
        ("[]", "must hold a JSON object"),
        (json.dumps(description), "in_shape"),
    ):
        (folder / "config.json").write_text(text)
        assert_raises(InputError, CapsNet.from_pretrained, folder, say=said)
    (folder / "config.json").unlink()
    assert_raises(InputError, CapsNet.from_pretrained, folder, say="there is no configuration")
    network().save_pretrained(folder)
    (folder / "model.safetensors").unlink()
    assert_raises(InputError, CapsNet.from_pretrained, folder, say="there is no weights file")
    assert_raises(InputError, CapsNet.from_pretrained, tmp_path / "no" / "such" / "place", say="there is no folder")


def test_the_wrong_kind_of_network(folder: Path) -> None:
    assert_raises(InputError, BaselineCNN.from_pretrained, folder, say=f"{folder} holds a CapsNet, not a BaselineCNN")
    network("baseline-cnn").save_pretrained(folder)
    assert_raises(InputError, CapsNet.from_pretrained, folder, say=f"{folder} holds a BaselineCNN, not a CapsNet")

    assert isinstance(load_pretrained(str(folder)), BaselineCNN), "any kind"


def answer(status: int, kind: type[HfHubHTTPError]) -> HfHubHTTPError:
    """What the hub's client raises after an answer; of the answer it keeps the request and the headers."""
    response = types.SimpleNamespace(headers={}, request=None, status_code=status)
    return kind(f"{status} Client Error.\n\nMore lines.", response=response)


def test_a_mistyped_folder_that_could_be_a_repository(monkeypatch: pytest.MonkeyPatch) -> None:
    for error, said in (
        (answer(404, RepositoryNotFoundError), "RepositoryNotFoundError: 404 Client Error."),
        (LocalEntryNotFoundError("Offline.\nMore."), "LocalEntryNotFoundError: Offline."),
        (ConnectionError("Broken.\nMore."), "ConnectionError: Broken."),
    ):

        def download(*_: object, error: Exception = error, **__: object) -> str:
            raise error

        monkeypatch.setattr("huggingface_hub.snapshot_download", download)
        with pytest.raises(InputError) as caught:
            CapsNet.from_pretrained("runs/sabuor")
        begin = "there is no folder runs/sabuor, and the hub has no repository runs/sabuor "
        assert str(caught.value).startswith(begin)
        assert str(caught.value).endswith(said)
        assert "\n" not in str(caught.value)


def test_the_real_client_without_a_network(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    said = "there is no folder runs/sabuor, and the hub has no repository runs/sabuor that you may read, or could not"
    assert_raises(InputError, CapsNet.from_pretrained, "runs/sabuor", cache_dir=tmp_path, say=said)
    with pytest.raises(TypeError, match="no_such_option"):
        CapsNet.from_pretrained("runs/sabuor", no_such_option=1)


def test_from_the_hub(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is no folder is a repository of the hub; only the files that are read are asked for."""
    asked: dict[str, Any] = {}

    def download(repository: str, **options: Any) -> str:
        asked.update(options, repository=repository)
        return str(folder)

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    model = CapsNet.from_pretrained("someone/capsnet-mnist", revision="v1")
    assert model.in_shape == SHAPE
    assert asked == {
        "repository": "someone/capsnet-mnist",
        "revision": "v1",
        "allow_patterns": ["config.json", "model.safetensors", "classes.json"],
    }


def test_class_names_and_card_stand_beside_the_weights(tmp_path: Path) -> None:
    network().save_pretrained(tmp_path, class_names=["a", "b", "c", "d"], source="someone/net")
    assert {path.name for path in tmp_path.iterdir()} == {
        "config.json",
        "model.safetensors",
        "README.md",
        "classes.json",
    }
    assert load_run(tmp_path).class_names == ("a", "b", "c", "d")
    card = (tmp_path / "README.md").read_text(encoding="utf-8")
    assert "Classes: a, b, c, d." in card
    assert 'load_pretrained("someone/net")' in card
    said = "class_names must be 4 names, one for each class, got 3"
    assert_raises(InputError, network().save_pretrained, tmp_path / "x", class_names=["a", "b", "c"], say=said)
    assert not (tmp_path / "x").exists()


# weights that have changed since they were written


def test_one_wrong_bit_in_any_weight_is_noticed(tmp_path: Path) -> None:
    weights = tmp_path / "model.safetensors"
    for dtype in (None, torch.float16):
        network().save_pretrained(tmp_path, dtype=dtype)
        whole = weights.read_bytes()
        begin = 8 + int.from_bytes(whole[:8], "little")  # where the header ends
        places = range(begin, len(whole), (len(whole) - begin) // 12)
        for place, bit in (*((place, bit) for place in places for bit in (0, 6)), (len(whole) - 4, 0)):
            contents = bytearray(whole)
            contents[place] ^= 1 << bit
            weights.write_bytes(contents)
            assert_raises(InputError, load_pretrained, tmp_path, say=str(weights))
        with pytest.raises(InputError, match="its weights have changed since they were written"):
            load_pretrained(tmp_path)
        weights.write_bytes(whole)
        load_pretrained(tmp_path)


def test_the_checksum_is_of_names_types_shapes_and_numbers() -> None:
    tensors = {"a": torch.arange(6.0).view(2, 3), "b": torch.tensor(1.0)}
    checksum = pretrained.checksum(tensors)
    assert checksum == pretrained.checksum(dict(reversed(tensors.items())))
    assert checksum == pretrained.checksum(tensors | {"a": tensors["a"].t().contiguous().t()}), "not of the layout"
    others: list[dict[str, torch.Tensor]] = [
        tensors | {"a": tensors["a"].view(3, 2)},
        {"a": tensors["a"], "c": tensors["b"]},
        tensors | {"a": tensors["a"].view(torch.int32)},
        tensors | {"b": torch.tensor(1.0000001)},
    ]
    assert len({checksum, *map(pretrained.checksum, others)}) == 5


def test_weights_without_a_checksum_load_as_ever(folder: Path) -> None:
    weights = folder / "model.safetensors"
    tensors = read_weights(weights)
    for metadata in (None, {"format": "pt"}):
        save_file(tensors | {"backbone.conv.bias": torch.ones(8)}, weights, metadata=metadata)
        assert_close(CapsNet.from_pretrained(folder).backbone.conv.bias, torch.ones(8), 0)
    save_file(
        tensors | {"backbone.conv.bias": torch.ones(8)}, weights, metadata={"sha256": pretrained.checksum(tensors)}
    )
    assert_raises(InputError, CapsNet.from_pretrained, folder, say="have changed since they were written")


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="names of files are UTF-8 on this system")
def test_a_folder_whose_name_is_not_utf_8(tmp_path: Path) -> None:
    folder = tmp_path / os.fsdecode(b"\xff\xfe")
    model = network()
    model.save_pretrained(folder)
    for name, tensor in load_pretrained(folder).state_dict().items():
        assert_close(tensor, model.state_dict()[name], 0)
    (folder / "model.safetensors").write_bytes(b"nothing")
    assert_raises(InputError, load_pretrained, folder, say="is damaged")


# half precision


def test_half_precision_takes_half_the_room_and_is_read_into_float32(tmp_path: Path) -> None:
    model = network()
    for name, dtype in (("whole", None), ("half", torch.float16)):
        model.save_pretrained(tmp_path / name, dtype=dtype)
    sizes = [(tmp_path / name / "model.safetensors").stat().st_size for name in ("whole", "half")]
    assert sizes[1] < 0.55 * sizes[0]
    again = load_pretrained(tmp_path / "half")
    for ours, theirs in zip(again.parameters(), model.parameters(), strict=True):
        assert ours.dtype == torch.float32
        assert ours.stride() == theirs.stride()
        assert_close(ours, theirs.half().float(), 0)
    images = torch.rand(3, *SHAPE)
    assert_close(again(images).lengths, model(images).lengths, 2e-3)
    assert "half precision" in (tmp_path / "half" / "README.md").read_text(encoding="utf-8")
    assert "half precision" not in (tmp_path / "whole" / "README.md").read_text(encoding="utf-8")


def test_weights_that_half_precision_cannot_hold(tmp_path: Path) -> None:
    model = network()
    for weight in (1e5, float("nan")):
        with torch.no_grad():
            model.backbone.conv.bias[0] = weight
        said = "backbone.conv.bias has weights that torch.float16 cannot hold; store them as they are"
        assert_raises(InputError, model.save_pretrained, tmp_path / "x", dtype=torch.float16, say=said)
        assert not (tmp_path / "x").exists()


# networks that come with torchcaps


@pytest.fixture
def shipped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An installation with the weights of a tiny network in place of the real one."""
    network(num_iterations=1).save_pretrained(tmp_path / "compact", class_names="abcd", dtype=torch.float16)
    monkeypatch.setitem(SHIPPED, "compact", tmp_path / "compact")
    return tmp_path / "compact"


def test_a_shipped_network_is_loaded_by_its_name(
    shipped: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    for model in (load_pretrained(), load_pretrained("compact"), CapsNet.from_pretrained("compact")):
        assert model.class_capsules.routing.num_iterations == 1
        assert model.training is False
        assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    network(num_iterations=2).save_pretrained("compact")
    assert load_pretrained("compact").class_capsules.routing.num_iterations == 1, "the name is that of the shipped one"
    for folder in ("./compact", Path("compact")):
        assert load_pretrained(folder).class_capsules.routing.num_iterations == 2


@pytest.mark.parametrize("name", SHIPPED)
def test_what_is_shipped_is_small_whole_and_described(name: str) -> None:
    folder = SHIPPED[name]
    names = {"config.json", "model.safetensors", "classes.json", "README.md"}
    assert {path.name for path in folder.iterdir()} == names
    assert sum(path.stat().st_size for path in folder.iterdir()) <= 3_000_000
    model = load_run(folder).model
    assert sum(parameter.numel() for parameter in model.parameters()) <= 1_500_000
    weights = load_file(folder / "model.safetensors")
    assert {tensor.dtype for tensor in weights.values()} == {torch.float16}
    with safe_open(folder / "model.safetensors", framework="pt") as file:
        assert file.metadata()["sha256"] == pretrained.checksum(weights)
    card = (folder / "README.md").read_text(encoding="utf-8")
    for heading in ("## Results", "## Training", "## Limits", "## Citation", "measured after rounding"):
        assert heading in card


@pytest.mark.slow
@pytest.mark.mnist
@pytest.mark.parametrize("name", SHIPPED)
def test_what_is_shipped_is_as_good_as_its_card_says_and_says_what_is_usual(name: str) -> None:
    run, data = load_run(SHIPPED[name]), load_dataset("mnist")
    card = (SHIPPED[name] / "README.md").read_text(encoding="utf-8")
    said = re.search(r"the weights have ([\d.]+) % test error, measured after rounding", card)
    assert said is not None
    assert 100 * evaluate(run.model, data.test).error == pytest.approx(float(said[1]), abs=0.011)  # an image is 0.01 %
    assert (run.images.preparation, run.images.calibration is None) == (Preparation(), False)
    found, usual = calibrate(run.model, data.validation.images), run.images.calibration
    assert dataclasses.asdict(found) == pytest.approx(dataclasses.asdict(usual), abs=0.001)  # type: ignore[arg-type]
