"""Files that version 0.1 wrote: one flat list of fields without the network's kind, and weights by other names.

``earlier`` holds networks of two channels that it saved, and the scores that it gave.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch

from support import assert_close, assert_raises
from torchcaps import load_pretrained
from torchcaps.errors import InputError
from torchcaps.models import BaselineCNN, CapsNet, NetworkConfig
from torchcaps.models.earlier import present_fields, renamed, with_name
from torchcaps.models.fields import flat

EARLIER = Path(__file__).parent / "earlier"
IMAGES = torch.arange(162.0).mul(0.7).sin().abs().view(2, 1, 9, 9)


@pytest.mark.parametrize(("name", "kind"), [("capsules", CapsNet), ("without_decoder", CapsNet), ("cnn", BaselineCNN)])
def test_a_network_of_an_earlier_version_gives_the_same_scores(name: str, kind: type, tmp_path: Path) -> None:
    model = load_pretrained(EARLIER / name)
    assert type(model) is kind
    wanted = torch.tensor(json.loads((EARLIER / name / "scores.json").read_text()))
    assert_close(model(IMAGES).scores, wanted, 1e-5)
    assert (wanted[0] - wanted[1]).abs().max() > 1e-5, "the images differ, and so do their scores"
    model.save_pretrained(tmp_path)
    assert "name" in json.loads((tmp_path / "config.json").read_text())
    assert_close(load_pretrained(tmp_path)(IMAGES).scores, model(IMAGES).scores, 0)


@pytest.mark.parametrize("name", ["capsules", "without_decoder", "cnn"])
def test_every_field_of_an_earlier_version_is_where_it_belongs_now(name: str) -> None:
    fields = json.loads((EARLIER / name / "config.json").read_text())
    del fields["in_shape"], fields["num_classes"]
    now = flat(NetworkConfig.from_dict(with_name(fields)))
    for field, value in present_fields(fields).items():
        assert now[field] == (tuple(value) if isinstance(value, list) else value), field


def test_an_unknown_field_among_them_is_named(tmp_path: Path) -> None:
    shutil.copytree(EARLIER / "capsules", tmp_path / "copy")
    config = tmp_path / "copy" / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"num_iteration": 3}))
    said = f'configuration {config} does not describe a network: there is no CapsNet field "num_iteration"; did you'
    assert_raises(InputError, load_pretrained, tmp_path / "copy", say=said)


def test_names_of_weights() -> None:
    before = ["conv.weight", "conv_norm.bias", "stem.0.weight", "class_capsules.prior", "decoder.layers.0.bias"]
    now = ["backbone.conv.weight", "backbone.norm.bias", "backbone.stem.0.weight", "layers.0.routing.prior"]
    tensors = {name: torch.zeros(1) for name in [*before, "class_capsules.weight"]}
    assert list(renamed(tensors)) == [*now, "decoder.layers.0.bias", "layers.0.transform.weight"]
    assert list(renamed(renamed(tensors))) == list(renamed(tensors)), "present names are left alone"


def test_damage_is_noticed_as_in_any_file(tmp_path: Path) -> None:
    """The checksum that was written then is of the names that the weights had then."""
    shutil.copytree(EARLIER / "cnn", tmp_path / "copy")
    weights = tmp_path / "copy" / "model.safetensors"
    contents = bytearray(weights.read_bytes())
    contents[-2] ^= 1
    weights.write_bytes(contents)
    assert_raises(InputError, load_pretrained, tmp_path / "copy", say="they have changed since they were written")
