"""Checks of capsule code: tests for a routing of one's own, and a diagnosis of layers and networks of any origin.

    def test_my_routing():
        check_routing(MyRouting())

Every check of a routing states one property that accuracy does not show, and was shown to fail on a routing that lacks
it. :func:`diagnose` looks for known mistakes in layers and networks, of torchcaps or not.
"""

from torchcaps.testing.doctor import Finding, diagnose
from torchcaps.testing.properties import check_routing

__all__ = ["Finding", "check_routing", "diagnose"]
