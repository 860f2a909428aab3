"""Every setting there is, and reading and writing it. Imports no torch."""

from .loading import LENGTHS, apply, load, parse, read_toml, resolve_paths, set_dotted, to_toml, without_other_length
from .resuming import changed
from .schema import SCHEMA_VERSION, Settings

__all__ = [
    "LENGTHS",
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
    "without_other_length",
]
