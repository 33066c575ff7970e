"""What a round costs: measured once for each CUDA-graph bucket, corrected by what rounds really take."""

from __future__ import annotations

import json
import logging
import math
import os
import tempfile
from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

logger = logging.getLogger(__name__)

LEAST_STEP = 0.125
"""Weight of a new observation against what a bucket has seen before; the first ones weigh more. About
sixteen rounds follow a change of context length, and one hiccup moves a bucket by under a tenth."""
MOST_SURPRISE = 2.0
"""An observation counts as at most this factor away from what was expected, so at most 4 between two that
disagree: a garbage collection or a page fault says nothing about the next round."""
NEIGHBOUR = 0.02
"""What a neighbouring bucket's evidence counts, for each bucket between: little next to a bucket's own, all
where it has none."""
KEPT = 0.99
"""Of a bucket's evidence at each observation of another one: after some hundred rounds, neighbours speak for
it again, so that one wrong observation cannot keep a bucket from being tried for ever."""
MOST_EVIDENCE = 8.0
HOST_BOUND = 1.25
"""Rounds up to this factor above the host's floor may have waited for the host: they say nothing about
the passes."""

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class TimesKey:
    """For what a table was measured; another key makes it worthless."""

    model_digest: str
    gpu: str
    version: str
    """Of everything else that times depend on: kernels, libraries, sizes."""

    @property
    def digest(self) -> str:
        """16 hexadecimal digits that change with any field."""
        return blake2b(json.dumps(asdict(self)).encode(), digest_size=8).hexdigest()


class BucketTimes:
    """Seconds of one kind of pass by its size: measured, times a correction for each bucket.

    A pass of a size between two buckets costs what the next one up costs. Beyond the largest, the line
    through the last two goes on.
    """

    def __init__(self, measured_s: Mapping[int, float]) -> None:
        if not measured_s or any(
            size < 1 or not (math.isfinite(seconds) and seconds > 0) for size, seconds in measured_s.items()
        ):
            raise ValueError(f"measured_s must map sizes >= 1 to seconds > 0, not {dict(measured_s)!r}")
        self.measured_s: dict[int, float] = dict(sorted(measured_s.items()))
        self.sizes: list[int] = list(self.measured_s)
        self._measured = np.array(list(self.measured_s.values()))
        last, before = self.sizes[-1], self.sizes[-2] if len(self.sizes) > 1 else 0
        rise = self._measured[-1] - (self._measured[-2] if len(self.sizes) > 1 else 0.0)
        # Of the last bucket's time, for each token beyond it.
        self._slope = max(float(rise) / (last - before) / float(self._measured[-1]), 0.0)
        self._log_ratio = np.zeros(len(self.sizes))
        self._evidence = np.zeros(len(self.sizes))
        distance = np.abs(np.subtract.outer(np.arange(len(self.sizes)), np.arange(len(self.sizes))))
        self._nearness = NEIGHBOUR**distance
        self._sizes = np.array(self.sizes)
        self._set(self._measured)

    def seconds(self, size: int) -> float:
        """0 for size 0."""
        if size <= 0:
            return 0.0
        bucket = bisect_left(self.sizes, size)
        if bucket < len(self.sizes):
            return self._seconds_list[bucket]
        return self._seconds_list[-1] * (1.0 + self._slope * (size - self.sizes[-1]))

    def seconds_of(self, sizes: NDArray[np.int64]) -> Floats:
        """`seconds` of rising sizes >= 1."""
        seconds = self._seconds[self._sizes.searchsorted(sizes)]
        if sizes[-1] > self.sizes[-1]:
            seconds *= 1.0 + self._slope * np.maximum(sizes - self.sizes[-1], 0)
        return seconds

    def observe(self, size: int, seconds: float) -> None:
        """Corrects the bucket of `size` >= 1, and through it those near it that have never been seen."""
        expected = self.seconds(size)
        bucket = min(bisect_left(self.sizes, size), len(self.sizes) - 1)
        surprise = min(max(seconds / expected, 1 / MOST_SURPRISE), MOST_SURPRISE)
        seen = self._log_list[bucket] + math.log(surprise)
        evidence = float(self._evidence[bucket])
        step = max(LEAST_STEP, 1 / (evidence + 1))
        # A bucket with little evidence of its own starts from what its neighbours say.
        start = self._log_list[bucket] if evidence < 1 else float(self._log_ratio[bucket])
        self._log_ratio[bucket] = start + step * (seen - start)
        self._evidence *= KEPT
        self._evidence[bucket] = min(evidence + 1, MOST_EVIDENCE)
        weights = self._nearness @ self._evidence
        logs = (self._nearness @ (self._evidence * self._log_ratio)) / weights
        self._log_list: list[float] = logs.tolist()
        self._set(self._measured * np.exp(logs))

    def _set(self, seconds: Floats) -> None:
        if not self._evidence.any():
            self._log_list = [0.0] * len(self.sizes)
        # The last one twice: beyond the largest bucket, searchsorted points behind the end.
        self._seconds = np.append(seconds, seconds[-1])
        self._seconds_list: list[float] = seconds.tolist()


class StepTimes:
    """Seconds of a round's passes on this GPU.

    Tables come from start-up, where each bucket is run alone, with short contexts. Long contexts and MoE
    routing make passes slower than that, often all sizes alike: `observe` follows.

    verify_s:   a target pass, by its query tokens, those of prompts included
    draft_s:    a draft pass, by the rows that draft
    context_s:  writing the draft's context behind a target pass, by the pass's query tokens
    host_s, host_row_s: the host works while the GPU does, so no round of n rows takes less than
                host_s + n * host_row_s

    Raises `ValueError` for a table that is empty or has a size or time that cannot be.
    """

    def __init__(
        self,
        verify_s: Mapping[int, float],
        draft_s: Mapping[int, float],
        context_s: Mapping[int, float],
        host_s: float = 0.0,
        host_row_s: float = 0.0,
    ) -> None:
        if not (0 <= host_s < math.inf and 0 <= host_row_s < math.inf):
            raise ValueError(f"host_s and host_row_s must be seconds >= 0, not {host_s!r} and {host_row_s!r}")
        self.host_s = host_s
        self.host_row_s = host_row_s
        self.kinds: dict[str, BucketTimes] = {
            "verify": BucketTimes(verify_s),
            "draft": BucketTimes(draft_s),
            "context": BucketTimes(context_s),
        }
        # Where a target pass or the writing of its context becomes dearer.
        self.token_edges: list[int] = sorted({*verify_s, *context_s})

    def verify(self, num_tokens: int) -> float:
        return self.kinds["verify"].seconds(num_tokens)

    def draft(self, num_rows: int) -> float:
        return self.kinds["draft"].seconds(num_rows)

    def context(self, num_tokens: int) -> float:
        return self.kinds["context"].seconds(num_tokens)

    def floor(self, num_rows: int) -> float:
        return self.host_s + num_rows * self.host_row_s

    def observe(self, kind: str, size: int, seconds: float) -> None:
        """`kind` is "verify", "draft" or "context". Times that cannot be (a clock set back) are ignored."""
        if size >= 1 and math.isfinite(seconds) and seconds > 0:
            self.kinds[kind].observe(size, seconds)

    def observe_round(
        self, num_tokens: int, num_rows: int, num_drafting: int, with_context: bool, seconds: float
    ) -> None:
        """As `observe`, where only the whole round was timed: its parts are corrected alike.

        So each combination that is run is soon predicted well as a whole, which is what choices compare.
        """
        parts = [("verify", num_tokens, self.verify(num_tokens))]
        if num_drafting:
            parts.append(("draft", num_drafting, self.draft(num_drafting)))
        if with_context:
            parts.append(("context", num_tokens, self.context(num_tokens)))
        expected = sum(part for *_, part in parts)
        floor = self.floor(num_rows)
        if not num_tokens or (expected < floor and seconds < HOST_BOUND * floor):
            return
        for kind, size, part in parts:
            self.observe(kind, size, part * seconds / expected)

    @classmethod
    def load(cls, path: Path, key: TimesKey) -> StepTimes | None:
        """The tables that `save` left for the same key; None, with a warning, for any other file."""
        try:
            found = json.loads(path.read_bytes())
            if found["key"] != asdict(key):
                logger.warning("%s holds step times of %s: measuring again", path, found["key"])
                return None
            tables = {name: _sizes_to_seconds(found[name]) for name in ("verify_s", "draft_s", "context_s")}
            return cls(**tables, host_s=float(found["host_s"]), host_row_s=float(found["host_row_s"]))
        except FileNotFoundError:
            return None
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            logger.warning("%s holds no step times that can be read: measuring again (%s)", path, error)
            return None

    def save(self, path: Path, key: TimesKey) -> None:
        """Writes the tables as measured, without corrections; the file is replaced as a whole.

        Where that is not possible, a warning says so: the next start measures again.
        """
        tables = {f"{kind}_s": times.measured_s for kind, times in self.kinds.items()}
        content = {"key": asdict(key), **tables, "host_s": self.host_s, "host_row_s": self.host_row_s}
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            handle, name = tempfile.mkstemp(prefix=path.name, dir=path.parent)
            try:
                with os.fdopen(handle, "w") as file:
                    json.dump(content, file, indent=1)
                os.replace(name, path)
            except BaseException:
                os.unlink(name)
                raise
        except OSError as error:
            logger.warning("step times cannot be kept in %s: %s", path, error)


def _sizes_to_seconds(table: dict[str, Any]) -> dict[int, float]:
    return {int(size): float(seconds) for size, seconds in table.items()}
