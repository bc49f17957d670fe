"""The examples run, and print what their runs measured."""

from __future__ import annotations

import importlib.machinery
import importlib.util
import json
import re
import statistics
import sys
import types
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from support import registered_for_now
from torchcaps.datasets import ImageSet, load_dataset
from torchcaps.models import create_model, get_preset
from torchcaps.nn import DenseVotes
from torchcaps.parts import flat
from torchcaps.plugins import load_plugin
from torchcaps.training import read_config

EXAMPLES = Path(__file__).parents[1] / "examples"
TINY = ("conv_channels=8", "primary_types=2", "capsule_dim=4", "decoder=false", "batch_size=16", "validation_size=12")
SMALL = [word for field in TINY for word in ("--set", field)]


def example(name: str) -> types.ModuleType:
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # where dataclasses look themselves up
    spec.loader.exec_module(module)
    return module


@pytest.fixture(autouse=True)
def _as_before() -> Iterator[None]:
    """What an example registers is known to its own test only."""
    with registered_for_now():
        yield
    for path in EXAMPLES.glob("*.py"):
        sys.modules.pop(path.stem, None)


SCRIPTS = [path.stem for path in sorted(EXAMPLES.glob("*.py")) if "def main(" in path.read_text(encoding="utf-8")]


@pytest.mark.parametrize("name", SCRIPTS)
def test_help_says_what_an_example_shows(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    module = example(name)
    with pytest.raises(SystemExit) as caught:
        module.main(["--help"])
    assert caught.value.code == 0
    assert (module.__doc__ or "no description").strip() in capsys.readouterr().out
    assert f"python examples/{name}.py" in (module.__doc__ or "")


RUNS: dict[str, tuple[str, list[str]]] = {
    "capsule_head": (
        "--epochs 1 --images 64",
        [r"images \(1, 28, 28\) → feature map \(64, 4, 4\)", "ACCURACY"],
    ),
    "stacked_capsules": (
        "--primary squash --epochs 1 --images 64 --hidden 8 8 8",
        [
            r"mean lengths at the start: 0\.[01]\d*( 0\.\d+){3} 0\.000",
            "epoch 1: loss",
            "ACCURACY",
        ],  # as it says: nothing in the end
    ),
    "own_routing": (
        "--epochs 1 --seeds 0 --images 64",
        ["batch independence   differs by", "coupling             sums to one over the outputs"]
        + [rf"{name} +test accuracy [\d.]+ %; [\d.]+ s a run" for name in ("mine", "dynamic")],
    ),
    "own_backbone": (
        "--epochs 1 --seeds 0 --images 64",
        [rf"{name} +[\d,]+ parameters; test accuracy [\d.]+ %" for name in ("conv", "residual")],
    ),
    "multi_label": (
        "--epochs 1 --images 128",
        [
            r"all classes of an image right: [\d.]+ % of 500 images",
            "lengths of 0 to 9:(?: 0\\.\\d\\d){10}\n",
            "there: nothing ",
        ],
    ),
    "sklearn_estimator": (
        "--epochs 1 --images 200",
        [
            r"accuracy of three folds:( [01]\.\d{4}){3}\n",
            r"[\d.]+ 3 inputs\n",
            r"probabilities made of them: [\d. ]+\n",
        ],
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", RUNS)
def test_an_example_runs_and_prints_what_it_measured(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    arguments, patterns = RUNS[name]
    example(name).main(arguments.split())
    printed = capsys.readouterr().out
    for pattern in patterns:
        assert re.search(pattern.replace("ACCURACY", r"test accuracy [\d.]+ %"), printed), pattern


# ---- sequences


def test_sequences(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    x = np.random.default_rng(0).normal(size=(100, 12, 6))
    np.savez(tmp_path / "a.npz", x=x, y=np.arange(100) % 9, lengths=np.arange(100) % 5 + 2)
    module = example("sequences")
    monkeypatch.setattr(module, "RATES", (1e-2,))
    module.main(["--data", f"npz:{tmp_path / 'a.npz'}", "--epochs", "1", "--seeds", "2"])
    printed = capsys.readouterr().out
    found = re.findall(
        r"([\d,]+) parameters; rate 0.01, dropout 0(?:.3)?: validation [\d.]+ %, test .+ ± .+ %", printed
    )
    sizes = [int(size.replace(",", "")) for size in found]
    assert len(sizes) == 4
    assert max(sizes) < 1.05 * min(sizes), "of one size"


# ---- compare_routing


@pytest.fixture
def bars(tmp_path: Path) -> str:
    """18×18 images of three classes: a bar on top, in the middle, or at the bottom, in noise."""
    rng = np.random.default_rng(0)
    labels = np.arange(90) % 3
    images = rng.integers(0, 80, (90, 18, 18))
    for image, label in zip(images, labels, strict=True):
        image[3 + 5 * label : 6 + 5 * label, 2:16] += 150
    np.savez(tmp_path / "bars.npz", x=images.astype(np.uint8), y=labels)
    return f"npz:{tmp_path / 'bars.npz'}"


def test_compare_routing(bars: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    compare = example("compare_routing")
    out = tmp_path / "runs"
    compare.main(["--data", bars, "--epochs", "2", "--seeds", "0", "1", "--out", str(out), *SMALL])
    printed = capsys.readouterr().out

    names = ["no routing", *(f"{n} over {axis}" for n in (1, 2, 3, 4) for axis in ("outputs", "inputs"))]
    runs = sorted(folder.name for folder in out.iterdir() if folder.is_dir())
    assert runs == sorted(f"{name.replace(' ', '-')}-seed{seed}" for name in names for seed in (0, 1))
    for name in names:
        percent = []
        for seed in (0, 1):
            folder = out / f"{name.replace(' ', '-')}-seed{seed}"
            config = read_config(folder / "config.json")
            iterations, _, axis = ("0 over outputs" if name == "no routing" else name).split()
            fields = flat(config.fields)
            assert (fields["num_iterations"], fields["softmax_over"]) == (int(iterations), axis)
            assert (fields["seed"], fields["epochs"], fields["conv_channels"]) == (seed, 2, 8)
            percent.append(100 * json.loads((folder / "summary.json").read_text())["test"]["best"]["accuracy"])
        (line,) = [line for line in printed.splitlines() if line.startswith(name + " ")]
        assert f" {statistics.mean(percent):.2f} ± {statistics.stdev(percent):.2f} " in line
    assert (out / "curves.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--preset", "sabor2017"], 'did you mean "sabour2017"?'),
        (["--preset", "baseline-cnn"], 'there is no field of baseline-cnn "num_iterations"'),
        (["--iterations", "1", "-1"], "num_iterations must be 0 to 1000, got -1"),
        (["--set", "conv_chanels=8"], 'did you mean "conv_channels"?'),
        (["--set", "conv_channels"], "write FIELD=VALUE instead of 'conv_channels'"),
        (["--data", "digit"], 'did you mean "digits"?'),
    ],
)
def test_compare_routing_refuses_in_a_sentence(
    arguments: list[str], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        example("compare_routing").main(["--out", str(tmp_path / "runs"), *arguments])
    assert caught.value.code == 2
    assert said in capsys.readouterr().err
    assert not (tmp_path / "runs").exists()


# ---- capsule_head


def test_capsule_head_on_timm(timm_stub: None, capsys: pytest.CaptureFixture[str]) -> None:
    example("capsule_head").main(["--backbone", "wide", "--pretrained", "--freeze", "--epochs", "1", "--images", "64"])
    assert "feature map (6, 14, 14)" in capsys.readouterr().out


# ---- stacked_capsules


def test_stacked_capsules_are_a_preset() -> None:
    load_plugin(EXAMPLES / "stacked_capsules.py")
    assert [layer["num_capsules"] for layer in get_preset("stacked").network["layers"]] == [32, 16, 16, None]
    assert [layer.size for layer in create_model("stacked").layers] == [
        (288, 8, 32, 8),
        (32, 8, 16, 8),
        (16, 8, 16, 8),
        (16, 8, 10, 16),
    ]


# ---- own_routing


def test_own_routing_by_loops() -> None:
    """The equations of its description, number by number."""
    module = example("own_routing")
    poses, weight = torch.randn(2, 3, 6), torch.randn(3, 4, 5, 6)
    capsules, _, coupling = module.SelfAttentionRouting(2.0)(DenseVotes(poses, weight), return_coupling=True)
    for b in range(2):
        votes = [[weight[i, j] @ poses[b, i] for j in range(4)] for i in range(3)]
        logits = torch.tensor(
            [
                [sum(float(votes[i][j] @ votes[k][j]) for k in range(3)) / (2 * 5**0.5) for j in range(4)]
                for i in range(3)
            ]
        )
        c = logits.exp() / logits.exp().sum(1, keepdim=True)
        assert torch.allclose(coupling[b], c, atol=1e-5)
        for j in range(4):
            s = torch.stack([c[i, j] * votes[i][j] for i in range(3)]).sum(0)
            assert torch.allclose(capsules[b, j], (1 - torch.exp(-s.norm())) * s / s.norm(), atol=1e-5)


# ---- own_images


def test_own_images(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    images = example("own_images")
    out = tmp_path / "first"
    images.main(["--number", "12", "--epochs", "1", "--out", str(out)])
    printed = capsys.readouterr().out
    assert sorted(folder.name for folder in (out / "shapes").iterdir()) == list(images.SHAPES)
    assert re.search(r"test accuracy [\d.]+ %", printed)
    lines = re.findall(r"(\S+\.png): (\w+), its capsule (0\.\d\d) long", printed)
    assert [Path(file).parent.name for file, _, _ in lines] == list(images.SHAPES)
    assert {word for _, word, _ in lines} <= set(images.SHAPES)

    file = out / "shapes" / "square" / "003.png"
    again = ["--epochs", "1", "--out", str(tmp_path / "second"), "--size", "20", "--predict", str(file)]
    images.main([str(out / "shapes"), *again])
    assert f"{file}: " in capsys.readouterr().out
    assert read_config(tmp_path / "second" / "run" / "config.json").image_size == 20


def test_own_images_says_what_is_wrong(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        example("own_images").main([str(tmp_path / "nowhere"), "--out", str(tmp_path / "out")])
    assert caught.value.code == 2
    assert "there is no folder" in capsys.readouterr().err


# ---- multi_label


def test_multi_label_targets_say_what_is_in_the_image() -> None:
    """Digits that show their class: a square of that grey."""
    labels = torch.arange(10)
    grey = (20 * (labels + 1)).to(torch.uint8)
    digits = ImageSet(grey[:, None, None, None].expand(-1, 1, 28, 28).contiguous(), labels)
    images, targets = example("multi_label").compose(digits, 200, seed=0)
    for image, target in zip(images, targets, strict=True):
        halves = {round(float(image[0, 0, x]) * 255) for x in (0, 55)} - {0}
        assert halves == {20 * (int(j) + 1) for j in target.nonzero()}
    assert set(targets.sum(1).tolist()) == {0, 1, 2}


def test_animate_capsules(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from PIL import Image

    file = tmp_path / "new.gif"
    example("animate_capsules").main(["--classes", "3", "7", "--components", "1", "--out", str(file)])
    assert capsys.readouterr().out.startswith(f"wrote {file}: 20 frames, ")
    with Image.open(file) as animation:
        frames = [np.asarray(animation.convert("L")) for _ in range(animation.n_frames) if animation.seek(_) is None]
    assert 10 < len(frames) <= 20  # the same picture twice is kept once
    digits, decoded = ([frame[rows] for frame in frames] for rows in (slice(0, 76), slice(84, 160)))
    assert all((each == digits[0]).all() for each in digits)
    assert not (decoded[0] == decoded[5]).all()


# ---- routing_pictures


def test_routing_pictures(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    module = example("routing_pictures")
    module.main(["--out", str(tmp_path)])
    assert {path.name for path in tmp_path.iterdir()} == {"squash.png", "routing-rounds.png", "routings.png"}
    printed = capsys.readouterr().out
    routed = module.route_by_all(module.make_votes())
    for name in routed:  # each but uniform coupling couples the inputs that agree more strongly
        (own,) = re.findall(rf"^{name} +coupling of the inputs that agree (\S+),", printed, re.MULTILINE)
        assert float(own) == 0.5 if name == "uniform" else float(own) > 0.6
    assert (routed["em"].coupling > 0.9).float().mean() > 0.4


# ---- viewpoints; its images have tests of their own


def test_viewpoints(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    module = example("viewpoints")
    monkeypatch.setattr(module, "_render", lambda _: np.zeros((module._VIEWS, 48, 48), np.uint8))
    module.main(["--data-dir", str(tmp_path), "--out", str(tmp_path / "sheet.png")])
    assert capsys.readouterr().out == f"wrote {tmp_path / 'sheet.png'}: 50 of 16,200 images\n"
    assert (tmp_path / "sheet.png").is_file()


def test_own_study_is_the_one_on_its_page_and_its_rows_can_be_run() -> None:
    page = (EXAMPLES.parent / "docs" / "a-study.md").read_text(encoding="utf-8")
    (block,) = re.findall(r"^```python\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
    assert set(block.splitlines()) <= set((EXAMPLES / "own_study.py").read_text(encoding="utf-8").splitlines())
    study = example("own_study")
    splits = load_dataset("stripes")
    assert splits.test.images.shape == (200, 1, 28, 28)
    rates = {(row.config(0).recipe.learning_rate, row.name[-1]) for row in study.TABLE.rows}
    assert rates == {(1e-3, "1"), (4e-3, "4")}
    assert all(row.config(1).data == "stripes" for row in study.TABLE.rows)
