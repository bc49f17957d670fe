"""save_pretrained and from_pretrained: exact, readable, and strict about what does not fit."""

from __future__ import annotations

import json
import types
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub.errors import (
    HfHubHTTPError,
    LocalEntryNotFoundError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from safetensors.torch import load_file, save_file

from support import assert_close, assert_raises, small
from torchcaps import create_model, list_presets
from torchcaps.errors import InputError
from torchcaps.models import BaselineCNN, CapsNet, load_pretrained

SHAPE, CLASSES = (3, 18, 21), 4


def network(preset: str = "sabour2017", **overrides: Any) -> CapsNet | BaselineCNN:
    return create_model(preset, SHAPE, CLASSES, **small(preset) | overrides).eval()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    network().save_pretrained(tmp_path)
    return tmp_path


@pytest.mark.parametrize("preset", list_presets())
def test_round_trip(preset: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = network(preset)
    model.save_pretrained(tmp_path / "a" / "folder")
    again = type(model).from_pretrained(tmp_path / "a" / "folder")
    assert (again.config, again.in_shape, again.num_classes) == (model.config, SHAPE, CLASSES)
    assert again.training is False
    for (name, ours), theirs in zip(again.named_parameters(), model.parameters(), strict=True):
        assert_close(ours, theirs, 0)
        assert ours.stride() == theirs.stride(), f"{name} has another memory layout"
    images = torch.rand(2, *SHAPE)
    for ours, theirs in zip(again(images), model(images), strict=True):
        assert (ours is None) == (theirs is None)
        assert ours is None or torch.equal(ours, theirs)
    assert capsys.readouterr().out == ""


def test_every_option_survives(tmp_path: Path) -> None:
    model = network(learn_prior=True, capsule_bias=True, leaky=True, weight_std=0.123, decoder_hidden=(7,))
    model.save_pretrained(tmp_path)
    assert CapsNet.from_pretrained(str(tmp_path)).config == model.config


def test_the_files_are_readable(folder: Path) -> None:
    assert {path.name for path in folder.iterdir()} == {"config.json", "model.safetensors", "README.md"}
    description = json.loads((folder / "config.json").read_text())
    assert description["in_shape"] == [3, 18, 21]
    assert description["num_classes"] == 4
    assert description["softmax_over"] == "outputs"
    assert load_file(folder / "model.safetensors")["class_capsules.weight"].shape[1:] == (4, 16, 8)
    assert "torchcaps" in (folder / "README.md").read_text()


def test_saving_again_replaces(folder: Path) -> None:
    model = network(num_iterations=2)
    model.save_pretrained(folder)
    again = CapsNet.from_pretrained(folder)
    assert again.config.num_iterations == 2
    assert_close(again.conv.weight, model.conv.weight, 0)


@pytest.mark.parametrize("kept", [0, 7, 100, 0.5, 0.999])
def test_damaged_weights(folder: Path, kept: float) -> None:
    weights = folder / "model.safetensors"
    content = weights.read_bytes()
    weights.write_bytes(content[: int(kept * len(content)) if kept < 1 else int(kept)])
    assert_raises(InputError, CapsNet.from_pretrained, folder, say=f"weights {weights} are damaged")


def test_weights_that_do_not_fit(folder: Path) -> None:
    weights = folder / "model.safetensors"
    tensors = load_file(weights)
    for other, said in (
        ({name: tensor for name, tensor in tensors.items() if name != "conv.bias"}, "conv.bias has shape nothing"),
        (tensors | {"conv.bias": torch.zeros(5)}, "conv.bias has shape (5,), wanted (8,)"),
        (tensors | {"more": torch.zeros(5)}, "more has shape (5,), wanted nothing"),
    ):
        save_file(other, weights)
        assert_raises(InputError, CapsNet.from_pretrained, folder, say=said)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"num_iteratons": 3}, 'there is no CapsNet field "num_iteratons"; did you mean "num_iterations"?'),
        ({"num_iterations": "3"}, "num_iterations must be of type int, got '3'"),
        ({"num_classes": 1}, "num_classes must be an integer of at least 2"),
        ({"in_shape": [3, 9, 9]}, "images of 9×9 are too small"),
        ({"num_classes": 5}, "do not fit the network"),
    ],
)
def test_configurations_that_do_not_fit(folder: Path, change: dict[str, Any], said: str) -> None:
    config = folder / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | change))
    assert_raises(InputError, CapsNet.from_pretrained, folder, say=said)


def test_missing_pieces(folder: Path, tmp_path: Path) -> None:
    description = json.loads((folder / "config.json").read_text())
    del description["in_shape"]
    for text, said in (
        ("{bad", "is not valid JSON"),
        ("[]", "must hold a JSON object"),
        (json.dumps(description), "in_shape"),
    ):
        (folder / "config.json").write_text(text)
        assert_raises(InputError, CapsNet.from_pretrained, folder, say=said)
    (folder / "config.json").unlink()
    assert_raises(InputError, CapsNet.from_pretrained, folder, say="there is no configuration")
    network().save_pretrained(folder)
    (folder / "model.safetensors").unlink()
    assert_raises(InputError, CapsNet.from_pretrained, folder, say="there are no weights")
    assert_raises(InputError, CapsNet.from_pretrained, tmp_path / "no" / "such" / "place", say="there is no folder")


def test_the_wrong_kind_of_network(folder: Path) -> None:
    assert_raises(InputError, BaselineCNN.from_pretrained, folder, say="does not describe a BaselineCNN")
    network("baseline-cnn").save_pretrained(folder)
    assert_raises(InputError, CapsNet.from_pretrained, folder, say="does not describe a CapsNet")


def test_any_kind_by_a_path_in_words(folder: Path) -> None:
    assert isinstance(load_pretrained(str(folder)), CapsNet)
    network("baseline-cnn").save_pretrained(folder)
    assert isinstance(load_pretrained(str(folder)), BaselineCNN)
    assert isinstance(load_pretrained(folder), BaselineCNN)


def answer(status: int, kind: type[HfHubHTTPError]) -> HfHubHTTPError:
    """What the hub's client raises after an answer; of the answer it keeps the request and the headers."""
    response = types.SimpleNamespace(headers={}, request=None, status_code=status)
    return kind(f"{status} Client Error.\n\nMore lines.", response=response)


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (answer(404, RepositoryNotFoundError), "the hub has no repository runs/sabuor that you may read"),
        (answer(404, RevisionNotFoundError), "that name: RevisionNotFoundError: 404 Client Error."),
        (LocalEntryNotFoundError("Offline.\nMore."), "the hub could not be reached to look for it there"),
        (ConnectionError("Broken.\nMore."), "the hub gave no repository of that name: ConnectionError: Broken."),
        (RuntimeError("Proxy."), "the hub gave no repository of that name: RuntimeError: Proxy."),
    ],
)
def test_a_mistyped_folder_that_could_be_a_repository(
    error: Exception, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def download(*_: object, **__: object) -> str:
        raise error

    monkeypatch.setattr("torchcaps.models.pretrained.snapshot_download", download)
    with pytest.raises(InputError) as caught:
        CapsNet.from_pretrained("runs/sabuor")
    assert str(caught.value).startswith("there is no folder runs/sabuor, and ")
    assert str(caught.value).endswith(said)
    assert "\n" not in str(caught.value)


def test_the_real_client_without_a_network(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    said = "there is no folder runs/sabuor, and the hub could not be reached"
    assert_raises(InputError, CapsNet.from_pretrained, "runs/sabuor", cache_dir=tmp_path, say=said)
    with pytest.raises(TypeError, match="no_such_option"):
        CapsNet.from_pretrained("runs/sabuor", no_such_option=1)


def test_from_the_hub(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is no folder is a repository of the hub; only the two files are asked for."""
    asked: dict[str, Any] = {}

    def download(repository: str, **options: Any) -> str:
        asked.update(options, repository=repository)
        return str(folder)

    monkeypatch.setattr("torchcaps.models.pretrained.snapshot_download", download)
    model = CapsNet.from_pretrained("someone/capsnet-mnist", revision="v1")
    assert model.in_shape == SHAPE
    assert asked == {
        "repository": "someone/capsnet-mnist",
        "revision": "v1",
        "allow_patterns": ["config.json", "model.safetensors"],
    }
