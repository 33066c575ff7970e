"""CUDA graphs by shape, captured when a shape is first met and replayed from then on."""

from __future__ import annotations

from collections.abc import Callable, Hashable

import torch


class Graphs:
    """All graphs of one runner; they run one after the other and share their memory.

    On a CPU, where there is nothing to capture, the functions are simply called.
    """

    def __init__(self, device: torch.device, *, enabled: bool = True) -> None:
        self._enabled = enabled and device.type == "cuda"
        self._device = device
        self._graphs: dict[Hashable, torch.cuda.CUDAGraph] = {}
        self._pool = torch.cuda.graph_pool_handle() if self._enabled else None
        self._stream = torch.cuda.Stream(device) if self._enabled else None

    def __len__(self) -> int:
        return len(self._graphs)

    def run(self, key: Hashable, function: Callable[[], None]) -> None:
        """Runs the function's device work once. It is called when a key is first met, as it is and for the
        capture, and not again.

        It may keep no memory that it allocates, and every address that it uses must stay.
        """
        graph = self._graphs.get(key)
        if graph is not None:
            graph.replay()
            return
        function()
        if self._enabled:
            # Its kernels are compiled and loaded now; capturing runs nothing.
            self._graphs[key] = self._capture(function)

    def _capture(self, function: Callable[[], None]) -> torch.cuda.CUDAGraph:
        """As `torch.cuda.graph`, without waiting for the device: rounds may be in flight."""
        assert self._stream is not None
        graph = torch.cuda.CUDAGraph()
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
            try:
                function()
            finally:
                graph.capture_end()
        torch.cuda.current_stream(self._device).wait_stream(self._stream)
        return graph
