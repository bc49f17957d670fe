"""Odd calls of the library: valid ones with an argument or two that are wrong."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import torch

from hostile.fixtures import CLASSES, SIDE
from hostile.trials import CASE, DONE, WRONG_INPUT, Part, Rules, Trial

B, I, J, D, K = 3, 6, 4, 5, 8

PLAIN = (type(None), bool, int, float, str, tuple, torch.Tensor)
"""Arguments of these types are made odd."""

Call = tuple[Callable[..., Any], dict[str, Any]]
"""A function, and arguments that are right."""


def _random(*shape: int) -> torch.Tensor:
    return torch.rand(shape, generator=torch.Generator().manual_seed(0))


def _model() -> Any:
    from torchcaps.models import load_pretrained

    return load_pretrained("run/best")


def _images(number: int = 6) -> torch.Tensor:
    return (255 * _random(number, 1, SIDE, SIDE)).to(torch.uint8)


def _labels(number: int = 6) -> torch.Tensor:
    return torch.arange(number) % len(CLASSES)


def _image_set(number: int = 6) -> Any:
    from torchcaps.datasets import ImageSet

    return ImageSet(_images(number), _labels(number))


def _functions() -> dict[str, Callable[[], Call]]:
    """Calls by name; what they need is made when they are."""
    import torchcaps
    from torchcaps import analysis, datasets, nn
    from torchcaps.nn import mask_capsules, separate_capsules
    from torchcaps.ops.convolution import convolve
    from torchcaps.ops.losses import normalised_cross_entropy
    from torchcaps.testing import check_routing
    from torchcaps.training import make_config

    weight, poses, lengths = _random(I, J, D, K), _random(B, I, K), _random(B, J)
    votes, active = _random(B, I, J, D), _random(B, I)
    weighed = {"votes": votes, "activations": active, "num_iterations": 2, "return_coupling": True}
    routing = {"num_iterations": 2, "softmax_over": "outputs", "stop_gradient": False, "leaky": False, "eps": 1e-7}
    more = {"bias": _random(J, D), "prior": _random(I, J), "return_coupling": True}
    coordinates = {"padding": 1, "stride": 1}
    tiny = {"conv_channels": 4, "primary_types": 2, "capsule_dim": 4, "decoder_hidden": (8,), "num_iterations": 2}
    network = {"in_shape": (1, SIDE, SIDE), "num_classes": 3}
    evaluated = {"batch_size": 4, "class_names": CLASSES, "precision": "32"}
    layer = {"in_capsules": I, "in_dim": K, "out_capsules": J, "out_dim": D}

    def layer_of(kind: Any, **arguments: Any) -> Callable[[Any], Any]:
        return lambda input: kind(**arguments)(input)

    def forward(images: Any, targets: Any = None) -> Any:
        return _model()(images, targets)

    def loss(output: Any, images: Any, labels: Any) -> Any:
        return _model().loss(output, images, labels)

    return {
        "squash": lambda: (torchcaps.squash, {"x": poses, "dim": -1, "eps": 1e-7}),
        "safe_norm": lambda: (torchcaps.safe_norm, {"x": poses, "dim": 1, "keepdim": True, "eps": 1e-7}),
        "margin_loss": lambda: (
            torchcaps.margin_loss,
            {"lengths": lengths, "targets": torch.tensor([0, 1, 3]), "m_plus": 0.9, "m_minus": 0.1, "lam": 0.5}
            | {"power": 2, "reduction": "mean"},
        ),
        "normalised_cross_entropy": lambda: (
            normalised_cross_entropy,
            {"lengths": lengths, "targets": torch.tensor([0, 1, 3]), "clip": 1e-7, "reduction": "none"},
        ),
        "reconstruction_loss": lambda: (
            torchcaps.reconstruction_loss,
            {"reconstruction": _random(B, 1, 4, 4), "images": _random(B, 1, 4, 4), "reduction": "mean"},
        ),
        "compute_votes": lambda: (torchcaps.compute_votes, {"poses": poses, "weight": weight}),
        "dynamic_routing": lambda: (torchcaps.dynamic_routing, {"votes": _random(B, I, J, D), **routing, **more}),
        "route": lambda: (torchcaps.route, {"poses": poses, "weight": weight, **routing, **more, "backend": "auto"}),
        "exponential_squash": lambda: (torchcaps.exponential_squash, {"x": poses, "dim": -1}),
        "weighted_sum": lambda: (
            torchcaps.weighted_sum, {"poses": poses, "weight": weight, "coupling": _random(B, I, J)}
        ),
        "agreement": lambda: (torchcaps.agreement, {"poses": poses, "weight": weight, "parents": _random(B, J, D)}),
        "routing_rounds": lambda: (
            torchcaps.routing_rounds,
            {"votes": votes, "num_iterations": 2, "bias": _random(J, D), "prior": _random(I, J), "eps": 1e-7},
        ),
        "self_attention_routing": lambda: (
            torchcaps.self_attention_routing, {"votes": votes, "bias": _random(I, J), "return_coupling": True}
        ),
        "inverted_attention_routing": lambda: (
            torchcaps.inverted_attention_routing,
            {"votes": votes, "num_iterations": 2, "norm_weight": _random(D), "norm_bias": _random(D), "eps": 1e-5}
            | {"return_coupling": True},
        ),
        "self_routing": lambda: (
            torchcaps.self_routing,
            {"votes": votes, "activations": active, "routing_logits": _random(B, I, J), "return_coupling": True},
        ),
        "em_routing": lambda: (
            torchcaps.em_routing,
            {**weighed, "beta_u": _random(J), "beta_a": _random(J), "final_lambda": 0.01, "cost_scale": 1.0},
        ),
        "em_routing_code": lambda: (
            torchcaps.em_routing_code,
            {**weighed, "sigma_bias": _random(J), "activation_bias": _random(J), "final_beta": 0.01}
            | {"min_variance": 0.0005},
        ),
        "vb_routing": lambda: (torchcaps.vb_routing, {**weighed, "beta_u": _random(J), "beta_a": _random(J)}),
        "spread_loss": lambda: (
            torchcaps.spread_loss,
            {"scores": lengths, "targets": torch.tensor([0, 1, 3]), "margin": 0.9, "reduction": "mean"},
        ),
        "score_cross_entropy": lambda: (
            torchcaps.score_cross_entropy, {"scores": lengths, "targets": torch.tensor([0, 1, 3]), "scale": 10.0}
        ),
        "convolve": lambda: (
            convolve,
            {"features": _random(2, 3, 9, 9), "weight": _random(4, 3, 3, 3), "bias": _random(4), **coordinates},
        ),
        "set_working_memory": lambda: (torchcaps.set_working_memory, {"mib": 8.0}),
        "PrimaryCapsules": lambda: (
            nn.PrimaryCapsules,
            {"in_channels": 4, "num_types": 2, "dim": 4, "kernel_size": 3, "stride": 2, "activation": "relu"}
            | {"grouping": "channels"},
        ),
        "PrimaryCapsules()": lambda: (layer_of(nn.PrimaryCapsules, in_channels=4, num_types=2, dim=4, kernel_size=3),
                                      {"input": _random(2, 4, 9, 9)}),
        "DenseCapsules": lambda: (
            nn.DenseCapsules, {**layer, "transform": nn.Dense("normal", 0.1), "routing": nn.DynamicRouting(2)}
        ),
        "DenseCapsules()": lambda: (layer_of(nn.DenseCapsules, **layer), {"input": poses}),
        "ConvCapsules": lambda: (
            nn.ConvCapsules,
            {"in_types": 2, "in_dim": 4, "out_types": 3, "out_dim": 4, "kernel_size": 2, **coordinates}
            | {"compete_over": "types", "transform": nn.Elementwise()},
        ),
        "ConvCapsules()": lambda: (
            lambda poses: nn.ConvCapsules(2, 4, 3, 4, padding=1)(nn.Capsules(poses, grid=(2, 3, 3))),
            {"poses": _random(B, 18, 4)},
        ),
        "Shared": lambda: (nn.Shared, {"weight_init": "normal", "weight_std": 0.1}),
        "DynamicRouting": lambda: (
            nn.DynamicRouting, {**routing, "bias": True, "learn_prior": True, "backend": "auto"}
        ),
        "DynamicRouting()": lambda: (
            nn.DenseCapsules(**layer, routing=nn.DynamicRouting(2, bias=True, learn_prior=True)).route,
            {"capsules": poses, "return_coupling": True},
        ),
        "Decoder": lambda: (nn.Decoder, {"num_capsules": J, "capsule_dim": D, "out_shape": (1, 4, 4), "hidden": (8,)}),
        "Decoder()": lambda: (layer_of(nn.Decoder, num_capsules=J, capsule_dim=D, out_shape=(1, 4, 4), hidden=(8,)),
                              {"input": _random(B, J, D)}),
        "mask_capsules": lambda: (mask_capsules, {"capsules": _random(B, J, D), "targets": torch.tensor([0, 1, 3])}),
        "separate_capsules": lambda: (
            separate_capsules, {"capsules": _random(B, J, D), "classes": torch.tensor([[0, 1], [1, 2], [3, 0]])}
        ),
        "Convolution": lambda: (
            nn.Convolution, {"in_channels": 3, "out_channels": 4, "kernel_size": 3, **coordinates, "bias": True}
        ),
        "Convolution()": lambda: (layer_of(nn.Convolution, in_channels=3, out_channels=4, kernel_size=3),
                                  {"input": _random(2, 3, 9, 9)}),
        "ConvStem": lambda: (
            nn.ConvStem, {"in_channels": 1, "channels": (4, 6), "strides": (1, 2), "norm": True, "dropout": 0.1}
        ),
        "ConvStem()": lambda: (layer_of(nn.ConvStem, in_channels=1, channels=(4,)), {"input": _random(2, 1, 12, 12)}),
        "ChannelNorm": lambda: (nn.ChannelNorm, {"channels": 4}),
        "ChannelNorm()": lambda: (layer_of(nn.ChannelNorm, channels=4), {"input": _random(2, 4, 3, 3)}),
        "check_routing": lambda: (
            check_routing,
            {"routing": nn.DynamicRouting(2), "softmax_over": "outputs", "in_capsules": 3, "skip": ("gradients",)},
        ),
        "create_model": lambda: (torchcaps.create_model, {"name": "sabour2017", **network, **tiny}),
        "CapsNet()": lambda: (forward, {"images": _random(2, 1, SIDE, SIDE), "targets": _labels(2)}),
        "CapsNet.loss": lambda: (
            loss,
            {"output": _model()(_random(2, 1, SIDE, SIDE), _labels(2)), "images": _random(2, 1, SIDE, SIDE)}
            | {"labels": _labels(2)},
        ),
        "CapsNet.decode": lambda: (_model().decode, {"capsules": _random(2, 3, 16)}),
        "load_pretrained": lambda: (torchcaps.load_pretrained, {"path": "run/best"}),
        "make_config": lambda: (
            make_config, {"preset": "compact", "data": "digits", "epochs": 2, "learning_rate": 0.001, "seed": 3}
        ),
        "ImageSet": lambda: (datasets.ImageSet, {"images": _images(), "labels": _labels()}),
        "load_dataset": lambda: (
            datasets.load_dataset, {"name": "npz:data.npz", "image_size": 12, "validation_size": 12, "seed": 0}
        ),
        "data_shape": lambda: (datasets.data_shape, {"name": "npz:data.npz", "image_size": 12}),
        "resize_images": lambda: (datasets.resize_images, {"images": _images(), "size": (9, 7)}),
        "center_crop": lambda: (datasets.center_crop, {"images": _images(), "size": 9}),
        "read_image": lambda: (
            datasets.read_image, {"path": "images/colour.png", "in_shape": (1, 9, 9), "invert": True, "fit": "pad"}
        ),
        "prepare_image": lambda: (
            datasets.prepare_image,
            {
                "image": np.arange(3 * 50 * 60, dtype=np.uint8).reshape(3, 50, 60),
                "in_shape": (1, 28, 28),
                "preparation": datasets.Preparation(),
                "light_ink": True,
            },
        ),
        "stratified_split": lambda: (datasets.stratified_split, {"labels": _labels(30), "size": 6, "seed": 0}),
        "BatchLoader": lambda: (
            _batches,
            {"images": _image_set(), "batch_size": 4, "shuffle": True, "seed": 1, "max_shift": 1, "epoch": 0},
        ),
        "evaluate": lambda: (analysis.evaluate, {"model": _model(), "images": _image_set(), **evaluated}),
        "predict": lambda: (analysis.predict, {"model": _model(), "images": _images(), "batch_size": 4}),
        "reconstruct": lambda: (
            analysis.reconstruct, {"model": _model(), "images": _images(), "labels": _labels()}
        ),
        "perturb_capsule": lambda: (
            analysis.perturb_capsule,
            {"model": _model(), "image": _images()[0], "target": 1, "amplitude": 0.2, "steps": 3},
        ),
        "trace_routing": lambda: (
            analysis.trace_routing, {"model": _model(), "images": _images(), "num_iterations": 2}
        ),
        "routing_statistics": lambda: (
            analysis.routing_statistics, {"model": _model(), "images": _images(), "num_iterations": 2}
        ),
        "rotate": lambda: (analysis.rotate, {"images": _random(2, 1, 9, 9), "degrees": 20.0}),
        "rotation_curve": lambda: (
            analysis.rotation_curve, {"model": _model(), "images": _image_set(), "angles": (0.0, 10.0)}
        ),
        "fgsm": lambda: (
            analysis.fgsm,
            {"model": _model(), "images": _random(2, 1, SIDE, SIDE), "labels": _labels(2), "epsilon": 0.1},
        ),
        "pgd": lambda: (
            analysis.pgd,
            {"model": _model(), "images": _random(2, 1, SIDE, SIDE), "labels": _labels(2), "epsilon": 0.1}
            | {"steps": 2, "objective": "loss", "seed": 0},
        ),
        "attack_curve": lambda: (
            analysis.attack_curve,
            {"model": _model(), "images": _image_set(), "attack": "fgsm", "epsilons": (0.0, 0.1), "steps": 2},
        ),
        "calibrate": lambda: (analysis.calibrate, {"model": _model(), "images": _images(), "batch_size": 4}),
        "fit_detector": lambda: (
            analysis.fit_detector, {"model": _model(), "validation": _image_set(), "batch_size": 4}
        ),
        "with_affine_factors": lambda: (analysis.with_affine_factors, {"image_set": _image_set(), "seed": 0}),
        "probe": lambda: (
            analysis.probe,
            {"model": _model(), "fitted": analysis.with_affine_factors(_image_set(30))}
            | {"held_out": analysis.with_affine_factors(_image_set(12)), "seed": 0, "batch_size": 8},
        ),
        "list_layers": lambda: (analysis.list_layers, {"model": _model()}),
        "read_metrics": lambda: (analysis.read_metrics, {"path": "run"}),
        "figure_samples": lambda: (analysis.figure_samples, {"images": _image_set(), "class_names": CLASSES}),
    }  # fmt: skip


def _batches(images: Any, epoch: Any, max_shift: Any, **options: Any) -> None:
    from torchcaps.datasets import Augmentation, BatchLoader

    for _ in BatchLoader(images, augmentation=Augmentation(max_shift), **options).batches(epoch):
        pass


def _odd_values(right: Any) -> list[Callable[[], Any]]:
    """What may stand in the place of an argument."""
    anything: list[Any] = [
        *(None, "x", "", b"\0", 3, -1, 0, 2**31, 2**63, 10**30, 0.5, math.nan, math.inf, -math.inf, 1e308, True, False),
        *(
            [],
            [1, 2],
            {},
            {"a": 1},
            (),
            (0,),
            (-1, 2),
            object(),
            print,
            complex(1, 2),
            range(3),
            np.zeros(3),
            Path("x"),
        ),
        *(torch.zeros(()), torch.zeros(0), torch.zeros(2, 2), torch.float32, "\x00", "\udcff", "run", np.float32(1)),
    ]
    odd = [lambda value=value: value for value in anything]
    if isinstance(right, torch.Tensor):
        odd += [lambda make=make: make(right) for make in TENSORS for _ in range(2)]
    if isinstance(right, str):
        odd += [lambda: right.upper(), lambda: right + " ", lambda: right[:-1], lambda: [right]]
    if isinstance(right, tuple):
        odd += [lambda: right + right, lambda: list(right), lambda: right[1:], lambda: tuple(str(x) for x in right)]
        odd += [lambda: tuple(None for _ in right), lambda: tuple(-1 for _ in right), lambda: (10**12, *right[1:])]
    return odd


TENSORS: tuple[Callable[[torch.Tensor], Any], ...] = (
    lambda x: x[:0],
    lambda x: x[..., :0],
    lambda x: x[0],
    lambda x: x[None],
    lambda x: x.mT if x.ndim > 1 else x[:1],
    lambda x: x.long(),
    lambda x: x.bool(),
    lambda x: x.double(),
    lambda x: x.half(),
    lambda x: x.bfloat16(),
    lambda x: x.to(torch.complex64),
    lambda x: x.to(torch.uint8),
    lambda x: x.numpy(),
    lambda x: x.tolist(),
    lambda x: torch.full_like(x.float(), math.nan),
    lambda x: torch.full_like(x.float(), math.inf),
    lambda x: torch.full_like(x.float(), 1e38),
    lambda x: -x.float() - 1,
    lambda x: torch.full_like(x.long(), 2**62),
    lambda x: x.repeat(2, *[1] * (x.ndim - 1)),
    lambda x: x.expand(2, *x.shape),
    lambda x: x[..., :1],
    lambda x: x.float().requires_grad_(),
    lambda x: torch.nn.Parameter(x.float()),
    lambda x: x.flip(0),
)


class Calls(Part):
    """Odd calls: each may work, or raise a TypeError, a ValueError (an InputError is one), or an OSError, with words.

    What torch itself says of layouts and devices is left to it: no tensor is sparse, or without data. So is what Python
    says of an object that is none of the library's: networks, image sets and routings stay as they are.
    Too little memory is no fault of the library where a size was asked for that no machine has.
    """

    name, cases, share = "calls", 3000, 0.15

    def trial(self, number: int, random: Random, folder: Path) -> Trial:
        """A call, some of whose arguments are odd, missing or too many."""
        for each in ("run", "data.npz", "images"):  # only read
            (folder / each).symlink_to(self.fixtures / each)
        name = random.choice(list(_functions()))
        rules = Rules(timeout=self.timeout, writes=("out*",), bounded=False, terminal=False)
        return Trial(number, f"{name}(…)", partial(_call, name, random.random()), folder, rules)


def _draw(name: str, seed: float) -> tuple[Callable[..., Any], dict[str, Any], list[str]]:
    """The function, its arguments, and which of them are odd."""
    random = Random(seed)
    function, arguments = _functions()[name]()
    odd = []
    plain = [key for key, value in arguments.items() if isinstance(value, PLAIN)]
    for key in random.sample(plain, min(len(plain), random.choice((1, 1, 1, 2)))):
        arguments[key] = random.choice(_odd_values(arguments[key]))()
        odd.append(f"{key}={_short(arguments[key])}")
    if random.random() < 0.02:
        arguments["no_such_argument"] = 1
        odd.append("no_such_argument")
    return function, arguments, odd


def _short(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"<{str(value.dtype).removeprefix('torch.')} {tuple(value.shape)}>"
    plain = (type(None), bool, int, float, str, bytes, tuple, list, dict, Path)
    return f"{value!r:.50}" if isinstance(value, plain) else f"<{type(value).__name__}>"


def _call(name: str, seed: float) -> int:
    from torchcaps.cli.app import is_out_of_memory

    function, arguments, odd = _draw(name, seed)
    print(f"{CASE}{name}({', '.join(odd)})".encode("ascii", "backslashreplace").decode())
    try:
        function(**arguments)
    except (TypeError, ValueError, OSError) as error:
        if not str(error).strip():
            raise AssertionError(f"a {type(error).__name__} without a word") from error
        # a message may quote what it was given: it is for whoever called, and the command line cleans what it prints
        print(ascii(f"{type(error).__name__}: {error}"[:1000])[1:-1])
        return WRONG_INPUT
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        print("not enough memory")
        return WRONG_INPUT
    return DONE
