"""Every public callable refuses an object of another type in one sentence, argument by argument."""

import importlib
import inspect
import types
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from torchcaps import create_model
from torchcaps.analysis import evaluate, perturb_capsule, predict, reconstruct, trace_routing
from torchcaps.errors import InputError
from torchcaps.export import random_images
from torchcaps.nn import EMRouting

PACKAGES = ("", ".analysis", ".datasets", ".explorer", ".export", ".models", ".nn", ".testing", ".training")
#: Values without behaviour: they hold what they are given.
RECORDS = (
    *("Agreement", "Calibration", "Capsules", "Curves", "DatasetInfo", "Description", "Detection", "Detections"),
    *("Detector", "Evaluation", "Finding", "Layer", "LayerSize", "LearningRates", "Losses", "ModelOutput"),
    *("Perturbation", "Perturbations", "PhotoAnswers", "PlainProgress", "Prediction", "Preparation", "Preset", "Probe"),
    *("Probing", "Reconstructions", "Robustness", "RobustnessCurve", "Routed", "RoutingReport", "RoutingRound"),
    *("RoutingStatistics", "RoutingTrace", "Run", "SeedResult", "Splits", "TargetEvaluation", "TrainingRecord", "View"),
)


class Odd:
    """An object that nothing takes."""


def callables() -> Iterator[tuple[str, Callable[..., object]]]:
    seen = set()
    for package in PACKAGES:
        module = importlib.import_module(f"torchcaps{package}")
        for name in getattr(module, "__all__", ()):
            value = getattr(module, name)
            is_error = inspect.isclass(value) and issubclass(value, BaseException)
            if not callable(value) or isinstance(value, types.ModuleType) or is_error or inspect.isabstract(value):
                continue
            if name not in RECORDS and id(value) not in seen:
                seen.add(id(value))
                yield f"torchcaps{package}.{name}", value


@pytest.mark.parametrize(("name", "called"), [pytest.param(*each, id=each[0]) for each in callables()])
def test_an_odd_object_is_refused(name: str, called: Callable[..., object]) -> None:
    """Required arguments and one more are odd; what is taken without being used does no harm."""
    parameters = inspect.signature(called).parameters.values()
    named = [each for each in parameters if each.kind not in (each.VAR_POSITIONAL, each.VAR_KEYWORD)]
    required = [each.name for each in named if each.default is each.empty]
    for one in named:
        given = dict.fromkeys([*required, one.name], Odd())
        words = [given.pop(each.name) for each in named if each.kind is each.POSITIONAL_ONLY and each.name in given]
        try:
            called(*words, **given)
        except InputError as error:
            assert "\n" not in str(error)  # noqa: PT017
        except Exception as error:
            pytest.fail(f"{name}, {one.name}: {type(error).__name__}: {error}")


NETWORK = create_model("compact").eval()
META, PAIR = torch.rand(2, 1, 28, 28, device="meta"), (torch.rand(2, 1, 28, 28), torch.zeros(2, dtype=torch.int64))


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda: evaluate(NETWORK, PAIR), "evaluate: image_set must be an ImageSet, got"),  # type: ignore[arg-type]
        (lambda: evaluate(torch.nn.Linear(2, 2), PAIR), "evaluate: model must be a Network, got a Linear"),  # type: ignore[arg-type]
        (lambda: EMRouting()(torch.rand(2, 3, 4, 5)), "EMRouting: votes must be Votes, such as BuiltVotes(tensor)"),
        (lambda: random_images((1, 28, 28), -1), "random_images: count must be 1 to"),
        (lambda: random_images((28,)), "in_shape must be channels and 1 to 3 sizes"),
        (lambda: create_model("first", (1, 28)), "in_shape must be (channels, height, width)"),
        (lambda: predict(NETWORK, META), "images must be a dense tensor"),
        (lambda: reconstruct(NETWORK, META), "images must be a dense tensor with numbers, got a meta tensor"),
        (lambda: trace_routing(NETWORK, META), "images must be a dense tensor with numbers, got a meta tensor"),
        (lambda: perturb_capsule(NETWORK, META[0]), "images must be a dense tensor with numbers, got a meta tensor"),
        (lambda: EMRouting(final_lambda=1e-320), "EMRouting: final_lambda must be above 0 and at most 1e+38, got"),
    ],
)
def test_values_that_no_network_takes(call: Callable[[], Any], said: str) -> None:
    with pytest.raises(InputError) as caught:
        call()
    assert said in str(caught.value)


def test_a_compiled_network_is_a_network() -> None:
    assert len(predict(torch.compile(NETWORK, backend="eager"), PAIR[0]).classes) == 2
