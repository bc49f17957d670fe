import numpy as np
import pytest
import torch

from torchcaps.analysis import Detector, attack, detect, distance_ratios, evasion, fit_detector, predict
from torchcaps.datasets import ImageSet
from torchcaps.errors import InputError


def test_limits_are_what_a_twentieth_of_each_class_passes(model, images: ImageSet) -> None:
    found = predict(model, images.images)
    pixels = images.images.float().numpy() / 255
    distances = np.sqrt(np.square(found.reconstruction - pixels).reshape(120, -1).sum(1))
    detector = fit_detector(model, images)
    counts = np.bincount(found.classes, minlength=4)
    assert max(counts) >= 20 > min(counts)  # both rules are seen
    for j in range(4):
        mine = distances[found.classes == j] if counts[j] >= 20 else distances
        assert detector.limits[j] == pytest.approx(np.quantile(mine, 0.95), rel=1e-4)
    ratios, classes = distance_ratios(model, images.images, detector)
    assert (classes == found.classes).all()
    assert ratios == pytest.approx(distances / np.array(detector.limits)[classes], rel=1e-4)
    assert 0 < (ratios > 1).mean() < 0.1
    assert (detector.measure, detector.num_images) == ("reconstruction", 120)


def test_a_network_without_decoder_goes_by_its_highest_score(cnn, images: ImageSet) -> None:
    detector = fit_detector(cnn, images)
    assert detector.measure == "score"
    ratios, classes = distance_ratios(cnn, images.images, detector)
    lacking = 1 - predict(cnn, images.images).scores.max(1)
    assert ratios == pytest.approx(lacking / np.array(detector.limits)[classes], rel=1e-4)
    with pytest.raises(InputError, match="a distance to the reconstruction needs a decoder"):
        fit_detector(cnn, images, measure="reconstruction")
    with pytest.raises(InputError, match="the detector has 2 classes, but the network 4"):
        distance_ratios(cnn, images.images, Detector("score", (1.0, 1.0), 9))


def test_the_attack_that_knows_the_detector(model, images: ImageSet) -> None:
    detector = fit_detector(model, images)
    given = images.select((torch.from_numpy(distance_ratios(model, images.images, detector)[1]) == 0).nonzero()[:, 0])
    labels = torch.zeros(len(given), dtype=torch.int64)
    changed, plain = (
        attack(model, given.images, labels, 0.2, goal=goal, steps=30, seed=0)
        for goal in (evasion(model, detector), "scores")
    )
    assert (changed - given.images / 255).abs().max() <= 0.2 + 1e-6
    ratios, classes = distance_ratios(model, changed, detector)
    plain, others = distance_ratios(model, plain, detector)
    assert (classes != 0).mean() >= (others != 0).mean() > 0.5
    both = (classes != 0) & (others != 0)
    assert (ratios[both] < plain[both]).all()


def test_what_is_found(model, images: ImageSet, make_images) -> None:
    detector = fit_detector(model, images)
    noise = ImageSet(255 - make_images(50) // 9, torch.zeros(50, dtype=torch.int64))
    said: list[str] = []
    options = {"others": {"noise": noise}, "epsilons": (0.3,), "steps": 2, "progress": said.append}
    result = detect(model, images, detector, **options)
    kinds = [f"{name}, ε = 0.3" for name in ("FGSM", "PGD", "adaptive PGD")]
    assert [each.kind for each in result.found] == ["test images", "noise", *kinds] == ["test images", "noise", *said]
    limits, others = result.tables()
    assert limits.rows[0] == ["Limits", "of 120 validation images"]
    assert [row[0] for row in others.rows] == ["noise", *kinds]
    assert [each["undetected"] for each in result.to_dict()["found"]] == [each.undetected for each in result.found]
    clean, other, *attacks = result.found
    ratios, right = distance_ratios(model, images.images, detector)
    assert (clean.num_images, clean.fooled, clean.detected) == (120, 120, int((ratios > 1).sum()))
    assert clean.auroc == 0.5
    there, _ = distance_ratios(model, noise.images, detector)
    assert other.detected == int((there > 1).sum())
    wins = (there[:, None] > ratios).mean() + (there[:, None] == ratios).mean() / 2
    assert other.auroc == pytest.approx(wins)
    for each in attacks:
        assert 0 <= each.detected <= each.fooled <= each.num_images == 120
        assert each.undetected == (each.fooled - each.detected) / 120
    judged = ImageSet(images.images, torch.from_numpy(right))
    nobody = detect(model, judged, detector, epsilons=(0.0,), steps=1).found[1]
    assert (nobody.fooled, nobody.auroc, nobody.undetected) == (0, None, 0)
