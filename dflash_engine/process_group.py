"""The ranks of one host as a group of processes of their own, apart from any group that others have made."""

from __future__ import annotations

import socket
from datetime import timedelta
from typing import Any

import torch
import torch.distributed
from torch import Tensor

HOST = "127.0.0.1"
_distributed: Any = torch.distributed
"""Has the classes that `init_process_group` makes its groups of, but no types for them."""
TIMEOUT = timedelta(minutes=30)
"""How long a rank waits for another one's part; the first round compiles kernels on each of them. A rank that
ends is noticed at once, by its pipe."""


def open_store() -> Any:
    """Where the ranks of a new group find each other, at its `port`; only this host can reach it."""
    with socket.socket() as listener:
        listener.bind((HOST, 0))
        listener.listen()
        port = listener.getsockname()[1]
        return _store(port, listener.detach())


def join_store(port: int) -> Any:
    """The store that another rank has opened."""
    return _store(port, None)


def _store(port: int, listener: int | None) -> Any:
    return _distributed.TCPStore(
        HOST,
        port,
        is_master=listener is not None,
        timeout=TIMEOUT,
        wait_for_workers=False,
        master_listen_fd=listener,
    )


class ProcessGroup:
    """Gathers over NCCL on GPUs and over gloo on CPUs; see `kernels.parallel_ops.Group`.

    What is gathered on a GPU is queued on the current stream and can be captured in a graph. All ranks make
    their group at about the same time, with the same store and on GPUs of their own.
    """

    def __init__(self, store: Any, rank: int, size: int, device: torch.device) -> None:
        self.rank = rank
        self.size = size
        self._backend = _backend(store, rank, size, device)
        self._options = _distributed.distributed_c10d.AllgatherOptions()
        # Queued among the kernels, not on a stream of NCCL's own that they would have to be joined with.
        self._options.asyncOp = False

    def all_gather(self, part: Tensor) -> Tensor:
        out = torch.empty((self.size, *part.shape), dtype=part.dtype, device=part.device)
        work = self._backend._allgather_base(out.view(-1), part.view(-1), self._options)
        if work is not None:
            work.wait()
        return out

    def abort(self) -> None:
        """Ends what is being gathered, with whatever result, so that nobody waits for a rank that is gone."""
        self._backend.abort()


def _backend(store: Any, rank: int, size: int, device: torch.device) -> Any:
    """Made without `init_process_group`: a default group belongs to the program around the engine."""
    if device.type == "cuda":
        options = _distributed.ProcessGroupNCCL.Options()
        options._timeout = TIMEOUT
        return _distributed.ProcessGroupNCCL(store, rank, size, options)
    options = _distributed.ProcessGroupGloo._Options()
    options._timeout = TIMEOUT
    options._devices = [_distributed.ProcessGroupGloo.create_device(hostname=HOST)]
    return _distributed.ProcessGroupGloo(store, rank, size, options)
