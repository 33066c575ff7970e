"""CUDA graphs by shape, captured when a shape is met for the second time and replayed from then on."""

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
        self._met: set[Hashable] = set()
        self._pool = torch.cuda.graph_pool_handle() if self._enabled else None
        self._stream = torch.cuda.Stream(device) if self._enabled else None

    def __len__(self) -> int:
        return len(self._graphs)

    def run(self, key: Hashable, function: Callable[[], None]) -> None:
        """Runs the function's device work once. It is called when a key is first met, for the capture when it
        is met again, and no more.

        It may keep no memory that it allocates, and every address that it uses must stay.
        """
        graph = self._graphs.get(key)
        if graph is None:
            if not self._enabled or key not in self._met:
                # What comes but once is not worth a capture; and a round that does both keeps others waiting.
                self._met.add(key)
                function()
                return
            graph = self._graphs[key] = self._capture(function)
        graph.replay()

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
