"""Imports everything heavy that a run needs; see `training.train_in_process`."""

import diffusers
import transformers

for name in (
    "AutoencoderKL", "DDIMScheduler", "DDPMScheduler", "FlowMatchEulerDiscreteScheduler", "FluxPipeline",
    "FluxTransformer2DModel", "StableDiffusionPipeline", "UNet2DConditionModel",
):  # fmt: skip
    getattr(diffusers, name)
for name in ("CLIPTextModel", "CLIPTokenizer", "T5EncoderModel", "T5Tokenizer"):
    getattr(transformers, name)
