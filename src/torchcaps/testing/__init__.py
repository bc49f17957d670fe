"""Checks of capsule code: tests of your own routing, and a diagnosis of any capsule layer or network.

    def test_my_routing():
        check_routing(MyRouting())

Each check of a routing tests one property that accuracy does not show, and is itself tested on a routing without the
property. :func:`diagnose` finds known mistakes in layers and networks, from torchcaps or elsewhere.
"""

from torchcaps.testing.doctor import Finding, diagnose
from torchcaps.testing.properties import check_routing

__all__ = ["Finding", "check_routing", "diagnose"]
