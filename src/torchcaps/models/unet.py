"""U-Net for lines, planes and volumes: the baseline of capsule networks that answer each pixel."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor, nn

from torchcaps.errors import InputError
from torchcaps.models.output import ModelOutput
from torchcaps.models.planning import plan_network
from torchcaps.models.segmentation import Masks, PixelLoss, PixelNetwork, cut_to
from torchcaps.nn.convolutions import MAP_MODULES
from torchcaps.nn.segmentation import InstanceNorm
from torchcaps.ops.precision import in_full_precision
from torchcaps.parts import find, register
from torchcaps.ranges import OddKernel, Width
from torchcaps.tasks import TaskName
from torchcaps.words import counted

MAX_DIFFERENCE = 0.03
"""Largest difference in the number of parameters from the network that a U-Net is compared with, as a share."""


@register("network", "unet")
class UNet(PixelNetwork):
    """U-Net: two convolutions a level, max pooling on the way down, transposed convolutions and skips on the way up.

    Each convolution is followed by instance normalisation and a ReLU; a last convolution of size 1 returns the logits.

    Args:
        channels: Channels of each level, from the size of the image on; each further level halves the maps.
        kernel: Kernel of the convolutions, pixels.
        parameters_of: Preset whose number of parameters the network gets, within 3 %; ``channels`` then only give the
            proportions of the levels. none: ``channels`` unchanged.
        classification_loss: Loss of the scores of the pixels.

    Raises:
        InputError: ``channels`` is empty; or no width has the number of parameters of ``parameters_of``.

    Source: Ronneberger, Fischer, Brox 2015 (arXiv:1505.04597), with padding and with instance normalisation as in
    nnU-Net (Isensee et al. 2021, arXiv:1904.08128).
    """

    def __init__(
        self,
        in_shape: Sequence[int],
        num_classes: int,
        *,
        objects: Width = 1,
        task: TaskName = "pixels",
        channels: tuple[Width, ...] = (32, 64, 128, 256),
        kernel: OddKernel = 3,
        parameters_of: str | None = None,
        classification_loss: PixelLoss = "dice-cross-entropy",
    ) -> None:
        super().__init__(in_shape, num_classes, objects, task, classification_loss)
        if not channels:
            raise InputError("channels must be at least one number, one for each level, got none")
        self.channels, self.kernel, self.parameters_of = tuple(channels), kernel, parameters_of
        self.widths = self.channels if parameters_of is None else self._widths_of(parameters_of)
        """Channels of each level."""
        self.stride = 2 ** (len(channels) - 1)
        self.pool = MAP_MODULES[self.dims].max_pool(2)
        before = (self.in_shape[0], *self.widths)
        self.down = nn.ModuleList(self._level(*pair) for pair in itertools.pairwise(before))
        pairs = [*itertools.pairwise(self.widths)][::-1]  # (finer, coarser), from the coarsest on
        self.up = nn.ModuleList(MAP_MODULES[self.dims].transposed(coarse, fine, 2, 2) for fine, coarse in pairs)
        self.join = nn.ModuleList(self._level(2 * fine, fine) for fine, _ in pairs)
        self.classify = MAP_MODULES[self.dims].convolution(self.widths[0], num_classes, 1)

    def _level(self, before: int, width: int) -> nn.Module:
        layers: list[nn.Module] = []
        for fan_in in (before, width):
            convolution = MAP_MODULES[self.dims].convolution(
                fan_in, width, self.kernel, padding=self.kernel // 2, bias=False
            )
            layers += [convolution, InstanceNorm(width, learned=True), nn.ReLU()]
        return nn.Sequential(*layers)

    def _widths_of(self, preset: str) -> tuple[int, ...]:
        """Return the channels of each level with which the network has as many parameters as a preset."""
        from torchcaps.models.presets.registry import get_preset  # their table imports this module

        tree = get_preset(preset).network
        if find("network", tree["name"]) is UNet:
            raise InputError(f"parameters_of must be a preset that is not a U-Net itself, got {preset}")
        planned = plan_network(tree, self.in_shape, self.num_classes)
        target = sum(parameter.numel() for parameter in planned.parameters())
        scales = [0.0, 1.0]
        while self._count(self._scaled(scales[1])) < target:
            scales = [scales[1], 2 * scales[1]]
        for _ in range(40):
            middle = sum(scales) / 2
            scales[self._count(self._scaled(middle)) >= target] = middle
        widths = min(map(self._scaled, scales), key=lambda each: abs(self._count(each) - target))
        if abs(self._count(widths) - target) > MAX_DIFFERENCE * target:
            raise InputError(
                f"no U-Net of {counted(len(self.channels), 'level')} has the {target:,} parameters of {preset} within "
                f"{MAX_DIFFERENCE:.0%}; set fewer channels than {self.channels}"
            )
        return widths

    def _scaled(self, scale: float) -> tuple[int, ...]:
        return tuple(max(1, round(scale * width)) for width in self.channels)

    def _count(self, widths: Sequence[int]) -> int:
        """Return the number of parameters of a network with these channels."""
        area = self.kernel**self.dims
        level = lambda before, width: area * (before + width) * width + 4 * width  # noqa: E731
        down = sum(level(*pair) for pair in itertools.pairwise((self.in_shape[0], *widths)))
        up = sum(2**self.dims * a * b + a + level(2 * a, a) for a, b in itertools.pairwise(widths))
        return down + up + (widths[0] + 1) * self.num_classes

    def forward(
        self,
        images: Float[Tensor, "B C *S"],
        targets: Masks | None = None,  # noqa: ARG002  all networks have the same arguments
        return_coupling: bool = False,
    ) -> ModelOutput:
        """Return the probability of each class for each pixel; see :class:`PixelNetwork` for sizes.

        Args:
            images: Pixels 0..1.
            targets: Not used.
            return_coupling: Not allowed.

        Raises:
            InputError: The images do not fit the network, or ``return_coupling`` is set, which needs capsules.
        """
        maps = self.padded(images, return_coupling)
        skips: list[Tensor] = []
        for level in self.down:
            maps = level(self.pool(maps) if skips else maps)
            skips.append(maps)
        for up, join, skip in zip(self.up, self.join, skips[-2::-1], strict=True):
            maps = join(torch.cat([up(maps), skip], 1))
        logits = in_full_precision(cut_to(self.classify(maps), images.shape[2:]))
        return ModelOutput(self._task.activate(logits, self), logits=logits)
