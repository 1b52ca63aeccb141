"""Kernels written by hand, where no fusion of ops makes them."""

from __future__ import annotations

import triton
import triton.language as tl

from sexpgpu.backends.cuda.prelude import (
    anew,
    finite_or_zero,
    first_of,
    from_bf16,
    pair_max,
    pair_of,
    power_of_2,
    second_of,
    to_bf16,
)


@triton.jit
def finish(table, PARTS: tl.constexpr, WIDE: tl.constexpr):
    """Sums of partial results: a row of the table [n 6] is (address of partials [p e], p, e, first column, address of the
    sums [e], unused); a program adds one block of columns, in the order of the partials."""
    row = table + tl.program_id(0) * 6
    source = tl.load(row).to(tl.pointer_type(tl.float32))
    parts = tl.load(row + 1).to(tl.int32)
    elements = tl.load(row + 2).to(tl.int32)
    c = tl.load(row + 3).to(tl.int32) + tl.arange(0, WIDE)[None, :]
    target = tl.load(row + 4).to(tl.pointer_type(tl.float32))
    total = tl.zeros((PARTS, WIDE), tl.float32)
    for start in range(0, parts, PARTS):
        r = start + tl.arange(0, PARTS)[:, None]
        total += tl.load(source + r * elements + c, mask=(r < parts) & (c < elements), other=0.0)
    tl.store(target + c, tl.sum(total, axis=0, keep_dims=True), mask=c < elements)


@triton.jit(do_not_specialize_on_alignment=["labels", "ct", "losses"])  # where a part of the rows begins
def entropy_rows(logits, labels, ct, losses, CLASSES: tl.constexpr, WIDE: tl.constexpr, LOW: tl.constexpr, GRAD: tl.constexpr, STAGES: tl.constexpr):
    """A row of logits [n classes] a program: its loss, and over the logits their gradient times ct. `LOW`: bf16. Sums are of the
    losses' type, f64 for logits of f64.

    One pass for the maximum and the sum below it, one (from the cache) for the gradient.
    """
    row = tl.program_id(0).to(tl.int64)
    base = logits + row * CLASSES
    label = tl.load(labels + row)
    ACC: tl.constexpr = losses.dtype.element_ty
    top = tl.full((1, 1), float("-inf"), ACC)
    total = tl.zeros((1, WIDE), ACC)
    for start in tl.range(0, CLASSES, WIDE, num_stages=STAGES):
        c = start + tl.arange(0, WIDE)[None, :]
        x = tl.load(base + c, mask=c < CLASSES, other=float("-inf"))
        if LOW:
            x = from_bf16(x)
        x = x.to(ACC)
        new = tl.maximum(top, tl.max(x, axis=1, keep_dims=True))  # a NaN reaches the sum
        shift = finite_or_zero(new)
        total = total * tl.exp(finite_or_zero(top) - shift) * (top > float("-inf")).to(ACC) + tl.exp(x - shift)
        top = new
    shift = finite_or_zero(top)
    lse = shift + tl.log(tl.sum(total, axis=1, keep_dims=True))
    one = tl.zeros((1, 1), tl.int32)
    picked = tl.load(base + label + one)
    if LOW:
        picked = from_bf16(picked)
    tl.store(losses + row + one, lse - picked.to(ACC))
    if GRAD:
        scale = tl.load(ct + row + one)
        for start in tl.range(0, CLASSES, WIDE, num_stages=STAGES):
            c = start + tl.arange(0, WIDE)[None, :]
            x = tl.load(base + c, mask=c < CLASSES, other=0.0)
            if LOW:
                x = from_bf16(x)
            g = (tl.exp(x.to(ACC) - lse) - (c == label).to(ACC)) * scale
            if LOW:
                g = to_bf16(g)
            tl.store(base + c, g.to(logits.dtype.element_ty), mask=c < CLASSES)


@triton.jit(do_not_specialize_on_alignment=["labels", "ct", "losses"])
def entropy_once(logits, labels, ct, losses, CLASSES: tl.constexpr, WIDE: tl.constexpr):
    """`entropy_rows` with the gradient, of bf16 and an even number of classes, which reads a row once: as pairs [n classes/2] of i32, in
    tiles that stay in registers.

    Powers are of 2: of x · log2 e minus the largest, rounded, in one fma. What that rounding makes of the sum is taken back in loss and
    gradient. The label's element is written last, from its loss. A label outside takes part in neither: its loss is of a logit 0.
    """
    PAIRS: tl.constexpr = CLASSES // 2
    FULL: tl.constexpr = PAIRS // WIDE
    TILES: tl.constexpr = (PAIRS + WIDE - 1) // WIDE
    row = tl.program_id(0).to(tl.int64)
    base = logits + row * PAIRS
    c = tl.arange(0, WIDE)[None, :]
    left = c < PAIRS - FULL * WIDE
    one = tl.zeros((1, 1), tl.int32)
    xs = ()
    for i in tl.static_range(FULL):
        xs = xs + (tl.load(base + i * WIDE + c),)
    if TILES > FULL:
        xs = xs + (tl.load(base + FULL * WIDE + c, mask=left, other=-8323200),)  # two of -inf: 0xFF80FF80
    label = tl.load(labels + row + one)
    inside = (label >= 0) & (label < CLASSES)
    word = tl.load(base + label // 2, mask=inside, other=0)
    picked = tl.where(label % 2 == 0, first_of(word), second_of(word))
    scale = tl.load(ct + row + one)
    most = xs[0]
    for i in tl.static_range(1, TILES):
        most = pair_max(most, xs[i])
    shift = finite_or_zero(tl.max(tl.maximum(first_of(most), second_of(most)), axis=1, keep_dims=True))  # a NaN reaches the sum
    # log2 e; where x · log2 e would be no number, any factor will do: others are 1e36 below the largest, or equal to it
    turn = tl.where(tl.abs(shift) > 2e38, 0.5, 1.4426950408889634)
    shift2 = shift * turn
    total = tl.zeros((1, WIDE), tl.float32)
    for i in tl.static_range(TILES):
        total += power_of_2(tl.fma(first_of(xs[i]), turn, -shift2)) + power_of_2(tl.fma(second_of(xs[i]), turn, -shift2))
    above = tl.log(tl.sum(total, axis=1, keep_dims=True))
    below = tl.fma(-picked, turn, shift2) / turn
    loss = tl.where((below - below) == 0, below, shift - picked) + above
    tl.store(losses + row + one, loss)
    lse2 = shift2 + above * 1.4426950408889634
    for i in tl.static_range(TILES):
        x = anew(xs[i])
        g = pair_of(power_of_2(tl.fma(first_of(x), turn, -lse2)) * scale, power_of_2(tl.fma(second_of(x), turn, -lse2)) * scale)
        if i < FULL:
            tl.store(base + i * WIDE + c, g)
        else:
            tl.store(base + i * WIDE + c, g, mask=left)
    tl.debug_barrier()  # another thread's store over the label's element is done
    hot = to_bf16((power_of_2(loss * -1.4426950408889634) - 1.0) * scale)
    tl.store(logits.to(tl.pointer_type(tl.bfloat16)) + row * CLASSES + label, hot, mask=inside)


@triton.jit(do_not_specialize=["count", "places"])
def scattered(keys, order, rows, out, firsts, lasts, count, places, COLUMNS: tl.constexpr, CHUNK: tl.constexpr, WIDE: tl.constexpr):
    """out[keys[e]] += rows[order[e]] for e of 0 … count - 1; keys [count] in order, equal ones together, those outside 0 … places - 1 for nothing.

    A program takes CHUNK of them and WIDE columns. What is whole in there goes to its row, which no other program writes; of what began
    before, the sum goes to `firsts` [chunks COLUMNS], of what goes on behind, to `lasts`: `gathered_ends` adds those up.
    Sums are of out's type.
    """
    chunk = tl.program_id(0)
    c = tl.program_id(1) * WIDE + tl.arange(0, WIDE)[None, :]
    inside = c < COLUMNS
    begin = chunk * CHUNK
    end = tl.minimum(begin + CHUNK, count)
    key = tl.load(keys + begin)
    own = (begin == 0) | (tl.load(keys + tl.maximum(begin, 1) - 1) != key)  # whether this key began here
    ACC: tl.constexpr = out.dtype.element_ty
    total = tl.zeros((1, WIDE), ACC)
    row = tl.load(rows + tl.load(order + begin).to(tl.int64) * COLUMNS + c, mask=inside, other=0.0)
    for at in range(begin, end):
        e = at + tl.full((), 1, tl.int32)  # the one behind, whose row is on its way while this one's is added
        following = tl.load(keys + e, mask=e < count, other=-1)
        ahead = tl.load(order + e, mask=e < end, other=0).to(tl.int64)
        total += row
        row = tl.load(rows + ahead * COLUMNS + c, mask=c < tl.where(e < end, COLUMNS, 0), other=0.0)
        if (following != key) | (e == count):
            good = c < tl.where((key >= 0) & (key < places), COLUMNS, 0)
            place = out + key.to(tl.int64) * COLUMNS + c
            if own:
                tl.store(place, tl.load(place, mask=good, other=0.0) + total, mask=good)
            else:
                tl.store(firsts + chunk.to(tl.int64) * COLUMNS + c, total, mask=inside)
            total = tl.zeros((1, WIDE), ACC)
            own = own | (e > begin)
        elif e == end:
            if own:
                tl.store(lasts + chunk.to(tl.int64) * COLUMNS + c, total, mask=inside)
            else:
                tl.store(firsts + chunk.to(tl.int64) * COLUMNS + c, total, mask=inside)
        key = following


@triton.jit(do_not_specialize=["count", "places"])
def gathered_ends(keys, out, firsts, lasts, count, places, COLUMNS: tl.constexpr, CHUNK: tl.constexpr, WIDE: tl.constexpr, STEP: tl.constexpr):
    """For the key that began in a chunk and goes on behind it: out[key] += its sums, of the chunks in their order, STEP at once."""
    chunk = tl.program_id(0)
    c = tl.program_id(1) * WIDE + tl.arange(0, WIDE)[None, :]
    inside = c < COLUMNS
    begin, end = chunk * CHUNK, (chunk + 1) * CHUNK
    if end < count:
        key = tl.load(keys + end - 1)
        own = (begin == 0) | (tl.load(keys + begin) != key) | (tl.load(keys + tl.maximum(begin, 1) - 1) != key)
        if own & (tl.load(keys + end) == key):
            total = tl.load(lasts + chunk.to(tl.int64) * COLUMNS + c, mask=inside, other=0.0)
            at = chunk + 1
            go = 1
            while go > 0:
                n = at + tl.arange(0, STEP)[:, None]
                there = n.to(tl.int64) * CHUNK < count
                same = there & (tl.load(keys + n.to(tl.int64) * CHUNK, mask=there, other=-1) == key)
                total += tl.sum(tl.load(firsts + n.to(tl.int64) * COLUMNS + c, mask=same & inside, other=0.0), axis=0, keep_dims=True)
                go = tl.min(same.to(tl.int32))
                at += STEP
            good = c < tl.where((key >= 0) & (key < places), COLUMNS, 0)
            place = out + key.to(tl.int64) * COLUMNS + c
            tl.store(place, tl.load(place, mask=good, other=0.0) + total, mask=good)
