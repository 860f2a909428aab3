"""Loads an exported file back as other programs would and compares it with what was trained.

A file that loads without an error may still do nothing or too little: diffusers skips keys that it cannot place with no
more than a warning. So every module's change of the weight is compared, and then one prediction.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import ExportError, LoraFileError, Problem
from ..lora_weights import LoraLayer, LoraWeights
from .formats import parse_tensors, read_lora, read_tensors
from .kohya_names import without_wrapper
from .packing import pack_diffusers
from .parsing import Parsed, guess_family, is_kohya
from .pipeline_state import ModelState

ADAPTER = "verification"
_MODELS = ("unet", "transformer", "text_encoder")
_NOT_FOR_THIS_MODEL = "No LoRA keys associated to"  # expected for every component that the file does not adapt
_SHOWN = 5

# diffusers' converter of kohya FLUX.1 files has the width of the released models built in
# (`_convert_kohya_flux_lora_to_diffusers`, dims=[3072, 3072, 3072, 12288]).
_FLUX_WIDTH = 3072

Layers = dict[tuple[str, str], LoraLayer]  # (component, module) -> layer


@dataclass(frozen=True)
class LoadReport:
    """What became of a file's keys. `missing` are modules that the file has and the pipeline did not take.

    `reader` is "diffusers", or "safelight" where diffusers cannot read the format for this base at all.
    """

    modules: int
    keys: int
    unread: tuple[str, ...]
    missing: tuple[str, ...]
    warnings: tuple[str, ...]
    reader: str = "diffusers"

    @property
    def complete(self) -> bool:
        return not self.unread and not self.missing


@dataclass(frozen=True)
class Verification:
    """How far the file is from what was trained: max |difference| of any weight's change and of the prediction.

    `reader` is that of `LoadReport`.
    """

    max_delta_error: float
    max_prediction_error: float
    modules: int
    keys: int
    reader: str = "diffusers"


def load_into_pipeline(pipeline: Any, path: Path, *, adapter_name: str = ADAPTER) -> LoadReport:
    """Load a LoRA with the pipeline's own `load_lora_weights`; the adapter stays loaded and active.

    Raises LoraFileError when the file cannot be read or diffusers refuses it; the pipeline is then as before.
    """
    tensors, metadata = read_tensors(path)
    family = guess_family(tensors, metadata) or ""
    parsed = parse_tensors(tensors, metadata, family, path)
    if loaded_layers(pipeline, adapter_name):
        raise LoraFileError(f"an adapter named '{adapter_name}' is loaded already", "remove it first")
    own_reader = family == "flux1" and is_kohya(tensors) and not _has_released_width(parsed.weights)
    with _undone_on_failure(pipeline, adapter_name), _captured_warnings() as messages:
        try:
            if own_reader:
                pipeline.load_lora_weights(pack_diffusers(parsed.weights)[0], adapter_name=adapter_name)
            else:
                pipeline.load_lora_weights(str(path.parent), weight_name=path.name, adapter_name=adapter_name)
        except Exception as error:  # diffusers and peft raise all kinds, also AssertionError and KeyError
            reason = str(error) or type(error).__name__
            raise LoraFileError(
                f"diffusers cannot load {path.name}: {reason}", "see whether it was trained for this base"
            ) from error
    report = _report(parsed, len(tensors), loaded_layers(pipeline, adapter_name), messages)
    return replace(report, reader="safelight") if own_reader else report


def verify_export(
    path: Path,
    *,
    pipeline: Any,
    denoiser_name: str,
    expected: LoraWeights,
    predict: Callable[[], Tensor],
    live_prediction: Tensor,
    family: str,
    compute_dtype: torch.dtype | None = None,
) -> Verification:
    """Prove that the file does in a pipeline around the live base what the trained adapter does.

    The caller has disabled the training adapter. The file is loaded as a second adapter, compared, and removed:
    modules, weights, trainability and modes are then as before. `predict` runs the live base with the file's adapter,
    and for half formats once more without; `live_prediction` is the same prediction with the training adapter.
    `compute_dtype` is the number format of the computation where it is shorter than that of the weights (autocast).

    Raises ExportError naming the first modules that are not read or differ by more than number formats explain.
    """
    file = read_lora(path, family)
    if file.leftover:
        raise ExportError(f"{path.name} has keys that belong to no module: {_list(file.leftover)}")
    models = _models(pipeline)
    states = [ModelState.of(model) for model in models.values()]
    try:
        report = _load(pipeline, path)
        loaded = loaded_layers(pipeline, ADAPTER)
        stored = _dtype(_flat(file.weights))
        _compare(path, _flat(file.weights), expected, stored)
        # Loading rounds once more when the base is in a shorter format than the file.
        delta_error = _compare(path, loaded, expected, _coarsest((stored, _dtype(loaded))))
        for model in models.values():
            _activate_only(model, ADAPTER)
        with torch.no_grad():
            prediction = predict()
            base_prediction = prediction
            rounded = _coarsest((stored, _dtype(loaded)))
            if rounded != torch.float32:  # what rounding the adapter changes grows with what the adapter does
                for model in models.values():
                    _activate_only(model, None)
                base_prediction = predict()
        computed = _coarsest((next(models[denoiser_name].parameters()).dtype, live_prediction.dtype, compute_dtype))
        allowed = _prediction_tolerance(live_prediction, base_prediction, computed, rounded)
        prediction_error = _compare_predictions(path, prediction, live_prediction, allowed)
    finally:
        for state in states:
            state.restore(ADAPTER)
    modules = sum(len(layers) for layers in expected.values())
    return Verification(delta_error, prediction_error, modules, report.keys, report.reader)


def loaded_layers(pipeline: Any, adapter_name: str) -> Layers:
    """The layers of one adapter as they are in the pipeline's models now, in their own number format, on the CPU."""
    from peft.tuners.lora import LoraLayer as PeftLayer

    found: Layers = {}
    for component, model in _models(pipeline).items():
        for name, module in model.named_modules():
            layer: Any = module  # peft's classes are hardly annotated
            if isinstance(module, PeftLayer) and adapter_name in layer.lora_A:
                down = layer.lora_A[adapter_name].weight.detach().cpu()
                up = layer.lora_B[adapter_name].weight.detach().cpu()
                magnitude = None
                if adapter_name in layer.lora_magnitude_vector:
                    magnitude = layer.lora_magnitude_vector[adapter_name].weight.detach().cpu()
                key = component, _canonical(component, name)
                found[key] = LoraLayer(down, up, layer.scaling[adapter_name] * down.shape[0], magnitude=magnitude)
    return found


# --- loading ---------------------------------------------------------------------------------------------------------


def _load(pipeline: Any, path: Path) -> LoadReport:
    """Load the file. Raises ExportError when some of it was not taken."""
    try:
        report = load_into_pipeline(pipeline, path)
    except LoraFileError as error:
        raise ExportError(f"the exported file does not load: {error.message}", error.hint) from error
    if not report.complete:
        raise ExportError(
            f"{path.name}: diffusers does not apply {_list(report.missing or report.unread)}",
            "; ".join(report.warnings[:2]) or "check that the file fits the base",
        )
    return report


def _has_released_width(weights: LoraWeights) -> bool:
    return all(
        layer.down.shape[1] == _FLUX_WIDTH
        for module, layer in weights.get("transformer", {}).items()
        if module.startswith("single_transformer_blocks.") and not module.endswith(".proj_out")
    )


def _report(parsed: Parsed, keys: int, loaded: Layers, messages: list[str]) -> LoadReport:
    missing = [key for key in parsed.sources if key not in loaded]
    unread = {source for key in missing for source in parsed.sources[key]} | set(parsed.leftover)
    adapted = {component for component, _ in parsed.sources}
    told = [text for text in messages if _NOT_FOR_THIS_MODEL not in text or not adapted]
    names = tuple(f"{component}.{module}" for component, module in missing)
    return LoadReport(len(loaded), keys, tuple(sorted(unread)), names, tuple(told))


def _models(pipeline: Any) -> dict[str, nn.Module]:
    found = {name: getattr(pipeline, name, None) for name in _MODELS}
    return {name: model for name, model in found.items() if isinstance(model, nn.Module)}


def _canonical(component: str, module: str) -> str:
    return without_wrapper(module) if component == "text_encoder" else module


def _activate_only(model: nn.Module, adapter_name: str | None) -> None:
    """Make this the one adapter that acts, also in layers that have others or were disabled; with None none acts."""
    from peft.tuners.tuners_utils import BaseTunerLayer

    for module in model.modules():
        if isinstance(module, BaseTunerLayer):
            has_it = adapter_name in module._all_available_adapter_names()
            module.enable_adapters(has_it)
            if has_it and adapter_name is not None:
                module.set_adapter(adapter_name, inference_mode=True)


@contextmanager
def _undone_on_failure(pipeline: Any, adapter_name: str) -> Iterator[None]:
    states = [ModelState.of(model) for model in _models(pipeline).values()]
    try:
        yield
    except BaseException:
        for state in states:
            state.restore(adapter_name)
        raise


@contextmanager
def _captured_warnings() -> Iterator[list[str]]:
    """Everything that the libraries warn about while loading, instead of printing it."""
    messages: list[str] = []

    class Collector(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            messages.append(record.getMessage())

    collector = Collector(level=logging.WARNING)
    loggers = [logging.getLogger(name) for name in ("diffusers", "transformers", "peft")]
    before = [(logger, logger.level, logger.propagate, list(logger.handlers)) for logger in loggers]
    for logger in loggers:
        logger.handlers, logger.propagate = [collector], False
        logger.setLevel(logging.WARNING)
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            yield messages
    finally:
        for logger, level, propagate, handlers in before:
            logger.setLevel(level)
            logger.propagate, logger.handlers = propagate, handlers
    messages += [str(warning.message) for warning in caught if not issubclass(warning.category, DeprecationWarning)]


# --- comparing -------------------------------------------------------------------------------------------------------


def _compare(path: Path, loaded: Layers, expected: LoraWeights, dtype: torch.dtype) -> float:
    """Largest difference of any weight's change. Raises ExportError when rounding to `dtype` does not explain one."""
    problems: list[Problem] = []
    largest = 0.0
    wanted = _flat(expected)
    for key, layer in wanted.items():
        name = ".".join(key)
        if key not in loaded:
            problems.append(Problem(name, "is not in the file"))
            continue
        error, allowed = _difference(loaded[key], layer, dtype)
        largest = max(largest, error)
        if not error <= allowed:  # also when it is NaN
            reason = f"the change of the weight differs by {error:.3g}; {allowed:.3g} is rounding"
            problems.append(Problem(name, reason))
    for key, layer in loaded.items():
        # A part that pads a fused layer is loaded as a module, too, and must do nothing.
        if key not in wanted and bool(layer.up.any()) and bool(layer.down.any()):
            problems.append(Problem(".".join(key), "is in the file, but was not trained"))
    if problems:
        raise ExportError(
            f"{path.name} is not what was trained: {len(problems)} of {len(wanted)} modules differ, first "
            f"{_list([problem.where for problem in problems])}",
            "the trained weights are safe in the checkpoint; please report this as a fault",
            problems=problems[:_SHOWN],
        )
    return largest


def _flat(weights: LoraWeights) -> Layers:
    return {(c, _canonical(c, module)): layer for c, layers in weights.items() for module, layer in layers.items()}


def _difference(loaded: LoraLayer, wanted: LoraLayer, dtype: torch.dtype) -> tuple[float, float]:
    """(max |difference|, what rounding both factors to `dtype` may cause)."""
    reference = wanted.delta().cpu()
    change = loaded.delta()
    if change.shape != reference.shape or (loaded.magnitude is None) != (wanted.magnitude is None):
        return float("inf"), 0.0
    if loaded.magnitude is not None and wanted.magnitude is not None:
        magnitude = wanted.magnitude.float().cpu().flatten()
        off = float((loaded.magnitude.float().flatten() - magnitude).abs().max())
        if not off <= torch.finfo(dtype).eps * float(magnitude.abs().max()):
            return off, torch.finfo(dtype).eps * float(magnitude.abs().max())
    return float((change - reference).abs().max()), _rounding(wanted, dtype)


def _rounding(layer: LoraLayer, dtype: torch.dtype) -> float:
    """Bound on a change's error when both factors are rounded to `dtype`, from |u . d| <= |u| |d|.

    Each factor is rounded by at most eps / 2, by readers that fold alpha into one of them once more, and float32 sums
    add a little: 2 * eps. Numbers near zero are rounded by half of the smallest one there is.
    """
    up, down = layer.up.float().flatten(1), layer.down.float().flatten(1)
    limits = torch.finfo(dtype)
    longest = float(up.norm(dim=1).max()) * float(down.norm(dim=0).max())
    smallest = limits.smallest_normal * limits.eps / 2
    largest = float(up.abs().max()) + float(down.abs().max())
    sums = layer.rank * torch.finfo(torch.float32).eps
    scale = abs(layer.scale)
    return scale * longest * (2 * limits.eps + sums) + max(1.0, scale) * smallest * layer.rank * largest


def _compare_predictions(path: Path, prediction: Tensor, live: Tensor, allowed: float) -> float:
    if prediction.shape != live.shape:
        shapes = f"{tuple(prediction.shape)} instead of {tuple(live.shape)}"
        raise ExportError(f"{path.name}: the prediction with the file has shape {shapes}")
    error = _largest(prediction, live)
    if not error <= allowed:
        raise ExportError(
            f"{path.name}: the prediction with the file differs by {error:.3g}; {allowed:.3g} is rounding",
            "the trained weights are safe in the checkpoint; please report this as a fault",
        )
    return error


# Relative error of a whole network's output by the number format of the computation; on accelerators float32
# convolutions may use shorter mantissas inside (TF32).
_COMPUTE_TOLERANCE = {torch.float64: 1e-6, torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 5e-2}
_ACCELERATOR_TOLERANCE = 1e-3
_ROUNDING_GROWTH = 32  # how much more than one layer's rounding of the file may reach the output


def _prediction_tolerance(live: Tensor, base: Tensor, computed: torch.dtype, stored: torch.dtype) -> float:
    relative = max(_COMPUTE_TOLERANCE[computed], 0.0 if live.device.type == "cpu" else _ACCELERATOR_TOLERANCE)
    size = max(1.0, float(live.detach().float().abs().max()))
    rounding = 0.0 if stored == torch.float32 else _ROUNDING_GROWTH * torch.finfo(stored).eps * _largest(live, base)
    return relative * size + rounding


def _largest(first: Tensor, second: Tensor) -> float:
    return float((first.detach().float().cpu() - second.detach().float().cpu()).abs().max())


def _dtype(layers: Layers) -> torch.dtype:
    """The coarsest number format among the layers."""
    return _coarsest(layer.down.dtype for layer in layers.values())


def _coarsest(kinds: Iterable[torch.dtype | None]) -> torch.dtype:
    known = [kind for kind in kinds if kind in _COMPUTE_TOLERANCE]
    return max(known, key=lambda kind: torch.finfo(kind).eps, default=torch.float32)


def _list(names: Sequence[str]) -> str:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more
