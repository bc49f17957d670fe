"""The public names: they resolve, say what they are, and keep to the shapes in their signatures."""

import inspect
import subprocess
import sys
from pathlib import Path

import pytest

import torchcaps
import torchcaps.models
import torchcaps.nn


def test_methods_are_described() -> None:
    """Classes and functions: ruff asks for it; that names resolve: test_api_pages.py."""
    for value in (getattr(package, name) for package in (torchcaps.nn, torchcaps.models) for name in package.__all__):
        for name, method in vars(value).items() if inspect.isclass(value) else ():
            if inspect.isfunction(method) and not name.startswith("_") and name != "forward":
                assert inspect.getdoc(method), f"{value.__name__}.{name}"


ROOT = Path(__file__).parents[1]
CHECKED = "torchcaps.ops,torchcaps.nn,torchcaps.models.capsnet,torchcaps.models.cnn,lenient.check"
PRESETS = "sabour2017-code keras-tutorial torch-notebook compact-deep efficient-capsnet-mnist hinton2018-code vb2020 "
PRESETS += "hahn2019-smallnet aff-capsnet sabour2017-multimnist baseline-cnn cnn-pooled"
EXERCISE = [
    *(f"tests/models/test_presets.py::test_a_preset_keeps_the_contract[{preset}]" for preset in PRESETS.split()),
    "tests/nn/test_dynamic_routing.py::test_the_loop_is_the_equations_for_every_option",
    "tests/nn/test_dynamic_routing.py::test_float32_is_as_exact_as_the_loop",  # both paths, with gradients
    "tests/nn/test_routing.py::test_numbers_are_those_of_the_equations",
]


@pytest.mark.slow
def test_shapes_are_those_of_the_signatures(tmp_path: Path) -> None:
    """Presets and routings, tested once more while each annotation is checked; one call that does not fit is seen."""
    wrong = tmp_path / "test_wrong.py"
    wrong.write_text("import torch, torchcaps.ops.losses as l\ndef test_it(): l._reduce(torch.rand(2, 3), 'none')\n")
    options = ["-n0", "-c", "pyproject.toml", f"--jaxtyping-packages={CHECKED}"]
    command = [sys.executable, "-m", "pytest", *options, *EXERCISE, str(wrong)]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    failed = [line for line in run.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))]
    assert len(failed) == 1, run.stdout[-3000:]
    assert "test_it - jaxtyping.TypeCheckError" in failed[0]


def test_an_earlier_name_is_answered_with_the_present_one() -> None:
    with pytest.raises(ImportError, match=r"datasets\.PixelSet is now called PatchSet"):
        from torchcaps.datasets import PixelSet  # type: ignore[attr-defined]  # noqa: F401
