"""The contract of a method: what becomes trainable, and how those weights are written and read."""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

from ..roles import Bundle, Role


class Method(Protocol):
    """`weights_file` is the file name that `save` writes and `restore` reads in a role's folder of a checkpoint."""

    weights_file: str

    def roles(self, ema_decay: float | None) -> tuple[Role, ...]:
        """The roles this method offers over its base."""

    def text_members(self) -> tuple[str, ...]:
        """Text encoders that train along."""

    def attach(self, bundle: Bundle) -> None:
        """Make the policy's weights exist and be float32. Raises SettingsError when the targets find nothing."""

    def save(self, bundle: Bundle, path: Path) -> None:
        """Write the active role's weights, exact, to a file."""

    def restore(self, bundle: Bundle, path: Path) -> None:
        """Read weights into the policy in place. Raises CheckpointError when they do not fit."""
