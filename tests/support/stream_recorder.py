"""Records what the streams of the stand-in device do, and finds what nothing orders. Needs no GPU.

The stand-in computes at once. What a device would be free to reorder is found by vector clocks: an operation happens
after what its stream did before, what that stream has waited for, and what the host has waited for. `violations` lists

* two operations on the same bytes, one of which writes, that nothing orders;
* a copy to the host for which the host does not wait;
* memory that is freed while a stream may still use it. As torch's caching allocator, the recorder lets the stream that
  allocated memory reuse it at once, so that stream must have waited for all others that used it, except for those that
  `record_stream` has named.

`ProcessGroup` and `Horovod` move tensors between ranks as NCCL's process group and Horovod's NCCL operations do, each
on a stream of its own. Other ranks send what this one sends. The process group keeps no tensor alive: torch's does, in
ways that differ between versions and backends.
"""

import contextlib
import itertools
import types
from ctypes import c_int64
from dataclasses import dataclass, field
from unittest import mock

import torch
import torch.distributed as dist
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import gradzip.ops._native as native
from benchmarks.device_ops.stand_in import DEVICE, PARAMETERS, TABLES, StandInTensor, _changed


class Stream:
    """A stream of the stand-in device. clock: how many operations of each stream its next one comes after."""

    def __init__(self, recorder, name):
        self.recorder, self.name = recorder, name
        self.cuda_stream = 0
        self.clock = {}

    def wait_stream(self, other):
        self.wait(other.clock)

    def wait(self, clock):
        self.recorder.sweep()
        _join(self.clock, clock)

    def wait_event(self, event):
        self.wait(event.clock)

    def record_event(self, event=None):
        event = event or Event(self.recorder)
        event.record(self)
        return event

    def __repr__(self):
        return self.name


class Event:
    """An event of the stand-in device. clock: what comes before it."""

    def __init__(self, recorder):
        self.recorder = recorder
        self.clock = {}

    def record(self, stream=None):
        self.clock = dict((stream or self.recorder.current).clock)

    def synchronize(self):
        self.recorder.wait_on_host(self.clock)


def _join(clock, other):
    for stream, time in other.items():
        clock[stream] = max(time, clock.get(stream, 0))


@dataclass
class Block:
    """The memory of one storage."""

    weak: StorageWeakRef
    owner: Stream  # on which it was allocated
    recorded: set = field(default_factory=set)  # streams that `record_stream` has named
    accesses: dict = field(default_factory=dict)  # (stream, writes, first byte, end) -> (time, operation)


class Recorder(TorchDispatchMode):
    """Use within `stand_in`: `with stand_in() as device, Recorder(device) as recorder`."""

    @classmethod
    def _should_skip_dynamo(cls):
        return False  # as the stand-in does

    def __init__(self, device):
        super().__init__()
        self.device = device
        self.default = self.current = Stream(self, "default")
        self.host = {}  # the clock of what the host has waited for
        self.blocks = {}  # by the address of the storage
        self.violations = []
        self.used = {}  # operations by the streams that they ran on
        self._pointers = {}  # tensors whose addresses were asked for since the last kernel
        self._patches = contextlib.ExitStack()

    def __enter__(self):
        kernels = native.kernels()
        watched = types.SimpleNamespace(**vars(kernels) | {"cuda": _Kernels(self, kernels.cuda)})
        data_ptr = StandInTensor.data_ptr
        recorder, numbers = self, itertools.count()

        def watched_data_ptr(tensor):
            address = data_ptr(tensor)
            recorder._pointers[address] = tensor.host
            return address

        for target, name, value in (
            (native, "_C", watched),
            (StandInTensor, "data_ptr", watched_data_ptr),
            (StandInTensor, "record_stream", lambda tensor, stream: recorder.record_stream(tensor, stream)),
            (StandInTensor, "new_tensor", lambda tensor, data: torch.tensor(data, dtype=tensor.dtype).to(DEVICE)),
            (torch.cuda, "current_stream", lambda device=None: recorder.current),
            (torch.cuda, "is_current_stream_capturing", lambda: False),
            (torch.cuda, "default_stream", lambda device=None: recorder.default),
            (torch.cuda, "stream", recorder.on),
            (torch.cuda, "Stream", lambda *_, **__: Stream(recorder, f"stream {next(numbers)}")),
            (torch.cuda, "Event", lambda **_: Event(recorder)),
        ):
            self._patches.enter_context(mock.patch.object(target, name, value))
        return super().__enter__()

    def __exit__(self, *error):
        self.sweep()
        self._patches.close()
        return super().__exit__(*error)

    @contextlib.contextmanager
    def on(self, stream):
        """As `torch.cuda.stream`."""
        before, self.current = self.current, stream
        try:
            yield
        finally:
            self.current = before

    def tick(self):
        """Begin an operation on the current stream."""
        self.sweep()
        clock = self.current.clock
        _join(clock, self.host)
        clock[self.current] = clock.get(self.current, 0) + 1

    def wait_on_host(self, clock):
        """The host waits: all that it queues from now on comes after."""
        self.sweep()
        _join(self.host, clock)

    def record_stream(self, tensor, stream):
        self.block(tensor.host).recorded.add(stream)

    # --- memory

    def block(self, host):
        storage = host.untyped_storage()
        if storage._cdata not in self.blocks:
            self.blocks[storage._cdata] = Block(StorageWeakRef(storage), self.current)
        return self.blocks[storage._cdata]

    def access(self, host, writes, operation):
        """The current operation reads or writes a tensor."""
        if not host.numel():
            return
        begin = host.storage_offset() * host.element_size()
        span = 1 + sum((n - 1) * abs(s) for n, s in zip(host.shape, host.stride(), strict=True))
        end = begin + span * host.element_size()
        block, stream = self.block(host), self.current
        for (other, wrote, first, last), (time, earlier) in block.accesses.items():
            conflict = other is not stream and (writes or wrote) and first < end and begin < last
            if conflict and stream.clock.get(other, 0) < time:
                self.violations.append(
                    f"{operation} on {stream} {'writes' if writes else 'reads'} what {earlier} on {other} "
                    f"{'writes' if wrote else 'reads'}: neither waits for the other"
                )
        self.used.setdefault(str(stream), set()).add(operation)
        block.accesses[stream, writes, begin, end] = stream.clock[stream], operation

    def sweep(self):
        """Check what was freed."""
        for key in [key for key, block in self.blocks.items() if block.weak.expired()]:
            block = self.blocks.pop(key)
            known = dict(block.owner.clock)
            _join(known, self.host)
            for (stream, *_), (time, operation) in block.accesses.items():
                if stream is not block.owner and stream not in block.recorded and known.get(stream, 0) < time:
                    self.violations.append(
                        f"memory of {block.owner} is freed while {operation} on {stream} may still use it"
                    )

    # --- operations of torch

    def __torch_dispatch__(self, func, kinds, args=(), kwargs=None):
        kwargs = kwargs or {}
        given = [x for x in tree_leaves((args, kwargs)) if isinstance(x, StandInTensor)]
        storages = {x.host.untyped_storage()._cdata for x in given}
        changed = {id(x) for x in _changed(func, args, kwargs)}
        result = func(*args, **kwargs)
        made = tree_leaves(result)
        on_device = [x for x in made if isinstance(x, StandInTensor)]
        fresh = [x for x in on_device if x.host.untyped_storage()._cdata not in storages]
        to_host = bool(given) and any(x is not None and not isinstance(x, StandInTensor) for x in made)
        name = func.__name__
        if not (changed or fresh or to_host):
            return result  # a view
        self.tick()
        for x in fresh:
            self.block(x.host)
        if not name.startswith(("empty", "new_empty")):
            for x in given:
                self.access(x.host, id(x) in changed, name)
            for x in fresh:
                self.access(x.host, True, name)
        if to_host and kwargs.get("non_blocking"):
            self.violations.append(f"{name} on {self.current} copies to the host, which does not wait")
        elif to_host:
            self.wait_on_host(self.current.clock)
        return result


class _Kernels:
    """The launchers of the stand-in, recorded."""

    def __init__(self, recorder, kernels):
        self._recorder, self._kernels = recorder, kernels

    def __getattr__(self, name):
        launch, parameters = getattr(self._kernels, name), PARAMETERS[name]

        def kernel(workspace, *arguments):
            recorder = self._recorder
            pointers = dict(recorder._pointers)
            missing = launch(workspace, *arguments)
            if missing:
                return missing
            recorder._pointers.clear()
            recorder.tick()
            accesses = [(workspace, True)]
            for parameter, argument in zip(parameters, arguments):
                struct = parameter.removeprefix("const ").partition("*")[0]
                if struct in TABLES and not struct.endswith("Term"):
                    constant = TABLES[struct] * arguments[parameters.index("int64_t count")]
                    table = (c_int64 * len(constant)).from_address(argument)
                    accesses += [(address, not const) for address, const in zip(table, constant)]
                elif "*" in parameter:
                    accesses.append((argument, not parameter.startswith("const ")))
            for address, writes in accesses:
                if (host := pointers.pop(address, None)) is not None:
                    recorder.access(host, writes, name)
            if any(p.startswith(LISTS) or "Term*" in p for p in parameters):
                for host in pointers.values():
                    recorder.access(host, name == "orthogonalize", name)
            return 0

        return kernel


# Parameters that list addresses in host memory, besides the terms of weighted sums. What they list is what else was
# asked for its address.
LISTS = ("const uint8_t* const*", "const TransformPart*", "const PayloadBuffer*", "const Matrix*")


# --- torch's process groups


class Work:
    """What an asynchronous operation of a process group returns: the current stream waits for it, not the host."""

    def __init__(self, recorder, clock):
        self._recorder, self._clock = recorder, dict(clock)

    def wait(self, timeout=None):
        self._recorder.current.wait(self._clock)


class ProcessGroup:
    """Operations on the stream of a process group, which waits for the stream that starts them."""

    def __init__(self, recorder, size):
        self.recorder, self.size = recorder, size
        self.stream = Stream(recorder, "nccl")

    @contextlib.contextmanager
    def installed(self):
        """Have torch.distributed use it, with this process as the first rank."""
        from torch.testing._internal.distributed.fake_pg import FakeStore

        dist.init_process_group("fake", rank=0, world_size=self.size, store=FakeStore())
        try:
            with mock.patch.multiple(
                dist, batch_isend_irecv=self.batch_isend_irecv, new_group=lambda *_, **__: dist.group.WORLD,
            ), mock.patch.multiple(
                dist.ProcessGroup, allreduce=lambda _, tensors, *options: self.all_reduce(*tensors),
                broadcast=lambda _, tensor, root: self.broadcast(tensor),
                alltoall_base=lambda _, received, sent, *splits: self.all_to_all(received, sent),
                _allgather_base=lambda _, received, sent: self.all_gather(received, sent),
            ):  # fmt: skip
                yield
        finally:
            dist.destroy_process_group()

    def _run(self, operation):
        self.stream.wait_stream(self.recorder.current)
        with self.recorder.on(self.stream):
            operation()
        return Work(self.recorder, self.stream.clock)

    def all_reduce(self, tensor):
        return self._run(lambda: tensor.mul_(self.size))

    def broadcast(self, tensor):
        return self._run(lambda: tensor.mul_(1))

    def all_gather(self, received, sent):
        return self._run(lambda: received.view(self.size, -1).copy_(sent.view(1, -1)))

    def all_to_all(self, received, sent):
        return self._run(lambda: received.view(self.size, -1).copy_(sent.view(self.size, -1)[:1]))

    def batch_isend_irecv(self, operations):
        def transfer():
            for operation in operations:
                if operation.op is dist.isend:
                    self.recorder.tick()
                    self.recorder.access(operation.tensor.host, False, "isend")
                else:
                    operation.tensor.zero_()

        return [self._run(transfer)]


class Future:
    """In place of a torch.futures.Future of a device: who waits for it waits for the stream that set its result."""

    def __init__(self, **_):
        self._clock = None

    def set_result(self, result):
        current = torch.cuda.current_stream()
        self._recorder, self._clock, self._result = current.recorder, dict(current.clock), result

    def wait(self):
        self._recorder.current.wait(self._clock)
        return self._result


# --- Horovod


class Horovod:
    """Horovod's operations, on its own stream, as late as `synchronize` lets them be.

    An operation waits for an event of the stream that started it. Horovod holds what it was given until the device is
    done, and `synchronize` waits for that on the host. A thread of Horovod's own allocates what it receives, on the
    default stream.
    """

    def __init__(self, recorder, size):
        self.recorder, self.size = recorder, size
        self.stream = Stream(recorder, "horovod")
        self._handles = {}
        self._numbers = itertools.count()

    @contextlib.contextmanager
    def installed(self):
        import horovod.torch as hvd

        with mock.patch.multiple(
            hvd, allgather_async=self.allgather_async, alltoall_async=self.alltoall_async,
            broadcast_async=self.broadcast_async,
            allreduce_async_=self.allreduce_async_, synchronize=self.synchronize, poll=self._handles.__contains__,
        ):  # fmt: skip
            yield

    def _start(self, tensor, operation):
        handle = next(self._numbers)
        self._handles[handle] = tensor, dict(self.recorder.current.clock), operation
        return handle

    def synchronize(self, handle):
        tensor, ready, operation = self._handles.pop(handle)
        self.stream.wait(ready)
        with self.recorder.on(self.stream):
            output = operation(tensor)
        self.recorder.wait_on_host(self.stream.clock)
        return output

    def _receive(self, tensor, numel, sent):
        self.recorder.tick()
        self.recorder.access(sent.host, False, "allgather")  # before it waits for the memory
        with self.recorder.on(self.recorder.default):
            received = tensor.new_empty(numel)
        self.stream.wait_stream(self.recorder.default)
        received.view(self.size, -1).copy_(sent.view(1, -1))
        return received

    def allreduce_async_(self, tensor, **_):
        return self._start(tensor, lambda tensor: tensor.mul_(1))

    def broadcast_async(self, tensor, root, **_):
        return self._start((tensor, torch.empty_like(tensor)), lambda pair: pair[1].copy_(pair[0]))

    def allgather_async(self, tensor, **_):
        if not hasattr(tensor, "host"):  # in host memory
            return self._start(tensor, lambda tensor: tensor.repeat(self.size))
        return self._start(tensor, lambda tensor: self._receive(tensor, self.size * tensor.numel(), tensor))

    def alltoall_async(self, tensor, splits, **_):
        mine = int(splits[0])

        def operation(tensor):
            return self._receive(tensor, self.size * mine, tensor[:mine]), torch.full((self.size,), mine)

        return self._start(tensor, operation)
