"""The contract of a model family: what it is, what it owns, and what it computes.

A family holds no optimizer, no loop, no noise draw and writes no file. Adding one means one file with one class and one
line in the registry.

Shapes: B batch, C channels, H W pixels, h w latent cells, L tokens, D width.
"""

from __future__ import annotations

import fnmatch
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import torch
from torch import Tensor, nn

from ..errors import SettingsError
from ..noise import Diffusion, Flow
from ..state import LatentState

if TYPE_CHECKING:
    from .sources import LocatedBase

# One prompt's conditioning: named tensors without a batch axis, at their natural length.
Conditioning = Mapping[str, Tensor]


@dataclass(frozen=True)
class FamilySpec:
    """What a family is, as plain data."""

    id: str
    title: str
    pipeline_class: str  # name in diffusers
    denoiser: str  # component name: "unet" or "transformer"
    text_encoders: tuple[str, ...]  # component names, in order
    tokenizers: tuple[str, ...]
    objective: Literal["diffusion", "flow"]
    native_resolution: int  # px, used where the base's own files do not say
    latent_sampling: Literal["sample", "mode"]  # caches depend on it
    block_lists: tuple[str, ...]  # attributes of the denoiser that hold its blocks
    lora_targets: Mapping[str, tuple[str, ...]]  # preset -> suffixes inside the block lists
    preview_steps: int
    preview_guidance: float
    default_formats: tuple[str, ...]
    latent_space_version: int = 1  # bump by hand whenever encode_media changes
    text_space_version: int = 1  # bump by hand whenever encode_text changes
    single_file: bool = False
    dead_parameters: tuple[str, ...] = ()  # patterns of adapter parameters that never get a gradient, by design


@dataclass(frozen=True)
class BaseNames:
    """What the two metadata conventions call a base: modelspec's architecture and implementation, kohya's version.

    `prediction_type` is "epsilon", "v", or empty for flow matching.
    """

    architecture: str
    base_version: str
    implementation: str = "diffusers"
    prediction_type: str = ""


@dataclass
class Parts:
    """Loaded components of a base by their diffusers names; a component that was not asked for is absent."""

    located: LocatedBase
    components: dict[str, Any] = field(default_factory=dict)

    def __getitem__(self, name: str) -> Any:
        if name not in self.components:
            raise KeyError(f"component '{name}' was not loaded; loaded are {sorted(self.components)}")
        return self.components[name]

    def __contains__(self, name: object) -> bool:
        return name in self.components


@dataclass(frozen=True)
class Extras:
    """What a forward may need besides the noisy state and the text."""

    guidance: float = 1.0


class Family(ABC):
    """See the module's docstring. Methods are pure functions of tensors and loaded parts."""

    spec: ClassVar[FamilySpec]

    # --- latents ---------------------------------------------------------------------------------------------------

    def media_components(self) -> tuple[str, ...]:
        return ("vae",)

    def vae_factor(self, vae_config: Mapping[str, Any]) -> int:
        """Pixels per latent cell along one side."""
        return int(2 ** (len(vae_config["block_out_channels"]) - 1))

    @abstractmethod
    def pixel_multiple(self, located: LocatedBase) -> int:
        """Sides of pictures must be multiples of this many px: VAE factor times what the denoiser folds."""

    def resolution(self, located: LocatedBase) -> int:
        """Side in px of the square that the base is made for."""
        return int(located.defaults.get("resolution", self.spec.native_resolution))

    def encode_media(self, parts: Parts, pixels: Tensor, generators: Sequence[torch.Generator]) -> Tensor:
        """pixels (B,3,H,W) in [-1,1] -> normalised latents (B,C,h,w) float32; one CPU generator per picture."""
        vae = parts["vae"]
        with torch.no_grad():
            distribution = vae.encode(pixels.to(vae.device, vae.dtype)).latent_dist
            latents = distribution.mean.float()
            if self.spec.latent_sampling == "sample":
                noise = torch.stack([torch.randn(latents.shape[1:], generator=g) for g in generators])
                latents = latents + distribution.std.float() * noise.to(latents.device)
        return self.normalise(latents, vae.config)

    def decode_media(self, parts: Parts, latents: Tensor) -> Tensor:
        """Inverse of encode_media: normalised latents -> pixels (B,3,H,W) in about [-1,1], float32."""
        vae = parts["vae"]
        with torch.no_grad():
            return vae.decode(self.denormalise(latents, vae.config).to(vae.device, vae.dtype)).sample.float()

    def normalise(self, latents: Tensor, config: Any) -> Tensor:
        """VAE output -> the space the denoiser is trained in."""
        return (latents - (config.get("shift_factor") or 0.0)) * config["scaling_factor"]

    def denormalise(self, latents: Tensor, config: Any) -> Tensor:
        return latents / config["scaling_factor"] + (config.get("shift_factor") or 0.0)

    # --- text --------------------------------------------------------------------------------------------------------

    def text_components(self) -> tuple[str, ...]:
        return self.spec.text_encoders + self.spec.tokenizers

    @abstractmethod
    def encode_text(self, parts: Parts, prompts: Sequence[str], *, grad: bool = False) -> list[Conditioning]:
        """One Conditioning per prompt. With grad, the graph reaches the text encoders' weights."""

    @abstractmethod
    def count_tokens(self, parts: Parts, prompt: str) -> tuple[int, int]:
        """(tokens the prompt has, tokens the base reads), for the encoder that reads most."""

    def collate(self, conditioning: Sequence[Conditioning], device: torch.device) -> dict[str, Tensor]:
        """Conditioning of several prompts -> batched tensors. The only place that pads; this needs equal lengths."""
        return {key: torch.stack([c[key] for c in conditioning]).to(device) for key in conditioning[0]}

    # --- denoising ---------------------------------------------------------------------------------------------------

    @abstractmethod
    def parameterisation(self, scheduler_config: Mapping[str, Any]) -> Diffusion | Flow:
        """What the base predicts, from its scheduler's own configuration."""

    def embeds_guidance(self, located: LocatedBase) -> bool:
        """Whether the base is fed a guidance value, as FLUX.1-dev is."""
        return False

    def image_tokens(self, latent_size: tuple[int, int]) -> int:
        """Number of tokens of a picture, for resolution-dependent shifts."""
        return latent_size[0] * latent_size[1]

    @abstractmethod
    def model_time(self, parameterisation: Diffusion | Flow, level: Tensor) -> Tensor:
        """Levels (B,) -> what the denoiser is fed as time (B,)."""

    @abstractmethod
    def forward(
        self,
        denoiser: nn.Module,
        noisy: LatentState,
        model_time: Tensor,
        conditioning: Mapping[str, Tensor],
        extras: Extras,
    ) -> LatentState:
        """Prediction in latent space, in the parameterisation's sign. Packs and unpacks as the denoiser wants it."""

    # --- adapters and blocks -----------------------------------------------------------------------------------------

    def blocks(self, denoiser: nn.Module) -> dict[str, nn.Module]:
        """The denoiser's block lists by attribute name."""
        return {name: getattr(denoiser, name) for name in self.spec.block_lists}

    def lora_modules(self, denoiser: nn.Module, targets: str | Sequence[str]) -> list[str]:
        """A preset or patterns -> explicit names of layers that get an adapter.

        Suffixes alone would over-match (FLUX.1's final `proj_out`), so only linear and convolution layers inside the
        block lists count. Raises SettingsError when a pattern finds nothing.
        """
        kinds = (nn.Linear, nn.Conv2d)
        layers = [name for name, module in denoiser.named_modules() if isinstance(module, kinds)]
        if isinstance(targets, str):
            suffixes = self.spec.lora_targets[targets]
            prefixes = tuple(f"{name}." for name in self.spec.block_lists)
            return [n for n in layers if n.startswith(prefixes) and n.endswith(tuple(f".{s}" for s in suffixes))]
        if not targets:
            raise SettingsError("method.targets: the list is empty, nothing would train", "name a preset or patterns")
        chosen: list[str] = []
        for pattern in targets:
            found = [n for n in layers if fnmatch.fnmatchcase(n, pattern) or fnmatch.fnmatchcase(n, f"*.{pattern}")]
            if not found:
                raise SettingsError(
                    f"method.targets: no layer of {self.spec.title} matches '{pattern}'",
                    f"layers look like {', '.join(layers[len(layers) // 2 :][:3])}",
                )
            chosen += found
        return sorted(set(chosen), key=layers.index)

    @abstractmethod
    def base_names(self, located: LocatedBase) -> BaseNames:
        """What exported files call this base, so that other programs offer the LoRA for the right one."""

    # --- pictures ----------------------------------------------------------------------------------------------------

    def pipeline(self, parts: Parts) -> Any:
        """The unmodified diffusers pipeline around the loaded parts; missing parts are None."""
        import diffusers

        cls = getattr(diffusers, self.spec.pipeline_class)
        names = (*self.spec.text_encoders, *self.spec.tokenizers, "vae", self.spec.denoiser, "scheduler")
        optional = self.optional_pipeline_arguments()
        return cls(**{name: parts.components.get(name) for name in names}, **optional)

    def optional_pipeline_arguments(self) -> dict[str, Any]:
        return {}

    def preview_defaults(self, located: LocatedBase) -> tuple[int, float]:
        """(sampler steps, guidance scale) that suit the base."""
        own = located.defaults.get("preview", {})
        steps = int(own.get("steps", self.spec.preview_steps))
        return steps, float(own.get("guidance_scale", self.spec.preview_guidance))

    def sampled_latents(self, latents: Tensor, size: tuple[int, int], vae_config: Any) -> Tensor:
        """What the pipeline returns as latents for pictures of `size` (height, width) px -> (B,C,h,w)."""
        return latents

    @abstractmethod
    def sampler_arguments(
        self,
        denoiser: nn.Module,
        positive: Sequence[Conditioning],
        negative: Sequence[Conditioning],
        guidance_scale: float,
        device: torch.device,
    ) -> dict[str, Any]:
        """Arguments of the pipeline's call that carry the text and the guidance."""
