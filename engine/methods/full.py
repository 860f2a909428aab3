"""Full training: every weight of the denoiser."""

from __future__ import annotations

from ..roles import EMA, POLICY, Bundle, Role, ema_keep


class FullMethod:
    """See `Method`."""

    def roles(self, ema_decay: float | None) -> tuple[Role, ...]:
        policy = Role(POLICY, "trainable", "module")
        if ema_decay is None:
            return (policy,)
        return policy, Role(EMA, "lagging", "module", follows=POLICY, keep=ema_keep(ema_decay))

    def text_members(self) -> tuple[str, ...]:
        return ()

    def attach(self, bundle: Bundle) -> None:
        bundle.denoiser.float()  # float32 masters
