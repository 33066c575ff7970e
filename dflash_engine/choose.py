"""The target's choice at a position: a pure function of the logits there, the request and the position.

Order: grammar, logit bias, penalties, temperature, min-p, top-k, top-p, then the best token; with a
temperature, the best after Gumbel noise is added (Gumbel-max: the same distribution as drawing from the
softmax).
The noise is a hash of (seed, position, token), so it is there again whenever a position is looked at,
with or without a draft, in whatever batch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from dflash_engine.request import SamplingParams, TokenLogprob

_LOW32 = 0xFFFFFFFF
MIN_TEMPERATURE = 1e-30
"""Far below any that two logits could tell from zero, far above what float32 rounds to zero."""
PROBABILITY_UNIT = 1 << 40
"""Probabilities are summed for top-p as integers of 2^-40: no order of summation can change them."""


def _mix(x: int | Tensor) -> int | Tensor:
    """A 32-bit integer hash (two multiply-xorshift rounds; C. Wellons' lowbias32 constants)."""
    x = x ^ (x >> 16)
    x = (x * 0x7FEB352D) & _LOW32
    x = x ^ (x >> 15)
    x = (x * 0x846CA68B) & _LOW32
    return x ^ (x >> 16)


def gumbel_noise(seed: int, position: int, vocab_size: int, device: torch.device) -> Tensor:
    """float32 [V] standard Gumbel noise of one position of one request."""
    key = 0
    for part in (seed & _LOW32, seed >> 32, position):
        key = int(_mix((key * 31 + part + 0x9E3779B9) & _LOW32))
    tokens = torch.arange(vocab_size, device=device, dtype=torch.int64)
    bits = _mix(_mix((tokens * 0x9E3779B1 + key) & _LOW32) ^ key)
    uniform = (torch.as_tensor(bits, device=device).double() + 0.5) / 2**32
    return -torch.log(-torch.log(uniform)).float()


class History:
    """Token counts of one sequence, for penalties: the prompt counts for repetition only."""

    def __init__(
        self, prompt: Sequence[int], output: Sequence[int], vocab_size: int, device: torch.device
    ) -> None:
        answered = torch.tensor(output, dtype=torch.int64, device=device)
        self.counts = torch.bincount(answered, minlength=vocab_size).float()
        self.seen = self.counts > 0
        self.seen[torch.tensor(prompt, dtype=torch.int64, device=device)] = True

    def push(self, token: int) -> None:
        self.counts[token] += 1
        self.seen[token] = True


def choose(
    logits: Tensor,
    sampling: SamplingParams,
    seed: int,
    position: int,
    history: History | None,
    allowed: Tensor | None = None,
) -> int:
    """The token for `position` from float32 logits [V]; `history` where the request has penalties, `allowed`
    bool [V] where it has a grammar."""
    if allowed is not None:
        logits = logits.masked_fill(~allowed.to(logits.device), -torch.inf)
    scores = _biased(logits, sampling)
    if history is not None:
        scores = _penalised(scores, sampling, history)
    if not sampling.greedy:
        # From the best down: a tiny temperature makes the others -inf, not the best one inf.
        scores = _truncated((scores - scores.max()) / max(sampling.temperature, MIN_TEMPERATURE), sampling)
        scores = scores + gumbel_noise(seed, position, len(scores), scores.device)
    return int(scores.argmax())


def guess(
    logits: Tensor,
    best: Sequence[int],
    sampling: SamplingParams,
    seed: int,
    position: int,
    allowed: Callable[[Sequence[int]], Tensor] | None = None,
) -> list[int]:
    """The draft's tokens for positions from `position` on, from float32 logits [n, V] and their argmax.

    `allowed` gives bool [V] behind the tokens guessed so far, where the request has a grammar. The noise is
    the target's: under verification by equality that only makes the guesses right more often.
    """
    if sampling.greedy and not sampling.logit_bias and allowed is None:
        return list(best)
    plain = SamplingParams(temperature=sampling.temperature, logit_bias=sampling.logit_bias)
    guesses: list[int] = []
    for offset, row in enumerate(logits):
        mask = None if allowed is None else allowed(guesses)
        guesses.append(choose(row, plain, seed, position + offset, None, mask))
    return guesses


def logprob(logits: Tensor, token: int, num_top: int) -> TokenLogprob:
    """Log probabilities under the model's own distribution, from float32 logits [V]."""
    logprobs = logits.log_softmax(-1)
    values, tokens = logprobs.topk(num_top)
    return TokenLogprob(
        token, float(logprobs[token]), tuple(zip(tokens.tolist(), values.tolist(), strict=True))
    )


def _biased(logits: Tensor, sampling: SamplingParams) -> Tensor:
    if not sampling.logit_bias:
        return logits
    tokens = torch.tensor(list(sampling.logit_bias), device=logits.device)
    biases = torch.tensor(list(sampling.logit_bias.values()), dtype=torch.float32, device=logits.device)
    return logits.index_add(0, tokens, biases)


def _penalised(scores: Tensor, sampling: SamplingParams, history: History) -> Tensor:
    """Repetition as in CTRL (arXiv 1909.05858), presence and frequency as in OpenAI's API."""
    if sampling.repetition_penalty != 1.0:
        penalty = sampling.repetition_penalty
        damped = torch.where(scores > 0, scores / penalty, scores * penalty)
        scores = torch.where(history.seen, damped, scores)
    scores = scores - sampling.frequency_penalty * history.counts
    return scores - sampling.presence_penalty * (history.counts > 0)


def _truncated(scores: Tensor, sampling: SamplingParams) -> Tensor:
    """-inf for tokens outside min-p, then top-k, then top-p; of equals, the lower token id stays."""
    if sampling.min_p > 0:
        probabilities = scores.softmax(-1)
        scores = scores.masked_fill(probabilities < sampling.min_p * probabilities.max(), -torch.inf)
    if not (0 < sampling.top_k < len(scores)) and sampling.top_p >= 1:
        return scores
    ordered, tokens = scores.sort(descending=True, stable=True)
    if sampling.top_k > 0:
        ordered[sampling.top_k :] = -torch.inf
    if sampling.top_p < 1:
        shares = (ordered.softmax(-1).double() * PROBABILITY_UNIT).long()
        before = shares.cumsum(0) - shares
        ordered[(before >= max(int(sampling.top_p * PROBABILITY_UNIT), 1)).nonzero()] = -torch.inf
    return torch.full_like(scores, -torch.inf).scatter(0, tokens, ordered)
