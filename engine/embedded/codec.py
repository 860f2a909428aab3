"""The embedded base's image codec: a four-fold AutoencoderKL and its training.

Shape letters: B batch, C channels, H W pixels, h w latent cells (H / 4, W / 4). Images are float32 in [-1, 1].
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import torch
from diffusers import AutoencoderKL
from torch import Tensor, nn

from engine.embedded.scenes import EXTRA_SHAPES, SHAPES, SIZES, Scene, draw, sample_scenes

_CHANNELS = (16, 24, 32)
_LATENT_CHANNELS = 4
# The constant carried beside the colours. It dominates every group norm, which otherwise removes the level of flat
# pictures: with ordinary initialisation training sat on the mean colour for a hundred steps.
_CARRIED_LEVEL = 4.0
_LOG_VARIANCE = -12.0  # of a latent with unit variance: the posterior is nearly a point
_CARRIED = 8  # +rgb, -rgb, +level, -level


def new_codec() -> AutoencoderKL:
    """An untrained codec that already reproduces the average colour of each latent cell."""
    codec = AutoencoderKL(
        down_block_types=("DownEncoderBlock2D",) * 3,
        up_block_types=("UpDecoderBlock2D",) * 3,
        block_out_channels=_CHANNELS,
        layers_per_block=1,
        latent_channels=_LATENT_CHANNELS,
        norm_num_groups=1,
        mid_block_add_attention=False,
        sample_size=48,
        scaling_factor=1.0,
        shift_factor=0.0,
    )
    _carry_colours(codec)
    return codec


@torch.no_grad()
def _carry_colours(codec: AutoencoderKL) -> None:
    """Identity initialisation. silu(x) - silu(-x) = x, so an output conv can undo the activation before it."""
    for name, module in codec.named_modules():
        if name.endswith("conv2"):  # each residual branch starts silent
            nn.init.zeros_(module.weight)
            nn.init.zeros_(module.bias)
        elif name.endswith(("conv_shortcut", "downsamplers.0.conv", "upsamplers.0.conv")):
            module.weight[:_CARRIED] = 0.0
            module.bias[:_CARRIED] = 0.0
            for channel in range(_CARRIED):
                if "downsamplers" in name:
                    module.weight[channel, channel, :2, :2] = 0.25
                else:
                    centre = module.kernel_size[0] // 2
                    module.weight[channel, channel, centre, centre] = 1.0
    for stem, part, width in (
        (codec.encoder.conv_in, codec.encoder, _CHANNELS[-1]),
        (codec.decoder.conv_in, codec.decoder, _CHANNELS[0]),
    ):
        stem.weight[:_CARRIED] = 0.0
        stem.bias[:_CARRIED] = 0.0
        for channel in range(3):
            stem.weight[channel, channel, 1, 1] = 1.0
            stem.weight[channel + 3, channel, 1, 1] = -1.0
        stem.bias[6], stem.bias[7] = _CARRIED_LEVEL, -_CARRIED_LEVEL
        deviation = (2 * _CARRIED_LEVEL**2 / width) ** 0.5  # what the last group norm divides by
        part.conv_out.weight.mul_(0.1)
        nn.init.zeros_(part.conv_out.bias)
        part.conv_out.weight[:3] = 0.0
        for channel in range(3):
            part.conv_out.weight[channel, channel, 1, 1] = deviation
            part.conv_out.weight[channel, channel + 3, 1, 1] = -deviation
    codec.encoder.conv_out.weight[_LATENT_CHANNELS:] = 0.0
    codec.encoder.conv_out.bias[_LATENT_CHANNELS:] = _LOG_VARIANCE
    for conv in (codec.quant_conv, codec.post_quant_conv):
        nn.init.dirac_(conv.weight)
        nn.init.zeros_(conv.bias)


def codec_scenes(seed: int, count: int) -> list[Scene]:
    """Everything a codec should keep: all pairs, all shapes, all styles, more gradients and pairs of objects."""
    return sample_scenes(
        seed,
        count,
        pairs="all",
        shapes=SHAPES + EXTRA_SHAPES,
        styles=("filled", "filled", "outline", "checker"),
        two_objects=0.2,
        gradients=0.25,
    )


def image_batch(scenes: list[Scene], size: tuple[int, int], seed: int) -> Tensor:
    """Drawn scenes as (B, 3, H, W), float32 in [-1, 1]."""
    arrays = [np.asarray(draw(scene, size, seed=seed + index)) for index, scene in enumerate(scenes)]
    return torch.from_numpy(np.stack(arrays)).permute(0, 3, 1, 2).float() / 127.5 - 1.0


def psnr(codec: AutoencoderKL, *, seed: int = 10_007, count: int = 96) -> float:
    """Encode-decode fidelity on fresh scenes, in dB of the mean squared error over all pictures (peak 2)."""
    errors = []
    scenes = codec_scenes(seed, count)
    with torch.no_grad():
        for index, size in enumerate(SIZES):
            images = image_batch(scenes[index :: len(SIZES)], size, seed)
            decoded = codec.decode(codec.encode(images).latent_dist.mode()).sample.clamp(-1, 1)
            errors.append((decoded - images).square().mean())
    return float(10 * torch.log10(4.0 / torch.stack(errors).mean()))


def train_codec(
    *,
    steps: int,
    seed: int,
    learning_rate: float = 3e-3,
    batch_size: int = 16,
    decoder_only_from: float = 0.75,
    log: Callable[[str], None] = print,
    save: Callable[[AutoencoderKL], None] | None = None,
) -> AutoencoderKL:
    """Train a codec on procedural scenes and normalise its latents.

    ``decoder_only_from`` is the share of the steps after which the encoder is frozen. ``save`` is called every 200
    steps with a normalised copy.
    """
    torch.manual_seed(seed)
    codec = new_codec()
    rng = random.Random(seed)
    optimizer = torch.optim.AdamW(codec.parameters(), lr=learning_rate, betas=(0.9, 0.98), weight_decay=1e-3)
    start = time.process_time()
    for step in range(steps):
        progress = step / steps
        for group in optimizer.param_groups:
            group["lr"] = learning_rate * min(1.0, (step + 1) / 30, 0.02 + 1.6 * (1 - progress))
        if progress >= decoder_only_from:
            codec.encoder.requires_grad_(False)
            codec.quant_conv.requires_grad_(False)
        size = SIZES[step % len(SIZES)]
        scenes = [
            replace(scene, style="outline") if rng.random() < 0.1 else scene
            for scene in codec_scenes(rng.getrandbits(30), batch_size)
        ]
        images = image_batch(scenes, size, rng.getrandbits(30))
        latents = codec.encode(images).latent_dist.mean
        # A little noise keeps neighbouring latents decodable, since a denoiser never lands exactly.
        decoded = codec.decode(latents + 0.05 * torch.randn_like(latents)).sample
        error = decoded - images
        loss = error.square().mean() + 0.1 * error.abs().mean()
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        nn.utils.clip_grad_norm_(codec.parameters(), 1.0)
        optimizer.step()
        if step % 50 == 0 or step == steps - 1:
            seconds = time.process_time() - start
            log(f"codec step {step} loss {loss.item():.4f} mse {error.square().mean().item():.4f} cpu {seconds:.0f}s")
        if step % 200 == 199 or step == steps - 1:
            codec.eval()
            log(f"codec step {step} psnr {psnr(codec):.2f} dB")
            if save is not None:
                copy = new_codec()
                copy.load_state_dict(codec.state_dict())
                normalise_latents(copy.eval(), seed=seed)
                save(copy)
            codec.train()
    codec.requires_grad_(True).eval()
    normalise_latents(codec, seed=seed)
    return codec


@torch.no_grad()
def normalise_latents(codec: AutoencoderKL, *, seed: int) -> None:
    """Fold each channel's mean and deviation into the 1x1 convs, so that scaling factor 1 and shift 0 are right."""
    flat = []
    scenes = codec_scenes(seed + 1, 200)
    for index, size in enumerate(SIZES):
        latents = codec.encode(image_batch(scenes[index :: len(SIZES)], size, seed)).latent_dist.mean
        flat.append(latents.transpose(0, 1).flatten(1))
    values = torch.cat(flat, dim=1)
    mean, deviation = values.mean(1), values.std(1)
    quant, post = codec.quant_conv, codec.post_quant_conv
    post.bias.add_(torch.einsum("oi,i->o", post.weight[:, :, 0, 0], mean))
    post.weight.mul_(deviation[None, :, None, None])
    quant.weight[:_LATENT_CHANNELS].div_(deviation[:, None, None, None])
    quant.bias[:_LATENT_CHANNELS].sub_(mean).div_(deviation)
    # Training used the mean only and left the log variance to drift; a sampled latent must be as good as the mean.
    quant.weight[_LATENT_CHANNELS:] = 0.0
    quant.bias[_LATENT_CHANNELS:] = _LOG_VARIANCE
