"""Which families there are, and which one a base belongs to. Adding a family is one file and one line here."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from ..errors import BaseModelError, SettingsError
from ..settings.schema import Base
from .sources import LocatedBase, locate

if TYPE_CHECKING:
    from .family import Family

# id -> (module, class); imported when used, so that listing families costs nothing
FAMILIES: Mapping[str, tuple[str, str]] = {
    "sd15": ("engine.families.sd15", "StableDiffusion15"),
    "flux1": ("engine.families.flux1", "Flux1"),
}

# pipeline class in model_index.json -> family id
PIPELINES: Mapping[str, str] = {
    "StableDiffusionPipeline": "sd15",
    "FluxPipeline": "flux1",
}


def get(family_id: str) -> Family:
    """The family with this id. Raises SettingsError naming the known ones."""
    if family_id not in FAMILIES:
        raise SettingsError(f"base.family: there is no family '{family_id}'", f"known are {', '.join(FAMILIES)}")
    module, name = FAMILIES[family_id]
    family: Family = getattr(importlib.import_module(module), name)()
    return family


def open_base(base: Base) -> tuple[Family, LocatedBase]:
    """Find the base and its family. Raises BaseModelError when it is missing, unsupported or of another family."""
    located = locate(base, lambda name, index: _family_id(name, index, base.family))
    family = get(_family_id(located.name, located.index, base.family))
    if located.kind == "single_file" and not family.spec.single_file:
        raise BaseModelError(
            f"{located.name}: {family.spec.title} is not read from a single file", "give a folder in diffusers format"
        )
    return family, located


def _family_id(name: str, index: Mapping[str, Any], wanted: str | None) -> str:
    pipeline = index.get("_class_name")
    if not isinstance(pipeline, str):
        raise BaseModelError(
            f"{name} does not name a pipeline of diffusers in its model_index.json, or wants code of its own",
            f"supported are {', '.join(PIPELINES)}",
        )
    found = PIPELINES.get(pipeline)
    if found is None:
        raise BaseModelError(
            f"{name} is a {pipeline}, which cannot be trained here yet", f"supported are {', '.join(PIPELINES)}"
        )
    if wanted not in (None, found):
        raise BaseModelError(
            f"{name} is of family '{found}', but base.family says '{wanted}'",
            f"set base.family to '{found}' or leave it out",
        )
    return found
