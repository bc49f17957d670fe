"""No command replaces what stands there: every writer, with every kind of file at the place it would write to."""

import errno
import os
import pkgutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from PIL import Image

import processes
import torchcaps.analysis.answers
import torchcaps.analysis.mask_answers
from cli_support import Cli, Result
from tiny_runs import save_image
from torchcaps.analysis.mask_answers import output_files
from torchcaps.models import create_model

SIZE = 16


class Writer(NamedTuple):
    """A command that writes a file: words, the file, and an input of the command."""

    words: str
    target: str
    read: str
    work: str
    """Function that does the work."""


WRITERS = {
    "table": Writer("predict RUN photos --out t.csv", "t.csv", "photos/a.jpg", "torchcaps.analysis.answers.read_photo"),
    "masks": Writer(
        "predict PIXELS photos --out masks",
        "masks/a.png",
        "photos/a.jpg",
        "torchcaps.analysis.mask_answers.read_input",
    ),
    "answers": Writer(
        "evaluate RUN --data csv:data/own.csv --split all --out t.csv",
        "t.csv",
        "data/own.csv",
        "torchcaps.analysis.evaluate",
    ),
    "onnx": Writer("export RUN --out m.onnx", "m.onnx", "RUN/model.safetensors", "torchcaps.export.export_onnx"),
    "onnx in the run": Writer("export RUN", "RUN/model.onnx", "RUN/model.safetensors", "torchcaps.export.export_onnx"),
    "program": Writer(
        "export RUN --format torch --out m.pt2", "m.pt2", "RUN/config.json", "torchcaps.export.export_program"
    ),
    "badge": Writer("check own.py:Layer --shape 4,12,8 --badge b.svg", "b.svg", "own.py", "torchcaps.testing.diagnose"),
}
KINDS = ("file", "link", "dead link", "hard link", "input", "link to input", "hard link to input", "folder")


def put(kind: str, target: Path, read: Path) -> None:
    """Put a file of this kind at the place that a command would write to."""
    target.parent.mkdir(exist_ok=True)
    other = target.parent.parent / "precious"
    other.write_text("precious")
    match kind:
        case "file":
            target.write_text("precious")
        case "link":
            target.symlink_to(other.absolute())
        case "dead link":
            target.symlink_to("nothing")
        case "hard link":
            target.hardlink_to(other)
        case "input":
            target.unlink(missing_ok=True)
            read.rename(target)
            read.symlink_to(target.absolute())
        case "link to input":
            target.symlink_to(read.absolute())
        case "hard link to input":
            target.hardlink_to(read)
        case "folder":
            target.mkdir()


def snapshot(folder: Path) -> dict[str, Any]:
    """Return all files, links and folders with their contents."""
    return {
        str(path.relative_to(folder)): (path.is_symlink(), path.read_bytes() if path.is_file() else None)
        for path in sorted(folder.rglob("*"))
        if "__pycache__" not in path.parts
    }


@pytest.fixture
def here(tmp_path: Path) -> Path:
    """A folder with two networks, three photos and a layer of one's own."""
    small: Any = {"conv_channels": 4, "primary_types": 2, "capsule_dim": 4, "decoder_hidden": (8,)}
    create_model("sabour2017", in_shape=(1, SIZE + 2, SIZE + 2), num_classes=3, **small).save_pretrained(
        tmp_path / "RUN"
    )
    create_model("unet-twin", (1, SIZE, SIZE), 3, channels=(3,), parameters_of=None).save_pretrained(
        tmp_path / "PIXELS"
    )
    rng = np.random.default_rng(0)
    for name in ("a.jpg", "b.png", "c.bmp"):
        save_image(tmp_path / "photos" / name, rng.integers(0, 255, (20, 24)).astype(np.uint8))
        save_image(tmp_path / "data" / name, rng.integers(0, 255, (SIZE + 2, SIZE + 2)).astype(np.uint8))
    (tmp_path / "data/own.csv").write_text("image,label\na.jpg,0\nb.png,1\nc.bmp,1\n")
    (tmp_path / "own.py").write_text(
        "import torch\nclass Layer(torch.nn.Module):\n    def forward(self, x): return x\n"
    )
    return tmp_path


def call(cli: Cli, writer: Writer, *words: str) -> Result:
    return cli(*writer.words.split(), *words)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", WRITERS)
def test_no_writer_replaces_what_stands_there(
    name: str, kind: str, here: Path, cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer = WRITERS[name]
    put(kind, here / writer.target, here / writer.read)
    before = snapshot(here)

    def work(*_: Any, **__: Any) -> Any:
        raise AssertionError("the work has begun")

    monkeypatch.setattr(writer.work, work)
    for options in ((), ("--overwrite",)):
        if options and kind in ("file", "link", "dead link", "hard link"):
            continue
        result = call(cli, writer, *options)
        assert result.code == 2, result.err
        assert Path(writer.target).name in result.err
        assert snapshot(here) == before


@pytest.mark.parametrize("kind", ["file", "link", "dead link", "hard link"])
@pytest.mark.parametrize("name", ["table", "masks", "badge", "answers"])
def test_overwrite_replaces_a_file_but_nothing_that_it_links_to(name: str, kind: str, here: Path, cli: Cli) -> None:
    writer = WRITERS[name]
    put(kind, here / writer.target, here / writer.read)
    precious = ((here / writer.target).parent.parent / "precious").absolute()
    result = call(cli, writer, "--overwrite")
    assert result.code in (0, 1), result.err
    assert not (here / writer.target).is_symlink()
    assert (here / writer.target).read_bytes() != b"precious"
    assert precious.read_text() == "precious"


@pytest.mark.parametrize(
    ("words", "option", "suffix"),
    [
        ("predict RUN photos --out", "--out", ".csv"),
        ("evaluate RUN --data csv:data/own.csv --split all --out", "--out", ".csv"),
        ("predict RUN photos --poses", "--poses", ".npz"),
        ("check own.py:Layer --shape 4,12,8 --badge", "--badge", ".svg"),
        ("export RUN --out", "the file", ".onnx"),
        ("export RUN --format torch --out", "the file", ".pt2"),
    ],
)
def test_a_file_has_the_suffix_of_its_contents(words: str, option: str, suffix: str, here: Path, cli: Cli) -> None:
    before = snapshot(here)
    for target in ("new/", "data/b.png", "own.py"):
        result = cli(*words.split(), target, "--overwrite")
        assert result.code == 2
        assert f"{option} must end in {suffix}, got {target.rstrip('/')}" in result.err
    assert snapshot(here) == before


PLACES = {
    "a file": "own.py/new",
    "a dead link": "dead/new",
    "a circle of links": "circle/new",
    "a photo": "photos/a.jpg/x/new",
}
WRITTEN = {
    "predict RUN photos --out": ".csv",
    "predict RUN photos --poses": ".npz",
    "predict RUN photos --figure": ".png",
    "predict PIXELS photos --out": "",
    "evaluate RUN --data csv:data/own.csv --split all --out": ".csv",
    "evaluate RUN --data csv:data/own.csv --split all --figure": ".png",
    "export RUN --out": ".onnx",
    "export RUN --format folder --out": "",
    "explore RUN --save": "",
    "check own.py:Layer --shape 4,12,8 --badge": ".svg",
}


@pytest.mark.slow
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("words", WRITTEN)
def test_a_place_that_cannot_be_written_is_refused_before_the_work(
    words: str, place: str, here: Path, cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    def work(*_: Any, **__: Any) -> Any:
        raise AssertionError("the work has begun")

    for writer in WRITERS.values():
        monkeypatch.setattr(writer.work, work)
    (here / "dead").symlink_to("nothing")
    (here / "circle").symlink_to("circle")
    before, target = snapshot(here), PLACES[place] + WRITTEN[words]
    result = cli(*words.split(), target)
    assert result.code == 2
    folder = target.partition("/x")[0] if "/x/" in target else target.partition("/new")[0]
    assert f" {target}" in result.err
    assert f"cannot be created, because {folder} is no folder; choose another" in result.err
    assert snapshot(here) == before


@pytest.mark.parametrize("words", ["export RUN --out", "export RUN --format folder --out", "explore RUN --save"])
def test_the_root_is_no_new_file_or_folder(words: str, here: Path, cli: Cli) -> None:
    result = cli(*words.split(), here.anchor)
    assert result.code == 2
    assert "is a folder, and no file" in result.err or "choose a new or an empty folder" in result.err


def test_a_page_appears_in_full_or_not_at_all(here: Path, cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    before = snapshot(here)

    def full(*_: Any, **__: Any) -> Any:
        raise OSError(errno.ENOSPC, "No space left on device", "start.js")

    with monkeypatch.context() as patch:
        patch.setattr("shutil.copyfile", full)
        result = cli("explore", "--save", "new")
    assert result.code == 2
    assert "new: no space left on the device" in result.err
    assert snapshot(here) == before
    (here / "new").mkdir()
    cli.out("explore", "--save", "new")


def test_a_figure_does_not_replace_a_link_that_leads_nowhere(here: Path, cli: Cli) -> None:
    (here / "f.png").symlink_to("nothing")
    cli.out("evaluate", "RUN", "--data", "csv:data/own.csv", "--split", "all", "--figure", "f.png")
    assert (here / "f.png").is_symlink()
    assert (here / "f-2.png").is_file()


@pytest.mark.slow
def test_an_export_is_replaced_only_by_overwrite(here: Path, cli: Cli) -> None:
    cli.out("export", "RUN", "--format", "torch")
    assert "RUN/model.pt2 exists already" in cli("export", "RUN", "--format", "torch").err
    (here / "RUN/model.pt2").write_text("old")
    cli.out("export", "RUN", "--format", "torch", "--overwrite")
    assert (here / "RUN/model.pt2").stat().st_size > 1000


def test_a_folder_of_an_export_or_a_page_must_be_new(here: Path, cli: Cli) -> None:
    (here / "folder").mkdir()
    (here / "folder" / "precious").write_text("precious")
    (here / "file").write_text("precious")
    (here / "link").symlink_to("folder")
    (here / "dead").symlink_to("nothing")
    before = snapshot(here)
    for target in ("folder", "file", "link", "dead", "RUN", "photos"):
        for words in (("export", "RUN", "--format", "folder", "--out"), ("explore", "RUN", "--save")):
            assert cli(*words, target).code == 2
            assert snapshot(here) == before
    refused = cli("export", "RUN", "--format", "folder", "--out", "new", "--overwrite")
    assert "--overwrite replaces a file" in refused.err


COMES = {
    "predict RUN photos --out t.csv": ("torchcaps.analysis.photos.PhotoAnswers.to_csv", "t.csv"),
    "predict PIXELS photos --out masks": ("torchcaps.analysis.mask_answers.palette", "masks/a.png"),
    "predict RUN photos --poses p.npz": ("torchcaps.cli.predict.npz_bytes", "p.npz"),
    "evaluate RUN --data csv:data/own.csv --split all --out t.csv": (
        "torchcaps.analysis.evaluation.Evaluation.answers",
        "t.csv",
    ),
    "check own.py:Layer --shape 4,12,8 --badge b.svg": ("torchcaps.cli.check.draw_badge", "b.svg"),
}
"""A function that a command calls just before it writes a file, and the file."""


@pytest.mark.parametrize("words", COMES)
def test_a_file_that_comes_during_the_work_stays(
    words: str, here: Path, cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    place, target = COMES[words]
    called = pkgutil.resolve_name(place)

    def call(*arguments: Any, **options: Any) -> Any:
        if not (here / target).exists():
            (here / target).parent.mkdir(exist_ok=True)
            (here / target).write_text("precious")
        return called(*arguments, **options)

    monkeypatch.setattr(place, call)
    result = cli(*words.split())
    assert result.code == 2
    assert f"{target} was written by another program during this command, and stays" in result.err
    assert (here / target).read_text() == "precious"
    assert cli(*words.split(), "--overwrite").code in (0, 1)
    assert (here / target).read_bytes() != b"precious"


def test_photos_are_not_replaced_by_their_masks(here: Path, cli: Cli) -> None:
    (here / "photos/c.bmp").unlink()
    before = snapshot(here)
    for options in ((), ("--overwrite",)):
        result = cli("predict", "PIXELS", "photos", "--out", "photos", *options)
        assert result.code == 2
        assert "photos/b.png is an input of this command; choose another --out" in result.err
        assert snapshot(here) == before
    (here / "masks").symlink_to("photos")
    result = cli("predict", "PIXELS", "photos", "--out", "masks", "--overwrite")
    assert "is an input of this command, a link to photos/" in result.err


def test_masks_of_equal_names_are_refused_before_the_work(here: Path, cli: Cli) -> None:
    save_image(here / "photos/a.png", np.zeros((20, 24), np.uint8))
    before = snapshot(here)
    result = cli("predict", "PIXELS", "photos", "--out", "masks")
    assert result.code == 2
    assert "the masks of photos/a.jpg and photos/a.png would both be masks/a.png" in result.err
    assert snapshot(here) == before


@pytest.mark.parametrize("name", ["cafe\u0301.png", "café.png", "sub.01/", "a.b.nii.gz"])
def test_a_mask_has_the_letters_of_its_image(name: str, tmp_path: Path) -> None:
    path = tmp_path / "scans" / name
    (path if name.endswith("/") else path.parent).mkdir(parents=True)
    (file,) = output_files(Path("masks"), {path: Path(name)}).values()
    assert str(file) == "masks/" + name.replace("/", ".nii.gz")


@pytest.mark.parametrize("layout", ["images/{}.png masks/{}.png", "{}.png {}_mask.png", "raw/{}.png seg/{}.png"])
def test_masks_of_a_data_set_are_no_images_to_predict(layout: str, here: Path, cli: Cli) -> None:
    image, mask = layout.split()
    for n in range(3):
        for name in (image, mask):
            save_image(here / "data set" / name.format(n), np.zeros((20, 24), np.uint8))
    before, said = snapshot(here), "is a mask by its name: 3 masks left out, 3 images predicted"
    result = cli("predict", "PIXELS", "data set", "--out", "new")
    assert (result.code, said in result.err) == (0, True), result.err
    assert len([*(here / "new").rglob("*.png")]) == 3
    result = cli("predict", "PIXELS", f"data set/{mask.format(1)}", "--json")  # named by the user
    assert (result.code, result.err) == (0, "")
    assert snapshot(here).items() >= before.items()


def test_only_missing_masks_are_predicted(here: Path, cli: Cli) -> None:
    cli.out("predict", "PIXELS", "photos/a.jpg", "photos/b.png", "--out", "masks")
    (here / "masks/a.png").write_bytes(b"mine")
    assert "masks/a.png exists already, and 1 more" in cli("predict", "PIXELS", "photos", "--out", "masks").err
    said = cli.out("predict", "PIXELS", "photos", "--out", "masks", "--missing")
    assert "masks has the masks of 2 of 3 images already" in said
    assert "wrote masks, a mask for the only image" in said or "wrote masks" in said
    assert (here / "masks/a.png").read_bytes() == b"mine"
    assert sorted(path.name for path in (here / "masks").iterdir()) == ["a.png", "b.png", "c.png"]
    assert cli("predict", "PIXELS", "photos", "--out", "masks", "--missing").code == 0


def test_options_that_would_do_nothing_are_refused(here: Path, cli: Cli) -> None:
    for words in (
        "PIXELS photos --missing",
        "PIXELS photos --overwrite",
        "PIXELS photos --out masks --missing --overwrite",
        "RUN photos --out t.csv --missing",
    ):
        result = cli("predict", *words.split())
        assert result.code == 2
        assert "leave it out" in result.err


def test_a_stop_keeps_the_masks_that_are_done(here: Path, cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    original, calls = torchcaps.analysis.mask_answers.read_input, []

    def read(path: Path, *options: Any) -> Any:
        calls.append(path)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return original(path, *options)

    monkeypatch.setattr("torchcaps.analysis.mask_answers.read_input", read)
    result = cli("predict", "PIXELS", "photos", "--out", "masks")
    assert result.code == 130
    assert sorted(path.name for path in (here / "masks").iterdir()) == ["a.png", "b.png"]
    cli.out("predict", "PIXELS", "photos", "--out", "masks", "--missing")
    assert sorted(path.name for path in (here / "masks").iterdir()) == ["a.png", "b.png", "c.png"]


def test_answers_do_not_depend_on_the_number_of_files_at_once(
    here: Path, cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    cli.out("predict", "RUN", "photos", "--out", "at-once.csv")
    monkeypatch.setattr(torchcaps.analysis.answers, "FILES_AT_ONCE", 2)
    cli.out("predict", "RUN", "photos", "--out", "by-two.csv")
    assert (here / "at-once.csv").read_text() == (here / "by-two.csv").read_text()
    whole = cli.json("predict", "RUN", "photos")
    assert [each["image"] for each in whole] == ["photos/a.jpg", "photos/b.png", "photos/c.bmp"]
    figure = cli("predict", "RUN", "photos", "--figure", "f.png")
    assert figure.code == 0, figure.err


@pytest.mark.skipif(sys.platform != "linux", reason="names of files may be any bytes on Linux only")
def test_names_that_are_not_utf8_are_written_out(here: Path, cli: Cli) -> None:
    name = os.fsdecode(b"caf\xe9.png")
    save_image(here / "odd" / name, np.zeros((20, 24), np.uint8))
    cli.out("predict", "RUN", "odd", "--out", "t.csv")
    assert r"odd/caf\xe9.png," in (here / "t.csv").read_text(encoding="utf-8")
    assert r"odd/caf\xe9.png" in cli.out("predict", "RUN", "odd")
    assert os.fsencode(cli.json("predict", "RUN", "odd")[0]["image"]) == b"odd/caf\xe9.png"
    assert cli("predict", "RUN", "odd", "--figure", "f.png").code == 0
    cli.out("predict", "PIXELS", "odd", "--out", "masks")
    assert [os.fsencode(path.name) for path in (here / "masks").iterdir()] == [b"caf\xe9.png"]
    cli.out("predict", "RUN", "odd", "--group", "odd", "--out", "g.csv")


PEAKS = """
import resource, sys
from torchcaps.cli import main
words = sys.argv[1:]
for count in (4, 28):
    files = [f"many/{n}.png" for n in range(count)]
    code = main([*words[:2], *files, "--out", words[2].format(count)])
    print("peak", code, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024)
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="the unit of ru_maxrss differs")
@pytest.mark.parametrize("words", ["predict PIXELS masks{}", "predict RUN answers{}.csv"])
def test_memory_does_not_grow_with_the_number_of_files(words: str, here: Path) -> None:
    create_model("unet-twin", (1, 500, 500), 3, channels=(3,), parameters_of=None).save_pretrained(here / "PIXELS")
    pixels = np.zeros((1000, 2000, 3), np.uint8)
    pixels[::7] = 200
    (here / "many").mkdir()
    for n in range(28):
        Image.fromarray(pixels).save(here / f"many/{n}.png", compress_level=1)
    said, _ = processes.start("-c", PEAKS, *words.split()).communicate(timeout=200)
    peaks = [tuple(map(int, line.split()[1:])) for line in said.splitlines() if line.startswith("peak ")]
    assert [code for code, _ in peaks] == [0, 0], said
    assert peaks[1][1] < peaks[0][1] + 64, peaks  # MiB; 24 images and masks in memory take 96


@pytest.mark.slow
@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no SIGINT for one process")
@pytest.mark.parametrize("delay", [0.4, 1.5])
@pytest.mark.parametrize("command", ["evaluate --data digits", "train --data digits", "export", "presets"])
def test_three_signals_at_once_print_no_traceback(command: str, delay: float, here: Path) -> None:
    typed = [sys.executable, "-m", "torchcaps", *command.split()]
    with subprocess.Popen(typed, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=here) as process:
        time.sleep(delay)
        for _ in range(3):
            process.send_signal(signal.SIGINT)
            time.sleep(0.001)
        _, errors = process.communicate()
    assert process.returncode in (130, -signal.SIGINT)  # the last of them may come when Python has ended
    assert "Traceback" not in errors
    assert "Exception ignored" not in errors
