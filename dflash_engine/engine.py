"""The engine for one caller in one thread: scripts, notebooks, tests, benchmarks."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, overload

from dflash_engine.config import EngineConfig
from dflash_engine.core import EngineCore
from dflash_engine.errors import EngineDead, RequestError
from dflash_engine.memory import MemoryReport
from dflash_engine.request import Chunk, Message, PromptLike, Request, Result, SamplingParams, as_request
from dflash_engine.stats import EngineStats


class DFlashEngine:
    """Generates with one model. `settings` are those of `EngineConfig`; raises `ConfigError`.

    A text is one user turn of a conversation; give `Request(text=...)` for raw completion.
    """

    def __init__(self, model: str = "smollm2-135m", draft: str | None = "auto", **settings: Any) -> None:
        self._core = EngineCore(EngineConfig(model=model, draft=draft, **settings))
        self._dead: EngineDead | None = None

    @property
    def fingerprint(self) -> str:
        """Digest of all that decides the tokens: weights, precision, device, kernels."""
        return self._core.fingerprint

    @property
    def memory(self) -> MemoryReport:
        """What weights and caches take, and what the draft costs."""
        return self._core.memory

    def stats(self) -> EngineStats:
        return self._core.stats()

    @overload
    def generate(
        self, prompt: str | Request, sampling: SamplingParams | None = None, **fields: Any
    ) -> Result: ...
    @overload
    def generate(
        self,
        prompt: Sequence[PromptLike | dict[str, str]],
        sampling: SamplingParams | None = None,
        **fields: Any,
    ) -> Any: ...
    def generate(self, prompt: Any, sampling: SamplingParams | None = None, **fields: Any) -> Any:
        """One prompt -> its `Result`; a list of prompts -> a list of results in their order.

        A prompt is a text, a conversation (a list of messages) or a `Request`. Sampling is given as
        `SamplingParams` or as its fields. A single prompt that cannot be answered raises its
        `RequestError`; in a list it becomes a result with `error` set, and the others are answered.
        """
        params = _sampling(sampling, fields)
        if _is_one_prompt(prompt):
            result = self._run([prompt], params)[0]
            if result.error is not None:
                raise result.error
            return result
        return self._run(prompt, params)

    def stream(
        self, prompt: PromptLike, sampling: SamplingParams | None = None, **fields: Any
    ) -> Iterator[Chunk]:
        """Pieces of one answer as they are committed; the last one carries the result."""
        core = self._core
        seq_id = core.add(core.prepare(as_request(prompt, _sampling(sampling, fields))))
        try:
            finished = False
            while not finished:
                for _, chunk in self._step():
                    finished = chunk.result is not None
                    yield chunk
        finally:
            self._end([seq_id])

    def _run(self, prompts: Sequence[PromptLike], sampling: SamplingParams) -> list[Result]:
        results: dict[int, Result] = {}
        index_of = {}
        for index, prompt in enumerate(prompts):
            try:
                index_of[self._core.add(self._core.prepare(as_request(prompt, sampling)))] = index
            except RequestError as error:
                results[index] = Result(request_id=f"refused-{index}", error=error)
        try:
            while self._core.has_work:
                for seq_id, chunk in self._step():
                    if chunk.result is not None:
                        results[index_of[seq_id]] = chunk.result
        finally:
            self._end(index_of)
        return [results[index] for index in range(len(prompts))]

    def _step(self) -> list[tuple[int, Chunk]]:
        if self._dead is not None:
            raise self._dead
        try:
            return self._core.step()
        except Exception as error:
            self._dead = EngineDead(f"a step failed: {type(error).__name__}: {error}")
            raise self._dead from error

    def _end(self, seq_ids: Iterable[int]) -> None:
        """Gives back what an interrupted caller left running."""
        for seq_id in seq_ids:
            if self._dead is None:
                self._core.abort(seq_id)


def _sampling(sampling: SamplingParams | None, fields: dict[str, Any]) -> SamplingParams:
    if sampling is not None and fields:
        raise TypeError(f"give sampling or its fields, not both: {', '.join(fields)}")
    return sampling or SamplingParams(**fields)


def _is_one_prompt(prompt: Any) -> bool:
    if isinstance(prompt, str | Request):
        return True
    return bool(prompt) and all(isinstance(turn, Message | dict) for turn in prompt)
