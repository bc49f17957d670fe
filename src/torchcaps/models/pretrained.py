"""Networks on disk and on the Hugging Face hub: ``config.json`` and ``model.safetensors``, and nothing executable."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar, Self

import torch
from huggingface_hub import PyTorchModelHubMixin, snapshot_download
from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError, RepositoryNotFoundError
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from torchcaps.errors import InputError
from torchcaps.files import atomic_path, read_json, write_json
from torchcaps.models.config import Described

CONFIG, WEIGHTS = "config.json", "model.safetensors"


class Pretrained(nn.Module, PyTorchModelHubMixin):
    """``save_pretrained``, ``from_pretrained``, ``push_to_hub`` for networks made of config, in_shape and num_classes.

    The mixin alone forgets ``in_shape`` and ``num_classes`` where there is a dataclass ``config``, skips fields that it
    does not know, and leaves weights that a file lacks as they were drawn; here all of these are kept or refused.
    """

    config_type: ClassVar[type[Described]]
    config: Described
    in_shape: tuple[int, int, int]
    num_classes: int

    def description(self) -> dict[str, Any]:
        """What ``config.json`` holds: the fields of the config, ``in_shape`` and ``num_classes``."""
        return self.config.to_dict() | {"in_shape": self.in_shape, "num_classes": self.num_classes}

    def save_files(self, folder: Path) -> None:
        """Write ``config.json`` and ``model.safetensors``, each whole or not at all, and no model card.

        Raises:
            OSError: The folder cannot be written, or the disk is full.
        """
        write_json(folder / CONFIG, self.description())
        tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in self.state_dict().items()}
        with atomic_path(folder / WEIGHTS) as temporary:
            try:
                save_file(tensors, temporary)
            except SafetensorError as error:  # hides the operating system's reason, such as a full disk
                raise OSError(f"the weights {folder / WEIGHTS} could not be written: {error}") from error

    def _save_pretrained(self, save_directory: Path) -> None:
        self.save_files(save_directory)

    @classmethod
    def from_pretrained(
        cls, pretrained_model_name_or_path: str | Path, *, device: torch.device | str = "cpu", **download: Any
    ) -> Self:
        """Read a network, in evaluation mode, that ``save_pretrained`` or ``push_to_hub`` wrote.

        Args:
            pretrained_model_name_or_path: A folder, or a repository of the hub such as ``"someone/capsnet-mnist"``.
            device: Where to put the network.
            **download: For the hub: ``revision``, ``token``, ``cache_dir``, ``force_download``, ``local_files_only``,
                as :func:`huggingface_hub.snapshot_download` takes them.

        Raises:
            InputError: There is no such folder, and the hub has no such repository or cannot be reached; or a file in
                it is missing, damaged, or does not fit the others.
        """
        folder = Path(pretrained_model_name_or_path)
        if not folder.is_dir():
            folder = _from_hub(str(pretrained_model_name_or_path), download)
        network = cls._from_description(folder / CONFIG)
        load_weights(network, _read_weights(folder / WEIGHTS), folder / WEIGHTS)
        return network.to(device).eval()

    @classmethod
    def _from_description(cls, path: Path) -> Self:
        description = read_json(path, "configuration")
        try:
            in_shape, num_classes = description.pop("in_shape"), description.pop("num_classes")
            return cls(cls.config_type.from_dict(description), in_shape, num_classes)
        except KeyError as error:
            raise InputError(f"configuration {path} has no {error}") from None
        except InputError as error:
            raise InputError(f"configuration {path} does not describe a {cls.__name__}: {error}") from None


def load_weights(network: nn.Module, tensors: dict[str, Tensor], source: Path) -> None:
    """Put tensors into a network.

    Args:
        network: Takes the tensors.
        tensors: One for each entry of its ``state_dict()``, and no other.
        source: The file they are from, for the error.

    Raises:
        InputError: They are not this network's; the first that differs is named.
    """
    own = network.state_dict()
    for name in [*own, *tensors]:
        got = tuple(tensors[name].shape) if name in tensors else "nothing"
        wanted = tuple(own[name].shape) if name in own else "nothing"
        if got != wanted:
            raise InputError(f"weights {source} do not fit the network: {name} has shape {got}, wanted {wanted}")
    network.load_state_dict(tensors)


def _from_hub(name: str, options: dict[str, Any]) -> Path:
    """The folder that a repository of the hub was downloaded to; ``name`` is known to be no folder here."""
    try:
        return Path(snapshot_download(name, allow_patterns=[CONFIG, WEIGHTS], **options))
    except HFValidationError:
        raise InputError(f"there is no folder {name}") from None
    except RepositoryNotFoundError:  # said of private repositories, too
        raise InputError(f"there is no folder {name}, and the hub has no repository {name} that you may read") from None
    except LocalEntryNotFoundError:
        raise InputError(f"there is no folder {name}, and the hub could not be reached to look for it there") from None
    except TypeError:  # an option that snapshot_download does not take
        raise
    except Exception as error:  # whatever the HTTP library of the installed huggingface_hub raises
        reason = f"{type(error).__name__}: {error}".partition("\n")[0]
        raise InputError(f"there is no folder {name}, and the hub gave no repository of that name: {reason}") from error


def _read_weights(path: Path) -> dict[str, Tensor]:
    try:
        return load_file(path)
    except FileNotFoundError:
        raise InputError(f"there are no weights {path}") from None
    except SafetensorError as error:
        raise InputError(f"weights {path} are damaged: {error}") from None
