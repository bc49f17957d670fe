"""From runs to a folder with a model card, to the hub, and to what an exported file says and is compared on."""

import dataclasses
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from hub_stub import Hub, hub_stub
from support import assert_close, assert_raises
from tiny_runs import tiny_config, write_bars
from torchcaps import load_pretrained
from torchcaps.analysis import evaluate
from torchcaps.errors import InputError
from torchcaps.export import describe_run, export_folder, random_images, sample_images, share, training_record
from torchcaps.files import read_json, write_json
from torchcaps.models.files import SHIPPED
from torchcaps.training import Run, load_run, train
from torchcaps.training.config import override

FILES = {"config.json", "model.safetensors", "classes.json", "README.md"}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Two runs of one training, of the seeds 0 and 1, not to be changed."""
    folder = tmp_path_factory.mktemp("runs")
    bars = write_bars(folder / "bars.npz")
    for seed in (0, 1):
        train(tiny_config(bars, seed=seed, epochs=2, learning_rate=0.01), folder / str(seed), figures=False)
    return folder / "0", folder / "1"


@pytest.fixture
def run(runs: tuple[Path, Path]) -> Run:
    return load_run(runs[0])


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    with hub_stub() as stub:
        monkeypatch.setenv("HF_TOKEN", stub.token)
        yield stub


# the record


def test_what_a_card_says_of_a_run(run: Run, runs: tuple[Path, Path]) -> None:
    record = training_record(run, "last", [runs[1]])
    summaries = [read_json(folder / "summary.json", "summary") for folder in runs]
    for seed, (result, each) in enumerate(zip(record.results, summaries, strict=True)):
        errors = each["test"]["best"]["error"], each["test"]["last"]["error"]
        assert (result.seed, result.best_epoch) == (seed, each["best_epoch"])
        assert (result.best_error, result.last_error) == errors
    assert (record.preset.name, record.data, record.which, record.precision) == ("sabour2017", None, "last", "32")
    assert record.images == summaries[0]["images"]
    assert record.recipe["epochs"] == 2
    assert record.versions["torch"] == torch.__version__
    assert "1 thread)" in record.hardware
    described = describe_run(run)
    assert (described.in_shape, described.class_names, described.preset) == ((1, 18, 18), ("0", "1", "2"), "sabour2017")
    assert describe_run(load_run(runs[0] / "best")).preset is None


def test_the_command_trains_it_again_anywhere(run: Run) -> None:
    """It is the run's configuration, without what is of this machine."""
    changes = {"data_dir": "/home/me", "checkpoint_minutes": 1.0, "flip": True, "fill": "zeros", "learning_rate": 1e-3}
    changes |= {"num_iterations": 2, "decoder": False, "optimizer": "adamw", "weight_decay": 0.05}
    changed = override(run.config, changes)
    command = training_record(dataclasses.replace(run, config=changed)).command
    assert command.startswith("torchcaps train sabour2017 --data npz:PATH --seed 0 --task classes --conv-channels 8 ")
    # the learning rate is the preset's, but would be fitted to so few images if it were not given
    options = "--primary-types 2", "--num-iterations 2", "--decoder none", "--flip", "--validation-size 12"
    options += "--optimizer adamw", "--weight-decay 0.05", "--learning-rate 0.001"
    for option in (*options, "--fill zeros"):  # own images would have their edge
        assert f" {option}" in command
    for local in ("/", "cpu", "--checkpoint-minutes", "--precision"):
        assert local not in command.replace("bars", "")
    for source, said in (("/home/me/run", "RUN"), ("someone/net", "someone/net")):
        started = dataclasses.replace(changed, init_from=source)
        assert f" --init-from {said} " in training_record(dataclasses.replace(run, config=started)).command + " "


def copied(run: Path, to: Path, **config: Any) -> Path:
    """A copy of a run with other values in its configuration."""
    shutil.copytree(run, to)
    write_json(to / "config.json", read_json(to / "config.json", "configuration") | config)
    return to


def test_runs_that_do_not_go_together(run: Run, runs: tuple[Path, Path], tmp_path: Path) -> None:
    again = copied(runs[1], tmp_path / "again")
    assert_raises(InputError, training_record, run, others=[runs[1], again], say="two of the runs have the seed 1")
    assert_raises(InputError, training_record, run, others=[runs[0]], say="two of the runs have the seed 0")
    other = copied(runs[1], tmp_path / "other", precision="bf16")
    said = f"{other} must have the same settings as {runs[0]}, but precision differs"
    assert_raises(InputError, training_record, run, others=[other], say=said)
    elsewhere = copied(runs[1], tmp_path / "elsewhere", devices=2, data_dir="x")
    assert len(training_record(run, others=[elsewhere]).results) == 2
    (again / "summary.json").unlink()
    said = f"finish it with torchcaps train --resume {again}"
    assert_raises(InputError, training_record, run, others=[again], say=said)
    assert_raises(InputError, training_record, load_run(again), say=said)
    saved = load_run(runs[0] / "best")
    assert_raises(InputError, training_record, saved, say="export a run folder instead")


def with_data(run: Run, data: str, data_dir: str | None = None) -> Run:
    assert run.config is not None
    return dataclasses.replace(run, config=dataclasses.replace(run.config, data=data, data_dir=data_dir))


def test_images_to_compare_on(run: Run, runs: tuple[Path, Path], tmp_path: Path) -> None:
    assert run.config is not None
    images, words = sample_images(run)
    assert torch.equal(images, run.dataset().test.images[:32])
    assert words == f"the first {len(images)} test images of {run.config.data}"
    for other, said in (
        (with_data(run, "mnist", str(tmp_path)), "32 random images (mnist is not on this machine)"),
        (with_data(run, f"npz:{tmp_path / 'gone.npz'}"), "32 random images (the data cannot be read: "),
        (load_run(runs[0] / "best"), f"32 random images ({runs[0] / 'best'} has no record of its data)"),
    ):
        images, words = sample_images(other)
        assert torch.equal(images, random_images(run.model.in_shape))
        assert words.startswith(said)
    images, words = sample_images(load_run(SHIPPED["compact"]))
    assert (images.shape, words) == ((32, 1, 28, 28), "the first 32 test images of digits")


# the folder


def test_a_folder_is_the_network_with_its_card(run: Run, runs: tuple[Path, Path], tmp_path: Path) -> None:
    record = export_folder(run, tmp_path / "a" / "net", others=[runs[1]])
    assert {path.name for path in (tmp_path / "a" / "net").iterdir()} == FILES
    assert [path.name for path in (tmp_path / "a").iterdir()] == ["net"]
    again = load_run(tmp_path / "a" / "net")
    assert again.class_names == run.class_names
    for ours, theirs in zip(again.model.parameters(), run.model.parameters(), strict=True):
        assert_close(ours, theirs, 0)
    said = f"{tmp_path / 'a' / 'net'} exists already"
    assert_raises(InputError, export_folder, run, tmp_path / "a" / "net", say=said)
    card = (tmp_path / "a" / "net" / "README.md").read_text(encoding="utf-8")
    assert record.command in card
    assert "over the seeds 0, 1" in card
    assert str(tmp_path) not in card


def test_half_precision_is_measured_as_it_is_stored(run: Run, tmp_path: Path) -> None:
    record = export_folder(run, tmp_path / "net", half=True)
    stored = load_file(tmp_path / "net" / "model.safetensors")
    assert {tensor.dtype for tensor in stored.values()} == {torch.float16}
    assert record.stored_error == evaluate(load_pretrained(tmp_path / "net"), run.dataset().test).error
    card = (tmp_path / "net" / "README.md").read_text(encoding="utf-8")
    assert f"{100 * record.stored_error:.2f} % test error, measured after rounding" in card
    elsewhere = with_data(run, "mnist", str(tmp_path))
    said = "weights in half precision must be tested again, but mnist is not on this machine"
    assert_raises(InputError, export_folder, elsewhere, tmp_path / "other", half=True, say=said)
    assert not (tmp_path / "other").exists()


# the hub


def test_shared_and_read_back(run: Run, hub: Hub, tmp_path: Path) -> None:
    assert share(run, "someone/net", private=True) == f"{hub.url}/someone/net"
    files = hub.files["someone/net"]
    assert files.keys() == FILES
    assert hub.private["someone/net"] is True
    assert hub.messages == ["sabour2017 on own images, made with torchcaps"]
    assert 'load_pretrained("someone/net")' in files["README.md"].decode()
    assert json.loads(files["classes.json"]) == json.loads(json.dumps(run.images.to_dict()))
    again = load_pretrained("someone/net", cache_dir=tmp_path)
    for ours, theirs in zip(again.parameters(), run.model.parameters(), strict=True):
        assert_close(ours, theirs, 0)


def test_a_network_alone_can_be_pushed(run: Run, hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    assert run.model.push_to_hub("someone/letters", class_names="abc") == f"{hub.url}/someone/letters"
    assert hub.files["someone/letters"].keys() == FILES
    assert "not recorded" in hub.files["someone/letters"]["README.md"].decode()
    again = load_run("someone/letters")
    assert (again.path, again.class_names, again.config) == (Path("someone/letters"), ("a", "b", "c"), None)


def test_refusals(run: Run, hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    for refuse_with, repository, said in (
        (401, "someone/net", "the hub did not take someone/net: HfHubHTTPError: "),
        (500, "someone/net", "the hub did not take someone/net: HfHubHTTPError: "),
        (None, "some/one?", "the hub did not take some/one?: HFValidationError: "),
        (None, "someone", "a repository must be named OWNER/NAME, such as someone/capsnet-mnist, got someone"),
    ):
        hub.refuse_with = refuse_with
        with pytest.raises(InputError) as caught:
            share(run, repository)
        assert str(caught.value).startswith(said)
        assert "\n" not in str(caught.value)
        assert hub.token not in str(caught.value)
        assert not hub.files
    said = "set HF_TOKEN to a token with permission to write"
    assert_raises(InputError, share, run, "someone/net", token="hf_wrong", say=said)


def test_summaries_that_are_damaged_or_say_less(run: Run) -> None:
    def with_summary(**changes: Any) -> Run:
        return dataclasses.replace(run, summary=(run.summary or {}) | changes)

    for changes, reason in (
        ({"test": None}, ""),
        ({"test": {"best": {"error": 0.1}}}, "it has no 'last'"),
        ({"hardware": {"threads": "2"}}, ""),
        ({"hardware": 3}, ""),
    ):
        said = f"summary.json is damaged or no summary: {reason}"
        assert_raises(InputError, training_record, with_summary(**changes), say=said)
    record = training_record(with_data(with_summary(hardware={"threads": 1}), "digits"))
    assert record.hardware == "an unnamed processor (1 thread)"
    assert (record.data, record.data_title.split()[0], record.data_licence) == ("digits", "UCI", "CC BY 4.0")
