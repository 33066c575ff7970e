"""The kernels' choice against the engine's own on the host, row by row."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor

from dflash_engine.choose import MIN_TEMPERATURE, PROBABILITY_UNIT, History, gumbel_noise
from dflash_engine.choose import choose as choose_on_host
from dflash_engine.request import SamplingParams
from kernels.noise import gumbel, gumbel_ceiling, gumbel_reference, position_key, request_key
from kernels.sampling import SamplingTable, choose, reset_history
from kernels.sampling_reference import choose_reference, reset_history_reference

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
CPU = torch.device("cpu")
SEED = 2**62 + 12345
NUDGE = 1e-5
"""float32 exponentials of other libraries differ by some 1e-7 each, sums of thousands of them by less than
this; so a token whose place in the cut hangs on less is not asked about."""


def ints(*values: int, dtype: torch.dtype = torch.int32) -> Tensor:
    return torch.tensor(values, dtype=dtype, device=DEVICE)


def table_of(settings: list[SamplingParams], vocab_size: int, seed: int = SEED) -> SamplingTable:
    table = SamplingTable.empty(len(settings), vocab_size, DEVICE)
    for slot, sampling in enumerate(settings):
        if not sampling.greedy:
            table.temperature[slot] = max(sampling.temperature, MIN_TEMPERATURE)
        table.top_k[slot] = sampling.top_k
        table.top_p[slot] = max(int(sampling.top_p * PROBABILITY_UNIT), 1)
        table.min_p[slot] = sampling.min_p
        table.repetition[slot] = sampling.repetition_penalty
        table.presence[slot] = sampling.presence_penalty
        table.frequency[slot] = sampling.frequency_penalty
        table.key[slot] = request_key(seed + slot)
        table.num_bias[slot] = len(sampling.logit_bias)
        for index, (token, bias) in enumerate(sampling.logit_bias.items()):
            table.bias_tokens[slot, index] = token
            table.bias_values[slot, index] = bias
    return table


def choices(
    logits: Tensor, settings: list[SamplingParams], positions: list[int], implementation: Any = choose
) -> list[int]:
    """For each row of logits and settings, without a history."""
    rows = len(settings)
    chosen = implementation(
        logits.to(DEVICE, copy=True),
        ints(*range(rows)),
        ints(*positions),
        ints(0, dtype=torch.int64),
        ints(*[0] * rows),
        ints(*[0] * rows),
        table_of(settings, logits.shape[1]),
    )
    return chosen.tolist()


def on_host(logits: Tensor, settings: list[SamplingParams], positions: list[int]) -> list[int]:
    rows = zip(logits, settings, positions, strict=True)
    return [
        choose_on_host(row, sampling, SEED + slot, position, None)
        for slot, (row, sampling, position) in enumerate(rows)
    ]


def settled(logits: Tensor, settings: list[SamplingParams], positions: list[int]) -> list[bool]:
    """Whether a row's choice stays when the cuts are moved a little to either side."""
    moved = []
    for nudge in (-NUDGE, NUDGE):
        nudged = [
            sampling.model_copy(
                update={
                    "top_p": sampling.top_p + nudge * (sampling.top_p < 1),
                    "min_p": sampling.min_p * (1 + nudge),
                }
            )
            for sampling in settings
        ]
        moved.append(on_host(logits, nudged, positions))
    return [low == high for low, high in zip(*moved, strict=True)]


def some_logits(rows: int, size: int, scale: float = 3.0, seed: int = 0) -> Tensor:
    return scale * torch.randn(rows, size, generator=torch.Generator().manual_seed(seed))


SETTINGS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "temperature": {"temperature": 0.8},
    "hot": {"temperature": 4.0},
    "top_k": {"temperature": 3.0, "top_k": 5},
    "top_k of one": {"temperature": 3.0, "top_k": 1},
    "top_k of all": {"temperature": 3.0, "top_k": 10**6},
    "top_p": {"temperature": 1.5, "top_p": 0.8},
    "top_p of nearly all": {"temperature": 3.0, "top_p": 0.999},
    "top_p of little": {"temperature": 1.0, "top_p": 1e-11},
    "min_p": {"temperature": 2.0, "min_p": 0.05},
    "all": {"temperature": 2.5, "top_k": 20, "top_p": 0.7, "min_p": 0.01},
    "greedy and all": {"top_k": 3, "top_p": 0.5, "min_p": 0.1},
}


@triton.jit  # type: ignore[untyped-decorator]
def _noise_kernel(key, position, noise, ceiling, BLOCK: tl.constexpr):
    tokens = tl.arange(0, BLOCK)
    place = position_key(tl.load(key), tl.load(position))
    tl.store(noise + tokens, gumbel(place, tokens))
    tl.store(ceiling + tokens, gumbel_ceiling(place, tokens))


@pytest.mark.parametrize(("seed", "position"), [(0, 0), (7, 131_071), (SEED, 1), (2**63 - 1, 4000)])
def test_noise_is_the_hosts_and_lies_below_its_ceiling(seed: int, position: int):
    size = 1 << 16
    noise, ceiling = torch.empty(2, size, device=DEVICE)
    key = ints(request_key(seed), dtype=torch.int64)
    _noise_kernel[(1,)](key, ints(position), noise, ceiling, BLOCK=size)
    expected = gumbel_noise(seed, position, size, CPU)
    torch.testing.assert_close(noise.cpu(), expected, rtol=3e-7, atol=1e-6)
    assert torch.equal(gumbel_reference(request_key(seed), position, size, CPU), expected)
    assert bool((ceiling > noise).all()) and float((ceiling - noise).max()) < 0.002


@pytest.mark.parametrize("setting", SETTINGS.values(), ids=SETTINGS)
@pytest.mark.parametrize("size", [2, 97])
def test_choices_are_the_hosts(setting: dict[str, Any], size: int):
    rows = 5
    logits, settings = some_logits(rows, size), [SamplingParams(**setting)] * rows
    positions = list(range(100, 100 + rows))
    sure = settled(logits, settings, positions)
    assert sum(sure) >= rows - 1
    expected = on_host(logits, settings, positions)
    for implementation in (choose, choose_reference):
        found = choices(logits, settings, positions, implementation)
        assert [a for a, s in zip(found, sure, strict=True) if s] == [
            a for a, s in zip(expected, sure, strict=True) if s
        ]


@pytest.mark.parametrize("size", [4096, 4097, 9001])
def test_choices_are_the_hosts_over_several_blocks(size: int):
    settings = [SamplingParams(**setting) for setting in SETTINGS.values()]
    settings += [SamplingParams(temperature=9.0, top_k=k) for k in (50, 4095, 4096, size - 1)]
    settings += [SamplingParams(temperature=3.0, top_p=p) for p in (0.3, 0.95)]
    positions = list(range(len(settings)))
    logits = some_logits(len(settings), size, seed=size)
    sure = settled(logits, settings, positions)
    assert all(sure)
    assert choices(logits, settings, positions) == on_host(logits, settings, positions)


@pytest.mark.parametrize(
    "setting",
    [{"top_k": 4}, {"top_k": 13}, {"top_k": 40}, {"top_p": 0.5}, {"top_p": 0.9}, {"top_k": 30, "top_p": 0.8}],
    ids=str,
)
def test_of_equal_scores_at_the_cut_the_lower_ids_stay(setting: dict[str, Any]):
    # Four different scores, so hot that each token that stays comes up now and then.
    logits = some_logits(1, 50).sign() + 0.5 * some_logits(1, 50, seed=1).sign()
    rows = 8
    settings, positions = [SamplingParams(temperature=20.0, **setting)] * rows, list(range(rows))
    logits = logits.expand(rows, -1).contiguous()
    assert all(settled(logits, settings, positions))
    found = choices(logits, settings, positions)
    assert found == on_host(logits, settings, positions)
    assert len(set(found)) >= 2


def test_equal_scores_across_blocks_are_cut_by_token_id():
    logits, rows = torch.zeros(8, 9000), 8
    settings = [SamplingParams(temperature=1.0, top_k=k) for k in (1, 4096, 4097, 8192, 8999)]
    # A share is exactly 2^-40 * int(2^40 / 9000) here.
    settings += [SamplingParams(temperature=1.0, top_p=p) for p in (0.1, 0.5, 0.9)]
    positions = list(range(rows))
    assert choices(logits, settings, positions) == on_host(logits, settings, positions)


def test_half_of_four_equal_tokens_are_two():
    rows = 6
    settings, positions = [SamplingParams(temperature=1.0, top_p=0.5)] * rows, list(range(rows))
    found = choices(torch.zeros(rows, 4), settings, positions)
    assert found == on_host(torch.zeros(rows, 4), settings, positions) and set(found) == {0, 1}


def test_tokens_equal_to_the_best_pass_any_min_p():
    rows = 12
    settings, positions = [SamplingParams(temperature=1.0, min_p=1.0)] * rows, list(range(rows))
    logits = torch.tensor([1.0, 0.9999, 1.0, 1.0]).expand(rows, -1).contiguous()
    found = choices(logits, settings, positions)
    assert found == on_host(logits, settings, positions) and set(found) == {0, 2, 3}


@pytest.mark.parametrize("temperature", [1e-3, 1e-30, 5e-324, 100.0])
def test_extreme_temperatures_and_wide_logits_are_the_hosts(temperature: float):
    logits = torch.cat([some_logits(6, 64, 1e-6), some_logits(6, 64, 1e4), some_logits(6, 64, 30.0)])
    logits[:, 7] = -torch.inf
    cuts: list[dict[str, Any]] = [
        {},
        {"top_k": 9},
        {"top_p": 0.9},
        {"min_p": 0.2},
        {"top_k": 50, "top_p": 0.3},
    ]
    settings = [SamplingParams(temperature=temperature, **cuts[row % 5]) for row in range(18)]
    positions = list(range(18))
    assert all(settled(logits, settings, positions))
    assert choices(logits, settings, positions) == on_host(logits, settings, positions)


def test_without_temperature_the_first_of_the_best_is_taken():
    logits = some_logits(3, 9000).clamp(max=2.0)
    logits[1] = -torch.inf
    logits[2] = torch.arange(9000).float()
    assert choices(logits, [SamplingParams()] * 3, [0, 0, 0]) == [
        int((logits[0] == 2.0).nonzero()[0]),
        0,
        8999,
    ]


PENALTIES: list[dict[str, Any]] = [
    {"repetition_penalty": 1.7},
    {"repetition_penalty": 0.6, "temperature": 1.0},
    {"presence_penalty": 1.5, "temperature": 0.7, "top_k": 8},
    {"frequency_penalty": 0.9, "logit_bias": {3: 4.0, 40: -9.0, 0: 1.0}},
    {"frequency_penalty": -0.8, "presence_penalty": -0.3, "repetition_penalty": 1.2, "temperature": 1.3},
    {"logit_bias": {5: 6.0}, "temperature": 1.0, "top_p": 0.9},
    {"logit_bias": {token: float(token % 7) for token in range(50)}},
]


@pytest.mark.parametrize("setting", PENALTIES, ids=str)
def test_penalties_count_prompt_answer_and_the_draft_before_a_choice(setting: dict[str, Any]):
    size, draft = 50, [3, 8, 3, 3, 20, 41, 3]
    prompt, output = [1, 2, 2, 8, 49], [2, 3, 3, 17]
    sampling = SamplingParams(**setting)
    table = table_of([sampling] * 2, size)
    marks = [(token, True) for token in prompt] + [(token, False) for token in output]
    tokens = ints(*(token for token, _ in marks))
    asked = torch.tensor([asked for _, asked in marks], device=DEVICE)
    reset_history(table, ints(1), tokens, ints(*[0] * len(marks)), asked)
    logits = some_logits(len(draft) + 1, size, scale=1.5, seed=2)
    # The best tokens are those whose counts differ from row to row.
    logits[:, [2, 3, 8, 17, 20, 41, 49]] += 4.0
    fed = ints(49, 17, *draft, dtype=torch.int64)
    rows = len(logits)
    expected = []
    for before in range(rows):
        history = History(prompt, [*output, *draft[:before]], size, CPU) if sampling.penalised else None
        expected.append(choose_on_host(logits[before], sampling, SEED + 1, 60 + before, history))
    for implementation in (choose, choose_reference):
        found = implementation(
            logits.to(DEVICE, copy=True),
            ints(*[1] * rows),
            ints(*range(60, 60 + rows)),
            fed,
            ints(*range(1, 1 + rows)),
            ints(*range(rows)),
            table,
        )
        assert found.tolist() == expected


def test_a_row_is_the_same_alone_and_among_others_and_padding_is_left_alone():
    settings = [SamplingParams(**{**SETTINGS["all"], **penalty}) for penalty in PENALTIES]
    table = table_of(settings, 50)
    table.counts.random_(0, 3)
    before = [getattr(table, field.name).clone() for field in fields(SamplingTable)]
    wide = torch.full((9, 64), torch.nan, device=DEVICE)
    logits = wide[:, :50]
    slots = [-1, 3, 0, 2, -1, 6, 5, 4, 1]
    for row, slot in enumerate(slots):
        if slot >= 0:
            logits[row] = some_logits(1, 50, seed=row).to(DEVICE)
    start = wide.clone()
    fed = ints(*range(20, 40), dtype=torch.int64)
    columns = (ints(*slots), ints(*range(9)), ints(*range(7, 16)), ints(*[0, 7, 1, 0, 3, 2, 4, 5, 6]))
    found = choose(logits, columns[0], columns[1], fed, columns[2], columns[3], table)
    assert found.dtype == torch.int32 and found[0] == found[4] == 0
    assert bool(wide[:, 50:].isnan().all()) and bool(wide[[0, 4]].isnan().all())
    for row in range(9):
        one, position, index, num = (column[row : row + 1] for column in columns)
        alone = choose(start[row : row + 1, :50].clone(), one, position, fed, index, num, table)
        assert alone.tolist() == found[row : row + 1].tolist()
    assert all(
        torch.equal(getattr(table, f.name), old) for f, old in zip(fields(SamplingTable), before, strict=True)
    )


@pytest.mark.parametrize("size", [1, 7, 4097])
def test_a_history_is_reset_for_its_slots_only(size: int):
    table = SamplingTable.empty(3, size, DEVICE)
    table.counts.fill_(5)
    table.seen.fill_(1)
    generator = torch.Generator().manual_seed(size)
    tokens = torch.randint(size, (700,), generator=generator, dtype=torch.int32)
    tokens[::3] = size - 1
    row = torch.randint(-1, 3, (700,), generator=generator, dtype=torch.int32)
    asked = torch.rand(700, generator=generator) < 0.3
    arguments = [tokens.to(DEVICE), row.to(DEVICE), asked.to(DEVICE)]
    slots = ints(2, -1, 0)
    arguments[1][arguments[1] == 1] = 0
    plain = replace(table, counts=table.counts.clone(), seen=table.seen.clone())
    reset_history_reference(plain, slots, *arguments)
    reset_history(table, slots, *arguments)
    assert torch.equal(table.counts, plain.counts) and torch.equal(table.seen, plain.seen)
    assert bool((table.counts[1] == 5).all()) and bool((table.seen[1] == 1).all())
    assert int(table.counts[[0, 2]].sum()) == int(((row >= 0) & ~asked).sum())
    reset_history(table, slots, *(argument[:0] for argument in arguments))
    assert not table.counts[[0, 2]].any() and not table.seen[[0, 2]].any()


@pytest.mark.parametrize(
    ("name", "wrong"),
    [
        ("logits", torch.zeros(2, 8, dtype=torch.bfloat16)),
        ("logits", torch.zeros(8, 2).T),
        ("slots", torch.zeros(2, dtype=torch.int64)),
        ("positions", torch.zeros(3, dtype=torch.int32)),
        ("fed_index", torch.zeros(4, dtype=torch.int32)[::2]),
        ("num_before", torch.zeros(2)),
        ("fed", torch.zeros(4, dtype=torch.int32)),
        ("table.counts", SamplingTable.empty(2, 9, CPU)),
    ],
)
def test_what_the_kernel_would_misread_is_refused_by_name(name: str, wrong: Any):
    row = torch.zeros(2, dtype=torch.int32)
    arguments: dict[str, Any] = {
        "logits": torch.zeros(2, 8),
        "slots": row,
        "positions": row,
        "fed": torch.zeros(4, dtype=torch.int64),
        "fed_index": row,
        "num_before": row,
        "table": SamplingTable.empty(2, 8, CPU),
    }
    arguments[name.split(".")[0]] = wrong
    with pytest.raises(ValueError, match=name):
        choose(**arguments)


def test_no_rows_are_no_choices_and_the_table_says_its_size():
    table = SamplingTable.empty(4, 100, DEVICE)
    nothing = ints()
    assert choose(
        torch.zeros(0, 100, device=DEVICE), nothing, nothing, nothing.long(), nothing, nothing, table
    ).shape == (0,)
    assert table.bytes == 4 * (3 * 100 + 8 * 1024 + 2 * 8 + 7 * 4)
