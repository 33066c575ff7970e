"""Jobs of batches in this process, without Ray: parts as the pipeline writes them, held where a test says."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

from dflash_engine.config import EngineConfig
from dflash_engine.errors import RequestError
from dflash_engine.fake import FakeEngine
from dflash_engine.request import Request, SamplingParams
from pipelines.config import BatchConfig, ShardConfig
from pipelines.cost import load_prices
from pipelines.errors import NotFound
from pipelines.inputs import find_input
from pipelines.manifest import write_manifest
from pipelines.output import Bill, error_records, output_rows
from pipelines.read import Reader, ShardRows
from pipelines.rows import RowError
from pipelines.service.batch_submitter import JobAsked, JobEnd
from pipelines.service.word_tokenizer import WordTokenizer
from pipelines.shards import plan, read_tasks
from pipelines.storage import open_store
from pipelines.storage_config import StorageConfig
from pipelines.write import Part, PartWriter

PRICES = load_prices(str(Path(__file__).resolve().parents[3] / "configs/prices.yaml"))
ENGINE = EngineConfig(model="fake")


@dataclass
class ScriptedSubmitter:
    """Jobs that write a part for every two rows, and wait for ever before part `hold_at`."""

    hold_at: int | None = None
    ends: list[JobEnd] = field(default_factory=list)
    """How the first jobs end, instead of doing anything."""
    storage: StorageConfig = field(default_factory=StorageConfig)
    started: list[JobAsked] = field(default_factory=list)
    written: list[str] = field(default_factory=list)
    holding: threading.Event = field(default_factory=threading.Event)
    num_running: int = 0

    async def start(self, asked: JobAsked) -> ScriptedJob:
        self.started.append(asked)
        return ScriptedJob(asyncio.ensure_future(self.run(asked)))

    async def run(self, asked: JobAsked) -> JobEnd:
        if self.ends:
            return self.ends.pop(0)
        self.num_running += 1
        try:
            return await self.answer(asked)
        except NotFound as error:
            return JobEnd(2, str(error))
        finally:
            self.num_running -= 1

    async def answer(self, asked: JobAsked) -> JobEnd:
        shards = await asyncio.to_thread(lambda: list(self.shards(asked)))
        writer = PartWriter(open_store(asked.output, self.storage), "openai", {})
        for number, shard in enumerate(shards):
            if number == self.hold_at:
                self.holding.set()
                await asyncio.Event().wait()
            if not await asyncio.to_thread(writer.is_written, Part(shard.shard_id)):
                await self.write(writer, shard)
        config = BatchConfig(input=asked.input, output=asked.output, engine=ENGINE)
        await asyncio.to_thread(write_manifest, writer, config, PRICES, 1.0)
        return JobEnd(0)

    def shards(self, asked: JobAsked) -> Iterator[ShardRows]:
        source = find_input(asked.input, self.storage)
        cut = ShardConfig(rows=2)
        reader = Reader(source.store, cut, SamplingParams(temperature=1.0), frozenset())
        for task in read_tasks(plan(source, cut)):
            yield from reader.shards(task)

    async def write(self, writer: PartWriter, shard: ShardRows) -> None:
        engine = FakeEngine(ENGINE)
        answers = []
        for row in shard.rows:
            try:
                answers.append(row.error or await engine.generate(rendered(row.request)))
            except RequestError as error:
                answers.append(RowError(error.code, str(error)))
        rows = output_rows(shard.rows, answers, Bill(PRICES.price("cpu"), ENGINE))
        errors = error_records(shard.rows, answers)
        await asyncio.to_thread(writer.write, Part(shard.shard_id), rows, errors)
        self.written.append(shard.shard_id)


def rendered(request: Request) -> Request:
    """The request as the service gives it to an engine: the fake one answers ids in its own way."""
    if request.messages is None:
        return replace(request, text=None, token_ids=WordTokenizer().encode(request.text))
    turns = [{"role": turn.role, "content": turn.content} for turn in request.messages]
    return replace(request, messages=None, token_ids=WordTokenizer().encode_chat(turns).tokens)


@dataclass
class ScriptedJob:
    task: asyncio.Task[JobEnd]

    async def wait(self) -> JobEnd:
        return await asyncio.shield(self.task)

    async def stop(self) -> None:
        self.task.cancel()
        await asyncio.wait([self.task])
