"""The examples run, and print what their runs measured."""

import re
import shutil
import string
import sys
import types
from collections.abc import Iterator
from pathlib import Path

import matplotlib
import numpy as np
import pytest
import torch

from support import registered_for_now
from torchcaps.analysis import evaluate
from torchcaps.datasets import load_dataset
from torchcaps.errors import InputError
from torchcaps.models import load_pretrained
from torchcaps.plugins import import_file

EXAMPLES = Path(__file__).parents[1] / "examples"


def example(name: str) -> types.ModuleType:
    return import_file(EXAMPLES / f"{name}.py")


@pytest.fixture(autouse=True)
def _as_before() -> Iterator[None]:
    """What an example registers is known to its own test only."""
    before = set(sys.modules)
    with registered_for_now():
        yield
    for name in set(sys.modules) - before:
        if Path(getattr(sys.modules[name], "__file__", None) or "").parent == EXAMPLES:
            del sys.modules[name]


RUNS: dict[str, tuple[str, list[str]]] = {
    "capsule_head": (
        "--epochs 1 --images 64",
        [r"images \(1, 28, 28\) → feature map \(64, 4, 4\)", "ACCURACY"],
    ),
    "train_in_one_file": (
        "--epochs 2 --images 64 --out new",
        [r"epoch 2: loss [\d.]+, validation error [\d.]+ %", "ACCURACY"],
    ),
    "stacked_capsules": (
        "--primary squash --epochs 1 --images 64 --hidden 8 8 8",
        [r"mean lengths at the start: 0\.[01]\d*( 0\.\d+){3} 0\.000", "epoch 1: loss", "ACCURACY"],
    ),
    "own_routing": (
        "--epochs 1 --seeds 0 --images 64",
        ["coupling             sums to one over the outputs", "mine +ACCURACY", "dynamic +ACCURACY"],
    ),
    "own_backbone": (
        "--epochs 1 --seeds 0 --images 64",
        [r"conv +[\d,]+ parameters; ACCURACY", r"residual +[\d,]+ parameters; ACCURACY"],
    ),
    "multi_label": (
        "--epochs 1 --images 128",
        [r"all classes of an image right: [\d.]+ % of 500 images", r"lengths of 0 to 9:(?: 0\.\d\d){10}\n"],
    ),
    "few_shot": (
        "--episodes 2 --tests 2",
        [rf"5-way {shots}-shot, {how} *: [\d.]+ % of new classes" for shots in (1, 5) for how in ("routing", "mean")],
    ),
    "animate_capsules": ("--classes 3 7 --components 1 --out new.gif", [r"^wrote new\.gif: 20 frames, "]),
    "routing_pictures": (
        "--out new",
        [r"uniform +coupling of the inputs that agree 0\.50,", r"em +coupling of the inputs that agree 0\.[89]"],
    ),
    "viewpoints": ("--data-dir . --out sheet.png", [r"^wrote sheet\.png: 50 of 16,200 images\n$"]),
    "sklearn_estimator": (
        "--epochs 1 --images 200",
        [r"accuracy of three folds:( [01]\.\d{4}){3}\n", r"calibrated probabilities: [\d. ]+\n"],
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", RUNS)
def test_an_example_runs_and_prints_what_it_measured(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    module, (arguments, patterns) = example(name), RUNS[name]
    if name == "viewpoints":  # rendering takes minutes
        monkeypatch.setattr(module, "_render", lambda _: np.zeros((module._VIEWS, 48, 48), np.uint8))
    module.main(arguments.split())
    printed = capsys.readouterr().out
    for pattern in patterns:
        assert re.search(pattern.replace("ACCURACY", r"test accuracy [\d.]+ %"), printed), pattern
    for file in re.findall(r"--out (\S+\.\w+)", arguments):
        assert Path(file).is_file()


def test_sequences(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    x = np.random.default_rng(0).normal(size=(100, 12, 6))
    np.savez(tmp_path / "a.npz", x=x, y=np.arange(100) % 9, lengths=np.arange(100) % 5 + 2)
    module = example("sequences")
    monkeypatch.setattr(module, "RATES", (1e-2,))
    module.main(["--data", f"npz:{tmp_path / 'a.npz'}", "--epochs", "1", "--seeds", "2"])
    line = r"([\d,]+) parameters; rate 0.01, dropout 0(?:.3)?: validation [\d.]+ %, test .+ ± .+ %"
    sizes = [int(size.replace(",", "")) for size in re.findall(line, capsys.readouterr().out)]
    assert len(sizes) == 4
    assert max(sizes) < 1.05 * min(sizes), "of one size"


def test_capsule_head_on_timm(timm_stub: None, capsys: pytest.CaptureFixture[str]) -> None:
    example("capsule_head").main(["--backbone", "wide", "--pretrained", "--freeze", "--epochs", "1", "--images", "64"])
    assert "feature map (6, 14, 14)" in capsys.readouterr().out


def test_own_study_is_the_one_on_its_page_and_its_rows_can_be_run() -> None:
    page = (EXAMPLES.parent / "docs" / "a-study.md").read_text(encoding="utf-8")
    block = re.findall(r"^```python\n(.*?)^```", page, re.MULTILINE | re.DOTALL)[0]
    assert set(block.splitlines()) <= set((EXAMPLES / "own_study.py").read_text(encoding="utf-8").splitlines())
    study = example("own_study")
    splits = load_dataset("stripes")
    assert splits.test.images.shape == (200, 1, 28, 28)
    rates = {(row.config(0).recipe.learning_rate, row.name[-1]) for row in study.TABLE.rows}
    assert rates == {(1e-3, "1"), (4e-3, "4")}
    assert all(row.config(1).data == "stripes" for row in study.TABLE.rows)


def test_own_images_are_drawn_as_a_folder_and_its_rows_can_be_run(tmp_path: Path) -> None:
    own = example("own_images")
    sizes = {"shapes": (450, 3), "shapes-of-ten": (300, 10), "defects": (1300, 4)}
    assert own.DRAWINGS.keys() == sizes.keys()
    for name, (number, classes) in sizes.items():
        drawn = load_dataset(f"drawn:{name}", image_size=32)
        found = sum(map(len, (drawn.train, drawn.validation, drawn.test)))
        assert (found, drawn.num_classes, drawn.in_shape[1:]) == (number, classes, (32, 32))
    with pytest.raises(InputError, match=r"no drawing or folder of fonts \"shape\"; did you mean"):
        load_dataset("drawn:shape")
    for font in ("DejaVuSans", "DejaVuSans-Bold", "DejaVuSansMono"):
        shutil.copy(Path(matplotlib.get_data_path(), "fonts", "ttf", f"{font}.ttf"), tmp_path)
    assert load_dataset(f"drawn:{tmp_path}").class_names == tuple(string.ascii_uppercase)
    assert [row.config(0).fitted != () for row in own.TABLE.rows] == [True] * 5, "as images of one's own"


@pytest.mark.mnist
def test_what_routing_does_prints_the_numbers_of_the_page(capsys: pytest.CaptureFixture[str]) -> None:
    example("what_routing_does").main(["--images", "50"])
    printed = capsys.readouterr().out
    assert "bottom row strongest, images: 48\n" in printed
    assert "the same, images turned by 180°: 43\n" in printed


@pytest.mark.mnist
def test_equivariance_says_how_well_one_matrix_moves_the_poses(capsys: pytest.CaptureFixture[str]) -> None:
    module = example("equivariance")
    turn = torch.linalg.qr(torch.randn(4, 4, dtype=torch.float64)).Q
    before, labels = torch.randn(80, 4, dtype=torch.float64), torch.arange(80) % 2
    stays, moves = module.r2_of_predictions(before, before @ turn, labels)
    assert moves == pytest.approx(1)
    assert stays < 0.9
    assert module.r2_of_predictions(before, torch.randn_like(before), labels)[1] < 0.5
    module.main(["--images", "250"])
    printed = capsys.readouterr().out
    assert len(re.findall(r"^.+: poses -?\d\.\d\d -?\d\.\d\d, pixels", printed, re.MULTILINE)) == 5


@pytest.mark.slow
@pytest.mark.mnist
def test_photos_are_right_when_they_are_prepared(monkeypatch: pytest.MonkeyPatch) -> None:
    photos, network = example("photos"), load_pretrained("compact")
    for way, number, least, most in (("", 8, 23, 24), ("-as-they-are", 4, 0, 4), ("-inverted", 4, 0, 4)):
        monkeypatch.setattr(photos, "NUMBER", number)
        right = evaluate(network, load_dataset(f"photos-paper{way}").test).num_correct
        assert least <= right <= most, f"{way}: {right} of {3 * number}"


# ---- interests


def test_interests(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    interests = example("interests")
    rng = np.random.default_rng(0)
    rows = [(user, item, 5, time) for user in range(1, 20) for time, item in enumerate(rng.permutation(80)[:user])]
    ratings, out = tmp_path / "u.data", tmp_path / "runs.jsonl"
    np.savetxt(ratings, rng.permutation(rows), fmt="%d")

    parts = interests.leave_last_out(interests.read_ratings(ratings))
    assert [len(part.following) for part in parts.values()] == [sum(range(1, 17)), 16, 16]
    names = sorted({item for _, item, _, _ in rows})
    of_last = [names.index(item) for user, item, _, _ in rows if user == 19]
    history, following, unseen = (each[-1] for each in parts["test"])
    assert history.tolist() == [-1] * (20 - 18) + of_last[:18]
    assert following == of_last[18]
    assert set(unseen.logical_not().nonzero().flatten().tolist()) == set(of_last)
    assert parts["validation"].following[-1] == parts["test"].history[-1, -1] == of_last[17]
    assert parts["train"].following[-1] == parts["validation"].history[-1, -1] == of_last[16]

    arguments = [str(ratings), "--epochs", "1", "--seeds", "1", "2", "--out", str(out)]
    interests.main(arguments)
    printed, runs = capsys.readouterr().out, out.read_text().splitlines()
    assert len(runs) == len(interests.METHODS) * (6 + 2)
    lines = {line[:18].strip(): line[18:] for line in printed.splitlines()}
    for method in interests.METHODS:
        assert re.fullmatch(r"( +-?[\d.]+ ± [\d.]+){5}   0\.\d+, 0\.\d", lines[method])
    assert lines["mean pooling"].count("1.00 ± 0.00") == 3, "four times the same"
    interests.main([*arguments[:4], "1", *arguments[-2:]])
    assert re.search(r"B2I, 1 iteration( +-?[\d.]+){5}   0", capsys.readouterr().out), "a single seed has no deviation"
    assert out.read_text().splitlines() == runs, "no run is made twice"


def test_segcaps_learns_with_monai() -> None:
    pytest.importorskip("monai", reason="MONAI is not installed")
    assert example("segment_with_monai").main(15) > 0.2
