"""Export of trained networks: ONNX files, torch.export programs, folders with a model card, and the hub.

``onnx_model.py`` runs an ONNX file without torch, in the process of ``onnx_worker.py``. ``description.py`` is the
description of the network inside an exported file.
"""

from torchcaps._lazy import attach

__getattr__, __dir__, __all__ = attach(__name__, __file__)
