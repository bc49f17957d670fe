"""``export`` and ``share``: files that run elsewhere, folders to pass on, repositories of the hub."""

import shutil
from pathlib import Path

import numpy as np
import pytest
import torch

from cli_support import Cli
from hub_stub import hub_stub
from torchcaps.export import OnnxModel
from torchcaps.training import load_run


def test_a_torch_program(cli: Cli, run_folder: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(run_folder, tmp_path / "copy")
    compared, wrote = cli.out("export", copy, "--format", "torch").splitlines()
    assert compared.startswith("Compared with the network on the first 32 test images of digits: largest difference")
    assert compared.endswith("in batches of 1 and 32")
    assert wrote.startswith(f"wrote {copy / 'model.pt2'} (")
    images = torch.rand(3, 1, 28, 28)
    lengths, _ = torch.export.load(copy / "model.pt2").module()(images)
    torch.testing.assert_close(lengths, load_run(copy).model(images).lengths, atol=1e-5, rtol=0)


@pytest.mark.slow
def test_a_run_on_sequences(cli: Cli) -> None:
    pytest.importorskip("onnxruntime", reason="the extra torchcaps[export] is not installed")
    numbers = np.random.default_rng(0)
    x, lengths = numbers.normal(size=(40, 3, 9)), numbers.integers(2, 10, 40)
    np.savez("a.npz", x=x, y=np.arange(40) % 4, lengths=lengths)
    train = ("--data", "npz:a.npz", "--epochs", "1", "--sequence-channels", "4", "--out", "run", "--no-figures")
    assert cli("train", "sequences", *train).code == 0
    cli.out("export", "run")
    exported, network = OnnxModel("run/model.onnx"), load_run("run").model
    rows = torch.full((2, 3, 1, 9), torch.nan)
    rows[..., :5] = torch.randn(2, 3, 1, 5)
    with torch.no_grad():
        wanted = network(rows).scores
    torch.testing.assert_close(torch.from_numpy(exported(rows[..., :5].numpy()).scores), wanted, atol=1e-5, rtol=0)


def test_a_folder_to_pass_on(cli: Cli, run_folder: Path, digit_file: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(run_folder, tmp_path / "copy")
    other = shutil.copytree(run_folder, tmp_path / "other")
    for file in (other / "config.json", other / "summary.json"):
        file.write_text(file.read_text().replace('"seed": 0', '"seed": 7'))
    out = cli.out("export", copy, "--format", "folder", "--half", "--other-seed", other)
    assert out.startswith(f"wrote {copy / 'pretrained'}; ")
    assert "over the seeds 0, 7" in (copy / "pretrained" / "README.md").read_text(encoding="utf-8")
    assert cli("predict", copy / "pretrained", digit_file).code == 0


def test_share(cli: Cli, run_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with hub_stub() as hub:
        monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", hub.url)
        monkeypatch.setenv("HF_TOKEN", hub.token)
        out = cli.out("share", run_folder, "--repo", "someone/net", "--private", "--half")
        assert out == f"shared at {hub.url}/someone/net\n"
        assert hub.files["someone/net"].keys() == {"config.json", "model.safetensors", "classes.json", "README.md"}
        assert hub.private == {"someone/net": True}
