"""The private engine: hand-written passes of routings and convolutions that keep to the caches of a CPU.

``README.md`` in this folder derives them. The formulas are in :mod:`torchcaps.ops` and :mod:`torchcaps.nn.routing`.
They import only :mod:`.operation`, :mod:`.memory`, and the names of the four packages below.

- :mod:`.operation`: what a kernel consists of, and where it runs;
- :mod:`.memory`: the working memory, and the cutting of work into blocks;
- :mod:`.threads`: pieces of work for several threads;
- :mod:`.dense`: dynamic routing and sums over votes W_ij u_i, which are never built;
- :mod:`.mixtures`: mixtures of Gaussians;
- :mod:`.maps`: dynamic routing between types of capsules on maps;
- :mod:`.convolution`: convolutions with fewer multiplications.
"""
