"""What a run has trained so far, read from its newest checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor, nn

from . import checkpoints, settings
from .errors import CheckpointError
from .lora_weights import LoraWeights
from .methods.lora import weights_from_parameters
from .plan import BasePlan, plan_base
from .roles import EMA, POLICY
from .runs import RunFolder
from .settings.schema import Lora, Settings


@dataclass(frozen=True)
class Trained:
    """The weights a user gets: the average where the run keeps one, else the live ones.

    `lora` for adapters, `denoiser` (state dict by the denoiser's own names) for fully trained bases; the other is None.
    """

    settings: Settings
    base: BasePlan
    step: int
    epoch: int
    lora: LoraWeights | None
    denoiser: Mapping[str, Tensor] | None


def read(run: RunFolder) -> Trained:
    """Raises CheckpointError when the run has no checkpoint or it is damaged."""
    folder = checkpoints.newest(run.checkpoints)
    if folder is None:
        raise CheckpointError(f"run {run.name} has no checkpoint yet", "wait for one, or ask the run to save")
    chosen = settings.parse(settings.read_toml(run.settings), origin=run.settings.name)
    manifest = checkpoints.read_manifest(folder)
    base = plan_base(chosen)
    average = any(entry.role == EMA for entry in manifest.entries)
    entry = manifest.entry(EMA, "lagging") if average else manifest.entry(POLICY, "weights")
    tensors = checkpoints.read_tensors(checkpoints.entry_file(folder, entry))
    if isinstance(chosen.method, Lora):
        return Trained(
            chosen, base, manifest.step, manifest.epoch, weights_from_parameters(tensors, chosen.method), None
        )
    prefix = f"members.{base.family.spec.denoiser}."
    denoiser = {name.removeprefix(prefix): tensor for name, tensor in tensors.items()}
    return Trained(chosen, base, manifest.step, manifest.epoch, None, denoiser)


def replace_parameters(module: nn.Module, state: Mapping[str, Tensor]) -> None:
    """Give a module fully trained weights, in place. Raises CheckpointError unless every parameter gets its own."""
    parameters = dict(module.named_parameters())
    odd = sorted(parameters.keys() ^ state.keys())
    if odd:
        raise CheckpointError(f"the trained weights are of another model: {len(odd)} differ, for instance {odd[0]}")
    for name, parameter in parameters.items():
        parameter.data.copy_(state[name])
