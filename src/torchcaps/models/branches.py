"""Branches: capsules of the classes at several depths of a backbone, whose logits are added."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Literal

import torch
from jaxtyping import Float
from torch import Tensor, nn

from torchcaps.errors import InputError
from torchcaps.models.cnn import CNN
from torchcaps.models.shapes import build_layers, infer_map_shape, infer_shapes
from torchcaps.nn import Capsules, DenseCapsules
from torchcaps.nn.convolutions import Shift
from torchcaps.nn.routing.vb import batch_normalised
from torchcaps.parts import Choice, Spec, build, register
from torchcaps.ranges import Epsilon, PositiveFactor, Width
from torchcaps.tasks import TaskName

BranchWeights = Literal["equal", "learned", "random"]
"""Weights of the branches: 1 and not learned, learned from 1, or learned from random numbers."""

DEFAULT_STAGES: tuple[Spec, ...] = ("stack",)
DEFAULT_CAPSULES: tuple[Spec, ...] = ("positions",)
DEFAULT_BRANCHES: tuple[Spec, ...] = ("dense",)


@register("network", "branches")
class BranchedNetwork(CNN):
    """Backbones in a chain; the maps of each become capsules of the classes, and the branches' logits are added.

        z_b = lengths (or activations) of the class capsules of branch b
        logits = Σ_b BatchNorm(β_b z_b) + shift_b

    The normalisation is over the images of a batch and the classes, without a learned scale. The scores are
    probabilities of the logits. So the network is used and evaluated like a CNN: a class has a capsule in each branch,
    and none of its own.

    Args:
        pixel_scale: Factor on the pixels (0..1) before the network: 255.0 for networks fed with unscaled pixels.
        length_eps: Number added under the root of the class capsules' lengths; see squash_eps.
        stages: Backbones one after another; each takes the maps of the one before, and has a branch.
        stage_capsules: Layer that turns the maps of each stage into capsules, one for each stage.
        branches: Capsule layer of each branch, with a capsule for each class.
        branch_weights: Weights β of the branches: equal (1, not learned), learned from 1, or learned from random
            numbers (normal, standard deviation 0.05).

    Raises:
        TooSmall: The images are smaller than the convolutions need.
        InputError: The parts do not fit each other.

    Source: Byerly, Kalganova, Dear 2021, "No Routing Needed Between Capsules" (arXiv:2001.09136), and its code.
    """

    def __init__(
        self,
        in_shape: Sequence[int],
        num_classes: int,
        *,
        objects: Width = 1,
        task: TaskName = "classes",
        pixel_scale: PositiveFactor = 1.0,
        length_eps: Epsilon = 1e-7,
        stages: Annotated[Sequence[Spec], Choice("backbone", many=True)] = DEFAULT_STAGES,
        stage_capsules: Annotated[Sequence[Spec], Choice("primary", many=True)] = DEFAULT_CAPSULES,
        branches: Annotated[Sequence[Spec], Choice("layer", many=True)] = DEFAULT_BRANCHES,
        branch_weights: BranchWeights = "equal",
    ) -> None:
        super().__init__(in_shape, num_classes, objects, task)
        self.pixel_scale, self.length_eps, self.branch_weights = pixel_scale, length_eps, branch_weights
        if not len(stages) == len(stage_capsules) == len(branches) > 0:
            raise InputError(
                "stages, stage_capsules and branches must have one value for each branch, got "
                f"{len(stages)}, {len(stage_capsules)} and {len(branches)}"
            )
        self.stages, self.stage_capsules, self.branches = nn.ModuleList(), nn.ModuleList(), nn.ModuleList()
        shape = self.in_shape
        for backbone, primary, branch in zip(stages, stage_capsules, branches, strict=True):
            stage = build("backbone", backbone, in_channels=shape[0], in_shape=shape)
            maps = infer_map_shape(stage, shape)[0]
            to_capsules = build("primary", primary, in_channels=maps.shape[1])
            capsules: Capsules = infer_shapes(to_capsules, maps)[0]
            (layer,), _ = build_layers([branch], capsules, num_classes)
            if not isinstance(layer, DenseCapsules) or layer.out_capsules != num_classes:
                raise InputError("each of branches must be a dense layer without num_capsules, with a capsule a class")
            for parts, part in ((self.stages, stage), (self.stage_capsules, to_capsules), (self.branches, layer)):
                parts.append(part)
            for part, spec in ((stage, backbone), (to_capsules, primary)):
                if part is not spec and hasattr(part, "init_weights"):
                    part.init_weights()
            shape = tuple(maps.shape[1:])
        self.classify = MergedLogits(len(branches), branch_weights)

    def features(self, images: Float[Tensor, "B C H W"]) -> Float[Tensor, "B J N"]:
        """Return the lengths (or activations) of the class capsules of each branch."""
        maps, scores = images if self.pixel_scale == 1 else images * self.pixel_scale, []
        for stage, to_capsules, branch in zip(self.stages, self.stage_capsules, self.branches, strict=True):
            maps = stage(maps)
            scores.append(branch(to_capsules(maps)).scores(self.length_eps))
        return torch.stack(scores, 2)


class MergedLogits(nn.Module):
    """Sum of the branches: Σ_b BatchNorm(β_b z_b) + shift_b, normalised over images and classes.

    Args:
        branches: Number of branches (N).
        weights: How the weights β begin, and whether they are learned.
    """

    def __init__(self, branches: int, weights: BranchWeights) -> None:
        super().__init__()
        self.weights = weights
        self.weight = nn.Parameter(torch.empty(branches)) if weights != "equal" else None
        self.norm = nn.BatchNorm1d(branches, eps=1e-3, affine=False)
        self.shift = Shift(branches)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Set the weights to one, or draw them."""
        if self.weight is not None and self.weights == "random":
            nn.init.normal_(self.weight, std=0.05)
        elif self.weight is not None:
            nn.init.ones_(self.weight)

    def forward(self, scores: Float[Tensor, "B J N"]) -> Float[Tensor, "B J"]:
        """Return the logits of the classes."""
        weighted = scores if self.weight is None else scores * self.weight.to(scores.dtype)
        return self.shift(batch_normalised(weighted.mT, self.norm)).sum(1)
