"""``export`` and ``share``: files that run elsewhere, folders to pass on, repositories of the hub."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from hub_stub import hub_stub
from support import holds
from torchcaps.export import Agreement, OnnxModel, graphs
from torchcaps.training import load_run

Cli = Callable[..., Any]


def assert_one_sentence(result: Any, said: str) -> None:
    assert (result.code, result.out, result.err.count("\n")) == (2, "", 1), result
    assert result.err.startswith("Error: ")
    assert said in result.err


def test_onnx_by_default(run_folder: Path, onnx_file: Path) -> None:
    run = load_run(run_folder)
    images = run.dataset().test.images[:20]
    with torch.no_grad():
        wanted = run.model(images / 255)
    model = OnnxModel(onnx_file)
    said = model(images.numpy())
    np.testing.assert_allclose(said.lengths, wanted.lengths, atol=1e-5)
    np.testing.assert_allclose(said.reconstruction, wanted.reconstruction, atol=1e-5)
    assert (model.description.preset, model.description.class_names) == ("sabour2017", run.class_names)
    assert [path.name for path in onnx_file.parent.iterdir()] == ["model.onnx"]


def test_a_torch_program(cli: Cli, run_folder: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(run_folder, tmp_path / "copy")
    result = cli("export", copy, "--format", "torch")
    assert (result.code, result.err) == (0, "")
    compared, wrote = result.out.splitlines()
    assert compared.startswith("Compared with the network on the first 32 test images of digits: largest difference")
    assert compared.endswith("in batches of 1 and 32")
    size = (copy / "model.pt2").stat().st_size
    assert wrote == f"wrote {copy / 'model.pt2'} ({size / 2**20:.1f} MiB)"
    images = torch.rand(3, 1, 28, 28)
    lengths, _ = torch.export.load(copy / "model.pt2").module()(images)
    torch.testing.assert_close(lengths, load_run(copy).model(images).lengths, atol=1e-5, rtol=0)


@pytest.fixture
def written(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """What a file would have been written from; the writing itself, which takes seconds, is left out."""
    calls: list[tuple[Any, ...]] = []

    def write(model: Any, path: Path, *more: Any) -> Agreement:
        calls.append((model, path, *more))
        path.touch()
        return Agreement(32, (1, 32), 1e-7, None)

    monkeypatch.setattr("torchcaps.export.export_onnx", write)
    monkeypatch.setattr("torchcaps.export.export_program", write)
    return calls


@pytest.mark.parametrize("which", ["best", "last"])
def test_the_epoch_asked_for(cli: Cli, run_folder: Path, written: list[tuple[Any, ...]], which: str) -> None:
    assert cli("export", run_folder, "--which", which, "--out", "x.onnx").code == 0
    wanted = load_run(run_folder, "best" if which == "best" else "last").model
    torch.testing.assert_close(written[-1][0].backbone.conv.weight, wanted.backbone.conv.weight, atol=0, rtol=0)


def test_where_files_go(cli: Cli, run_folder: Path, written: list[tuple[Any, ...]], tmp_path: Path) -> None:
    copy = shutil.copytree(run_folder, tmp_path / "copy")
    for options in ([], ["--format", "torch"], ["--out", "here.onnx"]):
        assert cli("export", copy, *options).code == 0
    paths = [call[1] for call in written]
    assert paths == [copy / "model.onnx", copy / "model.pt2", Path("here.onnx")]


def test_without_the_data_it_is_said(cli: Cli, run_folder: Path, written: list[tuple[Any, ...]]) -> None:
    result = cli("export", run_folder / "best", "--out", "x.onnx")
    assert "Compared with the network on 32 random images (" in result.out
    assert "does not say what it was trained on" in result.out


def test_a_file_that_differs_is_not_left(
    cli: Cli, run_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(graphs, "TOLERANCE", -1.0)
    result = cli("export", run_folder, "--format", "torch", "--out", "x.pt2")
    assert_one_sentence(result, "x.pt2 was not written: its lengths would differ by ")
    assert not list(tmp_path.iterdir())


def test_a_folder_to_pass_on(cli: Cli, run_folder: Path, digit_file: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(run_folder, tmp_path / "copy")
    other = shutil.copytree(run_folder, tmp_path / "other")
    config, summary = other / "config.json", other / "summary.json"
    for file in (config, summary):
        file.write_text(file.read_text().replace('"seed": 0', '"seed": 7'))
    result = cli("export", copy, "--format", "folder", "--half", "--other-seed", other)
    assert (result.code, result.err) == (0, "")
    assert result.out.startswith(f"wrote {copy / 'pretrained'}; ")
    assert "over the seeds 0, 7" in (copy / "pretrained" / "README.md").read_text(encoding="utf-8")
    assert cli("predict", copy / "pretrained", digit_file).code == 0
    assert_one_sentence(cli("export", copy, "--format", "folder"), "there is something at")


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--half"], "--half is for --format folder; leave it out"),
        (["--format", "torch", "--other-seed", "x"], "--other-seed is for --format folder; leave it out"),
        (["--out", "model.bin"], "the file must end in .onnx, got model.bin"),
        (["--format", "torch", "--out", "model.onnx"], "the file must end in .pt2, got model.onnx"),
        (["--format", "onxx"], "'onxx' is not one of 'onnx', 'torch', 'folder'"),
        (["--format", "folder", "--other-seed", "nowhere"], "there is no configuration nowhere/config.json"),
    ],
)
def test_options_that_do_not_go_together(
    cli: Cli, run_folder: Path, tmp_path: Path, options: list[str], said: str
) -> None:
    assert_one_sentence(cli("export", run_folder, *options), said)
    assert not list(tmp_path.iterdir())


def test_a_saved_network_has_no_card_to_write(cli: Cli, run_folder: Path) -> None:
    said = "is a saved network without its training"
    assert_one_sentence(cli("export", run_folder / "best", "--format", "folder", "--out", "x"), said)
    assert_one_sentence(cli("share", run_folder / "best", "--repo", "someone/net"), said)


def test_share(cli: Cli, run_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with hub_stub() as hub:
        monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", hub.url)
        monkeypatch.setenv("HF_TOKEN", hub.token)
        result = cli("share", run_folder, "--repo", "someone/net", "--private", "--half")
        assert (result.code, result.out) == (0, f"shared at {hub.url}/someone/net\n")
        assert hub.files["someone/net"].keys() == {"config.json", "model.safetensors", "classes.json", "README.md"}
        assert hub.private == {"someone/net": True}
        monkeypatch.setenv("HF_TOKEN", "hf_wrong")
        assert_one_sentence(cli("share", run_folder, "--repo", "someone/net"), "log in with `hf auth login`")


def test_the_assertion_can_fail() -> None:
    from types import SimpleNamespace

    for code, out, err in ((0, "", "Error: x\n"), (2, "x", "Error: x\n"), (2, "", "Error: x\ny\n"), (2, "", "x\n")):
        assert not holds(assert_one_sentence, SimpleNamespace(code=code, out=out, err=err), "x")
    assert not holds(assert_one_sentence, SimpleNamespace(code=2, out="", err="Error: y\n"), "x")
    assert holds(assert_one_sentence, SimpleNamespace(code=2, out="", err="Error: x\n"), "x")
