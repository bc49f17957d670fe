"""What the explorer shows of a network while it is trained: how far it is, and what it makes of a few images."""

from __future__ import annotations

import copy
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool, Float, Int

from torchcaps.analysis.inference import as_pixels, inference
from torchcaps.explorer.state import Explorer, describe_data
from torchcaps.models import Network, build_model
from torchcaps.training import Progress, Run, TrainConfig
from torchcaps.training.data import as_seen, load_run_data
from torchcaps.training.run import preparation_of

MOST_IMAGES = 10
MOST_POINTS = 200
"""Of the curve of losses."""
INTERVAL = 0.5
"""Seconds between two copies of the network's weights, which the page looks at, at least."""


@dataclass(frozen=True, eq=False)
class Pupils:
    """What a network makes of the N images that are watched.

    Args:
        scores: Of the right class, or of the first of several.
        seen: The class of the highest score.
        right: Whether that is a right one.
        decoded: What is decoded from the capsule of the highest score, pixels 0..1; None without a decoder.
    """

    scores: Float[np.ndarray, "N"]
    seen: Int[np.ndarray, "N"]
    right: Bool[np.ndarray, "N"]
    decoded: Float[np.ndarray, "N C H W"] | None


class Learning(Progress):
    """The progress of a run, for the page and for another display.

    The page sees copies of the network's weights; the training is the same as without it.

    Args:
        config: The run.
        shown: Shows the progress elsewhere, as well.

    Attributes:
        explorer: The network as it was copied last, with the test images of the run's data.
        images: Those that are watched: test images, one of each class, of ten classes at most.
        labels: What they show, in words.

    Raises:
        InputError: As for :func:`torchcaps.training.train`.
    """

    def __init__(self, config: TrainConfig, shown: Progress) -> None:
        data = as_seen(load_run_data(config), config.recipe)
        torch.manual_seed(config.seed)
        model = build_model(config.model, data.in_shape, data.num_classes).eval()
        words = self._words = describe_data(config.data)
        self.explorer = Explorer(
            model,
            data.class_names,
            name=config.preset,
            what=f"learning on {words}",
            images=data.test,
            images_of=f"test images of {words}",
            preparation=preparation_of(config),
        )
        self.shown = shown
        first = data.test.labels.reshape(len(data.test), -1)[:, 0].numpy()
        _, watched = np.unique(first, return_index=True)
        self._indices = [int(index) for index in watched[:MOST_IMAGES]]
        self.images = data.test.images[self._indices]
        self.labels = [self.explorer.pick(index)[1] for index in self._indices]
        self._steps = self._step = 0
        self._epochs, self._epoch = config.recipe.epochs, 1
        self._loss: list[tuple[int, float]] = []
        self._accuracy: list[tuple[int, float]] = []
        self._copied = 0.0
        self._end: str | None = None

    # ---- what the training says ----

    def network(self, network: Network) -> None:
        """Remember the network that is trained."""
        self._network = network

    def start(self, *, epochs: int, steps_per_epoch: int, done: int) -> None:
        """Remember how many steps there are."""
        self._steps, self._epochs = epochs * steps_per_epoch, epochs
        self.shown.start(epochs=epochs, steps_per_epoch=steps_per_epoch, done=done)

    def step(self, *, epoch: int, step: int, images_per_second: float, loss: float) -> None:
        """Note the loss, and copy the weights if the last copy is old enough."""
        self._epoch, self._step = epoch, step
        self._loss.append((step, loss))
        if time.monotonic() - self._copied > INTERVAL:
            self._copy()
        self.shown.step(epoch=epoch, step=step, images_per_second=images_per_second, loss=loss)

    def epoch(self, row: Mapping[str, Any]) -> None:
        """Note the accuracy on the validation images."""
        self._accuracy.append((row["step"], row["validation_accuracy"]))
        self._copy()
        self.shown.epoch(row)

    def message(self, text: str) -> None:
        """Hand it on."""
        self.shown.message(text)

    def stop(self) -> None:
        """Hand it on."""
        self.shown.stop()

    def end(self, run: Run, accuracy: float) -> None:
        """Called when the run is finished, to explore the network of its best epoch.

        Args:
            run: What was trained.
            accuracy: Of the test images, 0..1.
        """
        self.explorer.model, self.explorer.calibration = run.model, run.calibration or self.explorer.calibration
        self.explorer.what = f"trained on {self._words}"
        self._end = f"Trained: {100 * accuracy:.1f} % of the test images are right. The run is in {run.path}."

    def _copy(self) -> None:
        self.explorer.model = copy.deepcopy(self._network).to("cpu").eval()
        self._copied = time.monotonic()

    # ---- what the page asks ----

    def numbers(self) -> dict[str, Any]:
        """How far the training is, as plain values."""
        every = -(-len(self._loss) // MOST_POINTS) or 1
        says = self._end or ("The network is learning." if self._step else "The training begins.")
        return {
            "isRunning": self._end is None,
            "what": self.explorer.what,
            "says": says,
            "epoch": self._epoch,
            "epochs": self._epochs,
            "step": self._step,
            "steps": max(self._steps, 1),
            "loss": self._loss[::-every][::-1],
            "accuracy": self._accuracy,
        }

    def look(self) -> Pupils:
        """What the network, as it was copied last, makes of the images."""
        explorer, model = self.explorer, self.explorer.model
        with inference(model):
            output = model(as_pixels(model, self.images))
        scores = output.scores.float().numpy()
        seen = scores.argmax(1)
        assert explorer.images is not None
        labels = explorer.images.labels[self._indices].reshape(len(scores), -1).numpy()
        own = scores[np.arange(len(scores)), labels[:, 0]]
        decoded = None
        if explorer.no_pose is None and output.capsules is not None:
            poses = output.capsules.float().numpy()[np.arange(len(scores)), seen]
            decoded = explorer.decode(seen.tolist(), poses)
        return Pupils(own, seen, (labels == seen[:, None]).any(1), decoded)
