"""Pictures from a denoiser, through the base's own unmodified diffusers pipeline."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from .errors import PictureError
from .families.family import Conditioning, Family, Parts
from .precision import Precision, all_finite


@dataclass(frozen=True)
class Shot:
    """How a picture is made. size is (height, width) in px."""

    size: tuple[int, int]
    steps: int
    guidance_scale: float


def sample(
    family: Family,
    parts: Parts,
    positive: Sequence[Conditioning],
    negative: Conditioning,
    seeds: Sequence[int],
    shot: Shot,
    precision: Precision,
) -> list[Image.Image]:
    """One picture per conditioning. The denoiser, the VAE and the scheduler must be loaded.

    The noise comes from a CPU generator with the picture's seed, as `pipeline(generator=…)` takes it, so another
    program with the same seed gets the same picture. The global random state is left as it was. Raises PictureError
    for a picture that is not finite.
    """
    denoiser = parts[family.spec.denoiser]
    pipeline = family.pipeline(parts)
    pipeline.set_progress_bar_config(disable=True)
    device = next(denoiser.parameters()).device
    pictures = []
    with _quietly(denoiser), torch.no_grad():
        for conditioning, seed in zip(positive, seeds, strict=True):
            arguments = family.sampler_arguments(denoiser, [conditioning], [negative], shot.guidance_scale, device)
            with precision.autocast():
                latents = pipeline(
                    **arguments,
                    height=shot.size[0],
                    width=shot.size[1],
                    num_inference_steps=shot.steps,
                    generator=torch.Generator().manual_seed(seed),
                    output_type="latent",
                    return_dict=False,
                )[0]
            pictures.append(to_image(_decode(family, parts, latents, shot, device)))
    return pictures


def _decode(family: Family, parts: Parts, latents: Tensor, shot: Shot, device: torch.device) -> Tensor:
    """Pixels (3,H,W). The VAE visits the device only for this, and runs outside autocast: some overflow in fp16."""
    vae = parts["vae"]
    home = vae.device
    vae.to(device)
    try:
        return family.decode_media(parts, family.sampled_latents(latents, shot.size, vae.config))[0]
    finally:
        vae.to(home)


def to_image(pixels: Tensor) -> Image.Image:
    """(3,H,W) in about [-1,1] -> RGB picture, rounded as diffusers does. Raises PictureError for what is not finite."""
    if not all_finite([pixels]):
        raise PictureError(
            "the picture is not finite: it would be black",
            "lower the strength, the guidance or the learning rate, or compute in bf16 or fp32",
        )
    scaled = (pixels / 2 + 0.5).clamp(0, 1).permute(1, 2, 0).cpu().numpy()
    return Image.fromarray((scaled * 255).round().astype(np.uint8))


@contextlib.contextmanager
def _quietly(denoiser: torch.nn.Module) -> Iterator[None]:
    """Evaluation mode and the caller's random state, both put back afterwards."""
    was_training = denoiser.training
    state = torch.get_rng_state()
    denoiser.eval()
    try:
        yield
    finally:
        denoiser.train(was_training)
        torch.set_rng_state(state)
