"""Let Triton's interpreter round a product's element alike wherever it stands in a tile, as a GPU does.

It multiplies by NumPy, whose library rounds by an element's place on some processors (Zen 3). In float64 the places
differ by far less than float32 can show.
"""

from typing import Any

import numpy as np


def install() -> None:
    try:
        from triton.runtime import interpreter
    except ImportError:  # not on this system
        return
    own = interpreter.InterpreterBuilder.create_dot

    def create_dot(self: Any, a: Any, b: Any, d: Any, *settings: Any) -> Any:
        if d.data.dtype != np.float32 or a.data.dtype not in (np.float16, np.float32):
            return own(self, a, b, d, *settings)
        sums = np.matmul(a.data, b.data, dtype=np.float64) + d.data
        return interpreter.TensorHandle(sums.astype(np.float32), d.dtype.scalar)

    interpreter.InterpreterBuilder.create_dot = create_dot
