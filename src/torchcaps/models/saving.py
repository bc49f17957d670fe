"""Write the files of a network into a folder or to the Hugging Face hub, and read them again."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import torch
from torch import nn

from torchcaps.errors import InputError, reason_of
from torchcaps.files import atomic_path, read_json, write_json, write_text
from torchcaps.models.building import plan_network
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
from torchcaps.parts import complete, describe
from torchcaps.words import counted

if TYPE_CHECKING:
    from torchcaps.models.record import TrainingRecord


class SavedNetwork(nn.Module):
    """Base class of `Network`: a module that is saved as a configuration and its weights."""

    in_shape: tuple[int, ...]
    """Shape of an image (C, H, W); in a network for pixels (C, *S), of a patch of one to three axes."""
    num_classes: int
    """Number of classes (J)."""

    def save_files(
        self,
        folder: Path,
        dtype: torch.dtype | None = None,
        class_names: Sequence[str] | None = None,
        images: Mapping[str, Any] | None = None,
    ) -> None:
        """Write the files of :meth:`save_pretrained` except the model card, each in full or not at all."""
        known = {"class_names": list(class_names)} if images is None and class_names is not None else images
        if known is not None and len(known["class_names"]) != self.num_classes:
            raise InputError(
                f"class_names must be {counted(self.num_classes, 'name')}, one for each class, got "
                f"{len(known['class_names'])}"
            )
        tree, weights = describe(self), self.state_dict()
        changed = difference(plan_network(tree, self.in_shape, self.num_classes).state_dict(), weights)
        if changed:
            raise InputError(
                f"the network cannot be saved, because its options build another one: {changed}; register your own "
                "parts with torchcaps.register, and build the network with their names"
            )
        tensors = {
            name: tensor.detach().to("cpu", dtype if tensor.is_floating_point() else None).contiguous()
            for name, tensor in weights.items()
        }
        for name, tensor in tensors.items():
            if dtype is not None and not tensor.isfinite().all():
                raise InputError(f"{name} has weights that {dtype} cannot hold; store them with dtype=None")
        write_json(folder / CONFIG, tree | {"in_shape": self.in_shape, "num_classes": self.num_classes})
        with atomic_path(folder / WEIGHTS) as temporary:
            # safetensors' save_file would leave a temporary file behind after a kill
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
        folder = Path(folder)
        self.save_files(folder, dtype, class_names, images)
        try:
            from torchcaps.export.card import model_card

            names = class_names if images is None else images["class_names"]
            card = model_card(self, training, source, class_names=names, half=dtype == torch.float16)
        except ImportError:  # the base install has no jinja2
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
        owner, _, name = repository.partition("/")
        if not owner or not name:
            raise InputError(f"a repository must be named OWNER/NAME, such as someone/capsnet-mnist, got {repository}")
        with tempfile.TemporaryDirectory() as folder:
            self.save_pretrained(folder, source=repository, **contents)
            log_in = "to log in, run `hf auth login`, or set HF_TOKEN to a token with permission to write"
            with asking_the_hub(f"the hub did not take {repository}", log_in):
                from huggingface_hub import HfApi

                api = HfApi(token=token)
                made = api.create_repo(repository, private=private, exist_ok=True)
                api.upload_folder(repo_id=made.repo_id, folder_path=folder, commit_message=commit_message)
                return str(made)

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
        folder = find_pretrained(source, **download)
        described = read_json(folder / CONFIG, "configuration")
        in_shape, num_classes = described.pop("in_shape", None), described.pop("num_classes", None)
        try:
            network = plan_network(complete("network", described), in_shape, num_classes)
        except Exception as error:  # a configuration from elsewhere may hold anything
            raise InputError(
                f"configuration {folder / CONFIG} does not describe a network: {reason_of(error)}"
            ) from error
        if not isinstance(network, cls):
            raise InputError(f"{source} holds a {type(network).__name__}, not a {cls.__name__}")
        load_weights(network, read_weights(folder / WEIGHTS, network), folder / WEIGHTS)
        return network.to(device).eval()
