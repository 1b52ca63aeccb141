"""What ranks compute together: sums and copies of tensors, on NCCL for CUDA and on Gloo for the CPU. Nothing is pickled.

The process groups are made here by hand: the store of rank 0 listens at the rendezvous' address alone, and each rank
speaks at the address by which its node reached it. How long a collective may take is the supervisors' business.

On CUDA every call goes to the current stream and returns at once, so that a program can capture it: torch gives such a call
(`asyncOp` false) no stream and no thread that watches it. Those for the host (`gather`, `copy_`, `on_host`) wait.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import fcntl
import math
import os
import socket
import struct
import sys
import time
from collections.abc import Callable, MutableMapping, Sequence
from contextlib import AbstractContextManager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import AllgatherOptions

from sexpgpu.backends.ranks import BUCKET
from sexpgpu.diagnostics import problem
from sexpgpu.run.ranks.layout import Place
from sexpgpu.run.ranks.member import Member

FOREVER = timedelta(days=7)  # of a collective: the supervisors see a rank that hangs
MEETING = timedelta(seconds=120)  # of making the groups, every rank being there already
REACHED = 15.0  # seconds in which a rank reaches the store of rank 0, which listens already
HOSTED = 64 << 20  # bytes on the device while shares go to the host
_SIOCGIFADDR = 0x8915

#: what NCCL and torch read when the first group is made, where the user has not set it
NCCL = {
    "NCCL_NVLS_ENABLE": "0",  # multicast of the NVLink switch fails where it is not set up
    "NCCL_GRAPH_REGISTER": "0",  # registered buffers of a captured sum must be one allocation, which growing segments are not (pytorch#158029)
    "NCCL_RUNTIME_CONNECT": "0",  # ranks connect when they meet: within a capture the others may not be there
    "NCCL_RAS_ENABLE": "0",  # its service listens at a port of its own, and the supervisors know more
    "TORCH_NCCL_BLOCKING_WAIT": "1",  # torch's thread that queries events of collectives, beside captures too, is not made; nothing is waited for by torch
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",  # the supervisors see who failed; torch's threads would end whoever is waiting
    "TORCH_NCCL_RETHROW_CUDA_ERRORS": "0",
    "TORCH_NCCL_ENABLE_MONITORING": "0",
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
    "TORCH_NCCL_TRACE_BUFFER_SIZE": "0",
    "TORCH_FR_BUFFER_SIZE": "0",
}


def prepare(environ: MutableMapping[str, str], address: str) -> None:
    """Sets what NCCL needs: NCCL above, and the interface of this node's address."""
    for name, value in NCCL.items():
        environ.setdefault(name, value)
    interface = interface_of(address)
    if interface and "NCCL_SOCKET_IFNAME" not in environ:
        environ["NCCL_SOCKET_IFNAME"] = f"={interface}"


def interface_of(address: str) -> str:
    """The network interface that has this IPv4 address; empty where none is found."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        for _, name in socket.if_nameindex():
            try:
                found = fcntl.ioctl(sock.fileno(), _SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
            except OSError:  # it has no IPv4 address
                continue
            if socket.inet_ntoa(found[20:24]) == address:
                return name
    return ""


def leave(code: int) -> None:
    """Ends a process that has groups of NCCL, after what Python does at its end; returns in another. Python's own teardown would free what
    the device still works with, and wait for a sum to which no other rank comes any more."""
    if not _groups:
        return
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    os._exit(code)


_groups: list[Any] = []  # of NCCL


def listen(host: str) -> socket.socket:
    """A socket at this address alone, at a port that the system chooses."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    sock = socket.socket(family, socket.SOCK_STREAM)
    sock.bind((host, 0))
    sock.listen(1024)
    return sock


def reach(store: tuple[str, int], place: Place) -> None:
    """E-NET-030 where rank 0's store cannot be reached: torch would try for two minutes, say so in its own words, and hear no signal."""
    begin = time.monotonic()
    while True:
        try:
            socket.create_connection(store, 5.0).close()
            return
        except OSError as error:
            if time.monotonic() - begin > REACHED:
                raise problem("E-NET-030", f"rank {place.rank} does not reach rank 0 at {store[0]}:{store[1]}, a port that the system chose: {error.strerror or error}",
                              help="the machines of a run reach each other at every port, not at the rendezvous' alone; of one machine, the loopback interface is up") from None
        time.sleep(0.3)


class Collectives:
    """`store`: host and port of rank 0's; `address`: this node's own. `wire`: f32 or bf16, for gradients between nodes.

    Methods named `…_` change their tensors. Every rank calls the same ones in the same order.
    """

    def __init__(self, place: Place, member: Member, store: tuple[str, int], address: str, device: str = "cpu", wire: str = "f32",
                 listening: socket.socket | None = None):
        self.rank, self.ranks, self._place, self._member = place.rank, place.ranks, place, member
        self._address, self._device = address, device
        reach(store, place)
        self._store = dist.TCPStore(store[0], store[1], None, place.rank == 0, MEETING, wait_for_workers=False, multi_tenant=False,
                                    master_listen_fd=None if listening is None else listening.detach())
        self._control = self._gloo("control", place.rank, place.ranks)
        self._beside = self._gloo("beside", place.rank, place.ranks)
        if device == "cuda":
            prepare(os.environ, address)
        self._world = self._group("world", place.rank, place.ranks)
        self.wire = wire if place.nodes > 1 else "f32"
        if self.wire == "bf16":
            self._node = self._group(f"node {place.node}", place.local, place.each)
            self._across = self._group(f"across {place.local}", place.node, place.nodes)
        if device == "cuda":  # NCCL connects at a group's first call, and takes its memory then
            self._connect()

    def _connect(self) -> None:
        one = torch.zeros(self.ranks, device="cuda")
        with self._member.collective("connecting"):
            for group in [self._world, *([self._node, self._across] if self.wire == "bf16" else [])]:
                _done(group.allreduce([one], _now(dist.AllreduceOptions())))
            torch.cuda.current_stream().synchronize()

    def _group(self, name: str, rank: int, size: int) -> Any:
        if self._device == "cpu":
            return self._gloo(name, rank, size)
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = FOREVER
        group = dist.ProcessGroupNCCL(dist.PrefixStore(name, self._store), rank, size, options)
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(group))  # it ends with the process: its destructor waits for ranks, and for graphs, that are gone
        _groups.append(group)
        return group

    def _gloo(self, name: str, rank: int, size: int) -> Any:
        options = dist.ProcessGroupGloo._Options()
        options._devices = [dist.ProcessGroupGloo.create_device(hostname=self._address)]
        options._timeout = MEETING
        group = dist.ProcessGroupGloo(dist.PrefixStore(name, self._store), rank, size, options)
        group._set_default_timeout(FOREVER)
        return group

    # -- tensors of the run's device

    def waiting(self, what: str) -> AbstractContextManager[None]:
        """Around a wait of the host for the device, which does its own work and waits for the other ranks."""
        return self._member.collective(what, device=True)

    def making(self) -> AbstractContextManager[None]:
        """Around the making of a graph: a deadline of `compiling` counts."""
        return self._member.within("compiling")

    def waited(self, seconds: float) -> None:
        """So long the device waited for them: no time of this rank's own."""
        self._member.waited(seconds)

    def _settle(self) -> None:
        if self._device == "cuda":
            torch.cuda.current_stream().synchronize()

    def sum_(self, tensor: torch.Tensor) -> None:
        """The sum over ranks, the same bits on each."""
        with self._member.collective("all-reduce"):
            _done(self._world.allreduce([tensor], _now(dist.AllreduceOptions())))

    def part_(self, part: torch.Tensor, owner: int | None = None) -> None:
        """The sum over ranks of a part of a vector of gradients; with `owner` it is on that rank alone, elsewhere anything."""
        if self.wire == "bf16":
            self._rounded_(part)
        elif owner is None:
            self.sum_(part)
        else:
            options = _now(dist.ReduceOptions())
            options.rootRank = owner
            with self._member.collective("reduce"):
                _done(self._world.reduce([part], options))

    def join_(self, vector: torch.Tensor) -> None:
        """Every rank's share of a vector of which each has its own."""
        share = vector.numel() // self.ranks
        own = vector[self.rank * share : (self.rank + 1) * share]
        with self._member.collective("all-gather"):
            _done(self._world._allgather_base(vector, own if vector.is_cuda else own.clone(), _now(AllgatherOptions())))

    def gradients_(self, vectors: Sequence[torch.Tensor]) -> None:
        """Sums of vectors over ranks. Between nodes rounded to bf16 if so chosen: summed in f32 within a node, each node's
        sum rounded once, and those summed in f32 in the order of nodes."""
        for vector in vectors:
            flat = vector.view(-1)
            step = max(1, BUCKET // flat.element_size())
            for start in range(0, flat.numel(), step):
                self.part_(flat[start : start + step])

    def _rounded_(self, flat: torch.Tensor) -> None:
        nodes, each, local = self._place.nodes, self._place.each, self._place.local
        share = math.ceil(flat.numel() / each)
        padded = flat.new_zeros(share * each)
        padded[: flat.numel()] = flat
        own = padded[local * share : (local + 1) * share]
        with self._member.collective("all-reduce in the node"):
            _done(self._node.allreduce([padded], _now(dist.AllreduceOptions())))
        came = torch.empty(share * nodes, dtype=torch.bfloat16, device=flat.device)
        with self._member.collective("all-gather between nodes"):
            _done(self._across._allgather_base(came, own.to(torch.bfloat16), _now(AllgatherOptions())))
        total = came[:share].to(flat.dtype)
        for node in range(1, nodes):
            total += came[node * share : (node + 1) * share].to(flat.dtype)
        with self._member.collective("all-gather in the node"):
            _done(self._node._allgather_base(padded, total, _now(AllgatherOptions())))
        flat.copy_(padded[: flat.numel()])

    def own_sum(self, vector: torch.Tensor) -> torch.Tensor:
        """This rank's share of the sum over ranks of a vector whose length the ranks divide."""
        share = vector.numel() // self.ranks
        if self.wire == "bf16":
            self.gradients_([vector])
            return vector[self.rank * share : (self.rank + 1) * share]
        out = torch.empty(share, dtype=vector.dtype, device=vector.device)
        with self._member.collective("reduce-scatter"):
            self._world._reduce_scatter_base(out, vector).wait()
        return out

    def gather(self, share: torch.Tensor) -> torch.Tensor:
        """The shares of all ranks, one after another."""
        out = torch.empty(share.numel() * self.ranks, dtype=share.dtype, device=share.device)
        with self._member.collective("all-gather"):
            _done(self._world._allgather_base(out, share.contiguous(), _now(AllgatherOptions())))
            self._settle()
        return out

    def on_host(self, share: torch.Tensor) -> torch.Tensor | None:
        """The shares of all ranks, one after another, in rank 0's host memory; None on the others. A piece at a time."""
        size = share.numel()
        step = max(1, HOSTED // (share.element_size() * self.ranks))
        whole = torch.empty((self.ranks, size), dtype=share.dtype) if self.rank == 0 else None
        for start in range(0, size, step):
            piece = share[start : start + step]
            found = self.gather(piece)
            if whole is not None:
                whole[:, start : start + step] = found.view(self.ranks, -1)
        return None if whole is None else whole.view(-1)

    def copy_(self, tensors: Sequence[torch.Tensor], root: int = 0) -> None:
        """Rank `root`'s values, as bytes, so that every dtype goes."""
        for tensor in tensors:
            if not tensor.numel():
                continue
            whole = tensor.contiguous()
            options = _now(dist.BroadcastOptions())
            options.rootRank, options.rootTensor = root % self.ranks, 0
            with self._member.collective("broadcast"):
                _done(self._world.broadcast([whole.view(-1).view(torch.uint8)], options))
            if whole is not tensor:
                tensor.copy_(whole)

    # -- numbers on the host

    def sum_floats(self, values: Sequence[float]) -> list[float]:
        """Sums in float64."""
        tensor = torch.tensor(values, dtype=torch.float64)
        with self._member.collective("all-reduce of numbers"):
            self._control.allreduce([tensor], dist.AllreduceOptions()).wait()
        return [float(value) for value in tensor.tolist()]

    def tell(self, text: str) -> str:
        """Rank 0's text."""
        data = text.encode()
        length = torch.tensor([len(data)])
        options = dist.BroadcastOptions()
        with self._member.collective("broadcast of a text"):
            self._control.broadcast([length], options).wait()
            if not length.item():
                return ""
            content = torch.frombuffer(bytearray(data), dtype=torch.uint8) if self.rank == 0 else torch.empty(int(length), dtype=torch.uint8)
            self._control.broadcast([content], options).wait()
        return content.numpy().tobytes().decode()

    def begin_largest(self, values: Sequence[int]) -> Callable[[], list[int]]:
        """Begins to look for the largest of each over ranks; what it returns waits for them."""
        tensor = torch.tensor(values, dtype=torch.int64)
        options = dist.AllreduceOptions()
        options.reduceOp = dist.ReduceOp.MAX
        with self._member.collective("agreement", waits=False):
            work = self._control.allreduce([tensor], options)

        def wait() -> list[int]:
            with self._member.collective("agreement"):
                work.wait()
            return [int(value) for value in tensor.tolist()]

        return wait

    def largest_beside(self, value: int) -> int:
        """The largest over ranks, for a thread beside the one that all else is asked from."""
        tensor = torch.tensor([value])
        options = dist.AllreduceOptions()
        options.reduceOp = dist.ReduceOp.MAX
        with self._member.collective("agreement on data"):
            self._beside.allreduce([tensor], options).wait()
        return int(tensor.item())

    def wait_for_all(self) -> None:
        """Returns when every rank called it."""
        self.sum_floats([0.0])


def _now(options: Any) -> Any:
    """Of a collective on the current stream. Gloo, which has none, does not look."""
    options.asyncOp = False
    return options


def _done(work: Any) -> None:
    """On Gloo waits; on CUDA lets the current stream wait. torch gives nothing where that is done already."""
    if work is not None:
        work.wait()
