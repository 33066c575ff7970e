"""What the device knows of each slot is what its present owner needs, whoever held the slot before."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch

from dflash_engine.ops import MAX_BIAS, WHOLE, request_key
from dflash_engine.plan import RowPlan
from dflash_engine.request import SamplingParams
from dflash_engine.round_layout import FULL, PLAIN, WARM
from dflash_engine.slots import SlotTable, kind_of

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
SLOTS, BLOCKS, VOCAB = 5, 12, 50
KINDS: dict[int, list[dict[str, Any]]] = {
    PLAIN: [{}, {"top_k": 3}, {"top_p": 0.5}, {"min_p": 0.5}, {"logprobs": 1}],
    WARM: [{"temperature": 0.7}, {"temperature": 100.0}, {"temperature": 1e-3}],
    FULL: [
        {"temperature": 1.0, "top_k": 7},
        {"temperature": 0.9, "top_p": 0.25},
        {"temperature": 1.5, "min_p": 0.125},
        {"temperature": 1e-4},
        {"logit_bias": {3: 2.5, 49: -100.0}},
        {"logit_bias": {9: 1.0}, "temperature": 0.5},
        {"repetition_penalty": 1.5},
        {"presence_penalty": -0.5},
        {"frequency_penalty": 0.25, "temperature": 0.8, "top_k": 2**40},
    ],
}


def row_plan(
    slot: int, table: list[int], sampling: SamplingParams | None = None, seed: int = 0,
    prompt: Sequence[int] = (1,), output: Sequence[int] = (),
) -> RowPlan:  # fmt: skip
    params = sampling or SamplingParams()
    return RowPlan(7, 0, (1,), 0, True, table, params, seed, prompt, output, slot)


def assert_chooses_as(table: SlotTable, row: RowPlan) -> None:
    """All that the choice of a token depends on is the row's own."""
    sampling, slot, params = table.sampling, row.slot, row.sampling
    kind = kind_of(params)
    assert table.kinds[slot] == kind
    assert float(sampling.temperature[slot]) == float(np.float32(params.temperature))
    if not params.greedy:
        assert int(sampling.key[slot]) == request_key(row.seed)
        assert int(sampling.top_k[slot]) == min(params.top_k, 2**31 - 1)
        assert int(sampling.top_p[slot]) == int(params.top_p * WHOLE)
        assert float(sampling.min_p[slot]) == params.min_p
    penalties = [sampling.repetition, sampling.presence, sampling.frequency]
    wanted = [params.repetition_penalty, params.presence_penalty, params.frequency_penalty]
    assert [float(values[slot]) for values in penalties] == wanted
    num = int(sampling.num_bias[slot])
    biased = dict(
        zip(sampling.bias_tokens[slot, :num].tolist(), sampling.bias_values[slot, :num].tolist(), strict=True)
    )
    assert num == len(biased) and biased == dict(params.logit_bias)
    if params.penalised:
        answered = Counter(row.output)
        assert sampling.counts[slot].tolist() == [answered[token] for token in range(VOCAB)]
        assert set(sampling.seen[slot].nonzero().flatten().tolist()) == set(row.prompt)


def tables_of(table: SlotTable, row: RowPlan) -> list[int]:
    return table.state.tables[row.slot, : len(row.block_table)].tolist()


def test_each_way_to_choose_has_the_kind_that_can_do_it():
    for kind, cases in KINDS.items():
        assert {kind_of(SamplingParams(**case)) for case in cases} == {kind}


@pytest.mark.parametrize("seed", range(8))
def test_slots_that_change_owners_keep_nothing_of_the_one_before(seed: int):
    chance = random.Random(seed)
    table = SlotTable(SLOTS, BLOCKS, VOCAB, DEVICE)
    held: dict[int, RowPlan] = {}
    blocks: dict[int, list[int]] = {}
    for _ in range(25):
        for slot in chance.sample(range(SLOTS), chance.randint(1, 3)):
            known = held.get(slot)
            if known is not None and chance.random() < 0.5:  # it grows
                room = BLOCKS - len(blocks[slot])
                blocks[slot] += [chance.randrange(900) for _ in range(chance.randint(0, room))]
                continue
            kind = chance.choice([PLAIN, WARM, FULL])
            params = SamplingParams(**chance.choice(KINDS[kind]))
            blocks[slot] = [chance.randrange(900) for _ in range(chance.randint(1, 4))]
            prompt, output = (
                tuple(chance.randrange(VOCAB) for _ in range(chance.randint(1, 6))) for _ in range(2)
            )
            held[slot] = row_plan(slot, blocks[slot], params, chance.randrange(2**63), prompt, output)
        rows = chance.sample(sorted(held.values()), len(held))
        table.follow(rows)
        for row in rows:
            assert_chooses_as(table, row)
            assert tables_of(table, row) == row.block_table
        placed = table.num_placed
        table.follow(rows)
        assert table.num_placed == placed
        # What rounds do to a slot: it belongs to the next owner no more than the rest.
        table.sampling.counts[chance.randrange(SLOTS)] += 1
        held = {slot: row for slot, row in held.items() if not row.sampling.penalised}


def test_a_slot_is_taken_when_a_sequence_comes_and_not_when_it_grows():
    table, blocks = SlotTable(SLOTS, BLOCKS, VOCAB, DEVICE), [4, 5]
    for placed in (1, 1, 1):
        table.follow([row_plan(2, blocks)])
        blocks.append(6 + len(blocks))
        assert table.num_placed == placed
    table.follow([row_plan(2, blocks), row_plan(0, [1])])
    assert table.num_placed == 2
    # An equal table, but another list: the sequence was preempted, or it is another one.
    table.follow([row_plan(2, list(blocks))])
    assert table.num_placed == 3


def test_a_sequence_that_comes_back_to_its_slot_gets_its_new_blocks():
    table = SlotTable(SLOTS, BLOCKS, VOCAB, DEVICE)
    table.follow([row_plan(1, [10, 11, 12, 13]), row_plan(3, [20])])
    table.follow([row_plan(1, [30, 31])])
    table.follow([row_plan(1, [40])])
    assert table.state.tables[1, :1].tolist() == [40]
    back = [50, 51]
    table.follow([row_plan(1, back)])
    back += [52, 53, 54]
    table.follow([row_plan(1, back)])
    assert table.state.tables[1, :5].tolist() == back
    assert table.state.tables[3, :1].tolist() == [20]


def test_history_is_set_when_a_slot_is_taken_and_counts_go_on_from_there():
    """The device counts the tokens that it gives out itself; setting it again would count them twice."""
    table, blocks, output = SlotTable(SLOTS, BLOCKS, VOCAB, DEVICE), [4], [8, 9, 8]
    row = row_plan(1, blocks, SamplingParams(frequency_penalty=1.0), prompt=(3, 5, 3), output=output)
    table.follow([row])
    table.sampling.counts[1, 30] += 1
    output.append(30)
    table.follow([row])
    assert_chooses_as(table, row)
    table.follow([row._replace(block_table=[6])])  # preempted, and resumed behind its output
    assert_chooses_as(table, row)


def test_the_most_biases_fit_and_end_at_their_slot():
    vocab = MAX_BIAS + 10
    table = SlotTable(SLOTS, BLOCKS, vocab, DEVICE)
    bias = {token: token / 100 - 5 for token in range(MAX_BIAS)}
    table.follow([row_plan(2, [1], SamplingParams(logit_bias=bias))])
    assert table.sampling.num_bias.tolist() == [0, 0, MAX_BIAS, 0, 0]
    assert table.sampling.bias_tokens[2].tolist() == list(range(MAX_BIAS))
    assert not table.sampling.bias_tokens[[0, 1, 3, 4]].any()
