"""``check_routing``: check the properties that a capsule layer expects of a routing algorithm."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import Annotated

from torchcaps.checks import checked
from torchcaps.errors import reason_of, unknown_name
from torchcaps.nn import Routing
from torchcaps.ranges import Range
from torchcaps.testing.measures import place_of
from torchcaps.testing.routing_checks import CHECKS
from torchcaps.testing.routing_subject import Subject, fresh

AtLeastTwo = Annotated[int, Range(2, 65_536, whole=True)]


@checked
def check_routing(
    routing: Routing,
    *,
    in_capsules: AtLeastTwo = 7,
    in_dim: AtLeastTwo = 6,
    out_capsules: AtLeastTwo = 5,
    out_dim: AtLeastTwo = 4,
    skip: Collection[str] = (),
) -> dict[str, str]:
    """Check that your routing algorithm has the properties that a capsule layer relies on, in about a second.

    These are the properties, by the names that ``skip`` takes. Properties with a * are checked a second time with
    randomly changed parameters, because a parameter that starts at zero may hide other mistakes.

    - ``call`` *: the routing takes votes, activations and ``return_coupling``, and returns a
      :class:`torchcaps.nn.Routed` of finite numbers.
    - ``determinism`` *: the same input gives the same result again. All other checks need it.
    - ``shapes`` *: capsules (B, J, D) and coupling (B, I, J), also for a batch of one; no coupling unless asked for.
    - ``sizes of one``: the same with one input capsule, one output capsule, one component.
    - ``memory layout`` *: results do not depend on the memory layout. The weight of :class:`torchcaps.nn.Dense` and the
      poses of :class:`torchcaps.nn.PrimaryCapsules` are not contiguous.
    - ``state`` *: ``state_dict`` saves the whole state, and ``load_state_dict`` restores it.
    - ``dtypes`` *: after ``.to(float32)`` and ``.to(float64)`` the result has this dtype, and both results agree; the
      routing runs under bfloat16 autocast.
    - ``untouched inputs`` *: inputs are not changed in place.
    - ``batch independence`` *: the capsules of an image do not depend on the other images of the batch.
    - ``rows`` *: in training, rows routed in two halves give the same as all together. A layer on a large map passes
      its positions in parts, unless the class has ``by_row = False``.
    - ``input order``: reordering the input capsules changes nothing but the order of the coupling.
    - ``output order``: reordering the output capsules reorders the result in the same way.
    - ``rotation``: rotating the votes in pose space rotates the capsules. Routing by dot products, distances and
      lengths has this property. Skip it for a routing that treats components differently (a bias, layer normalisation,
      a variance for each component).
    - ``lengths`` *: capsules are at most 1 long; or activations, if returned, lie in 0..1, as losses on scores expect.
    - ``coupling``: coupling, if returned, lies in 0..1 and sums to one over the axis in the routing's attribute
      ``softmax_over``, or to less if its attribute ``leaky`` is True; over no axis if ``softmax_over`` is None.
    - ``other votes`` *: the routing calls only methods that all :class:`torchcaps.nn.Votes` have, so it works with any
      transform, and gives the same result for built votes.
    - ``inactive capsules`` *: if the routing uses activations, an input capsule with activation 0 changes nothing,
      whatever its pose.
    - ``masks``: masking capsules gives the same result as leaving them out.
    - ``finite numbers`` *: capsules and gradients are finite for poses of zero, of length 1e-20 and 1e6, for votes that
      all agree, and if no input capsule is active.
    - ``gradients`` *: gradients of poses, weight and parameters agree with finite differences in float64, and the
      capsules depend on poses and weight. Skip it for a gradient that is stopped on purpose.
    - ``used parameters``: every parameter of the routing gets a gradient.

    Args:
        routing: A :class:`torchcaps.nn.Routing` that belongs to no layer. A copy is checked on the CPU, after
            :meth:`~torchcaps.nn.Routing.bind` with these sizes. Call ``.eval()`` first if it has dropout.
        in_capsules: Number of input capsules (I).
        in_dim: Components of an input capsule (K).
        out_capsules: Number of output capsules (J).
        out_dim: Components of an output capsule (D).
        skip: Names of properties that the routing does not have on purpose.

    Returns:
        Measurement of each property, in words.

    Raises:
        AssertionError: A property is missing; the message has the property, the numbers and the usual cause.

    Examples:
        >>> from torchcaps.nn import DynamicRouting
        >>> from torchcaps.testing import check_routing
        >>> check_routing(DynamicRouting(num_iterations=2))["coupling"]
        'sums to one over the outputs'
    """
    sizes = in_capsules, in_dim, out_capsules, out_dim
    return _run(Subject(routing, sizes, routing), skip)


def _run(subject: Subject, skip: Collection[str]) -> dict[str, str]:
    """Run the checks with the initial parameters, and then some of them with randomly changed parameters."""
    for name in (skip := list(skip)):
        if not isinstance(name, str) or name not in CHECKS:
            raise unknown_name("check", str(name), CHECKS)
    measurements = {name: "skipped" for name in CHECKS if name in skip}
    for moved in (False, True):
        if moved and not fresh(subject).parameters():
            break
        for name, each in CHECKS.items():
            if name not in skip and (each.moved or not moved):
                with _described(subject, name, each.cause, moved):
                    words = each.find(fresh(subject, moved))
                    measurements[name] = measurements[name] if moved else words
    return {name: measurements[name] for name in CHECKS}


@contextmanager
def _described(subject: Subject, name: str, cause: str, moved: bool) -> Iterator[None]:
    """Reword failures as one sentence: the routing, the property, the numbers and the usual cause."""
    when = " with its parameters moved at random" if moved else ""
    failure = f"{type(subject.module).__name__} fails “{name}”{when}"
    try:
        yield
    except AssertionError as error:
        raise AssertionError(f"{failure}: {error}; usual cause: {cause}") from None
    except Exception as error:
        raised = f"it raises {type(error).__name__}: {reason_of(error)} ({place_of(error, subject.module)})"
        raise AssertionError(f"{failure}: {raised}; usual cause: {cause}") from error
