"""Seeds from tuples, so that no draw depends on what was drawn before it."""

from __future__ import annotations

import hashlib


def seed_of(*parts: int | str) -> int:
    """A 63-bit seed from a tuple: the same parts give the same draws, on every machine and after a resume."""
    digest = hashlib.sha256("/".join(str(part) for part in parts).encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1
