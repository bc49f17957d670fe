"""The mathematics of capsule networks: pure functions on tensors.

- :mod:`torchcaps.ops.squash`: ``squash``, ``safe_norm``
- :mod:`torchcaps.ops.losses`: ``margin_loss``, ``normalised_cross_entropy``, ``reconstruction_loss``
- :mod:`torchcaps.ops.convolution`: ``convolve``
- :mod:`torchcaps.ops.contractions`: ``weighted_sum``, ``agreement``
- :mod:`torchcaps.ops.fused`: dynamic routing without votes, for :func:`torchcaps.route`
- :mod:`torchcaps.ops.memory`: ``set_working_memory``
"""
