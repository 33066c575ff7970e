"""Rows as products read them: whole tiles of memory, of which only the rows count."""

from __future__ import annotations

import pytest
import torch

from kernels.products import ROOM, described, empty_rows
from kernels.tiles import WIDE_ROWS, head_tile, wide_tile
from kernels.triton_ops import TritonOps
from tests.kernels.test_triton_ops import DEVICE, noise

BF16 = torch.bfloat16


def with_room(x: torch.Tensor, behind: float) -> torch.Tensor:
    roomy = empty_rows(len(x), x.shape[1], x)
    roomy.as_strided((ROOM, x.shape[1]), (x.shape[1], 1)).fill_(behind)
    return roomy.copy_(x)


@pytest.mark.parametrize("rows", [17, 65, 127])
@pytest.mark.parametrize("behind", [float("nan"), 3.0])
def test_what_stands_behind_the_rows_in_memory_does_not_matter(rows: int, behind: float) -> None:
    ops = TritonOps(DEVICE)
    x, norm, weight = (
        noise(1, rows, 64, dtype=BF16),
        1 + noise(2, 64, dtype=BF16),
        noise(3, 160, 64, dtype=BF16),
    )
    roomy = with_room(x, behind)
    assert torch.equal(ops.linear(roomy, weight), ops.linear(x.clone(), weight))
    packed = ops.pack(weight.clone(), norm)
    assert torch.equal(
        ops.gate_up(roomy, norm, 1e-5, packed, None), ops.gate_up(x.clone(), norm, 1e-5, packed, None)
    )
    assert torch.equal(
        ops.best(roomy, norm, 1e-5, weight, None), ops.best(x.clone(), norm, 1e-5, weight, None)
    )


def test_rows_have_room_for_the_last_tile_of_every_product() -> None:
    for rows in range(WIDE_ROWS + 1, 4097):
        for width in (576, 4096):
            tiles = [
                wide_tile(rows, outputs, width, pair=pair)
                for outputs in (4096, 6144)
                for pair in (False, True)
            ]
            tiles.append(head_tile(rows, width, 2, wide=True))
            assert all(ROOM % tile.BT == 0 for tile in tiles), (rows, width)


def test_a_descriptor_reaches_to_the_end_of_the_last_tile_where_there_is_memory() -> None:
    x, weight = noise(1, 20, 64, dtype=BF16), noise(2, 32, 64, dtype=BF16)
    tile = wide_tile(20, 32, 64, pair=False)
    assert tile.BT == 64
    assert described(with_room(x, 0.0), weight, tile)[0].shape == [64, 64]
    assert described(x, weight, tile)[0].shape == [20, 64]
    assert described(torch.cat([x, x])[:20], weight, tile)[0].shape == [40, 64]
    assert described(torch.cat([x, x])[20:], weight, tile)[0].shape == [20, 64]
