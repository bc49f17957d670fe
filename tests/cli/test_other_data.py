"""A run on other data than its own: classes, labels and numbers are matched by name, in every command and task."""

import functools
import json
import shutil
import unicodedata
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from cli_support import Cli, Result
from support import registered_for_now, small
from tiny_runs import NARROW, image_set, mnist_files, save_image, write_files
from torchcaps.datasets import PairSet, Splits, load_dataset, register_dataset
from torchcaps.datasets.loading import load_part
from torchcaps.errors import InputError
from torchcaps.explorer import open_explorer
from torchcaps.models import Network, create_model
from torchcaps.tasks import TASKS, find_task
from torchcaps.training import Progress, Recipe, fit, load_run

pytestmark = pytest.mark.slow

SIZE, NAMES, ORDER = 18, ("bird", "cat", "dog"), (2, 0, 1)
COMMANDS: dict[str, str] = {
    "evaluate": "evaluate RUN --json",
    "robustness": "robustness RUN --limit 6 --steps 1 --epsilons 0.1 --angles 10 --json",
    "reconstruct": "reconstruct RUN --count 5 --figure r.png --json",
    "perturb": "perturb RUN --follow label --steps 3 --figure p.png --json",
    "routing": "routing RUN --count 4 --figure r.png --json",
    "probe": "probe RUN --limit 60 --json",
    "detect": "detect RUN --limit 6 --steps 1 --json",
}
"""All commands that take RUN and --data; explore is tested by its own function."""
CELLS = [
    pytest.param((task, command), id=f"{task}-{command}")
    for task in TASKS
    if task != "objects"  # whose names and numbers mean nothing: test_names_of_objects_are_not_matched
    for command in COMMANDS
    if find_task(task).supports(command) and task != "objects"  # numbers of objects have no names to match
]


class Cell(NamedTuple):
    run: Path
    command: str
    task: str

    def call(self, cli: Cli, data: Path, *words: str) -> Result:
        typed = COMMANDS[self.command].replace("RUN", str(self.run)).split()
        return cli(*typed, "--data", f"npz:{data}", *words)

    def numbers(self, cli: Cli, data: Path, *words: str) -> Any:
        """What it prints, without the name of the data."""
        result = self.call(cli, data, *words)
        assert result.code == 0, result.err
        return json.loads(result.out.replace(str(data), "DATA"))


@functools.cache
def network(task: Any, outputs: int = len(NAMES)) -> Network:
    torch.manual_seed(0)
    if task == "objects":
        return create_model("slots-small", (1, SIZE, SIZE), outputs, **small("slots-small")).eval()
    if find_task(task).has_masks:
        return create_model("unet-twin", (1, SIZE, SIZE), outputs, channels=(3,), parameters_of=None).eval()
    return create_model("sabour2017", in_shape=(1, SIZE, SIZE), num_classes=outputs, task=task, **NARROW)


def targets_of(task: str, count: int = 60) -> np.ndarray:
    """Targets with three outputs; of classes, different numbers of images of each."""
    rng, classes = np.random.default_rng(1), np.minimum(np.arange(count) % 5, 2)
    masks = (np.arange(SIZE) // 5 % 3)[None, :, None] * (classes[:, None, None] > 0) * np.ones((1, 1, SIZE), int)
    return {
        "classes": classes,
        "ordinal": classes,
        "labels": rng.integers(0, 2, (count, 3)),
        "regression": rng.normal((0, 10, 20), size=(count, 3)),
        "pixels": masks,
        "objects": masks,
    }[task]


def write(path: Path, targets: np.ndarray, names: Sequence[str] | None = NAMES) -> Path:
    """Write the same images for training, validation and test, with these targets."""
    images = np.random.default_rng(0).integers(0, 255, (len(targets), SIZE, SIZE)).astype(np.uint8)
    parts = {f"{key}{part}": value for part in ("", "_val", "_test") for key, value in (("x", images), ("y", targets))}
    np.savez(path, **parts, **({} if names is None else {"class_names": np.array(names)}))  # type: ignore[arg-type]
    return path


def reordered(task: str, targets: np.ndarray) -> np.ndarray:
    """The same targets for names in the order of ``ORDER``."""
    if targets.ndim == 2:
        return targets[:, ORDER]
    return np.argsort(ORDER)[targets]


def fewer(task: str, targets: np.ndarray) -> tuple[np.ndarray, tuple[str, ...]]:
    """Targets without the first name."""
    kept = targets[:, 1:] if targets.ndim == 2 else np.maximum(targets, 1) - 1
    return kept, NAMES[1:]


@pytest.fixture(params=CELLS)
def cell(request: pytest.FixtureRequest, tmp_path: Path) -> Cell:
    task, command = request.param
    network(task).save_pretrained(tmp_path / "run", class_names=NAMES)
    return Cell(tmp_path / "run", command, task)


def test_every_command_puts_another_order_right(cell: Cell, cli: Cli, tmp_path: Path) -> None:
    targets = targets_of(cell.task)
    same = cell.numbers(cli, write(tmp_path / "same.npz", targets))
    names = [NAMES[j] for j in ORDER]
    other = write(tmp_path / "other.npz", reordered(cell.task, targets), names)
    assert cell.numbers(cli, other) == same
    by_number = cell.call(cli, other, "--by-number")  # the wrong classes, as asked for
    assert by_number.code == 0
    if cell.command == "evaluate":
        assert json.loads(by_number.out.replace(str(other), "DATA")) != same


def test_every_command_refuses_names_that_the_run_does_not_know(cell: Cell, cli: Cli, tmp_path: Path) -> None:
    targets = targets_of(cell.task)
    other = write(tmp_path / "other.npz", targets, ("bird", "cat", "cow"))
    result = cell.call(cli, other)
    assert result.code == 2
    assert "cow" in result.err
    assert "bird, cat, dog" in result.err
    assert "--by-number" in result.err
    same = cell.numbers(cli, write(tmp_path / "same.npz", targets))
    assert cell.numbers(cli, other, "--by-number") == same


def test_every_command_takes_numbers_without_names_and_says_so(cell: Cell, cli: Cli, tmp_path: Path) -> None:
    targets = targets_of(cell.task)
    plain = write(tmp_path / "plain.npz", targets, None)
    result = cell.call(cli, plain)
    assert result.code == 0, result.err
    assert "has no names" in result.err
    assert "0 is bird" in result.err
    assert cell.numbers(cli, plain) == cell.numbers(cli, write(tmp_path / "same.npz", targets))
    assert cell.call(cli, plain, "--by-number").err.count("has no names") == 0


def test_every_command_takes_fewer_names(cell: Cell, cli: Cli, tmp_path: Path) -> None:
    kept, names = fewer(cell.task, targets_of(cell.task))
    result = cell.call(cli, write(tmp_path / "fewer.npz", kept, names))
    if cell.task == "regression":
        assert result.code == 2
        assert "has no number bird" in result.err
        return
    assert result.code == 0, result.err
    assert ("has no label bird" in result.err) == (cell.task == "labels")
    if cell.command == "evaluate" and cell.task == "classes":
        images = {each["name"]: each["images"] for each in json.loads(result.out)["per_class"]}
        assert images == dict(zip(NAMES, [0, *np.bincount(kept).tolist()], strict=True))


def test_every_command_refuses_more_names_without_wrong_advice(cell: Cell, cli: Cli, tmp_path: Path) -> None:
    targets = targets_of(cell.task)
    more = np.c_[targets, targets[:, :1]] if targets.ndim == 2 else np.where(targets == 2, 3, targets)
    more = more if targets.ndim == 2 else np.where(np.arange(more.size).reshape(more.shape) % 7 == 0, 2, more)
    for names in ((*NAMES, "eel"), None):
        result = cell.call(cli, write(tmp_path / "more.npz", more, names))
        assert result.code == 2
        assert ("eel" if names else "has 4") in result.err
        assert "--by-number" not in result.err


@pytest.mark.parametrize("door", ["folder", "parts", "csv", "texts", "class_names"])
def test_letters_of_one_or_two_characters_are_the_same(door: str, cli: Cli, tmp_path: Path) -> None:
    """Files from a Mac have é as e and an accent, which also changes the order of names."""
    names, y = ("café", "zoo", "über"), [0, 1, 1, 2, 2, 2]
    network("classes").save_pretrained(tmp_path / "run", class_names=names)
    apart = [unicodedata.normalize("NFD", name) for name in names]
    forms = names if door == "parts" else apart
    for n, label in enumerate(y):
        save_image(tmp_path / "new" / forms[label] / f"{n}.png", np.full((SIZE, SIZE), 9 * n, np.uint8))
    pixels, data = np.zeros((6, SIZE, SIZE), np.uint8), f"npz:{tmp_path}/new.npz"
    if door == "parts":
        (tmp_path / "new").rename(tmp_path / "train")
        (tmp_path / "new").mkdir()
        (tmp_path / "train").rename(tmp_path / "new/train")
        for label in (0, 2):
            save_image(tmp_path / "new/test" / apart[label] / "0.png", np.zeros((SIZE, SIZE), np.uint8))
    elif door == "csv":
        rows = [f"{apart[label]}/{n}.png,{(names, apart)[n % 2][label]}" for n, label in enumerate(y)]
        (tmp_path / "new/t.csv").write_text("\n".join(["image,label", *rows]), encoding="utf-8")
    if door == "texts":
        np.savez(tmp_path / "new.npz", x=pixels, y=[(names, apart)[n % 2][label] for n, label in enumerate(y)])
    elif door == "class_names":
        np.savez(tmp_path / "new.npz", x=pixels, y=y, class_names=apart)
    else:
        data = "csv:new/t.csv" if door == "csv" else "folder:new"
    part = load_run(tmp_path / "run").part("all", data)
    assert part.class_names == names
    assert part.images.labels.bincount().tolist() == ([2, 2, 4] if door == "parts" else [1, 2, 3])
    result = cli("evaluate", tmp_path / "run", "--data", data, "--split", "all", "--json")
    assert result.code == 0, result.err


def test_numbers_as_names_are_the_numbers_of_a_network_without_names(cli: Cli, tmp_path: Path) -> None:
    network("classes").save_pretrained(tmp_path / "run")
    for name in ("1", "2"):
        picture(tmp_path / "new", name, int(name))
    for words, images in (((), [0, 1, 2]), (("--by-number",), [1, 2, 0])):
        result = cli("evaluate", tmp_path / "run", "--data", "folder:new", "--split", "all", "--json", *words)
        assert list(counts(result).values()) == images
        assert result.err == ""


def test_a_class_that_is_a_whole_float_in_a_table_is_the_same_number(tmp_path: Path) -> None:
    rows = [(f"{n}.png", f"{n % 11}.0", "test") for n in range(22)]
    part = load_part(f"csv:{table(tmp_path / 't.csv', rows)}", task="classes")
    assert part.class_names == tuple(map(str, range(11)))


@pytest.mark.parametrize("names", [NAMES, ("dog", "bird", "cat"), ("bird", "cat", "cow"), None])
def test_names_of_objects_are_not_matched(names: Sequence[str] | None, cli: Cli, tmp_path: Path) -> None:
    network("objects").save_pretrained(tmp_path / "run", class_names=NAMES)
    cell, masks = Cell(tmp_path / "run", "evaluate", "objects"), targets_of("objects")
    same = cell.numbers(cli, write(tmp_path / "same.npz", masks))
    assert cell.numbers(cli, write(tmp_path / "other.npz", masks, names)) == same
    more = np.where(masks == 2, 7, masks)  # more objects than the network has outputs
    result = cell.call(cli, write(tmp_path / "more.npz", more, names and (*names, *"45678")))
    assert (result.code, "names" in result.err) == (0, False), result.err
    assert json.loads(result.out)["accuracy"] == same["accuracy"]


def test_the_explorer_puts_another_order_right(tmp_path: Path) -> None:
    network("classes").save_pretrained(tmp_path / "run", class_names=NAMES)
    targets = targets_of("classes")
    data = write(tmp_path / "other.npz", reordered("classes", targets), [NAMES[j] for j in ORDER])
    explorer = open_explorer(load_run(tmp_path / "run"), f"npz:{data}")
    assert explorer.images is not None
    assert explorer.images.labels.tolist() == targets.tolist()
    assert explorer.pick(1)[1] == NAMES[targets[1]]


def test_a_loaded_data_set_is_matched_too(tmp_path: Path) -> None:
    network("classes").save_pretrained(tmp_path / "run", class_names=NAMES)
    targets = targets_of("classes")
    data = write(tmp_path / "other.npz", reordered("classes", targets), [NAMES[j] for j in ORDER])
    matched = load_run(tmp_path / "run").dataset(load_dataset(f"npz:{data}"))
    assert matched.class_names == NAMES
    assert all(part.labels.tolist() == targets.tolist() for part in matched.parts.values())


@pytest.mark.parametrize("names", [NAMES, None])
def test_a_fitted_network_has_the_names_of_its_data(tmp_path: Path, cli: Cli, names: Sequence[str] | None) -> None:
    data = load_dataset(f"npz:{write(tmp_path / 'own.npz', targets_of('classes'), names)}")
    fit(network("classes"), data, Recipe(epochs=1, batch_size=32), out=tmp_path / "fit", progress=Progress())
    other = write(tmp_path / "other.npz", targets_of("classes"), ("x", "y", "z"))
    result = cli("evaluate", tmp_path / "fit/best", "--data", f"npz:{other}")
    if names is None:
        assert result.code == 0, result.err
        assert "the network has no names of classes, so numbers match them: x is 0; y is 1; z is 2" in result.err
    else:
        assert result.code == 2
        assert "the network knows bird, cat, dog" in result.err


def test_data_of_other_digits_are_refused(cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The network that comes with torchcaps knows the digits, and Kuzushiji are none."""
    images = [np.zeros((20, 28, 28), np.uint8)] * 2
    files = mnist_files(monkeypatch, images, [np.arange(20) % 10] * 2)
    write_files(tmp_path / "kmnist", files)
    result = cli("evaluate", "--data", "kmnist", "--data-dir", tmp_path)
    assert result.code == 2
    assert "--by-number" in result.err


# ---- data sets with only some images


def picture(folder: Path, name: str, count: int, seed: int = 0) -> None:
    rng = np.random.default_rng(seed)
    for n in range(count):
        save_image(folder / name / f"{n}.png", rng.integers(0, 255, (SIZE, SIZE)).astype(np.uint8))


def counts(result: Result) -> Mapping[str, int]:
    assert result.code == 0, result.err
    return {each["name"]: each["images"] for each in json.loads(result.out)["per_class"]}


def table(path: Path, rows: Sequence[tuple[str, str, str]]) -> Path:
    for image, *_ in rows:
        save_image(path.parent / image, np.zeros((SIZE, SIZE), np.uint8))
    path.write_text("image,label,split\n" + "".join(",".join(row) + "\n" for row in rows))
    return path


@pytest.fixture
def classifier(tmp_path: Path) -> Path:
    network("classes").save_pretrained(tmp_path / "run", class_names=NAMES)
    return tmp_path / "run"


def test_test_images_alone_are_evaluated_whole(classifier: Path, cli: Cli, tmp_path: Path) -> None:
    picture(tmp_path / "new" / "test", "dog", 2)
    picture(tmp_path / "new" / "test", "cat", 1)
    rows = [("0.png", "dog", "test"), ("1.png", "cat", "test"), ("2.png", "dog", "test")]
    y = np.array(["dog", "cat", "dog"])
    np.savez(tmp_path / "new.npz", x_test=np.zeros((3, SIZE, SIZE), np.uint8), y_test=y)
    for data in (f"folder:{tmp_path / 'new'}", f"csv:{table(tmp_path / 'table' / 't.csv', rows)}", "npz:new.npz"):
        result = cli("evaluate", classifier, "--data", data, "--json")
        assert counts(result) == {"bird": 0, "cat": 1, "dog": 2}
        assert result.err == ""
        refused = cli("train", "--data", data, "--epochs", "1")
        assert refused.code == 2
        assert "has only test images" in refused.err
        validation = cli("evaluate", classifier, "--data", data, "--split", "validation")
        assert "has no validation images, but test images; choose another --split" in validation.err


def test_a_flat_folder_is_evaluated_whole_by_split_all(classifier: Path, cli: Cli, tmp_path: Path) -> None:
    picture(tmp_path / "new", "dog", 1)
    picture(tmp_path / "new", "cat", 1)
    assert counts(cli("evaluate", classifier, "--data", "folder:new", "--split", "all", "--json")) == {
        "bird": 0,
        "cat": 1,
        "dog": 1,
    }
    result = cli("evaluate", classifier, "--data", "folder:new")
    assert result.code == 2
    assert "--split all" in result.err
    picture(tmp_path / "new", "dog", 20)
    picture(tmp_path / "new", "cat", 20)
    result = cli("evaluate", classifier, "--data", "folder:new", "--json")
    assert sum(counts(result).values()) == 8
    assert "8 of its 40 images" in result.err


def test_all_images_of_all_parts_are_evaluated(classifier: Path, cli: Cli, tmp_path: Path) -> None:
    for part, count in (("train", 3), ("val", 2), ("test", 1)):
        picture(tmp_path / "new" / part, "dog", count)
        picture(tmp_path / "new" / part, "cat", count)
    counted = counts(cli("evaluate", classifier, "--data", "folder:new", "--split", "all", "--json"))
    assert counted == {"bird": 0, "cat": 6, "dog": 6}


def test_numbers_of_a_test_set_may_lack_the_first_class(classifier: Path, cli: Cli, tmp_path: Path) -> None:
    np.savez(tmp_path / "new.npz", x_test=np.zeros((2, SIZE, SIZE), np.uint8), y_test=np.array([2, 1]))
    assert counts(cli("evaluate", classifier, "--data", "npz:new.npz", "--json")) == {"bird": 0, "cat": 1, "dog": 1}
    np.savez(tmp_path / "flat.npz", x=np.zeros((2, SIZE, SIZE), np.uint8), y=np.array([2, 2]))
    counted = counts(cli("evaluate", classifier, "--data", "npz:flat.npz", "--split", "all", "--json"))
    assert counted == {"bird": 0, "cat": 0, "dog": 2}


def test_masks_to_test_on_alone_are_evaluated_whole(cli: Cli, tmp_path: Path) -> None:
    network("pixels").save_pretrained(tmp_path / "run", class_names=NAMES)
    for n in range(2):
        save_image(tmp_path / "new" / "test" / "images" / f"{n}.png", np.full((SIZE, SIZE), 99, np.uint8))
        save_image(tmp_path / "new" / "test" / "masks" / f"{n}.png", np.full((SIZE, SIZE), 2 * n, np.uint8))
    result = cli("evaluate", tmp_path / "run", "--data", "folder:new", "--json")
    assert result.code == 0, result.err
    assert json.loads(result.out)["num_images"] == 2


def test_training_needs_no_test_image_of_each_class(cli: Cli, tmp_path: Path) -> None:
    for name in ("cat", "dog"):
        picture(tmp_path / "new" / "train", name, 4)
    picture(tmp_path / "new" / "test", "dog", 2)
    (tmp_path / "new" / "test" / "cat").mkdir()
    dataset = load_dataset("folder:new")
    assert dataset.class_names == ("cat", "dog")
    assert dataset.test.labels.tolist() == [1, 1]
    picture(tmp_path / "new" / "test", "eel", 1)
    with pytest.raises(InputError, match="the class eel of the test images has no folder in train"):
        load_dataset("folder:new")


def test_classes_that_were_renamed_in_the_run_are_matched_by_number_on_request(
    run_folder: Path, cli: Cli, tmp_path: Path
) -> None:
    folder = shutil.copytree(run_folder, tmp_path / "renamed")
    about = json.loads((folder / "best" / "classes.json").read_text())
    about["class_names"][3] = "three"
    (folder / "best" / "classes.json").write_text(json.dumps(about))
    result = cli("evaluate", folder)
    assert result.code == 2
    assert "digits has the class 3, but the network knows 0, 1, 2, three" in result.err
    assert json.loads(cli("evaluate", folder, "--by-number", "--json").out)["class_names"][3] == "three"


def test_generated_training_images_are_not_joined() -> None:
    with registered_for_now():
        register_dataset("pairs", title="Pairs", source="here", licence="none")(
            lambda _: Splits(image_set(), image_set(), ("a", "b", "c"), as_train=PairSet)
        )
        with pytest.raises(InputError, match="choose --split test"):
            load_part("pairs", "all")
