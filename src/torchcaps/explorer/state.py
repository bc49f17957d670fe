"""What the explorer shows of an image: scores, capsules, coupling, and what a changed capsule decodes to.

No page and no server in it. J classes, D components, T routing iterations, P objects in an image.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from jaxtyping import Float, UInt8
from PIL import Image

from torchcaps.analysis import predict, trace_routing
from torchcaps.analysis.doubt import Calibration, distances, runner_up
from torchcaps.analysis.inference import as_pixels, class_labels, inference, require_decoder
from torchcaps.datasets import ImageSet
from torchcaps.datasets.formats.image_files import read_photo
from torchcaps.datasets.preparation import Preparation
from torchcaps.datasets.registry import look_up
from torchcaps.errors import InputError, visible
from torchcaps.files import real
from torchcaps.models import Network
from torchcaps.models.objects import longest
from torchcaps.models.output import ScoreName
from torchcaps.models.pretrained import is_shipped
from torchcaps.training import Run

MOST_MAPS = 10
"""Of more classes, only those of the highest scores have their coupling shown."""

# Red, green, blue of the first object and of the second: orange and blue, which every colour vision tells apart, and
# together white, so that a pixel that both objects explain is white. Further objects repeat them.
OBJECT_COLOURS = ((1.0, 0.5, 0.0), (0.2, 0.6, 1.0))
_NO_CAPSULES = "A convolutional network has no capsules."
_SHEET = Path(__file__).parent / "mnist-50.png"  # five rows of the ten digits in order, see mnist-50.md


@dataclass(frozen=True, eq=False)
class Routing:
    """The coupling of one image, iteration by iteration.

    Args:
        classes: Whose maps these are, in the order of their numbers: all classes, or those of the highest scores.
        maps: The coupling on the grid of the last layer's input capsules, averaged over their types.
        scores: ‖v_j‖ after each iteration, or activations.
        uniform: What uniform coupling would be.
        in_space: Whether a place on the grid is one in the image; not where capsules were grouped in raster order.
        inputs: What the input capsules are, in words.
    """

    classes: tuple[int, ...]
    maps: Float[np.ndarray, "T shown H W"]
    scores: Float[np.ndarray, "T shown"]
    uniform: float
    in_space: bool
    inputs: str

    @property
    def reach(self) -> float:
        """How far the coupling goes from uniform at most; a hundredth of uniform coupling at least."""
        return max(float(np.abs(self.maps - self.uniform).max()), 0.02 * self.uniform)

    def levels(self) -> UInt8[np.ndarray, "T shown H W"]:
        """128 + 127·sign(d)·√(|d| / reach), where d is how far coupling is from uniform.

        All maps have one scale. The root lets small distances be seen beside a few large ones.
        """
        away = (self.maps - self.uniform) / self.reach
        return np.round(128 + 127 * np.sign(away) * np.sqrt(np.abs(away))).astype(np.uint8)


@dataclass(frozen=True, eq=False)
class View:
    """What a network says about one image.

    Args:
        scores: Class scores: lengths ‖v_j‖ or activations of capsules, or a CNN's probabilities.
        present: The classes of the P highest scores, the highest first.
        doubts: Why the answer is unsure, each reason in words; empty where it is not.
        capsules: Class capsules v_j; None for a network without.
        routing: None where routing cannot be followed.
    """

    scores: Float[np.ndarray, "J"]
    present: tuple[int, ...]
    doubts: tuple[str, ...]
    capsules: Float[np.ndarray, "J D"] | None
    routing: Routing | None


class Explorer:
    """A network, and images to pick from.

    Args:
        model: Any network of torchcaps, in evaluation mode.
        class_names: The name of each class; its number if None.
        name: What the network is called.
        what: What it is, and which data it was trained on, in words.
        images: To pick from; None if there are none.
        images_of: What they are, in words.
        no_images: Why there are none, in a sentence.
        fit: How an image file is brought to the network's size, see :func:`torchcaps.datasets.read_image`.
        preparation: How the images that it was trained on were made of drawings, so that photos can be made so too;
            None where they were not.
        calibration: What is usual for it; None where that was not measured.

    Attributes:
        no_pose: Why capsules cannot be decoded, in a sentence; None where they can.
        no_routing: Why routing cannot be followed, in a sentence; None where it can.
        score_name: What class scores are.
    """

    def __init__(
        self,
        model: Network,
        class_names: Sequence[str] | None = None,
        *,
        name: str = "",
        what: str = "",
        images: ImageSet | None = None,
        images_of: str = "images to pick from",
        no_images: str = "There are no images to pick from.",
        fit: Literal["pad", "stretch"] = "pad",
        preparation: Preparation | None = None,
        calibration: Calibration | None = None,
    ) -> None:
        self.model, self.images, self.no_images, self.fit, self.preparation = model, images, no_images, fit, preparation
        self.calibration = calibration or Calibration()
        self.name, self.what, self.images_of = visible(name), visible(what), visible(images_of)
        self.class_names = [visible(name) for name in class_labels(class_names, model.num_classes)]
        blank = torch.zeros(1, *model.in_shape, dtype=torch.uint8)
        self.no_pose, self.no_routing = _why_no_pose(model), _why_no_routing(model, blank)
        self.score_name: ScoreName = predict(model, blank).score_name

    @property
    def title(self) -> str:
        """The network's name, and what it is."""
        return f"{self.name}: {self.what}" if self.what else self.name

    @property
    def num_objects(self) -> int:
        """P, how many objects an image shows."""
        return self.model.config.objects

    def look(self, pixels: UInt8[np.ndarray, "C H W"]) -> View:
        """What the network says about an image, pixels 0..255; InputError for one of another shape than its own."""
        image, model = torch.from_numpy(pixels)[None], self.model  # another one may take its place meanwhile
        with inference(model):
            output = model(as_pixels(model, image))
        drawn = None if output.reconstruction is None else output.reconstruction.float().cpu().numpy()
        scores = output.scores[0].float().cpu()
        capsules = None if output.capsules is None else output.capsules[0].float().cpu().numpy()
        routing = None
        if self.no_routing is None:
            trace = trace_routing(model, image)
            shown = np.sort(longest(scores, min(MOST_MAPS, len(scores))).numpy())
            routing = Routing(
                classes=tuple(shown.tolist()),
                maps=trace.maps[:, 0, shown].mean(2),
                scores=trace.scores[:, 0, shown],
                uniform=trace.uniform,
                in_space=trace.in_space,
                inputs=trace.inputs,
            )
        present = tuple(longest(scores, self.num_objects).tolist())
        off = None if drawn is None else float(distances(pixels[None].astype(np.float32) / 255, drawn)[0])
        doubts = self.calibration.doubts(float(scores[present[-1]]), off, runner_up(scores.numpy(), present))
        return View(scores.numpy(), present, doubts, capsules, routing)

    def decode(self, classes: Sequence[int], poses: Float[np.ndarray, "P D"]) -> Float[np.ndarray, "P C H W"]:
        """Images decoded from one capsule each, the other capsules being zero; pixels 0..1.

        Args:
            classes: Whose capsules they are.
            poses: The capsules.

        Raises:
            InputError: No decoder; no such class; or not one capsule for each of at least one class and at most all.
        """
        network = require_decoder(self.model, "a reconstruction")
        for j in classes:
            if not 0 <= j < network.num_classes:
                raise InputError(f"a class must be from 0 to {network.num_classes - 1}, got {j}")
        wanted = (len(classes), network.capsule_dim)
        if not 0 < len(classes) <= network.num_classes or poses.shape != wanted:
            raise InputError(
                f"capsules must have shape {wanted}, one row of components for each of at least one class and at most "
                f"{network.num_classes}, got {poses.shape}"
            )
        with inference(network):
            weight = next(network.parameters())
            capsules = weight.new_zeros(len(classes), network.num_classes, network.capsule_dim)
            capsules[range(len(classes)), list(classes)] = torch.from_numpy(poses).to(weight)
            return network.decode(capsules).float().cpu().numpy()

    def pick(self, index: int) -> tuple[UInt8[np.ndarray, "C H W"], str]:
        """The image of an index, from 0, and what it shows, in words; InputError where there is none."""
        if self.images is None:
            raise InputError(self.no_images)
        if not 0 <= index < len(self.images):
            raise InputError(f"test images go from 0 to {len(self.images) - 1}, got {index}")
        labels = self.images.labels[index].reshape(-1).tolist()
        return self.images.images[index].numpy(), " and ".join(self.class_names[j] for j in labels)

    def read(
        self, name: str, data: bytes, *, prepare: bool = False
    ) -> tuple[UInt8[np.ndarray, "C H W"], Sequence[str]]:
        """An image file as the network takes it, and what was changed much in it, each in a few words.

        Args:
            name: Of the file, for the error.
            data: What is in it.
            prepare: Whether to make it as the images were that the network was trained on, see
                :func:`torchcaps.datasets.prepare_image`; those that are so already stay as they are.

        Raises:
            InputError: No image or a broken one, or the network's images have other channels than files have.
        """
        channels = self.model.in_shape[0]
        if channels not in (1, 3):
            raise InputError(f"this network takes images of {channels} channels, but an image file has 1 or 3")
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "image"
            path.write_bytes(data)
            preparation = self.preparation if prepare else None
            photo = read_photo(path, self.model.in_shape, preparation=preparation, fit=self.fit, name=f"“{name}”")
        return photo.prepared.image, photo.prepared.changes


def open_explorer(run: Run, data: str | None = None, data_dir: str | None = None) -> Explorer:
    """An explorer of a run's network, with the test images of the run's data set to pick from.

    Nothing is downloaded: data that are not on this machine are left out, and the explorer says why.

    Args:
        run: The network.
        data: Another data set than the run's.
        data_dir: Where its files are.

    Raises:
        InputError: ``data`` is named, but is not here or does not fit the network.
    """
    images, images_of, no_images = None, "", ""
    try:
        images, images_of = _images(run, data, data_dir)
    except InputError as error:
        if data is not None:
            raise
        no_images = f"There are no test images to pick from: {error}."
    return Explorer(
        run.model,
        run.class_names,
        name=real(run.path).name,
        what=_what(run),
        images=images,
        images_of=images_of,
        no_images=no_images,
        fit=run.image_fit,
        preparation=run.preparation,
        calibration=run.calibration,
    )


def check_side_by_side(explorers: Sequence[Explorer]) -> None:
    """Raise InputError unless all networks take the same images and have the same classes."""
    first, *others = explorers
    for other in others:
        for what, own, wanted in (
            ("images of", other.model.in_shape, first.model.in_shape),
            ("the classes", ", ".join(other.class_names), ", ".join(first.class_names)),
        ):
            if own != wanted:
                raise InputError(
                    f"two networks are shown side by side where they see the same images: {first.name} has {what} "
                    f"{wanted}, {other.name} {own}"
                )


def _images(run: Run, data: str | None, data_dir: str | None) -> tuple[ImageSet, str]:
    """Images to pick from, and what they are."""
    if data is None and is_shipped(run.path):
        return shipped_images(), "test images of MNIST, five of each digit"
    name = run.config.data if data is None and run.config is not None else data
    if name is not None and not run.has_data(data, data_dir):
        raise InputError(
            f"the files of {name} are not on this machine and the explorer downloads nothing; name their folder "
            "with --data-dir or TORCHCAPS_DATA"
        )
    dataset = run.dataset(data, data_dir)
    return dataset.test, f"test images of {describe_data(dataset.name)}"


def shipped_images() -> ImageSet:
    """50 test images of MNIST, which come with torchcaps: five of each digit, row after row of 0 to 9."""
    with Image.open(_SHEET) as sheet:
        pixels = np.array(sheet)
    tiles = pixels.reshape(5, 28, 10, 28).transpose(0, 2, 1, 3).reshape(50, 1, 28, 28)
    return ImageSet(torch.from_numpy(tiles.copy()), torch.arange(50) % 10)


def _what(run: Run) -> str:
    if run.config is not None:
        return f"{run.config.preset}, trained on {describe_data(run.config.data)}"
    if is_shipped(run.path):
        return "the network that comes with torchcaps, trained on MNIST handwritten digits"
    return "its folder does not say what it was trained on"


def describe_data(data: str) -> str:
    """The title of a data set that is known, such as ``MNIST handwritten digits``; else what was given."""
    try:
        return look_up(data)[0].title if ":" not in data else data
    except InputError:
        return data


def colour_apart(images: Float[np.ndarray, "P C H W"]) -> Float[np.ndarray, "P 3 H W"]:
    """Images of objects, each in the colour of its own; pixels 0..1."""
    colours = np.array([OBJECT_COLOURS[p % len(OBJECT_COLOURS)] for p in range(len(images))], dtype=images.dtype)
    return images.mean(1, keepdims=True) * colours[:, :, None, None]


def overlay(coloured: Float[np.ndarray, "P 3 H W"]) -> Float[np.ndarray, "3 H W"]:
    """Coloured images as lights that shine on one place."""
    return coloured.sum(0).clip(0, 1)


def to_bytes(images: Float[np.ndarray, "..."]) -> UInt8[np.ndarray, "..."]:
    """Pixels 0..1 as 0..255, rounded."""
    return np.round(images.clip(0, 1) * 255).astype(np.uint8)


def _why_no_pose(model: Network) -> str | None:
    if not model.config.has_capsules:
        return _NO_CAPSULES
    try:
        require_decoder(model, "a reconstruction")
    except InputError:
        return "Capsules cannot be decoded: this network has no decoder."
    return None


def _why_no_routing(model: Network, image: UInt8[torch.Tensor, "1 C H W"]) -> str | None:
    if not model.config.has_capsules:
        return _NO_CAPSULES
    try:
        trace_routing(model, image)
    except InputError as error:
        return f"Routing cannot be followed: {error}."
    return None
