"""What a LoRA file says about itself: modelspec, kohya's `ss_*` keys, and the settings it was trained with.

modelspec is Stability-AI/ModelSpec 1.0.1. The `ss_*` keys are those of kohya-ss/sd-scripts that other programs show or
filter by. Nothing here holds a path, a secret, a folder's name or the captions' words.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Mapping
from pathlib import Path, PureWindowsPath
from typing import Any

from safetensors.torch import save
from torch import Tensor

from ..errors import LoraFileError, SettingsError
from ..families.family import BaseNames
from ..settings.loading import parse
from ..settings.schema import AdamW, Lora, Settings

SETTINGS_KEY = "safelight.settings"
MAX_SETTINGS_BYTES = 64 * 1024

_NO_FOLDER = "dataset"  # stands in for the data set's folder while a preset is checked
_DROPPED_DATASET_KEYS = ("folder", "folder_repeats")


def build_metadata(
    settings: Settings,
    *,
    names: BaseNames,
    steps: int,
    epochs: int,
    images: int,
    title: str,
    trigger: str = "",
    resolution: tuple[int, int] | None = None,
    date: str = "",
) -> dict[str, str]:
    """The metadata of one exported file, all values strings.

    `steps` and `epochs` are those trained until this file, `images` the number of pictures (0: unknown), `resolution`
    is (height, width) in px, `date` is ISO 8601. Entries without a value are left out.
    """
    metadata = {
        "modelspec.sai_model_spec": "1.0.1",
        "modelspec.architecture": f"{names.architecture}/lora",
        "modelspec.implementation": names.implementation,
        "modelspec.title": title,
        "modelspec.date": date,
        "modelspec.trigger_phrase": trigger,
        "modelspec.resolution": "" if resolution is None else f"{resolution[1]}x{resolution[0]}",
        "modelspec.prediction_type": names.prediction_type,
        "ss_v2": "False",
        "ss_base_model_version": names.base_version,
        "ss_output_name": title,
        "ss_steps": str(steps),
        "ss_max_train_steps": str(steps if settings.train.steps is None else settings.train.steps),
        "ss_epoch": str(epochs),
        "ss_num_epochs": str(epochs if settings.train.epochs is None else settings.train.epochs),
        "ss_num_train_images": str(images) if images else "",
        "ss_sd_model_name": base_name(settings.base.source),
        **_network_keys(settings),
        **_training_keys(settings),
        SETTINGS_KEY: json.dumps(shareable(settings), sort_keys=True),
    }
    return {key: value for key, value in metadata.items() if value != ""}


def _network_keys(settings: Settings) -> dict[str, str]:
    method = settings.method
    if not isinstance(method, Lora):
        return {}
    # A kohya file carries alpha / r only, so a rank-stabilised alpha / sqrt(r) is written as alpha * sqrt(r).
    alpha = method.effective_alpha * (math.sqrt(method.rank) if method.rank_stabilised else 1.0)
    return {
        "ss_network_module": "networks.lora",
        "ss_network_dim": str(method.rank),
        "ss_network_alpha": str(alpha),
        "ss_network_args": json.dumps({}),
        "ss_network_dropout": str(method.dropout),
    }


def _training_keys(settings: Settings) -> dict[str, str]:
    train, objective, optimizer = settings.train, settings.objective, settings.optimizer
    name = "AdamW8bit" if isinstance(optimizer, AdamW) and optimizer.bits == 8 else type(optimizer).__name__
    return {
        "ss_learning_rate": str(optimizer.lr),
        "ss_unet_lr": str(optimizer.lr),
        "ss_optimizer": name,
        "ss_lr_scheduler": settings.schedule.type,
        "ss_max_grad_norm": str(train.max_grad_norm),
        "ss_gradient_accumulation_steps": str(train.accumulation),
        "ss_gradient_checkpointing": str(train.gradient_checkpointing),
        "ss_batch_size_per_device": str(train.batch_size),
        "ss_mixed_precision": {"fp32": "no", "auto": ""}.get(train.precision, train.precision),
        "ss_seed": str(train.seed),
        "ss_loss_type": {"mse": "l2"}.get(objective.loss, objective.loss),
        "ss_noise_offset": str(objective.noise_offset),
        "ss_min_snr_gamma": "" if objective.min_snr_gamma is None else str(objective.min_snr_gamma),
        "ss_caption_dropout_rate": str(settings.captions.dropout),
    }


# --- the settings ----------------------------------------------------------------------------------------------------


def shareable(settings: Settings) -> dict[str, Any]:
    """The settings as plain data without the data set's folder and without paths."""
    return _without_places(settings.model_dump(mode="json", exclude_none=True))


def settings_from_metadata(metadata: Mapping[str, str]) -> dict[str, Any]:
    """The settings that a LoRA was trained with, as a preset: everything but the data set's folder.

    The file may come from anyone, so the settings are validated and folders are dropped. Raises LoraFileError.
    """
    raw = metadata.get(SETTINGS_KEY)
    if raw is None:
        raise LoraFileError("the file does not carry training settings", "only LoRAs trained with Safelight do")
    if len(raw) > MAX_SETTINGS_BYTES:
        raise LoraFileError(
            f"the file's training settings have {len(raw)} bytes; at most {MAX_SETTINGS_BYTES} are read"
        )
    try:
        data = json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise LoraFileError(f"the file's training settings are not JSON: {error}") from error
    if not isinstance(data, dict):
        raise LoraFileError("the file's training settings are not a table")
    preset = _without_places(data)
    try:
        dataset = {**_section(preset, "dataset"), "folder": _NO_FOLDER}
        parse({**preset, "dataset": dataset}, origin="the LoRA's settings")
    except SettingsError as error:
        raise LoraFileError(error.message, "it was trained with another version", problems=error.problems) from error
    return preset


def base_name(source: str) -> str:
    """What may be told about a base: the name of an embedded base, a hub id, or the last part of a path."""
    if source.startswith("embedded/") or _is_hub_id(source):
        return source
    last = PureWindowsPath(source.split("?")[0]).name  # knows both kinds of slashes
    return last or "base"


def _is_hub_id(source: str) -> bool:
    return re.fullmatch(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*", source) is not None and not Path(source).exists()


def _without_places(data: Mapping[str, Any]) -> dict[str, Any]:
    cleaned = dict(data)
    dataset = {key: value for key, value in _section(data, "dataset").items() if key not in _DROPPED_DATASET_KEYS}
    base = _section(data, "base")
    if isinstance(base.get("source"), str):
        base["source"] = base_name(base["source"])
    return {**cleaned, "base": base, "dataset": dataset}


def _section(data: Mapping[str, Any], name: str) -> dict[str, Any]:
    section = data.get(name, {})
    return dict(section) if isinstance(section, Mapping) else {}


# --- hashes ----------------------------------------------------------------------------------------------------------


def file_hashes(tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> dict[str, str]:
    """The hashes by which other programs know a LoRA, over the file with only its `ss_*` metadata.

    As `precalculate_safetensors_hashes` of kohya-ss/sd-scripts (`library/train_util.py`): the model hash is over
    everything after the header; the legacy hash is over 64 KiB at 1 MiB, which is nothing in a smaller file.
    """
    raw = save(dict(tensors), {key: value for key, value in metadata.items() if key.startswith("ss_")})
    after_header = 8 + int.from_bytes(raw[:8], "little")
    digest = hashlib.sha256(memoryview(raw)[after_header:]).hexdigest()
    legacy = hashlib.sha256(raw[0x100000 : 0x100000 + 0x10000]).hexdigest()[:8]
    return {"sshs_model_hash": digest, "sshs_legacy_hash": legacy, "modelspec.hash_sha256": f"0x{digest}"}
