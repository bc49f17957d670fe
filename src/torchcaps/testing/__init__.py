"""Checks of capsule code: tests for a routing or a layer of one's own, and a diagnosis of code of any origin.

    def test_my_routing():
        check_routing(MyRouting())

Every check of a routing or a layer states one property that accuracy does not show, and was shown to fail on a routing
that lacks it. :func:`diagnose` looks for known mistakes in layers and networks that were not written for torchcaps.
"""

from torchcaps.testing.doctor import Finding, diagnose
from torchcaps.testing.properties import check_capsule_layer, check_routing

__all__ = ["Finding", "check_capsule_layer", "check_routing", "diagnose"]
