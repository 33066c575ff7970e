"""The ways of generating that the benchmark compares: ours plain and drafted, exact or not, and others'."""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from dflash_engine.benchmarking import Contender, Counts, Piece, Prompt, Variant, release
from dflash_engine.catalog import resolve_draft, resolve_model
from dflash_engine.config import EngineConfig
from dflash_engine.core import EngineCore
from dflash_engine.errors import ConfigError
from dflash_engine.heap import freeze_heap, thaw_heap
from dflash_engine.memory import MemoryReport
from dflash_engine.model_config import DraftConfig, ModelConfig, read_draft_config, read_model_config
from dflash_engine.random_weights import draft_beside
from dflash_engine.request import Request, SamplingParams

OTHERS = ("transformers", "vllm", "vendor")


@dataclass(frozen=True, slots=True)
class BenchSettings:
    """What all contenders have in common; names are those of `EngineConfig`."""

    model: str = "smollm2-135m"
    draft: str | None = "auto"
    """None measures plain decoding alone."""
    dtype: str = "bfloat16"
    device: str = "auto"
    weights: str = "checkpoint"
    acceptance: float | None = None
    gpu_memory_utilization: float = 0.9
    max_num_seqs: int = 1
    max_model_len: int = 2048
    ignore_eos: bool = False
    others: tuple[str, ...] = ()
    """Of `OTHERS`."""
    engine: Mapping[str, Any] = field(default_factory=dict)
    """Further settings of our own engine."""

    def shapes(self) -> tuple[ModelConfig, DraftConfig | None]:
        """Of the model, and of the draft that is measured. Raises `ConfigError`."""
        folder = resolve_model(self.model)
        model = read_model_config(folder)
        draft = resolve_draft(self.draft_folder(), self.model)
        return model, None if draft is None else read_draft_config(draft, model)

    def draft_folder(self) -> str | None:
        """The draft that `auto` stands for. Raises `ConfigError` where there is none."""
        if self.draft != "auto":
            return self.draft
        folder = resolve_model(self.model)
        found = draft_beside(folder) if self.weights == "random" else resolve_draft("auto", self.model)
        if found is None:
            raise ConfigError(f"no draft is known for {self.model}: give --draft, or --draft none for plain")
        return str(found)


class EngineContender:
    """This project's engine. Raises `ConfigError`."""

    def __init__(self, config: EngineConfig, *, ignore_eos: bool) -> None:
        self._core: EngineCore | None = EngineCore(config)
        self._ignore_eos = ignore_eos
        self.counts = Counts()
        self.memory: MemoryReport | None = self._core.memory
        freeze_heap()

    def _open(self) -> EngineCore:
        assert self._core is not None, "closed"
        return self._core

    def submit(self, prompt: Prompt, max_tokens: int) -> int:
        sampling = SamplingParams(max_tokens=max_tokens, ignore_eos=self._ignore_eos)
        core = self._open()
        return core.add(core.prepare(Request(token_ids=prompt, sampling=sampling)))

    def step(self) -> list[Piece]:
        chunks = self._open().step()
        now = time.perf_counter()
        pieces = []
        for seq_id, chunk in chunks:
            pieces.append(Piece(seq_id, chunk.tokens, chunk.result is not None, now))
            if chunk.result is not None:
                usage, (steps, drafted, accepted) = chunk.result.usage, self.counts
                self.counts = Counts(
                    steps + usage.steps, drafted + usage.drafted_tokens, accepted + usage.accepted_tokens
                )
        return pieces

    def abort(self, keys: Sequence[Hashable]) -> None:
        core = self._open()
        for key in keys:
            assert isinstance(key, int)
            core.abort(key)
        while core.has_work:
            core.step()

    def close(self) -> None:
        self._core = None
        thaw_heap()
        release()


def variants_of(settings: BenchSettings) -> list[Variant]:
    """Plain decoding first, then DFlash, then the others asked for. Raises `ConfigError`."""
    draft = settings.draft_folder()
    plain = Variant("plain", _ours(settings, None), exact=True)
    variants = [plain]
    simulated = settings.acceptance is not None
    if simulated and not on_gpu(settings.device) and settings.engine.get("ops") != "triton":
        raise ConfigError("--acceptance needs a GPU: drafts are judged on the device")
    if draft is not None:
        variants.append(Variant("dflash", _ours(settings, draft), exact=not simulated))
    if "vendor" in settings.others:
        variants.append(Variant("vendor", _ours(settings, None, exact=False)))
        if draft is not None:
            variants.append(Variant("vendor-dflash", _ours(settings, draft, exact=False)))
    if "vllm" in settings.others:
        variants.append(Variant("vllm", _vllm(settings, None), alone=True))
        if draft is not None and settings.weights == "checkpoint":
            variants.append(Variant("vllm-dflash", _vllm(settings, draft), alone=True))
    if "transformers" in settings.others:
        if settings.weights == "random":
            raise ConfigError("--with transformers needs a checkpoint, not random weights")
        variants.append(Variant("transformers", _transformers(settings), most_at_once=1))
    return variants


def on_gpu(device: str) -> bool:
    """Whether `device` of the settings is a GPU."""
    return device != "cpu" and torch.cuda.is_available()


def _ours(settings: BenchSettings, draft: str | None, *, exact: bool = True) -> Callable[[float], Contender]:
    def make(utilization: float) -> Contender:
        values = {
            "model": settings.model,
            "draft": draft,
            "dtype": settings.dtype,
            "device": settings.device,
            "weights": settings.weights,
            "simulated_acceptance": settings.acceptance if draft is not None else None,
            "gpu_memory_utilization": utilization,
            "max_num_seqs": settings.max_num_seqs,
            "max_model_len": settings.max_model_len,
            "prefix_caching": False,
            "exact": exact,
            **settings.engine,
        }
        return EngineContender(EngineConfig(**values), ignore_eos=settings.ignore_eos)

    return make


def _vllm(settings: BenchSettings, draft: str | None) -> Callable[[float], Contender]:
    def make(utilization: float) -> Contender:
        from dflash_engine.vllm_baseline import VllmBaseline, VllmSettings

        return VllmBaseline(
            VllmSettings(
                model=settings.model,
                draft=draft,
                dtype=settings.dtype,
                max_num_seqs=settings.max_num_seqs,
                max_model_len=settings.max_model_len,
                gpu_memory_utilization=utilization,
                weights=settings.weights,
                ignore_eos=settings.ignore_eos,
            )
        )

    return make


def _transformers(settings: BenchSettings) -> Callable[[float], Contender]:
    def make(utilization: float) -> Contender:
        from dflash_engine.baseline import TransformersBaseline

        return TransformersBaseline(
            settings.model, dtype=settings.dtype, device=settings.device, ignore_eos=settings.ignore_eos
        )

    return make
