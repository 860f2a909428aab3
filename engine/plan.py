"""What a run will do, decided before any weight is loaded: the base, the data, the buckets, the steps, the numbers.

Every refusal that can be made early is made here.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from . import optim
from .data.batches import Sampler, total_steps
from .data.buckets import BucketPlan
from .data.buckets import plan as plan_buckets
from .data.captions import expand
from .data.manifest import Manifest, require_usable, scan
from .errors import Problem, SettingsError
from .families.family import Family
from .families.loading import skeleton
from .families.registry import open_base
from .families.sources import LocatedBase
from .noise import Diffusion, Flow, LevelLaw, level_law
from .precision import DTYPES, pick_device, pick_precision
from .settings.schema import Full, Lora, Settings

MUCH_CUT_OFF = 0.5  # share of a picture's area; bases know shapes to about 2:1, and ordinary ones lose far less


@dataclass(frozen=True)
class BasePlan:
    """The base and how it is computed with."""

    family: Family
    located: LocatedBase
    parameterisation: Diffusion | Flow
    law: LevelLaw
    device: torch.device
    precision: str
    dtype: torch.dtype  # of the frozen denoiser weights


@dataclass(frozen=True)
class Plan:
    """A whole run. Sizes are (height, width) in px."""

    settings: Settings
    base: BasePlan
    manifest: Manifest
    buckets: BucketPlan
    sampler: Sampler
    total_steps: int
    preview_size: tuple[int, int]
    preview_steps: int
    preview_guidance: float
    prompts: tuple[str, ...]
    formats: tuple[str, ...]  # of the LoRA files at the end; none for a fully trained base

    def doubts(self) -> list[str]:
        """What had to be assumed, and what is allowed and probably not meant. A base may say which sizes it knows."""
        known = self.base.located.sizes
        used = {bucket.size for bucket in self.buckets.buckets} | {self.preview_size}
        odd = sorted(used - set(known)) if known else []
        doubts = list(self.base.located.notes)
        if odd:
            shown = ", ".join(f"{height}x{width}" for height, width in odd[:5])
            name = self.base.located.name
            doubts.append(f"{name} was never trained at {shown} px (height x width); pictures may be torn there")
        if self.settings.samples.negative_prompt and self.base.family.embeds_guidance(self.base.located):
            doubts.append(
                f"{self.base.located.name} is guided without a negative prompt; the samples take no notice of it"
            )
        cut = [placement for placement in self.buckets.placements if placement.crop_loss > MUCH_CUT_OFF]
        if cut:
            worst = max(cut, key=lambda placement: placement.crop_loss)
            doubts.append(
                f"{len(cut)} of {self.buckets.images} pictures lose more than {MUCH_CUT_OFF:.0%} of their area because "
                f"of their shape, {self.manifest.items[worst.item].name} {worst.crop_loss:.1%}; crop them yourself, or "
                "raise buckets.max_aspect"
            )
        return doubts

    def summary(self) -> dict[str, object]:
        """The effective values, for the event log and for people."""
        return {
            "base": self.base.located.name,
            "base_commit": self.base.located.commit,
            "family": self.base.family.spec.id,
            "device": str(self.base.device),
            "precision": self.base.precision,
            "images": len(self.manifest.items),
            "left_out": [str(problem) for problem in (*self.manifest.left_out, *self.buckets.left_out)],
            "notes": [*self.doubts(), *(str(note) for note in self.manifest.notes)],
            "buckets": {f"{h}x{w}": len(b.placements) for b in self.buckets.buckets for h, w in [b.size]},
            "images_per_epoch": self.sampler.images_per_epoch,
            "batches_per_epoch": self.sampler.batches_per_epoch,
            "steps_per_epoch": self.sampler.steps_per_epoch,
            "total_steps": self.total_steps,
            "warmup_steps": optim.warmup_steps(self.settings.schedule, self.total_steps),
        }


def plan_base(settings: Settings) -> BasePlan:
    """Open the base and resolve device, precision and the law of noise levels. Raises SettingsError, BaseModelError."""
    family, located = open_base(settings.base)
    device = pick_device(settings.train.device)
    precision = pick_precision(settings.train.precision, device)
    scheduler = scheduler_config(located)
    if settings.objective.min_snr_gamma is not None and family.spec.objective == "flow":
        raise SettingsError(
            f"objective.min_snr_gamma is for epsilon and v bases; {family.spec.title} is trained by flow matching",
            "leave it out",
        )
    if settings.objective.guidance != 1.0 and not family.embeds_guidance(located):
        raise SettingsError(
            f"objective.guidance is for bases that are fed a guidance value; {located.name} is not", "leave it out"
        )
    wanted: str = settings.base.dtype
    if wanted == "auto":
        wanted = "fp32" if device.type == "cpu" or isinstance(settings.method, Full) else precision
    if wanted != "fp32" and precision == "fp32":
        raise SettingsError(
            f"base.dtype: weights in {wanted} cannot be computed with in fp32",
            f"set train.precision = '{wanted}', or leave base.dtype at 'auto'",
        )
    return BasePlan(
        family=family,
        located=located,
        parameterisation=family.parameterisation(scheduler),
        law=level_law(settings.objective, flow=family.spec.objective == "flow", scheduler=scheduler),
        device=device,
        precision=precision,
        dtype=DTYPES[wanted],
    )


def scheduler_config(located: LocatedBase) -> dict[str, Any]:
    """The base's scheduler configuration."""
    return located.config("scheduler")


def plan_run(settings: Settings, *, world_size: int = 1, progress: Callable[[int, int], None] | None = None) -> Plan:
    """Check everything and decide everything. Raises SettingsError, DatasetError, BaseModelError with all findings."""
    base = plan_base(settings)
    family, located = base.family, base.located
    optim.require_available(settings.optimizer, settings.schedule, base.device)
    _require_targets(settings, family, located)
    formats = export_formats(settings, family)
    multiple = family.pixel_multiple(located)
    native = family.resolution(located)
    manifest = scan(settings.dataset, settings.buckets.min_side, progress)
    require_usable(manifest)
    batch_size = settings.train.batch_size
    buckets = plan_buckets(
        manifest.items, settings.buckets, native_resolution=native, multiple=multiple, batch_size=batch_size
    )
    sampler = Sampler(
        buckets,
        [item.repeats for item in manifest.items],
        batch_size=batch_size,
        accumulation=settings.train.accumulation,
        seed=settings.train.seed,
        flip=settings.dataset.flip,
        world_size=world_size,
    )
    steps, guidance = family.preview_defaults(located)
    size = settings.samples.size or (native // multiple * multiple,) * 2
    _require_multiple(size, multiple)
    return Plan(
        settings=settings,
        base=base,
        manifest=manifest,
        buckets=buckets,
        sampler=sampler,
        total_steps=total_steps(settings.train, sampler),
        preview_size=size,
        preview_steps=settings.samples.steps or steps,
        preview_guidance=guidance if settings.samples.guidance_scale is None else settings.samples.guidance_scale,
        prompts=settings.samples.prompts or _first_captions(manifest, settings.captions.trigger),
        formats=formats,
    )


def export_formats(settings: Settings, family: Family) -> tuple[str, ...]:
    """The file formats that a run ends with; none for a fully trained base, which is exported as a whole.

    Raises SettingsError for formats that cannot hold what is trained, which would come out after the last step only.
    """
    wanted = settings.export.formats
    if isinstance(settings.method, Full):
        if wanted:
            raise SettingsError(
                "export.formats is for LoRAs; a fully trained base is exported as a whole", "leave it out"
            )
        return ()
    if settings.method.dora:
        if "kohya" in wanted:
            raise SettingsError(
                "export.formats: the kohya format cannot carry DoRA for every reader",
                "leave 'kohya' out, or train with method.dora = false",
            )
        return ("diffusers",)
    return tuple(dict.fromkeys(wanted or family.spec.default_formats))


def _require_targets(settings: Settings, family: Family, located: LocatedBase) -> None:
    """Patterns must find layers."""
    method = settings.method
    if isinstance(method, Lora) and not isinstance(method.targets, str):
        family.lora_modules(skeleton(family, located), method.targets)


def _require_multiple(size: tuple[int, int], multiple: int) -> None:
    if size[0] % multiple or size[1] % multiple:
        near = tuple(max(multiple, round(side / multiple) * multiple) for side in size)
        raise SettingsError(
            f"samples.size: sides must be multiples of {multiple} for this base",
            f"the nearest is {near[0]} x {near[1]}",
            problems=[Problem("samples.size", f"got {size[0]} x {size[1]}")],
        )


def _first_captions(manifest: Manifest, trigger: str) -> tuple[str, ...]:
    """As they are trained: without the trigger words the pictures would not show what is learnt."""
    captions = (expand(item.caption, trigger) for item in manifest.items)
    return tuple(dict.fromkeys(caption for caption in captions if caption))[:2] or ("",)
