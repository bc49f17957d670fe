"""Networks with slots as ONNX files and torch.export programs: masks and the redrawn image, as of the network."""

import functools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from support import assert_raises
from torchcaps import create_model
from torchcaps.analysis import predict, predict_mask
from torchcaps.analysis.answers import AnswerOptions, Classifier
from torchcaps.analysis.mask_answers import answer_files, output_files
from torchcaps.errors import InputError
from torchcaps.export import Description, OnnxModel, export_onnx, export_program, graphs

for package in ("onnx", "onnxruntime", "onnxscript"):
    pytest.importorskip(package, reason="the extra torchcaps[export] is not installed")

SHAPE = (3, 12, 15)
DENSE = {"name": "dense", "transform": "shared", "capsule_dim": 8, "routing": "em"}
NETWORKS: dict[str, dict[str, Any]] = {
    "noise": {"start_from": "noise"},
    "queries, and another number of slots": {"num_capsules": 6},
    "mixture": {"layers": ("slot-mixture",)},
    "capsule layer": {"layers": (DENSE,)},
}
SMALL = {"stack_channels": (6, 6, 6), "broadcast_channels": (8, 8), "feature_width": 8, "num_iterations": 2}
ABOUT = Description(in_shape=SHAPE, class_names=("cat", "dog", "cow"), task="objects")


@pytest.mark.slow
@pytest.mark.parametrize("name", NETWORKS)
def test_files_have_the_masks_and_the_image_of_the_network(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setattr(graphs, "trace", functools.cache(graphs.trace))  # one trace for both files
    torch.manual_seed(0)
    network = create_model("slots-small", SHAPE, 3, **SMALL | NETWORKS[name])
    agreements = export_program(network, tmp_path / "m.pt2", ABOUT), export_onnx(network, tmp_path / "m.onnx", ABOUT)
    assert all(max(each.lengths, each.reconstruction or 1) < 1e-5 for each in agreements)
    images = np.random.default_rng(0).integers(0, 256, (5, *SHAPE), dtype=np.uint8)
    exported, own = OnnxModel(tmp_path / "m.onnx"), predict(network, images)
    answer = exported(images)
    np.testing.assert_allclose(answer.scores, own.scores, atol=1e-5)
    np.testing.assert_allclose(answer.reconstruction, own.reconstruction, atol=1e-5)
    np.testing.assert_array_equal(answer.classes, own.classes)
    assert (answer.score_name, answer.caveats) == (own.score_name, own.caveats) == ("share", [()] * 5)


@pytest.mark.slow
def test_a_file_answers_image_files_as_the_network_does(tmp_path: Path) -> None:
    torch.manual_seed(0)
    network = create_model("slots-small", SHAPE, 3, **SMALL, num_capsules=6)
    export_onnx(network, tmp_path / "m.onnx", ABOUT)
    exported = OnnxModel(tmp_path / "m.onnx")
    pixels = np.random.default_rng(0).integers(0, 256, (*SHAPE[1:], 3), dtype=np.uint8)
    large = np.tile(pixels, (2, 2, 1))
    for file, each in {"a": pixels, "large": large}.items():
        Image.fromarray(each).save(tmp_path / f"{file}.png")
    paths = [tmp_path / "a.png", tmp_path / "large.png"]
    answers = []
    for number, classifier in enumerate((Classifier(ABOUT, exported), Classifier(ABOUT, exported, network))):
        out = tmp_path / str(number)
        out.mkdir()
        options = AnswerOptions(out=out, targets=output_files(out, {path: Path(path.name) for path in paths}))
        answer, damaged = answer_files(classifier, paths, options)
        assert answer is not None
        assert answer.class_names == ("0", "1", "2", "3", "4", "5"), "numbers of slots, not names of the data"
        assert len(damaged) == 1, "slots of two windows do not match, so a larger image is refused"
        assert "12, 15)" in damaged[0]
        answers.append((answer.to_dict(), np.array(Image.open(tmp_path / str(number) / "a.png"))))
    np.testing.assert_array_equal(answers[0][1], answers[1][1])
    assert answers[0][0] == answers[1][0]
    np.testing.assert_array_equal(answers[0][1], predict_mask(network, pixels.transpose(2, 0, 1)))
    assert_raises(InputError, exported, large.transpose(2, 0, 1)[None], say="images must have shape")
