from collections.abc import Iterator
from typing import Any

import pytest
import torch

from own_parts import two_layers
from torchcaps.datasets import ImageSet
from torchcaps.models import BaselineCNN, CapsNet, create_model

IN_SHAPE = (1, 8, 10)
SMALL = {
    "conv_channels": 6,
    "conv_kernel": 3,
    "primary_types": 2,
    "primary_dim": 3,
    "primary_kernel": 3,
    "capsule_dim": 5,
    "decoder_hidden": (8,),
}


@pytest.fixture
def make_model():
    """Capsule networks of 12 primary capsules on a 2×3 grid, for images of 8×10, with four classes."""

    def make(preset: str = "sabour2017", in_shape=IN_SHAPE, num_classes: int = 4, **overrides) -> CapsNet:
        torch.manual_seed(0)
        fields = {**SMALL, "decoder": True, **overrides}
        if not fields["decoder"]:
            del fields["decoder_hidden"]  # a network without a decoder has no such field
        model = create_model(preset, in_shape, num_classes, **fields)
        assert isinstance(model, CapsNet)
        with torch.no_grad():
            model.class_capsules.transform.weight.mul_(100)  # else coupling hardly differs from uniform
        return model

    return make


@pytest.fixture
def model(make_model) -> CapsNet:
    return make_model()


@pytest.fixture
def make_deep():
    """Networks of a layer on a map and one of four classes, for images of 8×10 with 48 primary capsules on 4×6."""

    def make(conv: dict[str, Any] | None = None, dense: dict[str, Any] | None = None, **overrides: Any) -> CapsNet:
        torch.manual_seed(0)
        fields = {name: SMALL[name] for name in SMALL if name != "capsule_dim"} | {"primary_stride": 1}
        balanced = {"transform": {"name": "dense", "weight_init": "balanced"}}
        layers = two_layers(balanced | (conv or {}), balanced | (dense or {}))
        model = create_model("sabour2017", IN_SHAPE, 4, layers=layers, **fields, **overrides)
        assert isinstance(model, CapsNet)
        with torch.no_grad():
            for layer in model.layers:
                layer.transform.weight.mul_(10)  # else coupling hardly differs from uniform
        return model

    return make


@pytest.fixture
def cnn() -> BaselineCNN:
    torch.manual_seed(0)
    model = create_model("baseline-cnn", IN_SHAPE, 4, channels=(4, 4), hidden=(6,), dropout=0.5)
    assert isinstance(model, BaselineCNN)
    return model


@pytest.fixture
def make_images():
    def make(count: int, shape=IN_SHAPE):
        return torch.randint(0, 256, (count, *shape), dtype=torch.uint8, generator=torch.Generator().manual_seed(1))

    return make


@pytest.fixture
def images(make_images) -> ImageSet:
    """Images of four classes, in turn."""
    return ImageSet(make_images(120), torch.arange(120) % 4)


@pytest.fixture
def words():
    """Every text of a figure: those placed by hand, titles, axis labels, ticks, legends."""
    from matplotlib.text import Text

    def find(figure) -> list[str]:
        return [text.get_text() for text in figure.findobj(Text) if text.get_text()]

    return find


@pytest.fixture
def touching():
    """Titles, labels and ticks of a figure that come within three pixels of each other, or of other axes."""

    def texts(axes) -> Iterator[Any]:
        yield from (axes.title, axes._left_title, axes.xaxis.label, axes.yaxis.label, *axes.texts)
        for axis in (axes.xaxis, axes.yaxis):
            low, high = sorted(axis.get_view_interval())
            pairs = zip(axis.get_ticklocs(), axis.get_ticklabels(), strict=True)
            yield from (label for place, label in pairs if low <= place <= high)

    def find(figure) -> list[tuple[str, str]]:
        figure.draw_without_rendering()
        shown = [(axes, each) for axes in figure.axes for each in texts(axes) if each.get_text().strip()]
        boxes = [(axes, each.get_text(), each.get_window_extent().padded(1.5)) for axes, each in shown]
        found = [
            (one, two) for n, (_, one, box) in enumerate(boxes) for _, two, other in boxes[:n] if box.overlaps(other)
        ]
        found += [
            (text, "axes")
            for own, text, box in boxes
            for axes in figure.axes
            if axes is not own and box.overlaps(axes.bbox)
        ]
        return found

    return find
