"""What writes captions for images: the contract, and the run that keeps existing captions and reports every file."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol, cast

from PIL import Image

from ..data import captions
from ..data.items import Item
from ..data.manifest import load_image
from ..errors import DatasetError, SafelightError, SettingsError

CAPTIONERS = {"template": ".template:TemplateCaptioner"}
"""Name -> module and class, relative to this package. A captioner is one file and one line here."""


@dataclass(frozen=True)
class Picture:
    """One image to caption. `index` counts from 1 over the run."""

    item: Item
    index: int
    background: str

    def pixels(self) -> Image.Image:
        """Upright RGB, decoded only when asked for. Raises DatasetError."""
        return load_image(self.item, self.background)


class Captioner(Protocol):
    """Turns pictures into texts. `run` calls prepare once, caption for each batch, and close in any case.

    `caption` returns one text per picture, in order. Raising in it fails the pictures of that call only: `run` asks
    again for each of them alone, so that one bad picture does not take its batch along.
    """

    def prepare(self) -> None:
        """Load what is needed. Raises MissingPackage or another SafelightError, which ends the run."""

    def caption(self, pictures: Sequence[Picture]) -> list[str]: ...

    def close(self) -> None:
        """Free what `prepare` took."""


Policy = Literal["keep", "overwrite"]


@dataclass(frozen=True)
class Outcome:
    """What happened to one image's caption; `reason` says why when it was not written."""

    name: str
    status: Literal["written", "skipped", "failed"]
    reason: str = ""


@dataclass(frozen=True)
class Report:
    """One outcome per image, in order. `undo_ids` are for `captions.undo`, the last first."""

    outcomes: tuple[Outcome, ...]
    undo_ids: tuple[str, ...]

    def count(self, status: Literal["written", "skipped", "failed"]) -> int:
        return sum(outcome.status == status for outcome in self.outcomes)


def captioner_class(name: str) -> Callable[..., Captioner]:
    """The class behind a name of CAPTIONERS, imported now. Raises SettingsError for an unknown name."""
    if name not in CAPTIONERS:
        raise SettingsError(f"there is no captioner {name!r}", f"choose one of: {', '.join(sorted(CAPTIONERS))}")
    module, _, attribute = CAPTIONERS[name].partition(":")
    return cast("Callable[..., Captioner]", getattr(importlib.import_module(module, __package__), attribute))


def run(
    captioner: Captioner,
    items: Sequence[Item],
    *,
    folder: Path,
    journal: Path,
    policy: Policy = "keep",
    background: str = "#ffffff",
    batch_size: int = 8,
    progress: Callable[[int, int], None] | None = None,
) -> Report:
    """Caption the items of a data set `folder`, writing after each batch, each with an undo record in `journal`.

    With "keep", an image that has a caption file with text in it is skipped. `progress(done, len(items))` is called
    after each batch. Raises only what `captioner.prepare` raises, and WorkspaceError when `journal` cannot be written.
    """
    outcomes: dict[str, Outcome] = {}
    pictures = [Picture(item, index, background) for index, item in enumerate(items, start=1)]
    todo = _to_caption(pictures, policy, outcomes)
    undo_ids: list[str] = []
    if progress:
        progress(len(outcomes), len(items))
    if todo:
        try:
            captioner.prepare()
            for start in range(0, len(todo), batch_size):
                edits = _texts(captioner, todo[start : start + batch_size], outcomes)
                if edits:
                    applied = captions.apply_each(folder, edits, journal)
                    undo_ids.insert(0, applied.id)
                    outcomes |= {name: Outcome(name, "written") for name in edits}
                    outcomes |= {p.where: Outcome(p.where, "failed", p.reason) for p in applied.failed}
                if progress:
                    progress(len(outcomes), len(items))
        finally:
            captioner.close()
    return Report(tuple(outcomes[item.name] for item in items), tuple(undo_ids))


def _to_caption(pictures: Sequence[Picture], policy: Policy, outcomes: dict[str, Outcome]) -> list[Picture]:
    """The pictures to caption; the others get an outcome."""
    todo: list[Picture] = []
    owners: dict[Path, str] = {}
    for picture in pictures:
        name, file = picture.item.name, captions.find_caption(picture.item.path)
        owner = owners.setdefault(file, name)
        if owner != name:
            outcomes[name] = Outcome(name, "skipped", f"shares its caption file with {owner}")
        elif policy == "keep" and (reason := _existing(file)):
            outcomes[name] = Outcome(name, "skipped", reason)
        else:
            todo.append(picture)
    return todo


def _existing(file: Path) -> str:
    """Why a caption file must be kept; empty when there is none or there is nothing in it."""
    try:
        return "has a caption" if captions.read(file).text else ""
    except FileNotFoundError:
        return ""
    except (DatasetError, OSError) as error:
        return f"has a caption file that cannot be read ({error})"


def _texts(captioner: Captioner, pictures: Sequence[Picture], outcomes: dict[str, Outcome]) -> dict[str, str | None]:
    """Name -> new caption of those that got one; the others get an outcome."""
    try:
        texts = _ask(captioner, pictures)
    except Exception as error:  # a captioner may be any model or service; its failures belong to the report
        if len(pictures) > 1:
            alone = [_texts(captioner, [picture], outcomes) for picture in pictures]
            return {name: text for edits in alone for name, text in edits.items()}
        reason = error.message if isinstance(error, SafelightError) else f"{type(error).__name__}: {error}"
        outcomes[pictures[0].item.name] = Outcome(pictures[0].item.name, "failed", reason)
        return {}
    edits: dict[str, str | None] = {}
    for picture, text in zip(pictures, texts, strict=True):
        name = picture.item.name
        if text.strip():
            edits[name] = text.strip()
        else:
            outcomes[name] = Outcome(name, "failed", "the captioner returned an empty caption")
    return edits


def _ask(captioner: Captioner, pictures: Sequence[Picture]) -> list[str]:
    texts = captioner.caption(pictures)
    if len(texts) != len(pictures):
        raise RuntimeError(f"the captioner returned {len(texts)} captions for {len(pictures)} images")
    return texts
