"""Base class of every network."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Self

import torch
from jaxtyping import Float
from torch import Tensor, nn

from torchcaps.checks import check, checked
from torchcaps.errors import InputError
from torchcaps.models import files
from torchcaps.models.output import Losses, ModelOutput, Targets
from torchcaps.nn import Decoder
from torchcaps.ranges import spatial_shape
from torchcaps.tasks import TaskName, find_task
from torchcaps.words import counted

if TYPE_CHECKING:
    from torchcaps.export.card import TrainingRecord


class Network(nn.Module):
    """Network for images of one shape and a number of classes; its options and weights can be saved.

    Register a subclass with ``@register("network", "mine")``.

    Args:
        in_shape: Shape of an image (C, H, W); in a network for pixels (C, *S), of a patch of one to three axes.
        num_classes: Number of classes (J).
        objects: Number of objects in an image, all of different classes. With several, a capsule network decodes each
            object from its own capsule, and a CNN has sigmoid instead of softmax cross-entropy.
        task: Prediction: the class of an image; several labels of an image, targets (B, J) of zeros and ones;
            numbers, targets (B, J) of a regression; or the class of each pixel, targets (B, H, W).
    """

    has_capsules: ClassVar[bool] = False
    """True if classes are capsules."""
    per_pixel: ClassVar[bool] = False
    """True if the network has scores (B, J, *S) for each pixel of images (B, C, *S) of one to three axes."""
    has_slots: ClassVar[bool] = False
    """True if the network finds objects without labels; its scores are the masks (B, J, H, W) of J slots."""
    __call__: Callable[..., ModelOutput]
    decoder: Decoder | None
    """Network that draws an image from the capsule of a class; None without reconstructions."""
    layers: nn.ModuleList
    """Capsule layers; the last one has the class capsules. Empty in a CNN."""
    in_shape: tuple[int, ...]
    """Shape of an image (C, H, W); in a network for pixels (C, *S), of a patch of one to three axes."""
    num_classes: int
    """Number of classes (J)."""
    length_eps: float = 1e-7
    """Number added under the root of the class capsules' lengths."""
    target_mean: Float[Tensor, "J"]
    target_scale: Float[Tensor, "J"]

    @checked
    def __init__(self, in_shape: Sequence[int], num_classes: int, objects: int, task: TaskName = "classes") -> None:
        super().__init__()
        self._task = find_task(task, objects)
        self._task.check_network(self)
        shape = spatial_shape(in_shape, self._task.spatial_axes)
        self._task.output_range.check(f"{type(self).__name__}: num_classes", num_classes)
        if objects >= num_classes > 1:
            raise InputError(
                f"objects must be below num_classes, because all objects have different classes, got "
                f"{counted(objects, 'object')} "
                f"and {counted(num_classes, 'class')}"
            )
        self.in_shape = shape
        self.num_classes, self.objects, self.task = num_classes, objects, task
        for name, value in self._task.buffers(num_classes).items():
            self.register_buffer(name, value)

    def fit_targets(self, targets: Tensor | None) -> None:
        """Set the mean and scale of a regression's numbers from the training targets; other tasks need nothing.

        Args:
            targets: Targets of all training images; None if unknown, which changes nothing.
        """
        for name, value in self._task.buffers(self.num_classes, targets).items() if targets is not None else ():
            getattr(self, name).copy_(value)

    def score(self, scores: Float[Tensor, "B J"], targets: Targets) -> Float[Tensor, "B"]:
        """Return the score of each image, as its task defines it.

        - classes: 1 if the class is right, else 0;
        - labels: the share of correct labels;
        - regression: 1 − (mean squared error ÷ variance of the training targets), whose mean over images is R².
        """
        return self._task.score(scores, targets, self)

    @property
    def num_outputs(self) -> int:
        """Number of classes, labels, numbers or slots that the network tells apart."""
        return self.num_classes

    @property
    def capsule_dim(self) -> int:
        """Components of a class capsule (D); 0 in a CNN."""
        return 0

    @abstractmethod
    def forward(
        self, images: Float[Tensor, "B C H W"], targets: Targets | None = None, return_coupling: bool = False
    ) -> ModelOutput:
        """Classify images; see :meth:`torchcaps.CapsNet.forward`."""

    def scores_only(self) -> ScoresOnly:
        """Return a module that returns only the scores (B, J), for tools that expect a tensor.

        Such tools are Captum, skorch and ``torch.jit.trace``. The module shares the network's parameters.

        Examples:
            >>> import torch, torchcaps
            >>> network = torchcaps.create_model("first").eval()
            >>> network.scores_only()(torch.rand(2, 1, 28, 28)).shape
            torch.Size([2, 10])
        """
        return ScoresOnly(self)

    def decoder_targets(self, targets: Targets) -> Targets | None:  # noqa: ARG002  used by networks with a decoder
        """Return the targets whose capsules are decoded; see :meth:`torchcaps.CapsNet.decoder_targets`."""
        return None

    @abstractmethod
    def loss(
        self, output: ModelOutput, images: Float[Tensor, "B C H W"] | Float[Tensor, "B P C H W"], targets: Targets
    ) -> Losses:
        """Return the loss to minimise; see :meth:`torchcaps.CapsNet.loss`."""

    # ---- files

    def save_files(
        self,
        folder: Path,
        dtype: torch.dtype | None = None,
        class_names: Sequence[str] | None = None,
        images: Mapping[str, Any] | None = None,
    ) -> None:
        """Write the files of :meth:`save_pretrained` except the model card, each in full or not at all."""
        files.write(self, folder, dtype, class_names, images)

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
        """Write the network, the names of its classes and a model card into a folder for :meth:`from_pretrained`.

        The card is written only if the extra ``app`` is installed.

        Args:
            folder: Folder to write to, created if missing. Existing files are replaced one by one.
            class_names: Name of each class.
            training: Facts for the card; :func:`torchcaps.export.training_record` takes them from a run.
            dtype: ``torch.float16`` stores the weights in half the space, and loading turns them into float32. None
                keeps their dtype.
            source: Name to load in the card's example: a repository of the hub, or a network that comes with
                torchcaps; None: the folder.
            images: Description of the images, with the names of the classes, from ``Run.images.to_dict()``.

        Raises:
            InputError: The number of names is not the number of classes, ``dtype`` cannot hold a weight, or a part is
                not registered.
            OSError: The folder cannot be written, or the disk is full.
        """
        files.save(self, folder, class_names=class_names, training=training, dtype=dtype, source=source, images=images)

    def push_to_hub(
        self,
        repository: str,
        *,
        private: bool = False,
        commit_message: str = "A network made with torchcaps",
        token: str | None = None,
        **contents: Any,
    ) -> str:
        """Upload the files of :meth:`save_pretrained` to a repository of the Hugging Face hub, in one commit.

        Args:
            repository: Owner and name, such as ``"someone/capsnet-mnist"``; created if missing.
            private: Create a new repository that only you can read.
            commit_message: Message of the commit in the repository.
            token: Token with permission to write; None: the one from ``hf auth login`` or the environment variable
                HF_TOKEN.
            **contents: ``class_names``, ``images``, ``training`` and ``dtype``, as for :meth:`save_pretrained`.

        Returns:
            Address of the repository.

        Raises:
            InputError: The hub cannot be reached, or refuses the token or the upload; or as for
                :meth:`save_pretrained`.
        """
        return files.push(self, repository, private, commit_message, token, **contents)

    @classmethod
    def from_pretrained(cls, source: str | Path, *, device: torch.device | str = "cpu", **download: Any) -> Self:
        """Load a network from the files of ``save_pretrained`` or ``push_to_hub``, in evaluation mode.

        Weights stored in half precision become float32. Nothing in the files is executed. If the weights have a
        checksum, as in all files of this version, they are checked against it.

        Args:
            source: A folder; the name of a network that comes with torchcaps, ``"compact"``; or a repository of the
                hub such as ``"someone/capsnet-mnist"``.
            device: Device of the network.
            **download: Options for the hub: ``revision``, ``token``, ``cache_dir``, ``force_download`` and
                ``local_files_only`` of :func:`huggingface_hub.snapshot_download`.

        Raises:
            InputError: There is no such folder, and the hub has no such repository or cannot be reached; or a file is
                missing, damaged, or does not fit another file; or the network is of another class.
        """
        return files.load(source, cls, **download).to(device).eval()


class ScoresOnly(nn.Module):
    """A network that returns only its class scores (B, J); see :meth:`torchcaps.models.Network.scores_only`.

    Args:
        network: A :class:`torchcaps.models.Network`, which shares its parameters.
    """

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        check("network", network, Network)
        self.network = network
        self.train(network.training)

    def forward(self, images: Float[Tensor, "B C H W"]) -> Float[Tensor, "B J"]:
        """Return the scores of images."""
        scores: Tensor = self.network(images).scores
        return scores


@checked
def load_pretrained(source: str | Path = "compact", *, device: torch.device | str = "cpu", **download: Any) -> Network:
    """Load a trained network, in evaluation mode; nothing in its files is executed.

    Args:
        source: A folder from ``save_pretrained``; the name of a network that comes with torchcaps, ``"compact"``; or a
            repository of the Hugging Face hub such as ``"someone/capsnet-mnist"``.
        device: Device of the network.
        **download: Options for the hub, as for :meth:`torchcaps.CapsNet.from_pretrained`.

    Raises:
        InputError: As for :meth:`torchcaps.CapsNet.from_pretrained`.

    Examples:
        >>> from torchcaps import create_model, load_pretrained
        >>> create_model("compact").save_pretrained("my-network")
        >>> load_pretrained("my-network").in_shape
        (1, 28, 28)
    """
    return Network.from_pretrained(source, device=device, **download)
