"""Gumbel noise as a hash of (seed, position, token): the same bits as the engine's choice on the host.

A request's key is the hash of its seed's two words (host, once), a position's key one more round (device),
and a token's noise two rounds from the position's key. Hash: lowbias32 (C. Wellons), 32 bits throughout.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_LOW32 = 0xFFFFFFFF


def _mix_word(x: int) -> int:
    x ^= x >> 16
    x = (x * 0x7FEB352D) & _LOW32
    x ^= x >> 15
    x = (x * 0x846CA68B) & _LOW32
    return x ^ (x >> 16)


def request_key(seed: int) -> int:
    """The 32-bit key of a request: what `SamplingTable.key` holds. `seed` in [0, 2^63)."""
    key = 0
    for word in (seed & _LOW32, seed >> 32):
        key = _mix_word((key * 31 + word + 0x9E3779B9) & _LOW32)
    return key


def gumbel_reference(key: int, position: int, vocab_size: int, device: torch.device) -> Tensor:
    """float32 [V] standard Gumbel noise of one position of the request with this key."""
    place = _mix_word((key * 31 + position + 0x9E3779B9) & _LOW32)
    tokens = torch.arange(vocab_size, dtype=torch.int64, device=device)
    bits = _mix_words(_mix_words((tokens * 0x9E3779B1 + place) & _LOW32) ^ place)
    return -torch.log(-torch.log((bits.double() + 0.5) / 2**32)).float()


def _mix_words(x: Tensor) -> Tensor:
    x = x ^ (x >> 16)
    x = (x * 0x7FEB352D) & _LOW32
    x = x ^ (x >> 15)
    x = (x * 0x846CA68B) & _LOW32
    return x ^ (x >> 16)


@triton.jit
def _mix(x):
    """uint32 -> uint32."""
    x = x ^ (x >> 16)
    x = x * 0x7FEB352D
    x = x ^ (x >> 15)
    x = x * 0x846CA68B
    return x ^ (x >> 16)


@triton.jit
def position_key(request_key, position):
    """uint32 key of a position from the request's key (any integer type, low 32 bits) and the position."""
    return _mix(request_key.to(tl.uint32) * 31 + position.to(tl.uint32) + 0x9E3779B9)


@triton.jit
def _token_bits(key, tokens):
    return _mix(_mix(tokens.to(tl.uint32) * 0x9E3779B1 + key) ^ key)


@triton.jit
def gumbel(key, tokens):
    """float32 -log(-log((bits + 0.5) / 2^32)) of token ids, from a position's uint32 key.

    The logs are float64: in float32, all of the largest noise would be rounded to the same few values.
    """
    uniform = (_token_bits(key, tokens).to(tl.float64) + 0.5) * (1.0 / 4294967296.0)
    return -(tl.log(-tl.log(uniform)).to(tl.float32))


@triton.jit
def gumbel_ceiling(key, tokens):
    """float32 bound on `gumbel`, at most 0.002 above it, without float64 (of which GPUs compute little).

    With v = 1 - uniform, -log(uniform) is v + v^2/2 + v^3/3 to within v^3/4 of itself, 6e-5 at v = 1/16;
    for larger v, float32 holds 1 - v well enough. A relative error there is an absolute one of the noise.
    """
    bits = _token_bits(key, tokens)
    rest = (0xFFFFFFFF - bits).to(tl.float32) * (1.0 / 4294967296.0) + (0.5 / 4294967296.0)
    uniform = bits.to(tl.float32) * (1.0 / 4294967296.0) + (0.5 / 4294967296.0)
    series = rest * (1.0 + rest * (0.5 + rest * 0.33333334))
    return 0.001 - tl.log(tl.where(rest < 0.0625, series, -tl.log(uniform)))
