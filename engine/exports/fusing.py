"""Several low-rank layers as one, and one as several, with exactly the same change of the weights.

FLUX.1's original layers stack what diffusers keeps apart, for instance q, k and v. With W = [Wq; Wk; Wv], the change of
W is block-diagonal in the ups over the stacked downs: [Bq 0 0; 0 Bk 0; 0 0 Bv] @ [Aq; Ak; Av].

Shapes: r rank, n number of parts, in/out features. down (r, in), up (out, r).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..lora_weights import LoraLayer


def scaled(layer: LoraLayer, scale: float) -> LoraLayer:
    """The same change with `layer.scale == scale` and no rank stabilisation; the difference goes into one factor.

    It goes where it costs least: shrinking into the larger factor, growing into the smaller, so that half formats
    neither underflow nor overflow.
    """
    ratio = layer.scale / scale
    down, up = layer.down, layer.up
    if ratio != 1.0:
        down_is_larger = bool(down.abs().max() >= up.abs().max())
        if (ratio < 1.0) == down_is_larger:
            down = (down.float() * ratio).to(down.dtype)
        else:
            up = (up.float() * ratio).to(up.dtype)
    return LoraLayer(down, up, scale * layer.rank, False, layer.magnitude)


def fuse(layers: Sequence[LoraLayer | None], rows: Sequence[int]) -> LoraLayer:
    """Parts -> one layer of rank n * r, where r is the largest rank. A missing part is a block of zeros.

    `rows` are the output features of each part. The fused alpha is n times the parts' alpha, because readers divide by
    the fused rank, which is n times theirs.
    """
    present = [layer for layer in layers if layer is not None]
    rank = max(layer.rank for layer in present)
    scale = next((layer.scale for layer in present if layer.scale != 0.0), 1.0)
    device = present[0].down.device
    down = torch.zeros(len(layers) * rank, present[0].down.shape[1], device=device)
    up = torch.zeros(sum(rows), len(layers) * rank, device=device)
    first_row = 0
    for index, (layer, height) in enumerate(zip(layers, rows, strict=True)):
        if layer is not None:
            part = scaled(layer, scale)
            columns = slice(index * rank, index * rank + part.rank)
            down[columns] = part.down.float()
            up[first_row : first_row + height, columns] = part.up.float()
        first_row += height
    return LoraLayer(down, up, scale * rank * len(layers))


def split(layer: LoraLayer, rows: Sequence[int]) -> list[LoraLayer | None]:
    """One layer -> its parts; None for a part that `fuse` filled with zeros.

    A block-diagonal up gives parts of rank r / n; any other up gives parts of the full rank that share the down.
    """
    ups = torch.split(layer.up, list(rows), dim=0)
    parts = len(rows)
    if layer.rank % parts == 0 and _is_block_diagonal(ups, layer.rank // parts):
        rank = layer.rank // parts
        blocks = [slice(index * rank, (index + 1) * rank) for index in range(parts)]
        found = [
            LoraLayer(layer.down[block].clone(), up[:, block].clone(), layer.alpha / parts)
            for block, up in zip(blocks, ups, strict=True)
        ]
        return [part if bool(part.down.any()) or bool(part.up.any()) else None for part in found]
    return [LoraLayer(layer.down.clone(), up.clone(), layer.alpha) for up in ups]


def _is_block_diagonal(ups: Sequence[Tensor], rank: int) -> bool:
    for index, up in enumerate(ups):
        outside = torch.ones(up.shape[1], dtype=torch.bool, device=up.device)
        outside[index * rank : (index + 1) * rank] = False
        if bool(up[:, outside].any()):
            return False
    return True
