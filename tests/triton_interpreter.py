"""Make Triton's interpreter faster, and let it round as a GPU does.

It multiplies by NumPy, whose library rounds a product's element by its place in a tile on some processors (Zen 3). In
float64 the places differ by far less than float32 can show. Of numbers in bfloat16 it multiplies the bits, and what it
rounds to bfloat16 it cuts off: here the numbers are multiplied, and rounded to the nearest ones.

It also replaces the functions of `triton.language` at each launch, and whenever a kernel calls a function, which takes
longer than most of these do: here once for all, by functions that follow plans (triton_plans.py). For each result it
wraps the sizes of its shape anew, and checks them: here once for each shape. And at each launch it looks at a kernel's
signature several times, and copies memory: here it does so once, and not at all.
"""

import inspect
from dataclasses import replace as replace_fields
from functools import cache
from math import prod
from types import SimpleNamespace
from typing import Any

import numpy as np

from triton_plans import plans_of


def install() -> None:
    try:
        from triton.runtime import interpreter
    except ImportError:  # not on this system
        return
    _multiply_in_float64(interpreter)
    _round_to_bfloat16(interpreter)
    _replace_functions_once(interpreter)
    _know_shapes(interpreter)
    _launch_where_arguments_are(interpreter)


def _multiply_in_float64(interpreter: Any) -> None:
    own = interpreter.InterpreterBuilder.create_dot

    def create_dot(self: Any, a: Any, b: Any, d: Any, *settings: Any) -> Any:
        left, right = (_floats(each.data) if each.dtype.is_bf16() else each.data for each in (a, b))
        if d.data.dtype != np.float32 or left.dtype not in (np.float16, np.float32):
            return own(self, a, b, d, *settings)
        sums = np.matmul(left, right, dtype=np.float64) + d.data
        return interpreter.TensorHandle(sums.astype(np.float32), d.dtype.scalar)

    interpreter.InterpreterBuilder.create_dot = create_dot


def _floats(bits: np.ndarray) -> np.ndarray:
    """Numbers in bfloat16, given as their bits."""
    return (bits.astype(np.uint32) << 16).view(np.float32)


def _round_to_bfloat16(interpreter: Any) -> None:
    own, bfloat16, float32 = interpreter._convert_float, interpreter.tl.bfloat16, interpreter.tl.float32

    def convert(values: np.ndarray, kind: Any, wanted: Any, rounding: Any) -> np.ndarray:
        if (kind, wanted) == (bfloat16, float32):
            return _floats(values)
        if (kind, wanted) != (float32, bfloat16):
            return own(values, kind, wanted, rounding)
        bits = np.ascontiguousarray(values).view(np.uint32).astype(np.uint64)
        rounded = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
        return np.where(np.isnan(values), np.uint16(0x7FC0), rounded)

    interpreter._convert_float = convert


def _replace_functions_once(interpreter: Any) -> None:
    replace, dtype_of, nothing = (
        interpreter._patch_lang,
        cache(interpreter._get_np_dtype),
        interpreter._LangPatchScope(),
    )

    def replace_one(owner: Any, name: str, member: Any, builder: Any, scope: Any) -> None:
        scope.set_attr(
            owner, name, plans_of(interpreter, inspect.unwrap(member))
        )  # its wrapper checks for the semantic

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

    interpreter._patch_lang, interpreter._patch_attr = replace_once, replace_one
    interpreter._get_np_dtype = numpy_dtype
    builder = interpreter.interpreter_builder
    builder.options = replace_fields(builder.options, sanitize_overflow=False)  # eight operations for each of integers


def _know_shapes(interpreter: Any) -> None:
    core, handle = interpreter.tl.core, interpreter.TensorHandle
    unwrap, containers = core._unwrap_if_constexpr, (list, tuple, core.tuple, core.constexpr)

    @cache
    def wrapped(shape: tuple[int, ...]) -> tuple[Any, Any]:
        return core.constexpr(prod(shape)), core.tuple([core.constexpr(size) for size in shape])

    def make_tensor(self: Any, data: Any, kind: Any) -> None:
        self.handle, self.type, self.dtype, self.key = data, kind, kind.scalar, 0
        self.numel, self.shape = wrapped(tuple(kind.shape.values) if kind.is_block() else ())

    known: dict[Any, Any] = {}
    make_block_type = core.block_type.__init__

    def make_block(self: Any, element: Any, shape: Any) -> None:
        sizes = tuple(shape.values if isinstance(shape, core.tuple) else shape)
        key = id(element), sizes
        if any(type(size) is not int for size in sizes):
            return make_block_type(self, element, shape)
        if key not in known:
            make_block_type(self, element, shape)
            known[key] = dict(self.__dict__)  # which keeps the element type, and so its id
        self.__dict__.update(known[key])

    def unwrapped(value: Any) -> Any:
        if type(value) is core.constexpr:
            return value.value
        return unwrap(value) if isinstance(value, containers) else value

    def make_handle(self: Any, data: Any, dtype: Any, attr: Any = None) -> None:
        self.data, self.dtype, self.attr = data, dtype, {} if attr is None else attr

    core.tensor.__init__, core.block_type.__init__ = make_tensor, make_block
    core._unwrap_if_constexpr, handle.__init__ = unwrapped, make_handle


def _launch_where_arguments_are(interpreter: Any) -> None:
    """All are on the CPU: none is copied there and back."""
    executor = interpreter.GridExecutor
    prepare = executor.__init__

    @cache
    def parameters(function: Any) -> tuple[list[str], dict[str, Any], list[str]]:
        """The names of a kernel's parameters, their defaults, and the names of those that are constants."""
        kernel, signature = object.__new__(executor), inspect.signature(function).parameters
        prepare(kernel, function, list(signature), None)
        defaults = {name: each.default for name, each in signature.items() if each.default is not each.empty}
        return list(signature), defaults, kernel.constexprs

    def make(self: Any, function: Any, names: list[str], grid: Any, hooks: Any = ()) -> None:
        self.fn, self.grid = function, grid

    def launch(self: Any, *args: Any, **named: Any) -> None:
        names, defaults, constants = parameters(self.fn)
        given = defaults | dict(zip(names[: len(args)], args, strict=True))
        given |= {name: value for name, value in named.items() if name in names}
        for name in given.keys() - constants:
            given[name] = interpreter._implicit_cvt(given[name])
        grid = (*(self.grid(given) if callable(self.grid) else self.grid), 1, 1)[:3]
        interpreter._patch_lang(self.fn)
        builder = interpreter.interpreter_builder
        builder.set_grid_dim(*grid)
        try:
            for at in np.ndindex(grid):
                builder.set_grid_idx(*at)
                self.fn(**given)
        except Exception as error:
            raise interpreter.InterpreterError(repr(error)) from error

    executor.__init__, executor.__call__ = make, launch
