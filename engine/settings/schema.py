"""Every setting there is.

A setting exists once, here: its type, bounds, default, unit and meaning. The forms, the command line, presets,
validation and the reference page are derived from these classes. Variants (method, optimizer, schedule, noise levels)
are discriminated unions on `type`, so that only fields that apply exist. Nothing here imports torch.
"""

from __future__ import annotations

from typing import Annotated, Final, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

SCHEMA_VERSION: Final = 1


class Section(BaseModel):
    """Frozen, and closed: an unknown key or a NaN is an error."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


# --- what is trained on top of what ------------------------------------------------------------------------------


class Base(Section):
    """The model that is taught."""

    source: str = Field(
        min_length=1,
        description="The base model: 'embedded/unet' or 'embedded/flow' (ship with the program), a folder in diffusers "
        "format, a single .safetensors checkpoint (UNet families), or a hub id such as 'owner/name'.",
    )
    revision: str | None = Field(None, description="Branch, tag or commit of a hub id. Unset takes the main branch.")
    variant: str | None = Field(None, description="File variant of a hub id, for instance 'fp16'.")
    family: str | None = Field(
        None, description="Family of the base, for instance 'sd15'. Unset reads it from the model's own index."
    )
    dtype: Literal["auto", "fp32", "bf16", "fp16"] = Field(
        "auto",
        description="Number format of the frozen base weights. 'auto' uses the training precision on an accelerator, "
        "fp32 on a CPU. Half formats need half the memory.",
    )


class Dataset(Section):
    """The pictures and their captions."""

    folder: str = Field(
        min_length=1, description="Folder with images; 'photo.jpg' takes its caption from 'photo.txt' beside it."
    )
    recursive: bool = Field(True, description="Also take images in sub-folders.")
    repeats: int = Field(1, ge=1, le=1000, description="How often each image is seen in one epoch.")
    folder_repeats: dict[str, Annotated[int, Field(ge=1, le=1000)]] = Field(
        default_factory=dict, description="Repeats for single sub-folders, by their name; others keep 'repeats'."
    )
    missing_captions: Literal["error", "empty", "file_name"] = Field(
        "error",
        description="An image without a caption: refuse to start, use an empty caption, or use its file name.",
    )
    bad_images: Literal["error", "skip"] = Field(
        "error",
        description="An image that cannot be used: refuse to start, or leave it out and list it in the run's report.",
    )
    background: str = Field(
        "#ffffff",
        pattern=r"^#[0-9a-fA-F]{6}$",
        description="Colour that shows through transparent pixels, as #rrggbb.",
    )
    masks: Literal["none", "file", "alpha"] = Field(
        "none",
        description="Where the loss counts: everywhere, by 'photo.mask.png' beside the image (white counts fully, "
        "black not at all), or by the image's own transparency.",
    )
    flip: bool = Field(
        False, description="Also train every image mirrored left to right. Doubles the cache; wrong for text and faces."
    )


class Captions(Section):
    """How captions are used."""

    trigger: str = Field("", max_length=200, description="Words put in front of every caption, followed by a comma.")
    dropout: float = Field(
        0.05,
        ge=0.0,
        le=1.0,
        description="Share of captions replaced by the empty caption, so that guidance keeps working.",
    )


class Buckets(Section):
    """Sizes that images are resized and cropped to."""

    resolutions: tuple[Annotated[int, Field(ge=16, le=4096)], ...] = Field(
        (),
        description="Side in px of a square with the area of a bucket; several values train every image at each. "
        "Empty takes the base's own resolution.",
    )
    step: int | None = Field(
        None,
        ge=8,
        le=256,
        description="Bucket sides are multiples of this many px. Unset takes the smallest the base allows, at least "
        "64 for bases of 512 px and more.",
    )
    max_aspect: float = Field(
        2.0, ge=1.0, le=8.0, description="Longest side divided by shortest side of a bucket, at most."
    )
    upscale: bool = Field(
        True, description="Enlarge images that are smaller than their bucket. Off gives them a smaller bucket instead."
    )
    min_side: int = Field(16, ge=8, le=4096, description="Shortest side in px an image may have; smaller is a problem.")


# --- what becomes trainable -------------------------------------------------------------------------------------


class Lora(Section):
    """Low-rank adapters beside frozen weights (Hu et al. 2021, arXiv:2106.09685)."""

    type: Literal["lora"] = "lora"
    rank: int = Field(
        16, ge=1, le=1024, description="Width of the adapter. More can learn more and makes a larger file."
    )
    alpha: float | None = Field(
        None, gt=0.0, le=4096.0, description="Adapter strength is alpha / rank. Unset means alpha = rank, strength 1."
    )
    dropout: float = Field(0.0, ge=0.0, lt=1.0, description="Share of adapter inputs zeroed at each step.")
    rank_stabilised: bool = Field(
        False, description="Strength alpha / sqrt(rank) instead of alpha / rank (arXiv:2312.03732)."
    )
    dora: bool = Field(
        False,
        description="Also train the weight magnitudes (DoRA, arXiv:2402.09353). Slower; few other programs read it.",
    )
    targets: Literal["attention", "attention+feed_forward", "all"] | tuple[str, ...] = Field(
        "attention+feed_forward",
        description="Which layers get adapters: a preset, or a list of patterns such as 'down_blocks.*.to_q'.",
    )
    text_encoder: bool = Field(
        False, description="Also adapt the first text encoder. Turns the text cache off and costs time and memory."
    )

    @property
    def effective_alpha(self) -> float:
        return float(self.rank) if self.alpha is None else self.alpha


class Full(Section):
    """All weights of the denoiser."""

    type: Literal["full"] = "full"


Method = Annotated[Lora | Full, Field(discriminator="type")]


# --- the objective -----------------------------------------------------------------------------------------------


class AutoLevels(Section):
    """The family's usual distribution of noise levels."""

    type: Literal["auto"] = "auto"


class UniformLevels(Section):
    """Every noise level equally often."""

    type: Literal["uniform"] = "uniform"


class LogitNormalLevels(Section):
    """sigmoid of a normal variable: middle levels more often (Esser et al. 2024, arXiv:2403.03206, section 3.1)."""

    type: Literal["logit_normal"] = "logit_normal"
    mean: float = Field(0.0, ge=-5.0, le=5.0, description="Mean before the sigmoid; positive favours high noise.")
    std: float = Field(1.0, gt=0.0, le=5.0, description="Standard deviation before the sigmoid.")


NoiseLevels = Annotated[AutoLevels | UniformLevels | LogitNormalLevels, Field(discriminator="type")]


class Denoise(Section):
    """Ordinary training: predict the noise, the velocity or the flow that the base predicts."""

    type: Literal["denoise"] = "denoise"
    levels: NoiseLevels = Field(default_factory=AutoLevels, description="How noise levels are drawn.")
    shift: Literal["auto", "none", "resolution"] | Annotated[float, Field(ge=0.05, le=100.0)] = Field(
        "auto",
        description="Moves noise levels u to s*u / (1 + (s-1)*u). A number is s; 'resolution' grows s with the picture "
        "size, as the base's scheduler says; 'auto' does what the base's scheduler is configured for.",
    )
    min_snr_gamma: float | None = Field(
        None,
        gt=0.0,
        le=100.0,
        description="Limits the weight of easy, nearly noiseless steps (min-SNR, arXiv:2303.09556; 5 is usual). For "
        "epsilon and v bases only.",
    )
    noise_offset: float = Field(
        0.0,
        ge=0.0,
        le=1.0,
        description="Adds one random value per channel to the noise, which helps very dark and very bright pictures.",
    )
    loss: Literal["mse", "huber"] = Field("mse", description="Squared error, or Huber, which outliers move less.")
    huber_delta: float = Field(0.1, gt=0.0, le=10.0, description="Where Huber turns from squared to linear.")
    guidance: float = Field(
        1.0, ge=0.0, le=30.0, description="Guidance value fed while training to bases that embed it (FLUX.1-dev)."
    )


Objective = Denoise  # becomes a union on `type` when the second objective arrives


# --- optimizers ----------------------------------------------------------------------------------------------------

LearningRate = Annotated[float, Field(gt=0.0, le=10.0, description="Learning rate.")]
WeightDecay = Annotated[float, Field(ge=0.0, le=10.0, description="Pull of the trained weights towards zero.")]
Beta = Annotated[float, Field(ge=0.0, lt=1.0)]


class AdamW(Section):
    """AdamW (Loshchilov & Hutter 2019, arXiv:1711.05101), from torch, or with 8-bit state from bitsandbytes."""

    type: Literal["adamw"] = "adamw"
    lr: LearningRate = 1e-4
    betas: tuple[Beta, Beta] = Field((0.9, 0.999), description="Memory of the mean and of the square of the gradient.")
    eps: float = Field(1e-8, gt=0.0, le=1.0, description="Keeps the division away from zero.")
    weight_decay: WeightDecay = 0.01
    bits: Literal[8, 32] = Field(32, description="Bits of the optimizer state; 8 needs CUDA and the cuda8bit extra.")


class Adafactor(Section):
    """Adafactor (Shazeer & Stern 2018, arXiv:1804.04235), from torch: little optimizer memory."""

    type: Literal["adafactor"] = "adafactor"
    lr: LearningRate = 1e-3
    weight_decay: WeightDecay = 0.0


class Prodigy(Section):
    """Prodigy (Mishchenko & Defazio 2023, arXiv:2306.06101): finds the learning rate itself; keep lr at 1."""

    type: Literal["prodigy"] = "prodigy"
    lr: LearningRate = 1.0
    betas: tuple[Beta, Beta] = Field((0.9, 0.99), description="Memory of the mean and of the square of the gradient.")
    weight_decay: WeightDecay = 0.01
    d_coef: float = Field(1.0, gt=0.0, le=100.0, description="Multiplies the step size that Prodigy finds.")
    safeguard_warmup: bool = Field(True, description="Keeps warm-up from inflating the step size that Prodigy finds.")


class ScheduleFree(Section):
    """Schedule-free AdamW (Defazio et al. 2024, arXiv:2405.15682): needs no decay; use the constant schedule."""

    type: Literal["schedule_free"] = "schedule_free"
    lr: LearningRate = 1e-3
    betas: tuple[Beta, Beta] = Field((0.9, 0.999), description="Averaging weight and memory of the squared gradient.")
    weight_decay: WeightDecay = 0.0


class Lion(Section):
    """Lion (Chen et al. 2023, arXiv:2302.06675): sign updates; use about a tenth of AdamW's lr."""

    type: Literal["lion"] = "lion"
    lr: LearningRate = 1e-5
    betas: tuple[Beta, Beta] = Field((0.9, 0.99), description="Mix of the update and memory of the gradient.")
    weight_decay: WeightDecay = 0.1


Optimizer = Annotated[AdamW | Adafactor | Prodigy | ScheduleFree | Lion, Field(discriminator="type")]


# --- learning-rate schedules ------------------------------------------------------------------------------------------


class Schedule(Section):
    """How the learning rate moves over the run, as a factor on `optimizer.lr`."""

    warmup_steps: int | None = Field(
        None,
        ge=0,
        le=100_000,
        description="Steps over which the learning rate rises from near zero. Unset takes 5 % of the run, at most 100.",
    )


class Constant(Schedule):
    """Stays; may fall linearly to zero at the very end."""

    type: Literal["constant"] = "constant"
    cooldown_steps: int = Field(0, ge=0, le=1_000_000, description="Steps at the end over which it falls to zero.")


class Linear(Schedule):
    """Falls in a straight line."""

    type: Literal["linear"] = "linear"
    final: float = Field(0.0, ge=0.0, le=1.0, description="Factor reached at the end.")


class Cosine(Schedule):
    """Falls along half a cosine (Loshchilov & Hutter 2017, arXiv:1608.03983)."""

    type: Literal["cosine"] = "cosine"
    final: float = Field(0.0, ge=0.0, le=1.0, description="Factor reached at the end.")


class CosineRestarts(Schedule):
    """Falls along half a cosine, several times (SGDR, arXiv:1608.03983)."""

    type: Literal["cosine_restarts"] = "cosine_restarts"
    cycles: int = Field(3, ge=1, le=100, description="Number of falls.")
    final: float = Field(0.0, ge=0.0, le=1.0, description="Factor reached at the end of each fall.")


LearningRateSchedule = Annotated[Constant | Linear | Cosine | CosineRestarts, Field(discriminator="type")]


# --- the run ---------------------------------------------------------------------------------------------------------


class Train(Section):
    """Length, batches and numbers of the run."""

    steps: int | None = Field(
        None, ge=1, le=10_000_000, description="Optimizer steps. Give steps or epochs; 1500 if neither."
    )
    epochs: int | None = Field(None, ge=1, le=100_000, description="Passes over the data set, instead of steps.")
    batch_size: int = Field(1, ge=1, le=1024, description="Images a step looks at together. More needs more memory.")
    accumulation: int = Field(1, ge=1, le=1024, description="Batches whose gradients are added before one step.")
    seed: int = Field(0, ge=0, le=2**31 - 1, description="Start of every random draw; same seed, same run.")
    precision: Literal["auto", "fp32", "bf16", "fp16"] = Field(
        "auto",
        description="Number format of the computation. 'auto' is bf16 where the device has it, else fp16; fp32 on CPU.",
    )
    gradient_checkpointing: bool = Field(
        False, description="Compute activations twice: much less memory, a third slower."
    )
    max_grad_norm: float = Field(1.0, gt=0.0, le=1000.0, description="Longer gradients are shortened to this length.")
    ema_decay: float | None = Field(
        None,
        ge=0.0,
        lt=1.0,
        description="Also keep a slow average of the trained weights, which is exported and previewed; 0.999 is usual.",
    )
    encode_batch_size: int = Field(4, ge=1, le=256, description="Images encoded together while the cache is built.")
    device: Literal["auto", "cpu", "cuda", "mps"] = Field("auto", description="Where to compute.")

    @model_validator(mode="after")
    def _steps_or_epochs(self) -> Train:
        if self.steps is not None and self.epochs is not None:
            raise ValueError("give train.steps or train.epochs, not both")
        return self


class Samples(Section):
    """Pictures made during training, from a step-0 baseline on, always with the same seeds."""

    every: int = Field(250, ge=0, le=1_000_000, description="Steps between samples; 0 makes none at all.")
    prompts: tuple[Annotated[str, Field(max_length=10_000)], ...] = Field(
        (), max_length=64, description="What to draw. Empty takes the first two captions that differ, with the trigger."
    )
    negative_prompt: str = Field("", max_length=10_000, description="What guidance moves away from.")
    steps: int | None = Field(None, ge=1, le=1000, description="Sampler steps. Unset takes the base's usual number.")
    guidance_scale: float | None = Field(None, ge=0.0, le=50.0, description="Unset takes the base's usual value.")
    size: tuple[Annotated[int, Field(ge=16, le=4096)], Annotated[int, Field(ge=16, le=4096)]] | None = Field(
        None, description="Height and width in px. Unset takes a square of the base's own resolution."
    )
    seed: int = Field(0, ge=0, le=2**31 - 1, description="Seed of the first prompt's noise; the next prompts count up.")


class Checkpoints(Section):
    """What is saved so that nothing is lost."""

    every: int = Field(
        250, ge=1, le=1_000_000, description="Steps between checkpoints; pulling the plug costs at most these."
    )
    keep: int = Field(4, ge=1, le=10_000, description="The newest so many are kept; older ones are removed.")


class Export(Section):
    """Files for other programs."""

    formats: tuple[Literal["diffusers", "kohya"], ...] = Field(
        (), description="LoRA file formats. Empty takes what the family's users load most."
    )
    dtype: Literal["fp32", "fp16", "bf16"] = Field(
        "fp32", description="Number format of exported weights. fp16 halves the file and rounds the weights a little."
    )


class Settings(Section):
    """One training run, complete."""

    schema_version: Literal[1] = Field(SCHEMA_VERSION, description="Version of this file's layout.")
    name: str = Field(
        "",
        max_length=80,
        description="Name of the run's files. Empty makes one from the data set and the time.",
    )
    base: Base
    dataset: Dataset
    captions: Captions = Field(default_factory=Captions)
    buckets: Buckets = Field(default_factory=Buckets)
    method: Method = Field(default_factory=Lora)
    objective: Objective = Field(default_factory=Denoise)
    optimizer: Optimizer = Field(default_factory=AdamW)
    schedule: LearningRateSchedule = Field(default_factory=Constant)
    train: Train = Field(default_factory=Train)
    samples: Samples = Field(default_factory=Samples)
    checkpoints: Checkpoints = Field(default_factory=Checkpoints)
    export: Export = Field(default_factory=Export)
