"""One training step on the device: from row numbers and anchors to changed weights, in static shapes.

A step is two pieces, the gradient and its use; between them ranks add up theirs. On a GPU each piece is
compiled where that is wanted, and captured as a CUDA graph once it has run: launching its kernels one by one
takes longer than computing them.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from dflash_engine.model_config import DraftConfig
from dflash_engine.rope import rope_tables
from dflash_engine.training.config import LossConfig, RunConfig
from dflash_engine.training.draft_forward import Blocks, draft_hidden, draft_layer
from dflash_engine.training.draft_weights import Layout, tensor_shapes
from dflash_engine.training.loss import block_losses, chunk_blocks, chunk_losses, weigher
from dflash_engine.training.optimizer import Optimizer
from dflash_engine.training.packing import PackedRows
from dflash_engine.training.plans import StepPlan
from dflash_engine.training.target import Frozen

logger = logging.getLogger(__name__)

WARM_STEPS = 3
"""Steps that run as they are before a graph is captured: they compile and allocate."""


@dataclass(frozen=True, slots=True, eq=False)
class DeviceRows:
    """The arrays of `PackedRows` on the device, int64 [R, S] each."""

    tokens: Tensor
    positions: Tensor
    firsts: Tensor
    labels: Tensor

    @classmethod
    def of(cls, rows: PackedRows, device: torch.device) -> DeviceRows:
        arrays = (rows.tokens, rows.positions, rows.firsts, rows.labels)
        return cls(*(torch.from_numpy(array.astype(np.int64)).to(device) for array in arrays))


@dataclass(frozen=True, slots=True, eq=False)
class BlockLabels:
    """What the blocks [b, A] are to guess."""

    tokens: Tensor
    """int64 [b, A, B - 1]"""
    lefts: Tensor
    """int64 [b, A]: how many of them there are."""


class BlockMaker:
    """From rows and anchors to what a pass of the draft is given."""

    def __init__(self, config: DraftConfig, frozen: Frozen, row_tokens: int, block_size: int) -> None:
        device = frozen.embedding.device
        cos, sin = rope_tables(config.rope, config.head_dim, row_tokens + block_size)
        self._rope = (cos.to(device), sin.to(device))
        self._embedding = frozen.embedding
        self._mask = config.mask_token_id
        self._offsets = torch.arange(block_size, device=device)

    def make(
        self, rows: DeviceRows, numbers: Tensor, anchors: Tensor, features: Tensor
    ) -> tuple[Blocks, BlockLabels]:
        """numbers int64 [b], anchors int64 [b, A], features [b, S, F]."""
        tokens, positions, firsts, labels = (
            array.index_select(0, numbers)
            for array in (rows.tokens, rows.positions, rows.firsts, rows.labels)
        )
        columns = torch.arange(tokens.shape[1], device=tokens.device)
        visible = (columns >= firsts.gather(1, anchors).unsqueeze(-1)) & (columns < anchors.unsqueeze(-1))
        behind = (anchors.unsqueeze(-1) + self._offsets[1:]).clamp_max(tokens.shape[1] - 1)
        wanted = tokens.gather(1, behind.flatten(1)).view(behind.shape)
        anchor_tokens = tokens.gather(1, anchors).unsqueeze(-1)
        block = torch.where(self._offsets == 0, anchor_tokens, self._mask)
        where = positions.gather(1, anchors).unsqueeze(-1) + self._offsets
        cos, sin = self._rope
        return (
            Blocks(
                features=features,
                embedded=self._embedding[block],
                visible=visible,
                context_rope=(cos[positions], sin[positions]),
                block_rope=(cos[where], sin[where]),
            ),
            BlockLabels(wanted, labels.gather(1, anchors)),
        )


class TrainStep:
    """Holds the weights, the optimizer and everything that a step reuses."""

    def __init__(
        self,
        config: DraftConfig,
        frozen: Frozen,
        flat: Tensor,
        optimizer: Optimizer,
        loss: LossConfig,
        run: RunConfig,
        shape: tuple[int, int, int],
    ) -> None:
        """flat float32 [N]; shape is (rows, anchors, row tokens) of this rank's step."""
        rows, anchors, row_tokens = shape
        device, dtype = flat.device, frozen.head.dtype
        self.config, self.frozen, self.flat, self.optimizer = config, frozen, flat, optimizer
        self.layout = Layout(tensor_shapes(config))
        self.maker = BlockMaker(config, frozen, row_tokens, config.block_size)
        self.num_anchors = anchors
        width = len(config.target_layer_ids) * config.hidden_size
        self.features = torch.zeros((rows, row_tokens, width), dtype=dtype, device=device)
        """[b, S, F] of the step to come."""
        self._plan = torch.zeros((rows, 1 + anchors), dtype=torch.int64, device=device)
        self.summed = torch.zeros(flat.numel() + 1, dtype=torch.float32, device=device)
        """Gradient of the weighted sum of losses, and the sum of weights."""
        self.tally = torch.zeros(2 + 2 * (config.block_size - 1), dtype=torch.float64, device=device)
        """Sums since they were last read: loss, its weights, blocks right up to k, blocks that have a k."""
        self.norm = torch.zeros((), dtype=torch.float32, device=device)
        self._weigh = weigher(loss, config.block_size, device)
        vocab = frozen.head.shape[0]
        self._chunk = chunk_blocks(loss, rows * anchors, config.block_size, vocab, dtype.itemsize)
        on_gpu = device.type == "cuda"
        compiled = run.compile and on_gpu
        self._layer = torch.compile(draft_layer, dynamic=False) if compiled else draft_layer
        self._losses = torch.compile(chunk_losses, dynamic=False) if compiled else chunk_losses
        self._capture = run.cuda_graphs and on_gpu
        self._graphs: tuple[torch.cuda.CUDAGraph, torch.cuda.CUDAGraph] | None = None
        self._rows: DeviceRows | None = None
        self._made = 0

    def use(self, rows: DeviceRows) -> None:
        """The rows that plans are of from here on."""
        self._rows, self._graphs, self._made = rows, None, 0

    def run(self, plan: StepPlan, factor: float) -> None:
        """One step; `features` have been filled. `factor` is of the learning rate."""
        numbers = np.concatenate([plan.rows[:, None], plan.anchors], axis=1).astype(np.int64)
        host = torch.from_numpy(numbers)
        self._plan.copy_(host.pin_memory() if self._capture else host, non_blocking=self._capture)
        self.optimizer.factor.fill_(factor)
        if self._capture and self._graphs is None and self._made >= WARM_STEPS:
            self._graphs = (_captured(self._gradient), _captured(self._update))
            logger.info("captured the step as CUDA graphs")
        pieces: tuple[Callable[[], None], Callable[[], None]] = (self._gradient, self._update)
        if self._graphs is not None:
            pieces = (self._graphs[0].replay, self._graphs[1].replay)
        with _beside(self._capture and self._graphs is None):
            pieces[0]()
            if dist.is_initialized():
                dist.all_reduce(self.summed)
            pieces[1]()
        self._made += 1

    def _gradient(self) -> None:
        assert self._rows is not None
        numbers, anchors = self._plan[:, 0], self._plan[:, 1:]
        with torch.no_grad():
            blocks, labels = self.maker.make(self._rows, numbers, anchors, self.features)
        with torch.enable_grad():
            leaf = self.flat.detach().requires_grad_()
            weights = self.layout.views(leaf.to(self.features.dtype))
            hidden = draft_hidden(weights, self.config, blocks, self._layer)
        with torch.no_grad():
            losses = block_losses(
                hidden.detach().flatten(0, 1),
                self.frozen.head,
                labels.tokens.flatten(0, 1),
                labels.lefts.flatten(),
                self._weigh,
                self._chunk,
                self._losses,
            )
        [gradient] = torch.autograd.grad(hidden, leaf, losses.gradient.view_as(hidden))
        with torch.no_grad():
            self.summed[:-1].copy_(gradient)
            self.summed[-1:].copy_(losses.weight)
            told = (losses.total.view(1), losses.weight.view(1), losses.reached, losses.offered)
            self.tally.add_(torch.cat(told))

    def _update(self) -> None:
        self.norm.copy_(self.optimizer.step(self.summed[:-1], self.summed[-1]))

    def weights(self) -> dict[str, Tensor]:
        """In the dtype that computes, under the published names."""
        return self.layout.views(self.flat.to(self.features.dtype))


@contextmanager
def _beside(wanted: bool) -> Iterator[None]:
    """Runs on a stream of its own where the same work will be captured later, as CUDA graphs ask for."""
    if not wanted:
        yield
        return
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        yield
    torch.cuda.current_stream().wait_stream(stream)


def _captured(piece: Callable[[], None]) -> torch.cuda.CUDAGraph:
    """The piece as a graph; it does not run meanwhile. What it allocates stays its own."""
    torch.cuda.synchronize()
    # What warm-up steps left in the allocator would else be held beside the graph's own pool.
    torch.cuda.empty_cache()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        piece()
    return graph
