"""From a run to what is explored: its network, and the images there are to pick from."""

from __future__ import annotations

from torchcaps.datasets import ImageSet
from torchcaps.errors import InputError
from torchcaps.explorer.state import Explorer
from torchcaps.training import Run


def open_explorer(run: Run, data: str | None = None, data_dir: str | None = None) -> Explorer:
    """An explorer of a run's network, with the test images of the run's data set to pick from.

    Nothing is downloaded: data that are not on this machine are left out, and the explorer says why.

    Args:
        run: The network.
        data: Another data set than the run's.
        data_dir: Where its files are.

    Raises:
        InputError: ``data`` is named, but is not here or does not fit the network.
    """
    images, no_images = None, ""
    try:
        images = _test_images(run, data, data_dir)
    except InputError as error:
        if data is not None:
            raise
        no_images = f"There are no test images to pick from: {error}."
    return Explorer(
        run.model,
        run.class_names,
        title=_title(run),
        images=images,
        no_images=no_images,
        fit=run.image_fit,
    )


def _test_images(run: Run, data: str | None, data_dir: str | None) -> ImageSet:
    name = run.config.data if data is None and run.config is not None else data
    if name is not None and not run.has_data(data, data_dir):
        raise InputError(
            f"the files of {name} are not on this machine and the explorer downloads nothing; name their folder "
            "with --data-dir or TORCHCAPS_DATA"
        )
    return run.dataset(data, data_dir).test


def _title(run: Run) -> str:
    name = run.path.resolve().name
    return name if run.config is None else f"{name}: {run.config.preset}, trained on {run.config.data}"
