"""Philox 4x32-10 in NumPy: the same bits everywhere.

Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011.

A key is 64 bits of SHA-256(seed, path, draw number, kind); a counter is (block index, step), 64 bits each.
"""

from __future__ import annotations

from functools import lru_cache
from hashlib import sha256

import numpy as np

M0, M1 = np.uint64(0xD2511F53), np.uint64(0xCD9E8D57)
W0, W1 = 0x9E3779B9, 0xBB67AE85
_LOW, _SHIFT = np.uint64(0xFFFFFFFF), np.uint64(32)
_CHUNK = 16384  # blocks at a time: the working set stays in cache


@lru_cache(maxsize=4096)
def draw_key(seed: int, path: str, number: int, kind: str) -> int:
    """The 64-bit key of a draw: the first 8 bytes, little-endian, of the hash of its parts, each after its length."""
    parts = [str(seed).encode(), path.encode("utf-8", "surrogatepass"), str(number).encode(), kind.encode()]
    text = b"".join(len(p).to_bytes(8, "little") + p for p in parts)
    return int.from_bytes(sha256(text).digest()[:8], "little")


def philox(state: np.ndarray, key: tuple[int, int]) -> tuple[np.ndarray, ...]:
    """Ten rounds over four words of counter under two words of key, in the memory of `state`: uint64 [6 count], of which
    the first four rows are the counter, below 2^32; gives the four words of the result as rows of it."""
    c0, c1, c2, c3, p0, p1 = state
    k0, k1 = key
    for _ in range(10):
        np.multiply(c0, M0, out=p0)
        np.multiply(c2, M1, out=p1)
        np.right_shift(p1, _SHIFT, out=c0)
        np.bitwise_xor(c0, c1, out=c0)
        np.bitwise_xor(c0, np.uint64(k0), out=c0)
        np.right_shift(p0, _SHIFT, out=c2)
        np.bitwise_xor(c2, c3, out=c2)
        np.bitwise_xor(c2, np.uint64(k1), out=c2)
        np.bitwise_and(p1, _LOW, out=p1)
        np.bitwise_and(p0, _LOW, out=p0)
        c1, c3, p1, p0 = p1, p0, c1, c3
        k0, k1 = (k0 + W0) & 0xFFFFFFFF, (k1 + W1) & 0xFFFFFFFF
    return c0, c1, c2, c3


def blocks(key: int, first: int, count: int, step: int) -> np.ndarray:
    """Blocks `first` … of the stream of `key` at `step`: uint32 [count 4]."""
    out = np.empty((count, 4), np.uint32)
    memory = np.empty((6, min(_CHUNK, count)), np.uint64)
    for start in range(0, count, _CHUNK):
        size = min(_CHUNK, count - start)
        state = memory[:, :size]
        state[0] = np.arange(first + start, first + start + size, dtype=np.uint64)
        np.right_shift(state[0], _SHIFT, out=state[1])
        np.bitwise_and(state[0], _LOW, out=state[0])
        state[2:4] = [[step & 0xFFFFFFFF], [(step >> 32) & 0xFFFFFFFF]]
        for column, word in enumerate(philox(state, (key & 0xFFFFFFFF, key >> 32))):
            out[start : start + size, column] = word
    return out


def words(key: int, first: int, count: int, step: int) -> np.ndarray:
    """Words `first` … : element e is word e mod 4 of block e div 4. uint32 [count]."""
    block = first // 4
    found = blocks(key, block, (first + count + 3) // 4 - block, step).reshape(-1)
    return found[first - 4 * block :][:count]


def halves(key: int, first: int, count: int, step: int) -> np.ndarray:
    """16-bit halves: element e is half e mod 8 of block e div 8, the low half of a word first. uint16 [count]."""
    block = first // 8
    found = blocks(key, block, (first + count + 7) // 8 - block, step).astype("<u4").view("<u2").reshape(-1)
    return found[first - 8 * block :][:count]
