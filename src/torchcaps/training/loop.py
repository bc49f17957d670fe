"""The training loop, read from top to bottom: `fit`, and the epochs, batches and steps of a `Trainer`.

Everything random is a function of (seed, epoch, batch), and the learning rate of the step, so that a run that was
stopped at any step goes on exactly as if it had not been.
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.optim.swa_utils import update_bn

from torchcaps.checks import checked
from torchcaps.datasets import Batch, BatchLoader
from torchcaps.datasets.items import Keys
from torchcaps.datasets.pixels import Scale
from torchcaps.errors import InputError
from torchcaps.files import reading
from torchcaps.models.older_files import CURRENT_FORMAT, FORMAT, to_current_moments, to_current_weights
from torchcaps.models.pretrained import WEIGHTS, read_weights
from torchcaps.parts import build, flat
from torchcaps.tasks import task_of
from torchcaps.training.checkpoint import check_state, read_checkpoint, write_checkpoint
from torchcaps.training.data import RunData, fit_data
from torchcaps.training.devices import launch, over_processes, peak_memory_mib
from torchcaps.training.folder import (
    BEST,
    CHECKPOINT,
    HOLDER,
    METRICS,
    check_settings,
    lock_folder,
    on_main_process,
    save_network,
    write_metrics,
)
from torchcaps.training.progress import Progress, choose_progress, log_row, make_logger, noted_signals
from torchcaps.training.recipe import Recipe, learning_rate
from torchcaps.training.state import JUDGED, ProgressState
from torchcaps.training.step import SUMS, EpochSums, Loss, Recalls, class_weights, forward, weights_of_images
from torchcaps.training.stops import Diverged, Interrupted, settings_to_try

if TYPE_CHECKING:
    from lightning_fabric import Fabric

    from torchcaps.training.data import OwnData

CHECK_EVERY = 32
"""On a GPU, or with several processes, losses and signals are checked once in so many steps."""
YOUNG = 10.0
"""Seconds. A checkpoint younger than this is not replaced at an epoch's end: writing can take as long as an epoch."""
NORM_BATCHES = 32
"""Batches of training images that give batch normalisation its means and variances, where a recipe wants them so."""
OVERDUE = 1
"""Says that a checkpoint is due; smaller than the number of any signal that is handled."""


@checked
def fit(
    network: nn.Module,
    dataset: OwnData,
    recipe: Recipe | None = None,
    out: str | Path | None = None,
    *,
    validation: OwnData | None = None,
    loss: Loss | None = None,
    seed: int = 0,
    accelerator: str = "auto",
    devices: int = 1,
    precision: str = "auto",
    workers: int = 0,
    progress: Progress | None = None,
    scale: Scale = "auto",
    keys: Keys | None = None,
) -> list[dict[str, Any]]:
    """Train a network of one's own on data of one's own.

    With a folder ``out``, metrics, the weights of the best epoch and a checkpoint are written there, Ctrl-C and SIGTERM
    stop the run, and a second call with the same arguments goes on with the same bits. All chance is a function of
    ``seed``, the epoch and the batch; the weights that ``network`` has at first are the caller's.

    Args:
        network: A network of torchcaps; or any module that gives the scores (B, J) of images, class capsules, or
            something that has such ``scores``. At the end it has the weights of the epoch that the validation images
            chose, of the last one without any, and is in evaluation mode.
        dataset: A :class:`torchcaps.datasets.Dataset` or ``ImageSet``; images (N, ...) and labels, as two tensors,
            arrays or lists, or in a dict; or a torch ``Dataset`` with a length, of pairs (image, label) or dicts; or a
            ``DataLoader`` of one, whose batch size, workers, ``drop_last``, ``collate_fn``, sampler and batch sampler
            are used; without a sampler of its own, ``seed`` shuffles. Labels may have any form. Pixels are read as by
            :func:`~torchcaps.datasets.pixels.scale_pixels`; a module of the user's own gets floats unchanged. A recipe
            augments only uint8 images (N, C, H, W) in memory.
        recipe: How to train; its ``limit_…`` and ``validation…`` fields are those of loading, and change nothing here.
        out: The run folder; None writes nothing.
        validation: Images that choose the best epoch, in any of these forms, if ``dataset`` has none.
        loss: The mean loss of a module of one's own, of its output, or the scores of its capsules, and the labels; the
            cross-entropy of the scores if None. A network of torchcaps has its own.
        seed: Seed of the order of the images, their changes, and dropout.
        accelerator: ``"cpu"``, ``"cuda"``, ``"cuda:1"`` for one of several GPUs, ``"mps"``, or ``"auto"``.
        devices: Processes on this machine, one for each device.
        precision: ``"32"``, ``"bf16"`` or ``"auto"``, as in :class:`TrainConfig`.
        workers: Processes that read a torch ``Dataset`` ahead; with any number of them the run has the same bits.
        progress: Shows the progress; a live display or plain lines if None.
        scale: How pixels become 0..1: ``"auto"`` by their dtype, (low, high) so that these numbers become 0 and 1, or
            ``"none"`` for images that are normalised already.
        keys: Where an item holds image and label, such as ``("image", "label")`` or ``(0, 1)``, if not as usual.

    Returns:
        A row for each epoch, as in ``metrics.csv``.

    Raises:
        InputError: Data and recipe do not fit each other or the network, or the run in ``out`` is another one.
        Diverged: The loss became NaN or infinite.
        Interrupted: Ctrl-C or SIGTERM, where there is a folder; the checkpoint is written.

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
    form: dict[str, Any] = {"loss": loss, "scale": scale, "keys": keys}
    given, data = fit_data(network, dataset, validation, recipe, fabric, seed=seed, workers=workers, **form)
    recipe = recipe.replace({"batch_size": data.train.batch_size})
    save_files = partial(save_network, network, given.class_names or getattr(dataset, "class_names", None))
    with on_main_process(fabric, nullcontext() if out is None else lock_folder(Path(out))) as folder:
        shown: dict[str, Any] = {"progress": progress or choose_progress(), "again": "the same call of fit"}
        trainer = Trainer(fabric, network, data, recipe, folder, save_files, seed=seed, loss=loss, **shown)
        trainer.restore()
        if given.message is not None:
            trainer.progress.message(given.message)
        trainer.fit()
        trainer.take_best()
    return trainer.state.history


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
    """The run folder, which this process has locked; :meth:`restore` reads its checkpoint. None writes nothing."""
    save_files: Callable[[Path], None] = lambda _: None
    """Writes the network's files into a folder."""
    seed: int = field(default=0, kw_only=True)
    """The seed of what is random in a step, such as dropout."""
    loss: Loss | None = field(default=None, kw_only=True)
    progress: Progress = field(default_factory=Progress, kw_only=True)
    """Of other processes than the first nothing is shown."""
    checkpoint_minutes: float = field(default=5.0, kw_only=True)
    """The longest time between two checkpoints."""
    again: str | None = field(default=None, kw_only=True)
    """What goes on with the run when it was stopped; ``torchcaps train --resume`` if None."""

    def __post_init__(self) -> None:
        fabric, recipe, device, task = self.fabric, self.recipe, self.fabric.device, task_of(self.network)
        if self.data.validation is None and (recipe.stop_at, recipe.patience) != (None, None):
            raise InputError("stop_at and patience look at the accuracy of validation images, of which there are none")
        if not fabric.is_global_zero:
            self.progress = Progress()
        self.state = ProgressState()
        self.steps = len(self.data.train)
        """Steps an epoch."""
        self.look_every = 1 if fabric.world_size == 1 and device.type == "cpu" else CHECK_EVERY
        """Steps between two checks of losses and signals, the same in all processes: 1 where a check takes no time."""
        self.sums = EpochSums(device)
        self._weights = class_weights(recipe, self.network, self.data.labels, device)
        # on CPU and CUDA no other generator than the device's is seeded, to save time
        seeders = {"cpu": torch.default_generator.manual_seed, "cuda": torch.cuda.manual_seed}
        self._seed_device: Callable[[int], object] = seeders.get(device.type, torch.manual_seed)
        self._score = partial(task.score, network=self.network)
        task.fit_targets(self.network, self.data.labels)
        self.network.to(device)  # before the optimizer looks where its parameters are
        model: Any = torch.compile(self.network) if recipe.compile else self.network
        rate: float = recipe.learning_rate
        optimizer = build("optimizer", recipe.optimizer, params=self.network.parameters(), learning_rate=rate)
        self.model, self.optimizer = fabric.setup(model, optimizer)
        self._settings, self._best = flat(recipe.fields) | {"seed": self.seed}, dict[str, Tensor]()
        self._last_save = self._since = time.monotonic()
        self.stop: Sequence[int] = ()
        """The numbers of the signals that have asked the run to stop."""
        self.logger = None
        if self.out is not None and recipe.logger is not None and fabric.is_global_zero:
            self.logger = make_logger(recipe.logger, self.out)

    def fit(self) -> None:
        """Train until the last epoch is done."""
        with ExitStack() as stack:
            if self.state.history:  # a killed process may have written only the checkpoint of an epoch
                self._publish()
            self.progress.network(self.network)
            self.progress.start(epochs=self.recipe.epochs, steps_per_epoch=self.steps, done=self.state.step)
            stack.callback(self.progress.stop)
            if self.logger is not None:
                stack.callback(self.logger.finalize, "success")
            if self.out is not None:  # else signals act as usual
                self.stop = stack.enter_context(noted_signals())
            while not self.is_done:
                self.network.train()
                self._lap()
                for batch in self.data.train.batches(self.state.epoch, start=self.state.batch):
                    self.step(batch)
                    if self.state.step % self.look_every == 0 or self.state.batch == self.steps:
                        self._look()
                        self._save_if_due()
                self._end_epoch()

    def step(self, batch: Batch) -> None:
        """Forward, loss, backward, and a step of the optimizer. The host waits for no result."""
        state, recipe = self.state, self.recipe
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate(recipe, state.step, self.steps)
        # all randomness is a function of the step, so that a checkpoint need not hold any
        self._seed_device((self.seed * 1_000_003 + state.step) * 1_009 + self.fabric.global_rank)
        weights = None if self._weights is None else weights_of_images(self._weights, batch.labels)
        if batch.weights is not None:
            weights = batch.weights if weights is None else weights * batch.weights
        scores, losses = forward(self.network, self.model, batch, self.loss, weights)
        self.fabric.backward(losses.total)
        if (largest := recipe.max_gradient_norm) is not None:  # what is not finite is said with the loss
            self.fabric.clip_gradients(self.model, self.optimizer, max_norm=largest, error_if_nonfinite=False)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        state.step, state.batch = state.step + 1, state.batch + 1
        self.sums.add(losses, self._score(scores.detach(), batch.labels))

    def _end_epoch(self) -> None:
        """Validate, and write checkpoint, best weights and metrics.

        Source of the statistics of batch normalisation: Wu, Johnson 2021, "Rethinking 'Batch' in BatchNorm"
        (arXiv:2105.07576), section 3, PreciseBN.
        """
        self._check_weights()
        state, judged = self.state, dict.fromkeys(JUDGED)
        if self.data.plain is not None:
            update_bn(islice(self.data.plain.batches(0), NORM_BATCHES), self.network, self.fabric.device)
        if self.data.validation is not None:
            judged |= self.judge(self.data.validation)
        state.seconds += self._lap()
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
            **judged,
        }
        state.end_epoch(row)
        self.sums.values.zero_()
        call = self._calls(YOUNG)
        if call or self.is_best or self.is_done:
            self.save_checkpoint()
        self._publish()
        if self.logger is not None:
            log_row(self.logger, row)
        self.progress.epoch(row | {"improved": self.is_best})
        self._raise_if_stopped(call)

    def judge(self, batches: BatchLoader) -> dict[str, float]:
        """The :data:`JUDGED` in float32: each process takes its share of the images, and every image counts once.

        Raises:
            Diverged: The loss is NaN or infinite.
        """
        sums = torch.zeros(3, dtype=self.sums.values.dtype, device=self.fabric.device)
        recalls = Recalls(sums)
        self.network.eval()
        with torch.no_grad():
            for batch in batches.batches(0):
                if images := len(batch.labels):  # none in a share of a small last batch
                    scores, losses = forward(self.network, self.network, batch, self.loss)
                    right = self._score(scores, batch.labels).to(sums)
                    loss, count = losses.total * images, right.new_tensor(images)
                    sums += torch.stack([loss, right.sum(), count])
                    recalls.add(batch.labels, right, scores.shape[1])
        total, correct, images = over_processes(self.fabric, sums, "sum").tolist()
        if not math.isfinite(total):
            raise self._diverged("the loss of the validation images is NaN or infinite after")
        balanced = recalls.mean(self.fabric)
        accuracy = correct / images
        return dict(zip(JUDGED, (total / images, accuracy, accuracy if balanced is None else balanced), strict=True))

    @property
    def is_done(self) -> bool:
        """Whether the run stands at the end of its last epoch: by ``epochs``, ``stop_at`` or ``patience``."""
        state, recipe = self.state, self.recipe
        if state.batch > 0 or not state.history:
            return False
        reached = recipe.stop_at is not None and state.history[-1]["validation_accuracy"] >= recipe.stop_at
        waited = state.epoch - state.best(recipe.select)["epoch"]
        return reached or (recipe.patience is not None and waited >= recipe.patience) or state.epoch >= recipe.epochs

    @property
    def is_best(self) -> bool:
        """Whether the weights are those of the best epoch so far."""
        return self.state.batch == 0 and self.state.best(self.recipe.select) is self.state.history[-1]

    # ---- what is written, and read again

    def _save_if_due(self) -> None:
        """Write a checkpoint within an epoch where the last one is old, or a stop signal has come."""
        if self.state.batch < self.steps and (call := self._calls()):
            self.save_checkpoint()
            self._raise_if_stopped(call)
            self._lap()

    def save_checkpoint(self) -> None:
        """Write ``last.ckpt``, whole or not at all. All processes must call it."""
        self._check_weights()
        self.note_peak_memory()
        if self.out is not None and self.fabric.is_global_zero:
            self.check_folder()
            contents = {"model": self.network.state_dict(), "optimizer": self.optimizer.state_dict()}
            contents |= {"progress": dataclasses.asdict(self.state), "data": self.data.fingerprint}
            contents[FORMAT] = CURRENT_FORMAT
            write_checkpoint(self.out / CHECKPOINT, contents | {"settings": self._settings})
        self.fabric.barrier()  # no process goes on before the checkpoint is whole
        self._last_save = time.monotonic()

    def restore(self) -> None:
        """Go on from the checkpoint in the run folder, if there is one.

        Raises:
            InputError: The checkpoint is of another network, of other data, or of a longer run.
        """
        out, epochs = self.out, self.recipe.epochs
        if out is None or not (out / CHECKPOINT).exists():
            return
        checkpoint = read_checkpoint(out / CHECKPOINT)
        check_settings(checkpoint["settings"], self._settings, out)
        if checkpoint["data"] != self.data.fingerprint:
            raise InputError(
                f"the images are not those that the run in {out} was trained on; it goes on with the same ones only"
            )
        with reading(out / CHECKPOINT, "checkpoint of this run"):
            self.state = state = ProgressState.read(checkpoint["progress"], self.data.validation is not None)
            version, state_of = checkpoint[FORMAT], checkpoint["optimizer"]["state"]
            weights = to_current_weights(self.network, checkpoint["model"], version)
            moments = to_current_moments(self.network, self.optimizer.param_groups, state_of, version)
            check_state(self.network, self.recipe, weights, moments)
            self.network.load_state_dict(weights)
            own = self.optimizer.state_dict()["param_groups"]  # the settings of this device
            self.optimizer.load_state_dict({"state": moments, "param_groups": own})
            if state.batch >= self.steps or state.step != state.epoch * self.steps + state.batch:
                raise InputError(f"its epochs have not the {self.steps} steps of this run's")
        if epochs * self.steps < state.step:
            raise InputError(
                f"the run has finished {state.epoch} epochs and {state.batch} steps already; it cannot go on to the "
                f"end of epoch {epochs}"
            )
        if self.fabric.is_global_zero:  # the sums of all processes are added
            own = [state.sums[name] for name in SUMS]
            self.sums.values.copy_(torch.tensor(own, dtype=self.sums.values.dtype))

    def _publish(self) -> None:
        """Write the metrics, and the network's weights while they are the best ones; both follow from the checkpoint.

        So a process that is killed at any time leaves the best weights in the checkpoint or in the run folder.
        """
        if self.out is None:
            if self.is_best and self.data.validation is not None:
                self._best = {name: each.detach().clone() for name, each in self.network.state_dict().items()}
        elif self.fabric.is_global_zero:
            self.check_folder()
            if self.is_best:
                self.save_files(self.out / BEST)
            write_metrics(self.out / METRICS, self.state.history)

    def note_peak_memory(self) -> None:
        """Remember the peak memory of this sitting's process."""
        known = (self.state.peak_memory_mib, peak_memory_mib(self.fabric.device))
        self.state.peak_memory_mib = max((each for each in known if each is not None), default=None)

    def take_best(self) -> None:
        """Give the network the weights of the best epoch."""
        self.fabric.barrier()  # the first process has published them
        if self.out is not None:
            self._best = read_weights(self.out / BEST / WEIGHTS, self.network)
        if self._best:
            self.network.load_state_dict(self._best)
        self.network.eval()

    def check_folder(self) -> None:
        """Raise InputError if the run folder, which this process has locked, is no longer where it was."""
        if self.out is not None and not (self.out / HOLDER).exists():
            raise InputError(
                f"the run folder {self.out} was moved or removed while the run wrote to it; where it was moved to, go "
                "on with it by torchcaps train --resume"
            )

    # ---- looks at signals, losses and weights

    def _calls(self, seconds: float = math.inf) -> int:
        """The reason for a checkpoint: a stop signal's number, OVERDUE after so many seconds without one, or 0.

        All processes get the same answer, also if a signal has reached only some of them.
        """
        age = time.monotonic() - self._last_save
        overdue = self.out is not None and age > min(seconds, 60 * self.checkpoint_minutes)
        return int(over_processes(self.fabric, torch.tensor(self.stop[0] if self.stop else OVERDUE * overdue), "max"))

    def _raise_if_stopped(self, call: int) -> None:
        if call > OVERDUE:
            assert self.out is not None
            raise Interrupted(self.out, self.state.step, 128 + call, self.again)

    def _look(self) -> None:
        """Note and show the sums and the time of the epoch so far; all processes raise Diverged if a loss is bad."""
        sums, state = over_processes(self.fabric, self.sums.values, "sum").tolist(), self.state
        seconds = self._lap()
        if not all(map(math.isfinite, sums)):
            raise self._diverged("the loss became NaN or infinite by")
        state.sums = dict(zip(SUMS, sums, strict=True))
        state.seconds, state.epoch_seconds = state.seconds + seconds, state.epoch_seconds + seconds
        rate, loss = state.batch * self.recipe.batch_size / state.epoch_seconds, float(self.sums.last_loss)
        self.progress.step(epoch=state.epoch + 1, step=state.step, images_per_second=rate, loss=loss)

    def _lap(self) -> float:
        """Seconds since the last call."""
        since, self._since = self._since, time.monotonic()
        return self._since - since

    def _check_weights(self) -> None:
        """Raise Diverged if the weights are not finite, as an update may ruin them after a good loss."""
        if not torch.stack([p.isfinite().all() for p in self.network.parameters()]).all():
            raise self._diverged("the weights became NaN or infinite by")

    def _diverged(self, what: str) -> Diverged:
        """The error, with the place of the last step, and settings to try."""
        epoch, batch = divmod(self.state.step - 1, self.steps)
        rate = learning_rate(self.recipe, self.state.step - 1, self.steps)
        words = f"{what} step {self.state.step} (epoch {epoch + 1}, batch {batch + 1} of {self.steps}); try "
        words += " or ".join(settings_to_try(self.network, rate, self.fabric._precision.precision))
        if self.out is not None and (self.out / CHECKPOINT).exists():
            words += f"; {self.out} keeps the last good checkpoint"
        elif self.out is not None:
            words += f"; there was no checkpoint yet in {self.out}"
        return Diverged(words)
