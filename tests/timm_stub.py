"""A stand-in for timm, which needs torchvision: what version 1.0 takes and gives, as far as torchcaps asks it.

The fixture ``timm_stub`` puts it in timm's place.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
WIDTHS = {"resnet18": (4, 6, 8), "wide": (6, 8, 10), "vit": (4, 6, 8)}


class Features(nn.Module):
    """Some of three maps, of strides 2, 4 and 8; those of "vit" are of 32×32 only, and "wide" has channels last."""

    def __init__(self, name: str, in_chans: int, out_indices: Sequence[int], pretrained: bool) -> None:
        super().__init__()
        self.name, self.out_indices = name, out_indices
        self.output_fmt = "NHWC" if name == "wide" else "NCHW"
        self.pretrained_cfg = {"mean": MEAN, "std": STD}
        fans = zip((in_chans, *WIDTHS[name]), WIDTHS[name], strict=False)
        self.stages = nn.ModuleList(
            nn.Sequential(nn.Conv2d(fan_in, fan_out, 3, 2, 1), nn.BatchNorm2d(fan_out), nn.ReLU())
            for fan_in, fan_out in fans
        )
        if pretrained:
            assert not next(self.parameters()).is_meta, "a download for nothing"
            for parameter in self.parameters():
                nn.init.constant_(parameter, 0.1)

    def forward(self, images: Tensor) -> list[Tensor]:
        torch._assert(self.name != "vit" or images.shape[2] == 32, "Input height doesn't match model (32).")
        maps = []
        for stage in self.stages:
            images = stage(images)
            maps.append(images.permute(0, 2, 3, 1) if self.output_fmt == "NHWC" else images)
        return [maps[index] for index in self.out_indices]


def create_model(
    name: str, pretrained: bool = False, *, features_only: bool, out_indices: Sequence[int], in_chans: int
) -> Features:
    assert features_only
    if name not in WIDTHS:
        raise RuntimeError(f"Unknown model ({name})")
    return Features(name, in_chans, out_indices, pretrained)
