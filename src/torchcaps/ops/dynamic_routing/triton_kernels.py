# mypy: disable-error-code="no-untyped-def, untyped-decorator"
"""The Triton kernels of vote-free routing; :mod:`torchcaps.ops.dynamic_routing.triton` launches them.

README.md beside this file derives every step; the names in brackets here, such as [logits], are its headings.
Poses are read as (B, K, I), weights as (J, D, K, I), coupling as (B, J, I): the input capsules lie next to each other.

Every large kernel has the same shape. A tile is BLOCK_B images by BLOCK_I input capsules; a warp's 32 lanes hold 32
neighbouring input capsules, its registers several images. Hence

- a lane computes its votes alone, out of registers: no shared memory and no barrier inside a loop;
- a weight, once loaded, serves all images of its lane, and the warps of a program find it in the L1 cache;
- sums over j, d and k are a lane's own; those over images or input capsules cross lanes once, at the end, in a fixed
  order, so that two runs give the same bits. There are no atomics.

A value (J, D) of an image, such as v_j, is one address for all lanes: it is read as a broadcast, which costs one access.

Past the edge of the batch or of the input capsules, a tile repeats the last one (:func:`_tile`): loads need no mask,
sums over such an axis take the coupling of the repeated ones as zero, and stores leave them out.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _tile(block_b, block_i, B, I: tl.constexpr, BLOCK_B: tl.constexpr, BLOCK_I: tl.constexpr):
    """Images (BLOCK_B, BLOCK_I) and input capsules (BLOCK_I,) of a tile, cut off at the last; which ones are real."""
    image = block_b * BLOCK_B + tl.arange(0, BLOCK_B)
    capsule = block_i * BLOCK_I + tl.arange(0, BLOCK_I)
    real = (image < B)[:, None] & (capsule < I)[None, :]
    images = tl.broadcast_to(tl.minimum(image, B - 1)[:, None], (BLOCK_B, BLOCK_I))
    return images, tl.minimum(capsule, I - 1), real


@triton.jit
def _load(pointers):
    """Values in float32, in which everything is computed."""
    return tl.load(pointers).to(tl.float32)


@triton.jit
def _load_poses(poses, images, capsules, I: tl.constexpr, K: tl.constexpr):
    """u of a tile, one (BLOCK_B, BLOCK_I) a component."""
    at = poses + images * (K * I) + capsules[None, :]
    u = ()
    for k in tl.static_range(K):
        u += (_load(at + k * I),)
    return u


@triton.jit
def _vote(u, weight, I: tl.constexpr, K: tl.constexpr):
    """Component d of û_j = W_j u, (BLOCK_B, BLOCK_I); ``weight`` points at W_jd of the tile's input capsules."""
    vote = _load(weight)[None, :] * u[0]
    for k in tl.static_range(1, K):
        vote += _load(weight + k * I)[None, :] * u[k]
    return vote


@triton.jit
def coupling_kernel(
    poses,  # (B, K, I)
    weight,  # (J, D, K, I)
    prior,  # (J, I), or None
    summed_capsules,  # V, (B, J, D)
    grad_sums,  # gs, (B, J, D), or None: forward
    grad_coupling,  # (B, J, I), or None
    coupling,  # out: c, (B, J, I)
    grad_logits,  # out: db, (B, J, I), or None: forward
    B,
    I: tl.constexpr,
    J: tl.constexpr,
    D: tl.constexpr,
    K: tl.constexpr,
    OVER_OUTPUTS: tl.constexpr,
    LEAKY: tl.constexpr,
    BLOCK_B: tl.constexpr,
    BLOCK_I: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """b = prior + V·û and c = softmax(b) [logits, coupling]; backward also a = gs·û and db = c∘(a − Σ c a) [backward].

    With a softmax over the inputs, whose sums cross the programs, it leaves b in ``coupling`` and a in ``grad_logits``
    for :func:`compete_over_inputs_kernel`.
    """
    images, capsules, real = _tile(tl.program_id(0), tl.program_id(1), B, I, BLOCK_B, BLOCK_I)
    u = _load_poses(poses, images, capsules, I, K)
    # over the outputs seen so far: the largest logit, Σ exp(b − largest), Σ exp(b − largest) a
    largest = tl.full((BLOCK_B, BLOCK_I), 0.0 if LEAKY else -float("inf"), tl.float32)
    total = tl.full((BLOCK_B, BLOCK_I), 1.0 if LEAKY else 0.0, tl.float32)
    total_agreement = tl.zeros((BLOCK_B, BLOCK_I), tl.float32)

    for j in range(J):
        logit = tl.zeros((BLOCK_B, BLOCK_I), tl.float32)
        agreement = tl.zeros((BLOCK_B, BLOCK_I), tl.float32)
        if prior is not None:
            logit += _load(prior + j * I + capsules)[None, :]
        link = (images * J + j) * I + capsules[None, :]
        if grad_coupling is not None:
            agreement += _load(grad_coupling + link)
        for first_d in range(0, D, BLOCK_D):
            weight_at = weight + (j * D + first_d) * (K * I) + capsules
            state = (images * J + j) * D + first_d
            for d in tl.static_range(BLOCK_D):
                vote = _vote(u, weight_at + d * (K * I), I, K)
                logit += _load(summed_capsules + state + d) * vote
                if grad_logits is not None:
                    agreement += _load(grad_sums + state + d) * vote
        tl.store(coupling + link, logit, mask=real)
        if grad_logits is not None:
            tl.store(grad_logits + link, agreement, mask=real)
        if OVER_OUTPUTS:
            larger = tl.maximum(largest, logit)
            rescale = tl.exp(largest - larger)
            share = tl.exp(logit - larger)
            total = total * rescale + share
            total_agreement = total_agreement * rescale + share * agreement
            largest = larger

    if OVER_OUTPUTS:
        tl.debug_barrier()  # what was stored above is read below, perhaps by another thread of the program
        for j in range(J):
            link = (images * J + j) * I + capsules[None, :]
            share = tl.exp(tl.load(coupling + link, mask=real, other=0.0) - largest) / total
            tl.store(coupling + link, share, mask=real)
            if grad_logits is not None:
                agreement = tl.load(grad_logits + link, mask=real, other=0.0)
                tl.store(grad_logits + link, share * (agreement - total_agreement / total), mask=real)


@triton.jit
def compete_over_inputs_kernel(
    coupling,  # b in, c out, (B·J, I)
    grad_logits,  # a in, db out, (B·J, I), or None: forward
    I,
    LEAKY: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """c = softmax of b over i, and backward db = c∘(a − Σ_i c a): one program a row. [coupling, backward]"""
    row = tl.program_id(0) * I
    largest = tl.full((BLOCK,), 0.0 if LEAKY else -float("inf"), tl.float32)
    for start in range(0, I, BLOCK):
        i = start + tl.arange(0, BLOCK)
        largest = tl.maximum(largest, tl.load(coupling + row + i, mask=i < I, other=-float("inf")))
    top = tl.max(largest, 0)

    shares = tl.zeros((BLOCK,), tl.float32)
    agreements = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, I, BLOCK):
        i = start + tl.arange(0, BLOCK)
        share = tl.exp(tl.load(coupling + row + i, mask=i < I, other=-float("inf")) - top)
        shares += share
        if grad_logits is not None:
            agreements += share * tl.load(grad_logits + row + i, mask=i < I, other=0.0)
    total = tl.sum(shares, 0)
    if LEAKY:
        total += tl.exp(-top)
    mean_agreement = tl.sum(agreements, 0) / total

    for start in range(0, I, BLOCK):
        i = start + tl.arange(0, BLOCK)
        share = tl.exp(tl.load(coupling + row + i, mask=i < I, other=-float("inf")) - top) / total
        tl.store(coupling + row + i, share, mask=i < I)
        if grad_logits is not None:
            agreement = tl.load(grad_logits + row + i, mask=i < I, other=0.0)
            tl.store(grad_logits + row + i, share * (agreement - mean_agreement), mask=i < I)


@triton.jit
def weighted_sum_kernel(
    poses,  # (B, K, I)
    weight,  # (J, D, K, I)
    links,  # c or db, (B, J, I); or (1, J, I) with links_stride_b = 0
    partial,  # out: (splits, B, J, D)
    B,
    links_stride_b,
    blocks_per_split,
    I: tl.constexpr,
    J: tl.constexpr,
    D: tl.constexpr,
    K: tl.constexpr,
    BLOCK_B: tl.constexpr,
    BLOCK_I: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Σ_i c_ij û_ij = Σ_ik (c_ij u_ik) W_ijk over a split of the input capsules, for BLOCK_D components of one output.

    [first sum, weighted sum]; with db in place of c, the gradient of V [backward].
    """
    split = tl.program_id(0)
    j = tl.program_id(1) // (D // BLOCK_D)
    first_d = tl.program_id(1) % (D // BLOCK_D) * BLOCK_D
    totals = ()
    for _ in tl.static_range(BLOCK_D):
        totals += (tl.zeros((BLOCK_B, BLOCK_I), tl.float32),)

    first_block = split * blocks_per_split
    for block in range(first_block, tl.minimum(first_block + blocks_per_split, tl.cdiv(I, BLOCK_I))):
        images, capsules, real = _tile(tl.program_id(2), block, B, I, BLOCK_B, BLOCK_I)
        link = _load(links + images * links_stride_b + j * I + capsules[None, :])
        link = tl.where(real, link, 0.0)
        poses_at = poses + images * (K * I) + capsules[None, :]
        weight_at = weight + (j * D + first_d) * (K * I) + capsules
        for k in tl.static_range(K):
            linked = link * _load(poses_at + k * I)
            added = ()
            for d in tl.static_range(BLOCK_D):
                added += (totals[d] + _load(weight_at + (d * K + k) * I)[None, :] * linked,)
            totals = added

    image = tl.program_id(2) * BLOCK_B + tl.arange(0, BLOCK_B)
    for d in tl.static_range(BLOCK_D):
        state = ((split * B + image) * J + j) * D + first_d + d
        tl.store(partial + state, tl.sum(totals[d], 1), mask=image < B)


@triton.jit
def capsules_kernel(
    partial,  # (splits, B·J, D)
    bias,  # (J, D), or None
    summed_capsules,  # V of this iteration, (B·J, D)
    sums,  # out: s, (B·J, D)
    next_summed_capsules,  # out: V of the next iteration, (B·J, D), or None: the last
    capsules,  # out: v, (B·J, D), or None: not the last
    rows,  # B·J
    J,
    D,
    splits,
    eps,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """s = Σ partial sums + bias, v = squash(s), V += v. [weighted sum, squash]"""
    row = tl.program_id(0) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    d = tl.arange(0, BLOCK_D)
    real = (row < rows)[:, None] & (d < D)[None, :]
    state = row[:, None] * D + d[None, :]
    s = tl.zeros((BLOCK_ROWS, BLOCK_D), tl.float32)
    for split in range(splits):
        s += tl.load(partial + split * rows * D + state, mask=real, other=0.0)
    if bias is not None:
        s += tl.load(bias + (row % J)[:, None] * D + d[None, :], mask=real, other=0.0).to(tl.float32)
    tl.store(sums + state, s, mask=real)
    squared = tl.sum(s * s, 1)[:, None]
    v = squared / (1 + squared) / tl.sqrt(squared + eps) * s
    if capsules is not None:
        tl.store(capsules + state, v, mask=real)
    if next_summed_capsules is not None:
        summed = tl.load(summed_capsules + state, mask=real, other=0.0) + v
        tl.store(next_summed_capsules + state, summed, mask=real)


@triton.jit
def grad_sums_kernel(
    partial,  # (splits, B·J, D): parts of the gradient of V, or the gradient of the capsules
    grad_summed,  # G, (B·J, D), in and out; read only if ACCUMULATE
    sums,  # s, (B·J, D)
    grad_sums,  # out: gs, (B·J, D)
    rows,  # B·J
    D,
    splits,
    eps,
    ACCUMULATE: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """G += Σ partial sums; gs = h·G + 2h'(s·G)s, the squash's backward. [squash, backward]"""
    row = tl.program_id(0) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    d = tl.arange(0, BLOCK_D)
    real = (row < rows)[:, None] & (d < D)[None, :]
    state = row[:, None] * D + d[None, :]
    grad = tl.zeros((BLOCK_ROWS, BLOCK_D), tl.float32)
    if ACCUMULATE:
        grad += tl.load(grad_summed + state, mask=real, other=0.0)
    for split in range(splits):
        grad += tl.load(partial + split * rows * D + state, mask=real, other=0.0).to(tl.float32)
    tl.store(grad_summed + state, grad, mask=real)
    s = tl.load(sums + state, mask=real, other=0.0)
    n = tl.sum(s * s, 1)[:, None]
    q = 1 / tl.sqrt(n + eps)
    h = n * q / (1 + n)
    slope = q / ((1 + n) * (1 + n)) - n * q * q * q / (2 * (1 + n))
    inner = tl.sum(s * grad, 1)[:, None]
    tl.store(grad_sums + state, h * grad + 2 * slope * inner * s, mask=real)


@triton.jit
def _load_links(
    first_coupling,
    first_stride_b,
    coupling,
    grad_logits,
    images,
    j,
    capsules,
    B,
    I,
    J,
    T: tl.constexpr,
):
    """c of the first term, then c and db of the T others, in turn: (BLOCK_B, BLOCK_I) each."""
    links = (_load(first_coupling + images * first_stride_b + j * I + capsules[None, :]),)
    link = (images * J + j) * I + capsules[None, :]
    for t in tl.static_range(T):
        links += (_load(coupling + t * B * J * I + link), _load(grad_logits + t * B * J * I + link))
    return links


@triton.jit
def _grad_vote(
    links,
    first_grad_sums,
    grad_sums,
    summed_capsules,
    state,
    B,
    J,
    D,
    T: tl.constexpr,
):
    """Component d of the gradient of the votes, x_j = Σ_t cᵗ_j gsᵗ_j + dbᵗ_j Vᵗ_j, (BLOCK_B, BLOCK_I)."""
    grad = links[0] * _load(first_grad_sums + state)
    for t in tl.static_range(T):
        grad += links[1 + 2 * t] * _load(grad_sums + t * B * J * D + state)
        grad += links[2 + 2 * t] * _load(summed_capsules + t * B * J * D + state)
    return grad


@triton.jit
def grad_poses_kernel(
    weight,  # (J, D, K, I)
    first_coupling,  # (B, J, I); or (1, J, I) with first_stride_b = 0
    first_grad_sums,  # gs of the first term, (B, J, D)
    coupling,  # c, (T, B, J, I)
    grad_logits,  # db, (T, B, J, I)
    grad_sums,  # gs, (T, B, J, D)
    summed_capsules,  # V, (T, B, J, D)
    grad_poses,  # out: du, (B, K, I)
    B,
    first_stride_b,
    I: tl.constexpr,
    J: tl.constexpr,
    D: tl.constexpr,
    K: tl.constexpr,
    T: tl.constexpr,
    BLOCK_B: tl.constexpr,
    BLOCK_I: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """du_k = Σ_jd x_jd W_jdk with x the gradient of the votes: all iterations at once. [backward]"""
    images, capsules, real = _tile(tl.program_id(0), tl.program_id(1), B, I, BLOCK_B, BLOCK_I)
    totals = ()
    for _ in tl.static_range(K):
        totals += (tl.zeros((BLOCK_B, BLOCK_I), tl.float32),)
    for j in range(J):
        links = _load_links(first_coupling, first_stride_b, coupling, grad_logits, images, j, capsules, B, I, J, T)
        for first_d in range(0, D, BLOCK_D):
            weight_at = weight + (j * D + first_d) * (K * I) + capsules
            state = (images * J + j) * D + first_d
            for d in tl.static_range(BLOCK_D):
                x = _grad_vote(links, first_grad_sums, grad_sums, summed_capsules, state + d, B, J, D, T)
                added = ()
                for k in tl.static_range(K):
                    added += (totals[k] + _load(weight_at + (d * K + k) * I)[None, :] * x,)
                totals = added
    for k in tl.static_range(K):
        tl.store(grad_poses + (images * K + k) * I + capsules[None, :], totals[k], mask=real)


@triton.jit
def grad_weight_kernel(
    poses,  # (B, K, I)
    first_coupling,  # (B, J, I); or (1, J, I) with first_stride_b = 0
    first_grad_sums,  # gs of the first term, (B, J, D)
    coupling,  # c, (T, B, J, I)
    grad_logits,  # db, (T, B, J, I)
    grad_sums,  # gs, (T, B, J, D)
    summed_capsules,  # V, (T, B, J, D)
    grad_weight,  # out: dW, (J, D, K, I)
    B,
    first_stride_b,
    I: tl.constexpr,
    J: tl.constexpr,
    D: tl.constexpr,
    K: tl.constexpr,
    T: tl.constexpr,
    BLOCK_B: tl.constexpr,
    BLOCK_I: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """dW_jdk = Σ_b x_jd u_k with x the gradient of the votes: a program walks over the whole batch. [backward]"""
    block = tl.program_id(0)
    j = tl.program_id(1) // (D // BLOCK_D)
    first_d = tl.program_id(1) % (D // BLOCK_D) * BLOCK_D
    totals = ()
    for _ in tl.static_range(BLOCK_D * K):
        totals += (tl.zeros((BLOCK_B, BLOCK_I), tl.float32),)

    for block_b in range(tl.cdiv(B, BLOCK_B)):
        images, capsules, real = _tile(block_b, block, B, I, BLOCK_B, BLOCK_I)
        u = _load_poses(poses, images, capsules, I, K)
        links = _load_links(first_coupling, first_stride_b, coupling, grad_logits, images, j, capsules, B, I, J, T)
        added = ()
        for d in tl.static_range(BLOCK_D):
            state = (images * J + j) * D + first_d + d
            x = _grad_vote(links, first_grad_sums, grad_sums, summed_capsules, state, B, J, D, T)
            x = tl.where(real, x, 0.0)
            for k in tl.static_range(K):
                added += (totals[d * K + k] + x * u[k],)
        totals = added

    capsule = block * BLOCK_I + tl.arange(0, BLOCK_I)
    for d in tl.static_range(BLOCK_D):
        for k in tl.static_range(K):
            place = ((j * D + first_d + d) * K + k) * I + capsule
            tl.store(grad_weight + place, tl.sum(totals[d * K + k], 0), mask=capsule < I)
