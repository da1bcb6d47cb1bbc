"""The Triton kernel of `kit.fused_adapter`; apart, because importing Triton needs a GPU build."""

import triton
import triton.language as tl


@triton.jit
def expand_kernel(
    both, b, indices, y, tokens,
    OUTPUTS: tl.constexpr, RANK: tl.constexpr, PARTS: tl.constexpr, END_0: tl.constexpr, END_1: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """A block of y: its rows of both[:, :OUTPUTS], plus those rows' low-rank values times B^T."""
    row = tl.program_id(1).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    first = tl.program_id(0) * COLUMNS
    column = first + tl.arange(0, COLUMNS)
    inner = tl.arange(0, RANK)
    part = (first >= END_0).to(tl.int32) + (first >= END_1).to(tl.int32)  # a block lies in one part
    inside = row < tokens
    adapted = inside & (tl.load(indices + row, mask=inside, other=-1) >= 0)
    line = row[:, None] * (OUTPUTS + PARTS * RANK)
    weights = tl.load(b + column[None, :] * RANK + inner[:, None])
    low = tl.load(both + line + OUTPUTS + part * RANK + inner[None, :], mask=adapted[:, None], other=0.0)
    base = tl.load(both + line + column[None, :], mask=inside[:, None], other=0.0)
    added = base.to(tl.float32) + tl.dot(low, weights, input_precision="ieee")
    tl.store(y + row[:, None] * OUTPUTS + column[None, :], added.to(y.dtype.element_ty), mask=inside[:, None])
