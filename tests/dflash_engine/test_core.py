"""The engine with a runner whose results come one round late."""

from __future__ import annotations

import itertools
import random
import time
from dataclasses import replace
from typing import Any

import pytest

from dflash_engine import DFlashEngine, Request, SamplingParams, loading
from dflash_engine.blocks import BlockAllocator, IntegrityError
from dflash_engine.config import EngineConfig
from dflash_engine.core import EngineCore
from dflash_engine.plan import StepOutput, StepPlan
from dflash_engine.request import Priority, Result
from dflash_engine.runner import Runner
from dflash_engine.scheduler import Scheduler
from tests.dflash_engine.exactness import answer, together, with_sampling
from tests.dflash_engine.fake_texts import MoodyPolicy
from tests.dflash_engine.late_runner import LateRunner
from tests.helpers import tiny_draft_folder, tiny_model_folder

SETTINGS: dict[str, Any] = {
    "max_model_len": 128,
    "kv_cache_tokens": 1024,
    "kv_block_size": 4,
    "threads": 1,
    "device": "cpu",
}
FAVOURITES = {20: 100.0, 21: 100.0, 22: 100.0}
"""A bias that lets target and draft agree often, so that several drafted tokens are accepted."""


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    root = tmp_path_factory.mktemp("core")
    target = tiny_model_folder(root, "llama")
    return {"model": str(target), "draft": str(tiny_draft_folder(root, target))}


@pytest.fixture
def late(monkeypatch: pytest.MonkeyPatch) -> list[LateRunner]:
    """From here on engines get such a runner, which is put into this list."""
    made: list[LateRunner] = []

    def build(*arguments: Any) -> LateRunner:
        made.append(LateRunner(Runner(*arguments), busy_ns=1000))
        return made[-1]

    monkeypatch.setattr(loading, "Runner", build)
    monkeypatch.setattr(loading, "Scheduler", lambda **given: Scheduler(**{**given, "rounds_ahead": 1}))
    return made


def test_an_engine_that_goes_idle_counts_its_blocks_and_does_not_walk_through_them(
    folders: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With millions of tokens of KV the walk takes as long as a hundred rounds, after each lone request."""
    core = EngineCore(EngineConfig(model=folders["model"], draft=None, **SETTINGS))

    def walked(*_: object) -> None:
        raise AssertionError("the whole pool was walked through")

    monkeypatch.setattr(BlockAllocator, "check_integrity", walked)
    for lost in (False, True):
        core.add(core.prepare(Request(text="a", sampling=SamplingParams(max_tokens=3, ignore_eos=True))))
        if lost:
            core._scheduler._residency._blocks.allocate(1)
            with pytest.raises(IntegrityError, match="1 of 256 blocks are held"):
                _finish(core)
        else:
            _finish(core)


def _finish(core: EngineCore) -> None:
    while core.has_work:
        core.step()


def request(index: int, max_tokens: int = 20, **fields: Any) -> Request:
    sampling = SamplingParams(
        max_tokens=max_tokens, temperature=0.8, seed=index, ignore_eos=True, logit_bias=FAVOURITES, **fields
    )
    return Request(token_ids=(5, 6, 7 + index, 8) * 3, sampling=sampling)


def core_with(folders: dict[str, str], *requests: Request, **changes: Any) -> EngineCore:
    core = EngineCore(EngineConfig(**(folders | SETTINGS | changes)))
    for each in requests:
        core.add(core.prepare(each))
    return core


def finish(core: EngineCore) -> dict[int, Result]:
    results = {}
    while core.has_work:
        for seq_id, chunk in core.step():
            if chunk.result is not None:
                results[seq_id] = chunk.result
    return results


NAMES = ["greedy", "temperature", "repetition", "stop_tokens", "everything", "frequency", "stop_strings"]


@pytest.mark.parametrize(
    "changes",
    [{}, {"kv_cache_tokens": 144}, {"max_step_tokens": 20, "max_num_seqs": 3}, {"draft": None}],
    ids=["roomy", "preempting", "small steps", "plain"],
)
def test_answers_are_those_of_an_engine_that_waits_for_each_round(
    changes: dict[str, Any], folders: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts = [(5, 6, 7 + index, 8) * (1 + index % 5) for index in range(7)]
    requests = with_sampling(prompts, NAMES, max_tokens=20)
    requests += [request(index, 30) for index in range(3)]
    settings = folders | SETTINGS | changes
    expected = together(DFlashEngine(**settings), requests)
    monkeypatch.setattr(loading, "Runner", lambda *arguments: LateRunner(Runner(*arguments)))
    monkeypatch.setattr(loading, "Scheduler", lambda **given: Scheduler(**{**given, "rounds_ahead": 1}))
    engine = DFlashEngine(**settings)
    results = engine.generate(requests)
    assert [answer(result) for result in results] == expected
    stats = engine.stats()
    assert (stats.preemptions > 0) == ("kv_cache_tokens" in changes)
    assert stats.accepted_tokens > 0 or "draft" in changes
    paid = sum(result.usage.busy_ns for result in results)
    assert paid + stats.discarded_ns == stats.busy_ns


@pytest.mark.parametrize("rounds_ahead", [0, 1])
def test_answers_do_not_depend_on_what_is_drafted_and_whether_its_context_was_rebuilt(
    rounds_ahead: int, folders: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    requests = [request(index, 40) for index in range(6)]
    expected = together(DFlashEngine(**folders, **SETTINGS), requests)
    rebuilt: list[int] = []
    execute = Runner.execute

    def spy(runner: Runner, plan: StepPlan) -> StepOutput:
        rebuilt.extend(row.num_tokens for row in plan.rows if row.rebuild)
        return execute(runner, plan)

    monkeypatch.setattr(Runner, "execute", spy)
    if rounds_ahead:
        monkeypatch.setattr(loading, "Runner", lambda *arguments: LateRunner(Runner(*arguments)))
    policy = MoodyPolicy(random.Random(3))
    late_settings = {"rounds_ahead": rounds_ahead, "draft_policy": policy}
    build = lambda **given: Scheduler(**{**given, **late_settings})  # noqa: E731
    monkeypatch.setattr(loading, "Scheduler", build)
    engine = DFlashEngine(**folders, **SETTINGS)
    assert together(engine, requests) == expected
    assert len(rebuilt) > 3 and engine.stats().accepted_tokens > 0


def test_each_round_is_launched_before_the_one_before_it_is_collected(
    folders: dict[str, str], late: list[LateRunner]
) -> None:
    core = core_with(folders, request(1))
    assert core.step() == [] and core.has_work
    for _ in range(3):
        assert core.step()
    assert late[0].log == [
        "launch 1", "launch 2", "collect 1", "launch 3", "collect 2", "launch 4", "collect 3",
    ]  # fmt: skip


def test_nothing_is_in_flight_when_the_last_answer_is_given(
    folders: dict[str, str], late: list[LateRunner]
) -> None:
    core = core_with(folders, request(1), request(2, max_tokens=5))
    assert len(finish(core)) == 2
    launched = [entry for entry in late[0].log if entry.startswith("launch")]
    assert len(launched) == len(late[0].log) / 2
    stats = core.stats()
    assert stats.steps == len(launched) and stats.running == 0


def test_stats_say_what_is_there_now_and_what_a_pass_with_a_draft_gave(folders: dict[str, str]) -> None:
    core = core_with(folders, request(1), request(2), request(3))
    core.step()
    begun = core.stats()
    assert begun.running == 3 and 0 < begun.kv_usage < 1
    for seq_id in (1, 2):
        core.abort(seq_id)
    assert core.stats().running == 1
    used = finish(core)[3].usage
    ended = core.stats()
    assert (ended.running, ended.waiting, ended.kv_usage) == (0, 0, 0)
    assert 0 < used.drafted_tokens <= ended.drafted_tokens
    assert ended.drafts <= ended.drafted_tokens <= 7 * ended.drafts
    assert 1 <= ended.acceptance_length <= 1 + ended.drafted_tokens / ended.drafts


def test_an_answer_whose_end_the_host_can_foresee_wastes_no_round(
    folders: dict[str, str], late: list[LateRunner]
) -> None:
    core = core_with(folders, request(1, max_tokens=6), draft=None)
    finish(core)
    assert core.stats().discarded_tokens == 0 and core.stats().steps == 6


def test_a_row_behind_a_stop_is_thrown_away_and_its_time_is_nobodys(
    folders: dict[str, str], late: list[LateRunner]
) -> None:
    whole = finish(core_with(folders, request(1), draft=None))[1].tokens
    last = max(whole.index(token) for token in whole)
    assert 1 <= last < 18
    core = core_with(folders, request(1, stop_token_ids=[whole[last]]), draft=None)
    result = finish(core)[1]
    assert result.tokens == whole[: last + 1] and result.finish_reason == "stop"
    stats = core.stats()
    assert stats.discarded_tokens == 1
    assert result.usage.busy_ns == 1000 * (last + 1)
    assert (stats.busy_ns, stats.discarded_ns) == (1000 * stats.steps, stats.busy_ns - result.usage.busy_ns)


def test_an_aborted_request_leaves_a_round_that_is_dropped(
    folders: dict[str, str], late: list[LateRunner]
) -> None:
    core = core_with(folders, request(1, max_tokens=100))
    core.step()
    core.step()
    chunk = core.abort(1)
    assert chunk is not None and chunk.result is not None
    assert chunk.result.finish_reason == "abort" and len(chunk.result.tokens) == 1
    assert core.has_work
    assert core.step() == []
    assert not core.has_work
    assert core.stats().discarded_tokens >= 1 and core.stats().steps == 2
    core.add(core.prepare(request(2)))
    assert len(finish(core)[2].tokens) == 20


def test_a_request_aborted_while_others_go_on_costs_them_nothing(
    folders: dict[str, str], late: list[LateRunner]
) -> None:
    alone = finish(core_with(folders, request(2)))[1].tokens
    core = core_with(folders, request(1), request(2))
    for _ in range(3):
        core.step()
    core.abort(1)
    results = finish(core)
    assert list(results) == [2] and results[2].tokens == alone


def test_rows_with_logprobs_run_with_nothing_in_flight_and_the_others_go_on(
    folders: dict[str, str], late: list[LateRunner]
) -> None:
    core = core_with(folders, request(1), request(2, logprobs=1))
    results = finish(core)
    assert results[2].logprobs is not None and len(results[2].logprobs) == 20
    log = [entry.split()[0] for entry in late[0].log]
    assert log[:6] == ["launch", "collect", "execute", "launch", "collect", "execute"]
    alone = finish(core_with(folders, request(1)))[1]
    assert results[1].tokens == alone.tokens


def test_wall_time_is_charged_once_where_the_runner_reports_none(
    folders: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loading, "Runner", lambda *arguments: LateRunner(Runner(*arguments)))
    monkeypatch.setattr(loading, "Scheduler", lambda **given: Scheduler(**{**given, "rounds_ahead": 1}))
    core = core_with(folders, request(1), request(2, max_tokens=7))
    began = time.perf_counter_ns()
    results = finish(core)
    elapsed = time.perf_counter_ns() - began
    stats = core.stats()
    assert sum(result.usage.busy_ns for result in results.values()) + stats.discarded_ns == stats.busy_ns
    assert 0.5 * elapsed < stats.busy_ns <= elapsed


def test_an_aborted_request_gives_out_the_text_that_may_have_begun_a_stop_string(
    folders: dict[str, str], late: list[LateRunner]
) -> None:
    whole = finish(core_with(folders, request(1), draft=None))[1]
    core = core_with(folders, request(1, stop=[whole.text + "and no more"]), draft=None)
    chunks = [chunk for _ in range(6) for _, chunk in core.step()]
    assert all(chunk.text == "" for chunk in chunks)
    last = core.abort(1)
    assert last is not None and last.result is not None and last.tokens == ()
    num_tokens = len(last.result.tokens)
    assert last.text == last.result.text == core._tokenizer.decode(whole.tokens[:num_tokens]) != ""


class Listener:
    """A policy that drafts nothing and keeps what it is told."""

    def __init__(self) -> None:
        self.seconds: list[float] = []

    def observe_round(self, outcomes: Any, other_tokens: int, write_context: bool, seconds: float) -> None:
        self.seconds.append(seconds)

    def forget(self, request_id: int) -> None: ...


@pytest.mark.parametrize(("device_ns", "told_s"), [(1000, 5e-3), (7_000_000, 7e-3)])
def test_the_policy_is_told_what_is_slower_host_or_device(
    device_ns: int,
    told_s: float,
    folders: dict[str, str],
    late: list[LateRunner],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    core = core_with(folders, request(1, 40), draft=None)
    listener: Any = Listener()
    core._policy = listener
    late[0]._busy_ns = device_ns
    clock = itertools.count(0, 5_000_000)  # each look at it is 5 ms later than the last
    monkeypatch.setattr(time, "perf_counter_ns", lambda: next(clock))
    finish(core)
    assert listener.seconds and set(listener.seconds) == {told_s}


@pytest.mark.parametrize("late_rounds", [False, True], ids=["waited for", "one ahead"])
def test_batch_disturbed_by_online_arrivals_gives_its_answers_and_online_is_in_the_next_round(
    late_rounds: bool, folders: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    batch = [request(index, 24) for index in range(5)]
    online = [replace(request(10 + index, 6), priority=Priority.ONLINE) for index in range(4)]
    expected = together(DFlashEngine(**folders, **SETTINGS), [*batch, *online])
    if late_rounds:
        monkeypatch.setattr(loading, "Runner", lambda *arguments: LateRunner(Runner(*arguments)))
        monkeypatch.setattr(loading, "Scheduler", lambda **given: Scheduler(**{**given, "rounds_ahead": 1}))
    core = core_with(folders, *batch, kv_cache_tokens=144, max_num_seqs=4)
    results: dict[int, Result] = {}
    planned: list[set[int]] = []
    rounds = core._pipeline.rounds

    def spy(plan: StepPlan | None) -> Any:
        planned.append(rows_of(plan))
        return rounds(plan)

    monkeypatch.setattr(core._pipeline, "rounds", spy)
    for each in online:
        for _ in range(3):
            results |= ended(core)
        seq_id, before = core.add(core.prepare(each)), len(planned)
        for _ in range(2):
            results |= ended(core)
        launched = [rows for rows in planned[before:] if rows]
        assert seq_id in launched[0], "a round of batch was launched before it"
    results |= finish(core)
    assert [answer(results[seq_id]) for seq_id in sorted(results)] == expected
    assert core.stats().preemptions >= 2


def rows_of(plan: StepPlan | None) -> set[int]:
    return {row.seq_id for row in plan.rows} if plan is not None else set()


def ended(core: EngineCore) -> dict[int, Result]:
    return {seq_id: chunk.result for seq_id, chunk in core.step() if chunk.result is not None}
