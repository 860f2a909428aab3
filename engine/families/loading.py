"""Load components of a base through diffusers' and transformers' own classes."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import Any

import torch
from safetensors import SafetensorError
from torch import nn

from ..errors import BaseModelError
from .family import Family, Parts
from .hub import first_line
from .sources import LocatedBase, has_variant, read_header

LIBRARIES = ("diffusers", "transformers")

# What the two libraries raise for broken files. Running out of memory is a RuntimeError too, but says so itself.
BROKEN = (
    OSError,
    ValueError,
    LookupError,
    RuntimeError,
    TypeError,
    AttributeError,
    ImportError,
    AssertionError,
    SafetensorError,
)


def load(
    family: Family,
    located: LocatedBase,
    names: Sequence[str],
    *,
    dtype: torch.dtype,
    device: torch.device | str = "cpu",
) -> Parts:
    """Load the named components, frozen, in eval mode.

    dtype is given to from_pretrained, so that modules which a class keeps in float32 stay so; a later `.to(dtype)`
    would cast them too. Raises BaseModelError when a component is missing, broken or holds non-finite weights.
    """
    _quiet_libraries()
    if located.kind == "single_file":
        components = _load_single_file(family, located, names, dtype)
    else:
        components = {name: _load_component(located, name, dtype) for name in names}
    for name, component in components.items():
        if isinstance(component, nn.Module):
            _require_sound(located, name, component)
            component.requires_grad_(False).eval().to(device)
    return Parts(located, components)


def skeleton(family: Family, located: LocatedBase) -> nn.Module:
    """The denoiser on the meta device: its layers by name, without reading any weight."""
    name = family.spec.denoiser
    cls, config = _component_class(located, name), located.config(name)
    try:
        with torch.device("meta"):
            module: nn.Module = cls.from_config(config)
    except BROKEN as error:
        raise _broken(located, name, error) from error
    return module


def _component_class(located: LocatedBase, name: str) -> Any:
    entry = located.index.get(name)
    if not isinstance(entry, list) or len(entry) != 2 or entry[0] is None:
        raise BaseModelError(f"{located.name} has no component '{name}'", "is it a whole pipeline in diffusers format?")
    library, class_name = entry
    if library not in LIBRARIES:
        raise BaseModelError(
            f"{located.name}: component '{name}' wants code from '{library}', which is not run",
            "only classes of diffusers and transformers are loaded",
        )
    cls = getattr(importlib.import_module(library), str(class_name), None)
    if not isinstance(cls, type) or not hasattr(cls, "from_pretrained"):
        raise BaseModelError(f"{located.name}: the installed {library} has no class {class_name}", f"upgrade {library}")
    return cls


def _quiet_libraries() -> None:
    """No progress bars and no remarks about missing optional packages between our own lines."""
    import diffusers
    import transformers

    diffusers.utils.logging.disable_progress_bar()
    transformers.utils.logging.disable_progress_bar()
    transformers.utils.logging.set_verbosity_error()


def _load_component(located: LocatedBase, name: str, dtype: torch.dtype) -> Any:
    cls = _component_class(located, name)
    folder = located.path / name
    if not folder.is_dir():
        raise BaseModelError(f"{located.name}: there is no folder for the component '{name}'", "is the base complete?")
    if issubclass(cls, nn.Module):
        located.config(name)  # says what is wrong with it better than the libraries do
    try:
        if not issubclass(cls, nn.Module):
            return cls.from_pretrained(folder)
        module, report = cls.from_pretrained(
            folder,
            use_safetensors=True,
            output_loading_info=True,
            variant=located.variant if located.variant and has_variant(folder, located.variant) else None,
            **{"dtype" if located.index[name][0] == "transformers" else "torch_dtype": dtype},
        )
    except torch.OutOfMemoryError:
        raise
    except BROKEN as error:
        raise _broken(located, name, error) from error
    if report["missing_keys"]:  # the libraries would only warn, and go on with random numbers
        raise _missing(located, f"{name}.{min(report['missing_keys'])}", len(report["missing_keys"]))
    return module


def _load_single_file(family: Family, located: LocatedBase, names: Sequence[str], dtype: torch.dtype) -> dict[str, Any]:
    import diffusers
    from diffusers.loaders.single_file_utils import SingleFileComponentError

    for name in names:
        _component_class(located, name)
    spec = family.spec
    others = {*spec.text_encoders, *spec.tokenizers, *family.media_components(), spec.denoiser, "scheduler"} - {*names}
    cls = getattr(diffusers, spec.pipeline_class)
    try:
        pipeline = cls.from_single_file(
            str(located.path),
            config=str(located.configuration),
            torch_dtype=dtype,
            **family.optional_pipeline_arguments(),
            **dict.fromkeys(others),  # None is: not wanted
        )
    except torch.OutOfMemoryError:
        raise
    except (*BROKEN, SingleFileComponentError) as error:
        raise BaseModelError(
            f"{located.name} cannot be loaded as a {spec.title} checkpoint: {first_line(error)}",
            f"check that it is a whole checkpoint, and that the configuration in {located.configuration} fits it",
        ) from error
    return {name: getattr(pipeline, name) for name in names}


def _broken(located: LocatedBase, name: str, error: Exception) -> BaseModelError:
    """What to say of a component that the libraries could not load. Raises BaseModelError itself for a file cut off."""
    for file in sorted((located.path / name).glob("*.safetensors")):
        read_header(file)
    message = f"{located.name}: component '{name}' cannot be loaded: {first_line(error)}"
    folder = located.path / name
    variants = sorted({v for file in folder.glob("*.*.safetensors") if "-of-" not in (v := file.name.split(".")[1])})
    if located.variant is None and variants and not any("." not in f.stem for f in folder.glob("*.safetensors")):
        return BaseModelError(message, f"its weights are only there in a variant: set base.variant to '{variants[0]}'")
    return BaseModelError(message, "get the base again")


def _missing(located: LocatedBase, tensor: str, count: int) -> BaseModelError:
    more = f" and {count - 1} more" if count > 1 else ""
    return BaseModelError(f"{located.name}: the weights lack {tensor}{more}", "get the base again")


def _require_sound(located: LocatedBase, name: str, module: nn.Module) -> None:
    """Weights left on the meta device were not in the file; non-finite ones train to nothing but NaN."""
    for parameter_name, tensor in (*module.named_parameters(), *module.named_buffers()):
        if tensor.is_meta:
            raise _missing(located, f"{name}.{parameter_name}", 1)
        if tensor.is_floating_point() and not bool(torch.isfinite(tensor).all()):
            raise BaseModelError(f"{located.name}: {name}.{parameter_name} holds NaN or infinity", "get the base again")
