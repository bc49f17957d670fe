# mypy: ignore-errors
# (this file is in Triton's language, which has Python's grammar and not its types)
"""The Triton kernels of vote-free routing; :mod:`torchcaps.ops.dynamic_routing.triton` launches them.

README.md beside this file derives every step; the names in brackets here, such as [logits], are its headings, and gs,
db, du and dW its g_s, g_b, g_u and g_W. Where it pulls V back to the inputs by a matrix product, the kernels make a
vote when they need it, in registers; and the gradient of the votes, x_j = Σ_t cᵗ_j gsᵗ_j + dbᵗ_j Vᵗ_j, gives du and dW
for all iterations at once.

Poses are read as (B, K, I), weights as (J, D, K, I), coupling as (B, J, I): the input capsules lie next to each other.

The large kernels are written thread by thread: a Triton tensor holds one number for each of a program's WARPS · 32
threads, and what a thread holds several of is a tuple. The 32 lanes of a warp hold 32 neighbouring input capsules, its
registers IMAGES images, and the program's warps further images of the same input capsules. Hence

- a thread computes its votes alone, out of registers: no shared memory and no barrier inside a loop, and no layout for
  the compiler to choose (with two-dimensional tiles, Triton 3.6 and 3.7 choose different ones, one of them slow);
- a weight, once loaded, serves all images of its thread, and the other warps find it in the L1 cache;
- sums over j, d and k are a thread's own; those over images or input capsules cross threads once, at the end, in a
  fixed order, so that two runs give the same bits. There are no atomics.

Poses, weights, bias and prior may be in half precision; everything is computed, and kept between kernels, in float32.

A value (J, D) of an image, such as v_j, is one address for a whole warp: it is read as a broadcast.

Past the edge of the batch or of the input capsules, threads repeat the last one (:func:`_place`): loads need no mask,
sums over such an axis take the repeated ones as zero, and stores leave them out.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _place(block_b, block_i, B, I: tl.constexpr, IMAGES: tl.constexpr, WARPS: tl.constexpr):
    """The input capsule of every thread, its images (a tuple), and for each image whether the two are real."""
    thread = tl.arange(0, WARPS * 32)
    capsule = block_i * 32 + thread % 32
    images = ()
    real = ()
    for n in tl.static_range(IMAGES):
        image = (block_b * IMAGES + n) * WARPS + thread // 32
        images += (tl.minimum(image, B - 1),)
        real += ((image < B) & (capsule < I),)
    return tl.minimum(capsule, I - 1), images, real


@triton.jit
def _zeros(COUNT: tl.constexpr, WARPS: tl.constexpr):
    zeros = ()
    for _ in tl.static_range(COUNT):
        zeros += (tl.zeros((WARPS * 32,), tl.float32),)
    return zeros


@triton.jit
def _spread(total, WARPS: tl.constexpr):
    """A sum over lanes (WARPS, 1) or over warps (1, 32) back to every thread."""
    return tl.reshape(tl.broadcast_to(total, (WARPS, 32)), (WARPS * 32,))


@triton.jit
def _load_poses(poses, images, capsule, I: tl.constexpr, K: tl.constexpr, IMAGES: tl.constexpr):
    """u_k of every image of a thread; component k of image n is number n·K + k."""
    u = ()
    for n in tl.static_range(IMAGES):
        at = poses + images[n] * (K * I) + capsule
        for k in tl.static_range(K):
            u += (tl.load(at + k * I).to(tl.float32),)
    return u


@triton.jit
def _load_row(weight, I: tl.constexpr, K: tl.constexpr):
    """W_jdk for all k; ``weight`` points at the first."""
    row = ()
    for k in tl.static_range(K):
        row += (tl.load(weight + k * I).to(tl.float32),)
    return row


@triton.jit
def _vote(row, u, n: tl.constexpr, K: tl.constexpr):
    """Component d of û_j = W_j u of image n."""
    vote = row[0] * u[n * K]
    for k in tl.static_range(1, K):
        vote += row[k] * u[n * K + k]
    return vote


@triton.jit(do_not_specialize=["B"])
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
    IMAGES: tl.constexpr,
    WARPS: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Logits b = prior + ⟨û, V⟩ and c = softmax(b); backward also a = ⟨û, gs⟩ and db = c∘(a − Σ c a).

    [logits; coupling; coupling, backward].

    With a softmax over the inputs, whose sums cross the programs, it leaves b in ``coupling`` and a in ``grad_logits``
    for :func:`compete_over_inputs_kernel`.
    """
    capsule, images, real = _place(tl.program_id(0), tl.program_id(1), B, I, IMAGES, WARPS)
    u = _load_poses(poses, images, capsule, I, K, IMAGES)
    # over the outputs seen so far: the largest logit, Σ exp(b − largest), Σ exp(b − largest) a
    largest = ()
    totals = ()
    for _ in tl.static_range(IMAGES):
        largest += (tl.full((WARPS * 32,), 0.0 if LEAKY else -float("inf"), tl.float32),)
        totals += (tl.full((WARPS * 32,), 1.0 if LEAKY else 0.0, tl.float32),)
    total_agreements = _zeros(IMAGES, WARPS)

    for j in range(J):
        logits = _zeros(IMAGES, WARPS)
        agreements = _zeros(IMAGES, WARPS)
        for first_d in range(0, D, BLOCK_D):
            for d in tl.static_range(BLOCK_D):
                row = _load_row(weight + (j * D + first_d + d) * (K * I) + capsule, I, K)
                more_logits = ()
                more_agreements = ()
                for n in tl.static_range(IMAGES):
                    vote = _vote(row, u, n, K)
                    state = (images[n] * J + j) * D + first_d + d
                    more_logits += (logits[n] + tl.load(summed_capsules + state) * vote,)
                    if grad_logits is not None:
                        more_agreements += (agreements[n] + tl.load(grad_sums + state) * vote,)
                logits = more_logits
                if grad_logits is not None:
                    agreements = more_agreements

        larger = ()
        more_totals = ()
        more_agreements = ()
        for n in tl.static_range(IMAGES):
            logit, agreement = logits[n], agreements[n]
            link = (images[n] * J + j) * I + capsule
            if prior is not None:
                logit += tl.load(prior + j * I + capsule).to(tl.float32)
            if grad_coupling is not None:
                agreement += tl.load(grad_coupling + link)
            tl.store(coupling + link, logit, mask=real[n])
            if grad_logits is not None:
                tl.store(grad_logits + link, agreement, mask=real[n])
            larger += (tl.maximum(largest[n], logit),)
            rescale = tl.exp(largest[n] - larger[n])
            share = tl.exp(logit - larger[n])
            more_totals += (totals[n] * rescale + share,)
            more_agreements += (total_agreements[n] * rescale + share * agreement,)
        largest = larger
        totals = more_totals
        total_agreements = more_agreements

    if OVER_OUTPUTS:
        for j in range(J):
            for n in tl.static_range(IMAGES):  # every thread reads what it has stored itself
                link = (images[n] * J + j) * I + capsule
                share = tl.exp(tl.load(coupling + link, mask=real[n], other=0.0) - largest[n]) / totals[n]
                tl.store(coupling + link, share, mask=real[n])
                if grad_logits is not None:
                    agreement = tl.load(grad_logits + link, mask=real[n], other=0.0)
                    grad = share * (agreement - total_agreements[n] / totals[n])
                    tl.store(grad_logits + link, grad, mask=real[n])


@triton.jit
def compete_over_inputs_kernel(
    coupling,  # b in, c out, (B·J, I)
    grad_logits,  # a in, db out, (B·J, I), or None: forward
    I,
    LEAKY: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Coupling c = softmax of b over i, and db = c∘(a − Σ_i c a): a program a row [coupling; coupling, backward]."""
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


@triton.jit(do_not_specialize=["B", "links_stride_b", "tiles_a_split"])
def weighted_sum_kernel(
    poses,  # (B, K, I)
    weight,  # (J, D, K, I)
    links,  # c or db, (B, J, I); or (1, J, I) with links_stride_b = 0
    partial,  # out: (splits, B, J, D)
    B,
    links_stride_b,
    tiles_a_split,
    I: tl.constexpr,
    J: tl.constexpr,
    D: tl.constexpr,
    K: tl.constexpr,
    IMAGES: tl.constexpr,
    WARPS: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Σ_i c_ij û_ij = Σ_ik (c_ij u_ik) W_ijk over a split of the input capsules, for BLOCK_D components of one output.

    [first sum; weighted sum]; with db in place of c it gives the gradient of V [logits, backward].
    """
    split = tl.program_id(0)
    j = tl.program_id(1) // (D // BLOCK_D)
    first_d = tl.program_id(1) % (D // BLOCK_D) * BLOCK_D
    block_b = tl.program_id(2)
    totals = _zeros(BLOCK_D * IMAGES, WARPS)
    first_tile = split * tiles_a_split
    for tile in range(first_tile, tl.minimum(first_tile + tiles_a_split, tl.cdiv(I, 32))):
        capsule, images, real = _place(block_b, tile, B, I, IMAGES, WARPS)
        link = ()
        for n in tl.static_range(IMAGES):
            link += (tl.where(real[n], tl.load(links + images[n] * links_stride_b + j * I + capsule), 0.0),)
        weight_at = weight + (j * D + first_d) * (K * I) + capsule
        for k in tl.static_range(K):
            linked = ()
            for n in tl.static_range(IMAGES):
                pose = tl.load(poses + images[n] * (K * I) + capsule + k * I).to(tl.float32)
                linked += (link[n] * pose,)
            more = ()
            for d in tl.static_range(BLOCK_D):
                w = tl.load(weight_at + (d * K + k) * I).to(tl.float32)
                for n in tl.static_range(IMAGES):
                    more += (totals[d * IMAGES + n] + w * linked[n],)
            totals = more

    thread = tl.arange(0, WARPS * 32)
    for n in tl.static_range(IMAGES):
        own = tl.zeros((WARPS * 32,), tl.float32)
        for d in tl.static_range(BLOCK_D):  # lane d keeps component d, so that one store writes them all
            total = tl.sum(tl.reshape(totals[d * IMAGES + n], (WARPS, 32)), 1)
            own = tl.where(thread % 32 == d, _spread(total[:, None], WARPS), own)
        image = (block_b * IMAGES + n) * WARPS + thread // 32
        state = ((split * B + image) * J + j) * D + first_d + thread % 32
        tl.store(partial + state, own, mask=(image < B) & (thread % 32 < BLOCK_D))


@triton.jit(do_not_specialize=["rows", "splits"])
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
    """Sum s = Σ partial sums + bias, v = squash(s), V += v [weighted sum; squash]."""
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


@triton.jit(do_not_specialize=["rows", "splits"])
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
    """G += Σ partial sums; gs = h·G + 2h'(s·G)s, the squash's backward [squash, backward]."""
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
    image,
    j,
    capsule,
    B,
    I: tl.constexpr,
    J: tl.constexpr,
    T: tl.constexpr,
):
    """Of one image, c of the first term, then c and db of the T others in turn."""
    links = (tl.load(first_coupling + image * first_stride_b + j * I + capsule),)
    link = (image * J + j) * I + capsule
    for t in tl.static_range(T):
        links += (tl.load(coupling + t * B * J * I + link), tl.load(grad_logits + t * B * J * I + link))
    return links


@triton.jit
def _grad_vote(
    links, first_grad_sums, grad_sums, summed_capsules, state, B, J: tl.constexpr, D: tl.constexpr, T: tl.constexpr
):
    """Component d of the gradient of the votes, x_j = Σ_t cᵗ_j gsᵗ_j + dbᵗ_j Vᵗ_j, of one image."""
    grad = links[0] * tl.load(first_grad_sums + state)
    for t in tl.static_range(T):
        grad += links[1 + 2 * t] * tl.load(grad_sums + t * B * J * D + state)
        grad += links[2 + 2 * t] * tl.load(summed_capsules + t * B * J * D + state)
    return grad


@triton.jit(do_not_specialize=["B", "first_stride_b"])
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
    IMAGES: tl.constexpr,
    WARPS: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """du_k = Σ_jd x_jd W_jdk with x the gradient of the votes: all iterations at once [poses, backward]."""
    capsule, images, real = _place(tl.program_id(0), tl.program_id(1), B, I, IMAGES, WARPS)
    totals = _zeros(IMAGES * K, WARPS)
    for j in range(J):
        links = ()
        for n in tl.static_range(IMAGES):
            links += (
                _load_links(first_coupling, first_stride_b, coupling, grad_logits, images[n], j, capsule, B, I, J, T),
            )
        for first_d in range(0, D, BLOCK_D):
            for d in tl.static_range(BLOCK_D):
                row = _load_row(weight + (j * D + first_d + d) * (K * I) + capsule, I, K)
                more = ()
                for n in tl.static_range(IMAGES):
                    state = (images[n] * J + j) * D + first_d + d
                    x = _grad_vote(links[n], first_grad_sums, grad_sums, summed_capsules, state, B, J, D, T)
                    for k in tl.static_range(K):
                        more += (totals[n * K + k] + row[k] * x,)
                totals = more
    for n in tl.static_range(IMAGES):
        at = grad_poses + images[n] * (K * I) + capsule
        for k in tl.static_range(K):
            tl.store(at + k * I, totals[n * K + k], mask=real[n])


@triton.jit(do_not_specialize=["B", "first_stride_b"])
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
    WARPS: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """dW_jdk = Σ_b x_jd u_k, x the gradient of the votes: a program walks over the whole batch [weight, backward]."""
    tile = tl.program_id(0)
    j = tl.program_id(1) // (D // BLOCK_D)
    first_d = tl.program_id(1) % (D // BLOCK_D) * BLOCK_D
    totals = _zeros(BLOCK_D * K, WARPS)
    for block_b in range(tl.cdiv(B, WARPS)):
        capsule, images, real = _place(block_b, tile, B, I, 1, WARPS)
        image = images[0]
        u = _load_poses(poses, images, capsule, I, K, 1)
        links = _load_links(first_coupling, first_stride_b, coupling, grad_logits, image, j, capsule, B, I, J, T)
        more = ()
        for d in tl.static_range(BLOCK_D):
            state = (image * J + j) * D + first_d + d
            x = _grad_vote(links, first_grad_sums, grad_sums, summed_capsules, state, B, J, D, T)
            x = tl.where(real[0], x, 0.0)
            for k in tl.static_range(K):
                more += (totals[d * K + k] + x * u[k],)
        totals = more

    thread = tl.arange(0, WARPS * 32)
    capsule = tile * 32 + thread % 32
    first_warp = (capsule < I) & (thread < 32)
    for d in tl.static_range(BLOCK_D):
        for k in tl.static_range(K):
            total = _spread(tl.sum(tl.reshape(totals[d * K + k], (WARPS, 32)), 0)[None, :], WARPS)
            tl.store(grad_weight + ((j * D + first_d + d) * K + k) * I + capsule, total, mask=first_warp)
