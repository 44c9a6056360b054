"""A CUDA device that does not exist: tensors that say cuda:0, compute on the CPU, and fail where a GPU's would.

An operation on tensors of two devices, numpy() of a CUDA tensor, an address of one given to C code, a CPU tensor given
to a Triton kernel, a launch where the tensors' device is not chosen, and a wait during the capture of a graph raise
RuntimeError or TypeError. Rounding, speed and memory are the CPU's. A graph holds the operations and launches of its
capture and where their tensors lay: a replay runs these again, not Python, and fails where memory has been freed since.
Kernels do not run while it is captured, nor in the call before.
"""

from __future__ import annotations

import contextlib
import dataclasses
import threading
import time
from collections.abc import Iterator
from functools import cache, partial
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import return_and_correct_aliasing

CUDA, aten = torch.device("cuda", 0), torch.ops.aten
INDEXED = {aten.index.Tensor, aten.index_put_.default, aten.index_put.default, aten._index_put_impl_.default}
MAY_MIX = {aten.copy_.default, aten._to_copy.default, *INDEXED}
WAITS = {aten._local_scalar_dense.default, aten.nonzero.default, aten.masked_select.default, aten.equal.default}
LEAVES = {type(None), bool, int, float, str, torch.dtype, torch.device, torch.layout, torch.memory_format}
STATE = SimpleNamespace(recording=None, launches=True, graphs=0, in_graph=0, operations=0, waits=0)
CHOSEN = threading.local()  # whether a thread is inside of torch.cuda.device(…)


def wait(what: object, asynchronous: bool = False) -> None:
    """To be called by what waits for the device, and by copies for which nothing waits."""
    if STATE.recording is not None:
        raise RuntimeError(f"operation not permitted when stream is capturing: {what}")
    STATE.waits += not (asynchronous or STATE.in_graph)


def count_operation() -> None:
    """Of what the host starts on the device, one after another: a graph is one, and views are none."""
    STATE.operations += not STATE.in_graph


@contextlib.contextmanager
def chosen_device(*_: Any) -> Iterator[None]:
    """torch.cuda.device: Triton launches on a thread's own GPU, which otherwise is the first one."""
    before = getattr(CHOSEN, "device", False)
    CHOSEN.device = True
    try:
        yield
    finally:
        CHOSEN.device = before


@contextlib.contextmanager
def inside_graph() -> Iterator[None]:
    STATE.in_graph += 1
    try:
        yield
    finally:
        STATE.in_graph -= 1


def mapped(function: Any, x: Any) -> Any:
    """The same structure of lists, tuples, dictionaries and dataclasses, with the function applied to each tensor."""
    kind = type(x)
    if kind in LEAVES:
        return x
    if isinstance(x, Tensor):
        return function(x)
    if kind is list or kind is tuple:
        return kind([mapped(function, each) for each in x])
    if dataclasses.is_dataclass(x) and not isinstance(x, type):
        fields = [each.name for each in dataclasses.fields(x) if each.init]
        return dataclasses.replace(x, **{name: mapped(function, getattr(x, name)) for name in fields})
    if isinstance(x, dict):
        return {name: mapped(function, each) for name, each in x.items()}
    if isinstance(x, list | tuple):
        parts = [mapped(function, each) for each in x]
        return type(x)(*parts) if hasattr(x, "_fields") else type(x)(parts)
    return x


def tensors_in(x: Any) -> list[Any]:
    found: list[Any] = []
    mapped(found.append, x)
    return found


@cache
def written_arguments(func: Any) -> tuple[list[int], list[str], int]:
    """Places and names of the arguments that an operation writes to, and how many it returns; 0 if others."""
    written = [(i, a) for i, a in enumerate(func._schema.arguments) if a.alias_info and a.alias_info.is_write]
    returned = func._schema.returns
    gives_them = returned and returned[0].alias_info and returned[0].alias_info.is_write
    return [i for i, _ in written], [a.name for _, a in written if a.kwarg_only], len(returned) if gives_them else 0


def is_view(func: Any) -> bool:
    return getattr(func, "is_view", False) or func is aten.detach.default


def wrap(x: Tensor) -> Tensor:
    return x if isinstance(x, FakeTensor) else FakeTensor(x)


def unwrap(x: Tensor) -> Tensor:
    return x.inner if isinstance(x, FakeTensor) else x


class FakeTensor(Tensor):
    """A tensor of the device around one of the CPU."""

    inner: Tensor
    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, inner: Tensor, requires_grad: bool = False) -> FakeTensor:
        made: Any = Tensor._make_wrapper_subclass(
            cls, inner.shape, strides=inner.stride(), storage_offset=inner.storage_offset(), dtype=inner.dtype,
            layout=inner.layout, device="cpu", requires_grad=requires_grad,
        )  # fmt: skip
        made.inner = inner.detach() if inner.requires_grad else inner
        return made

    device: Any = property(lambda self: CUDA)
    is_cuda: Any = property(lambda self: True)
    is_cpu: Any = property(lambda self: False)

    def __repr__(self, **_: Any) -> str:
        return f"FakeTensor({tuple(self.shape)}, {self.dtype})"

    def numpy(self, **_: Any) -> Any:
        raise TypeError("can't convert cuda:0 device type tensor to numpy. Use Tensor.cpu() first.")

    __array__ = numpy

    def data_ptr(self) -> int:
        raise RuntimeError("C code gets the address of a CUDA tensor")

    def get_device(self) -> int:
        return 0

    def untyped_storage(self) -> Any:
        return self.inner.untyped_storage()

    def tolist(self) -> Any:
        return to_cpu(self).tolist()

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.inner.__reduce_ex__(protocol)

    def __deepcopy__(self, memo: Any) -> FakeTensor:
        return FakeTensor(self.inner.clone(), self.requires_grad)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        tensors = tensors_in((args, kwargs))
        if func not in MAY_MIX and any(not isinstance(x, FakeTensor) and x.dim() for x in tensors):
            raise RuntimeError(f"Expected all tensors to be on the same device, but found cuda:0 and cpu in {func}")
        if func in INDEXED:
            if not isinstance(args[0], FakeTensor):
                raise RuntimeError("indices should be either on cpu or on the same device as the indexed tensor (cpu)")
            if any(i is not None and (i.dtype == torch.bool or not isinstance(i, FakeTensor)) for i in args[1]):
                wait(func)
        if func in WAITS or (func is aten.repeat_interleave.Tensor and kwargs.get("output_size") is None):
            wait(func)
        if func is aten.copy_.default and not (isinstance(args[0], FakeTensor) and isinstance(args[1], FakeTensor)):
            wait(func, asynchronous=len(args) > 2 and args[2])
        if kwargs.get("device") is not None:
            kwargs["device"] = torch.device("cpu")
        if not is_view(func):
            count_operation()
        real = [mapped(unwrap, x) for x in args]
        if func is aten.histc.default:
            real[0] = real[0].float()  # on a GPU of integers, too
        out = func(*real, **mapped(unwrap, kwargs))
        if STATE.recording is not None and not is_view(func):
            STATE.recording.add(func, args, kwargs, out)
        places, names, num_returned = written_arguments(func)
        if num_returned:
            written = [args[i] for i in places if i < len(args)] + [kwargs[name] for name in names if name in kwargs]
            if written:
                return written[0] if num_returned == 1 else tuple(written)
        if func in (aten._local_scalar_dense.default, aten.equal.default):
            return out
        wrapped = mapped(wrap, out)
        if is_view(func):
            return return_and_correct_aliasing(func, args, kwargs, wrapped)
        return wrapped


def to_device(x: Tensor, asynchronous: bool = False) -> Tensor:
    if isinstance(x, FakeTensor):
        return x
    wait("a copy to the device", asynchronous)
    count_operation()
    return FakeTensor(Tensor(x.detach()).clone() if type(x) is nn.Parameter else x.detach().clone())


def to_cpu(x: Tensor) -> Tensor:
    if not isinstance(x, FakeTensor):
        return x
    wait("a copy to the host")
    count_operation()
    return x.inner.detach().clone()


def moved(x: Tensor, device: Any, asynchronous: bool = False) -> Tensor:
    """The tensor on a device; None: where it is."""
    kind = None if device is None else torch.device(device).type
    return x if kind is None else to_device(x, asynchronous) if kind == "cuda" else to_cpu(x)


def on_cuda(device: Any) -> bool:
    return isinstance(device, str | torch.device) and torch.device(device).type == "cuda"


class FakeCuda(TorchFunctionMode):
    """What creates and moves tensors, for the device that does not exist."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        name = getattr(func, "__name__", "")
        if name == "__get__":  # of an attribute, as most calls
            return func(*args)
        if func is Tensor.cpu or func is Tensor.cuda:
            return moved(args[0], name)
        if func is Tensor.to:
            return self.convert(*args, **kwargs)
        if func is Tensor.pin_memory:
            return args[0].clone()
        if func is Tensor.type_as:
            return self.convert(args[0], args[1])
        own = name in ("tolist", "numpy", "data_ptr", "get_device", "untyped_storage", "__array__")
        if own and isinstance(args[0], FakeTensor):
            return getattr(args[0], name)(*args[1:], **kwargs)
        if func is torch.nn.functional.linear and isinstance(args[0], FakeTensor) and args[0].dim() == 1:
            return func(args[0][None], *args[1:], **kwargs)[0]  # squeeze_ would not change a wrapper's shape
        if name == "one_hot" and isinstance(args[0], FakeTensor):
            return FakeTensor(func(args[0].inner, *args[1:], **kwargs))  # it makes a tensor where it thinks args[0] is
        kwargs.pop("pin_memory", None)
        if on_cuda(kwargs.get("device")):
            if func in (torch.tensor, torch.as_tensor):
                wait("numbers of Python, which are copied to the device")
            out = func(*args, **kwargs | {"device": "cpu"})
            if STATE.recording is not None:
                STATE.recording.add_filled(out)
            return mapped(wrap, out)
        return func(*args, **kwargs)

    @staticmethod
    def convert(
        x: Tensor, *args: Any, device: Any = None, dtype: Any = None, copy: bool = False, **more: Any
    ) -> Tensor:
        """Tensor.to."""
        for each in args:
            if isinstance(each, Tensor):
                device, dtype = each.device, each.dtype
            elif isinstance(each, torch.dtype):
                dtype = each
            elif isinstance(each, str | torch.device):
                device = each
        if device is not None and torch.device(device).type not in ("cpu", "cuda"):
            return x.to(device=device, dtype=dtype)
        y = moved(x, device, more.pop("non_blocking", False))
        if (dtype is not None and dtype != y.dtype) or more:
            return Tensor.to(y, dtype=dtype or y.dtype, **more)
        return y.clone() if copy and y is x else y


def module_to(module: nn.Module, *args: Any, device: Any = None, dtype: Any = None, **_: Any) -> nn.Module:
    """nn.Module.to: every parameter and buffer once, though several modules may share it."""
    for each in args:
        device = each if isinstance(each, str | torch.device) else device
        dtype = each if isinstance(each, torch.dtype) else dtype
    done: dict[int, Any] = {}

    def converted(x: Any, parameter: bool) -> Any:
        if x is None:
            return None
        if id(x) not in done:
            y = moved(x.detach() if parameter else x, device)
            y = y.to(dtype=dtype) if dtype is not None and y.is_floating_point() else y
            done[id(x)] = nn.Parameter(y, x.requires_grad) if parameter else y
            done[id(done[id(x)])] = done[id(x)]
        return done[id(x)]

    with torch.no_grad():
        for each in module.modules():
            for named, parameter in ((each._parameters, True), (each._buffers, False)):
                named.update({name: converted(x, parameter) for name, x in named.items()})
    return module


class Event:
    """A moment, of the host's clock."""

    def __init__(self, **_: Any) -> None:
        self.moment = 0.0

    def record(self) -> None:
        self.moment = time.perf_counter()

    def elapsed_time(self, end: Event) -> float:
        return 1000 * (end.moment - self.moment)

    def synchronize(self) -> None:
        wait("synchronize")


class Place(NamedTuple):
    """Where a tensor lies that the capture did not make; only others keep its memory."""

    storage: StorageWeakRef
    size: torch.Size
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype

    def tensor(self) -> Tensor:
        """Errors: RuntimeError where the memory is free."""
        storage = torch.UntypedStorage._new_with_weak_ptr(self.storage.cdata)
        if storage is None:
            raise RuntimeError("a graph reads or writes memory that was freed after its capture")
        return torch.empty(0, dtype=self.dtype).set_(storage, self.offset, self.size, self.stride)


class Graph:
    """What a capture gives: a replay runs the same operations on the same memory."""

    def __init__(self) -> None:
        self.steps: list[tuple[Any, Any, Any, Any]] = []  # a function, its arguments, what it gave
        self.made: dict[int, Any] = {}  # the storages that the capture made

    def add(self, function: Any, args: Any, kwargs: Any, out: Any) -> None:
        given = {unwrap(each).untyped_storage()._cdata for each in tensors_in((args, kwargs))}
        new = [each for each in tensors_in(out) if each.untyped_storage()._cdata not in given]
        self.made |= {each.untyped_storage()._cdata: each for each in new}
        kept = out if new and "empty" not in str(function) else None
        self.steps.append((function, mapped(self.place, args), mapped(self.place, kwargs), kept))

    def add_filled(self, out: Tensor) -> None:
        """What a function made of no tensors."""
        values = out.clone()
        self.add(lambda: values, [], {}, out)

    def place(self, x: Tensor) -> Tensor | Place:
        if not isinstance(x, FakeTensor):  # a number, which a graph holds itself
            return x.clone()
        x, storage = x.inner, x.untyped_storage()
        if storage._cdata in self.made:
            return x
        return Place(StorageWeakRef(storage), x.size(), x.stride(), x.storage_offset(), x.dtype)

    def replay(self) -> None:
        count_operation()
        with inside_graph(), torch.no_grad():
            for function, args, kwargs, out in self.steps:
                new = function(*placed(args), **placed(kwargs))
                for old, found in zip(tensors_in(out), tensors_in(new), strict=out is not None):
                    old.copy_(found)


def placed(x: Any) -> Any:
    """The same structure with tensors in place of where they lie."""
    if isinstance(x, Place):
        return x.tensor()
    if isinstance(x, dict):
        return {name: placed(each) for name, each in x.items()}
    return type(x)([placed(each) for each in x]) if type(x) in (list, tuple) else x


def capture(_: Any, run: Any) -> tuple[Graph, Any]:
    """GraphCapture.capture. What the kernels of its first call would compute, replays do."""
    graph, STATE.launches = Graph(), False
    with inside_graph():
        try:
            run()
            STATE.recording = graph
            outputs = run()
        finally:
            STATE.recording, STATE.launches = None, True
    STATE.graphs += 1
    return graph, outputs


def kernel_argument(x: Any) -> Any:
    if isinstance(x, Tensor) and not isinstance(x, FakeTensor):
        raise RuntimeError("Pointer argument cannot be accessed from Triton (cpu tensor?)")
    return x.inner if isinstance(x, FakeTensor) else x


def enter_grad_mode(self: Any) -> None:
    """In place of inference mode: wrappers have no version counters of inference tensors."""
    self.grad_mode = torch.no_grad() if self.mode else torch.enable_grad()
    self.grad_mode.__enter__()


@contextlib.contextmanager
def fake_cuda(monkeypatch: pytest.MonkeyPatch) -> Iterator[SimpleNamespace]:
    """Let torch have one CUDA device meanwhile; what it yields counts the graphs."""
    from triton.runtime.interpreter import GridExecutor

    from saltus.models.cuda.cuda_graphs import GraphCapture

    stream = SimpleNamespace(synchronize=lambda: wait("synchronize"), wait_stream=lambda other: None)
    replaced: dict[str, Any] = {
        "is_available": lambda: True, "device_count": lambda: 1, "current_device": lambda: 0,
        "synchronize": lambda *_: wait("synchronize"), "get_device_name": lambda *_: "a GPU that does not exist",
        "current_stream": lambda *_: stream, "device": chosen_device,
        "mem_get_info": lambda *_: (1 << 24, 1 << 24), "get_device_capability": lambda *_: (9, 0),
        "get_device_properties": lambda *_: SimpleNamespace(shared_memory_per_block_optin=101_376),
        "max_memory_allocated": lambda *_: 0, "reset_peak_memory_stats": lambda *_: None, "empty_cache": lambda: None,
        "Event": Event, "is_current_stream_capturing": lambda: STATE.recording is not None,
    }  # fmt: skip
    for name, value in replaced.items():
        monkeypatch.setattr(torch.cuda, name, value)
    monkeypatch.setattr(nn.Module, "to", module_to)
    monkeypatch.setattr(GraphCapture, "capture", capture)
    launch = GridExecutor.__call__

    def launch_unless_captured(self: Any, *args: Any, **kwargs: Any) -> None:
        own, is_check = (
            [kernel_argument(each) for each in args],
            self.fn.__name__ == "_write_one",
        )  # whether kernels run
        if not getattr(CHOSEN, "device", False) and not is_check:
            raise RuntimeError("a kernel is launched outside of torch.cuda.device(…), and so on the first GPU")
        if STATE.recording is not None:
            STATE.recording.add(partial(launch, self), args, kwargs, None)
        elif STATE.launches or is_check:
            launch(self, *own, **kwargs)

    monkeypatch.setattr(GridExecutor, "__call__", launch_unless_captured)
    monkeypatch.setattr(torch.inference_mode, "__enter__", enter_grad_mode)
    monkeypatch.setattr(torch.inference_mode, "__exit__", lambda self, *_: self.grad_mode.__exit__(*_))
    begin = threading.Thread.run

    def run_with_device(self: threading.Thread) -> None:
        with FakeCuda():  # a mode belongs to a thread
            begin(self)

    monkeypatch.setattr(threading.Thread, "run", run_with_device)
    vars(STATE).update(recording=None, launches=True, graphs=0, in_graph=0, operations=0, waits=0)
    with FakeCuda():
        yield STATE
