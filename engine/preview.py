"""Pictures from a run, a LoRA file or a base, as the base's own pipeline draws them."""

from __future__ import annotations

import contextlib
import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from PIL import Image
from PIL.PngImagePlugin import PngInfo

from . import runs, trained
from .errors import LoraFileError, SettingsError
from .exports.formats import read_lora, write_lora
from .exports.metadata import settings_from_metadata
from .exports.verification import load_into_pipeline
from .families.family import Parts
from .families.loading import load
from .lora_weights import LoraWeights
from .plan import BasePlan, plan_base
from .precision import Precision, use_threads
from .runs import RunFolder
from .sampling import Shot, sample
from .settings.schema import Base, Dataset, Settings
from .workspace import Workspace, clean_name, disk_errors, make_folder

ADAPTER = "preview"
GAP_PX = 4
MAX_SEED = 2**62  # room to count up in what torch takes
MAX_STEPS, MAX_SIDE = 1000, 4096  # as in the settings of a run's samples

logger = logging.getLogger(__name__)


class Previewer:
    """A base, kept loaded, with at most one LoRA on it. One instance draws any number of pictures."""

    def __init__(self, base: BasePlan) -> None:
        family = base.family
        use_threads(base.located.cpu_threads, base.device)
        self.base = base
        self.precision = Precision(base.precision, base.device)
        names = (family.spec.denoiser, *family.text_components(), *family.media_components(), "scheduler")
        self.parts: Parts = load(family, base.located, names, dtype=base.dtype, device=base.device)
        self._has_lora = False

    def load_lora(self, path: Path) -> None:
        """Put a LoRA file on the base. Raises LoraFileError when not every key of it is used."""
        report = load_into_pipeline(self.base.family.pipeline(self.parts), path, adapter_name=ADAPTER)
        if not report.complete:
            odd, what = (report.missing, "layers") if report.missing else (report.unread, "keys")
            raise LoraFileError(
                f"{path.name} does not fit {self.base.located.name}: {len(odd)} of its {what} are not "
                f"there, for instance {odd[0]}",
                "choose the base that it was trained on",
            )
        self._has_lora = True

    def load_denoiser(self, state: dict[str, torch.Tensor]) -> None:
        """Replace the denoiser's weights by fully trained ones."""
        trained.replace_parameters(self.parts[self.base.family.spec.denoiser], state)

    def warn_about_long(self, prompts: Sequence[str]) -> None:
        """Say which prompts the base does not read to their end."""
        for prompt in prompts:
            has, reads = self.base.family.count_tokens(self.parts, prompt)
            if has > reads:
                logger.warning("the base reads only %d of the %d tokens of '%s…'", reads, has, prompt[:60])

    def draw(
        self, prompts: Sequence[str], seeds: Sequence[int], shot: Shot, *, negative: str = "", strength: float = 1.0
    ) -> list[Image.Image]:
        """One picture for each prompt. Strength scales the LoRA; 0 draws the base as it is."""
        family = self.base.family
        if self._has_lora:
            family.pipeline(self.parts).set_adapters([ADAPTER], adapter_weights=[strength])
        conditioning = family.encode_text(self.parts, [*prompts, negative])
        return sample(family, self.parts, conditioning[:-1], conditioning[-1], seeds, shot, self.precision)


@dataclass(frozen=True)
class Source:
    """What pictures are made with: settings for the base, and adapter weights, a LoRA file, a denoiser, or nothing."""

    settings: Settings
    lora: LoraWeights | None = None
    file: Path | None = None
    denoiser: dict[str, torch.Tensor] | None = None
    prompts: tuple[str, ...] = ()  # that are drawn when none are given

    @property
    def has_lora(self) -> bool:
        return self.lora is not None or self.file is not None


def open_source(source: Path | RunFolder, base: str | None) -> Source:
    """A run's newest checkpoint, a LoRA file with the base it names, or a base folder alone."""
    if isinstance(source, RunFolder):
        found = trained.read(source)
        chosen = found.settings if base is None else _with_base(found.settings, base)
        drawn = dict.fromkeys(item.prompt for item in runs.status(source).samples)
        denoiser = dict(found.denoiser) if found.denoiser else None
        return Source(chosen, found.lora, denoiser=denoiser, prompts=chosen.samples.prompts or tuple(drawn))
    if source.is_dir():
        return Source(_bare_settings(str(source)))
    file = read_lora(source)
    return Source(_bare_settings(base or named_base(file.metadata, source)), file=source)


def named_base(metadata: dict[str, str], path: Path) -> str:
    """The base that a LoRA file says it was trained on. Raises SettingsError when it says none that can be opened."""
    settings = settings_from_metadata(metadata) if metadata.get("safelight.settings") else {}
    section = settings.get("base")
    named = section.get("source") if isinstance(section, dict) else None
    if not isinstance(named, str) or "/" not in named:
        raise SettingsError(f"{path.name} does not say which base it belongs to", "name it with --base")
    return named


def _bare_settings(base: str) -> Settings:
    return Settings(base=Base(source=base), dataset=Dataset(folder="."))


def _with_base(settings: Settings, base: str) -> Settings:
    return settings.model_copy(update={"base": Base(source=base)})


@dataclass(frozen=True)
class Request:
    """What to draw. Unset steps, guidance and size (height, width in px) are what suits the base."""

    prompts: tuple[str, ...] = ()
    negative_prompt: str = ""
    seed: int = 0  # of the first prompt; the next prompts count up
    steps: int | None = None
    guidance_scale: float | None = None
    size: tuple[int, int] | None = None
    strengths: tuple[float, ...] = (1.0,)


def preview(
    source: Path | RunFolder, request: Request, *, workspace: Workspace, out: Path, base: str | None = None
) -> list[Path]:
    """Draw every prompt at every strength, with the same seed at each, into PNG files that say how they were made.

    Several strengths also give one strip a prompt. Prompts default to the run's own. Returns the written files.
    Raises SettingsError for a request that cannot be drawn as it says, PictureError when a picture is not finite.
    """
    _check_numbers(request)
    opened = open_source(source, base)
    if not opened.has_lora and request.strengths != (1.0,):
        raise SettingsError("strengths are for LoRAs; there is none here to scale", "leave --strength and --sweep out")
    prompts = request.prompts or opened.prompts
    if not prompts:
        raise SettingsError("there is nothing to draw", "give --prompt")
    previewer = open_previewer(opened, workspace)
    previewer.warn_about_long(prompts)
    shot = shot_for(previewer.base, request.steps, request.guidance_scale, request.size)
    seeds = [request.seed + index for index in range(len(prompts))]
    common: dict[str, object] = {
        "base": previewer.base.located.name,
        "negative_prompt": request.negative_prompt,
        "steps": shot.steps,
        "guidance_scale": shot.guidance_scale,
    }
    make_folder(out)
    written: list[Path] = []
    rows: list[list[Image.Image]] = [[] for _ in prompts]
    for strength in request.strengths:
        pictures = previewer.draw(prompts, seeds, shot, negative=request.negative_prompt, strength=strength)
        for index, picture in enumerate(pictures):
            facts = {**common, "prompt": prompts[index], "seed": seeds[index], "strength": strength}
            name = f"{index:02d}-seed{seeds[index]}-strength{_name_of(strength)}.png"
            written.append(save_png(picture, out / name, facts))
            rows[index].append(picture)
    if len(request.strengths) > 1:
        for index, row in enumerate(rows):
            facts = {**common, "prompt": prompts[index], "seed": seeds[index], "strengths": list(request.strengths)}
            written.append(save_png(strip(row), out / f"{index:02d}-seed{seeds[index]}-sweep.png", facts))
    return written


def _check_numbers(request: Request) -> None:
    names = [_name_of(strength) for strength in request.strengths]
    if not all(map(math.isfinite, request.strengths)):
        raise SettingsError("a strength must be a finite number", "for example 0.8")
    if len(set(names)) < len(names):
        raise SettingsError("the same strength is given twice", "name each strength once")
    if not 0 <= request.seed <= MAX_SEED:
        raise SettingsError(f"--seed: {request.seed} is out of range", f"seeds are 0 to {MAX_SEED}")
    if request.steps is not None and not 1 <= request.steps <= MAX_STEPS:
        raise SettingsError(f"--steps: {request.steps} is out of range", f"sampler steps are 1 to {MAX_STEPS}")


def _name_of(strength: float) -> str:
    return f"{strength:.8g}"


def open_previewer(source: Source, workspace: Workspace) -> Previewer:
    """A previewer with the source's weights in place."""
    previewer = Previewer(plan_base(source.settings))
    if source.denoiser is not None:
        previewer.load_denoiser(source.denoiser)
    if source.file is not None:
        previewer.load_lora(source.file)
    if source.lora is not None:
        folder = make_folder(workspace.cache / "previews")
        path = folder / f"{clean_name(source.settings.name, fallback='run')}-{id(source):x}.safetensors"
        family = previewer.base.family.spec.id
        try:
            write_lora(source.lora, path, format="diffusers", family=family, metadata={}, dtype=torch.float32)
            previewer.load_lora(path)
        finally:
            with contextlib.suppress(OSError):  # on a read-only disk it was not written either
                path.unlink(missing_ok=True)
    return previewer


def shot_for(base: BasePlan, steps: int | None, guidance_scale: float | None, size: tuple[int, int] | None) -> Shot:
    """Unset values are what suits the base. Raises SettingsError for a size the base cannot draw."""
    family = base.family
    usual_steps, usual_guidance = family.preview_defaults(base.located)
    multiple = family.pixel_multiple(base.located)
    side = family.resolution(base.located) // multiple * multiple
    height, width = size or (side, side)
    if height % multiple or width % multiple or min(height, width) < multiple or max(height, width) > MAX_SIDE:
        raise SettingsError(
            f"a picture of {height} x {width} px cannot be drawn on this base",
            f"sides must be multiples of {multiple}, at most {MAX_SIDE}",
        )
    guidance = usual_guidance if guidance_scale is None else guidance_scale
    return Shot((height, width), steps or usual_steps, guidance)


def strip(pictures: Sequence[Image.Image]) -> Image.Image:
    """Pictures side by side."""
    width = sum(p.width for p in pictures) + GAP_PX * (len(pictures) - 1)
    sheet = Image.new("RGB", (width, max(p.height for p in pictures)), "white")
    left = 0
    for picture in pictures:
        sheet.paste(picture, (left, 0))
        left += picture.width + GAP_PX
    return sheet


def save_png(picture: Image.Image, path: Path, facts: dict[str, object]) -> Path:
    """Write a PNG that says how it was made."""
    info = PngInfo()
    for key, value in facts.items():
        info.add_itxt(key, str(value))
    with disk_errors(path):
        picture.save(path, pnginfo=info)
    return path
