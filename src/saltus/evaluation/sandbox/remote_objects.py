"""Let tests in one process use the objects of a program in another: data cross between them, code does not.

Numbers, texts and containers are copied as exactly these types, so that their own `__eq__` decides and a class of the
program cannot equal everything. Other objects stay in their process; the other one holds a `Remote`, which can be
called, iterated, indexed and printed, but equals nothing. Loaded by path in both processes (standard library only).
"""

import builtins
import collections
import importlib
import json
import operator
import os
import re
import sys
from collections.abc import Callable, Iterator
from types import CodeType, ModuleType
from typing import Any, NoReturn

SEQUENCES = {kind.__name__: kind for kind in (list, tuple, set, frozenset, collections.deque)}
MAPPINGS = {kind.__name__: kind for kind in (collections.OrderedDict, collections.Counter, dict)}
TEXT_FORMS = {  # exact types that are copied as text: what writes it, and what reads it (the type itself if empty)
    "decimal.Decimal": ("__str__", ""),
    "fractions.Fraction": ("__str__", ""),
    "datetime.date": ("isoformat", "fromisoformat"),
    "datetime.datetime": ("isoformat", "fromisoformat"),
    "datetime.time": ("isoformat", "fromisoformat"),
}
NUMPY_DTYPE = re.compile(r"[<>|][biufcUSmM]\d+(\[\w+\])?")
LARGE = 1 << 63  # integers from here on are sent in base 16, which Python reads at any length

PROGRAM_OPERATIONS: dict[str, Callable[..., Any]] = {  # what tests may do with a program's objects
    "call": lambda called, arguments, named: called(*arguments, **named),
    "getattr": getattr,
    "setattr": setattr,
    "iter": iter,
    "next": next,
    "len": len,
    "getitem": operator.getitem,
    "bool": bool,
    "str": str,
    "repr": repr,
}
TEST_OPERATIONS = {"call": PROGRAM_OPERATIONS["call"]}  # and a program with the functions that tests give it


class Remote:
    """An object of the other process."""

    def __init__(self, peer: "Peer", key: int) -> None:
        object.__setattr__(self, "_peer", peer)
        object.__setattr__(self, "_key", key)

    def __call__(self, *arguments: object, **named: object) -> Any:
        return self._peer.request("call", self, arguments, named)

    def __getattr__(self, name: str) -> Any:
        return self._peer.request("getattr", self, name)

    def __setattr__(self, name: str, value: object) -> None:
        self._peer.request("setattr", self, name, value)

    def __iter__(self) -> Iterator[Any]:
        return self._peer.request("iter", self)

    def __next__(self) -> Any:
        return self._peer.request("next", self)

    def __len__(self) -> int:
        return self._peer.request("len", self)

    def __getitem__(self, key: object) -> Any:
        return self._peer.request("getitem", self, key)

    def __bool__(self) -> bool:
        return self._peer.request("bool", self)

    def __str__(self) -> str:
        return self._peer.request("str", self)

    def __repr__(self) -> str:
        return self._peer.request("repr", self)


class Peer:
    """One end of a socket, over which a process answers the other's requests and makes its own.

    `program` is the program's namespace at its end, None at the end of the tests; `lost` is called when the other ends.
    """

    def __init__(self, fd: int, lost: Callable[[], NoReturn], program: dict[str, Any] | None = None) -> None:
        self._fd, self._lost, self._is_program = fd, lost, program is not None
        self._operations = TEST_OPERATIONS
        if program is not None:
            self._operations = {**PROGRAM_OPERATIONS, "look_up": lambda names: look_up(program, names)}
        self._file = os.fdopen(fd, "rb", closefd=False)
        self._kept: list[object] = []  # own objects that the other process holds

    def request(self, operation: str, *values: object) -> Any:
        """The result of an operation in the other process, or its exception."""
        self._send(["do", operation, [self.encode(value) for value in values]])
        while (message := self._receive())[0] == "do":
            self._answer(*message[1:])
        if message[0] == "value":
            return self.decode(message[1])
        raise _exception(operation, *message[1:])

    def serve(self) -> NoReturn:
        """Answer requests until the other process ends."""
        while True:
            self._answer(*self._receive()[1:])

    def _answer(self, operation: str, values: list) -> None:
        try:
            result = self._operations[operation](*[self.decode(value) for value in values])
            reply = ["value", self.encode(result)]
        except BaseException as error:
            reply = ["raised", *_describe(error)]
        self._send(reply)

    def _send(self, message: list) -> None:
        body = json.dumps(message).encode()
        data = memoryview(len(body).to_bytes(8, "big") + body)
        try:
            while data:
                data = data[os.write(self._fd, data) :]
        except OSError:
            self._lost()

    def _receive(self) -> list:
        try:
            header = self._file.read(8)
            body = self._file.read(int.from_bytes(header, "big")) if len(header) == 8 else b""
        except OSError:
            body = b""
        if not body:
            self._lost()
        return json.loads(body)

    def encode(self, value: Any) -> Any:
        """A value as what JSON holds; objects that are not data are kept here, and only their number is sent."""
        kind = type(value)
        name = f"{kind.__module__}.{kind.__qualname__}"
        if value is None or kind in (bool, float, str):
            return value
        if kind is Remote:
            return ["yours", value._key]
        if kind.__module__ == "numpy" and hasattr(value, "dtype") and NUMPY_DTYPE.fullmatch(value.dtype.str):
            shape = value.shape if name == "numpy.ndarray" else None
            return ["numpy", [value.dtype.str, shape, value.tobytes().hex()]]
        if name in TEXT_FORMS:
            return [name, getattr(value, TEXT_FORMS[name][0])()]
        if isinstance(value, int):
            return int(value) if -LARGE < value < LARGE else ["int", hex(value)]
        if isinstance(value, (float, str)):
            return (float if isinstance(value, float) else str)(value)
        if isinstance(value, complex):
            return ["complex", [value.real, value.imag]]
        if isinstance(value, (bytes, bytearray)):
            return ["bytes" if isinstance(value, bytes) else "bytearray", value.hex()]
        if isinstance(value, range):
            return ["range", [self.encode(part) for part in (value.start, value.stop, value.step)]]
        return self._encode_container(value)

    def _encode_container(self, value: Any) -> list:
        for name, kind in SEQUENCES.items():
            if isinstance(value, kind):
                return [name, [self.encode(item) for item in value]]
        for name, kind in MAPPINGS.items():
            if isinstance(value, kind):
                return [name, [[self.encode(key), self.encode(item)] for key, item in value.items()]]
        if isinstance(value, type({}.keys())):
            return ["keys", [self.encode(key) for key in value]]
        name = getattr(value, "__name__", None)
        if not self._is_program and isinstance(name, str) and getattr(builtins, name, None) is value:
            return ["builtin", name]
        self._kept.append(value)
        return ["mine", len(self._kept) - 1]

    def decode(self, sent: Any) -> Any:
        """The value that the other process sent; whatever it sends becomes one of the types above."""
        if not isinstance(sent, list):
            return sent
        name, body = sent
        if name in SEQUENCES:
            return SEQUENCES[name]([self.decode(item) for item in body])
        if name in MAPPINGS:
            return MAPPINGS[name]({self.decode(key): self.decode(item) for key, item in body})
        if name in TEXT_FORMS:
            module, _, kind = name.rpartition(".")
            read = getattr(importlib.import_module(module), kind)
            return (getattr(read, TEXT_FORMS[name][1]) if TEXT_FORMS[name][1] else read)(str(body))
        if name == "builtin" and self._is_program:
            return getattr(builtins, body)
        readers: dict[str, Callable[[Any], Any]] = {
            "mine": lambda key: Remote(self, int(key)),
            "yours": lambda key: self._kept[key],
            "numpy": _decode_numpy,
            "int": lambda text: int(text, 16),
            "complex": lambda parts: complex(*parts),
            "bytes": bytes.fromhex,
            "bytearray": bytearray.fromhex,
            "range": lambda parts: range(*[self.decode(part) for part in parts]),
            "keys": lambda items: dict.fromkeys([self.decode(item) for item in items]).keys(),
        }
        return readers[name](body)


def look_up(namespace: dict[str, Any], names: list[str]) -> dict[str, tuple[bool, Any]]:
    """Those of the names that a program defines: whether each is a module, and the object or the module's name."""
    values = {name: namespace[name] for name in names if name in namespace}
    modules = {name: isinstance(value, ModuleType) for name, value in values.items()}
    return {name: (modules[name], value.__name__ if modules[name] else value) for name, value in values.items()}


def names_for_tests(peer: Peer, tests: CodeType, functions: list[str], modules: dict[str, str]) -> dict[str, Any]:
    """What the tests find defined: the program's objects, and modules that it imported.

    Builtins are Python's own, and modules are imported here. Of builtins a program may replace `functions`, the names
    that its task asks it to define; it cannot replace `modules`, those of the task (module by name).
    """
    wanted = {name for name in _names(tests) if name in functions or not hasattr(builtins, name)}
    defined = {}
    for name, (is_module, value) in peer.request("look_up", sorted(wanted)).items():
        if is_module or name in modules:
            module = modules.get(name, str(value))
            if module.partition(".")[0] not in (*sys.stdlib_module_names, "numpy"):
                continue
            value = importlib.import_module(module)
        defined[name] = value
    return defined


def _names(code: CodeType) -> set[str]:
    """All names that code and its functions look up, attributes among them."""
    return set(code.co_names).union(*(_names(part) for part in code.co_consts if isinstance(part, CodeType)))


def _decode_numpy(sent: list) -> Any:
    import numpy

    dtype, shape, data = sent
    if not NUMPY_DTYPE.fullmatch(dtype):
        raise TypeError("arrays of objects are not copied between processes")
    array = numpy.frombuffer(bytes.fromhex(data), numpy.dtype(dtype)).copy()
    return array[0] if shape is None else array.reshape(shape)


def _describe(error: BaseException) -> tuple[str, str, str]:
    """Name, first builtin base class and text of an exception."""
    base = next(kind for kind in type(error).__mro__ if getattr(builtins, kind.__name__, None) is kind)
    try:
        text = str(error)[:400]
    except BaseException:  # __str__ may be the program's code
        text = ""
    return type(error).__name__, base.__name__, text


def _exception(operation: str, name: str, base_name: str, text: str) -> BaseException:
    """An exception of the other process as one of this; StopIteration is none, it could end a loop of the tests."""
    base: Any = getattr(builtins, base_name, None)
    if not (isinstance(base, type) and issubclass(base, BaseException)):
        base = RuntimeError
    if issubclass(base, StopIteration) and operation != "next":
        base = RuntimeError
    kind = base if name == base.__name__ else type(str(name), (base,), {})
    try:
        return kind(text) if text else kind()
    except TypeError:  # UnicodeDecodeError takes five arguments
        return RuntimeError(f"{name}: {text}")
