"""The training loop, read from top to bottom: `fit`, and the epochs and batches of a `Trainer`.

Everything random is a function of (seed, epoch, batch), and the learning rate of the step, so that a run that was
stopped at any step goes on exactly as if it had not been.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
import operator
import shlex
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from lightning_fabric import Fabric
from safetensors.torch import load_file, save
from torch import Tensor, nn

from torchcaps.analysis import Evaluation, evaluate_batches
from torchcaps.errors import InputError
from torchcaps.files import atomic_path, reading, write_text
from torchcaps.models import Network
from torchcaps.models.output import is_correct
from torchcaps.models.pretrained import CONFIG, WEIGHTS
from torchcaps.parts import describe, flat
from torchcaps.plugins import loaded_plugins, plugin_options
from torchcaps.training.checkpoint import (
    CHECKPOINT,
    SUMS,
    ProgressState,
    check_progress,
    check_settings,
    lock_folder,
    lock_on_main_process,
    read_checkpoint,
    write_checkpoint,
)
from torchcaps.training.data import Batches, RunData, run_data
from torchcaps.training.devices import launch, peak_memory_mib
from torchcaps.training.progress import Progress, choose_progress, log_row, make_logger, noted_signals
from torchcaps.training.recipe import Recipe, learning_rate
from torchcaps.training.run import BEST, METRICS
from torchcaps.training.step import Loss, TrainStep, forward

if TYPE_CHECKING:
    from lightning_fabric.loggers.logger import Logger

    from torchcaps.training.data import OwnData

#: On a GPU, or with several processes, losses and signals are checked once in so many steps.
CHECK_EVERY = 32
#: Seconds. A checkpoint younger than this is not replaced at an epoch's end: writing can take as long as a short epoch.
YOUNG = 10.0
#: Says that a checkpoint is due; smaller than the number of any signal that is handled.
OVERDUE = 1


class Interrupted(Exception):  # noqa: N818  the user asked for it, so it is no error
    """A signal stopped the run; its checkpoint is written.

    Args:
        out: The run folder.
        step: How many steps are finished.
        exit_code: 128 + the signal's number.
        again: What goes on with it; ``torchcaps train --resume`` if None.
    """

    def __init__(self, out: Path, step: int, exit_code: int, again: str | None = None) -> None:
        if again is None:
            again = shlex.join(["torchcaps", "train", "--resume", str(out), *plugin_options(loaded_plugins())])
        super().__init__(f"stopped after step {step}; go on with: {again}")
        self.out, self.step, self.exit_code = out, step, exit_code


class Diverged(Exception):  # noqa: N818  the word the field uses
    """The loss became NaN or infinite; the last good checkpoint stays."""

    exit_code = 1


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
    progress: Progress | None = None,
) -> list[dict[str, Any]]:
    """Train a network of one's own on data of one's own.

    With a folder ``out``, metrics, the weights of the best epoch and a checkpoint are written there, Ctrl-C and SIGTERM
    stop the run, and a second call with the same arguments goes on with the same bits. All chance is a function of
    ``seed``, the epoch and the batch; the weights that ``network`` has at first are the caller's.

    Args:
        network: A network of torchcaps; or any module that gives the scores (B, J) of images, or something that has
            such ``scores``. At the end it has the weights of the epoch that the validation images chose, of the last
            one without any, and is in evaluation mode.
        dataset: A :class:`torchcaps.datasets.Dataset` or ``ImageSet``; images (N, ...) and labels (N,), as two tensors;
            or a map-style torch ``Dataset`` of such pairs. Integer pixels are divided by 255. A recipe changes images
            at random only if they are uint8, (N, C, H, W).
        recipe: How to train; its ``limit_…`` and ``validation…`` fields are those of loading, and change nothing here.
        out: The run folder; None writes nothing.
        validation: Images that choose the best epoch, if ``dataset`` is no ``Dataset`` with validation images.
        loss: The mean loss of a module of one's own, of its output and the labels; the cross-entropy of the scores if
            None. A network of torchcaps has its own.
        seed: Seed of the order of the images, their changes, and dropout.
        accelerator: ``"cpu"``, ``"cuda"``, ``"mps"``, or ``"auto"``.
        devices: Processes on this machine, one for each device.
        precision: ``"32"``, ``"bf16"`` or ``"auto"``, as in :class:`TrainConfig`.
        progress: Shows the progress; a live display or plain lines if None.

    Returns:
        A row for each epoch, as in ``metrics.csv``.

    Raises:
        InputError: Data and recipe do not fit each other or the network, or the run in ``out`` is another one.
        Diverged: The loss became NaN or infinite.
        Interrupted: Ctrl-C or SIGTERM, where there is a folder; the checkpoint is written.

    Example:
        >>> import torch
        >>> from torchcaps import create_model, fit
        >>> from torchcaps.training import Progress, Recipe
        >>> images, labels = torch.rand(64, 1, 28, 28), torch.arange(64) % 10
        >>> network = create_model("compact")
        >>> rows = fit(network, (images, labels), Recipe(epochs=1, batch_size=32), progress=Progress())
        >>> rows[0]["step"]
        2
    """
    recipe = Recipe() if recipe is None else recipe
    fabric = launch(accelerator, devices, precision=precision)
    data = run_data(dataset, recipe, fabric, seed, validation, drop_last=fabric.world_size > 1)
    shown = progress or choose_progress()
    save = functools.partial(_save_weights, network)
    if isinstance(network, Network) and _is_described(network):
        save = functools.partial(network.save_files, class_names=data.class_names)
    trainer = Trainer(fabric, network, data, recipe, save, seed=seed, loss=loss, progress=shown)
    with contextlib.ExitStack() as held:
        if out is not None:
            trainer.enter(held.enter_context(lock_on_main_process(fabric, lock_folder(Path(out)))))
        trainer.fit()
        trainer.take_best()
    return trainer.state.history


def _is_described(network: Network) -> bool:
    """Whether all parts of a network are registered, so that a file can bring it back."""
    with contextlib.suppress(InputError):
        return bool(describe(network))
    return False


def _save_weights(network: nn.Module, folder: Path) -> None:
    """Write the weights of a module that no description could bring back."""
    with atomic_path(folder / WEIGHTS) as temporary:
        temporary.write_bytes(save({name: each.detach().cpu().clone() for name, each in network.state_dict().items()}))


class Trainer:
    """The state of a run, and the loop over its epochs and batches.

    Args:
        fabric: Devices, precision and processes.
        network: The network to train; it is brought to the device.
        data: The batches.
        recipe: How to train.
        save: Writes the weights into a folder.
        seed: The seed of what is random in a step, such as dropout.
        loss: As for :func:`fit`.
        progress: Shows the progress; of other processes than the first nothing is shown.
        checkpoint_minutes: The longest time between two checkpoints.
    """

    def __init__(
        self,
        fabric: Fabric,
        network: nn.Module,
        data: RunData,
        recipe: Recipe,
        save: Callable[[Path], None],
        *,
        seed: int = 0,
        loss: Loss | None = None,
        progress: Progress | None = None,
        checkpoint_minutes: float = 5.0,
    ) -> None:
        if data.validation is None and (recipe.stop_at, recipe.patience) != (None, None):
            raise InputError("stop_at and patience look at the accuracy of validation images, of which there are none")
        self.fabric, self.network, self.data, self.recipe = fabric, network, data, recipe
        self.save, self.loss, self.loader, self.state = save, loss, data.train, ProgressState()
        self.progress = progress if progress is not None and fabric.is_global_zero else Progress()
        self.step = TrainStep(fabric, network, recipe, seed=seed, loss=loss, labels=data.labels)
        #: Steps between two checks of losses and signals, the same in all processes: 1 where a check takes no time.
        self.look_every = 1 if fabric.world_size == 1 and fabric.device.type == "cpu" else CHECK_EVERY
        self.out: Path | None = None
        self.logger: Logger | None = None
        self._place: tuple[int, int] | None = None
        self._best: dict[str, Tensor] = {}
        self._settings = flat(recipe.fields) | {"seed": seed}
        self._seconds, self._last_save = 60 * checkpoint_minutes, time.monotonic()

    def enter(self, out: Path) -> None:
        """Write into a run folder, which this process has locked, and go on from its checkpoint if there is one.

        Raises:
            InputError: The checkpoint is of another network, of other data, or of a longer run.
        """
        self.out, self._place, path = out, _place_of(out), out / CHECKPOINT
        if self.recipe.logger is not None and self.fabric.is_global_zero:
            self.logger = make_logger(self.recipe.logger, out)
        if not path.exists():
            return
        checkpoint = read_checkpoint(path)
        if checkpoint["settings"]:
            check_settings(checkpoint["settings"], self._settings, out)
        if checkpoint["data"] != self.data.fingerprint:
            raise InputError(
                f"the images are not those that the run in {out} was trained on; it goes on with the same ones only"
            )
        with reading(path, "checkpoint of this run"):
            self.step.restore(checkpoint["model"], checkpoint["optimizer"])
            self.state = ProgressState(**checkpoint["progress"])
        check_progress(self.state, len(self.loader), self.recipe.epochs)
        if self.logger is not None and self.recipe.logger == "csv":  # which begins its file anew
            for row in self.state.history:
                log_row(self.logger, row)
        if self.fabric.is_global_zero:  # the sums of all processes are added
            self.step.sums.restore([self.state.sums[name] for name in SUMS])

    def fit(self) -> None:
        """Train until the last epoch is done."""
        state, recipe = self.state, self.recipe
        if state.history:  # a killed process may have written the checkpoint, but not the files that follow from it
            self._publish()
        self.progress.network(self.network)
        self.progress.start(epochs=recipe.epochs, steps_per_epoch=len(self.loader), done=state.step)
        with contextlib.ExitStack() as stack:
            stack.callback(self.progress.stop)
            if self.logger is not None:
                stack.callback(self.logger.finalize, "success")
            stop = stack.enter_context(noted_signals()) if self.out is not None else []  # else they act as usual
            while not self.is_done:
                self.train_epoch(stop)
                self._end_epoch(stop)

    def train_epoch(self, stop: list[int]) -> None:
        """Make the steps of an epoch; ``stop`` has the number of a signal as soon as one has come."""
        state, recipe = self.state, self.recipe
        self.network.train()
        begin, first = time.monotonic(), state.batch
        for batch in self.loader.batches(state.epoch, start=state.batch):
            self.step(batch, state.step, learning_rate(recipe, state.step, len(self.loader)))
            state.batch += 1
            state.step += 1
            if state.step % self.look_every:
                continue
            self._sums()
            self.progress.step(
                epoch=state.epoch + 1,
                step=state.step,
                images_per_second=(state.batch - first) * recipe.batch_size / (time.monotonic() - begin),
                loss=float(self.step.sums.last_loss),
            )
            if state.batch == len(self.loader):
                continue  # a finished epoch is ended first, so that it counts
            if call := self._calls(stop, self._seconds):
                begin, first = self._note_sums(begin), state.batch
                self._check_weights()
                self.save_checkpoint()
                self._raise_if_stopped(call)
        self._note_sums(begin)

    def _end_epoch(self, stop: list[int]) -> None:
        """Validate, and write checkpoint, best weights and metrics."""
        self._check_weights()
        state, begin = self.state, time.monotonic()
        judged = None if self.data.validation is None else self.judge(self.network, self.data.validation)
        state.seconds += time.monotonic() - begin
        if judged is not None and not math.isfinite(judged.loss):
            raise self._diverged("the loss of the validation images is NaN or infinite after", state.step - 1)
        images = self.data.images
        means = {name: total / images for name, total in state.sums.items()}
        has_decoder = getattr(self.network, "decoder", None) is not None
        row = {
            "epoch": state.epoch + 1,
            "step": state.step,
            "seconds": round(state.seconds, 3),
            "images_per_second": round(images / state.epoch_seconds, 1),
            "learning_rate": learning_rate(self.recipe, state.step - 1, len(self.loader)),
            "train_loss": means["loss"],
            "train_classification_loss": means["classification_loss"],
            "train_reconstruction_loss": means["reconstruction_loss"] if has_decoder else None,
            "train_accuracy": means["correct"],
            "validation_loss": None if judged is None else judged.loss,
            "validation_accuracy": None if judged is None else judged.accuracy,
        }
        state.end_epoch(row)
        self.step.sums.restore()
        call = self._calls(stop, min(YOUNG, self._seconds))
        if call or self.is_best or self.is_done:
            self.save_checkpoint()
        self._publish()
        if self.logger is not None:
            log_row(self.logger, row)
        self.progress.epoch(row | {"improved": self.is_best})
        self._raise_if_stopped(call)

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
        state = self.state
        return state.batch == 0 and state.best(self.recipe.select) is state.history[-1]

    def _publish(self) -> None:
        """Write the metrics, and the network's weights while they are the best ones; both follow from the checkpoint.

        So a process that is killed at any time leaves the best weights in the checkpoint or in the run folder.
        """
        if self.out is None and self.is_best and self.data.validation is not None:
            self._best = {name: each.detach().clone() for name, each in self.network.state_dict().items()}
        if self.out is None or not self.fabric.is_global_zero:
            return
        self.check_folder()
        if self.is_best:
            self.save(self.out / BEST)
        write_text(self.out / METRICS, self.state.metrics())

    def take_best(self) -> None:
        """Give the network the weights of the best epoch."""
        self.fabric.barrier()  # the first process has published them
        if self.out is not None:
            with reading(self.out / BEST / WEIGHTS, "file of weights"):
                self._best = load_file(self.out / BEST / WEIGHTS)
        if self._best:
            self.network.load_state_dict(self._best)
        self.network.eval()

    def save_checkpoint(self) -> None:
        """Write ``last.ckpt``, whole or not at all; the caller has checked the weights. All processes must call it."""
        self.state.note_peak(peak_memory_mib(self.fabric.device))
        if self.out is not None and self.fabric.is_global_zero:
            self.check_folder()
            state = {"model": self.network.state_dict(), "optimizer": self.step.optimizer.state_dict()}
            state |= {"progress": dataclasses.asdict(self.state), "data": self.data.fingerprint}
            state |= {"settings": self._settings}
            write_checkpoint(self.out / CHECKPOINT, state)
        self.fabric.barrier()  # no process goes on before the checkpoint is whole
        self._last_save = time.monotonic()

    def check_folder(self) -> None:
        """Raise InputError if the run folder is no longer where it was when the run began."""
        if self.out is not None and _place_of(self.out) != self._place:
            raise InputError(
                f"the run folder {self.out} was moved or removed while the run wrote to it; where it was moved to, go "
                "on with it by torchcaps train --resume"
            )

    def _calls(self, stop: Sequence[int], seconds: float) -> int:
        """The reason for a checkpoint: a stop signal's number, OVERDUE after so many seconds without one, or 0.

        All processes get the same answer, also if a signal has reached only some of them.
        """
        overdue = self.out is not None and time.monotonic() - self._last_save > seconds
        own = stop[0] if stop else OVERDUE * overdue
        return int(self._over_processes(torch.tensor(own), "max"))

    def _raise_if_stopped(self, call: int) -> None:
        if call > OVERDUE:
            assert self.out is not None
            again = None if (self.out / CONFIG).exists() else "the same call of fit"
            raise Interrupted(self.out, self.state.step, 128 + call, again)

    def _note_sums(self, begin: float) -> float:
        """Note the sums of the epoch so far and the time since ``begin``; return the new beginning."""
        sums = self._sums()
        now, state = time.monotonic(), self.state
        state.sums = dict(zip(SUMS, sums, strict=True))
        state.seconds += now - begin
        state.epoch_seconds += now - begin
        return now

    def _sums(self) -> list[float]:
        """The sums of the epoch over all processes; all of them raise Diverged if a loss of one is NaN or infinite."""
        sums: list[float] = self._over_processes(self.step.sums.values, "sum").tolist()
        if not all(map(math.isfinite, sums)):
            raise self._diverged("the loss became NaN or infinite by", self.state.step - 1)
        return sums

    def _check_weights(self) -> None:
        """Raise Diverged if the weights are not finite, as an update may ruin them after a good loss."""
        if not torch.stack([p.isfinite().all() for p in self.network.parameters()]).all():
            raise self._diverged("the weights became NaN or infinite by", self.state.step - 1)

    def _diverged(self, what: str, step: int) -> Diverged:
        """The error, with the place of the step, and settings to try."""
        modules = list(self.network.modules())
        to_try = [f"a smaller --learning-rate (now {learning_rate(self.recipe, step, len(self.loader)):.2g})"]
        to_try += ["a smaller --weight-std"] * any(hasattr(each, "weight_std") for each in modules)
        to_try += ["--precision 32"] * ("bf16" in self.fabric._precision.precision)
        of_ones_own = {type(m).__name__ for m in modules if not type(m).__module__.startswith(("torch.", "torchcaps."))}
        if of_ones_own:
            to_try.append(f"to mend what is not finite in {' and '.join(sorted(of_ones_own))}")
        kept = f"there was no checkpoint yet in {self.out}"
        if self.out is not None and (self.out / CHECKPOINT).exists():
            kept = f"{self.out} keeps the last good checkpoint"
        batches = len(self.loader)
        return Diverged(
            f"{what} step {step + 1} (epoch {step // batches + 1}, batch {step % batches + 1} of {batches}); try "
            f"{' or '.join(to_try)}" + (f"; {kept}" if self.out is not None else "")
        )

    def judge(self, network: nn.Module, batches: Batches) -> Evaluation | Judged:
        """Evaluate a network in float32; each process takes its share of the images, and every image counts once."""
        processes = self.fabric.world_size
        if isinstance(network, Network):
            share = evaluate_batches(network, batches.batches(0), class_names=self.data.class_names)
            shares = [share] * processes
            if processes > 1:
                torch.distributed.all_gather_object(shares, share)
            return functools.reduce(operator.add, shares)
        sums = torch.zeros(3, dtype=self.step.sums.values.dtype, device=self.fabric.device)
        network.eval()
        with torch.no_grad():
            for batch in batches.batches(0):
                scores, losses = forward(network, network, batch, self.loss)
                right, images = is_correct(scores, batch.labels).sum(), len(batch.labels)
                sums += torch.stack([losses.total * images, right, torch.full_like(right, images)])
        loss, correct, images = self._over_processes(sums, "sum").tolist()
        return Judged(loss / images, correct / images)

    def _over_processes(self, own: Tensor, reduction: str) -> Tensor:
        """The elementwise sum or maximum over all processes, the same in all of them."""
        if self.fabric.world_size == 1:
            return own
        reduced = self.fabric.all_reduce(own.to(self.fabric.device, copy=True), reduce_op=reduction)
        assert isinstance(reduced, Tensor)
        return reduced


class Judged(NamedTuple):
    """How good a module of one's own is on the validation images."""

    loss: float
    accuracy: float


def _place_of(folder: Path) -> tuple[int, int] | None:
    """The device and number of a folder, which it keeps while it stays where it is; None if there is none."""
    with contextlib.suppress(FileNotFoundError, NotADirectoryError):
        found = folder.stat()
        return found.st_dev, found.st_ino
    return None
