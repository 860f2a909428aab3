"""Full training: every weight of the denoiser."""

from __future__ import annotations

from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from ..errors import CheckpointError
from ..roles import EMA, POLICY, Bundle, Role, ema_keep


class FullMethod:
    """See `Method`. The weights file has the denoiser's own names, as diffusers reads them."""

    weights_file = "diffusion_pytorch_model.safetensors"

    def roles(self, ema_decay: float | None) -> tuple[Role, ...]:
        policy = Role(POLICY, "trainable", "module")
        if ema_decay is None:
            return (policy,)
        return policy, Role(EMA, "lagging", "module", follows=POLICY, keep=ema_keep(ema_decay))

    def text_members(self) -> tuple[str, ...]:
        return ()

    def attach(self, bundle: Bundle) -> None:
        bundle.denoiser.float()  # float32 masters

    def save(self, bundle: Bundle, path: Path) -> None:
        state = {name: tensor.detach().cpu().contiguous().clone() for name, tensor in bundle.denoiser.state_dict().items()}
        save_file(state, path, metadata={"format": "pt"})

    def restore(self, bundle: Bundle, path: Path) -> None:
        try:
            state = load_file(path)
        except (OSError, SafetensorError) as error:
            raise CheckpointError(f"{path} cannot be read: {error}") from error
        own = bundle.denoiser.state_dict()
        odd = sorted(set(own) ^ set(state)) or [n for n in own if own[n].shape != state[n].shape]
        if odd:
            raise CheckpointError(f"{path} is of another denoiser: {len(odd)} weights differ, for instance {odd[0]}")
        for name, tensor in own.items():
            tensor.copy_(state[name])  # in place: the optimizer and the prepared root hold these very tensors
