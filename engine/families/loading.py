"""Load components of a base through diffusers' and transformers' own classes."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from ..errors import BaseModelError
from .family import Family, Parts
from .sources import LocatedBase

LIBRARIES = ("diffusers", "transformers")


def load(
    family: Family,
    located: LocatedBase,
    names: Sequence[str],
    *,
    dtype: torch.dtype,
    device: torch.device | str = "cpu",
) -> Parts:
    """Load the named components, frozen, in eval mode.

    dtype is given to from_pretrained, so that modules which a class keeps in float32 stay so; a later `.to(dtype)` would
    cast them too. Raises BaseModelError when a component is missing, broken or holds non-finite weights.
    """
    if located.kind == "single_file":
        components = _load_single_file(family, located, names, dtype)
    else:
        components = {name: _load_component(located, name, dtype) for name in names}
    for name, component in components.items():
        if isinstance(component, nn.Module):
            _require_sound(located, name, component)
            component.requires_grad_(False).eval().to(device)
    return Parts(located, components)


def _load_component(located: LocatedBase, name: str, dtype: torch.dtype) -> Any:
    entry = located.index.get(name)
    if not isinstance(entry, list) or len(entry) != 2 or entry[0] is None:
        raise BaseModelError(f"{located.name} has no component '{name}'", "is it a whole pipeline in diffusers format?")
    library, class_name = entry
    if library not in LIBRARIES:
        raise BaseModelError(
            f"{located.name}: component '{name}' wants code from '{library}', which is not run",
            "only classes of diffusers and transformers are loaded",
        )
    cls = getattr(importlib.import_module(library), class_name, None)
    if cls is None:
        raise BaseModelError(f"{located.name}: the installed {library} has no class {class_name}", f"upgrade {library}")
    arguments: dict[str, Any] = {}
    if issubclass(cls, nn.Module):
        arguments = {"dtype": dtype} if library == "transformers" else {"torch_dtype": dtype}
        arguments["use_safetensors"] = True
        if located.variant and any((located.path / name).glob(f"*.{located.variant}*.safetensors")):
            arguments["variant"] = located.variant
    try:
        return cls.from_pretrained(located.path / name, **arguments)
    except (OSError, ValueError, KeyError, RuntimeError) as error:  # what the two libraries raise for broken files
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise BaseModelError(
            f"{located.name}: component '{name}' cannot be loaded: {reason}", "get the base again"
        ) from error


def _load_single_file(family: Family, located: LocatedBase, names: Sequence[str], dtype: torch.dtype) -> dict[str, Any]:
    import diffusers

    cls = getattr(diffusers, family.spec.pipeline_class)
    config = located.path.with_suffix(
        ""
    )  # a diffusers folder of the same name gives configuration and tokenizers offline
    arguments: dict[str, Any] = {"config": str(config)} if (config / "model_index.json").is_file() else {}
    try:
        pipeline = cls.from_single_file(
            str(located.path), torch_dtype=dtype, **arguments, **family.optional_pipeline_arguments()
        )
    except (OSError, ValueError, KeyError, RuntimeError) as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise BaseModelError(
            f"{located.name} cannot be loaded as a {family.spec.title} checkpoint: {reason}",
            f"check that it is a whole checkpoint; without network put its diffusers configuration into {config}",
        ) from error
    return {name: getattr(pipeline, name) for name in names}


def _require_sound(located: LocatedBase, name: str, module: nn.Module) -> None:
    """Weights left on the meta device were not in the file; non-finite ones train to nothing but NaN."""
    for parameter_name, tensor in (*module.named_parameters(), *module.named_buffers()):
        if tensor.is_meta:
            raise BaseModelError(
                f"{located.name}: {name}.{parameter_name} is missing from the weights", "get the base again"
            )
        if tensor.is_floating_point() and not bool(torch.isfinite(tensor).all()):
            raise BaseModelError(f"{located.name}: {name}.{parameter_name} holds NaN or infinity", "get the base again")
