"""The training loop: the epochs, batches and steps of a `Trainer`. Read it from top to bottom.

Everything random is a function of (seed, epoch, batch), and the learning rate is a function of the step. So a run that
was stopped at any step resumes exactly.
"""

from __future__ import annotations

import dataclasses
import math
import signal
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn
from torch.optim.swa_utils import update_bn

from torchcaps.datasets import Batch, BatchLoader
from torchcaps.errors import InputError
from torchcaps.files import reading
from torchcaps.models import Network
from torchcaps.models.files.weights import CURRENT_FORMAT, FORMAT, WEIGHTS, read_weights
from torchcaps.parts import build, flat
from torchcaps.tasks import task_of
from torchcaps.training.averaging import WeightAverage
from torchcaps.training.checkpoint import check_state, check_trained, read_checkpoint, write_checkpoint
from torchcaps.training.data import RunData
from torchcaps.training.devices import compiled, over_processes, peak_memory_mib
from torchcaps.training.folder import (
    BEST,
    CHECKPOINT,
    HOLDER,
    METRICS,
    check_settings,
    write_metrics,
)
from torchcaps.training.progress import Progress, log_row, make_logger, noted_signals
from torchcaps.training.recipe import Recipe, learning_rate
from torchcaps.training.state import VALIDATION_COLUMNS, ProgressState
from torchcaps.training.step import (
    SUMS,
    EpochSums,
    Loss,
    Recalls,
    class_weights,
    forward,
    weights_of,
    with_axes,
)
from torchcaps.training.stops import Diverged, Interrupted, settings_to_try
from torchcaps.words import counted

if TYPE_CHECKING:
    from lightning_fabric import Fabric

    from torchcaps.tasks import Task

    CheckpointReason = Literal["interval"] | signal.Signals | None

STEPS_BETWEEN_REPORTS = 32
"""Steps between two checks of losses and signals on a GPU or with several processes."""
MIN_CHECKPOINT_SECONDS = 10.0
"""Shortest time between the checkpoints of two epochs, because writing one can take as long as an epoch."""
NORM_BATCHES = 32
"""Batches from which `Recipe.precise_norm` computes the statistics of batch normalisation."""


@dataclass(eq=False)
class Trainer:
    """The state of a run, and the loop over its epochs, batches and steps.

    Raises:
        InputError: The recipe does not fit the data or the network.
    """

    fabric: Fabric
    network: nn.Module
    data: RunData
    recipe: Recipe
    out: Path | None = None
    """The run folder, locked by this process. :meth:`restore` reads its checkpoint. None: write nothing."""
    save_files: Callable[[Path], None] = lambda _: None
    """Function that writes the network's files into a folder."""
    seed: int = field(default=0, kw_only=True)
    """Random seed of the steps, such as for dropout."""
    task: Task | None = field(default=None, kw_only=True)
    """Task of the network. None: its own."""
    loss: Loss | None = field(default=None, kw_only=True)
    """Loss of a module that is no network of torchcaps. None: that of its task."""
    progress: Progress = field(default_factory=Progress, kw_only=True)
    """Display of the progress. Only the first process shows it."""
    checkpoint_minutes: float = field(default=5.0, kw_only=True)
    """Longest time between two checkpoints, minutes."""
    resume_command: str | None = field(default=None, kw_only=True)
    """Command that resumes a stopped run, for the message. None: ``torchcaps train --resume``."""

    def __post_init__(self) -> None:
        fabric, recipe, device = self.fabric, self.recipe, self.fabric.device
        self._task = task = self.task or task_of(self.network)
        self._loss = self.loss or task.loss_of_module(None, None)
        if self.data.validation is None and (recipe.stop_at, recipe.patience) != (None, None):
            raise InputError("stop_at and patience need validation images, but the data have none")
        if not fabric.is_global_zero:
            self.progress = Progress()
        self.state = ProgressState()
        self.steps = len(self.data.train)
        """Number of steps in an epoch."""
        self.report_every = 1 if fabric.world_size == 1 and device.type == "cpu" else STEPS_BETWEEN_REPORTS
        """Steps between two checks of losses and signals, the same in all processes. On a CPU, checks take no time."""
        self.sums = EpochSums(device)
        self._weights = class_weights(recipe, self.network, task, self.data.labels, device)
        # to save time, only the device's own generator is seeded on CPU and CUDA
        seeders = {"cpu": torch.default_generator.manual_seed, "cuda": torch.cuda.manual_seed}
        self._seed_device: Callable[[int], object] = seeders.get(device.type, torch.manual_seed)
        scored: Any = self.network
        if isinstance(scored, Network):
            scored.fit_targets(self.data.labels)
        else:  # the metric of a module that is no network of torchcaps needs the same numbers
            numbers = task.buffers(1, self.data.labels)
            scored = SimpleNamespace(**{name: each.to(device) for name, each in numbers.items()})
        self._score = partial(task.score, network=scored)
        self.network.to(device)  # before the optimizer, which depends on the device of its parameters
        decay = recipe.average_weights
        self.average = WeightAverage(self.network, decay) if decay else None
        """Moving average of the weights; None if the recipe has none."""
        model = compiled(self.network, fabric) if recipe.compile else self.network
        rate: float = recipe.learning_rate
        optimizer = build("optimizer", recipe.optimizer, params=self.network.parameters(), learning_rate=rate)
        self.model, self.optimizer = fabric.setup(model, optimizer)
        self._settings, self._best = flat(recipe.fields) | {"seed": self.seed}, dict[str, Tensor]()
        self._last_save = self._since = time.monotonic()
        self.stop: Sequence[int] = ()
        """Numbers of the signals that ask the run to stop."""
        self.logger = None
        if self.out is not None and recipe.logger is not None and fabric.is_global_zero:
            self.logger = make_logger(recipe.logger, self.out)

    def fit(self) -> None:
        """Train to the end of the last epoch."""
        with ExitStack() as stack:
            if self.state.history:  # a process may have been killed between the checkpoint and the other files
                self._publish()
            self.progress.network(self.network)
            self.progress.start(epochs=self.recipe.epochs, steps_per_epoch=self.steps, done=self.state.step)
            stack.callback(self.progress.stop)
            if self.logger is not None:
                stack.callback(self.logger.finalize, "success")
            if self.out is not None:  # without a folder, signals act as usual
                self.stop = stack.enter_context(noted_signals())
            while not self.is_done:
                self.network.train()
                self._seconds_since_last()
                for batch in self.data.train.batches(self.state.epoch, start=self.state.batch):
                    self.step(batch)
                    if self.state.step % self.report_every == 0 or self.state.batch == self.steps:
                        self._report()
                        self._save_if_due()
                self._end_epoch()
            if self.average is not None:
                self.average.apply()

    def _averaged(self) -> AbstractContextManager[list[Tensor] | None]:
        """Give the network the averaged weights within a ``with`` block, if the recipe averages them."""
        return nullcontext() if self.average is None else self.average.applied()

    def step(self, batch: Batch) -> None:
        """Compute the loss and its gradients, and update the weights. The host does not wait for the device."""
        state, recipe = self.state, self.recipe
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate(recipe, state.step, self.steps)
        # randomness is a function of the step, so checkpoints need no state of generators
        self._seed_device((self.seed * 1_000_003 + state.step) * 1_009 + self.fabric.global_rank)
        weights = None if self._weights is None else weights_of(self._weights, batch.labels)
        if batch.weights is not None:
            weights = batch.weights if weights is None else weights * with_axes(batch.weights, weights.ndim)
        scores, losses = forward(self.network, self.model, batch, self._loss, weights)
        self.fabric.backward(losses.total)
        if (largest := recipe.max_gradient_norm) is not None:  # non-finite losses are reported later
            self.fabric.clip_gradients(self.model, self.optimizer, max_norm=largest, error_if_nonfinite=False)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        if self.average is not None:
            self.average.update()
        state.step, state.batch = state.step + 1, state.batch + 1
        self.sums.add(losses, self._score(scores.detach(), batch.labels))

    def _end_epoch(self) -> None:
        """Validate, and write checkpoint, best weights and metrics.

        Source of the recomputed batch normalisation: Wu, Johnson 2021, "Rethinking 'Batch' in BatchNorm"
        (arXiv:2105.07576), section 3, PreciseBN.
        """
        self._check_weights()
        state, validated = self.state, dict.fromkeys(VALIDATION_COLUMNS)
        with self._averaged():
            if self.data.plain is not None:
                update_bn(islice(self.data.plain.batches(0), NORM_BATCHES), self.network, self.fabric.device)
            if self.data.validation is not None:
                validated |= self.validate(self.data.validation)
        state.seconds += self._seconds_since_last()
        images = min(self.steps * self.recipe.batch_size, self.data.train.num_images)
        has_decoder = getattr(self.network, "decoder", None) is not None
        row = {
            "epoch": state.epoch + 1,
            "step": state.step,
            "seconds": round(state.seconds, 3),
            "images_per_second": round(images / state.epoch_seconds, 1),
            "learning_rate": learning_rate(self.recipe, state.step - 1, self.steps),
            "train_loss": state.sums["loss"] / images,
            "train_classification_loss": state.sums["classification_loss"] / images,
            "train_reconstruction_loss": state.sums["reconstruction_loss"] / images if has_decoder else None,
            "train_accuracy": state.sums["correct"] / images,
            **validated,
        }
        state.end_epoch(row)
        self.sums.values.zero_()
        reason = self._checkpoint_reason(MIN_CHECKPOINT_SECONDS)
        if reason or self.is_best or self.is_done:
            self.save_checkpoint()
        self._publish()
        if self.logger is not None:
            log_row(self.logger, row)
        self.progress.epoch(row | {"improved": self.is_best})
        self._raise_if_stopped(reason)

    def validate(self, batches: BatchLoader) -> dict[str, float]:
        """Return the :data:`VALIDATION_COLUMNS`, computed in float32.

        Each process takes a share of the images, and every image counts once.

        Raises:
            Diverged: The loss is NaN or infinite.
        """
        sums = torch.zeros(3, dtype=self.sums.values.dtype, device=self.fabric.device)
        recalls, infer = Recalls(sums), partial(self._task.infer, self.network)
        self.network.eval()
        with torch.no_grad():
            for batch in batches.batches(0):
                if images := len(batch.labels):  # the last batch may be too small for all processes
                    scores, losses = forward(self.network, infer, batch, self._loss)
                    scored = self._score(scores, batch.labels).to(sums)
                    loss, count = losses.total * images, scored.new_tensor(images)
                    sums += torch.stack([loss, scored.sum(), count])
                    recalls.add(batch.labels, scored, scores.shape[1])
        total, correct, images = over_processes(self.fabric, sums, "sum").tolist()
        if not math.isfinite(total):
            raise self._diverged("the loss of the validation images is NaN or infinite after")
        balanced = recalls.mean(self.fabric)
        accuracy = correct / images
        return dict(
            zip(VALIDATION_COLUMNS, (total / images, accuracy, accuracy if balanced is None else balanced), strict=True)
        )

    @property
    def is_done(self) -> bool:
        """True at the end of the last epoch, as set by ``epochs``, ``stop_at`` or ``patience``."""
        state, recipe = self.state, self.recipe
        if state.batch > 0 or not state.history:
            return False
        reached = recipe.stop_at is not None and state.history[-1]["validation_accuracy"] >= recipe.stop_at
        waited = state.epoch - state.best(recipe.select)["epoch"]
        return reached or (recipe.patience is not None and waited >= recipe.patience) or state.epoch >= recipe.epochs

    @property
    def is_best(self) -> bool:
        """True if the current weights belong to the best epoch so far."""
        return self.state.batch == 0 and self.state.best(self.recipe.select) is self.state.history[-1]

    # ---- files of the run folder

    def _save_if_due(self) -> None:
        """Write a checkpoint within an epoch if the last one is old or a stop signal has arrived."""
        if self.state.batch < self.steps and (reason := self._checkpoint_reason()):
            self.save_checkpoint()
            self._raise_if_stopped(reason)
            self._seconds_since_last()

    def save_checkpoint(self) -> None:
        """Write ``last.ckpt`` atomically. All processes must call this method."""
        self._check_weights()
        self.note_peak_memory()
        if self.out is not None and self.fabric.is_global_zero:
            self.check_folder()
            with self._averaged() as trained:
                contents = {"model": self.network.state_dict(), "optimizer": self.optimizer.state_dict()}
                contents |= {} if trained is None else {"trained": trained}
                contents |= {"progress": dataclasses.asdict(self.state), "data": self.data.fingerprint}
                contents[FORMAT] = CURRENT_FORMAT
                write_checkpoint(self.out / CHECKPOINT, contents | {"settings": self._settings})
        self.fabric.barrier()  # all processes wait until the checkpoint is complete
        self._last_save = time.monotonic()

    def restore(self) -> None:
        """Resume from the checkpoint in the run folder, if it has one.

        Raises:
            InputError: The checkpoint belongs to another network, other data, or a longer run.
        """
        out, epochs = self.out, self.recipe.epochs
        if out is None or not (out / CHECKPOINT).exists():
            return
        checkpoint = read_checkpoint(out / CHECKPOINT)
        check_settings(checkpoint["settings"], self._settings, out)
        if checkpoint["data"] != self.data.fingerprint:
            raise InputError(f"the run in {out} was trained on other images; resume it with the same images")
        with reading(out / CHECKPOINT, "checkpoint of this run"):
            self.state = state = ProgressState.read(checkpoint["progress"], self.data.validation is not None)
            weights, moments = checkpoint["model"], checkpoint["optimizer"]["state"]
            check_state(self.network, self.recipe, weights, moments)
            self.network.load_state_dict(weights)
            if self.average is not None:
                self.average.restore(check_trained(self.network, checkpoint.get("trained")))
            groups = self.optimizer.state_dict()["param_groups"]  # with the settings of this device
            self.optimizer.load_state_dict({"state": moments, "param_groups": groups})
            if state.batch >= self.steps or state.step != state.epoch * self.steps + state.batch:
                raise InputError(f"its epochs must have {counted(self.steps, 'step')}, as in this run")
        if epochs * self.steps < state.step:
            raise InputError(
                f"the run has finished {counted(state.epoch, 'epoch')} and {counted(state.batch, 'step')} "
                f"already; it cannot end with epoch {epochs}"
            )
        if self.fabric.is_global_zero:  # in one process only, because sums are added over processes
            sums = [state.sums[name] for name in SUMS]
            self.sums.values.copy_(torch.tensor(sums, dtype=self.sums.values.dtype))

    def _publish(self) -> None:
        """Write the metrics and, after the best epoch so far, the weights. Both follow from the checkpoint.

        So the best weights are in the checkpoint or in the run folder even if the process is killed at any time.
        """
        if self.out is None:
            if self.is_best and self.data.validation is not None:
                with self._averaged():
                    self._best = {name: each.detach().clone() for name, each in self.network.state_dict().items()}
        elif self.fabric.is_global_zero:
            self.check_folder()
            if self.is_best:
                with self._averaged():
                    self.save_files(self.out / BEST)
            write_metrics(self.out / METRICS, self.state.history)

    def note_peak_memory(self) -> None:
        """Update the peak memory of the run with that of this process."""
        peaks = (self.state.peak_memory_mib, peak_memory_mib(self.fabric.device))
        self.state.peak_memory_mib = max((each for each in peaks if each is not None), default=None)

    def take_best(self) -> None:
        """Load the weights of the best epoch into the network."""
        self.fabric.barrier()  # until the first process has written them
        if self.out is not None:
            self._best = read_weights(self.out / BEST / WEIGHTS)
        if self._best:
            self.network.load_state_dict(self._best)
        self.network.eval()

    def check_folder(self) -> None:
        """Raise InputError if the run folder was moved or removed since this process locked it."""
        if self.out is not None and not (self.out / HOLDER).exists():
            raise InputError(
                f"the run folder {self.out} was moved or removed while the run wrote to it; if it was moved, resume it "
                "with torchcaps train --resume and its new path"
            )

    # ---- checks of signals, losses and weights

    def _checkpoint_reason(self, seconds: float = math.inf) -> CheckpointReason:
        """Return why a checkpoint is due: None, ``"interval"``, or the signal that stops the run.

        All processes get the same answer, even if a signal has reached only some of them. A checkpoint is due after
        ``seconds`` or ``checkpoint_minutes`` without one.
        """
        age = time.monotonic() - self._last_save
        is_due = self.out is not None and age > min(seconds, 60 * self.checkpoint_minutes)
        signal_or_due = torch.tensor(
            self.stop[0] if self.stop else int(is_due)
        )  # the handled signals are larger than 1
        number = int(over_processes(self.fabric, signal_or_due, "max"))
        return signal.Signals(number) if number > 1 else "interval" if number else None

    def _raise_if_stopped(self, reason: CheckpointReason) -> None:
        if isinstance(reason, signal.Signals):
            assert self.out is not None
            raise Interrupted(self.out, self.state.step, 128 + reason, self.resume_command)

    def _report(self) -> None:
        """Record and show sums and time of the epoch so far. All processes raise Diverged if a loss is not finite."""
        sums, state = over_processes(self.fabric, self.sums.values, "sum").tolist(), self.state
        seconds = self._seconds_since_last()
        if not all(map(math.isfinite, sums)):
            raise self._diverged("the loss became NaN or infinite by")
        state.sums = dict(zip(SUMS, sums, strict=True))
        state.seconds, state.epoch_seconds = state.seconds + seconds, state.epoch_seconds + seconds
        rate, loss = state.batch * self.recipe.batch_size / state.epoch_seconds, float(self.sums.last_loss)
        self.progress.step(epoch=state.epoch + 1, step=state.step, images_per_second=rate, loss=loss)

    def _seconds_since_last(self) -> float:
        """Return the seconds since the last call."""
        since, self._since = self._since, time.monotonic()
        return self._since - since

    def _check_weights(self) -> None:
        """Raise Diverged if weights are not finite, because an update may ruin them after a finite loss."""
        if not torch.stack([p.isfinite().all() for p in self.network.parameters()]).all():
            raise self._diverged("the weights became NaN or infinite by")

    def _diverged(self, what: str) -> Diverged:
        """Return the error with the last step and settings to try."""
        epoch, batch = divmod(self.state.step - 1, self.steps)
        rate = learning_rate(self.recipe, self.state.step - 1, self.steps)
        words = f"{what} step {self.state.step} (epoch {epoch + 1}, batch {batch + 1} of {self.steps}); try "
        words += " or ".join(settings_to_try(self.network, rate, self.fabric._precision.precision))
        if self.out is not None and (self.out / CHECKPOINT).exists():
            words += f"; {self.out} keeps the last good checkpoint"
        elif self.out is not None:
            words += f"; {self.out} has no checkpoint yet"
        return Diverged(words)
