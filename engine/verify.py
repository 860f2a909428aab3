"""What a LoRA file is, and whether it fits a base."""

from __future__ import annotations

from pathlib import Path

import torch

from .exports.comfy_keys import unread_keys
from .exports.formats import describe, read_lora, read_tensors
from .exports.verification import load_into_pipeline
from .families.loading import load
from .families.registry import open_base
from .settings.schema import Base


def verify_file(path: Path, *, base: str | None) -> dict[str, object]:
    """Describe a file; with a base also load it through diffusers and say which keys were used.

    Raises LoraFileError when the file cannot be read or is for another family than the base.
    """
    if base is None:
        file = read_lora(path)
        return {**describe(file), "fits": None}
    family, located = open_base(Base(source=base))
    file = read_lora(path, family.spec.id)
    names = [family.spec.denoiser, *family.spec.text_encoders, *family.spec.tokenizers]
    parts = load(family, located, names, dtype=torch.float32)
    report = load_into_pipeline(family.pipeline(parts), path)
    tensors, _ = read_tensors(path)
    return {
        **describe(file),
        "base": located.name,
        "fits": report.complete,
        "unread_by_diffusers": list(report.unread),
        "missing_in_base": list(report.missing),
        "unread_by_comfyui": unread_keys(tensors, family.spec.id),
        "warnings": list(report.warnings),
    }
