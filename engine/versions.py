"""Versions of the packages that decide results."""

from __future__ import annotations

import platform
from importlib import metadata

PACKAGES = ("safelight", "torch", "diffusers", "transformers", "peft", "accelerate", "safetensors", "numpy", "pillow")


def versions() -> dict[str, str]:
    """Package name -> installed version, and Python's own."""
    found = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = "not installed"
    return found
