"""Make Triton's interpreter faster, and let it round as a GPU does.

It multiplies by NumPy, whose library rounds a product's element by its place in a tile on some processors (Zen 3). In
float64 the places differ by far less than float32 can show.

It also replaces the functions of `triton.language` at each launch, and whenever a kernel calls a function, which takes
longer than most of these do: here once for all.
"""

from dataclasses import replace as replace_fields
from functools import cache
from types import SimpleNamespace
from typing import Any

import numpy as np


def install() -> None:
    try:
        from triton.runtime import interpreter
    except ImportError:  # not on this system
        return
    _multiply_in_float64(interpreter)
    _replace_functions_once(interpreter)


def _multiply_in_float64(interpreter: Any) -> None:
    own = interpreter.InterpreterBuilder.create_dot

    def create_dot(self: Any, a: Any, b: Any, d: Any, *settings: Any) -> Any:
        if d.data.dtype != np.float32 or a.data.dtype not in (np.float16, np.float32):
            return own(self, a, b, d, *settings)
        sums = np.matmul(a.data, b.data, dtype=np.float64) + d.data
        return interpreter.TensorHandle(sums.astype(np.float32), d.dtype.scalar)

    interpreter.InterpreterBuilder.create_dot = create_dot


def _replace_functions_once(interpreter: Any) -> None:
    replace, dtype_of, nothing = (
        interpreter._patch_lang,
        cache(interpreter._get_np_dtype),
        interpreter._LangPatchScope(),
    )

    @cache
    def replace_all() -> None:
        language = interpreter.tl
        replace(SimpleNamespace(__globals__={"tl": language, "core": language.core}))

    def replace_once(function: Any) -> Any:
        replace_all()
        return nothing

    def numpy_dtype(kind: Any) -> np.dtype:
        scalar = kind.scalar
        return np.dtype(np.uint64) if scalar.is_ptr() else dtype_of(scalar)

    interpreter._patch_lang, interpreter._get_np_dtype = replace_once, numpy_dtype
    builder = interpreter.interpreter_builder
    builder.options = replace_fields(builder.options, sanitize_overflow=False)  # eight operations for each of integers
