"""Every setting with its type, default, bounds and meaning, read from the schema, for people.

python -m engine.settings.reference > docs/settings.md
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel

from .loading import sections_in
from .schema import Settings

_KINDS = {"integer": "whole number", "number": "number", "string": "text", "boolean": "true or false"}


@dataclass(frozen=True)
class Row:
    """One setting. `name` is dotted, as in `--set name=value`; `default` is TOML, "required" or "unset"."""

    name: str
    type: str
    default: str
    bounds: str
    meaning: str


@dataclass(frozen=True)
class Group:
    """A section of the settings file, or one variant of it. `variant` is its `type`, empty where there is only one."""

    name: str
    variant: str
    about: str
    default_variant: bool
    rows: tuple[Row, ...]


def groups() -> Iterator[Group]:
    """Every section and variant, in the order of the settings file."""
    yield from _groups(Settings, "", "", default_variant=True)


def rows() -> Iterator[Row]:
    """Every setting; one that several variants have comes once for each."""
    for group in groups():
        yield from group.rows


def markdown() -> str:
    """The reference page."""
    lines = [
        "# Settings",
        "",
        "Made from `engine/settings/schema.py` by `python -m engine.settings.reference`; change it there, not here.",
        "",
        "A settings file is TOML with one table for each section below. On the command line the same names are used:",
        "`--set train.steps=500`. A section that comes in variants takes the one that its `type` names, and only the",
        "settings of that variant; without `type` it is the variant marked as default. An unknown name is an error.",
    ]
    for group in groups():
        title = f"`[{group.name}]`" if group.name else "At the top of the file"
        if group.variant:
            title += f' with `type = "{group.variant}"`' + (" (default)" if group.default_variant else "")
        lines += ["", f"## {title}", "", group.about]
        if group.rows:
            lines += ["", "| setting | type | default | bounds | meaning |", "|---|---|---|---|---|"]
        for row in group.rows:
            cells = (f"`{row.name}`", row.type, f"`{row.default}`", row.bounds, row.meaning)
            lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return "\n".join(lines) + "\n"


# --- reading the schema -----------------------------------------------------------------------------------------------


def _groups(section: type[BaseModel], name: str, variant: str, *, default_variant: bool) -> Iterator[Group]:
    properties: Mapping[str, Any] = section.model_json_schema()["properties"]
    prefix = f"{name}." if name else ""
    plain = []
    inner = []
    for key, field in section.model_fields.items():
        sections = sections_in(field.annotation)
        if sections:
            inner.append((prefix + key, sections, field))
        elif key != "type":
            default = "required" if field.is_required() else _toml(field.get_default(call_default_factory=True))
            schema = properties[key]
            plain.append(Row(prefix + key, _type(schema), default, _bounds(schema), field.description or ""))
    about = " ".join((section.__doc__ or "").split())
    yield Group(name, variant, about, default_variant, tuple(plain))
    for inner_name, sections, field in inner:
        chosen = field.get_default(call_default_factory=True)
        for kind in sections:
            own = kind.model_fields["type"].default if "type" in kind.model_fields else ""
            is_default = len(sections) == 1 or (not field.is_required() and isinstance(chosen, kind))
            yield from _groups(kind, inner_name, own, default_variant=is_default)


def _toml(value: object) -> str:
    if value is None:
        return "unset"
    if isinstance(value, tuple):
        return "[" + ", ".join(_toml(item) for item in value) + "]"
    return json.dumps(value)


def _type(schema: Mapping[str, Any]) -> str:
    choices = [choice for choice in schema.get("anyOf", ()) if choice.get("type") != "null"]
    if choices:
        return " or ".join(dict.fromkeys(_type(choice) for choice in choices))
    if "const" in schema or "enum" in schema:
        values = [schema["const"]] if "const" in schema else schema["enum"]
        return " or ".join(_toml(value) for value in values)
    if schema.get("type") == "array":
        if "prefixItems" in schema:
            return f"list of {len(schema['prefixItems'])}: {_type(schema['prefixItems'][0])}"
        return f"list: {_type(schema['items'])}"
    if schema.get("type") == "object":
        return f"table: name = {_type(schema['additionalProperties'])}"
    return _KINDS[schema["type"]]


def _bounds(schema: Mapping[str, Any]) -> str:
    """What values may be, in words; of the inner values where there are some."""
    choices = [choice for choice in schema.get("anyOf", ()) if choice.get("type") != "null"]
    if choices:
        return "; ".join(dict.fromkeys(text for choice in choices if (text := _bounds(choice))))
    words = []
    if "items" in schema or "prefixItems" in schema or "additionalProperties" in schema:
        inner = schema.get("items") or schema.get("additionalProperties") or schema["prefixItems"][0]
        if isinstance(inner, Mapping) and (text := _bounds(inner)):
            words.append(f"each {text}")
    low, high = schema.get("minimum"), schema.get("maximum")
    if low is not None and high is not None:
        words.append(f"{low} to {high}")
    else:
        lower = (("minimum", "at least"), ("exclusiveMinimum", "above"))
        upper = (("maximum", "at most"), ("exclusiveMaximum", "below"))
        words += [f"{word} {schema[key]}" for key, word in (*lower, *upper) if key in schema]
    if schema.get("minLength") == 1:
        words.append("not empty")
    if "maxLength" in schema:
        words.append(f"at most {schema['maxLength']} characters")
    if "maxItems" in schema and "prefixItems" not in schema:
        words.append(f"at most {schema['maxItems']} of them")
    if "pattern" in schema:
        words.append(f"matches {schema['pattern']}")
    return ", ".join(words)


if __name__ == "__main__":
    print(markdown(), end="")
