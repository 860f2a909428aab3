"""The contract of a method: what becomes trainable beside or in a base."""

from __future__ import annotations

from typing import Protocol

from ..roles import Bundle, Role


class Method(Protocol):
    def roles(self, ema_decay: float | None) -> tuple[Role, ...]:
        """The roles this method offers over its base."""

    def text_members(self) -> tuple[str, ...]:
        """Text encoders that train along."""

    def attach(self, bundle: Bundle) -> None:
        """Make the policy's weights exist and be float32. Raises SettingsError when the targets find nothing."""
