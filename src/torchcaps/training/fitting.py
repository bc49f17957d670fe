"""`fit`: train any network on any data."""

from __future__ import annotations

from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import nn

from torchcaps.checks import checked
from torchcaps.datasets.item_reader import Keys
from torchcaps.datasets.scaling import Scale
from torchcaps.errors import InputError
from torchcaps.models import Network
from torchcaps.tasks import TaskName, find_task, task_of
from torchcaps.tasks.base import TargetAxes
from torchcaps.training.data import fit_data
from torchcaps.training.devices import launch
from torchcaps.training.folder import lock_folder, on_main_process, save_network
from torchcaps.training.loop import Trainer
from torchcaps.training.progress import Progress, choose_progress
from torchcaps.training.recipe import Recipe
from torchcaps.training.step import Loss

if TYPE_CHECKING:
    from torchcaps.training.data import OwnData


@checked
def fit(
    network: nn.Module,
    dataset: OwnData,
    recipe: Recipe | None = None,
    out: str | Path | None = None,
    *,
    validation: OwnData | float | None = None,
    groups: Any = None,
    loss: Loss | None = None,
    task: TaskName | None = None,
    target_axes: TargetAxes | None = None,
    seed: int = 0,
    accelerator: str = "auto",
    devices: int = 1,
    precision: str = "auto",
    workers: int = 0,
    progress: Progress | None = None,
    scale: Scale = "auto",
    keys: Keys | None = None,
) -> list[dict[str, Any]]:
    """Train any network on any data.

    With a folder ``out``, metrics, the weights of the best epoch and a checkpoint are written there. Then Ctrl-C and
    SIGTERM stop the run, and a second call with the same arguments resumes it with the same bits. Everything random is
    a function of ``seed``, epoch and batch, except the initial weights of ``network``.

    Args:
        network: A network of torchcaps, or any module. The output of a module is the scores (B, J) of images, class
            capsules, or an object with such ``scores``; (B, J, H, W) for the task ``pixels``. After training, the
            network has the weights of the best epoch (without validation images: the last epoch) and is in evaluation
            mode.
        dataset: Training images and labels in one of these forms: a :class:`torchcaps.datasets.Dataset` or
            ``ImageSet``; a pair or dict of images (N, ...) and labels, as tensors, arrays or lists; a torch ``Dataset``
            with a length, of pairs (image, label) or dicts; a ``DataLoader``, which keeps its batch size, workers,
            ``drop_last``, ``collate_fn`` and samplers. Without a sampler, ``seed`` shuffles. Pixels are read as by
            :func:`~torchcaps.datasets.pixels.scale_pixels`, but a module that is no network of torchcaps gets floats
            unchanged. Only uint8 images (N, C, H, W) in memory can be augmented.
        recipe: Hyperparameters of training. Its fields ``limit_…`` and ``validation…`` are for loading data, and have
            no effect here.
        out: The run folder. None: write nothing.
        validation: Images that select the best epoch, in any of these forms, if ``dataset`` has none; or the share of
            the images to hold out for it, such as 0.1.
        groups: Group of each image of ``dataset``, such as its patient, (N,) numbers or texts. Whole groups are held
            out, about a tenth of the images or the share ``validation``. None: images are held out one by one.
        loss: Function of the output (or of the scores of its capsules) and the labels that returns the mean loss. None:
            cross-entropy of the scores. A network of torchcaps has its own loss.
        task: Task of a module that is no network of torchcaps. None: its attribute ``task``, else ``"classes"``.
        target_axes: Axes of the masks that a ``loss`` of pixels takes: ``"BHW"``, or ``"B1HW"`` with an axis for the
            channel. Masks are class numbers, int64, or for a single score of each pixel zeros and ones in the dtype of
            the scores. None: ``"BHW"`` for several scores.
        seed: Random seed for the order of the images, their augmentation, and dropout.
        accelerator: Device: ``"cpu"``, ``"cuda"``, ``"cuda:1"`` for one of several GPUs, ``"mps"``, or ``"auto"``.
        devices: Processes on this machine, one for each device.
        precision: ``"32"``, ``"bf16"`` or ``"auto"``, as in :class:`TrainConfig`.
        workers: Processes that read a torch ``Dataset`` ahead. Their number does not change any bit of the run.
        progress: Display of the progress. None: a live display in a terminal, else plain lines.
        scale: Scaling of pixels to 0..1: ``"auto"`` by their dtype, (low, high) for the values that become 0 and 1, or
            ``"none"`` for images that are normalised already.
        keys: Keys of image and label in an item, such as ``("image", "label")`` or ``(0, 1)``. None: the usual keys.

    Returns:
        A row for each epoch, as in ``metrics.csv``.

    Raises:
        InputError: Data and recipe do not fit each other or the network, or ``out`` holds a run with other settings.
        Diverged: The loss became NaN or infinite.
        Interrupted: Ctrl-C or SIGTERM stopped a run with a folder; its checkpoint is written.

    Examples:
        >>> import torch
        >>> from torchcaps import create_model, fit
        >>> from torchcaps.training import Progress, Recipe
        >>> images, labels = torch.rand(64, 1, 28, 28), torch.arange(64) % 10
        >>> network = create_model("compact")
        >>> rows = fit(network, (images, labels), Recipe(epochs=1, batch_size=32), progress=Progress())
        >>> len(rows)
        1
    """
    recipe = recipe or Recipe()
    fabric = launch(accelerator, devices, precision=precision)
    is_ours = isinstance(network, Network)
    own_task = task_of(network) if task is None else find_task(task, getattr(network, "objects", 1))
    if is_ours and (own_task.name != network.task or target_axes is not None):
        raise InputError(
            f"this network was made for the task {network.task} and has its own loss; leave task and target_axes out"
        )
    form: dict[str, Any] = {"task": own_task, "loss": loss, "scale": scale, "keys": keys}
    form |= {"groups": groups, "seed": seed, "workers": workers}
    opened, data = fit_data(network, dataset, validation, recipe, fabric, **form)
    recipe = recipe.replace({"batch_size": data.train.batch_size})
    save_files = partial(save_network, network, opened.class_names or _names_of(dataset))
    with on_main_process(fabric, nullcontext() if out is None else lock_folder(Path(out))) as folder:
        shown: dict[str, Any] = {"progress": progress or choose_progress(), "resume_command": "the same call of fit"}
        shown |= {"task": own_task, "loss": None if is_ours else own_task.loss_of_module(loss, target_axes)}
        trainer = Trainer(fabric, network, data, recipe, folder, save_files, seed=seed, **shown)
        trainer.restore()
        for message in data.messages:
            trainer.progress.message(message)
        trainer.fit()
        trainer.take_best()
    return trainer.state.history


def _names_of(dataset: object) -> tuple[str, ...] | None:
    """Return the names of classes that a data set has; None if it only numbers them."""
    return getattr(dataset, "class_names", None) if getattr(dataset, "has_names", True) else None
