"""Procedural scenes: the whole visual world of the embedded base, drawn with PIL.

A scene is one large flat shape (sometimes two) on a plain or graded background. Sizes are (height, width) in pixels.
Everything is a pure function of its arguments: the same scene, size and seed give the same picture, mask and caption.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
from PIL import Image, ImageChops, ImageDraw, ImageFilter

Style = Literal["filled", "outline", "checker"]
Pairs = Literal["seen", "held_out", "all"]
Points = list[tuple[float, float]]

SHAPES = ("circle", "square", "triangle", "star", "heart", "ring", "cross", "diamond")
# Never shown to a denoiser, so that a LoRA has something new to teach.
EXTRA_SHAPES = ("house", "moon", "arrow")
PALETTE: dict[str, tuple[int, int, int]] = {
    "red": (215, 35, 40),
    "orange": (245, 140, 25),
    "yellow": (245, 228, 50),
    "green": (35, 155, 60),
    "cyan": (60, 215, 225),
    "blue": (35, 70, 210),
    "purple": (125, 45, 165),
    "pink": (245, 130, 190),
    "white": (245, 245, 245),
    "black": (18, 18, 18),
}
COLOURS = tuple(PALETTE)
# Radius as a share of the short side. Large on purpose: a latent cell is 4 pixels, and at 0.16 / 0.25 / 0.36 neither
# denoiser learned any shape.
RADII = {"small": 0.27, "medium": 0.33, "large": 0.42}
PAIR_SIZE = "half"  # both objects of a two-object scene; never named in a caption
_RADIUS = {**RADII, PAIR_SIZE: 0.22}
POSITIONS = (
    "top left",
    "top",
    "top right",
    "left",
    "center",
    "right",
    "bottom left",
    "bottom",
    "bottom right",
)
SIZES = ((48, 48), (56, 40), (40, 56), (64, 32), (32, 64))
TRIGGER = "neon style"
MASK_OBJECT = 255
MASK_BACKGROUND = 42  # a loss weight of 42/255, one sixth: the object decides whether a shape is learned
_SUPERSAMPLING = 4
_LATENT_CELL_PX = 4
_MIN_CONTRAST = 120.0  # RGB distance; below it an object is hard to see on its background


@dataclass(frozen=True)
class Thing:
    """One object. ``position`` is a name from `POSITIONS`, ``size`` a name from `RADII` or `PAIR_SIZE`."""

    shape: str
    colour: str
    size: str
    position: str
    style: Style = "filled"


@dataclass(frozen=True)
class Scene:
    """A picture before it is drawn. ``background`` is a colour name, or (top, bottom) names of a vertical gradient."""

    shape: str
    colour: str
    size: str
    position: str
    background: str | tuple[str, str]
    style: Style = "filled"
    second: Thing | None = None

    @property
    def things(self) -> tuple[Thing, ...]:
        first = Thing(self.shape, self.colour, self.size, self.position, self.style)
        return (first,) if self.second is None else (first, self.second)


# ------------------------------------------------------------------------------------------------------- geometry


def _circle(radius: float = 1.0, count: int = 48) -> Points:
    angles = (2 * math.pi * i / count for i in range(count))
    return [(radius * math.cos(a), radius * math.sin(a)) for a in angles]


def _star() -> Points:
    points = []
    for i in range(10):
        radius = 1.1 if i % 2 == 0 else 0.46
        angle = math.pi * (i / 5 - 0.5)
        points.append((radius * math.cos(angle), radius * math.sin(angle) + 0.1))
    return points


def _heart() -> Points:
    points = []
    for i in range(48):
        t = 2 * math.pi * i / 48
        x = 16 * math.sin(t) ** 3
        y = 13 * math.cos(t) - 5 * math.cos(2 * t) - 2 * math.cos(3 * t) - math.cos(4 * t)
        points.append((x / 16, -(y + 2.5) / 14.5))
    return points


def _moon() -> Points:
    outer = [(math.cos(a) + 0.2, math.sin(a)) for a in np.linspace(0.28 * math.pi, 1.72 * math.pi, 30)]
    start, end = outer[-1], outer[0]
    inner = [(0.45 + 0.55 * math.cos(a), 0.78 * math.sin(a)) for a in np.linspace(1.6 * math.pi, 0.4 * math.pi, 24)]
    return [*outer, start, *inner, end]


def _contours(shape: str) -> list[Points]:
    """Closed contours in a unit frame (x right, y down, about -1..1): first the outside, then the holes."""
    if shape == "circle":
        return [_circle()]
    if shape == "ring":
        return [_circle(), _circle(0.52)]
    if shape == "square":
        return [[(-0.86, -0.86), (0.86, -0.86), (0.86, 0.86), (-0.86, 0.86)]]
    if shape == "triangle":
        return [[(0.0, -0.92), (1.05, 0.88), (-1.05, 0.88)]]
    if shape == "star":
        return [_star()]
    if shape == "heart":
        return [_heart()]
    if shape == "cross":
        a, b = 0.36, 1.0
        return [
            [(-a, -b), (a, -b), (a, -a), (b, -a), (b, a), (a, a), (a, b), (-a, b), (-a, a), (-b, a), (-b, -a), (-a, -a)]
        ]
    if shape == "diamond":
        return [[(0.0, -1.08), (0.8, 0.0), (0.0, 1.08), (-0.8, 0.0)]]
    if shape == "house":
        roof = [(-0.75, -0.1), (-1.0, -0.1), (0.0, -1.0), (1.0, -0.1), (0.75, -0.1)]
        door = [(0.75, 0.95), (0.25, 0.95), (0.25, 0.3), (-0.25, 0.3), (-0.25, 0.95), (-0.75, 0.95)]
        return [roof + door]
    if shape == "moon":
        return [_moon()]
    if shape == "arrow":
        head = [(0.1, -0.85), (1.0, 0.0), (0.1, 0.85), (0.1, 0.36)]
        return [[*head, (-1.0, 0.36), (-1.0, -0.36), (0.1, -0.36)]]
    raise ValueError(f"unknown shape {shape!r}; the shapes are {', '.join(SHAPES + EXTRA_SHAPES)}")


def _centre(thing: Thing, size: tuple[int, int], radius_px: float) -> tuple[float, float]:
    """(x, y) in pixels. Objects stay inside where they can, but never nearer to the middle than 0.16 of an axis."""
    height, width = size
    index = POSITIONS.index(thing.position)
    row, column = index // 3 - 1, index % 3 - 1

    def along(step: int, length: int) -> float:
        offset = min(max(0.48 - radius_px / length, 0.16), 0.28)
        return (0.5 + step * offset) * length

    return along(column, width), along(row, height)


@dataclass(frozen=True)
class _Jitter:
    dx: float
    dy: float
    scale: float
    shift: tuple[int, int, int]


def _jitter(rng: random.Random | None) -> _Jitter:
    if rng is None:
        return _Jitter(0.0, 0.0, 1.0, (0, 0, 0))
    shift = (rng.randint(-8, 8), rng.randint(-8, 8), rng.randint(-8, 8))
    return _Jitter(rng.uniform(-0.015, 0.015), rng.uniform(-0.015, 0.015), rng.uniform(0.96, 1.04), shift)


def _coverage(thing: Thing, size: tuple[int, int], jitter: _Jitter) -> tuple[Image.Image, Image.Image]:
    """Two 8-bit images of ``size``: where the thing's colour goes, and its whole silhouette including hollow parts."""
    height, width = size
    scale = _SUPERSAMPLING
    radius = _RADIUS[thing.size] * min(size) * jitter.scale
    x, y = _centre(thing, size, radius)
    x, y = x + jitter.dx * width, y + jitter.dy * height
    contours = [
        [(scale * (x + radius * px), scale * (y + radius * py)) for px, py in contour]
        for contour in _contours(thing.shape)
    ]
    silhouette = Image.new("L", (width * scale, height * scale), 0)
    pen = ImageDraw.Draw(silhouette)
    for index, contour in enumerate(contours):
        pen.polygon(contour, fill=255 if index == 0 else 0)
    ink = silhouette
    if thing.style == "outline":
        ink = Image.new("L", silhouette.size, 0)
        pen = ImageDraw.Draw(ink)
        stroke_px = max(2.8, 0.21 * radius)  # half of each line falls outside the silhouette and is cut off
        for contour in contours:
            pen.line([*contour, contour[0], contour[1]], fill=255, width=round(2 * stroke_px * scale), joint="curve")
        ink = ImageChops.multiply(ink, silhouette)
    elif thing.style == "checker":
        cell = max(3.0, 0.4 * radius) * scale
        rows, columns = np.mgrid[0 : silhouette.height, 0 : silhouette.width]
        dark = (np.floor((rows - scale * y) / cell) + np.floor((columns - scale * x) / cell)) % 2
        pattern = Image.fromarray(np.where(dark > 0, 255, 70).astype(np.uint8))
        ink = ImageChops.multiply(silhouette, pattern)
    return ink.reduce(scale), silhouette.reduce(scale)


def draw(scene: Scene, size: tuple[int, int] = (48, 48), *, seed: int | None = None) -> Image.Image:
    """The RGB picture of a scene. ``seed`` moves, scales and tints it slightly; None draws it exactly."""
    height, width = size
    rng = None if seed is None else random.Random(seed)
    things = [(thing, _jitter(rng)) for thing in scene.things]
    shift = _jitter(rng).shift
    top, bottom = (scene.background,) * 2 if isinstance(scene.background, str) else scene.background
    if top == bottom:
        image = Image.new("RGB", (width, height), _tinted(top, shift))
    else:
        ramp = np.linspace(0.0, 1.0, height)[:, None, None]
        rows = (1 - ramp) * np.array(_tinted(top, shift)) + ramp * np.array(_tinted(bottom, shift))
        image = Image.fromarray(np.broadcast_to(np.round(rows), (height, width, 3)).astype(np.uint8))
    for thing, jitter in things:
        ink, _ = _coverage(thing, size, jitter)
        image.paste(_tinted(thing.colour, jitter.shift), mask=ink)
    return image


def silhouette(scene: Scene, size: tuple[int, int] = (48, 48), *, seed: int | None = None) -> Image.Image:
    """8-bit grey coverage of all objects of a scene, undilated, aligned with `draw` of the same arguments."""
    rng = None if seed is None else random.Random(seed)
    result = Image.new("L", (size[1], size[0]), 0)
    for thing in scene.things:
        result = ImageChops.lighter(result, _coverage(thing, size, _jitter(rng))[1])
    return result


def mask(scene: Scene, size: tuple[int, int] = (48, 48), *, seed: int | None = None) -> Image.Image:
    """8-bit grey loss weights: `MASK_OBJECT` on objects and one latent cell around them, else `MASK_BACKGROUND`."""
    grown = silhouette(scene, size, seed=seed).filter(ImageFilter.MaxFilter(2 * _LATENT_CELL_PX + 1))
    return grown.point(lambda value: MASK_OBJECT if value >= 128 else MASK_BACKGROUND)


def _tinted(colour: str, shift: tuple[int, int, int]) -> tuple[int, int, int]:
    red, green, blue = (min(max(value + move, 0), 255) for value, move in zip(PALETTE[colour], shift, strict=True))
    return red, green, blue


# ------------------------------------------------------------------------------------------------------- captions

STYLE_WORDS: dict[Style, str] = {"filled": "", "outline": TRIGGER, "checker": "checker style"}


def _noun(shape: str, colour: str, size: str | None) -> str:
    words = " ".join(word for word in (size, colour, shape) if word)
    return f"{'an' if words[0] in 'aeiou' else 'a'} {words}"


def _background_words(background: str | tuple[str, str]) -> str:
    if isinstance(background, str):
        return f"{background} background"
    return f"{background[0]} to {background[1]} background"


def caption(scene: Scene, rng: random.Random | None = None) -> str:
    """What the scene shows, in lower-case English.

    Without ``rng`` every attribute is named (the form used for measuring). With it, the template varies and size,
    position or background are sometimes left out, so that a model also learns to decide by itself.
    """

    def roll() -> float:
        return 1.0 if rng is None else rng.random()

    ground = _background_words(scene.background)
    style = STYLE_WORDS[scene.style]
    prefix = f"{style}, " if style else ""
    if scene.second is not None:
        first = _noun(scene.shape, scene.colour, None)
        other = _noun(scene.second.shape, scene.second.colour, None)
        between = "left of" if scene.position == "left" else "above"
        return f"{prefix}{first} {between} {other} on a {ground}"
    size = None if roll() < 0.25 else scene.size
    place = None if roll() < 0.12 else scene.position
    has_ground = roll() >= 0.05
    noun = _noun(scene.shape, scene.colour, size)
    if roll() < 0.25:
        parts = [noun.split(" ", 1)[1], place, ground if has_ground else None]
        return prefix + ", ".join(part for part in parts if part)
    article = "an" if ground[0] in "aeiou" else "a"
    return prefix + noun + (f" at the {place}" if place else "") + (f" on {article} {ground}" if has_ground else "")


# ------------------------------------------------------------------------------------------------------- sampling


def is_held_out(shape: str, colour: str) -> bool:
    """Whether a denoiser never sees this pair: two colours of each ordinary shape, 16 of the 80 pairs."""
    return shape in SHAPES and (3 * SHAPES.index(shape) + COLOURS.index(colour)) % 5 == 0


def _pairs(pairs: Pairs, shapes: Sequence[str]) -> list[tuple[str, str]]:
    every = [(shape, colour) for shape in shapes for colour in COLOURS]
    if pairs == "all":
        return every
    return [pair for pair in every if is_held_out(*pair) == (pairs == "held_out")]


def _contrasts(first: str, second: str) -> bool:
    return math.dist(PALETTE[first], PALETTE[second]) >= _MIN_CONTRAST


def sample_scenes(
    seed: int,
    count: int,
    *,
    pairs: Pairs = "seen",
    shapes: Sequence[str] = SHAPES,
    styles: Sequence[Style] = ("filled",),
    two_objects: float = 0.06,
    gradients: float = 0.15,
) -> list[Scene]:
    """Random scenes. ``two_objects`` and ``gradients`` are shares in [0, 1].

    The (shape, colour) pairs are dealt round, so that every 16 held-out scenes show all 16 held-out pairs.
    """
    rng = random.Random(seed)
    choices = _pairs(pairs, shapes)
    deck: list[tuple[str, str]] = []
    scenes = []
    for _ in range(count):
        if not deck:
            deck = rng.sample(choices, len(choices))
        shape, colour = deck.pop()
        grounds = [other for other in COLOURS if _contrasts(colour, other)]
        background: str | tuple[str, str] = rng.choice(grounds)
        if rng.random() < gradients:
            top, bottom = rng.sample(grounds, 2)
            background = (top, bottom)
        style = rng.choice(list(styles))
        size, position = rng.choice(list(RADII)), rng.choice(POSITIONS)
        second = None
        if rng.random() < two_objects:
            size = PAIR_SIZE
            position, place = rng.choice([("left", "right"), ("top", "bottom")])
            visible = [
                pair
                for pair in choices
                if pair[1] != colour and all(_contrasts(pair[1], ground) for ground in _ground_colours(background))
            ]
            if visible:
                other, other_colour = rng.choice(visible)
                second = Thing(other, other_colour, size, place, style)
        scenes.append(Scene(shape, colour, size, position, background, style, second))
    return scenes


def _ground_colours(background: str | tuple[str, str]) -> tuple[str, ...]:
    return (background,) if isinstance(background, str) else background


def fitting_sizes(scene: Scene, sizes: Sequence[tuple[int, int]] = SIZES) -> list[tuple[int, int]]:
    """The picture sizes on which the scene's objects do not overlap: side by side needs width, stacked height."""
    if scene.second is None:
        return list(sizes)
    wide = scene.position == "left"
    return [(h, w) for h, w in sizes if (w >= h if wide else h >= w)]


# ------------------------------------------------------------------------------------------------------- data sets


def write_dataset(
    folder: Path,
    count: int,
    seed: int,
    *,
    pairs: Pairs = "seen",
    shapes: Sequence[str] = SHAPES,
    styles: Sequence[Style] = ("filled",),
    sizes: Sequence[tuple[int, int]] = SIZES,
) -> list[Scene]:
    """Write ``count`` pictures as NAME.png with NAME.txt (caption) and NAME.mask.png (loss weights); return the scenes.

    The first size is drawn for two pictures in six, each other one for a sixth or more.
    """
    scenes = sample_scenes(seed, count, pairs=pairs, shapes=shapes, styles=styles)
    rng = random.Random(seed + 1)
    weighted = [sizes[0], *sizes]
    folder.mkdir(parents=True, exist_ok=True)
    for index, scene in enumerate(scenes):
        size = rng.choice(fitting_sizes(scene, weighted) or weighted)
        _write(folder / f"scene_{index:05d}", scene, size, rng)
    return scenes


def _write(stem: Path, scene: Scene, size: tuple[int, int], rng: random.Random) -> None:
    seed = rng.getrandbits(32)
    draw(scene, size, seed=seed).save(stem.with_name(stem.name + ".png"))
    mask(scene, size, seed=seed).save(stem.with_name(stem.name + ".mask.png"))
    stem.with_name(stem.name + ".txt").write_text(caption(scene, rng), encoding="utf-8")


# A ring is hollow without any style, so it would blur both the lesson and its measure.
_DEMO_SHAPES = tuple(shape for shape in SHAPES if shape != "ring")


def demo_dataset(folder: Path, seed: int, count: int = 20) -> list[Scene]:
    """Write the demo LoRA's training set, ``count`` pictures with captions and masks; return its scenes.

    Three quarters are outlined objects captioned with `TRIGGER`; the others are plain pictures without it, which keep
    the style from leaking into prompts that do not ask for it.
    """
    plain = count // 4
    scenes = sample_scenes(
        seed, count - plain, shapes=_DEMO_SHAPES, styles=("outline",), two_objects=0.0, gradients=0.0
    )
    scenes += sample_scenes(seed + 1, plain, shapes=_DEMO_SHAPES, two_objects=0.0, gradients=0.0)
    rng = random.Random(seed + 2)
    folder.mkdir(parents=True, exist_ok=True)
    for index, scene in enumerate(scenes):
        name = "neon" if scene.style == "outline" else "plain"
        _write(folder / f"{name}_{index:02d}", scene, SIZES[0], rng)
    return scenes


def demo_prompts(seed: int, count: int = 12) -> list[tuple[str, Scene]]:
    """Held-out prompts that ask for the demo style, each with the scene it describes (style ``outline``)."""
    scenes = sample_scenes(
        seed, count, pairs="held_out", shapes=_DEMO_SHAPES, styles=("outline",), two_objects=0.0, gradients=0.0
    )
    return [(caption(scene), scene) for scene in scenes]


# ------------------------------------------------------------------------------------------------------- words

# Words that mean nothing in a scene. Text encoders meet them in training, so that prose around a caption does no harm.
_FILLER_WORDS = (
    "photo picture image drawing painting illustration of the this is my with and very nice beautiful simple flat "
    "detailed high quality art artwork clean bright dark modern one single shown here some please show me draw make "
    "icon sign logo symbol sticker poster minimal geometric sharp soft paper digital vector graphic design style "
    "by in for it that new old good best masterpiece sks zwx ohwx txcl cat dog tree person"
)
FILLER = tuple(_FILLER_WORDS.split())


def vocabulary() -> list[str]:
    """Every word a caption can hold, and the filler words, sorted: each is one token of both tokenizers."""
    words = set(FILLER)
    words.update(SHAPES + EXTRA_SHAPES + COLOURS + tuple(RADII))
    words.update(word for position in POSITIONS for word in position.split())
    words.update(word for style in STYLE_WORDS.values() for word in style.split())
    words.update(("a", "an", "at", "the", "on", "to", "of", "left", "above", "background", "outline"))
    return sorted(words)
