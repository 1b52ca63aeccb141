"""What ranks compute together: sums and copies of tensors, on NCCL for CUDA and on Gloo for the CPU. Nothing is pickled.

The process groups are made here by hand: the store of rank 0 listens at the rendezvous' address alone, and each rank
speaks at the address by which its node reached it. How long a collective may take is the supervisors' business.
"""

from __future__ import annotations

import math
import os
import socket
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from sexpgpu.run.ranks.layout import Place
from sexpgpu.run.ranks.member import Member

FOREVER = timedelta(days=7)  # of a collective: the supervisors see a rank that hangs
MEETING = timedelta(seconds=120)  # of making the groups, every rank being there already
BUCKET = 25 << 20  # bytes of gradients that travel together


def listen(host: str) -> socket.socket:
    """A socket at this address alone, at a port that the system chooses."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    sock = socket.socket(family, socket.SOCK_STREAM)
    sock.bind((host, 0))
    sock.listen(1024)
    return sock


class Collectives:
    """`store`: host and port of rank 0's; `address`: this node's own. `wire`: f32 or bf16, for gradients between nodes.

    Methods named `…_` change their tensors. Every rank calls the same ones in the same order.
    """

    def __init__(self, place: Place, member: Member, store: tuple[str, int], address: str, device: str = "cpu", wire: str = "f32",
                 listening: socket.socket | None = None):
        os.environ.setdefault("NCCL_NVLS_ENABLE", "0")  # multicast of the NVLink switch stays off: it fails where it is not set up
        self.rank, self.ranks, self._place, self._member = place.rank, place.ranks, place, member
        self._address, self._device = address, device
        self._store = dist.TCPStore(store[0], store[1], None, place.rank == 0, MEETING, wait_for_workers=False, multi_tenant=False,
                                    master_listen_fd=None if listening is None else listening.detach())
        self._control = self._gloo("control", place.rank, place.ranks)
        self._world = self._group("world", place.rank, place.ranks)
        self._wire = wire if place.nodes > 1 else "f32"
        if self._wire == "bf16":
            self._node = self._group(f"node {place.node}", place.local, place.each)
            self._across = self._group(f"across {place.local}", place.node, place.nodes)

    def _group(self, name: str, rank: int, size: int) -> Any:
        if self._device == "cpu":
            return self._gloo(name, rank, size)
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = FOREVER
        return dist.ProcessGroupNCCL(dist.PrefixStore(name, self._store), rank, size, options)

    def _gloo(self, name: str, rank: int, size: int) -> Any:
        options = dist.ProcessGroupGloo._Options()
        options._devices = [dist.ProcessGroupGloo.create_device(hostname=self._address)]
        options._timeout = MEETING
        group = dist.ProcessGroupGloo(dist.PrefixStore(name, self._store), rank, size, options)
        group._set_default_timeout(FOREVER)
        return group

    # -- tensors of the run's device

    def sum_(self, tensor: torch.Tensor) -> None:
        """The sum over ranks, the same bits on each."""
        with self._member.collective("all-reduce"):
            self._world.allreduce([tensor], dist.AllreduceOptions()).wait()

    def gradients_(self, vectors: Sequence[torch.Tensor]) -> None:
        """Sums of vectors over ranks. Between nodes rounded to bf16 if so chosen: summed in f32 within a node, each node's
        sum rounded once, and those summed in f32 in the order of nodes."""
        for vector in vectors:
            flat = vector.view(-1)
            step = max(1, BUCKET // flat.element_size())
            for start in range(0, flat.numel(), step):
                part = flat[start : start + step]
                if self._wire == "bf16":
                    self._rounded_(part)
                else:
                    self.sum_(part)

    def _rounded_(self, flat: torch.Tensor) -> None:
        nodes, each, local = self._place.nodes, self._place.each, self._place.local
        share = math.ceil(flat.numel() / each)
        padded = flat.new_zeros(share * each)
        padded[: flat.numel()] = flat
        own = padded[local * share : (local + 1) * share]
        with self._member.collective("all-reduce in the node"):
            self._node.allreduce([padded], dist.AllreduceOptions()).wait()
        came = torch.empty(share * nodes, dtype=torch.bfloat16, device=flat.device)
        with self._member.collective("all-gather between nodes"):
            self._across._allgather_base(came, own.to(torch.bfloat16)).wait()
        total = came[:share].to(flat.dtype)
        for node in range(1, nodes):
            total += came[node * share : (node + 1) * share].to(flat.dtype)
        with self._member.collective("all-gather in the node"):
            self._node._allgather_base(padded, total).wait()
        flat.copy_(padded[: flat.numel()])

    def own_sum(self, vector: torch.Tensor) -> torch.Tensor:
        """This rank's share of the sum over ranks of a vector whose length the ranks divide."""
        share = vector.numel() // self.ranks
        if self._wire == "bf16":
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
            self._world._allgather_base(out, share.contiguous()).wait()
        return out

    def copy_(self, tensors: Sequence[torch.Tensor], root: int = 0) -> None:
        """Rank `root`'s values, as bytes, so that every dtype goes."""
        for tensor in tensors:
            if not tensor.numel():
                continue
            whole = tensor.contiguous()
            options = dist.BroadcastOptions()
            options.rootRank, options.rootTensor = root % self.ranks, 0
            with self._member.collective("broadcast"):
                self._world.broadcast([whole.view(-1).view(torch.uint8)], options).wait()
            if whole is not tensor:
                tensor.copy_(whole)

    # -- numbers on the host

    def sum_floats(self, values: Sequence[float]) -> list[float]:
        """Sums in float64."""
        tensor = torch.tensor(values, dtype=torch.float64)
        with self._member.collective("all-reduce of numbers"):
            self._control.allreduce([tensor], dist.AllreduceOptions()).wait()
        return [float(value) for value in tensor.tolist()]

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

    def wait_for_all(self) -> None:
        """Returns when every rank called it."""
        self.sum_floats([0.0])
