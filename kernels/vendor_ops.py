"""The GPU's operations with the vendor's matrix products: a row may depend on how many there are."""

from __future__ import annotations

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from kernels.products import launch, start_early, wait_for_inputs
from kernels.rope import Place, run_rope_store
from kernels.triton_ops import TritonOps


@triton.jit
def _silu_mul_kernel(gate_up, out, N, BLOCK: tl.constexpr, PDL: tl.constexpr):
    """out[t] = silu(gate_up[t, :N]) * gate_up[t, N:], a block of one row a program."""
    start_early(PDL)
    wait_for_inputs(PDL)
    t = tl.program_id(0).to(tl.int64)
    n = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    gate = tl.load(gate_up + t * 2 * N + n, mask=n < N, other=0.0).to(tl.float32)
    up = tl.load(gate_up + t * 2 * N + N + n, mask=n < N, other=0.0).to(tl.float32)
    result = gate / (1.0 + tl.exp(-gate)) * up
    tl.store(out + t * N + n, result.to(out.dtype.element_ty), mask=n < N)


def run_silu_mul(gate_up: Tensor, pdl: bool) -> Tensor:
    """[T, 2 I] -> [T, I]. Raises `ValueError` where the rows are not contiguous."""
    rows, width = gate_up.shape
    if not gate_up.is_contiguous() or width % 2:
        raise ValueError(f"gate_up is {tuple(gate_up.shape)} with strides {gate_up.stride()}")
    out = torch.empty((rows, width // 2), dtype=gate_up.dtype, device=gate_up.device)
    if rows:
        grid = (rows, triton.cdiv(width // 2, 1024))
        _silu_mul_kernel[grid](gate_up, out, width // 2, BLOCK=1024, PDL=pdl, **launch(pdl))
    return out


class VendorOps(TritonOps):
    """See `dflash_engine.ops.Ops` for what each operation computes; not exact."""

    name = "vendor"

    def pack(self, weight: Tensor, norm: Tensor | None = None) -> Tensor:
        return weight.contiguous()

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        return F.linear(x, weight, bias)

    def qkv(
        self,
        residual: Tensor,
        norm: Tensor,
        eps: float,
        weight: Tensor,
        bias: Tensor | None,
        num_heads: int,
        norms: tuple[Tensor | None, Tensor | None],
        rope: tuple[Tensor, Tensor],
        positions: Tensor,
        slots: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
    ) -> Tensor:
        mixed = F.linear(self.rms_norm(residual, norm, eps), weight, bias)
        place = Place(rope, positions, slots, k_cache, v_cache)
        return run_rope_store(mixed, num_heads, norms, eps, place, self._pdl)

    def add_linear(
        self, residual: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, tap: Tensor | None = None
    ) -> None:
        torch.addmm(residual, x, weight.T, out=residual)
        if bias is not None:
            residual.add_(bias)
        if tap is not None:
            tap.copy_(residual)

    def gate_up(
        self, residual: Tensor, norm: Tensor, eps: float, weight: Tensor, bias: Tensor | None
    ) -> Tensor:
        return run_silu_mul(F.linear(self.rms_norm(residual, norm, eps), weight, bias), self._pdl)

    def context(
        self,
        features: Tensor,
        fc: Tensor,
        norm: Tensor,
        eps: float,
        kv: Tensor,
        bias: Tensor | None,
        k_norms: Tensor,
        rope: tuple[Tensor, Tensor],
        positions: Tensor,
        slots: Tensor,
        k_caches: Tensor,
        v_caches: Tensor,
    ) -> None:
        mixed = F.linear(self.rms_norm(F.linear(features, fc), norm, eps), kv, bias)
        place = Place(rope, positions, slots, k_caches, v_caches)
        run_rope_store(mixed, 0, (None, k_norms), eps, place, self._pdl)

    def logits(self, x: Tensor, norm: Tensor, eps: float, weight: Tensor) -> Tensor:
        return F.linear(self.rms_norm(x, norm, eps), weight).float()
