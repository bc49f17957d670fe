import dataclasses
import itertools
import math
from typing import Any

import numpy as np
import pytest
import torch

from own_parts import Active, Cosine, Silent
from torchcaps import analysis, routing_rounds
from torchcaps.analysis.trace import RoutingTrace, compare_to_uniform, normalised_entropy
from torchcaps.errors import InputError
from torchcaps.models import build_network
from torchcaps.nn import ConvCapsules, DynamicRouting, SelfAttentionRouting
from torchcaps.nn.votes.competition import MapCompetition
from torchcaps.ops.memory import set_working_memory
from torchcaps.parts import describe

VARIANTS = [
    {"leaky": True},
    {"softmax_over": "inputs", "leaky": True, "capsule_bias": True},
    {"learn_prior": True, "num_iterations": 2},
    {"num_iterations": 1, "num_classes": 7, "capsule_dim": 3},
    {"grouping": "raster", "stop_gradient": True, "softmax_over": "inputs"},
]


@pytest.mark.parametrize("variant", VARIANTS)
def test_each_iteration_is_that_of_the_votes(make_model, make_images, variant):
    model, images = make_model(**variant), make_images(5)
    layer, routing = model.class_capsules, model.class_capsules.routing
    if variant.get("learn_prior"):
        torch.nn.init.normal_(routing.prior)
    trace = analysis.trace_routing(model, images)
    given: Any = {name: getattr(routing, name) for name in ("softmax_over", "leaky", "bias", "prior")}
    with torch.no_grad():
        votes = torch.einsum("ijdk,bik->bijd", layer.transform.matrices, model.primary(images / 255).poses)
        rounds = routing_rounds(votes, routing.num_iterations, **given)
    for name in ("logits", "coupling", "weighted_sum", "capsules", "agreement"):
        wanted = torch.stack([getattr(each, name) for each in rounds])
        np.testing.assert_allclose(getattr(trace, name), wanted, atol=1e-5)
    np.testing.assert_allclose(trace.scores, np.linalg.norm(trace.capsules, axis=3), atol=1e-3)
    np.testing.assert_allclose(trace.mean_agreement, np.abs(trace.agreement).mean((2, 3)), rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(trace.images, images / 255)
    if not variant.get("learn_prior"):
        np.testing.assert_allclose(trace.coupling[0], trace.uniform, rtol=1e-5)
        np.testing.assert_allclose(trace.entropy[0], 1, rtol=1e-5)
    assert ((trace.entropy >= 0) & (trace.entropy < 1 + 1e-5)).all()
    if len(trace.entropy) > 1:
        assert (trace.entropy[-1] < trace.entropy[0] - 1e-4).all()


def test_entropy_by_hand():
    one_output, one_input = torch.zeros(2, 6, 3), torch.zeros(2, 6, 3)
    one_output[:, :, 1], one_input[:, 4, :] = 1, 1
    half, even = torch.tensor([0.5, 0.5, 0, 0]).expand(1, 6, 4), torch.full((1, 6, 3), 1 / 4)
    leaky, inputs = DynamicRouting(leaky=True), DynamicRouting(softmax_over="inputs")
    # self-attention adds a bias to what its softmax gives: coupling may be negative and sum to anything
    biased, none = torch.tensor([1.5, 1.5, -0.5, 0]).expand(1, 6, 4), torch.full((1, 6, 4), -0.5)
    for coupling, routing, entropy in (
        (one_output, DynamicRouting(), 0),
        (one_output, leaky, 0),
        (one_input, inputs, 0),
        (one_input, DynamicRouting(softmax_over="inputs", leaky=True), 0),
        (half, DynamicRouting(), 0.5),  # ln 2 / ln 4
        (torch.zeros(1, 6, 3), leaky, 0),  # all to none of the above, which competes
        (even, leaky, 1),
        (biased, SelfAttentionRouting(), 0.5),
        (none, SelfAttentionRouting(), 0),
        (torch.ones(2, 1, 3), inputs, 0),  # a single competitor has no choice
    ):
        np.testing.assert_allclose(normalised_entropy(coupling, routing), entropy, rtol=1e-6, atol=1e-6)
    layer = ConvCapsules(1, 4, 2, 4, layer_kernel=1)  # each capsule stands in one window: two types compete
    competition = MapCompetition(layer.window_capsules((1, 2, 2)), 5)
    for coupling, entropy in ((torch.tensor([1.0, 0.0]).expand(4, 1, 2), 0), (torch.full((4, 1, 2), 0.5), 1)):
        found = normalised_entropy(coupling, DynamicRouting(), competition)
        np.testing.assert_allclose(found, entropy, rtol=1e-6, atol=1e-6)


def test_statistics_are_those_of_the_trace(model, make_images):
    images = make_images(7)
    trace = analysis.trace_routing(model, images)
    set_working_memory(3.5 * model.class_capsules.transform.matrices[..., 0].numel() * 4 / 2**20)  # of three images
    parts, statistics = analysis.trace_routing(model, images), analysis.routing_statistics(model, images)
    np.testing.assert_allclose(parts.agreement, trace.agreement, atol=3e-6)  # rounding of another block
    for found in (parts, statistics):
        np.testing.assert_allclose(found.entropy, trace.entropy, rtol=1e-5)
        np.testing.assert_allclose(found.mean_agreement, trace.mean_agreement, rtol=1e-4)
        np.testing.assert_allclose(found.longest, np.linalg.norm(trace.capsules[-1], axis=2).max(0), atol=1e-5)


def hand_made(in_space=True, classes=3) -> RoutingTrace:
    """Two iterations of one image on a grid of two types, 3×4; in the second all goes to class 1 at two places."""
    coupling, lengths = np.zeros((2, 1, 24, classes), np.float32), np.zeros((2, 1, classes), np.float32)
    coupling[0] = 1 / classes
    coupling[1, 0, 0 * 12 + 2 * 4 + 1, 1] = 1  # type 0, row 2, column 1
    coupling[1, 0, 1 * 12 + 0 * 4 + 3, 1] = 1  # type 1, row 0, column 3
    lengths[1, 0, :3] = [0.3, 0.9, 0.1]
    numbers = dict.fromkeys(("logits", "agreement"), np.zeros_like(coupling))
    numbers |= dict.fromkeys(("weighted_sum", "capsules"), np.zeros((2, 1, classes, 5), np.float32))
    numbers |= dict.fromkeys(("entropy", "mean_agreement"), np.ones((2, 1), np.float32))
    numbers |= {"longest": np.float32([0, 1]), "images": np.zeros((1, 1, 8, 10)), "scores": lengths}
    about = {"grid": (2, 3, 4), "in_space": in_space, "layer": 1, "softmax_over": "outputs", "leaky": False}
    return RoutingTrace(coupling=coupling, **numbers, **about)


@pytest.mark.parametrize(
    ("coupling", "words"),
    [
        (0.1004, "0.100, uniform"),
        (0.11, "0.110, 10 % above uniform"),
        (0.08, "0.080, 20 % below uniform"),
        (0.1999, "0.200, 2.0 times uniform"),
        (0.32, "0.320, 3.2 times uniform"),
    ],
)
def test_a_coupling_is_compared_with_uniform(coupling, words):
    assert compare_to_uniform(coupling, 0.1) == words


def drawn(trace, class_names=None):
    return analysis.RoutingReport(trace, class_names).figures()[""]


def routed_by_hand(model, images, number):
    """What goes into a layer, and what its routing gives, with the coupling."""
    with torch.no_grad():
        inputs = model.eval().capsules(images / 255)[number - 1]
        routed = model.layer(number).route(inputs, return_coupling=True)
    return inputs, routed


def test_what_cannot_be_followed(cnn, make_model, make_images):
    model, silent, cosine, images = make_model(), make_model(), make_model(), make_images(2)
    silent.class_capsules.routing, cosine.class_capsules.routing = Silent(), Cosine()
    for network, given, options, message in (
        (cnn, images, {}, "needs capsules, which a BaselineCNN does not have"),
        (make_model(num_iterations=0), images, {}, "num_iterations must be 1 to 1000, got 0"),
        (model, make_images(0), {}, "at least one image"),
        (silent, images, {}, "Silent returns no coupling, so there is none to show"),
        (cosine, images, {"num_iterations": 2}, "num_iterations must be left out for Cosine: only DynamicRouting"),
        (model, images, {"layer": 2}, "layer must be 1 to 1, got 2"),
    ):
        with pytest.raises(InputError, match=message):
            analysis.routing_statistics(network, given, **options)


def test_the_figure_has_a_map_for_each_iteration_and_class_on_one_scale(words):
    trace = hand_made()
    figure = drawn(trace, ["ant", "bee", "cow"])
    image, *maps = figure.axes[0].images
    assert image.get_array().shape == (8, 10, 3)
    assert len(maps) == 2 * 3
    bee = [drawn.get_array() for drawn in maps[1::3]]  # iteration by iteration
    np.testing.assert_allclose(bee[0], 0, atol=1e-3)  # uniform
    assert [tuple(place) for place in np.argwhere(bee[1] > 0)] == [(0, 3), (2, 1)]
    np.testing.assert_allclose(bee[1].max(), (1 / 2 - 1 / 3) ** 0.5)  # mean of two types
    np.testing.assert_allclose(bee[1].min(), -((1 / 3) ** 0.5))
    np.testing.assert_allclose([drawn.get_clim() for drawn in maps], [[-((2 / 3) ** 0.5), (2 / 3) ** 0.5]] * 6)
    assert {"ant", "bee", "cow", "iteration 1", "iteration 2", "0.90", "image", "coupling"} <= set(words(figure))
    assert "not in space" in " ".join(words(drawn(hand_made(in_space=False))))
    assert any("10 longest of 40" in word for word in words(drawn(hand_made(classes=40))))
    uniform = dataclasses.replace(trace, coupling=np.full_like(trace.coupling, 1 / 3))
    bar = drawn(uniform).axes[1]
    np.testing.assert_allclose(bar.get_ylim(), (-((1 / 3) ** 0.5), (2 / 3) ** 0.5))
    assert [label.get_text() for label in bar.get_yticklabels()] == ["0", "0.33 uniform", "0.67", "1"]


def test_a_report_lists_input_capsules_and_what_says_nothing():
    trace = hand_made(classes=30)
    trace = dataclasses.replace(trace, logits=trace.logits + 0.5, agreement=trace.agreement - 0.25)
    report = analysis.RoutingReport(trace, None, "one image", (5,), trace, "one image again")
    iterations, capsule, many, note = report.tables()
    assert [row[:3] for row in iterations.rows] == [["1", "0", "0.000"], ["2", "1", "0.900"]]
    assert capsule.title == "Input capsule 5: type 0, row 1, column 1 (the 10 longest of 30 classes)"
    assert len(capsule.rows) == 2 * 10 + 1
    assert capsule.rows[0] == ["1", "0", "0.5000", "0.0333", "-0.2500", "0.0000"]
    assert capsule.rows[12][1:] == ["1", "0.5000", "0.0000", "-0.2500", "0.9000"]
    assert many.rows == [["1", "1.000", "1.0000"], ["2", "1.000", "1.0000"]]
    assert "50.0 % of the output capsules" in note.note[0]


@pytest.mark.parametrize(("compete_over", "padding"), [("types", 0), ("types-and-positions", 1)])
def test_coupling_on_a_map_is_that_of_the_windows_that_hold_a_capsule(make_deep, make_images, compete_over, padding):
    model, images = make_deep({"compete_over": compete_over, "layer_padding": padding}), make_images(3)
    trace = analysis.trace_routing(model, images, layer=1)
    layer = model.layer(1)
    inputs, routed = routed_by_hand(model, images, 1)
    windows = layer.window_capsules(inputs.grid)  # (L, I), from 1; 0 beyond the edge
    coupling = routed.coupling.unflatten(0, (3, -1))  # (B, L, I, J)
    wanted, held = torch.zeros(3, 48, 3), torch.zeros(48)
    for position, place in itertools.product(*map(range, windows.shape)):
        if windows[position, place]:
            wanted[:, windows[position, place] - 1] += coupling[:, position, place]
            held[windows[position, place] - 1] += 1
    assert held.min() >= 1
    assert held.max() > 3
    wanted = wanted if compete_over == "types-and-positions" else wanted / held[:, None]
    np.testing.assert_allclose(trace.coupling[-1], wanted, atol=1e-5)
    np.testing.assert_allclose(trace.coupling.sum(3), 1, rtol=1e-4)
    np.testing.assert_allclose(trace.coupling[0], trace.uniform, rtol=1e-4)

    with torch.no_grad():
        capsules = layer(inputs)
    assert (trace.layer, trace.grid, trace.in_space, trace.outputs) == (1, (2, 4, 6), True, "type")
    assert trace.maps.shape == (3, 3, 3, 2, 4, 6)
    np.testing.assert_allclose(trace.capsules[-1], capsules.poses, atol=1e-5)
    lengths = capsules.poses.norm(dim=2).unflatten(1, (3, -1)).mean(2)  # of each type, over its positions
    np.testing.assert_allclose(trace.scores[-1], lengths, atol=1e-3)


@pytest.mark.parametrize(
    "layer",
    [
        {"name": "conv-types", "layer_padding": "same", "layer_stride": 2},
        {"name": "deconv", "layer_kernel": 3},
    ],
    ids=str,
)
def test_coupling_of_types_is_that_of_the_outputs_that_see_a_capsule(make_deep, make_images, layer):
    model, images = make_deep(layer), make_images(3)
    trace = analysis.trace_routing(model, images, layer=1)
    inputs, routed = routed_by_hand(model, images, 1)
    on_map, number = model.layer(1), inputs.poses.shape[1]
    coupling = routed.coupling.unflatten(0, (3, -1))  # (B, L, T, J)
    wanted = torch.zeros(3, number, coupling.shape[3])
    for n in range(number):
        alone = torch.arange(number).eq(n)[None]
        sees = on_map.votes(inputs._replace(poses=inputs.poses[:1], mask=alone))[0].mask  # (L, T)
        wanted[:, n] = coupling[:, sees].mean(1)
    np.testing.assert_allclose(trace.coupling[-1], wanted, atol=1e-5)
    with torch.no_grad():
        np.testing.assert_allclose(trace.capsules[-1], on_map(inputs).poses, atol=1e-5)


def test_the_last_layer_is_followed_unless_another_is_named(make_deep, make_images):
    """A layer after a dense one has no map."""
    tree, images = describe(make_deep()), make_images(3)
    conv, dense = tree["layers"]
    model = build_network(tree | {"layers": (conv, dense | {"num_capsules": 6}, dense)}, (1, 8, 10), 4)
    for number, layer, *about in (
        (2, 2, (3, 2, 4), True, "capsule", (24, 6)),
        (3, None, (1, 1, 6), False, "class", (6, 4)),
    ):
        trace = analysis.trace_routing(model, images, layer=layer)
        assert (trace.layer, trace.grid, trace.in_space, trace.outputs, trace.coupling.shape[2:]) == (number, *about)
        _, routed = routed_by_hand(model, images, number)
        np.testing.assert_allclose(trace.coupling[-1], routed.coupling, atol=1e-5)
        np.testing.assert_allclose(trace.capsules[-1], routed.poses, atol=1e-5)


def test_entropy_over_types_and_positions_is_one_where_coupling_is_uniform(make_deep, make_images):
    """With a stride of 2, the last row and the last column of capsules are in no window."""
    model = make_deep({"compete_over": "types-and-positions", "layer_stride": 2}, leaky=True)
    statistics = analysis.routing_statistics(model, make_images(3), layer=1)
    np.testing.assert_allclose(statistics.entropy[0], 1, rtol=1e-5)
    assert (statistics.entropy[-1] < statistics.entropy[0] - 5e-5).all()
    assert (statistics.entropy > 0).all()


def test_capsules_that_say_nothing_are_counted(make_deep, make_images):
    model, images = make_deep(), make_images(5)
    for layer, share in ((1, 1 / 3), (2, 1 / 4)):
        assert analysis.routing_statistics(model, images, layer=layer).dead == 0
        model.layer(layer).transform.matrices.detach()[:, 1] = 0  # a type on the map, or a class
        assert analysis.routing_statistics(model, images, layer=layer).dead == pytest.approx(share)


def test_activations_are_the_scores_of_a_routing_that_gives_them(make_deep, make_images, words):
    model, images = make_deep(), make_images(3)
    for layer in model.layers:
        layer.routing = Active()
    trace, inner = (analysis.trace_routing(model, images, layer=layer) for layer in (2, 1))
    _, routed = routed_by_hand(model, images, 2)
    assert trace.score_name == inner.score_name == "activation"
    np.testing.assert_allclose(trace.scores[0], routed.activations, atol=1e-6)
    assert "below: its activation" in " ".join(words(drawn(trace)))
    assert (np.diff(inner.scores[0], axis=1) > 0).all()  # the last type the most
    statistics = analysis.routing_statistics(model, images, layer=1)
    assert statistics.longest.shape == (3 * 2 * 4,)
    assert statistics.longest.max() <= 1  # activations, where poses are of length 3


def test_where_nothing_competes_every_coupling_of_one_is_uniform(make_model, make_images, words):
    trace = analysis.trace_routing(make_model(routing="hvc"), make_images(2))
    assert (trace.softmax_over, trace.uniform) == (None, 1)
    np.testing.assert_allclose(trace.entropy, 1, rtol=1e-6)
    assert {"0", "1 uniform", "2"} <= set(words(drawn(trace)))


def test_what_lies_beyond_the_edge_of_a_map_is_not_measured(make_deep, make_images):
    """Votes of padding are zero: their coupling stays uniform and their logits do not change."""
    model, images = make_deep({"layer_padding": 2}).eval(), make_images(3)
    statistics = analysis.routing_statistics(model, images, layer=1)
    layer, grid = model.layer(1), model.flow[0].grid
    with torch.inference_mode():
        votes, activations = layer.votes(model.capsules(images / 255)[0])
        rounds = layer.routing.rounds(votes, activations)
    there = layer.window_capsules(grid) > 0  # (L, I)
    assert not there.all()
    for t, each in enumerate(rounds):
        coupling, agreement = (given.unflatten(0, (3, -1)) for given in (each.coupling, each.agreement))
        entropy = -(coupling * coupling.log()).sum(3) / math.log(coupling.shape[3])  # (B, L, I)
        for got, of_window in ((statistics.entropy, entropy), (statistics.mean_agreement, agreement.abs().mean(3))):
            wanted = [[of_window[b, l, there[l]].mean() for l in range(len(there))] for b in range(3)]
            np.testing.assert_allclose(got[t], np.mean(wanted, 1), rtol=1e-4)
