"""What every network is: built from a configuration, called with images, saved and read again."""

from __future__ import annotations

import tempfile
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Self

import torch
from jaxtyping import Float
from safetensors.torch import save
from torch import Tensor, nn

from torchcaps.errors import InputError, shown
from torchcaps.files import atomic_path, read_json, write_json, write_text
from torchcaps.models.card import TrainingRecord, model_card
from torchcaps.models.config import NetworkConfig
from torchcaps.models.earlier import with_name
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
from torchcaps.ranges import COUNT, image_shape


class Network(nn.Module):
    """A network for images of one shape and a number of classes; its configuration and its weights are saved.

    When it is read, a field, a tensor or a file too many, too few or of another shape is refused.

    Args:
        config: What it is.
        in_shape: Images (C, H, W).
        num_classes: J.

    Raises:
        InputError: A shape or a number that is none, or as many objects in an image as there are classes.
    """

    config: NetworkConfig
    in_shape: tuple[int, int, int]
    num_classes: int
    decoder: Decoder | None
    """From the capsule of a class to an image; None where the network draws nothing."""
    layers: nn.ModuleList
    """Its capsule layers, of which the last one has the classes; empty where it has none."""

    def __init__(self, config: NetworkConfig, in_shape: Sequence[int], num_classes: int) -> None:
        super().__init__()
        shape = image_shape(in_shape)
        if isinstance(num_classes, bool) or not isinstance(num_classes, int) or num_classes < 2:
            raise InputError(f"num_classes must be an integer of at least 2, got {shown(num_classes)}")
        COUNT.check("num_classes", num_classes)
        if config.objects >= num_classes:
            raise InputError(
                f"objects must be below num_classes, as they are of different classes, got {config.objects} objects "
                f"and {num_classes} classes"
            )
        self.config, self.in_shape, self.num_classes = config, shape, num_classes

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

    def description(self) -> dict[str, Any]:
        """What ``config.json`` holds: the fields of the config, ``in_shape`` and ``num_classes``."""
        return self.config.to_dict() | {"in_shape": self.in_shape, "num_classes": self.num_classes}

    def check_described(self) -> None:
        """See that the network is what its configuration describes: what is saved is built from it again.

        Raises:
            InputError: A part was put in by hand, or changed.
        """
        with torch.device("meta"):
            described = self.config.build(self.in_shape, self.num_classes)
        wanted, found = _parts(described), _parts(self)
        for name in [*wanted, *found]:
            if found.get(name) != wanted.get(name):
                raise InputError(
                    f"the network cannot be saved: its {name} is {found.get(name, 'not there')}, where its "
                    f"configuration describes {wanted.get(name, 'nothing')}; register the part by "
                    "torchcaps.models.register_part, and build the network with its name"
                )

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
        self.check_described()
        tensors = {
            name: tensor.detach().to("cpu", dtype if tensor.is_floating_point() else None).contiguous()
            for name, tensor in self.state_dict().items()
        }
        for name, tensor in tensors.items():
            if dtype is not None and not tensor.isfinite().all():
                raise InputError(f"{name} has weights that {dtype} cannot hold; store them as they are")
        write_json(folder / CONFIG, self.description())
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
            InputError: Not one name for each class, a weight that ``dtype`` cannot hold, or a network that its
                configuration does not describe.
            OSError: The folder cannot be written, or the disk is full.
        """
        folder = Path(folder)
        self.save_files(folder, dtype, class_names, about_images)
        card = model_card(self, training, source, class_names=class_names, half=dtype == torch.float16)
        write_text(folder / CARD, card)

    def push_to_hub(
        self,
        repository: str,
        *,
        class_names: Sequence[str] | None = None,
        training: TrainingRecord | None = None,
        dtype: torch.dtype | None = None,
        private: bool = False,
        commit_message: str = "A network made with torchcaps",
        token: str | None = None,
        about_images: Mapping[str, Any] | None = None,
    ) -> str:
        """Put what :meth:`save_pretrained` writes into a repository of the Hugging Face hub, in one commit.

        Args:
            repository: Its owner and name, such as ``"someone/capsnet-mnist"``; it is made if it is not there.
            class_names: See :meth:`save_pretrained`, as for the next two.
            training: The same.
            dtype: The same.
            private: Make a new repository that only you can read.
            commit_message: What the hub's history says.
            token: One that may write; else that of ``hf auth login`` or of the environment variable HF_TOKEN.
            about_images: See :meth:`save_pretrained`.

        Returns:
            The address of the repository.

        Raises:
            InputError: The hub cannot be reached, does not know you, or refuses; or as for :meth:`save_pretrained`.
        """
        check_repository(repository)
        with tempfile.TemporaryDirectory() as folder:
            self.save_pretrained(
                folder,
                class_names=class_names,
                training=training,
                dtype=dtype,
                source=repository,
                about_images=about_images,
            )
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


def _parts(network: nn.Module) -> dict[str, str]:
    """The modules of a network by their names: their kinds, and the options that they print, or else hold."""
    return {name: f"{type(module).__name__}({_options(module)})" for name, module in network.named_modules() if name}


def _options(module: nn.Module) -> str:
    """What a module prints of its options, and its other attributes that are plain values."""
    said = module.extra_repr()
    held = (
        f"{name}={value!r}"
        for name, value in vars(module).items()
        if name != "training" and not name.startswith("_") and isinstance(value, bool | int | float | str)
        if f"{name}=" not in said
    )
    return ", ".join(filter(None, [said, *held]))


def _described_in(path: Path) -> Network:
    """The network without memory for its weights: what a file claims need not be true."""
    description = read_json(path, "configuration")
    try:
        in_shape, num_classes = description.pop("in_shape"), description.pop("num_classes")
        config = NetworkConfig.from_dict(with_name(description))
        with torch.device("meta"):
            return config.build(in_shape, num_classes)
    except (RuntimeError, OverflowError) as error:  # torch's, where a size is beyond all numbers
        raise InputError(f"configuration {path} describes no network that could be: {error}") from None
    except KeyError as error:
        raise InputError(f"configuration {path} has no {error}") from None
    except InputError as error:
        raise InputError(f"configuration {path} does not describe a network: {error}") from None
