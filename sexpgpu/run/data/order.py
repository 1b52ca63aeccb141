"""The order of samples: a permutation an epoch, as a pure function of (seed, epoch, index), O(1) to seek.

The permutation is a Feistel network over the smallest even number of bits that holds 0 … n-1, with cycle walking:
a result outside 0 … n-1 is put through again until it falls inside (at most four times n values, so about four
rounds in the mean at worst). A Feistel network is a bijection whatever its round function, and the cycle through a
point inside always comes back inside, so the walk is a bijection on 0 … n-1. Round keys come from SHA-256 of
(seed, epoch), the round function is splitmix64's finalizer: nothing depends on a version of numpy.
"""

from __future__ import annotations

import hashlib
from functools import lru_cache

import numpy as np

WHOLE = 1 << 18  # samples up to which a whole epoch's permutation is kept (2 MiB)
ROUNDS = 12  # more than the 4 of theory: the halves are narrow for small n


def round_keys(*what: object) -> np.ndarray:
    """ROUNDS 64-bit keys from SHA-256 of the words in `what`."""
    text = "sexpgpu-order-1\n" + "\n".join(str(word) for word in what)
    stream = b"".join(hashlib.sha256(f"{text}\n{i}".encode()).digest() for i in range((ROUNDS + 3) // 4))
    return np.frombuffer(stream, dtype="<u8")[:ROUNDS].astype(np.uint64)


def _mix(x: np.ndarray) -> np.ndarray:
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def _half(n: int) -> int:
    """Bits of one half of the network for 0 … n-1."""
    return max(1, (max(n - 1, 1).bit_length() + 1) // 2)


def permute(index: np.ndarray, n: int, keys: np.ndarray) -> np.ndarray:
    """Where `index` (integers of 0 … n-1, any shape) goes; int64 of the same shape."""
    half = _half(n)
    mask, top, shift = np.uint64((1 << half) - 1), np.uint64(64 - half), np.uint64(half)
    x = np.asarray(index).astype(np.uint64).reshape(-1)
    todo = np.arange(x.size)
    while todo.size:
        left, right = x[todo] >> shift, x[todo] & mask
        for key in keys:
            left, right = right, left ^ (_mix(right * np.uint64(0x9E3779B97F4A7C15) + key) >> top)
        walked = (left << shift) | right
        x[todo] = walked
        todo = todo[walked >= np.uint64(n)]
    return x.astype(np.int64).reshape(np.shape(index))


def batch_indices(n: int, seed: int, batch: int, step: int, shuffle: bool) -> np.ndarray:
    """The `batch` sample numbers (int64, of 0 … n-1) of update `step`, counted from 0; may span epochs."""
    position = np.arange(step * batch, (step + 1) * batch, dtype=np.int64)
    epochs, index = np.divmod(position, n)
    if not shuffle:
        return index
    out = np.empty_like(index)
    for epoch in range(int(epochs[0]), int(epochs[-1]) + 1):
        here = epochs == epoch
        out[here] = _in_epoch(index[here], n, seed, epoch)
    return out


def _in_epoch(index: np.ndarray, n: int, seed: int, epoch: int) -> np.ndarray:
    if n <= WHOLE:
        return _whole_epoch(n, seed, epoch)[index]
    return permute(index, n, round_keys(seed, epoch))


@lru_cache(maxsize=2)
def _whole_epoch(n: int, seed: int, epoch: int) -> np.ndarray:
    """The same numbers as `permute` gives one by one: a few dozen numpy calls an epoch instead of a step."""
    table = _network(_half(n), round_keys(seed, epoch))  # alone: nothing lies outside to walk on
    order = table[:n].copy()
    outside = np.flatnonzero(order >= n)
    while outside.size:
        order[outside] = table[order[outside]]
        outside = outside[order[outside] >= n]
    order.setflags(write=False)
    return order


def _network(half: int, keys: np.ndarray) -> np.ndarray:
    """Where the Feistel network takes each of 0 … 4^half-1 (int64). A round's function is made once for each value of a half."""
    values, top = np.arange(1 << half, dtype=np.uint64), np.uint64(64 - half)
    left, right = np.repeat(np.arange(1 << half), 1 << half), np.tile(np.arange(1 << half), 1 << half)
    for key in keys:
        turned = (_mix(values * np.uint64(0x9E3779B97F4A7C15) + key) >> top).astype(np.int64)
        left, right = right, left ^ turned[right]
    return (left << half) | right


def cursor(n: int, batch: int, step: int) -> tuple[int, int]:
    """(epoch, index) of the first sample not yet used after `step` updates."""
    return divmod(step * batch, n)
