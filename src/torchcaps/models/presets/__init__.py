"""Published networks by name, each as its source has it, including its peculiarities.

Add a network with :func:`register_preset`. Every registered preset is listed, built, trained and tested. ``table.py``
has the presets of torchcaps, which are registered on the first import of this package.
"""

import torchcaps.models.presets.table  # noqa: F401  registers the presets
from torchcaps.models.presets.create import create_model
from torchcaps.models.presets.large_images import FITTED, fit_to_images
from torchcaps.models.presets.registry import RECOMMENDED, Preset, get_preset, list_presets, register_preset

__all__ = ["FITTED", "RECOMMENDED", "Preset", "create_model", "fit_to_images", "get_preset", "list_presets"]
__all__ += ["register_preset"]
