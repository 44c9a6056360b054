"""The definition of products of packed weights by 8-bit activations (docs/exactness.md), in NumPy and slow."""

import numpy as np
from gguf import GGML_QUANT_SIZES
from gguf import GGMLQuantizationType as Q
from gguf.quants import dequantize

from gguf_blocks import PLACES, put_scales

ZERO = {Q.Q3_K: 4, Q.Q4_0: 8, Q.Q5_0: 16, Q.Q6_K: 32}
IQ4 = np.array([-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113])
E2M1 = np.array([0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12])  # doubled
TABLES = {Q.IQ4_NL: IQ4, Q.IQ4_XS: IQ4, Q.MXFP4: E2M1}
HALVED = (Q.Q2_K, Q.Q3_K, Q.Q6_K, Q.IQ2_XS, Q.IQ2_S, Q.IQ1_M)  # 16 weights have a scale of their own
# Weights in codebooks, or packed by five: what a scale is multiplied by, so that they are whole numbers.
UNITS = {
    Q.TQ1_0: 1, Q.TQ2_0: 1, Q.IQ1_S: 1 / 8, Q.IQ1_M: 1 / 8, Q.IQ2_XXS: 1 / 8, Q.IQ2_XS: 1 / 8, Q.IQ2_S: 1 / 8,
    Q.IQ3_XXS: 1 / 2, Q.IQ3_S: 1,
}  # fmt: skip


def fused(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
    """a · b + c of float32 numbers, rounded once.

    The product is exact in float64. The sum is rounded there to odd: of the two numbers around it the one whose last
    bit is 1, so that rounding it to float32 afterwards rounds as if the sum had been exact (Boldo & Melquiond 2008).
    """
    product, c = a.astype(np.float64) * b.astype(np.float64), c.astype(np.float64)
    total = product + c
    part = total - product
    error = (product - (total - part)) + (c - part)
    even = (total.view(np.int64) & 1) == 0
    towards = np.nextafter(total, np.where(error > 0, np.inf, -np.inf))
    return np.where((error != 0) & even, towards, total).astype(np.float32)


def quantize(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Integers [rows, blocks, 32] and scales [rows, blocks] of float32 activations [rows, in]."""
    blocks = x.reshape(len(x), -1, 32)
    most = np.abs(blocks).max(-1)
    with np.errstate(divide="ignore", over="ignore"):
        inverse = np.float32(127) / most
    inverse = np.where(inverse < np.inf, inverse, np.float32(0))
    return np.rint(blocks * inverse[..., None]).astype(np.int64), most / np.float32(127)


def own_scales(b: np.ndarray, format: Q) -> np.ndarray:
    """Of blocks [blocks, bytes] whose weights are in codebooks: the whole scales of each 16 or 32, or 1 of all."""

    def words(first: int, last: int, kind: type) -> np.ndarray:
        return b[:, first:last].copy().view(kind).astype(np.int64)

    def nibbles(first: int, last: int) -> np.ndarray:
        return np.stack([b[:, first:last] & 15, b[:, first:last] >> 4], 2).reshape(len(b), -1).astype(np.int64)

    if format in (Q.TQ1_0, Q.TQ2_0):
        return np.ones((len(b), 1), np.int64)
    bits = {
        Q.IQ1_S: lambda: words(34, 50, np.uint16) >> 12 & 7,
        Q.IQ1_M: lambda: (words(48, 56, np.uint16)[..., None] >> np.array([0, 3, 6, 9]) & 7).reshape(len(b), -1),
        Q.IQ2_XXS: lambda: words(2, 66, np.uint32)[:, 1::2] >> 28,
        Q.IQ2_XS: lambda: nibbles(66, 74),
        Q.IQ2_S: lambda: nibbles(74, 82),
        Q.IQ3_XXS: lambda: words(66, 98, np.uint32) >> 28,
        Q.IQ3_S: lambda: nibbles(106, 110),
    }[format]()
    return 2 * bits + 1


def codebook_integers(b: np.ndarray, format: Q) -> tuple[np.ndarray, np.ndarray]:
    """Of such blocks: the whole numbers [blocks, 256], and the scales of each 16, 32 or all of them."""
    alone = b.copy()
    put_scales(alone, format, PLACES[format][0], np.ones(len(b)))
    own = own_scales(b, format).astype(np.float32) * np.float32(UNITS[format])
    q = dequantize(alone, format) / np.repeat(own, 256 // own.shape[1], 1)
    assert (q == np.rint(q)).all()
    if format is Q.IQ1_M:
        parts = b[:, 48:56].copy().view(np.uint16) >> 12 << np.arange(0, 16, 4, dtype=np.uint16)
        whole = np.bitwise_or.reduce(parts, 1).astype(np.uint16).view(np.float16)
    else:
        whole = b[:, PLACES[format][0] :][:, :2].copy().view(np.float16)[:, 0]
    return np.rint(q), whole[:, None].astype(np.float32) * own


def integers(blocks: np.ndarray, format: Q) -> tuple[np.ndarray, np.ndarray, np.ndarray | None]:
    """Of a GGUF file's blocks [out, bytes]: signed integers [out, in / 16, 16], scales and minimums of these 16."""
    weights, size = GGML_QUANT_SIZES[format]
    rows, b = len(blocks), blocks.reshape(-1, size)

    def half(at: int) -> np.ndarray:
        return b[:, at : at + 2].copy().view(np.float16).astype(np.float32)

    def two_bits(at: int) -> np.ndarray:  # of each 32 bytes the lowest bits, then those above, …
        some = b[:, at : at + 64].reshape(len(b), 2, 1, 32)
        return (some >> np.array([0, 2, 4, 6], np.uint8)[:, None] & 3).reshape(len(b), -1)

    def nibbles(at: int, count: int) -> np.ndarray:  # of each `count` bytes the low halves, then the high ones
        some = b[:, at : at + weights // 2].reshape(len(b), -1, count)
        return np.stack([some & 15, some >> 4], 2).reshape(len(b), -1)

    def fifth(at: int) -> np.ndarray:
        return np.unpackbits(b[:, at : at + 4], axis=1, bitorder="little")

    minimums = None
    if format in UNITS:
        q, scales = codebook_integers(b, format)
    elif format is Q.Q8_0:
        q, scales = b[:, 2:].view(np.int8), half(0)
    elif format in (Q.Q4_0, Q.Q4_1, Q.Q5_0, Q.Q5_1):
        start = 4 if format in (Q.Q4_1, Q.Q5_1) else 2
        high = 0 if format in (Q.Q4_0, Q.Q4_1) else fifth(start).astype(np.int64) << 4
        q, scales = nibbles(size - 16, 16) | high, half(0)
        minimums = half(2) if start == 4 else None
    elif format in (Q.IQ4_NL, Q.MXFP4):
        exponents = b[:, :1].astype(np.float64) - 128
        q, scales = nibbles(size - 16, 16), half(0) if format is Q.IQ4_NL else np.exp2(exponents).astype(np.float32)
    elif format is Q.IQ4_XS:
        low = np.stack([b[:, 4:8] & 15, b[:, 4:8] >> 4], 2).reshape(len(b), 8)
        high = b[:, 2:4].copy().view(np.uint16) >> np.arange(0, 16, 2, dtype=np.uint16) & 3
        q, scales = nibbles(8, 16), half(0) * (low.astype(np.float32) + 16 * high.astype(np.float32) - 32)
    elif format is Q.Q2_K:
        q, scales, minimums = two_bits(16), half(80) * (b[:, :16] & 15), half(82) * (b[:, :16] >> 4)
    elif format is Q.Q3_K:
        six = b[:, 96:108].astype(np.int64)
        own = np.concatenate([six[:, :8] & 15, six[:, :8] >> 4], 1)
        own += np.concatenate([six[:, 8:] >> shift & 3 for shift in (0, 2, 4, 6)], 1) * 16 - 32
        high = np.concatenate([b[:, :32] >> part & 1 for part in range(8)], 1)
        q, scales = two_bits(32) | high << 2, half(108) * own.astype(np.float32)
    elif format is Q.Q6_K:
        low = nibbles(0, 64)
        high = np.concatenate([b[:, 128 + h : 160 + h] >> s & 3 for h in (0, 32) for s in (0, 2, 4, 6)], 1)
        q, scales = low | high << 4, half(208) * b[:, 192:208].view(np.int8).astype(np.float32)
    else:
        s = b[:, 4:16].astype(np.int64)
        six = np.concatenate([s[:, :4] & 63, s[:, 8:] & 15 | s[:, :4] >> 6 << 4], 1)
        own = np.concatenate([s[:, 4:8] & 63, s[:, 8:] >> 4 | s[:, 4:8] >> 6 << 4], 1)
        q = nibbles(size - 128, 32)
        if format is Q.Q5_K:
            q = q | np.concatenate([b[:, 16:48] >> part & 1 for part in range(8)], 1) << 4
        scales, minimums = half(0) * six.astype(np.float32), half(2) * own.astype(np.float32)
    spread = [
        None if x is None else np.repeat(x, weights // 16 // x.shape[1], 1).reshape(rows, -1)
        for x in (scales, minimums)
    ]
    q = TABLES[format][q] if format in TABLES else q.astype(np.int64) - ZERO.get(format, 0)
    q = q.reshape(rows, -1, 16)
    least = spread[1] if format in (Q.Q4_1, Q.Q5_1) or spread[1] is None else -spread[1]
    assert spread[0] is not None
    return q, spread[0], least


def product(x: np.ndarray, blocks: np.ndarray, format: Q) -> np.ndarray:
    """x Wᵀ [rows, out] in float32, before bias and rounding, of float32 activations [rows, in]."""
    return product_of(x, *integers(blocks, format), width=16 if format in HALVED else 32)


def product_of(x: np.ndarray, q: np.ndarray, scales: np.ndarray, minimums: np.ndarray | None, width: int) -> np.ndarray:
    """The same of what `integers` finds; `width` weights have a scale."""
    activations, own = quantize(x)
    y = np.zeros((len(x), len(q)), np.float32)
    q, activations = q.reshape(len(q), -1, width), activations.reshape(len(x), -1, width)
    for part in range(x.shape[1] // width):
        sums, number = activations[:, part] @ q[:, part].T, part * width // 16
        s = own[:, part * width // 32, None]
        y = fused(sums.astype(np.float32), scales[None, :, number] * s, y)
        if minimums is not None:
            total = s * activations[:, part].sum(-1).astype(np.float32)[:, None]
            y = fused(np.broadcast_to(minimums[None, :, number], y.shape), np.broadcast_to(total, y.shape), y)
    return y
