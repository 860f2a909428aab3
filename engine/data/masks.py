"""Where the loss counts: from a mask file or the image's transparency to weights on the latents."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from PIL import Image

from ..errors import DatasetError
from ..settings import schema
from .items import Item, Placement, Size
from .manifest import decode_item
from .pixels import ImageFault, crop, decode

if TYPE_CHECKING:
    from torch import Tensor


def load_mask(item: Item, placement: Placement, dataset: schema.Dataset, latent_size: Size) -> Tensor:
    """Loss weights of one sample, float32 (1, h, w) in [0, 1] with (h, w) = `latent_size`. Not mirrored.

    Resized and cropped as the image is, then averaged over the pixels of each latent. All ones without masks, and with
    `masks = "alpha"` for an image without transparency. Raises DatasetError naming the file.
    """
    import torch

    grey = _grey(item, dataset)
    if grey is None:
        return torch.ones((1, *latent_size), dtype=torch.float32)
    height, width = placement.resized
    # Not Lanczos: it overshoots at hard edges, and weights must stay between 0 and 1.
    resized = grey if grey.size == (width, height) else grey.resize((width, height), Image.Resampling.BILINEAR)
    pixels = torch.from_numpy(np.array(crop(resized, placement), dtype=np.float32)) / 255.0
    return torch.nn.functional.adaptive_avg_pool2d(pixels[None], latent_size)


def _grey(item: Item, dataset: schema.Dataset) -> Image.Image | None:
    """The mask in the image's size, mode L; None when the loss counts everywhere."""
    if dataset.masks == "alpha":
        return decode_item(item, dataset.background).alpha
    if dataset.masks == "none":
        return None
    if item.mask_path is None:
        raise DatasetError(f"{item.name} was scanned without masks", "scan the data set again")
    try:
        return decode(item.mask_path, "#000000").image.convert("L")
    except ImageFault as fault:
        raise DatasetError(f"the mask of {item.name} {fault.reason}", fault.remedy) from fault
