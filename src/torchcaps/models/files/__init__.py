"""Files of a network, in a folder or on the Hugging Face hub: ``config.json`` and ``model.safetensors``, no code."""

from torchcaps.models.files.hub import SHIPPED, SHIPPED_DATA, find_pretrained, push
from torchcaps.models.files.loading import load
from torchcaps.models.files.saving import save, write
from torchcaps.models.files.weights import CARD, CLASSES, CONFIG, WEIGHTS

__all__ = ["CARD", "CLASSES", "CONFIG", "SHIPPED", "SHIPPED_DATA", "WEIGHTS"]
__all__ += ["find_pretrained", "load", "push", "save", "write"]
