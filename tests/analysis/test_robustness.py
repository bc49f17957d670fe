"""Rotations and attacks: by hand, against gradients taken plainly, as curves of accuracy, and in a figure."""

import numpy as np
import pytest
import torch

from own_parts import register
from support import assert_close, assert_differs
from torchcaps.analysis import Robustness, RobustnessCurve, accuracy_curve, attack, evaluate
from torchcaps.analysis.robustness import goal_of, rotate
from torchcaps.datasets import ImageSet
from torchcaps.errors import InputError
from torchcaps.models import create_model


@pytest.fixture(params=["capsules", "cnn"])
def network(request, make_model, cnn):
    return make_model() if request.param == "capsules" else cnn


def test_quarter_turns_move_pixels_exactly() -> None:
    for size in (9, 6):
        images = torch.rand(2, 3, size, size)
        assert_close(rotate(images, 0), images, 1e-5)
        assert_close(rotate(images, 90), images.rot90(1, (2, 3)), 1e-5)  # counter-clockwise, as rot90 has it
        assert_close(rotate(images, -180), images.flip(2, 3), 1e-5)


def test_a_turn_keeps_distances_in_images_that_are_not_square_and_brings_zeros_in() -> None:
    image = torch.zeros(1, 1, 21, 41)
    image[0, 0, 10, 26] = 1  # six pixels to the right of the centre
    above = torch.zeros(1, 1, 21, 41)
    above[0, 0, 4, 20] = 1
    assert_close(rotate(image, 90), above, 1e-4)
    turned = rotate(torch.ones(1, 1, 20, 20), 45)[0, 0]
    assert_close(turned[[0, 19, 10], [0, 0, 10]], [0.0, 0.0, 1.0])


def test_fgsm_moves_every_pixel_along_the_gradient(network, images: ImageSet) -> None:
    pixels = images.images.float().div(255) * 0.5 + 0.25
    network.eval()
    variable = pixels.clone().requires_grad_()
    output = network(variable, network.decoder_targets(images.labels))
    network.loss(output, variable, images.labels).total.backward()
    assert_close(attack(network, pixels, images.labels, 0.1), pixels + 0.1 * variable.grad.sign(), 1e-6)


def test_fgsm_by_hand() -> None:
    """A network of one dense layer: its logit of class j is the pixel j."""
    model = create_model("baseline-cnn", (1, 3, 1), 3, channels=(1,), kernel=1, hidden=(), dropout=0.0).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
        model.convs[0].weight.fill_(1)
        model.classify.weight.copy_(torch.eye(3))
    image, label = torch.tensor([0.5, 0.4, 0.05]).view(1, 1, 3, 1), torch.tensor([0])
    assert_close(attack(model, image, label, 0.1).flatten(), [0.4, 0.5, 0.15])  # the right pixel down, the others up
    assert_close(attack(model, image, label, 0.1, goal="scores").flatten(), [0.4, 0.5, 0.05])  # only the best wrong
    bright = attack(model, torch.tensor([0.0, 0.95, 1.0]).view(1, 1, 3, 1), label, 0.1).flatten()
    assert_close(bright, [0.0, 1.0, 1.0])  # pixels stay pixels


@pytest.mark.parametrize("goal", ["loss", "scores"])
def test_attacks_stay_within_epsilon_and_go_further_in_many_steps(network, images: ImageSet, goal) -> None:
    pixels, labels, follow = images.images.float() / 255, images.labels, goal_of(network, goal)
    once, often = (attack(network, pixels, labels, 0.1, goal=goal, **many) for many in ({}, {"steps": 20, "seed": 0}))
    for changed in (once, often):
        assert (changed - pixels).abs().max() <= 0.1 + 1e-6
        assert 0 <= changed.min() <= changed.max() <= 1
    network.eval()
    assert follow(pixels, labels)[0] < follow(once, labels)[0] < follow(often, labels)[0]


def test_an_attack_leaves_the_network_as_it_was(network, images: ImageSet) -> None:
    network.train()
    frozen, *learned = network.parameters()
    frozen.requires_grad_(False)
    before = [tensor.clone() for tensor in network.state_dict().values()]
    accuracy_curve(network, images, "pgd", (0.1,), steps=2)
    assert all(module.training for module in network.modules())
    assert [each.requires_grad for each in (frozen, *learned)] == [False] + [True] * len(learned)
    assert all(parameter.grad is None for parameter in network.parameters())
    assert all(map(torch.equal, network.state_dict().values(), before))


def test_accuracy_is_that_of_the_changed_images(network, images: ImageSet) -> None:
    given = images.images, images.labels, 0.3
    first, again, other = (attack(network, *given, steps=3, seed=seed) for seed in (5, 5, 1))
    assert torch.equal(first, again)
    assert_differs(first, other)
    upside_down = images.images.flip(2, 3) / 255
    for kind, strength, changed in (
        ("rotation", 180, upside_down),
        ("fgsm", 0.3, attack(network, *given)),
        ("pgd", 0.3, first),
    ):
        curve = accuracy_curve(network, images, kind, (0, strength), steps=3, seed=5)
        assert (curve.kind, curve.strengths, curve.num_images) == (kind, (0.0, strength), 120)
        with torch.no_grad():
            wanted = network.eval()(changed).lengths.argmax(-1) == images.labels
        assert curve.accuracy == (evaluate(network, images).accuracy, wanted.double().mean().item())


def test_where_the_margin_loss_is_flat_only_the_scores_show_the_way(make_model, make_images, monkeypatch) -> None:
    """An image that is classified with enough margin costs nothing, and its gradient is zero."""
    model = make_model(decoder=False, m_plus=1e-6, m_minus=1 - 1e-6)
    pixels, labels = make_images(6).float() / 255, torch.arange(6) % 4
    assert torch.equal(attack(model, pixels, labels, 0.1), pixels)
    assert_differs(attack(model, pixels, labels, 0.1, goal="scores"), pixels)
    register(monkeypatch)  # of a routing with activations, these are the scores
    assert_differs(attack(make_model(routing="active"), pixels, labels, 0.1, goal="scores"), pixels)


def test_bad_input(make_model, images: ImageSet) -> None:
    one, two = make_model(), make_model(objects=2)
    given = images.images, images.labels
    for message, call in (
        ("at least one angle", lambda: accuracy_curve(one, images, "rotation", ())),
        ("angle must be .*, got nan", lambda: accuracy_curve(one, images, "rotation", (float("nan"),))),
        ("epsilon must be 0 to 1", lambda: accuracy_curve(one, images, "fgsm", (1.5,))),
        ("kind must be", lambda: accuracy_curve(one, images, "cw")),
        ("goal must be one of loss", lambda: attack(one, *given, 0.1, goal="score")),
        ("steps must be 1 to 10000", lambda: attack(one, *given, 0.1, steps=10**12)),
        ("seed must be 0 to", lambda: attack(one, *given, 0.1, seed=-1)),
        ("images must have shape", lambda: attack(one, images.images[:, :, 1:], images.labels, 0.1)),
        ("one object, but this network finds 2", lambda: accuracy_curve(two, images, "rotation")),
        ("one object, but this network finds 2", lambda: attack(two, *given, 0.1)),
    ):
        with pytest.raises(InputError, match=message):
            call()


def test_the_figure_has_a_panel_a_kind_and_a_line_a_network(words) -> None:
    def curves(shift: float) -> list[RobustnessCurve]:
        turned = RobustnessCurve("rotation", (-30.0, 0.0, 30.0), (0.5 + shift, 0.9, 0.6), 10)
        return [turned, RobustnessCurve("pgd-scores", (0.0, 0.1), (0.9, 0.2 + shift), 10)]

    figure = Robustness({"capsules": [*curves(0), *curves(0.2)], "$cnn$": curves(0.1)[:1]}, {"both": ""}).figures()[""]
    panels = [axes for axes in figure.axes if axes.axison]
    assert [len(panel.lines) for panel in panels] == [2, 1]
    np.testing.assert_allclose(panels[0].lines[0].get_ydata(), [60, 90, 60])  # the mean of two seeds
    assert len(panels[0].collections) == 1  # its band
    assert {"$cnn$", "Rotation", "PGD on the scores", "degrees", "both"} <= set(words(figure))
    two = Robustness({"a": curves(0), "b": curves(0.1)}, {"a": "ten images", "b": "other images"})
    assert {"a: ten images\nb: other images"} <= set(words(two.figures()[""]))
    assert two.tables()[2].rows == [["0", "90.00 %", "90.00 %"], ["0.1", "20.00 %", "30.00 %"]]
    unequal = [curves(0)[0], RobustnessCurve("rotation", (0.0, 0.2), (1.0, 0.5), 4)]
    with pytest.raises(InputError, match="same strengths"):
        Robustness({"a": unequal}, {}).figures()
