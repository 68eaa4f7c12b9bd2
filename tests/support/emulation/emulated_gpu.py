"""An emulated GPU: tensors that hold CPU values and say cuda, CUDA's rules on devices, and a record of CPU waits.

    with emulated_gpu() as gpu:
        x = torch.randn(4, 8).cuda()
        with gpu.recording() as waits:
            x.sum().item()
    assert [wait.kind for wait in waits] == ["read"]

Triton's programs run in its interpreter, PyTorch's CUDA attention operators by their formulas, everything else by the
CPU's operators. Kernels of CUDA, their speed and their memory are not emulated, and streams have one order.
"""

import ctypes
import os
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from functools import cache, partial
from pathlib import Path
from types import FrameType, SimpleNamespace
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map

import tests.support.emulation.interpreted  # noqa: F401 (Triton's programs are imported to be interpreted)
from tests.support.emulation.emulated_operators import FORMULAS

DEVICE = torch.device("cuda", 0)
MEMORY = 80 << 30
DeviceType = torch._C._autograd.DeviceType
LAST_DEVICE_TYPE = int(DeviceType.PrivateUse1)
LAUNCHERS = (
    "kernels.triton_runtime",
    "kernels.implementations.triton",
    "kernels.stacked_merge",
    "comm.peer_memory",
)
"""Modules of the package that launch Triton programs."""

TAKES_HOST_INDICES = {"index", "index_put", "index_put_", "_index_put_impl_", "_unsafe_index", "_unsafe_index_put"}
TAKES_NO_HOST_SCALARS = ("index_", "gather", "scatter", "searchsorted", "cat", "stack")
HAS_A_SIZE_ON_THE_DEVICE = {
    *("nonzero", "masked_select", "unique_consecutive", "unique_dim", "_unique2", "bincount"),
    *("equal", "_local_scalar_dense", "is_nonzero"),
}
"""Operators whose result, or its size, the CPU reads."""


class DeviceRuleError(RuntimeError):
    """A call that raises on a GPU: it mixes tensors of two devices."""


class Wait(NamedTuple):
    """A moment when the CPU waits for the GPU: a read of device memory, or a copy from CPU memory to the device."""

    kind: str  # "read" or "copy"
    operator: str
    place: str


class EmulatedTensor(torch.Tensor):
    """A tensor that says it is on a GPU. Its numbers are in `values`, a tensor on the CPU."""

    __slots__ = ("gpu", "values")  # not attributes that a class of the package copies to other tensors
    __torch_function__ = torch._C._disabled_torch_function_impl
    values: Tensor
    gpu: "EmulatedGPU"

    @staticmethod
    def __new__(cls, values: Tensor, gpu: "EmulatedGPU") -> "EmulatedTensor":
        """Return a tensor with the shape, strides and dtype of its values."""
        made = torch.Tensor._make_wrapper_subclass(
            cls,
            values.size(),
            strides=values.stride(),
            storage_offset=values.storage_offset(),
            dtype=values.dtype,
            device=DEVICE,
        )
        made.values, made.gpu = values, gpu
        return made

    @classmethod
    def __torch_dispatch__(cls, operator: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operator outside the block of `emulated_gpu` or inside one of its operators."""
        gpu = next(x.gpu for x in tree_leaves((args, kwargs)) if isinstance(x, EmulatedTensor))
        return gpu.run(operator, args, kwargs or {})

    def as_subclass(self, cls: Any) -> Any:
        """Return the same values as an emulated tensor of another class."""
        return EmulatedTensor.__new__(_emulated(cls), self.values, self.gpu)

    def tolist(self) -> Any:
        """Read the numbers."""
        self.gpu.record("read", "tolist")
        return self.values.tolist()

    def data_ptr(self) -> int:
        """Return the address of the values."""
        return self.values.data_ptr()

    def numpy(self, *_: Any, **__: Any) -> Any:
        """Refuse, as a tensor of a GPU does."""
        raise TypeError(
            "can't convert a cuda tensor to numpy. Use Tensor.cpu() to copy the tensor to host memory first."
        )

    def __repr__(self, **_: Any) -> str:
        return f"EmulatedTensor({self.values}, device={str(self.device)!r})"

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise TypeError("an emulated tensor cannot be sent to another process: send x.cpu()")


@cache
def _emulated(cls: Any) -> Any:
    """Return the class of emulated tensors of a class."""
    if cls is Tensor or issubclass(cls, EmulatedTensor):
        return EmulatedTensor if cls is Tensor else cls
    return type(cls.__name__, (cls, EmulatedTensor), {"__slots__": ()})


class EmulatedGPU(TorchDispatchMode):
    """The GPU of this process. `waits` and `launches` are what happened in the last block of `recording`."""

    def __init__(self) -> None:
        super().__init__()
        self.waits: list[Wait] = []
        self.launches: list[str] = []
        self.is_recording = self.is_capturing = False
        self.graph: EmulatedGraph | None = None
        self.sync_debug_mode = "default"

    @contextmanager
    def recording(self) -> Iterator[list[Wait]]:
        """Record when the CPU waits, and which Triton programs are launched."""
        self.waits = []
        self.launches = []
        self.is_recording = True
        try:
            yield self.waits
        finally:
            self.is_recording = False

    @contextmanager
    def capturing(self) -> Iterator[list[Wait]]:
        """Say that a CUDA graph is being captured. A real capture fails at the first wait that this records."""
        with self.recording() as waits:
            self.is_capturing = True
            try:
                yield waits
            finally:
                self.is_capturing = False

    @contextmanager
    def capturing_into(self, graph: "EmulatedGraph", **_: Any) -> Iterator[None]:
        """Capture a graph: what it will write to stays as it is, and a wait raises."""
        self.graph, self.is_capturing = graph, True
        try:
            yield
        finally:
            self.graph, self.is_capturing = None, False
            graph.restore()

    def record(self, kind: str, operator: str) -> None:
        """Add a wait to the record, with the place of the package that caused it."""
        if self.graph is not None:
            raise RuntimeError("CUDA error: operation not permitted when stream is capturing")
        if self.sync_debug_mode == "error":
            raise RuntimeError("called a synchronizing CUDA operation")
        if self.sync_debug_mode == "warn":
            warnings.warn("called a synchronizing CUDA operation", stacklevel=2)
        if self.is_recording:
            self.waits.append(Wait(kind, operator, _place(sys._getframe(1))))

    def __torch_dispatch__(self, operator: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operator."""
        return self.run(operator, args, kwargs or {})

    def run(self, operator: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Run an operator by CUDA's rules if it has to do with a GPU."""
        kwargs = {name: x for name, x in kwargs.items() if name != "pin_memory"}
        tensors = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        ours = [x for x in tensors if isinstance(x, EmulatedTensor)]
        target = _target(args, kwargs)
        if operator.namespace == "attnmesh" and ours:
            with self:
                return torch._library.custom_ops.OPDEFS[operator._schema.name]._init_fn(*args, **kwargs)
        if not ours and (target is None or target.type != "cuda"):
            return operator(*args, **kwargs)
        if _is_composite(operator):
            with self:
                return operator.decompose(*args, **kwargs)
        match _name(operator):
            case "copy_":
                return self._copy_into(*args[:2])
            case "_to_copy":
                return self._copied(operator, args[0], kwargs, target)
        self._check(operator, ours, [x for x in tensors if not isinstance(x, EmulatedTensor)])
        self._record_operator(operator, args, kwargs)
        return self._compute(operator, args, kwargs, target)

    def _copy_into(self, target: Tensor, source: Tensor) -> Tensor:
        if not isinstance(target, EmulatedTensor):
            self.record("read", "copy_")
        elif not isinstance(source, EmulatedTensor) and source.dim() and source.numel():
            self.record("copy", "copy_")
        self._do(lambda: cpu_values(target).copy_(cpu_values(source)), [target, source], [target])
        return target

    def _do(self, call: Callable[[], Any], inputs: Sequence[Any], written: Sequence[Any]) -> Any:
        """Return the result of a call on the values of tensors. A graph does it again at each replay."""
        return call() if self.graph is None else self.graph.run(call, inputs, written)

    def _copied(self, operator: Any, source: Tensor, kwargs: Mapping[str, Any], target: torch.device | None) -> Tensor:
        was_here = isinstance(source, EmulatedTensor)
        target = source.device if target is None else target
        options = {**kwargs, "device": "meta" if target.type == "meta" else "cpu"}
        values = self._do(lambda: operator(cpu_values(source), **options), [source], [])
        if target.type != "cuda":
            if target.type == "cpu" and was_here:
                self.record("read", "to")
            return values
        if not was_here and source.numel():
            self.record("copy", "to")
        return EmulatedTensor(values, self)

    def _check(self, operator: Any, ours: Sequence[Tensor], others: Sequence[Tensor]) -> None:
        """Raise where CUDA would: numbers of the CPU are welcome, tensors and indices are not."""
        name = _name(operator)
        strict = name.startswith(TAKES_NO_HOST_SCALARS)
        wrong = [tuple(x.shape) for x in others if x.device.type == "cpu" and (x.dim() or strict)]
        if ours and wrong and name not in TAKES_HOST_INDICES:
            raise DeviceRuleError(f"{operator}: tensors on the GPU and on the CPU, of shapes {wrong}")

    def _record_operator(self, operator: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        name = _name(operator)
        if name in HAS_A_SIZE_ON_THE_DEVICE or (name == "repeat_interleave" and kwargs.get("output_size") is None):
            self.record("read", name)
        if name in TAKES_HOST_INDICES:
            for index in (x for x in args[1] if isinstance(x, Tensor)):
                if index.dtype in (torch.bool, torch.uint8):
                    self.record("read", name)
                elif not isinstance(index, EmulatedTensor):
                    self.record("copy", name)

    def _compute(
        self, operator: Any, args: Sequence[Any], kwargs: Mapping[str, Any], target: torch.device | None
    ) -> Any:
        """Return the result of the CPU's operator or of a formula, on the target device or the GPU."""
        on_cpu = dict(tree_map(cpu_values, dict(kwargs)))
        if target is not None:
            on_cpu["device"] = "meta" if target.type == "meta" else "cpu"
        written, formula = _written(operator, args, kwargs), FORMULAS.get(operator._schema.name, operator)
        out = self._do(
            lambda: formula(*tree_map(cpu_values, tuple(args)), **on_cpu), tree_leaves((args, kwargs)), written
        )
        if written and operator._schema.returns:
            many = isinstance(out, (tuple, list))
            return tuple(written[: len(out)]) if many else written[0]
        if target is not None and target.type != "cuda":
            return out
        return tree_map(lambda x: EmulatedTensor(x, self) if isinstance(x, Tensor) else x, out)

    def launch(self, inner: Callable[..., None], *place: Any, **arguments: Any) -> None:
        """Launch a Triton program in the interpreter. All its tensors have to be on the device of the launch."""
        file, name, grid, device = place
        for key, x in arguments.items():
            if isinstance(x, Tensor) and x.device.type != torch.device(device).type:
                raise DeviceRuleError(f"program {name}: {key} is on {x.device}, the launch on {device}")
        self.launches.append(name)
        tensors = [x for x in arguments.values() if isinstance(x, Tensor)]
        on_cpu = {key: cpu_values(x) for key, x in arguments.items()}

        def call() -> None:
            with _disable_current_modes():
                inner(file, name, grid, torch.device("cpu"), **on_cpu)

        self._do(call, tensors, tensors)


class EmulatedGraph:
    """A CUDA graph: the calls of a capture, done again at each replay, on the same memory."""

    def __init__(self) -> None:
        self.calls: list[tuple[Callable[[], Any], Any, set[int]]] = []
        self.before: dict[int, tuple[torch.UntypedStorage, torch.UntypedStorage]] = {}
        self.replays = 0

    def run(self, call: Callable[[], Any], inputs: Sequence[Any], written: Sequence[Any]) -> Any:
        """Return the result of a call that is captured."""
        for x in map(cpu_values, written):
            storage = x.untyped_storage()
            self.before.setdefault(storage.data_ptr(), (storage, storage.clone()))
        made = call()
        self.calls.append((call, made, {_memory(x) for x in map(cpu_values, inputs) if isinstance(x, Tensor)}))
        return made

    def restore(self) -> None:
        """Undo what the capture wrote: it runs nothing."""
        for storage, before in self.before.values():
            storage.copy_(before)
        self.before = {}

    def replay(self) -> None:
        """Do all calls again. What they make is written to the memory of the capture."""
        self.replays += 1
        for call, made, inputs in self.calls:
            for old, new in zip(tree_leaves(made), tree_leaves(call()), strict=True):
                if isinstance(old, Tensor) and _memory(old) not in inputs:  # else a view, or written in place
                    old.copy_(new)


def _memory(x: Tensor) -> int:
    """Return the address of a tensor's memory."""
    return x.untyped_storage().data_ptr()


@contextmanager
def emulated_gpu() -> Iterator[EmulatedGPU]:
    """Let this process have one GPU, in this block."""
    gpu = EmulatedGPU()
    _accept_cuda_devices()
    only_cpu = torch._C._only_lift_cpu_tensors()
    with ExitStack() as stack:
        torch._C._set_only_lift_cpu_tensors(True)  # torch.tensor(..., device="cuda") asks the mode for the copy
        stack.callback(torch._C._set_only_lift_cpu_tensors, only_cpu)
        stack.enter_context(patch.dict(os.environ, {"TRITON_INTERPRET": "1"}))
        stack.enter_context(patch.multiple(torch.cuda, **_cuda(gpu)))
        _patch_package(gpu, stack)
        yield stack.enter_context(gpu)


class _NoDevices(torch._C._acc.DeviceGuard):
    """Switches of the current device of CUDA, which do nothing."""

    def type_(self) -> Any:
        """Return the device type that PyTorch is told of."""
        return DeviceType.CUDA


@cache
def _accept_cuda_devices() -> _NoDevices:
    """Let tensors say cuda in a PyTorch for CPUs, and return the switch, which has to live from now on.

    PyTorch accepts a switch in Python for the device type that is free for extensions. It serves CUDA as well.
    """
    torch._C._ensureCUDADeviceGuardSet()  # enough in a PyTorch for GPUs
    library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libc10.so"))
    switches = (ctypes.c_void_p * (LAST_DEVICE_TYPE + 1)).in_dll(library, "_ZN3c104impl26device_guard_impl_registryE")
    free, switch = int(DeviceType.PrivateUse1), _NoDevices()
    before = switches[free]
    torch._C._acc.register_python_privateuseone_device_guard(switch)
    switches[int(DeviceType.CUDA)] = switches[int(DeviceType.CUDA)] or switches[free]
    switches[free] = before
    return switch


class Queue:
    """A stream or an event: what is asked of it is done at once."""

    def __init__(self, *_: Any) -> None:
        pass

    def record(self, *_: Any) -> None:
        """Do nothing."""

    wait_event = wait_stream = synchronize = record


class Generator:
    """The random numbers of the GPU, of which no graph takes any."""

    def clone_state(self) -> "Generator":
        """Return another."""
        return Generator()

    def graphsafe_set_state(self, other: "Generator") -> None:
        """Do nothing."""


def _cuda(gpu: EmulatedGPU) -> dict[str, Any]:
    """Return what `torch.cuda` says while a GPU is emulated."""
    properties = SimpleNamespace(multi_processor_count=4, total_memory=MEMORY, name="an emulated GPU", uuid="emulated")
    return {
        "_lazy_init": lambda: None,
        "init": lambda: None,
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "device_count": lambda: 1,
        "current_device": lambda: 0,
        "set_device": lambda device: None,
        "device": lambda device: nullcontext(),
        "synchronize": lambda *_: gpu.record("read", "synchronize"),
        "Stream": Queue,
        "Event": Queue,
        "stream": lambda _: nullcontext(),
        "current_stream": Queue,
        "get_device_capability": lambda *_: (9, 0),
        "get_device_name": lambda *_: properties.name,
        "get_device_properties": lambda *_: properties,
        "is_current_stream_capturing": lambda: gpu.is_capturing,
        "default_generators": (Generator(),),
        "CUDAGraph": EmulatedGraph,
        "graph": gpu.capturing_into,
        "get_sync_debug_mode": lambda: gpu.sync_debug_mode,
        "set_sync_debug_mode": partial(setattr, gpu, "sync_debug_mode"),
    }


def _patch_package(gpu: EmulatedGPU, stack: ExitStack) -> None:
    """Interpret Triton's launches, and say which of PyTorch's attention operators take a call."""
    from attnmesh.kernels import traced
    from attnmesh.kernels.triton_runtime import launch

    def interpreted(*place: Any, **arguments: Any) -> None:
        gpu.launch(launch, *place, **arguments)

    for module in LAUNCHERS:
        stack.enter_context(patch(f"attnmesh.{module}.launch", interpreted))
    takes = {
        "SDPAParams": lambda q, *_: q,
        "can_use_flash_attention": lambda q: q.dtype in (torch.bfloat16, torch.float16),
        "can_use_efficient_attention": lambda q: q.dtype != torch.float64,
        "can_use_cudnn_attention": lambda q: False,
    }
    stack.enter_context(patch.multiple("attnmesh.kernels.implementations.cuda", **takes))
    # Calls of a known kind check nothing, of emulated tensors too.
    plain = {*traced.PLAIN_TENSORS, EmulatedTensor}
    stack.enter_context(patch.multiple(traced, PLAIN_TENSORS=plain, dispatch_mode_count=lambda: 0))


def cpu_values(x: Any) -> Any:
    """Return the values of an emulated tensor, without a record, and anything else as it is."""
    return x.values if isinstance(x, EmulatedTensor) else x


def _target(args: Sequence[Any], kwargs: Mapping[str, Any]) -> torch.device | None:
    """Return the device that an operator is told to put its result on."""
    named = [x for x in (kwargs.get("device"), *args) if isinstance(x, torch.device)]
    return named[0] if named else None


def _name(operator: Any) -> str:
    return str(operator._schema.name).split("::")[1]


def _is_composite(operator: Any) -> bool:
    """Return whether an operator is made of others, which the emulation then sees one by one."""
    made = torch._C._dispatch_has_kernel_for_dispatch_key(operator.name(), "CompositeImplicitAutograd")
    return made and operator._schema.name not in FORMULAS


def _written(operator: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Tensor]:
    """Return the arguments that an operator writes to, which it returns as they are."""
    written = []
    for number, argument in enumerate(operator._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            written.append(args[number] if number < len(args) else kwargs[argument.name])
    return written


def _place(frame: FrameType | None) -> str:
    """Return the file, line and function of the package from which a frame was called."""
    while frame is not None:
        if "/attnmesh/" in frame.f_code.co_filename:
            file = frame.f_code.co_filename.split("/attnmesh/")[-1]
            return f"{file}:{frame.f_lineno} {frame.f_code.co_name}"
        frame = frame.f_back
    return "outside the package"
