import subprocess
import sys
from pathlib import Path

import pytest

from tiny_runs import tiny_config
from torchcaps.errors import InputError
from torchcaps.models import create_model, get_preset, list_presets
from torchcaps.training import estimate_memory, largest_batch, make_config, memory, train
from torchcaps.training.launch import count_processes
from torchcaps.training.progress import Silence

MNIST = ((1, 28, 28), 10)

STEPS = """
import re, torch
from pathlib import Path
from lightning_fabric import Fabric
from torchcaps.datasets import Batch
from torchcaps.models import create_model
from torchcaps.training import estimate_memory, loop, make_config
from torchcaps.training.step import TrainStep

config = make_config("compact", batch_size=96, accelerator="cpu")
print(estimate_memory(config, (1, 28, 28), 10).total)
network = create_model("compact").train()
step = TrainStep(Fabric(accelerator="cpu", devices=1), network, config.recipe, seed=0)
for number in range(3):
    step(Batch(torch.rand(96, 1, 28, 28), torch.arange(96) % 10, None), number, 1e-3)
print(int(re.search(r"VmHWM:\\s+(\\d+)", Path("/proc/self/status").read_text())[1]) / 1024)
"""


class Listener(Silence):
    def __init__(self) -> None:
        self.heard: list[str] = []

    def message(self, text: str) -> None:
        self.heard.append(text)


@pytest.mark.parametrize("preset", list_presets())
def test_weights_are_counted_exactly(preset: str) -> None:
    source = get_preset(preset)
    channels, height, width = source.in_shape
    margin = 0 if source.recipe.crop is None else 8  # the network sees what is cut out of larger images
    whole = (channels, height + margin, width + margin)
    parts = estimate_memory(make_config(preset), whole, source.num_classes).parts
    numbers = sum(p.numel() for p in create_model(preset).parameters())
    assert parts["weights"] == parts["gradients"] == parts["Adam's moments"] / 2 == 4 * numbers / 2**20


def test_maps_are_worked_by_hand() -> None:
    # conv: 256 maps of 20×20, float32, two images; at the height six more of them, as PyTorch convolves so few
    parts = estimate_memory(make_config("sabour2017", batch_size=2), *MNIST).parts
    assert parts["feature maps"] == 2 * 4 * 256 * 400 / 2**20
    assert parts["work space of convolutions"] == 2 * 4 * 6 * 256 * 400 / 2**20
    # 1,152 capsules of 8 components, before and after the squash, and its five numbers a capsule
    assert parts["primary capsules"] == 2 * 4 * 1152 * (8 + 8 + 5) / 2**20
    # three sums and the capsules of ten classes, 16 components each, those that are decoded, and twice their lengths
    assert parts["capsule layers"] == 2 * 4 * (5 * 160 + 2 * 10) / 2**20
    # 10 images of 28×28, and again in a frame of 2 pixels
    with_images = estimate_memory(make_config("sabour2017", max_shift=2), *MNIST, num_images=10).parts
    assert with_images["images of the data set"] == 10 * (784 + 32 * 32) / 2**20


def test_objects_and_what_is_done_to_images_are_counted() -> None:
    # of two digits each is there by itself besides, on the disk's scale and in a batch; each is drawn
    two = estimate_memory(make_config("sabour2017-multimnist", batch_size=3), (1, 36, 36), 10, num_images=10).parts
    assert two["images of the data set"] == 10 * 3 * 2 * 36 * 36 / 2**20
    assert two["images of a batch"] == 4 * 3 * 3 * 36 * 36 / 2**20
    # two hidden layers, what is drawn, and its distance from the image
    assert two["decoder"] == pytest.approx(4 * 3 * 2 * (512 + 1024 + 2 * 36 * 36) / 2**20, rel=0.02)
    # 24×24 out of 32×32, standardised: conv to 256 maps of 16×16
    cut = estimate_memory(make_config("sabour2017-cifar10", batch_size=2), (3, 32, 32), 10, num_images=10).parts
    assert cut["feature maps"] == 2 * 4 * (256 * 256 + 3 * 24 * 24) / 2**20
    assert cut["images of a batch"] == 4 * 2 * 4 * 3 * 24 * 24 / 2**20
    assert cut["images of the data set"] == 10 * 2 * 3 * 32 * 32 / 2**20
    with pytest.raises(InputError, match="crop is 24 pixels"):
        estimate_memory(make_config("sabour2017-cifar10"), (3, 20, 20), 10)


def test_pooled_maps_are_worked_by_hand() -> None:
    # 512 maps of 36×36, pooled to 18×18; 256 of these, pooled to 9×9; the pixels that were chosen take 8 bytes each
    parts = estimate_memory(make_config("baseline-cnn-multimnist", batch_size=2), (1, 36, 36), 10).parts
    pooled = 512 * 18**2, 256 * 9**2
    kept = 512 * 36**2 + pooled[0] + 256 * 18**2 + pooled[1]
    assert parts["feature maps"] == pytest.approx(2 * (4 * kept + 8 * sum(pooled)) / 2**20, rel=0.005)


def test_maps_of_a_stem_before_a_cnn_are_worked_by_hand() -> None:
    # 4 maps of 26×26 and 8 of 12×12, each before its normalisation and after its ReLU, with a mean and a deviation at
    # each place; as many of the convolution, and its maps once more, places last, for the dense layer
    stem = {"stem_channels": (4, 8), "stem_strides": (1, 2), "conv_norm": "channel", "hidden": (), "dropout": 0.0}
    parts = estimate_memory(make_config("baseline-cnn", batch_size=1, channels=(6,), **stem), *MNIST).parts
    kept = (2 * 4 + 2) * 26**2 + (2 * 8 + 2 + 3 * 6 + 2) * 12**2
    assert parts["feature maps"] == pytest.approx(4 * kept / 2**20, rel=0.01)


def test_layers_of_a_stack_are_counted() -> None:
    layers = [{"name": "conv", "layer_types": 8}, {"name": "dense"}]
    one, two = (
        estimate_memory(make_config("compact", batch_size=8, **deep), *MNIST).parts for deep in ({}, {"layers": layers})
    )
    windows = 8 * 4 * 16 * 9 * 8 * 8  # 8 images, 4×4 windows of 3×3 places with 8 types of 8 components
    assert two["capsule layers"] - one["capsule layers"] > 4 * windows / 16 / 2**20
    assert two["feature maps"] == one["feature maps"]


def test_a_network_is_followed_once_however_many_batches_are_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    followed: list[object] = []
    follow = memory._follow
    monkeypatch.setattr(memory, "_follow", lambda network: followed.append(network) or follow(network))
    monkeypatch.setattr(memory, "available_memory_mib", lambda: 3000.0)
    assert "the largest --batch-size that fits is about" in str(
        memory.memory_warning(make_config("compact", batch_size=5000), *MNIST, 0)
    )
    assert len(followed) == 1


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="the system does not say how high memory was")
def test_the_estimate_is_near_what_steps_take() -> None:
    estimate, taken = map(float, subprocess.check_output([sys.executable, "-c", STEPS], text=True).split())
    assert estimate == pytest.approx(taken, rel=0.15)


def test_processes_share_a_batch_and_bf16_halves_the_maps() -> None:
    one, two = (estimate_memory(make_config("sabour2017", devices=n), *MNIST) for n in (1, 2))
    assert (one.batch_size, two.batch_size) == (128, 64)
    assert two.parts["feature maps"] == one.parts["feature maps"] / 2
    half = estimate_memory(make_config("sabour2017", precision="bf16"), *MNIST)
    assert half.parts["feature maps"] == one.parts["feature maps"] / 2


@pytest.mark.parametrize("preset", ["sabour2017", "baseline-cnn"])
def test_the_largest_batch_just_fits(preset: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "resident_memory_mib", lambda: 300.0)  # it grows while this runs
    available = 20_000.0
    most = largest_batch(make_config(preset), *MNIST, 0, available)
    fits, does_not = (estimate_memory(make_config(preset, batch_size=b), *MNIST).total for b in (most - 2, most + 2))
    assert fits <= available <= does_not
    assert largest_batch(make_config(preset), *MNIST, 0, available=10.0) == 0


def test_images_too_small_are_refused() -> None:
    with pytest.raises(InputError, match="smallest size that fits is 17×17"):
        estimate_memory(make_config("sabour2017"), (1, 12, 12), 10)


def test_train_warns_when_memory_is_short(bars: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for available, warns in ((1.0, True), (1e6, False)):
        monkeypatch.setattr(memory, "available_memory_mib", lambda available=available: available)
        listener = Listener()
        train(tiny_config(bars, epochs=1), tmp_path / str(warns), progress=listener, figures=False)
        assert any("training will need about" in text for text in listener.heard) is warns


def test_processes_share_what_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    one = largest_batch(make_config("sabour2017"), *MNIST, 0, 3000.0)
    two = largest_batch(make_config("sabour2017", devices=2), *MNIST, 0, 6000.0)
    assert two == pytest.approx(2 * one, rel=0.02)
    four = largest_batch(make_config("sabour2017", devices=2, num_nodes=2), *MNIST, 0, 6000.0)
    assert four == 2 * two, "the other machine has memory of its own"
    for name, value in (("TORCHELASTIC_RUN_ID", "1"), ("LOCAL_WORLD_SIZE", "2"), ("WORLD_SIZE", "4")):
        monkeypatch.setenv(name, value)
    assert count_processes(make_config("sabour2017")) == (2, 2), "torchrun's"
    assert largest_batch(make_config("sabour2017"), *MNIST, 0, 6000.0) == four


def test_a_network_that_cannot_be_trained_here_is_refused(
    bars: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = tiny_config(bars)
    learned = sum(estimate_memory(config, (1, 18, 18), 3).parts[name] for name in memory.LEARNED)
    for available, refused in ((0.9 * learned, True), (1.1 * learned, False)):
        monkeypatch.setattr(memory, "available_memory_mib", lambda available=available: available)
        if refused:
            with pytest.raises(InputError, match=r"weights, gradients and Adam's moments would take .* smaller"):
                train(config, tmp_path / "run", progress=Silence())
            assert not (tmp_path / "run").exists()
        else:
            assert "training will need about" in str(memory.memory_warning(config, (1, 18, 18), 3, 150))


def test_the_search_for_the_largest_batch_ends_where_batches_do() -> None:
    tiny = make_config("baseline-cnn", channels=(1,), hidden=(), kernel=1, devices=4)
    assert largest_batch(tiny, (1, 1, 1), 2, 0, available=1e12) <= 1_000_000_000
