"""Networks on disk and on the Hugging Face hub: ``config.json`` and ``model.safetensors``, and nothing executable."""

from __future__ import annotations

import hashlib
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Self

import torch
from huggingface_hub import HfApi, snapshot_download
from huggingface_hub.errors import (
    HfHubHTTPError,
    HFValidationError,
    LocalEntryNotFoundError,
    LocalTokenNotFoundError,
    RepositoryNotFoundError,
)
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from torchcaps.errors import InputError, unknown_name
from torchcaps.files import atomic_path, could_be_repository, read_json, require_file, write_json, write_text
from torchcaps.models.card import CardSubject, TrainingRecord, model_card
from torchcaps.models.config import NetworkConfig
from torchcaps.models.earlier import renamed, with_name
from torchcaps.ops.checks import FLOATS

CONFIG, WEIGHTS, CLASSES, CARD = "config.json", "model.safetensors", "classes.json", "README.md"

SHIPPED = ("compact",)
"""Networks whose weights come with torchcaps."""
SHIPPED_DATA = "digits"
"""The images that stand for those that they were trained on: embedded, and handwritten digits too."""
_SHIPPED_FOLDER = Path(__file__).parent / "weights"

CHECKSUM = "sha256"
"""The entry of the weights' own metadata that holds what :func:`checksum` gives."""


class Pretrained(nn.Module):
    """``save_pretrained``, ``from_pretrained``, ``push_to_hub`` for networks made of config, in_shape and num_classes.

    Nothing is guessed: a field, a tensor or a file too many, too few or of another shape is refused.
    """

    config: NetworkConfig
    in_shape: tuple[int, int, int]
    num_classes: int

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
                    f"configuration describes {wanted.get(name, 'nothing')}; register the part, and build the network "
                    "with its name, as docs/own-routing.md shows"
                )

    def save_files(self, folder: Path, dtype: torch.dtype | None = None) -> None:
        """Write ``config.json`` and ``model.safetensors``, each whole or not at all, and no model card.

        Args:
            folder: Where to.
            dtype: See :meth:`save_pretrained`.

        Raises:
            InputError: A weight that ``dtype`` cannot hold, or a network that its configuration does not describe.
            OSError: The folder cannot be written, or the disk is full.
        """
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
            try:
                save_file(tensors, temporary, metadata={CHECKSUM: checksum(tensors)})
            except SafetensorError as error:  # hides the operating system's reason, such as a full disk
                raise OSError(f"the weights {folder / WEIGHTS} could not be written: {error}") from error

    def save_pretrained(
        self,
        folder: str | Path,
        *,
        class_names: Sequence[str] | None = None,
        training: TrainingRecord | None = None,
        dtype: torch.dtype | None = None,
        source: str | None = None,
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

        Raises:
            InputError: Not one name for each class, or a weight that ``dtype`` cannot hold.
            OSError: The folder cannot be written, or the disk is full.
        """
        if class_names is not None and len(class_names) != self.num_classes:
            raise InputError(
                f"class_names must be {self.num_classes} names, one for each class, got {len(class_names)}"
            )
        folder = Path(folder)
        self.save_files(folder, dtype)
        if class_names is None:
            (folder / CLASSES).unlink(missing_ok=True)
        else:
            write_json(folder / CLASSES, {"class_names": list(class_names)})
        subject = CardSubject(
            config=self.config,
            in_shape=self.in_shape,
            num_classes=self.num_classes,
            class_names=class_names,
            parameters=sum(parameter.numel() for parameter in self.parameters()),
            half=dtype == torch.float16,
        )
        write_text(folder / CARD, model_card(subject, training, source))

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
    ) -> str:
        """Put what :meth:`save_pretrained` writes into a repository of the Hugging Face hub, in one commit.

        Args:
            repository: Its owner and name, such as ``"someone/capsnet-mnist"``; it is made if it is not there.
            class_names: See :meth:`save_pretrained`.
            training: See :meth:`save_pretrained`.
            dtype: See :meth:`save_pretrained`.
            private: Make a new repository that only you can read.
            commit_message: What the hub's history says.
            token: One that may write; else that of ``hf auth login`` or of the environment variable HF_TOKEN.

        Returns:
            The address of the repository.

        Raises:
            InputError: The hub cannot be reached, does not know you, or refuses; or as for :meth:`save_pretrained`.
        """
        check_repository(repository)
        with tempfile.TemporaryDirectory() as folder:
            self.save_pretrained(folder, class_names=class_names, training=training, dtype=dtype, source=repository)
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
                it is missing, damaged, or does not fit the others.
        """
        folder = find_pretrained(source, **download)
        network = _from_description(folder / CONFIG)
        if not isinstance(network, cls):
            raise InputError(f"{source} holds a {type(network).__name__}, not a {cls.__name__}")
        tensors, written = _read_weights(folder / WEIGHTS)
        if written not in (None, checksum(tensors)):
            raise InputError(
                f"weights {folder / WEIGHTS} are damaged: they have changed since they were written; take a copy that "
                "is whole"
            )
        tensors = renamed(tensors)
        check_weights(network, tensors, folder / WEIGHTS)
        network.to_empty(device="cpu").load_state_dict(tensors)
        return network.to(device).eval()


def _parts(network: nn.Module) -> dict[str, str]:
    """The modules of a network by their names: their kinds, and the options that they print."""
    return {name: f"{type(module).__name__}({module.extra_repr()})" for name, module in network.named_modules() if name}


def _from_description(path: Path) -> Pretrained:
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


def load_weights(network: nn.Module, tensors: dict[str, Tensor], source: Path) -> None:
    """Put tensors into a network, in the network's own precision.

    Args:
        network: Takes the tensors.
        tensors: As for :func:`check_weights`.
        source: As for :func:`check_weights`.

    Raises:
        InputError: They are not this network's; the first that differs is named.
    """
    check_weights(network, tensors, source)
    network.load_state_dict(tensors)


def check_weights(network: nn.Module, tensors: dict[str, Tensor], source: Path) -> None:
    """Raise InputError unless tensors are those of a network, and finite; the first that is not is named.

    Args:
        network: Would take the tensors.
        tensors: One for each entry of its ``state_dict()``, and no other.
        source: The file they are from, for the error.
    """
    own = network.state_dict()
    for name in [*own, *tensors]:
        got = tuple(tensors[name].shape) if name in tensors else "nothing"
        wanted = tuple(own[name].shape) if name in own else "nothing"
        if got != wanted:
            raise InputError(f"weights {source} do not fit the network: {name} has shape {got}, wanted {wanted}")
        fits = tensors[name].dtype == own[name].dtype or (
            tensors[name].dtype in FLOATS and own[name].is_floating_point()
        )
        if not fits:
            kind = "floats" if own[name].is_floating_point() else str(own[name].dtype)
            raise InputError(f"weights {source} do not fit the network: {name} is {tensors[name].dtype}, wanted {kind}")
        if not tensors[name].isfinite().all():
            raise InputError(f"weights {source} cannot be used: {name} holds numbers that are NaN or infinite")


def checksum(tensors: Mapping[str, Tensor]) -> str:
    """SHA-256 of tensors with their names, types and shapes, in hex; the order of the names makes no difference.

    Args:
        tensors: On the CPU.
    """
    digest = hashlib.sha256()
    for name in sorted(tensors):
        tensor = tensors[name]
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        digest.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def shipped_folder(name: str = SHIPPED[0]) -> Path:
    """The folder of a network whose weights come with torchcaps.

    Args:
        name: One of ``SHIPPED``.

    Raises:
        InputError: There is none of that name, or this installation was made without its weights.
    """
    if name not in SHIPPED:
        raise unknown_name("network with shipped weights", name, SHIPPED)
    folder = _SHIPPED_FOLDER / name
    if not (folder / WEIGHTS).exists():
        raise InputError(
            f'this installation of torchcaps has no weights of "{name}"; give a run folder, such as one that '
            f"`torchcaps train {name}` writes"
        )
    return folder


def is_shipped(folder: Path) -> bool:
    """Whether a folder is one of :func:`shipped_folder`."""
    return folder.parent == _SHIPPED_FOLDER


def is_public(source: str) -> bool:
    """Whether the name of a network means the same to others: it comes with torchcaps, or is on the hub."""
    return source in SHIPPED or (could_be_repository(Path(source)) and not Path(source).is_dir())


def find_pretrained(source: str | Path, **download: Any) -> Path:
    """The folder that holds a network's files: itself, one that comes with torchcaps, or a download from the hub.

    Args:
        source: As for :meth:`Pretrained.from_pretrained`. A name of ``SHIPPED`` as a plain string is that network,
            even where a folder is called so too: write ``Path("compact")`` or ``"./compact"`` for the folder. The hub
            is asked for plain strings only.
        **download: As for :meth:`Pretrained.from_pretrained`.

    Raises:
        InputError: There is no such folder, and the hub has no such repository or cannot be reached.
    """
    if source in SHIPPED:
        return shipped_folder(str(source))
    if Path(source).is_dir():
        return Path(source)
    if isinstance(source, Path):
        raise InputError(f"there is no folder {source}")
    return _from_hub(source, download)


def upload(folder: Path, repository: str, *, private: bool, commit_message: str, token: str | None = None) -> str:
    """Put the files of a folder into a repository of the hub; :meth:`Pretrained.push_to_hub` describes the arguments.

    Returns:
        The address of the repository.

    Raises:
        InputError: The hub cannot be reached, does not know you, or refuses.
    """
    with _refusals_in_a_sentence(repository):
        api = HfApi(token=token)
        made = api.create_repo(repository, private=private, exist_ok=True)
        api.upload_folder(repo_id=made.repo_id, folder_path=folder, commit_message=commit_message)
        return str(made)


def check_repository(repository: str) -> None:
    """Raise InputError unless ``repository`` is a name with its owner, which those who load it need too."""
    owner, _, name = repository.partition("/")
    if not owner or not name:
        raise InputError(f"{repository} is no name of a repository with its owner, such as someone/capsnet-mnist")


@contextmanager
def _refusals_in_a_sentence(repository: str) -> Iterator[None]:
    """What the hub's client raises while something is written to a repository, as an InputError."""
    login = "log in with `hf auth login`, or set HF_TOKEN to a token that may write"
    try:
        yield
    except HFValidationError as error:
        raise InputError(f"{repository} is no name of a repository, such as someone/capsnet-mnist: {error}") from None
    except LocalTokenNotFoundError:
        raise InputError(f"the hub takes {repository} only from its owner; {login}") from None
    except HfHubHTTPError as error:
        status = error.response.status_code
        if status in (401, 403):
            raise InputError(f"the hub does not let you write to {repository}; {login}") from error
        raise InputError(f"the hub refused {repository}: {_first_line(error)}") from error
    except Exception as error:  # the connection errors of whichever HTTP library the client uses
        raise InputError(f"the hub could not be reached to write {repository}: {_first_line(error)}") from error


def _from_hub(name: str, options: dict[str, Any]) -> Path:
    """The folder that a repository of the hub was downloaded to; ``name`` is known to be no folder here."""
    try:
        return Path(snapshot_download(name, allow_patterns=[CONFIG, WEIGHTS, CLASSES], **options))
    except HFValidationError:
        raise InputError(f"there is no folder {name}") from None
    except RepositoryNotFoundError:  # said of private repositories, too
        raise InputError(f"there is no folder {name}, and the hub has no repository {name} that you may read") from None
    except LocalEntryNotFoundError:
        raise InputError(f"there is no folder {name}, and the hub could not be reached to look for it there") from None
    except TypeError:  # an option that snapshot_download does not take
        raise
    except Exception as error:  # whatever the HTTP library of the installed huggingface_hub raises
        raise InputError(
            f"there is no folder {name}, and the hub gave no repository of that name: {_first_line(error)}"
        ) from error


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".partition("\n")[0]


def _read_weights(path: Path) -> tuple[dict[str, Tensor], str | None]:
    """Tensors by their names, and the checksum that they were written with, if any."""
    require_file(path, "weights file")
    try:
        with safe_open(path, framework="pt") as file:
            return {name: file.get_tensor(name) for name in file.keys()}, (file.metadata() or {}).get(CHECKSUM)  # noqa: SIM118
    except SafetensorError as error:
        raise InputError(f"weights {path} are damaged: {error}") from None
