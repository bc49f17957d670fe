"""What every network is: called with images, described by its parts, saved and read again."""

from __future__ import annotations

import tempfile
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Self

import torch
from jaxtyping import Float
from safetensors.torch import save
from torch import Tensor, nn

from torchcaps.errors import InputError, shown
from torchcaps.files import atomic_path, read_json, write_json, write_text
from torchcaps.models.output import Losses, ModelOutput, Targets
from torchcaps.models.pretrained import (
    CARD,
    CHECKSUM,
    CLASSES,
    CONFIG,
    WEIGHTS,
    check_repository,
    checksum,
    find_pretrained,
    load_weights,
    read_weights,
    upload,
)
from torchcaps.nn import Decoder
from torchcaps.parts import PARTS, Spec, Tree, build, complete, describe, find, options
from torchcaps.ranges import COUNT

if TYPE_CHECKING:
    from torchcaps.models.card import TrainingRecord


class Network(nn.Module):
    """A network for images of one shape and a number of classes; its options and its weights are saved.

    A subclass is registered by ``@register("network", "mine")``.

    Args:
        in_shape: Images (C, H, W).
        num_classes: J.
        objects: Objects in an image, each of another class.
    """

    has_capsules: ClassVar[bool] = False
    """Whether classes are capsules."""
    decoder: Decoder | None
    """From the capsule of a class to an image; None where the network draws nothing."""
    layers: nn.ModuleList
    """Its capsule layers, of which the last one has the classes; empty where it has none."""
    length_eps: float = 1e-7
    """Added under the root of the class capsules' lengths."""

    def __init__(self, in_shape: Sequence[int], num_classes: int, objects: int) -> None:
        super().__init__()
        if isinstance(num_classes, bool) or not isinstance(num_classes, int) or num_classes < 2:
            raise InputError(f"num_classes must be an integer of at least 2, got {shown(num_classes)}")
        COUNT.check("num_classes", num_classes)
        if objects >= num_classes:
            raise InputError(
                f"objects must be below num_classes, as they are of different classes, got {objects} objects and "
                f"{num_classes} classes"
            )
        self.in_shape, self.num_classes, self.objects = image_shape(in_shape), num_classes, objects

    @property
    def capsule_dim(self) -> int:
        """D, the components of a class's capsule; 0 where there are no capsules."""
        return 0

    @abstractmethod
    def forward(
        self, images: Float[Tensor, "B C H W"], targets: Targets | None = None, return_coupling: bool = False
    ) -> ModelOutput:
        """Classify images; see :meth:`torchcaps.CapsNet.forward`."""

    @abstractmethod
    def decoder_targets(self, targets: Targets) -> Targets | None:
        """The targets whose capsules are decoded; see :meth:`torchcaps.CapsNet.decoder_targets`."""

    @abstractmethod
    def loss(
        self, output: ModelOutput, images: Float[Tensor, "B C H W"] | Float[Tensor, "B P C H W"], targets: Targets
    ) -> Losses:
        """The loss that is minimised; see :meth:`torchcaps.CapsNet.loss`."""

    def description(self) -> Tree:
        """What ``config.json`` holds: the tree of the network's parts, ``in_shape`` and ``num_classes``.

        Raises:
            InputError: A part is not registered, so that no file could bring it back.
        """
        tree: Tree = describe(self)
        return tree | {"in_shape": self.in_shape, "num_classes": self.num_classes}

    def save_files(
        self,
        folder: Path,
        dtype: torch.dtype | None = None,
        class_names: Sequence[str] | None = None,
        about_images: Mapping[str, Any] | None = None,
    ) -> None:
        """Write what :meth:`save_pretrained` writes, each file whole or not at all, but no model card."""
        if class_names is not None and len(class_names) != self.num_classes:
            raise InputError(
                f"class_names must be {self.num_classes} names, one for each class, got {len(class_names)}"
            )
        description = self.description()
        planned, own = _planned(description).state_dict(), self.state_dict()
        for name in [*own, *planned]:
            if name not in own or name not in planned or own[name].shape != planned[name].shape:
                raise InputError(
                    f"the network cannot be saved: its {name} is not what its options make; register a part of your "
                    "own by torchcaps.register, and build the network with its name"
                )
        tensors = {
            name: tensor.detach().to("cpu", dtype if tensor.is_floating_point() else None).contiguous()
            for name, tensor in own.items()
        }
        for name, tensor in tensors.items():
            if dtype is not None and not tensor.isfinite().all():
                raise InputError(f"{name} has weights that {dtype} cannot hold; store them as they are")
        write_json(folder / CONFIG, description)
        with atomic_path(folder / WEIGHTS) as temporary:
            # not by save_file, which makes a temporary file of its own that a kill leaves behind
            temporary.write_bytes(save(tensors, metadata={CHECKSUM: checksum(tensors)}))
        if class_names is None:
            (folder / CLASSES).unlink(missing_ok=True)
        else:
            write_json(folder / CLASSES, {"class_names": list(class_names), **(about_images or {})})

    def save_pretrained(
        self,
        folder: str | Path,
        *,
        class_names: Sequence[str] | None = None,
        training: TrainingRecord | None = None,
        dtype: torch.dtype | None = None,
        source: str | None = None,
        about_images: Mapping[str, Any] | None = None,
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
            about_images: What else is written beside the names: ``"preparation"`` and ``"calibration"``, as
                :attr:`torchcaps.training.Run.about_images` gives them.

        Raises:
            InputError: Not one name for each class, a weight that ``dtype`` cannot hold, or a part that is not
                registered.
            OSError: The folder cannot be written, or the disk is full.
        """
        folder = Path(folder)
        self.save_files(folder, dtype, class_names, about_images)
        try:
            from torchcaps.models.card import model_card

            card = model_card(self, training, source, class_names=class_names, half=dtype == torch.float16)
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
            **contents: ``class_names``, ``training``, ``dtype`` and ``about_images``, as for :meth:`save_pretrained`.

        Returns:
            The address of the repository.

        Raises:
            InputError: The hub cannot be reached, does not know you, or refuses; or as for :meth:`save_pretrained`.
        """
        check_repository(repository)
        with tempfile.TemporaryDirectory() as folder:
            self.save_pretrained(folder, source=repository, **contents)
            return upload(Path(folder), repository, private=private, commit_message=commit_message, token=token)

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
        network = _described_in(folder / CONFIG)
        if not isinstance(network, cls):
            raise InputError(f"{source} holds a {type(network).__name__}, not a {cls.__name__}")
        load_weights(network, read_weights(folder / WEIGHTS), folder / WEIGHTS)
        return network.to(device).eval()


def image_shape(in_shape: object) -> tuple[int, int, int]:
    """The channels, height and width that ``in_shape`` has; else an InputError says what is wrong."""
    shape = tuple(in_shape) if isinstance(in_shape, Sequence) else ()
    if len(shape) != 3 or not all(size in COUNT for size in shape):
        raise InputError(f"in_shape must be (channels, height, width), three positive integers, got {shown(in_shape)}")
    channels, height, width = shape
    return channels, height, width


def present_names(values: Mapping[str, Any]) -> Tree:
    """What a file says of a network, by today's names; in version 0.2 fewer parts had names of their own."""
    given = dict(values)
    if isinstance(given.get("primary"), Mapping):
        given["primary_capsules"] = {"name": "conv", **given.pop("primary")}
    if isinstance(given.get("decoder"), Mapping):
        given["decoder"] = {"name": "dense", **given["decoder"]}
    if "name" not in given and "classification_loss" in given:  # 0.1 had the options of absent parts, too
        absent = options(find("decoder", "dense")).keys() if given.get("decoder") is False else set[str]()
        absent |= {name for cls in PARTS["loss"].values() for name in options(cls)}
        absent -= options(find("loss", given["classification_loss"])).keys()
        given = {name: each for name, each in given.items() if name not in absent}
    if isinstance(given.get("loss"), Mapping):
        loss = given.pop("loss")
        name = loss.get("classification_loss")
        known = options(find("loss", name))
        given["classification_loss"] = {"name": name, **{key: each for key, each in loss.items() if key in known}}
        given |= {key: each for key, each in loss.items() if key.startswith("reconstruction_")}
    return given


def _planned(description: Tree) -> Network:
    """The network that a description stands for, without memory for its weights."""
    tree = dict(description)
    in_shape, num_classes = tree.pop("in_shape"), tree.pop("num_classes")
    spec: Spec = complete("network", tree)
    with torch.device("meta"):
        network: Network = build("network", spec, in_shape=in_shape, num_classes=num_classes)
    return network


def _described_in(path: Path) -> Network:
    """The network without memory for its weights: what a file claims need not be true."""
    description = read_json(path, "configuration")
    try:
        return _planned(present_names(description))
    except (RuntimeError, OverflowError) as error:  # torch's, where a size is beyond all numbers
        raise InputError(f"configuration {path} describes no network that could be: {error}") from None
    except KeyError as error:
        raise InputError(f"configuration {path} has no {error}") from None
    except InputError as error:
        raise InputError(f"configuration {path} does not describe a network: {error}") from None
