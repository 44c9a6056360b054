"""Where the blocks of GGUF formats have their float16 scales, for tests that fill blocks with random bytes."""

import numpy as np
from gguf import GGMLQuantizationType as Q

# The scale, and the minimum of formats that have one. IQ1_M has four bits of its scale in each of four numbers; MXFP4's
# is a power of two.
PLACES = {
    Q.F16: [0], Q.Q4_0: [0], Q.Q4_1: [0, 2], Q.Q5_0: [0], Q.Q5_1: [0, 2], Q.Q8_0: [0], Q.Q2_K: [80, 82],
    Q.Q3_K: [108], Q.Q4_K: [0, 2], Q.Q5_K: [0, 2], Q.Q6_K: [208], Q.IQ4_NL: [0], Q.IQ4_XS: [0], Q.MXFP4: [],
    Q.NVFP4: [], Q.TQ1_0: [52], Q.TQ2_0: [64], Q.IQ1_S: [0], Q.IQ1_M: [48], Q.IQ2_XXS: [0], Q.IQ2_XS: [0], Q.IQ2_S: [0],
    Q.IQ3_XXS: [0], Q.IQ3_S: [0],
}  # fmt: skip


def put_scales(blocks: np.ndarray, format: Q, at: int, scales: np.ndarray) -> None:
    """Write a float16 for each of the blocks [blocks, bytes], where one of the PLACES of the format is."""
    bits = scales.astype(np.float16).view(np.uint16)
    if format is Q.IQ1_M:
        words = blocks[:, at : at + 8].copy().view(np.uint16)
        bits = words & 0xFFF | (bits[:, None] >> np.arange(0, 16, 4, dtype=np.uint16)) << 12
    blocks[:, at : at + (8 if format is Q.IQ1_M else 2)] = bits.reshape(len(blocks), -1).view(np.uint8)
