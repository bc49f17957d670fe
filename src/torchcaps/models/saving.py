"""The files of a network: written into a folder, put on the Hugging Face hub, and read again."""

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

if TYPE_CHECKING:
    from torchcaps.models.record import TrainingRecord


class SavedNetwork(nn.Module):
    """A module that is saved as its description and its weights; the base class of `Network`."""

    in_shape: tuple[int, int, int]
    """Images (C, H, W)."""
    num_classes: int
    """J."""

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
            from torchcaps.export.card import model_card

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
