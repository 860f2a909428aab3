"""What this machine can do: tried, not guessed from names."""

from __future__ import annotations

import importlib.metadata
import math
import os
import platform
import shutil
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import psutil

from . import __version__
from .errors import Problem
from .workspace import Workspace

if TYPE_CHECKING:
    import torch

PACKAGES = ("torch", "diffusers", "transformers", "peft", "accelerate", "safetensors", "tokenizers", "numpy", "gradio")
OPTIONAL = {"bitsandbytes": "AdamW with 8-bit state (CUDA): pip install 'safelight[cuda8bit]'"}
GIB = 1 << 30

# Billions of weights of the denoiser, the part that stays in memory while training, from the published models.
DENOISERS = {"Stable Diffusion 1.5": 0.86, "FLUX.1-dev": 11.9}
ROOM = 1.35  # memory over the weights that a LoRA with gradient checkpointing needs at the least; an estimate


@dataclass(frozen=True)
class DtypeCheck:
    """Whether a small network could be trained one step in this number format, and how long the step took."""

    dtype: str
    works: bool
    milliseconds: float
    reason: str = ""


@dataclass(frozen=True)
class Device:
    """One place to compute. `free` is in bytes and None where the system does not say."""

    name: str
    title: str
    memory: int
    free: int | None
    dtypes: tuple[DtypeCheck, ...]


@dataclass(frozen=True)
class Report:
    """Everything that was found. `problems` are what keeps things from working, `advice` is for people."""

    version: str
    system: str
    python: str
    workspace: str
    disk_free: int
    memory: int
    memory_free: int
    devices: tuple[Device, ...]
    packages: Mapping[str, str]
    optional: Mapping[str, str]
    problems: tuple[Problem, ...]
    advice: tuple[str, ...]

    def as_dict(self) -> dict[str, object]:
        return asdict(self)


def as_text(report: Report) -> str:
    """The report for people."""
    lines = [
        f"safelight {report.version}, Python {report.python}, {report.system}",
        f"workspace {report.workspace}: {report.disk_free / GIB:.0f} GiB of disk free",
        f"memory: {report.memory_free / GIB:.0f} of {report.memory / GIB:.0f} GiB free",
    ]
    for device in report.devices:
        lines.append(f"{device.name}: {device.title}, {(device.free or device.memory) / GIB:.0f} GiB free")
        for check in device.dtypes:
            verdict = f"works ({check.milliseconds:.1f} ms)" if check.works else f"does not work: {check.reason}"
            lines.append(f"  {check.dtype}: {verdict}")
    lines.append(", ".join(f"{name} {version or 'missing'}" for name, version in report.packages.items()))
    lines += [f"{name}: {version}" for name, version in report.optional.items()]
    lines += [f"Problem: {problem}" for problem in report.problems] or ["The installed packages go together."]
    return "\n".join([*lines, "", *report.advice])


def examine(workspace: Workspace) -> Report:
    """Look at everything and try what can be tried. Takes some seconds, most of them for importing torch."""
    memory = psutil.virtual_memory()
    disk_free = shutil.disk_usage(_existing(workspace.root)).free
    devices = _devices()
    problems = [*_package_problems(), *_workspace_problems(workspace, disk_free)]
    return Report(
        version=__version__,
        system=f"{platform.system()} {platform.release()} {platform.machine()}",
        python=platform.python_version(),
        workspace=str(workspace.root),
        disk_free=disk_free,
        memory=memory.total,
        memory_free=memory.available,
        devices=devices,
        packages={name: _version(name) for name in PACKAGES},
        optional={name: _version(name) or f"not installed: {purpose}" for name, purpose in OPTIONAL.items()},
        problems=tuple(problems),
        advice=_advice(devices),
    )


# --- devices ----------------------------------------------------------------------------------------------------------


def _devices() -> tuple[Device, ...]:
    import torch

    memory = psutil.virtual_memory()
    processor = platform.processor() or platform.machine()
    found = [Device("cpu", f"{processor}, {psutil.cpu_count()} threads", memory.total, memory.available, ())]
    for index in range(torch.cuda.device_count() if torch.cuda.is_available() else 0):
        free, total = torch.cuda.mem_get_info(index)
        found.append(Device(f"cuda:{index}", torch.cuda.get_device_name(index), total, free, ()))
    if torch.backends.mps.is_available():
        found.append(Device("mps", "Apple GPU, which shares the machine's memory", memory.total, memory.available, ()))
    return tuple(
        Device(device.name, device.title, device.memory, device.free, try_dtypes(torch.device(device.name)))
        for device in found
    )


def try_dtypes(device: torch.device) -> tuple[DtypeCheck, ...]:
    """Run a small network forward and backward in each number format."""
    from .precision import DTYPES

    return tuple(_try_dtype(device, name, dtype) for name, dtype in DTYPES.items())


def _try_dtype(device: torch.device, name: str, dtype: torch.dtype) -> DtypeCheck:
    try:
        _training_step(device, dtype)  # the first call also loads kernels
        begin = time.perf_counter()
        gradient = _training_step(device, dtype)
        took = (time.perf_counter() - begin) * 1000
    except (RuntimeError, NotImplementedError, TypeError) as error:  # how torch says that a device lacks something
        return DtypeCheck(name, False, 0.0, (str(error).splitlines() or [type(error).__name__])[0])
    if not (math.isfinite(gradient) and gradient > 0):
        return DtypeCheck(name, False, took, f"the gradient came out as {gradient}")
    return DtypeCheck(name, True, round(took, 2))


def _training_step(device: torch.device, dtype: torch.dtype) -> float:
    """One forward and backward through what diffusion models are made of; the length of the gradient."""
    import torch
    from torch.nn import functional

    generator = torch.Generator().manual_seed(0)

    def weights(*shape: int) -> torch.Tensor:
        return (torch.randn(shape, generator=generator) / 8).to(device, dtype).requires_grad_()

    kernel, project = weights(32, 4, 3, 3), weights(96, 32)
    picture = torch.randn((2, 4, 32, 32), generator=generator).to(device, dtype)
    features = functional.silu(functional.group_norm(functional.conv2d(picture, kernel, padding=1), 8))
    tokens = features.flatten(2).transpose(1, 2)
    query, key, value = functional.linear(tokens, project).unsqueeze(1).chunk(3, dim=-1)
    functional.scaled_dot_product_attention(query, key, value).float().square().mean().backward()
    assert kernel.grad is not None and project.grad is not None
    return float(kernel.grad.float().norm() + project.grad.float().norm())


# --- packages and disk ------------------------------------------------------------------------------------------------


def _package_problems() -> list[Problem]:
    """Installed versions that contradict what installed packages say they need."""
    from packaging.requirements import Requirement  # a dependency of transformers and accelerate

    problems = []
    for name in ("safelight", *PACKAGES):
        try:
            wanted = importlib.metadata.requires(name) or []
        except importlib.metadata.PackageNotFoundError:
            if name != "safelight":  # a source tree may run without being installed
                problems.append(Problem(name, "is not installed", f"pip install {name}"))
            continue
        for requirement in map(Requirement, wanted):
            if requirement.marker is not None and not requirement.marker.evaluate({"extra": ""}):
                continue
            found = _version(requirement.name)
            if not found or not requirement.specifier.contains(found, prereleases=True):
                needed = f"{requirement.name}{requirement.specifier}"
                reason = f"{name} needs {needed}, and {found or 'none'} is installed"
                problems.append(Problem(requirement.name, reason, f"pip install '{needed}'"))
    return problems


def _version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return ""


def _workspace_problems(workspace: Workspace, disk_free: int) -> list[Problem]:
    problems = []
    if not os.access(_existing(workspace.root), os.W_OK):
        problems.append(Problem(str(workspace.root), "cannot be written", "give another folder with --workspace"))
    if disk_free < 2 * GIB:
        reason = f"only {disk_free / GIB:.1f} GiB of the disk are free"
        problems.append(Problem(str(workspace.root), reason, "free some space; checkpoints and caches go there"))
    return problems


def _existing(path: Path) -> Path:
    return next(folder for folder in (path, *path.parents) if folder.exists())


# --- in plain words ---------------------------------------------------------------------------------------------------


def _advice(devices: tuple[Device, ...]) -> tuple[str, ...]:
    best = max(devices, key=lambda device: (device.name != "cpu", device.memory))
    working = {check.dtype for check in best.dtypes if check.works}
    lines = []
    if best.name == "cpu":
        lines.append("There is no accelerator here: embedded bases train in minutes, larger ones very slowly.")
    half = "bf16" if "bf16" in working else "fp16" if "fp16" in working else "fp32"
    if best.name != "cpu":
        lines.append(f"'auto' will train on {best.name} ({best.title}) in {half}.")
    size = 4 if half == "fp32" or best.name == "cpu" else 2
    for title, billions in DENOISERS.items():
        needed = billions * 1e9 * size * ROOM
        fits = needed < (best.free or best.memory)
        verdict = "should fit" if fits else "does not fit"
        lines.append(f"{title}: a LoRA {verdict} (about {needed / GIB:.1f} GiB by the number of weights; an estimate).")
    return tuple(lines)
