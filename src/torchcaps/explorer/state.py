"""Compute a network's answers to an image: scores, capsules, coupling, and decoded images.

J classes, D components, T routing iterations, P objects in an image.
"""

from __future__ import annotations

import copy
import tempfile
from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, UInt8
from PIL import Image

from torchcaps.analysis import RoutingTrace, predict, trace_routing
from torchcaps.analysis.calibration import Calibration, Prediction
from torchcaps.analysis.inference import as_pixels, class_labels, inference, require_decoder
from torchcaps.analysis.trace import trace_class_capsules
from torchcaps.checks import check, checked
from torchcaps.datasets import ImageSet, find_dataset
from torchcaps.datasets.images import Fit, read_photo
from torchcaps.datasets.preparation import Preparation, Prepared
from torchcaps.datasets.scaling import as_bytes
from torchcaps.errors import InputError
from torchcaps.explorer.patches import find_patches
from torchcaps.files import real
from torchcaps.models import CapsNet, ModelOutput, Network
from torchcaps.models.files import SHIPPED
from torchcaps.parts import options
from torchcaps.ranges import AtLeastOneIteration, Pages
from torchcaps.tasks import task_of
from torchcaps.training import Run

MAX_COMPONENT = 1000
"""Largest component of a capsule to decode, so that decoded images stay finite; a network's are below 1."""
_SHEET = Path(__file__).parent / "mnist-50.png"  # five rows of the ten digits in order, see mnist-50.md


@dataclass(frozen=True, eq=False)
class View:
    """A network's answer to one image.

    Args:
        scores: Class scores: lengths ‖v_j‖ or activations of capsules, or probabilities of a CNN.
        present: The predicted classes: the P highest scores, highest first.
        caveats: Reasons why the answer is unsure; empty if there are none.
        capsules: Class capsules v_j; None for a network without capsules.
        routing: Coupling in each iteration, see :func:`describe_routing`; None if routing cannot be followed.
        decoded: The image decoded from each present class's capsule alone, pixels 0..1; None if no capsule can be
            decoded.
    """

    scores: Float[np.ndarray, "J"]
    present: list[int]
    caveats: tuple[str, ...]
    capsules: Float[np.ndarray, "J D"] | None
    routing: dict[str, Any] | None
    decoded: Float[np.ndarray, "P C H W"] | None


@dataclass(eq=False, repr=False)
class Explorer:
    """A network, and images to pick from.

    Args:
        model: Any network of torchcaps, in evaluation mode; it may be replaced by another of the same shape.
        class_names: Name of each class (default: its number).
        name: Name of the network.
        what: Description of the network and its training data.
        images: Images to pick from; None if there are none.
        images_of: Description of ``images``.
        no_images: Sentence that says why there are no images.
        fit: How an image file is resized to the network's shape, see :func:`torchcaps.datasets.read_image`.
        preparation: How the training images were made from drawings, to prepare photos in the same way; None: photos
            are not prepared.
        calibration: Thresholds beyond which an answer is unsure.
        scale: Numbers of an image file that become 0 and 1; None: by its number of bits.
        pages: Meaning of the pages of an image file; None: it has one.

    Attributes:
        no_pose: Sentence that says why capsules cannot be decoded; None if they can.
        no_routing: Sentence that says why routing cannot be followed; None if it can.
        iterations: Routing iterations of the class capsules; None if the routing has no such number.
        patches: Receptive fields of the cells of the routing maps, see
            :func:`~torchcaps.explorer.patches.find_patches`.
        score_name: Name of the class scores, such as "length".
    """

    model: Network
    class_names: Sequence[str] = ()
    _: KW_ONLY
    name: str = ""
    what: str = ""
    images: ImageSet | None = None
    images_of: str = "images to pick from"
    no_images: str = "There are no images to pick from."
    fit: Fit = "pad"
    preparation: Preparation | None = None
    calibration: Calibration = field(default_factory=Calibration)
    scale: tuple[float, float] | None = None
    pages: Pages | None = None

    def __post_init__(self) -> None:
        check("Explorer: model", self.model, Network)
        check("Explorer: images", self.images, ImageSet | None)
        blank = torch.zeros(1, *self.model.in_shape, dtype=torch.uint8)
        answer = predict(self.model, blank)
        self.score_name = answer.score_name
        if self.model.has_slots:  # names of the data set are those of objects
            self.class_names = [f"slot {number}" for number in range(answer.scores.shape[1])]
        self.class_names = class_labels(self.class_names or None, answer.scores.shape[1])
        self.no_pose: str | None = None
        self.no_routing: str | None = None
        self.iterations: int | None = None
        self.patches = find_patches(self.model)
        if self.model.has_slots:
            self.no_routing = "Routing cannot be followed: slots compete for features, but there are no votes."
            return
        if not self.model.has_capsules:
            self.no_pose = self.no_routing = "A convolutional network has no capsules."
            return
        if self.model.decoder is None:
            self.no_pose = "Capsules cannot be decoded: this network has no decoder."
        try:
            trace_routing(self.model, blank)
        except InputError as error:
            self.no_routing = f"Routing cannot be followed: {error}."
        if isinstance(self.model, CapsNet) and not self.no_routing:
            routing = self.model.class_capsules.routing
            self.iterations = routing.num_iterations if "num_iterations" in options(type(routing)) else None

    @property
    def title(self) -> str:
        """Return name and description of the network."""
        return f"{self.name}: {self.what}" if self.what else self.name

    def look(self, pixels: UInt8[np.ndarray, "C H W"], iterations: int = 0) -> View:
        """Return the network's answer to an image; its backbone and its decoder each run once.

        Args:
            pixels: 0..255.
            iterations: Routing iterations of the class capsules; 0: the network's own number.

        Raises:
            InputError: An image of another shape than the network's, or a number of iterations that it cannot have.
        """
        image, model = torch.from_numpy(pixels)[None], self.routed_in(iterations)
        if model.has_slots:
            with inference(model):
                return self._view_of_slots(model(as_pixels(model, image)))
        routing = None
        with inference(model):
            if isinstance(model, CapsNet):
                inputs = model.capsules(as_pixels(model, image))[-1]
                output = model.classify(inputs)
                if not self.no_routing:
                    routing = describe_routing(trace_class_capsules(model, image, inputs))
            else:
                output = model(as_pixels(model, image))
        scores = output.scores[0].float().cpu()
        present = task_of(model).predict_classes(scores[None]).view(-1).tolist()
        capsules = None if output.capsules is None else output.capsules[0].float().cpu().numpy()
        drawn = None if output.reconstruction is None else output.reconstruction.float().cpu().numpy()
        seen = pixels[None].astype(np.float32) / 255
        said = Prediction.of(seen, np.array([present]), scores[None].numpy(), drawn, self.calibration, self.score_name)
        decoded = None if drawn is None or self.no_pose else drawn.reshape(-1, *model.in_shape)
        return View(scores.numpy(), present, said.caveats[0], capsules, routing, decoded)

    def _view_of_slots(self, output: ModelOutput) -> View:
        """Return the answer of a network with slots: all slots, the one with the largest share of the image first."""
        assert output.capsules is not None
        shares = output.scores[0].float().mean((1, 2)).cpu()
        present = shares.argsort(descending=True).tolist()
        capsules = output.capsules[0].float().cpu().numpy()
        return View(shares.numpy(), present, (), capsules, None, _parts(output, present))

    def votes(self, pixels: UInt8[np.ndarray, "C H W"], cell: Sequence[int], iterations: int = 0) -> dict[str, Any]:
        """Return the votes of the capsules in one cell of the routing maps, for the classes that have maps.

        Args:
            pixels: As for :meth:`look`.
            cell: Row and column.
            iterations: As for :meth:`look`.

        Returns:
            ``agreement`` ⟨û_j|i, v_j⟩ and ``coupling`` c_ij of each iteration, [T, types, classes].

        Raises:
            InputError: As for :meth:`look`, or a cell outside the maps.
        """
        if self.no_routing:
            raise InputError(self.no_routing)
        trace = trace_routing(self.routed_in(iterations), torch.from_numpy(pixels)[None])
        if not all(0 <= at < size for at, size in zip(cell, trace.grid[1:], strict=True)):
            last = [size - 1 for size in trace.grid[1:]]
            raise InputError(f"cell (row, column) must be [0, 0] to {last}, got {list(cell)}")
        row, column = cell
        rounds, _, _, classes = trace.coupling.shape

        def of_cell(numbers: Float[np.ndarray, "T B I J"]) -> Float[np.ndarray, "T types classes"]:
            return numbers.reshape(rounds, *trace.grid, classes)[:, :, row, column, shown_classes(trace)]

        return {"agreement": of_cell(trace.agreement), "coupling": of_cell(trace.coupling)}

    def routed_in(self, iterations: int) -> Network:
        """Return the network with another number of iterations of its class capsules; weights are shared."""
        model = self.model
        if iterations in (0, self.iterations):
            return model
        if self.iterations is None:
            raise InputError("this network's routing has no number of iterations to change")
        check("iterations", iterations, AtLeastOneIteration)
        other = copy.deepcopy(model, {id(each): each for each in (*model.parameters(), *model.buffers())})
        assert isinstance(other, CapsNet)
        other.class_capsules.routing.num_iterations = iterations
        return other

    def decode(self, classes: Sequence[int], poses: Float[np.ndarray, "P D"]) -> Float[np.ndarray, "P C H W"]:
        """Return images (pixels 0..1), each decoded from one capsule; the capsules of other classes are zero.

        Of a network with slots, return the part of each slot in the image that all slots draw together.

        Args:
            classes: Class of each capsule, or number of each slot.
            poses: The capsules, components within ±1000.

        Raises:
            InputError: No decoder, no such class, not one capsule for each class, or too large components; or not all
                slots.
        """
        if self.model.has_slots:
            return self._decode_slots(classes, poses)
        network = require_decoder(self.model, "a reconstruction", "explore")
        most, shape = network.num_classes, (len(classes), network.capsule_dim)
        has_classes = 0 < len(classes) <= most and all(0 <= j < most for j in classes)
        if not has_classes or poses.shape != shape or not (np.abs(poses) <= MAX_COMPONENT).all():
            raise InputError(
                f"decode needs 1 to {most} classes of 0 to {most - 1}, and for each a capsule of {network.capsule_dim} "
                f"components within ±{MAX_COMPONENT}"
            )
        with inference(network):
            weight = next(network.parameters())
            capsules = weight.new_zeros(len(classes), most, network.capsule_dim)
            capsules[range(len(classes)), list(classes)] = torch.from_numpy(poses).to(weight)
            return network.decode(capsules).float().cpu().numpy()

    def _decode_slots(self, numbers: Sequence[int], poses: Float[np.ndarray, "J D"]) -> Float[np.ndarray, "J C H W"]:
        model, count = self.model, len(self.class_names)
        fits = sorted(numbers) == list(range(count)) and poses.shape == (count, model.capsule_dim)
        if not fits or not (np.abs(poses) <= MAX_COMPONENT).all():
            raise InputError(
                f"decode needs all slots, 0 to {count - 1}, and for each {model.capsule_dim} components within "
                f"±{MAX_COMPONENT}"
            )
        with inference(model):
            slots = torch.from_numpy(poses[np.argsort(numbers)]).to(next(model.parameters()))[None]
            assert model.decoder is not None
            image, masks = model.decoder(slots)
            return _parts(ModelOutput(masks, slots, image), numbers)

    def pick(self, index: int) -> tuple[UInt8[np.ndarray, "C H W"], str]:
        """Return an image by its index, from 0, and its label in words; InputError if there is none."""
        if self.images is None:
            raise InputError(self.no_images)
        if not 0 <= index < len(self.images):
            raise InputError(f"the number of a test image must be 0 to {len(self.images) - 1}, got {index}")
        pixels, target = as_bytes(self.images.images[index].numpy()), self.images.labels[index]
        if self.model.has_slots:
            return pixels, task_of(self.model).describe(self.class_names, target)
        return pixels, " and ".join(self.class_names[j] for j in target.reshape(-1).tolist())

    def read(self, name: str, data: bytes, *, prepare: bool = False) -> Prepared:
        """Return the image of an uploaded file in the network's shape, and the changes that were made to it.

        Args:
            name: Name of the file, for errors.
            data: Contents of the file.
            prepare: Preprocess a photo like the training images, see :func:`torchcaps.datasets.prepare_image`.

        Raises:
            InputError: As for :func:`torchcaps.datasets.read_image`.
        """
        options: Any = {"preparation": self.preparation if prepare else None, "fit": self.fit, "scale": self.scale}
        options["pages"] = self.pages
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "image"
            path.write_bytes(data)
            prepared = read_photo(path, self.model.in_shape, name=f"“{name}”", **options).prepared
        return replace(prepared, image=as_bytes(prepared.image))


def _parts(output: ModelOutput, numbers: Sequence[int]) -> Float[np.ndarray, "P C H W"]:
    """Return the part m_j ∘ image of each slot in a redrawn image; all parts together are the image."""
    assert output.reconstruction is not None
    parts: np.ndarray = (output.scores[0].unsqueeze(1) * output.reconstruction).float().cpu().numpy()
    return parts[list(numbers)]


def describe_routing(trace: RoutingTrace) -> dict[str, Any]:
    """Return the coupling of one image in each iteration, for at most ten classes (those with the highest scores).

    ``maps`` hold the coupling on the grid of the input capsules, averaged over types and coded by :func:`levels`;
    ``largest`` is the largest of these means in each iteration.
    """
    shown = shown_classes(trace)
    coupling = trace.maps[:, 0, shown].mean(2)
    maps = levels(coupling, trace.uniform, trace.reach)
    return {
        "classes": shown,
        "size": coupling.shape[2:],
        "maps": [list(iteration) for iteration in maps],
        "means": coupling.mean((2, 3)),
        "scores": trace.scores[:, 0, shown],
        "uniform": round(trace.uniform, 4),
        "reach": trace.reach,
        "largest": coupling.max((1, 2, 3)),
        "inSpace": trace.in_space,
        "inputs": trace.inputs,
    }


def shown_classes(trace: RoutingTrace) -> list[int]:
    """Return the classes that have maps: the ten highest scores, sorted by class."""
    return sorted(trace.highest)


def levels(coupling: Float[np.ndarray, "..."], uniform: float, reach: float) -> UInt8[np.ndarray, "..."]:
    """Return the bytes 128 + 127·sign(d)·√(min(|d| / reach, 1)).

    d is the difference of coupling from uniform coupling, and reach the |d| at the end of the colour scale, see
    :attr:`torchcaps.analysis.RoutingTrace.reach`. Maps of all images share one scale. The square root makes small
    differences visible beside a few large ones.
    """
    away = (coupling - uniform) / reach
    return np.round(128 + 127 * np.sign(away) * np.sqrt(np.abs(away).clip(max=1))).astype(np.uint8)


def to_bytes(images: Float[np.ndarray, "..."]) -> UInt8[np.ndarray, "..."]:
    """Convert pixels 0..1 to bytes 0..255, rounded."""
    return np.round(images.clip(0, 1) * 255).astype(np.uint8)


def check_side_by_side(explorers: Sequence[Explorer]) -> None:
    """Raise InputError unless all networks take images of one shape and have the same classes."""
    seen = {(each.model.in_shape, tuple(each.class_names)): each.name for each in explorers}
    if len(seen) > 1:
        networks = "; ".join(f"{name} has images of {shape}, {', '.join(of)}" for (shape, of), name in seen.items())
        raise InputError(f"two networks side by side must take the same images and have the same classes: {networks}")


@checked
def open_explorer(
    run: Run, data: str | None = None, data_dir: str | None = None, *, by_number: bool = False
) -> Explorer:
    """Return an explorer of a run's network, with the test images of the run's data set to pick from.

    Nothing is downloaded. Without the data set's files the explorer has no test images, and says why.

    Args:
        run: The run.
        data: Another data set than the run's.
        data_dir: Folder of its files.
        by_number: Match its classes with those of the run by number, not by name.

    Raises:
        InputError: ``data`` is given, but is not on this machine or does not fit the network.
    """
    task_of(run.model).require("explore", "the explorer")
    what, spec = "trained on unknown data", run.images
    spec.require_pixels("the explorer")
    if run.config is not None:
        what = f"{run.config.preset}, trained on {describe_data(run.config.data)}"
    explorer = Explorer(run.model, run.class_names, name=real(run.path).name, what=what)
    explorer.fit, explorer.preparation = spec.fit, spec.preparation
    explorer.scale, explorer.pages = spec.scale, spec.pages
    explorer.calibration = spec.calibration or Calibration()
    if run.config is None and run.path in SHIPPED.values():
        explorer.what = "the network that comes with torchcaps, trained on MNIST handwritten digits"
        explorer.images, explorer.images_of = shipped_images(), "test images of MNIST, five of each digit"
        if data is None:
            return explorer
    try:
        name = run.config.data if data is None and run.config is not None else data
        if name is not None and not run.has_data(data, data_dir):
            raise InputError(
                f"the files of {name} are not on this machine, and the explorer downloads nothing; give their folder "
                "by --data-dir or TORCHCAPS_DATA"
            )
        part = run.part("test", data, data_dir, by_number=by_number)
    except InputError as error:
        if data is not None:
            raise
        explorer.no_images = f"There are no test images to pick from: {error}."
    else:
        explorer.images, explorer.images_of = part.images, f"test images of {describe_data(part.name)}"
    return explorer


def shipped_images() -> ImageSet:
    """Return the 50 test images of MNIST that come with torchcaps: five rows of the digits 0 to 9."""
    with Image.open(_SHEET) as sheet:
        tiles = np.array(sheet).reshape(5, 28, 10, 28).transpose(0, 2, 1, 3).reshape(50, 1, 28, 28)
    return ImageSet(torch.from_numpy(tiles.copy()), torch.arange(50) % 10)


def describe_data(data: str) -> str:
    """Return the title of a data set, such as ``MNIST handwritten digits``, or ``data`` itself if it has none."""
    try:
        return find_dataset(data)[0].title if ":" not in data else data
    except InputError:
        return data
