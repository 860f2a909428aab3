"""Which settings a run may change when it goes on. Anything else would silently make it another run."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..errors import Problem

MAY_CHANGE = ("name", "samples.", "checkpoints.", "export.", "train.steps", "train.epochs", "schedule.")


def changed(then: Mapping[str, Any], now: Mapping[str, Any]) -> list[Problem]:
    """Settings, dumped as plain data, that differ and must not; one problem each."""
    before, after = _flat(then), _flat(now)
    return [
        Problem(key, f"was {before.get(key)!r}, is now {after.get(key)!r}", "start a new run for other settings")
        for key in sorted(before.keys() | after.keys())
        if before.get(key) != after.get(key) and not key.startswith(MAY_CHANGE)
    ]


def _flat(data: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in data.items():
        if isinstance(value, Mapping) and value:
            flat.update(_flat(value, f"{prefix}{key}."))
        else:
            flat[prefix + key] = list(value) if isinstance(value, tuple) else value
    return flat
