"""Backbones of timm, by a stand-in, and by timm itself where it is installed."""

import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from support import assert_close, assert_raises
from timm_stub import MEAN, STD
from torchcaps import create_model
from torchcaps.errors import InputError, WrongType
from torchcaps.models import CapsNet
from torchcaps.nn import TimmBackbone
from torchcaps.parts import UnknownOption, complete, describe

SMALL: dict[str, Any] = {"primary_types": 2, "primary_kernel": 2, "decoder_hidden": (8,)}


def network(backbone: str = "timm:wide", in_shape: tuple[int, int, int] = (3, 24, 24), **options: Any) -> Any:
    return create_model("compact", in_shape, 4, backbone=backbone, **SMALL, **options)


def test_a_name_behind_a_colon_is_the_first_option() -> None:
    assert complete("backbone", "timm:wide") == complete("backbone", {"name": "timm", "timm_model": "wide"})
    assert_raises(WrongType, complete, "routing", "dynamic:3", say="num_iterations must be 0 to 1000, got '3'")
    assert_raises(UnknownOption, complete, "transform", "identity:3", say='no option of transform "identity" "3"')
    assert_raises(InputError, complete, "backbone", "tim:wide", say='there is no backbone "tim"; did you mean "timm"?')


@pytest.mark.usefixtures("timm_stub")
def test_it_comes_back_from_its_folder_without_a_download(tmp_path: Path) -> None:
    model, images = network(pretrained=True), torch.rand(2, 3, 24, 24)
    assert model.map_shape == (10, 3, 3)
    assert network(timm_map=2).map_shape == (8, 6, 6)
    assert all((each == 0.1).all() for each in model.backbone.model.parameters())
    model.save_pretrained(tmp_path)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("timm_stub.nn.init.constant_", None)  # of the stand-in's download
        again = CapsNet.from_pretrained(tmp_path)
    assert describe(again) == describe(model)
    assert torch.equal(again(images).scores, model.eval()(images).scores)


@pytest.mark.usefixtures("timm_stub")
def test_pixels_are_standardised_as_the_weights_want_it() -> None:
    for channels, *colours in ((3, MEAN, STD), (1, (0.449,), (0.226,)), (2, (0.449,) * 2, (0.226,) * 2)):
        backbone, images = TimmBackbone(channels).eval(), torch.rand(2, channels, 8, 8)
        mean, std = (torch.tensor(each)[:, None, None] for each in colours)
        assert_close(backbone(images), backbone.model((images - mean) / std)[0], 1e-5)


@pytest.mark.usefixtures("timm_stub")
def test_a_frozen_backbone_stays_as_it_is() -> None:
    for freeze in (False, True):
        model, images, labels = network(freeze=freeze).train(), torch.rand(4, 3, 24, 24), torch.arange(4)
        before = {name: each.clone() for name, each in model.state_dict().items()}
        optimizer = torch.optim.Adam(model.parameters())
        model.loss(model(images, labels), images, labels).total.backward()
        optimizer.step()
        changed = {name for name, each in model.state_dict().items() if not torch.equal(each, before[name])}
        assert any("running_mean" in name for name in changed) != freeze
        assert {name for name, _ in model.named_parameters() if "backbone" not in name} <= changed
        assert any(name.startswith("backbone") for name in changed) != freeze


class Broken:
    """Finds a timm that does not import, as with a torchvision that was built for another torch."""

    def find_spec(self, name: str, *_: object) -> None:
        if name == "timm":
            raise RuntimeError("operator torchvision::nms does not exist")


@pytest.mark.usefixtures("timm_stub")
def test_what_timm_cannot_do_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    said = "timm cannot make 'resnet81' with feature maps: Unknown model (resnet81)"
    assert_raises(InputError, network, "timm:resnet81", say=said)
    assert network("timm:vit", (3, 32, 32)).map_shape == (8, 4, 4)
    said = "TimmBackbone takes no input of shape (3, 24, 24): Input height doesn't match model (32)."
    assert_raises(InputError, network, "timm:vit", say=said)
    with monkeypatch.context() as patch:
        patch.delitem(sys.modules, "timm")
        patch.setattr(sys, "meta_path", [Broken(), *sys.meta_path])
        said = "timm cannot be imported: RuntimeError: operator torchvision::nms does not exist"
        assert_raises(InputError, network, say=said)
    monkeypatch.setitem(sys.modules, "timm", None)
    assert_raises(InputError, network, say='the backbone "timm" needs timm: pip install "torchcaps[timm]"')


@pytest.mark.slow
def test_a_real_network_of_timm() -> None:
    pytest.importorskip("timm")
    for name, side, options in (
        ("resnet18", 64, {}),
        ("vit_tiny_patch16_224", 224, {}),
        ("resnet18", 33, {"timm_map": 3}),
    ):
        model = network(f"timm:{name}", (3, side, side), **options).eval()
        assert model(torch.rand(2, 3, side, side)).scores.shape == (2, 4)
