"""What every network is: called with images, described by its parts, saved and read again."""

from __future__ import annotations

import tempfile
from abc import abstractmethod
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Self

import torch
from jaxtyping import Float
from torch import Tensor, nn

from torchcaps.checks import checked
from torchcaps.errors import InputError, reason_of
from torchcaps.files import atomic_path, read_json, write_json, write_text
from torchcaps.machine import check_memory
from torchcaps.models.images import TooSmall
from torchcaps.models.output import PRESENT, Losses, ModelOutput, Targets, Task, is_correct
from torchcaps.models.pretrained import (
    CARD,
    CLASSES,
    CONFIG,
    WEIGHTS,
    asking_the_hub,
    difference,
    find_pretrained,
    load_weights,
    read_weights,
    weights_file,
)
from torchcaps.nn import Decoder
from torchcaps.parts import Spec, build, complete, describe
from torchcaps.ranges import COUNT, Range, image_shape
from torchcaps.tracing import unset_fake_temporarily

if TYPE_CHECKING:
    from torchcaps.models.card import TrainingRecord


LARGEST_SIDE = 512
"""Pixels up to which the smallest size of images is looked for that a network takes."""


class Network(nn.Module):
    """A network for images of one shape and a number of classes; its options and its weights are saved.

    A subclass is registered by ``@register("network", "mine")``.

    Args:
        in_shape: Images (C, H, W).
        num_classes: J.
        objects: Objects in an image, each of another class; with several, a capsule network decodes each from its own
            capsule alone, and a convolutional one has sigmoid cross-entropy instead of that of a softmax.
        task: What is asked of an image: its class; which of several labels it has (targets (B, J) of zeros and ones,
            scored one by one); or numbers, targets (B, J) of a regression.
    """

    has_capsules: ClassVar[bool] = False
    """Whether classes are capsules."""
    decoder: Decoder | None
    """From the capsule of a class to an image; None where the network draws nothing."""
    layers: nn.ModuleList
    """Its capsule layers, of which the last one has the classes; empty where it has none."""
    length_eps: float = 1e-7
    """Added under the root of the class capsules' lengths."""
    target_mean: Float[Tensor, "J"]
    target_scale: Float[Tensor, "J"]

    @checked
    def __init__(self, in_shape: Sequence[int], num_classes: int, objects: int, task: Task = "classes") -> None:
        super().__init__()
        shape = image_shape(in_shape)
        least = 2 if task == "classes" else 1
        Range(least, COUNT.most, whole=True).check(f"{type(self).__name__}: num_classes", num_classes)
        if objects > 1 and task != "classes":
            raise InputError(f"objects must be 1 for the task {task}, got {objects}")
        if objects >= num_classes > 1:
            raise InputError(
                f"objects must be below num_classes, as they are of different classes, got {objects} objects and "
                f"{num_classes} classes"
            )
        self.in_shape = shape
        self.num_classes, self.objects, self.task = num_classes, objects, task
        if task == "regression":
            self.register_buffer("target_mean", torch.zeros(num_classes))
            self.register_buffer("target_scale", torch.ones(num_classes))

    def fit_targets(self, targets: Float[Tensor, "N J"]) -> None:
        """Set the scale of a regression: its loss is in standard deviations of the training targets, in each of J."""
        self.target_mean.copy_(targets.mean(0))
        self.target_scale.copy_(targets.std(0, correction=0).clamp_min(torch.finfo(torch.float32).tiny))

    def right(self, scores: Float[Tensor, "B J"], targets: Targets) -> Float[Tensor, "B"]:
        """How right each answer is: whether the class is, the share of the labels that are, or what R² is the mean of.

        That is, of a regression, 1 − the mean of its squared errors in variances of the training targets.
        """
        if self.task == "regression":
            return 1 - ((scores - targets) / self.target_scale).square().mean(1)
        if self.task == "labels":
            return ((scores > PRESENT) == (targets > PRESENT)).to(scores.dtype).mean(1)
        return is_correct(scores, targets).to(scores.dtype)

    @property
    def capsule_dim(self) -> int:
        """D, the components of a class's capsule; 0 where there are no capsules."""
        return 0

    @abstractmethod
    def forward(
        self, images: Float[Tensor, "B C H W"], targets: Targets | None = None, return_coupling: bool = False
    ) -> ModelOutput:
        """Classify images; see :meth:`torchcaps.CapsNet.forward`."""

    def decoder_targets(self, targets: Targets) -> Targets | None:  # noqa: ARG002  where something is decoded
        """The targets whose capsules are decoded; see :meth:`torchcaps.CapsNet.decoder_targets`."""
        return None

    @abstractmethod
    def loss(
        self, output: ModelOutput, images: Float[Tensor, "B C H W"] | Float[Tensor, "B P C H W"], targets: Targets
    ) -> Losses:
        """The loss that is minimised; see :meth:`torchcaps.CapsNet.loss`."""

    def save_files(
        self,
        folder: Path,
        dtype: torch.dtype | None = None,
        class_names: Sequence[str] | None = None,
        images: Mapping[str, Any] | None = None,
    ) -> None:
        """Write what :meth:`save_pretrained` writes, each file whole or not at all, but no model card."""
        known = {"class_names": list(class_names)} if images is None and class_names is not None else images
        if known is not None and len(known["class_names"]) != self.num_classes:
            raise InputError(
                f"class_names must be {self.num_classes} names, one for each class, got {len(known['class_names'])}"
            )
        tree, own = describe(self), self.state_dict()
        another = difference(plan_network(tree, self.in_shape, self.num_classes).state_dict(), own)
        if another:
            raise InputError(
                f"the network cannot be saved, as its options make another one: {another}; register a part of your own "
                "by torchcaps.register, and build the network with its name"
            )
        tensors = {
            name: tensor.detach().to("cpu", dtype if tensor.is_floating_point() else None).contiguous()
            for name, tensor in own.items()
        }
        for name, tensor in tensors.items():
            if dtype is not None and not tensor.isfinite().all():
                raise InputError(f"{name} has weights that {dtype} cannot hold; store them as they are")
        write_json(folder / CONFIG, tree | {"in_shape": self.in_shape, "num_classes": self.num_classes})
        with atomic_path(folder / WEIGHTS) as temporary:
            # not by save_file, which makes a temporary file of its own that a kill leaves behind
            temporary.write_bytes(weights_file(tensors))
        if known is None:
            (folder / CLASSES).unlink(missing_ok=True)
        else:
            write_json(folder / CLASSES, known)

    def save_pretrained(
        self,
        folder: str | Path,
        *,
        class_names: Sequence[str] | None = None,
        training: TrainingRecord | None = None,
        dtype: torch.dtype | None = None,
        source: str | None = None,
        images: Mapping[str, Any] | None = None,
    ) -> None:
        """Write the network, the names of its classes if given, and a model card; :meth:`from_pretrained` reads it.

        The card needs the extra ``app``; without it, none is written.

        Args:
            folder: Where to; it is made if it is not there, and what is in it is replaced, file by file.
            class_names: The name of each class.
            training: What the card says of the training; :func:`torchcaps.export.training_record` takes it from a run.
            dtype: ``torch.float16`` stores the weights in half the room; they are read back into float32. None stores
                them as they are.
            source: What the card tells its readers to load: a repository of the hub, or the name of a network that
                comes with torchcaps; its own folder if None.
            images: What is known of the images, with the names of their classes, as ``Run.images.to_dict()`` gives it.

        Raises:
            InputError: Not one name for each class, a weight that ``dtype`` cannot hold, or a part that is not
                registered.
            OSError: The folder cannot be written, or the disk is full.
        """
        folder = Path(folder)
        self.save_files(folder, dtype, class_names, images)
        try:
            from torchcaps.models.card import model_card

            names = class_names if images is None else images["class_names"]
            card = model_card(self, training, source, class_names=names, half=dtype == torch.float16)
        except ImportError:  # the base install has no templates
            return
        write_text(folder / CARD, card)

    def push_to_hub(
        self,
        repository: str,
        *,
        private: bool = False,
        commit_message: str = "A network made with torchcaps",
        token: str | None = None,
        **contents: Any,
    ) -> str:
        """Put what :meth:`save_pretrained` writes into a repository of the Hugging Face hub, in one commit.

        Args:
            repository: Its owner and name, such as ``"someone/capsnet-mnist"``; it is made if it is not there.
            private: Make a new repository that only you can read.
            commit_message: What the hub's history says.
            token: One that may write; else that of ``hf auth login`` or of the environment variable HF_TOKEN.
            **contents: ``class_names``, ``images``, ``training`` and ``dtype``, as for :meth:`save_pretrained`.

        Returns:
            The address of the repository.

        Raises:
            InputError: The hub cannot be reached, does not know you, or refuses; or as for :meth:`save_pretrained`.
        """
        owner, _, name = repository.partition("/")
        if not owner or not name:
            raise InputError(f"{repository} is no name of a repository with its owner, such as someone/capsnet-mnist")
        with tempfile.TemporaryDirectory() as folder:
            self.save_pretrained(folder, source=repository, **contents)
            log_in = "if it does not know you, log in with `hf auth login`, or set HF_TOKEN to a token that may write"
            with asking_the_hub(f"the hub did not take {repository}", log_in):
                from huggingface_hub import HfApi

                api = HfApi(token=token)
                made = api.create_repo(repository, private=private, exist_ok=True)
                api.upload_folder(repo_id=made.repo_id, folder_path=folder, commit_message=commit_message)
                return str(made)

    @classmethod
    def from_pretrained(cls, source: str | Path, *, device: torch.device | str = "cpu", **download: Any) -> Self:
        """Read a network, in evaluation mode, that ``save_pretrained`` or ``push_to_hub`` wrote.

        Weights stored in half precision become float32. Nothing in the files is executed. Weights that say their own
        checksum, as all that were written by this version do, are held to it.

        Args:
            source: A folder; the name of a network that comes with torchcaps, ``"compact"``; or a repository of the
                hub such as ``"someone/capsnet-mnist"``.
            device: Where to put the network.
            **download: For the hub: ``revision``, ``token``, ``cache_dir``, ``force_download``, ``local_files_only``,
                as :func:`huggingface_hub.snapshot_download` takes them.

        Raises:
            InputError: There is no such folder, and the hub has no such repository or cannot be reached; or a file in
                it is missing, damaged, or does not fit the others, or holds a network of another kind.
        """
        folder = find_pretrained(source, **download)
        described = read_json(folder / CONFIG, "configuration")
        in_shape, num_classes = described.pop("in_shape", None), described.pop("num_classes", None)
        try:
            network = plan_network(complete("network", described), in_shape, num_classes)
        except Exception as error:  # whatever a file of others may hold
            raise InputError(
                f"configuration {folder / CONFIG} does not describe a network: {reason_of(error)}"
            ) from error
        if not isinstance(network, cls):
            raise InputError(f"{source} holds a {type(network).__name__}, not a {cls.__name__}")
        load_weights(network, read_weights(folder / WEIGHTS, network), folder / WEIGHTS)
        return network.to(device).eval()


def build_network(spec: Spec, in_shape: Sequence[int], num_classes: int) -> Network:
    """The network that a tree describes.

    Raises:
        InputError: As for :func:`plan_network`, or parameters that do not fit into memory; none is allocated then.
    """
    planned = plan_network(spec, in_shape, num_classes)
    device = torch.get_default_device().type
    if device == "meta":
        return planned
    if device == "cpu":
        sizes = (parameter.numel() * parameter.element_size() for parameter in planned.parameters())
        check_memory(sum(sizes), "the network's parameters")
    network: Network = build("network", spec, in_shape=in_shape, num_classes=num_classes)
    return network


def plan_network(spec: Spec, in_shape: Sequence[int], num_classes: int) -> Network:
    """The same without memory for its parameters, on the meta device.

    Raises:
        InputError: Images that do not fit it (the smallest size that fits is given), or more parameters than can be
            counted. Any other error of a part, such as one of your own, is raised as it is.
    """

    def planned(shape: Sequence[int]) -> Network:
        with unset_fake_temporarily(), torch.device("meta"):  # torch's fake mode mistakes constants on meta for real
            network: Network = build("network", spec, in_shape=shape, num_classes=num_classes)
        return network

    def at_least(side: int) -> tuple[int, int, int]:
        return in_shape[0], max(in_shape[1], side), max(in_shape[2], side)

    def fits(side: int) -> bool:
        try:
            planned(at_least(side))
        except TooSmall:
            return False
        return True

    try:
        return planned(in_shape)
    except TooSmall as error:
        larger = range(min(in_shape[1:]) + 1, LARGEST_SIDE + 1)
        try:
            place = bisect_left(larger, True, key=fits)
        except Exception:  # larger images meet another error, so that size is not the reason
            raise InputError(str(error)) from error
        if place == len(larger):
            raise InputError(str(error)) from error
        sizes = ["×".join(map(str, shape[1:])) for shape in (in_shape, at_least(larger[place]))]
        raise InputError(
            f"images of {sizes[0]} are too small for the network's convolutions; the smallest size that fits is "
            f"{sizes[1]}"
        ) from error
    except (RuntimeError, OverflowError) as error:
        if "overflow" not in str(error).lower():  # torch's word for too large a size
            raise
        raise InputError(
            f"the network would have more parameters than can be counted; choose smaller sizes ({reason_of(error)})"
        ) from error
