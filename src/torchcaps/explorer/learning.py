"""Show a training in the explorer: its progress, and the network's answers to a few images."""

from __future__ import annotations

import copy
import time
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import nn

from torchcaps.analysis.inference import as_pixels, inference
from torchcaps.checks import checked
from torchcaps.explorer.state import Explorer, describe_data, to_bytes
from torchcaps.models import Network, build_network
from torchcaps.training import Progress, Run, TrainConfig
from torchcaps.training.data import cropped, load_run_data
from torchcaps.training.load import preparation_of

MAX_IMAGES = 10
"""Images whose answers are shown during the training."""
MAX_CURVE_POINTS = 200
"""Points of the loss curve."""
MIN_COPY_SECONDS = 0.5
"""Seconds between two copies of the network."""


class Learning(Progress):
    """Progress of a run, for the page and for a second display such as the terminal.

    The page uses copies of the network's weights, so the training is the same as without the page.

    Args:
        config: The run.
        shown: The second display.

    Attributes:
        explorer: The last copy of the network, with the test images of the run's data.
        images: The images to answer: one test image of each class, at most ten.
        labels: Their labels, in words.

    Raises:
        InputError: As for :func:`torchcaps.training.train`.
    """

    @checked
    def __init__(self, config: TrainConfig, shown: Progress) -> None:
        data = cropped(load_run_data(config), config.recipe)
        torch.manual_seed(config.seed)
        self._data = describe_data(config.data)
        self.explorer = Explorer(
            build_network(config.model, data.in_shape, data.num_classes).eval(),
            data.class_names,
            name=config.preset,
            what=f"learning on {self._data}",
            images=data.test,
            images_of=f"test images of {self._data}",
            preparation=preparation_of(config),
        )
        # passed through to the second display
        self.shown, self.message, self.stop = shown, shown.message, shown.stop  # type: ignore[method-assign]
        classes = data.test.labels.reshape(len(data.test), -1).numpy()
        watched = np.unique(classes[:, 0], return_index=True)[1][:MAX_IMAGES]
        self.images, self._classes = data.test.images[watched], classes[watched]
        self.labels = [self.explorer.pick(int(index))[1] for index in watched]
        self._numbers: dict[str, Any] = {"isRunning": True, "says": "The training begins.", "epoch": 1, "step": 0}
        self._numbers |= {"epochs": config.recipe.epochs, "steps": 1}
        self._loss: list[tuple[int, float]] = []
        self._accuracy: list[tuple[int, float]] = []
        self._copied = 0.0

    def network(self, network: nn.Module) -> None:
        """Keep a reference to the network in training."""
        assert isinstance(network, Network)
        self._network = network
        self.shown.network(network)

    def start(self, *, epochs: int, steps_per_epoch: int, done: int) -> None:
        """Record the number of epochs and steps."""
        self._numbers |= {"epochs": epochs, "steps": epochs * steps_per_epoch}
        self.shown.start(epochs=epochs, steps_per_epoch=steps_per_epoch, done=done)

    def step(self, *, epoch: int, step: int, images_per_second: float, loss: float) -> None:
        """Record the loss, and copy the weights if the last copy is older than half a second."""
        self._numbers |= {"says": "The network is learning.", "epoch": epoch, "step": step}
        self._loss.append((step, loss))
        if time.monotonic() - self._copied > MIN_COPY_SECONDS:
            self._copy()
        self.shown.step(epoch=epoch, step=step, images_per_second=images_per_second, loss=loss)

    def epoch(self, row: Mapping[str, Any]) -> None:
        """Record the accuracy on the validation images, and copy the weights."""
        self._accuracy.append((row["step"], row["validation_accuracy"]))
        self._copy()
        self.shown.epoch(row)

    def end(self, run: Run, accuracy: float) -> None:
        """Switch to the best epoch of the finished run.

        Args:
            run: The finished run.
            accuracy: Accuracy on the test images, 0..1.
        """
        self.explorer.model, self.explorer.calibration = run.model, run.images.calibration or self.explorer.calibration
        self.explorer.what = f"trained on {self._data}"
        says = f"Trained: {100 * accuracy:.1f} % of the test images are classified correctly. Run folder: {run.path}."
        self._numbers |= {"isRunning": False, "says": says}

    def numbers(self) -> dict[str, Any]:
        """Return the progress of the training, as plain values."""
        every = -(-len(self._loss) // MAX_CURVE_POINTS) or 1
        curves = {"loss": self._loss[::-every][::-1], "accuracy": self._accuracy}
        return {**self._numbers, **curves, "what": self.explorer.what}

    def look(self) -> dict[str, Any]:
        """Return the answers of the last copy of the network to :attr:`images`.

        Returns:
            ``scores`` (N,): score of the true class (the first one, if there are several). ``seen``: name of the
            predicted class. ``right``: whether the prediction is correct. ``decoded``: images (C, H, W), 0..255,
            decoded from the predicted class's capsule; None without a decoder.
        """
        explorer, model = self.explorer, self.explorer.model
        with inference(model):
            output = model(as_pixels(model, self.images))
        scores, images = output.scores.float().numpy(), range(len(self.images))
        seen, decoded = scores.argmax(1), None
        if explorer.no_pose is None and output.capsules is not None:
            decoded = list(to_bytes(explorer.decode(seen.tolist(), output.capsules.float().numpy()[images, seen])))
        return {
            "scores": scores[images, self._classes[:, 0]],
            "seen": [explorer.class_names[j] for j in seen],
            "right": (self._classes == seen[:, None]).any(1).tolist(),
            "decoded": decoded,
        }

    def _copy(self) -> None:
        self.explorer.model = copy.deepcopy(self._network).to("cpu").eval()
        self._copied = time.monotonic()
