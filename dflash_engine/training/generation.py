"""Responses of the target to many prompts, by this engine, in shards that a restart leaves out."""

from __future__ import annotations

import gzip
import json
import multiprocessing
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, NamedTuple

from dflash_engine.catalog import resolve_model
from dflash_engine.config import EngineConfig
from dflash_engine.core import EngineCore
from dflash_engine.devices import select_device
from dflash_engine.errors import ConfigError, RequestError
from dflash_engine.fingerprint import weights_digest
from dflash_engine.model_config import read_model_config
from dflash_engine.request import Message, Request, SamplingParams
from dflash_engine.tokenizer import Tokenizer
from dflash_engine.training.config import GenerateConfig
from dflash_engine.training.corpus import corpus_of, save_corpus

ASKED = "_generate.json"
PROCESSES = 4
"""That tokenise."""
Tokens = tuple[int, ...]
Report = Callable[[dict[str, Any]], None]


def generate_shards(
    target: str, config: GenerateConfig, stop: Callable[[], bool], report: Report
) -> dict[str, Any]:
    """Answers what has no shard yet, until all is done or `stop` says so; then the shards in work are lost.

    The next shard's prompts come in while the last one's answers end, so that the engine stays full. Raises
    `ConfigError`, also where the folder holds the responses of another run.
    """
    output = Path(config.output)
    if not config.prompts or not config.output:
        raise ConfigError("generate.prompts and generate.output: name the prompts and a folder")
    folder = resolve_model(target)
    asked = config.model_dump(mode="json", exclude={"output", "engine"})
    _note(output, {"target": weights_digest(folder), **asked})
    shards = list(_shards(config))
    todo = [shard for shard in shards if not (output / shard.name).is_file()]
    begun = time.perf_counter()
    done_tokens = 0
    if todo:
        core = EngineCore(EngineConfig(model=target, **config.engine))
        vocab_size = read_model_config(folder).vocab_size
        begun = time.perf_counter()
        with tokenised(folder, todo) as prompts:
            for shard, pairs in _answered(core, zip(todo, prompts, strict=True), config, stop):
                corpus = corpus_of(pairs, vocab_size)
                save_corpus(corpus, output / shard.name)
                done_tokens += corpus.response_tokens
                report(
                    {
                        "event": "shard",
                        "name": shard.name,
                        "response_tokens": corpus.response_tokens,
                        "tokens_per_s": done_tokens / (time.perf_counter() - begun),
                    }
                )
    return {
        "output": config.output,
        "shards": len(shards),
        "shards_left": sum(not (output / shard.name).is_file() for shard in shards),
        "response_tokens": done_tokens,
        "elapsed_s": time.perf_counter() - begun,
    }


class Shard(NamedTuple):
    """Prompts that become one file."""

    name: str
    temperature: float
    conversations: list[list[Message]]


@dataclass(slots=True)
class _Open:
    """A shard in work."""

    shard: Shard
    prompts: list[Tokens]
    answers: list[Tokens]
    left: int


def _answered(
    core: EngineCore,
    shards: Iterator[tuple[Shard, list[Tokens]]],
    config: GenerateConfig,
    stop: Callable[[], bool],
) -> Iterator[tuple[Shard, list[tuple[Tokens, Tokens]]]]:
    """Shards with pairs of prompt and response, each as soon as its last answer is there."""
    running: dict[int, tuple[_Open, int]] = {}
    enough = 2 * core.config.limit("max_num_seqs", select_device(core.config, 0).type)
    more = True
    while not stop():
        while more and len(running) < enough:
            following = next(shards, None)
            more = following is not None
            if following is not None:
                running |= _submitted(core, *following, config)
        if not core.has_work:
            return
        for seq_id, chunk in core.step():
            if chunk.result is None:
                continue
            opened, index = running.pop(seq_id)
            opened.answers[index] = chunk.result.tokens
            opened.left -= 1
            if not opened.left:
                pairs = zip(opened.prompts, opened.answers, strict=True)
                yield opened.shard, [(prompt, said) for prompt, said in pairs if said]


def _submitted(
    core: EngineCore, shard: Shard, prompts: list[Tokens], config: GenerateConfig
) -> dict[int, tuple[_Open, int]]:
    """Its requests by sequence id; one that is refused has no answer."""
    opened = _Open(shard, prompts, [()] * len(prompts), 0)
    submitted = {}
    for index, prompt in enumerate(prompts):
        sampling = SamplingParams(max_tokens=config.max_tokens, temperature=shard.temperature, seed=index)
        try:
            prepared = core.prepare(Request(token_ids=prompt, sampling=sampling))
        except RequestError:
            continue
        submitted[core.add(prepared)] = (opened, index)
    opened.left = len(submitted)
    return submitted


@contextmanager
def tokenised(folder: Path, shards: Sequence[Shard]) -> Iterator[Iterator[list[Tokens]]]:
    """Prompts of each shard as token ids, made by processes of their own where there is more than one:
    templates and tokenizer would take the time of the thread that drives the engine."""
    conversations = [shard.conversations for shard in shards]
    if len(shards) == 1:
        yield iter([_encode(folder, conversations[0])])
        return
    pool = ProcessPoolExecutor(min(len(shards), PROCESSES), multiprocessing.get_context("spawn"))
    try:
        yield pool.map(partial(_encode, folder), conversations)
    finally:
        pool.shutdown(cancel_futures=True)


@lru_cache(maxsize=1)
def _tokenizer(folder: Path) -> Tokenizer:
    return Tokenizer.load(folder)


def _encode(folder: Path, conversations: Sequence[Sequence[Message]]) -> list[Tokens]:
    tokenizer = _tokenizer(folder)
    return [tuple(tokenizer.encode_chat(turns)) for turns in conversations]


def answer(core: EngineCore, prompts: Sequence[Tokens], sampling: Sequence[SamplingParams]) -> list[Tokens]:
    """Responses in the order of the prompts, empty for those that were refused."""
    answers: list[Tokens] = [()] * len(prompts)
    index_of: dict[int, int] = {}
    for index, (prompt, params) in enumerate(zip(prompts, sampling, strict=True)):
        try:
            index_of[core.add(core.prepare(Request(token_ids=prompt, sampling=params)))] = index
        except RequestError:
            continue
    while core.has_work:
        for seq_id, chunk in core.step():
            if chunk.result is not None:
                answers[index_of[seq_id]] = chunk.result.tokens
    return answers


def _shards(config: GenerateConfig) -> Iterator[Shard]:
    conversations = _read(Path(config.prompts), config.limit)
    for turn, temperature in enumerate(config.temperatures):
        for at in range(0, len(conversations), config.shard_prompts):
            name = f"part-{turn}-{at // config.shard_prompts:05d}.npz"
            yield Shard(name, temperature, conversations[at : at + config.shard_prompts])


def _read(path: Path, limit: int | None) -> list[list[Message]]:
    opened = gzip.open if path.suffix == ".gz" else open
    found: list[list[Message]] = []
    try:
        with opened(path, "rt", encoding="utf-8") as lines:
            for line in lines:
                if limit is not None and len(found) == limit:
                    break
                found.append(
                    [Message(turn["role"], turn["content"]) for turn in json.loads(line)["messages"]]
                )
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"generate.prompts {path}: needs JSON rows with messages ({error!r})") from error
    return found


def _note(output: Path, asked: dict[str, Any]) -> None:
    """Says in the folder what its shards answer. Temperatures may be added later. Raises `ConfigError`."""
    path = output / ASKED
    if path.is_file():
        before = json.loads(path.read_text())
        same = len(before["temperatures"])
        if before != asked | {"temperatures": asked["temperatures"][:same]}:
            raise ConfigError(
                f"{output} holds responses to another request (see {path.name}): give another folder"
            )
    output.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(asked, indent=2) + "\n")
