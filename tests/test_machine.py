"""What a machine has, and what does not fit into it."""

from pathlib import Path

import pytest
import torch

from support import assert_raises
from torchcaps import machine
from torchcaps.datasets import resize_images
from torchcaps.errors import InputError
from torchcaps.models import BaselineCNN, build_network, create_model


def test_the_limit_of_a_container_counts(tmp_path: Path) -> None:
    assert machine._allowed_by_container(tmp_path) is None
    for version, (limit, used, stat, text) in {
        "v2": ("memory.max", "memory.current", "memory.stat", "anon 3\ninactive_file 10485760"),
        "v1": (
            "memory/memory.limit_in_bytes",
            "memory/memory.usage_in_bytes",
            "memory/memory.stat",
            "inactive_file 3\ntotal_inactive_file 10485760",
        ),
    }.items():
        folder = tmp_path / version
        (folder / "memory").mkdir(parents=True)
        for name, words in ((limit, "104857600"), (used, "52428800"), (stat, text)):
            (folder / name).write_text(words)
        assert machine._allowed_by_container(folder) == 60.0  # 100 less 50, of which 10 can be had
    (tmp_path / "v2" / "memory.max").write_text("max")
    assert machine._allowed_by_container(tmp_path / "v2") is None


def test_what_does_not_fit_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "free_memory_mib", lambda: 10.0)
    machine.check_memory(10 * 2**20, "some numbers")
    with pytest.raises(InputError, match="some numbers would take 11 MiB of memory, but must fit into the 10 MiB"):
        machine.check_memory(11 * 2**20, "some numbers")
    monkeypatch.setattr(machine, "free_memory_mib", lambda: None)
    machine.check_memory(11 * 2**20, "some numbers")


@pytest.mark.skipif(machine.free_memory_mib() is None, reason="it is not known here how much memory there is")
def test_a_network_that_does_not_fit_is_refused() -> None:
    words = r"the network('s par.* would take .* MiB| would have more p)|out_channels must be"
    for sizes in (
        {"conv_channels": 65_536, "primary_types": 65_536},
        {"decoder_hidden": (65_536,) * 100},
        {"capsule_dim": 65_536, "primary_dim": 65_536, "primary_types": 65_536},
        {"num_classes": 1_000_000_000},
        {"in_shape": (1_000_000_000, 28, 28)},
    ):
        with pytest.raises(InputError, match=words):
            create_model("sabour2017", **sizes)  # type: ignore[arg-type]
    with torch.device("meta"), pytest.raises(InputError, match="more parameters than PyTorch can count"):
        build_network("capsules", (10**9, 10**9, 10**9), 10**9)
    for size in (10**30, 10**5000):
        said = "(channels, height, width), three positive integers, got "
        assert_raises(InputError, create_model, "sabour2017", in_shape=(size, 28, 28), say=said)


def test_looking_first_changes_no_weight_and_draws_no_number() -> None:
    options = {"channels": (2,), "hidden": ()}
    torch.manual_seed(1)
    drawn = build_network({"name": "cnn", **options}, (1, 8, 8), 2), torch.rand(2)
    torch.manual_seed(1)
    again = BaselineCNN((1, 8, 8), 2, **options), torch.rand(2)
    assert all(torch.equal(one, two) for one, two in zip(drawn[0].parameters(), again[0].parameters(), strict=True))
    assert torch.equal(drawn[1], again[1])


def test_images_that_do_not_fit_are_refused_and_large_ones_resized_few_at_a_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    images = torch.randint(0, 256, (5, 2, 40, 30), dtype=torch.uint8)
    alone = torch.cat([resize_images(image[None], (900, 700)) for image in images])
    assert torch.equal(resize_images(images, (900, 700)), alone)
    monkeypatch.setattr(machine, "free_memory_mib", lambda: 1.0)
    images = torch.zeros(3, 1, 8, 8, dtype=torch.uint8)
    assert resize_images(images, (400, 400)).shape == (3, 1, 400, 400)
    said = "3 images of 500×500 pixels would take 1 MiB of memory, but must fit into"
    assert_raises(InputError, resize_images, images, (500, 500), say=said)
