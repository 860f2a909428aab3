"""From trained weights to files for other programs. No file counts before it was loaded back and compared."""

from __future__ import annotations

import copy
import json
import shutil
from collections.abc import Callable
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from . import settings, trained
from .errors import ExportError, SettingsError
from .exports.formats import write_lora
from .exports.metadata import build_metadata
from .exports.verification import verify_export
from .families.family import Conditioning, Extras, Parts
from .families.loading import load
from .lora_weights import LoraWeights
from .methods.lora import LoraMethod, remove_adapters, set_weights
from .plan import BasePlan, export_formats
from .precision import DTYPES
from .roles import POLICY, Bundle
from .runs import RunFolder
from .seeds import seed_of
from .settings.schema import Lora, Settings
from .state import LatentState
from .workspace import clean_name, disk_errors, write_atomic

TRAINING_FACTS = "training.json"  # in the folder of a fully trained base; tells an export from other folders

# Largest difference of a prediction, relative to its spread, that rounding to a format explains.
TOLERANCE = {"fp32": 1e-4, "fp16": 2e-2, "bf16": 1e-1}


@dataclass(frozen=True)
class ExportResult:
    """A file or, for a fully trained base, a folder; `verification` says what loading it back showed."""

    path: Path
    format: str
    verification: dict[str, object]


@dataclass(frozen=True)
class TrainedFacts:
    """What a file says about its training."""

    settings: Settings
    steps: int
    epochs: int
    images: int


def probe(base: BasePlan, parts: Parts, text: Conditioning) -> Callable[[], Tensor]:
    """A function that returns the denoiser's prediction for one fixed noisy input, float32 on the CPU."""
    family = base.family
    denoiser = parts[family.spec.denoiser]
    device = next(denoiser.parameters()).device
    vae = _vae_config(base, parts)
    side = family.pixel_multiple(base.located) * 4 // family.vae_factor(vae)
    noisy = torch.randn(
        1, vae["latent_channels"], side, side, generator=torch.Generator().manual_seed(seed_of("probe"))
    )
    level = base.parameterisation.snap(torch.tensor([0.5], dtype=torch.float64)).to(device)
    time = family.model_time(base.parameterisation, level)
    conditioning = family.collate([text], device)
    dtype = next(p.dtype for p in denoiser.parameters() if p.is_floating_point())

    def predict() -> Tensor:
        state = LatentState.single(noisy.to(device, dtype))
        typed = {k: v.to(dtype) if v.is_floating_point() else v for k, v in conditioning.items()}
        enabled = device.type != "cpu" and dtype != torch.float32
        with torch.no_grad(), torch.autocast(device.type, dtype=dtype, enabled=enabled):
            return family.forward(denoiser, state, time, typed, Extras()).latent.float().cpu()

    return predict


def _vae_config(base: BasePlan, parts: Parts) -> Any:
    return parts["vae"].config if "vae" in parts else base.located.config("vae")


def export_lora(
    weights: LoraWeights,
    folder: Path,
    *,
    format: str,
    facts: TrainedFacts,
    base: BasePlan,
    parts: Parts,
    predict: Callable[[], Tensor],
    live_prediction: Tensor,
) -> ExportResult:
    """Write and verify one LoRA file. `parts` hold the base without adapters. Raises ExportError, removing the file."""
    family = base.family
    dtype = facts.settings.export.dtype
    suffix = "" if format == family.spec.default_formats[0] else f"-{format}"
    path = folder / f"{clean_name(facts.settings.name, fallback='lora')}{suffix}.safetensors"
    metadata = build_metadata(
        facts.settings,
        names=family.base_names(base.located),
        steps=facts.steps,
        epochs=facts.epochs,
        images=facts.images,
        title=facts.settings.name or "LoRA",
        trigger=facts.settings.captions.trigger,
        date=datetime.now(UTC).isoformat(timespec="seconds"),
    )
    with disk_errors(path):
        folder.mkdir(parents=True, exist_ok=True)
    write_lora(weights, path, format=format, family=family.spec.id, metadata=metadata, dtype=DTYPES[dtype])
    try:
        verification = verify_export(
            path,
            pipeline=family.pipeline(parts),
            denoiser_name=family.spec.denoiser,
            expected=weights,
            predict=predict,
            live_prediction=live_prediction,
            family=family.spec.id,
        )
    except ExportError:
        path.unlink()
        raise
    return ExportResult(path, format, asdict(verification))


def export_full(
    denoiser: torch.nn.Module,
    folder: Path,
    *,
    facts: TrainedFacts,
    base: BasePlan,
    live_prediction: Tensor,
    text: Conditioning,
) -> ExportResult:
    """Write the whole base with its trained denoiser as a diffusers folder, load the denoiser back and compare.

    It is written under another name, so that the folder appears whole and checked, or not at all. Raises ExportError
    when it does not read back as what was trained, or when something else is in its place.
    """
    family, located = base.family, base.located
    name, dtype = family.spec.denoiser, facts.settings.export.dtype
    target = folder / clean_name(facts.settings.name, fallback="model")
    if target.exists() and not (target / TRAINING_FACTS).is_file():
        raise ExportError(f"{target} is there already and is no export", "give another folder with --out")
    if located.path.resolve() in target.resolve().parents:
        raise ExportError(f"{target} lies in the base itself", "give another folder with --out")
    draft = folder / f".writing-{target.name}"
    try:
        with disk_errors(target):
            shutil.rmtree(draft, ignore_errors=True)
            if located.kind == "folder":
                own = located.path
                shutil.copytree(own, draft, ignore=lambda at, names: [name] if Path(at) == own else [])
            else:
                _save_other_components(base, draft)
            copy.deepcopy(denoiser).to("cpu", DTYPES[dtype]).save_pretrained(draft / name, safe_serialization=True)  # type: ignore[operator]
        again = load(family, _relocated(base, draft), [name], dtype=torch.float32, device=base.device)
        difference = (probe(base, again, text)() - live_prediction).abs().max()
        error = float(difference / live_prediction.std().clamp_min(1e-8))
        if not error < TOLERANCE[dtype]:
            raise ExportError(
                f"{target}: the saved denoiser predicts otherwise than the trained one (by {error:.2g} of the spread)",
                "set export.dtype = 'fp32'; if that fails too, report it as a fault of the program",
            )
        about = {"settings": facts.settings.model_dump(mode="json", exclude={"base", "dataset"}), "steps": facts.steps}
        write_atomic(draft / TRAINING_FACTS, json.dumps(about, indent=1))
        with disk_errors(target):
            shutil.rmtree(target, ignore_errors=True)
            draft.rename(target)
    finally:
        shutil.rmtree(draft, ignore_errors=True)
    return ExportResult(target, "pipeline", {"max_prediction_error": error, "reader": "diffusers"})


def _save_other_components(base: BasePlan, target: Path) -> None:
    family = base.family
    names = (*family.text_components(), "vae", family.spec.denoiser, "scheduler")
    family.pipeline(load(family, base.located, names, dtype=torch.float32)).save_pretrained(target)


def _relocated(base: BasePlan, target: Path) -> Any:
    from .families.sources import locate
    from .settings.schema import Base

    return locate(Base(source=str(target)))


def export_run(run: RunFolder, *, format: str = "", out: Path | None = None, dtype: str | None = None) -> ExportResult:
    """Export a run's newest checkpoint, verified. `out` is a folder; unset is the run's own.

    Raises ExportError when the file does not read back as what was trained, SettingsError for an unknown format.
    """
    found = trained.read(run)
    base, family = found.base, found.base.family
    chosen = found.settings.model_copy(update={"name": found.settings.name or run.name})
    if dtype is not None:
        chosen = settings.parse(_with(chosen, "export", "dtype", dtype), origin="--dtype")
    facts = TrainedFacts(chosen, found.step, found.epoch + 1, images=0)
    folder = out or run.exports
    names = [family.spec.denoiser, *family.text_components(), "vae", "scheduler"]
    parts = load(family, base.located, names, dtype=torch.float32, device=base.device)
    text = family.encode_text(parts, [""])[0]
    predict = probe(base, parts, text)
    if found.denoiser is not None:
        if format not in ("", "pipeline"):
            raise SettingsError(
                f"a fully trained base is exported as a whole pipeline, not as {format}", "leave --format out"
            )
        trained.replace_parameters(parts[family.spec.denoiser], found.denoiser)
        return export_full(
            parts[family.spec.denoiser], folder, facts=facts, base=base, live_prediction=predict(), text=text
        )
    assert found.lora is not None
    wanted = format or export_formats(chosen, family)[0]
    if wanted not in ("diffusers", "kohya"):
        raise SettingsError(f"--format: there is no LoRA format '{wanted}'", "it is 'diffusers' or 'kohya'")
    live = _prediction_with(found.lora, chosen, base, parts, predict)
    return export_lora(
        found.lora, folder, format=wanted, facts=facts, base=base, parts=parts, predict=predict, live_prediction=live
    )


def _prediction_with(
    weights: LoraWeights, chosen: Settings, base: BasePlan, parts: Parts, predict: Callable[[], Tensor]
) -> Tensor:
    """The prediction with the checkpoint's adapter put on as in training, and taken off again."""
    assert isinstance(chosen.method, Lora)
    method = LoraMethod(chosen.method, base.family)
    bundle = Bundle(base.family, parts, method.text_members())
    method.attach(bundle)
    bundle.to(base.device).eval()
    for component, member in bundle.members.items():
        set_weights(member, POLICY, weights.get(component, {}), "the checkpoint")
    live = predict()
    for member in bundle.members.values():
        remove_adapters(member)
    return live


def _with(chosen: Settings, section: str, field: str, value: object) -> dict[str, Any]:
    data = chosen.model_dump(mode="json")
    data[section][field] = value
    return data
