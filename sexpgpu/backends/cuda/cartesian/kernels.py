"""Kernels by hand beside the generated ones: rows added by group, and the factors of weights as fragments of matrix instructions."""

from __future__ import annotations

import triton
import triton.language as tl

from sexpgpu.backends.cuda.prelude import from_bf16, to_bf16


@triton.jit(do_not_specialize=["columns"])
def segment(rows, starts, order, out, columns, WIDE: tl.constexpr, ACC: tl.constexpr, LOW: tl.constexpr):
    """out[n] = Σ rows[order[e]] over e of starts[n] … starts[n+1], in that order; rows [edges columns] of ACC."""
    node = tl.program_id(0)
    c = tl.program_id(1) * WIDE + tl.arange(0, WIDE)
    begin = tl.load(starts + node)
    end = tl.load(starts + node + 1)
    total = tl.zeros((WIDE,), ACC)
    for at in range(begin, end):
        row = tl.load(order + at).to(tl.int64)
        total += tl.load(rows + row * columns + c, mask=c < columns, other=0.0)
    place = out + node.to(tl.int64) * columns + c
    if LOW:
        tl.store(place, to_bf16(total), mask=c < columns)
    else:
        tl.store(place, total, mask=c < columns)


@triton.jit(do_not_specialize=["columns"])
def gathered(rows, begins, ends, order, out, columns, STEP: tl.constexpr, WIDE: tl.constexpr, ACC: tl.constexpr, LOW: tl.constexpr):
    """out[w] = Σ rows[order[e]] over e of begins[w] … ends[w], STEP of them at once, which are added as a tree at the end: always the same
    one. rows [… columns], bf16 where LOW; out [walks columns] of ACC. For few columns, where a row alone would not fill a warp."""
    walk = tl.program_id(0)
    c = tl.program_id(1) * WIDE + tl.arange(0, WIDE)[None, :]
    end = tl.load(ends + walk)
    total = tl.zeros((STEP, WIDE), ACC)
    for at in range(tl.load(begins + walk), end, STEP):
        e = at + tl.arange(0, STEP)[:, None]
        row = tl.load(order + e, mask=e < end, other=0).to(tl.int64)
        found = tl.load(rows + row * columns + c, mask=(e < end) & (c < columns), other=0.0)
        if LOW:
            found = from_bf16(found)
        total += found
    tl.store(out + walk.to(tl.int64) * columns + c, tl.sum(total, axis=0, keep_dims=True), mask=c < columns)


@triton.jit(do_not_specialize=["count", "columns"])
def fold(rows, nodes, more, count, columns, WIDE: tl.constexpr, LOW: tl.constexpr):
    """rows[n] += Σ rows[count + x] over x of more[n] … more[n+1], in that order; rows [… columns], in place. A program is one of the walks beyond
    the nodes' own, `nodes` [walks]: the first of a node adds all of them."""
    x = tl.program_id(0)
    node = tl.load(nodes + count + x)
    begin = tl.load(more + node)
    end = tl.load(more + node + 1)
    if (x == begin) & (x < end):
        c = tl.program_id(1) * WIDE + tl.arange(0, WIDE)
        inside = c < columns
        place = rows + node.to(tl.int64) * columns + c
        total = tl.load(place, mask=inside, other=0.0)
        if LOW:
            total = from_bf16(total)
        for at in range(begin, end):
            row = tl.load(rows + (count + at).to(tl.int64) * columns + c, mask=inside, other=0.0)
            if LOW:
                row = from_bf16(row)
            total += row
        if LOW:
            tl.store(place, to_bf16(total), mask=inside)
        else:
            tl.store(place, total, mask=inside)


@triton.jit
def _word(first, second, piece, LOW: tl.constexpr):
    """Two numbers as bf16 in an i32: rounded (piece 0), or what the rounding left (piece 1)."""
    if LOW:
        a = first
        b = second
    else:
        a = to_bf16(first)
        b = to_bf16(second)
        a = tl.where(piece == 0, a.to(tl.int16, bitcast=True), to_bf16(first - from_bf16(a)).to(tl.int16, bitcast=True)).to(tl.bfloat16, bitcast=True)
        b = tl.where(piece == 0, b.to(tl.int16, bitcast=True), to_bf16(second - from_bf16(b)).to(tl.int16, bitcast=True)).to(tl.bfloat16, bitcast=True)
    return (b.to(tl.int16, bitcast=True).to(tl.int32) << 16) | (a.to(tl.int16, bitcast=True).to(tl.int32) & 0xFFFF)


@triton.jit(do_not_specialize=["rows"])
def pack_rows(source, out, rows, INNER: tl.constexpr, PIECES: tl.constexpr, LOW: tl.constexpr, BLOCK: tl.constexpr):
    """[rows INNER] -> i32 [rows + 1, steps, PIECES, 2, 4] of 16 columns a step: word (h, t) holds columns 8h + 2t and the next; the last row is 0."""
    STEPS: tl.constexpr = (INNER + 15) // 16
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    width = STEPS * PIECES * 8
    row = at // width
    place = at % width
    column = place // (PIECES * 8) * 16 + place // 4 % 2 * 8 + place % 4 * 2
    read = row < rows
    first = tl.load(source + row * INNER + column, mask=read & (column < INNER), other=0.0)
    second = tl.load(source + row * INNER + column + 1, mask=read & (column + 1 < INNER), other=0.0)
    tl.store(out + at, _word(first, second, place // 8 % PIECES, LOW), mask=row <= rows)


@triton.jit
def pack_matrix(source, out, INNER: tl.constexpr, PATHS: tl.constexpr, CHANNELS: tl.constexpr, PIECES: tl.constexpr, LOW: tl.constexpr, BLOCK: tl.constexpr):
    """[INNER PATHS·CHANNELS] -> i32 [blocks of 8 channels, PATHS, steps, 32 lanes, PIECES, 2]: what a lane of mma.m16n8k16 holds of its right side."""
    STEPS: tl.constexpr = (INNER + 15) // 16
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    piece = at // 2 % PIECES
    lane = at // (2 * PIECES) % 32
    step = at // (64 * PIECES) % STEPS
    path = at // (64 * PIECES * STEPS) % PATHS
    block = at // (64 * PIECES * STEPS * PATHS)
    channel = block * 8 + lane // 4
    row = step * 16 + at % 2 * 8 + lane % 4 * 2
    place = source + path * CHANNELS + channel
    first = tl.load(place + row * (PATHS * CHANNELS), mask=(channel < CHANNELS) & (row < INNER), other=0.0)
    second = tl.load(place + (row + 1) * (PATHS * CHANNELS), mask=(channel < CHANNELS) & (row + 1 < INNER), other=0.0)
    tl.store(out + at, _word(first, second, piece, LOW), mask=block < (CHANNELS + 7) // 8)


@triton.jit
def split(starts, order, cuts, states, count, wide, size, steps, NODES: tl.constexpr):
    """cuts [parts + 1, wide]: where a node's edges of a part begin in `order`, in which its edges stand upward; states [parts, wide], as `launch.PartWalk` has them."""
    node = tl.program_id(0) * NODES + tl.arange(0, NODES)
    part = tl.program_id(1).to(tl.int64)
    live = node < count
    first = tl.load(starts + node, mask=live, other=0)
    last = tl.load(starts + node + 1, mask=live, other=0)
    begin = first
    far = last
    end = first
    far_end = last
    for _ in range(steps):
        middle = (begin + far) // 2
        below = tl.load(order + middle, mask=live & (begin < far), other=0) < part * size
        open_ = begin < far
        begin = tl.where(open_ & below, middle + 1, begin)
        far = tl.where(open_ & (below == 0), middle, far)
        middle = (end + far_end) // 2
        below = tl.load(order + middle, mask=live & (end < far_end), other=0) < (part + 1) * size
        open_ = end < far_end
        end = tl.where(open_ & below, middle + 1, end)
        far_end = tl.where(open_ & (below == 0), middle, far_end)
    tl.store(cuts + part * wide + node, begin, mask=live)
    alone = (part + 0 * node == 0) & (first == last)
    state = tl.where(end > begin, tl.where(begin > first, 2, 1), tl.where(alone, 1, 0))
    tl.store(states + part * wide + node, state, mask=live & (part + 0 * node + 1 < tl.num_programs(1)))


@triton.jit(do_not_specialize=["rows", "columns", "span"])
def summed(parts, out, rows, columns, span, ROWS: tl.constexpr, COLUMNS: tl.constexpr, ACC: tl.constexpr, LOW: tl.constexpr):
    """out[n] = Σ parts[row] of the n-th `span` rows, ROWS of them at once, which are added as a tree at the end: always the same one. parts [rows columns] of ACC. For
    thousands of columns of hundreds of rows, which torch adds at a fifth of this speed."""
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    total = tl.zeros((ROWS, COLUMNS), ACC)
    first = tl.program_id(1).to(tl.int64) * span
    last = tl.minimum(first + span, rows)
    for at in range(0, span, ROWS):
        row = first + at + tl.arange(0, ROWS)[:, None]
        total += tl.load(parts + row * columns + column, mask=(row < last) & (column < columns), other=0.0)
    value = tl.sum(total, axis=0, keep_dims=True)
    if LOW:
        value = to_bf16(value)
    tl.store(out + tl.program_id(1) * columns + column, value, mask=column < columns)
