"""Every setting there is, and reading and writing it. Imports no torch."""

from .loading import apply, load, parse, read_toml, resolve_paths, set_dotted, to_toml
from .resuming import changed
from .schema import SCHEMA_VERSION, Settings

__all__ = [
    "SCHEMA_VERSION",
    "Settings",
    "apply",
    "changed",
    "load",
    "parse",
    "read_toml",
    "resolve_paths",
    "set_dotted",
    "to_toml",
]
