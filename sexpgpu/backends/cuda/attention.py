"""The gradient of attention in two kernels without atomics: the same bits every time, written where the caller wants them.

For each block of keys one program goes over the queries that see it (gradients of keys and values), and for each block of queries
one goes over its keys (gradient of queries): seven products for the five of a kernel that adds with atomics (Dao, "FlashAttention-2",
2023, section 3.1, algorithm 2). Logarithms of the sums of exponents come from the forward pass. The queries' kernel is the first: it has
a query's gradient of the result, and takes the product with the result (`Delta`) that both need.

A block's gradient is in registers when it is written, and its sum over the block's rows, in f32 and not rounded, may go out with it: the
gradient of the bias of the projection that queries, keys and values come from, less an addition of the blocks' rows.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from sexpgpu.backends.cuda.prelude import INTERPRETED, from_bf16, round_bf16
from sexpgpu.passes.epilogues import HEADS

LOG2E = 1.4426950408889634
#: (queries, keys) of a program's block, warps, stages; for the keys' kernel and the queries': the best of eight each on an H200 at d 64
KEYS = (32, 64, 4, 3)
QUERIES = (64, 32, 4, 3)


@triton.jit
def _operand(x, LOW: tl.constexpr, CPU: tl.constexpr):
    """What a product takes: as it is on the device; under the interpreter, which cannot multiply bf16, its value in f32."""
    if LOW and CPU:
        return from_bf16(x)
    return x


@triton.jit
def _lower(x, like, LOW: tl.constexpr, CPU: tl.constexpr):
    if LOW and CPU:
        return round_bf16(x)
    return x.to(like.dtype)


@triton.jit
def _keys_span(dk, dv, k, v, Q, Ct, Lse, Delta, qt, ct, first, last, n, T, SCALE: tl.constexpr, M: tl.constexpr, D: tl.constexpr, MASKED: tl.constexpr,
               EVEN: tl.constexpr, LOW: tl.constexpr, CPU: tl.constexpr):
    """Adds what the queries first … last do to the gradients of a block of keys and values."""
    d = tl.arange(0, D)
    for start in range(first, last, M):
        m = start + tl.arange(0, M)
        if EVEN:
            q = tl.load(Q + m[:, None] * qt + d[None, :])
            g = tl.load(Ct + m[:, None] * ct + d[None, :])
            lse, delta = tl.load(Lse + m), tl.load(Delta + m)
        else:
            here = m < T
            q = tl.load(Q + m[:, None] * qt + d[None, :], mask=here[:, None], other=0)
            g = tl.load(Ct + m[:, None] * ct + d[None, :], mask=here[:, None], other=0)
            lse, delta = tl.load(Lse + m, mask=here, other=float("inf")), tl.load(Delta + m, mask=here, other=0)
        q, g = _operand(q, LOW, CPU), _operand(g, LOW, CPU)
        p = tl.exp2(tl.dot(k, tl.trans(q)) * (SCALE * 1.4426950408889634) - lse[None, :] * 1.4426950408889634)
        if MASKED:
            p = tl.where(m[None, :] >= n[:, None], p, 0.0)
        dv += tl.dot(_lower(p, g, LOW, CPU), g)
        by_p = tl.dot(v, tl.trans(g))
        s = p * (by_p - delta[None, :])
        dk += tl.dot(_lower(s, q, LOW, CPU), q)
    return dk, dv


@triton.jit
def _column_sums(x, here, EVEN: tl.constexpr):
    """Sums of the rows that are there: behind the last key there is a gradient of values."""
    if EVEN:
        return tl.sum(x, axis=0)
    return tl.sum(tl.where(here, x, 0.0), axis=0)


@triton.jit
def by_keys(Q, K, V, Ct, Lse, Delta, DK, DV, Sums, qb, qh, qt, kb, kh, kt, vb, vh, vt, cb, ch, ct, dkb, dkh, dkt, dvb, dvh, dvt, T, H, SCALE: tl.constexpr,
            CAUSAL: tl.constexpr, M: tl.constexpr, N: tl.constexpr, D: tl.constexpr, EVEN: tl.constexpr, LOW: tl.constexpr, CPU: tl.constexpr, END: tl.constexpr,
            SUMS: tl.constexpr):
    """Gradients of a block of keys and values, and with SUMS their sums: Sums [b·blocks 2 h d]. END: T, where the interpreter needs it
    as a constant."""
    bh = tl.program_id(1).to(tl.int64)
    b, h = bh // H, bh % H
    block = tl.program_id(0)
    n = block * N + tl.arange(0, N)
    d = tl.arange(0, D)
    here = (n < T)[:, None]
    k = _operand(tl.load(K + b * kb + h * kh + n[:, None] * kt + d[None, :], mask=here, other=0), LOW, CPU)
    v = _operand(tl.load(V + b * vb + h * vh + n[:, None] * vt + d[None, :], mask=here, other=0), LOW, CPU)
    dk, dv = tl.zeros((N, D), tl.float32), tl.zeros((N, D), tl.float32)
    Q += b * qb + h * qh
    Ct += b * cb + h * ch
    Lse += bh * T
    Delta += bh * T
    whole = 0
    if CAUSAL:  # the queries of the diagonal, then those that see every key of the block
        first = block * N
        whole = tl.minimum(first + N, END)
        dk, dv = _keys_span(dk, dv, k, v, Q, Ct, Lse, Delta, qt, ct, first, whole, n, T, SCALE, M, D, True, EVEN, LOW, CPU)
    dk, dv = _keys_span(dk, dv, k, v, Q, Ct, Lse, Delta, qt, ct, whole, END, n, T, SCALE, M, D, False, EVEN, LOW, CPU)
    dk *= SCALE
    if SUMS:
        row = Sums + ((b * tl.num_programs(0) + block) * 2 * H + h) * D + d
        tl.store(row, _column_sums(dk, here, EVEN))
        tl.store(row + H * D, _column_sums(dv, here, EVEN))
    tl.store(DK + b * dkb + h * dkh + n[:, None] * dkt + d[None, :], dk.to(DK.dtype.element_ty), mask=here)
    tl.store(DV + b * dvb + h * dvh + n[:, None] * dvt + d[None, :], dv.to(DV.dtype.element_ty), mask=here)


@triton.jit
def _queries_span(dq, q, g, lse, delta, K, V, kt, vt, first, last, m, T, SCALE: tl.constexpr, N: tl.constexpr, D: tl.constexpr, MASKED: tl.constexpr,
                  EVEN: tl.constexpr, LOW: tl.constexpr, CPU: tl.constexpr):
    """Adds what the keys first … last do to the gradient of a block of queries."""
    d = tl.arange(0, D)
    for start in range(first, last, N):
        n = start + tl.arange(0, N)
        if EVEN:
            k, v = tl.load(K + n[:, None] * kt + d[None, :]), tl.load(V + n[:, None] * vt + d[None, :])
        else:
            here = (n < T)[:, None]
            k, v = tl.load(K + n[:, None] * kt + d[None, :], mask=here, other=0), tl.load(V + n[:, None] * vt + d[None, :], mask=here, other=0)
        k, v = _operand(k, LOW, CPU), _operand(v, LOW, CPU)
        p = tl.exp2(tl.dot(q, tl.trans(k)) * (SCALE * 1.4426950408889634) - lse[:, None] * 1.4426950408889634)
        if MASKED:
            p = tl.where(m[:, None] >= n[None, :], p, 0.0)
        if not EVEN:
            p = tl.where((n < T)[None, :], p, 0.0)
        s = p * (tl.dot(g, tl.trans(v)) - delta[:, None])
        dq += tl.dot(_lower(s, k, LOW, CPU), k)
    return dq


@triton.jit
def by_queries(Q, K, V, Ct, Lse, Out, Delta, DQ, Sums, qb, qh, qt, kb, kh, kt, vb, vh, vt, cb, ch, ct, ob, oh, ot, dqb, dqh, dqt, T, H,
               SCALE: tl.constexpr, CAUSAL: tl.constexpr, M: tl.constexpr, N: tl.constexpr, D: tl.constexpr, EVEN: tl.constexpr, LOW: tl.constexpr, CPU: tl.constexpr, END: tl.constexpr, SUMS: tl.constexpr):
    """Σ ct · out of a block of queries, into Delta [b h t], and their gradient; with SUMS its sums: Sums [b·blocks h d]."""
    bh = tl.program_id(1).to(tl.int64)
    b, h = bh // H, bh % H
    block = tl.program_id(0)
    m = block * M + tl.arange(0, M)
    d = tl.arange(0, D)
    here = m < T
    q = _operand(tl.load(Q + b * qb + h * qh + m[:, None] * qt + d[None, :], mask=here[:, None], other=0), LOW, CPU)
    g = _operand(tl.load(Ct + b * cb + h * ch + m[:, None] * ct + d[None, :], mask=here[:, None], other=0), LOW, CPU)
    lse = tl.load(Lse + bh * T + m, mask=here, other=float("inf"))
    out = _operand(tl.load(Out + b * ob + h * oh + m[:, None] * ot + d[None, :], mask=here[:, None], other=0), LOW, CPU)
    delta = tl.sum(out.to(tl.float32) * g.to(tl.float32), axis=1)
    tl.store(Delta + bh * T + m, delta, mask=here)
    dq = tl.zeros((M, D), tl.float32)
    K += b * kb + h * kh
    V += b * vb + h * vh
    whole = END
    if CAUSAL:
        whole = block * M
        stop = tl.minimum(whole + M, END)
        dq = _queries_span(dq, q, g, lse, delta, K, V, kt, vt, whole, stop, m, T, SCALE, N, D, True, EVEN, LOW, CPU)
    dq = _queries_span(dq, q, g, lse, delta, K, V, kt, vt, 0, whole, m, T, SCALE, N, D, False, EVEN, LOW, CPU)
    dq *= SCALE
    if SUMS:
        tl.store(Sums + ((b * tl.num_programs(0) + block) * H + h) * D + d, _column_sums(dq, here[:, None], EVEN))
    tl.store(DQ + b * dqb + h * dqh + m[:, None] * dqt + d[None, :], dq.to(DQ.dtype.element_ty), mask=here[:, None])


def partial_sums(b: int, h: int, t: int, d: int, keys: tuple[int, ...] = KEYS, queries: tuple[int, ...] = QUERIES) -> tuple[tuple[int, int], tuple[int, int]]:
    """Shapes [blocks elements] of the sums that `backward` leaves: of the gradients by queries, and by keys and values side by side."""
    return (b * -(-t // queries[0]), h * d), (b * -(-t // keys[1]), 2 * h * d)


def fits(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> bool:
    """Whether these kernels compute it: [b h t d] of bf16 or f16, as many keys as queries and heads, d a power of two in 16 … 128."""
    return (
        q.dim() == 4
        and q.dtype in (torch.bfloat16, torch.float16)
        and q.shape == k.shape == v.shape
        and q.shape[-1] in HEADS
        and all(x.stride(-1) == 1 for x in (q, k, v))
    )


def backward(ct: Any, q: Any, k: Any, v: Any, out: Any, lse: Any, grads: tuple[Any, Any, Any], causal: bool, scale: float,
             keys: tuple[int, int, int, int] = KEYS, queries: tuple[int, int, int, int] = QUERIES, sums: tuple[Any, ...] = ()) -> None:
    """Gradients by queries, keys and values into `grads` [b h t d], each of any strides with the last 1. lse: [b h t] f32. sums: of
    `partial_sums`, f32, where they are wanted."""
    b, h, t, d = q.shape
    ct = ct if ct.stride(-1) == 1 else ct.contiguous()
    out = out if out.stride(-1) == 1 else out.contiguous()
    lse = lse.reshape(b, h, t).contiguous()
    delta = torch.empty((b, h, t), dtype=torch.float32, device=q.device)
    low = q.dtype == torch.bfloat16
    dq, dk, dv = grads
    by_q, by_kv = sums or (delta, delta)  # no kernel touches what it makes no sums for
    shared = (*q.stride()[:3], *k.stride()[:3], *v.stride()[:3], *ct.stride()[:3])
    m, n, warps, stages = queries
    even = t % m == 0 and t % n == 0
    by_queries[(-(-t // m), b * h)](q, k, v, ct, lse, out, delta, dq, by_q, *shared, *out.stride()[:3], *dq.stride()[:3], t, h, scale, causal, m, n, d, even, low,
                                    INTERPRETED, t, bool(sums), num_warps=warps, num_stages=stages)
    m, n, warps, stages = keys
    even = t % m == 0 and t % n == 0
    by_keys[(-(-t // n), b * h)](q, k, v, ct, lse, delta, dk, dv, by_kv, *shared, *dk.stride()[:3], *dv.stride()[:3], t, h, scale, causal, m, n, d, even, low,
                                 INTERPRETED, t, bool(sums), num_warps=warps, num_stages=stages)
