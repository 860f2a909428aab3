"""Every setting there is, and reading and writing it. Imports no torch."""

from .loading import load, parse, read_toml, set_dotted, to_toml
from .schema import SCHEMA_VERSION, Settings

__all__ = ["SCHEMA_VERSION", "Settings", "load", "parse", "read_toml", "set_dotted", "to_toml"]
