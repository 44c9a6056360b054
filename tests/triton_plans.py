"""Let the functions of `triton.language` decide once, in Triton's interpreter, what they compute.

Such a function checks the types of its arguments, converts them and broadcasts them, and then performs one or two
operations of NumPy, in a small part of the time. Which operations these are follows from the arguments' types, shapes
and constants alone: the first call with such arguments notes what the interpreter performs, and the others perform it
at once. What only repeats numbers along an axis is left out where NumPy does that by itself.
"""

from collections.abc import Callable
from typing import Any

import numpy as np

OF_THE_PROGRAM = {"create_get_program_id", "create_get_num_programs"}  # without operands, and no constants
REPEATS = {"create_splat", "create_broadcast", "create_expand_dims"}
ELEMENTWISE = {"binary_op", "ternary_op", "create_addptr"}
OF_BITS = {np.bitwise_and, np.bitwise_or, np.bitwise_xor}
PLAIN = {int, bool, str, type(None)}
KEYS: dict[tuple[Any, ...], int] = {}  # of tensors by their types, and by what their handles hold


class UnknownArgument(Exception):
    """An argument that no key describes."""


class Operand(str):
    """The name of a handle."""


class Recorder:
    """The interpreter's builder, which notes what it performs on which operands."""

    def __init__(self, interpreter: Any, operands: list[Any]) -> None:
        self.handle_type, self.builder = interpreter.TensorHandle, interpreter.interpreter_builder
        self.handles = {f"h{number}": handle for number, handle in enumerate(operands)}
        self.names = {id(handle): name for name, handle in self.handles.items()}
        self.constants: set[str] = set()
        self.steps: list[tuple[str | None, str, list[Any]]] = []  # a result, the method that makes it, its arguments
        self.complete = True

    def __getattr__(self, name: str) -> Any:
        method = getattr(self.builder, name)
        if not callable(method):
            return method
        function = getattr(type(self.builder), name)
        forwards = function.__name__ == "<lambda>"  # to a method that is given the operation, as binary_op

        def record(*args: Any, **named: Any) -> Any:
            out = function(self, *args, **named) if forwards else method(*args, **named)
            if id(out) not in self.names:
                self.note(name, args, named, out)
            return out

        return record

    def note(self, name: str, args: tuple[Any, ...], named: dict[str, Any], out: Any) -> None:
        is_handle = isinstance(out, self.handle_type)
        if not is_handle and name.startswith("get_"):  # a type
            return
        parts = [part for each in args for part in (each if isinstance(each, list | tuple) else ())]
        known = [self.names.get(id(each)) for each in args if isinstance(each, self.handle_type)]
        odd = named or any(isinstance(part, self.handle_type) for part in parts) or None in known
        if odd or not (is_handle or out is None):
            self.complete = False
        else:
            own = f"h{len(self.handles)}" if is_handle else None
            if own is not None:
                self.handles[own], self.names[id(out)] = out, own
            if own is not None and name not in OF_THE_PROGRAM and self.constants.issuperset(known):
                self.constants.add(own)
            else:
                args = [Operand(self.names[id(each)]) if isinstance(each, self.handle_type) else each for each in args]
                self.steps.append((own, name, args))


def key_of(value: Any) -> int:
    """Of a tensor; whatever makes a tensor leaves it without one, but for plans."""
    handle = value.handle
    held = value.type.name, handle.dtype.name, handle.data.dtype.char, handle.data.shape
    value.key = KEYS.setdefault(held, len(KEYS) + 1)
    return value.key


def plans_of(interpreter: Any, own: Callable[..., Any]) -> Callable[..., Any]:
    """A function of the language with a plan for each kind of arguments."""
    tensor, semantic, plans = interpreter.tl.tensor, interpreter.interpreter_semantic, {}
    constexpr, dtype, builder = interpreter.tl.constexpr, interpreter.tl.dtype, interpreter.interpreter_builder
    sequences = {tuple, list, interpreter.tl.tuple}

    def describe(value: Any, key: list[Any], operands: list[Any]) -> None:
        kind = type(value)
        if kind is tensor:
            operands.append(value.handle)
            key.append(value.key or key_of(value))
        elif kind in PLAIN:
            key += (kind, value)
        elif kind is float:
            key += (kind, value.hex())
        elif kind is constexpr:
            key.append(kind)
            describe(value.value, key, operands)
        elif kind in sequences:
            key += (kind, len(value))
            for each in value:
                describe(each, key, operands)
        elif kind is slice:
            key += (kind, value.start, value.stop, value.step)
        elif isinstance(value, dtype):
            key += (kind, value.name)
        else:
            raise UnknownArgument

    def record(args: tuple[Any, ...], named: dict[str, Any], operands: list[Any]) -> tuple[Any, Any]:
        semantic.builder = recorder = Recorder(interpreter, operands)
        try:
            result = own(*args, _semantic=semantic, **named)
        finally:
            semantic.builder = builder
        return result, plan_of(interpreter, recorder, len(operands), result)

    def call(*args: Any, **named: Any) -> Any:
        if semantic.builder is not builder:  # for a function that is being noted
            return own(*args, **named | {"_semantic": semantic})
        key, operands = [], []
        try:
            for each in args:
                if type(each) is tensor:
                    operands.append(each.handle)
                    key.append(each.key or key_of(each))
                else:
                    describe(each, key, operands)
            if named:
                named.pop("_semantic", None)
                for name, each in named.items():
                    key.append(name)
                    describe(each, key, operands)
        except UnknownArgument:
            return own(*args, **named | {"_semantic": semantic})
        if (count := len(operands)) > 1 and (count > 2 or operands[0] is operands[1]):
            places = {id(each): place for place, each in enumerate(operands)}
            if len(places) < count:  # one is given twice
                key += [places[id(each)] for each in operands]
        key = tuple(key)
        if (plan := plans.get(key)) is None:
            result, plans[key] = record(args, named, operands)
            return result
        return plan(*operands) if plan else own(*args, _semantic=semantic, **named)

    return call


def plan_of(interpreter: Any, recorder: Recorder, num_operands: int, result: Any) -> Callable[..., Any] | bool:
    """A function of the operands that performs what was noted; False if that is not all there was."""
    tensor, has_handle = interpreter.tl.tensor, getattr(result, "handle", None) is not None
    if not recorder.complete or not (result is None or type(result) is tensor):
        return False
    if has_handle and id(result.handle) not in recorder.names:
        return False
    steps = needed_steps(recorder, recorder.names[id(result.handle)] if has_handle else None)
    names = {"Handle": interpreter.TensorHandle, "Tensor": tensor, "new": object.__new__, "result": result}
    names |= {name: recorder.handles[name] for name in recorder.constants}
    lines = [f"def plan({', '.join(f'h{number}' for number in range(num_operands))}):"]
    for own, method, args in steps:
        made = expression(interpreter, recorder, own, method, args, names)
        lines.append(f"    {own} = {made}" if own else f"    {made}")
    if has_handle:
        key_of(result)
        lines.append("    made = new(Tensor)")
        for name, value in vars(result).items():
            names[f"its_{name}"] = value
            lines.append(f"    made.{name} = {recorder.names[id(value)] if name == 'handle' else f'its_{name}'}")
    lines.append(f"    return {'made' if has_handle else 'result'}")
    exec("\n".join(lines), names)
    return names["plan"]


def needed_steps(recorder: Recorder, result: str | None) -> list[tuple[str | None, str, list[Any]]]:
    """The steps but for those that repeat numbers for an elementwise operation, which repeats them by itself."""
    made = {own: (method, args) for own, method, args in recorder.steps if own}
    data = {name: handle.data for name, handle in recorder.handles.items()}
    kept = []
    for own, method, args in recorder.steps:
        args = list(args)
        for place, operand in enumerate(args if method in ELEMENTWISE else ()):
            while isinstance(operand, Operand) and made.get(operand, ("",))[0] in REPEATS:
                repeat, (*_, axis) = made[operand]
                source = next(each for each in made[operand][1] if isinstance(each, Operand))
                others = [data[each].shape for i, each in enumerate(args) if i != place and isinstance(each, Operand)]
                leads = repeat != "create_expand_dims" or axis == 0
                alike = data[source].dtype == data[operand].dtype
                if not (leads and alike and np.broadcast_shapes(data[source].shape, *others) == data[own].shape):
                    break
                args[place] = operand = source
        kept.append((own, method, args))
    used, needed = {result}, []
    for own, method, args in reversed(kept):
        if method not in REPEATS or own in used:
            needed.append((own, method, args))
            used.update(each for each in args if isinstance(each, Operand))
    return needed[::-1]


def expression(
    interpreter: Any, recorder: Recorder, own: str | None, method: str, args: list[Any], names: dict[str, Any]
) -> str:
    """What makes a result: the interpreter's method, or what this does for arguments of these types."""

    def given(value: Any) -> str:
        if isinstance(value, Operand):
            return value
        names[name := f"c{len(names)}"] = value
        return name

    handles = [recorder.handles[each] for each in args if isinstance(each, Operand)]
    out = recorder.handles[own] if own else None
    bfloat16, kind = interpreter.tl.bfloat16, given(out.dtype) if own else ""
    if method == "binary_op":
        left, right = handles
        of_bits = left.data.dtype == right.data.dtype == np.bool_
        if (not of_bits or args[2] in OF_BITS) and args[2](left.data, right.data).dtype == out.data.dtype:
            return f"Handle({given(args[2])}({args[0]}.data, {args[1]}.data), {kind})"
    elif method == "ternary_op" and args[3](*(each.data for each in handles)).dtype == out.data.dtype:
        return f"Handle({given(args[3])}({', '.join(f'{each}.data' for each in args[:3])}), {kind})"
    elif method == "unary_op":
        return f"Handle({given(args[1])}({args[0]}.data), {kind})"
    elif method == "cast_impl" and bfloat16 not in (handles[0].dtype.scalar, args[1].scalar):
        return f"Handle({args[0]}.data.astype({given(out.data.dtype)}), {kind})"
    elif method == "create_addptr":
        size = given(max(1, handles[0].get_element_ty().primitive_bitwidth // 8))
        return f"Handle({args[0]}.data + {size} * {args[1]}.data.astype({given(np.uint64)}), {kind})"
    elif method == "create_expand_dims":
        at = given((*[slice(None)] * args[1], None))
        return f"Handle({args[0]}.data[{at}], {kind})"
    elif method in ("create_load", "create_masked_load"):
        load, dtype = given(interpreter._interpreter.load), out.data.dtype
        mask = f"{args[1]}.data" if method == "create_masked_load" else given(np.ones(out.data.shape, bool))
        other = args[2] if method == "create_masked_load" else None
        other = given(np.zeros(out.data.shape, dtype)) if other is None else f"{other}.data"
        return f"Handle({load}({args[0]}.data, {mask}, {other}, {given(dtype)}), {kind})"
    names[method] = getattr(interpreter.interpreter_builder, method)
    return f"{method}({', '.join(map(given, args))})"
