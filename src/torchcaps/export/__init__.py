"""A trained network taken elsewhere: ONNX files, torch.export programs, folders with a model card, and the hub.

``onnx_model.py`` runs an ONNX file without torch; ``description.py`` is what a file says of its network.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
