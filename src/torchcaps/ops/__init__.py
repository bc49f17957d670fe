"""The mathematics of capsule networks: pure functions on tensors.

- :mod:`torchcaps.ops.squash`: ``squash``, ``exponential_squash``, ``safe_norm``
- :mod:`torchcaps.ops.losses`: ``margin_loss``, ``normalised_cross_entropy``, ``reconstruction_loss``
- :mod:`torchcaps.ops.contractions`: ``weighted_sum``, ``agreement``
- :mod:`torchcaps.ops.convolution`: ``convolve``
- :mod:`torchcaps.ops.segmentation`: losses and scores of pixels
- :mod:`torchcaps.ops.sliding`: ``sliding_windows``
- :mod:`torchcaps.ops.memory`: ``set_working_memory``

The equations of each routing are in :mod:`torchcaps.nn.routing`, and the hand-written kernels in
:mod:`torchcaps.kernels`.
"""
