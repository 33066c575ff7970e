"""The same checkpoint under vLLM in this process, plain or with its own DFlash: what we have to beat.

Written for vLLM 0.22 (V1 engine, in process). vLLM is not among our dependencies: it pins its own torch.
"""

from __future__ import annotations

import importlib
import os
import time
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any

from dflash_engine.benchmarking import Counts, Piece, Prompt, release
from dflash_engine.catalog import resolve_draft, resolve_model
from dflash_engine.errors import ConfigError
from dflash_engine.memory import MemoryReport
from dflash_engine.model_config import read_draft_config, read_model_config

_ENVIRONMENT = {
    # The engine in this process: else each step waits for another process, and memory is not given back.
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    # Greedy decoding does not need it, and it compiles for minutes when it is first used.
    "VLLM_USE_FLASHINFER_SAMPLER": "0",
    "HF_HUB_OFFLINE": "1",
}


@dataclass(frozen=True, slots=True)
class VllmSettings:
    """What vLLM is asked for; the names are those of `EngineConfig`."""

    model: str
    draft: str | None
    dtype: str
    max_num_seqs: int
    max_model_len: int
    gpu_memory_utilization: float
    weights: str = "checkpoint"
    """`random`: vLLM's own dummy weights, and no draft."""
    ignore_eos: bool = False


class VllmBaseline:
    """A `dflash_engine.benchmarking.Contender`, greedy and without prefix cache.

    Raises `ConfigError` where vLLM is not installed, or cannot start with these settings.
    """

    memory: MemoryReport | None = None

    def __init__(self, settings: VllmSettings) -> None:
        os.environ.update(_ENVIRONMENT)  # vLLM has no other way to be told
        try:
            vllm: Any = importlib.import_module("vllm")
            kinds: Any = importlib.import_module("vllm.sampling_params").RequestOutputKind
        except ImportError as error:
            raise ConfigError(f"vllm cannot be imported ({error}); leave it out of --with") from error
        self._random = settings.weights == "random"
        draft, self._num_drafted = _draft(settings)
        random: dict[str, Any] = {"load_format": "dummy", "skip_tokenizer_init": True}
        try:
            self._llm: Any = vllm.LLM(
                model=str(resolve_model(settings.model)),
                dtype=settings.dtype,
                max_num_seqs=settings.max_num_seqs,
                max_model_len=settings.max_model_len,
                gpu_memory_utilization=settings.gpu_memory_utilization,
                enable_prefix_caching=False,
                disable_log_stats=True,
                speculative_config=draft,
                **(random if self._random else {}),
            )
        # vLLM lets through what its many parts raise.
        except Exception as error:
            raise ConfigError(f"vLLM {vllm.__version__} does not start: {error}") from error
        self._sampling_params: Any = vllm.SamplingParams
        self._delta = kinds.DELTA
        self._ignore_eos = settings.ignore_eos
        self._num_requests = 0
        self._begun: set[str] = set()
        self.counts = Counts()

    def submit(self, prompt: Prompt, max_tokens: int) -> str:
        self._num_requests += 1
        key = str(self._num_requests)
        sampling = self._sampling_params(
            temperature=0.0,
            max_tokens=max_tokens,
            ignore_eos=self._ignore_eos,
            detokenize=not self._random,
            output_kind=self._delta,
        )
        self._llm.llm_engine.add_request(key, {"prompt_token_ids": list(prompt)}, sampling)
        return key

    def step(self) -> list[Piece]:
        outputs = self._llm.llm_engine.step()
        now = time.perf_counter()
        pieces = []
        for output in outputs:
            tokens = tuple(output.outputs[0].token_ids)
            key = output.request_id.partition("-")[0]  # some versions add a suffix of their own
            self._count(key, len(tokens))
            if output.finished:
                self._begun.discard(key)
            if tokens or output.finished:
                pieces.append(Piece(key, tokens, output.finished, now))
        return pieces

    def _count(self, key: str, num_tokens: int) -> None:
        """The first piece is the prompt's; each one behind it is a verify step."""
        if num_tokens and key in self._begun:
            steps, drafted, accepted = self.counts
            self.counts = Counts(steps + 1, drafted + self._num_drafted, accepted + num_tokens - 1)
        elif num_tokens:
            self._begun.add(key)

    def abort(self, keys: Sequence[Hashable]) -> None:
        self._llm.llm_engine.abort_request([str(key) for key in keys])
        while self._llm.llm_engine.has_unfinished_requests():
            self._llm.llm_engine.step()
        self._begun.clear()

    def close(self) -> None:
        self._llm.llm_engine.engine_core.shutdown()
        self._llm = None
        release()


def _draft(settings: VllmSettings) -> tuple[dict[str, Any] | None, int]:
    """vLLM's speculative configuration, and the tokens drafted in each step."""
    if settings.weights == "random" and settings.draft is not None:
        raise ConfigError("vLLM with a draft needs a checkpoint: its random drafts would all be wrong")
    folder = resolve_draft(settings.draft, settings.model)
    if folder is None:
        return None, 0
    block_size = read_draft_config(folder, read_model_config(resolve_model(settings.model))).block_size
    return {
        "method": "dflash",
        "model": str(folder),
        "num_speculative_tokens": block_size - 1,
    }, block_size - 1
