"""How well pictures show what their scenes say, from pixels only.

Background is the median border colour, the object is what differs from it, its colour the nearest palette entry, its
position the nearest of nine cells, and its shape the answer of a small network that sees the object's cropped distance
from the background. ``python -m engine.embedded.measure --base FOLDER`` samples a model and measures it.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from PIL import Image, ImageDraw
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from engine.embedded.scenes import (
    EXTRA_SHAPES,
    PALETTE,
    POSITIONS,
    SHAPES,
    SIZES,
    Pairs,
    Scene,
    caption,
    draw,
    sample_scenes,
)

_CLASSES = SHAPES + EXTRA_SHAPES
_CROP_PX = 24
_CLASSIFIER_FILE = Path(__file__).with_name("shape_classifier.safetensors")
_VISIBLE = 0.2  # RGB distance, of 1.73 at most, below which a picture shows no object
_OFF_MIDDLE = 0.08  # share of an axis; objects asked for off the middle lie at least 0.1 off after clipping
HOLLOW = 0.06  # from this hollowness on an object counts as outlined; filled renders have 0, outlined ones 0.06 to 0.6


@dataclass(frozen=True)
class Seen:
    """What the metric reads in one picture. All names are empty and ``hollowness`` is 0 where no object is visible."""

    shape: str
    colour: str
    background: str
    position: str
    hollowness: float


# ------------------------------------------------------------------------------------------------------- pixels


def _nearest_colour(rgb: npt.NDArray[np.float32]) -> str:
    return min(PALETTE, key=lambda name: float(np.square(np.array(PALETTE[name]) / 255.0 - rgb).sum()))


def _distance_map(image: Image.Image) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.float32]]:
    """RGB distance (H, W) of each pixel from the background, and the background colour (3,); RGB is 0..1."""
    pixels = np.asarray(image.convert("RGB"), dtype=np.float32) / 255.0
    border = np.concatenate([pixels[0], pixels[-1], pixels[1:-1, 0], pixels[1:-1, -1]])
    background = np.median(border, axis=0).astype(np.float32)
    return np.sqrt(np.square(pixels - background).sum(-1)), background


def _object_mask(distance: npt.NDArray[np.float32]) -> npt.NDArray[np.bool_] | None:
    """Where the object is (H, W), or None where nothing stands out."""
    strength = float(np.quantile(distance, 0.98))
    return None if strength < _VISIBLE else distance > 0.5 * strength


def _box(mask: npt.NDArray[np.bool_]) -> tuple[int, int, int, int]:
    """(top, bottom, left, right), ends exclusive; single stray pixels do not count."""
    rows, columns = np.flatnonzero(mask.sum(1) >= 2), np.flatnonzero(mask.sum(0) >= 2)
    if not len(rows) or not len(columns):
        rows, columns = np.flatnonzero(mask.any(1)), np.flatnonzero(mask.any(0))
    return int(rows[0]), int(rows[-1]) + 1, int(columns[0]), int(columns[-1]) + 1


def _position(box: tuple[int, int, int, int], size: tuple[int, int]) -> str:
    top, bottom, left, right = box

    def cell(start: int, end: int, length: int) -> int:
        offset = (start + end) / (2 * length) - 0.5
        return 1 + (offset > _OFF_MIDDLE) - (offset < -_OFF_MIDDLE)

    return POSITIONS[3 * cell(top, bottom, size[0]) + cell(left, right, size[1])]


def _hollowness(mask: npt.NDArray[np.bool_]) -> float:
    """Share of the silhouette that shows background.

    A pixel is inside when the object lies above, below, left and right of it. Unlike filling holes this still works
    when an outline is broken, and the notches of a filled star or cross are not inside.
    """
    after = [np.logical_or.accumulate(mask, axis=axis) for axis in (0, 1)]
    before = [np.flip(np.logical_or.accumulate(np.flip(mask, axis), axis=axis), axis) for axis in (0, 1)]
    inside = np.logical_and.reduce([*after, *before])
    return float((inside & ~mask).sum() / max((inside | mask).sum(), 1))


def _crop(distance: npt.NDArray[np.float32], mask: npt.NDArray[np.bool_]) -> Tensor:
    """The object on a square, (24, 24), about 0 on background and 1 on the object."""
    top, bottom, left, right = _box(mask)
    side = max(bottom - top, right - left) + 4
    start_row, start_column = (top + bottom - side) // 2, (left + right - side) // 2
    square = np.zeros((side, side), dtype=np.float32)
    rows = slice(max(start_row, 0), min(start_row + side, distance.shape[0]))
    columns = slice(max(start_column, 0), min(start_column + side, distance.shape[1]))
    level = np.median(distance[mask])
    square[
        rows.start - start_row : rows.stop - start_row, columns.start - start_column : columns.stop - start_column
    ] = np.clip(distance[rows, columns] / level, 0.0, 1.2)
    resized = nn.functional.interpolate(
        torch.from_numpy(square)[None, None], (_CROP_PX, _CROP_PX), mode="bilinear", align_corners=False, antialias=True
    )
    return resized[0, 0]


# --------------------------------------------------------------------------------------------------- classifier


def _new_classifier() -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(16, 24, 3, stride=2, padding=1),
        nn.ReLU(),
        nn.Conv2d(24, 32, 3, stride=2, padding=1),
        nn.ReLU(),
        nn.Conv2d(32, 48, 3, stride=2, padding=1),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(48 * 9, len(_CLASSES)),
    )


def load_classifier() -> nn.Sequential:
    """The shipped shape classifier: (B, 1, 24, 24) crops to (B, 11) logits."""
    classifier = _new_classifier()
    classifier.load_state_dict(load_file(_CLASSIFIER_FILE))
    return classifier.eval()


def train_classifier(*, steps: int, seed: int, log: Callable[[str], None] = print) -> nn.Sequential:
    """Train the shape classifier on real renders, sharp and degraded the way generated pictures are, and save it."""
    torch.manual_seed(seed)
    rng = random.Random(seed)
    classifier = _new_classifier()
    optimizer = torch.optim.AdamW(classifier.parameters(), lr=3e-3, weight_decay=1e-3)
    start = time.process_time()
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = 3e-3 * (1.01 - step / steps)
        scenes = sample_scenes(
            rng.getrandbits(30),
            96,
            pairs="all",
            shapes=_CLASSES,
            styles=("filled", "filled", "filled", "outline", "checker"),
            two_objects=0.0,
            gradients=0.0,
        )
        crops, labels = [], []
        for scene in scenes:
            image = _degraded(draw(scene, rng.choice(SIZES), seed=rng.getrandbits(30)), rng)
            distance, _ = _distance_map(image)
            mask = _object_mask(distance)
            if mask is not None:
                crops.append(_crop(distance, mask))
                labels.append(_CLASSES.index(scene.shape))
        logits = classifier(torch.stack(crops)[:, None])
        loss = nn.functional.cross_entropy(logits, torch.tensor(labels))
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
        if step % 50 == 0 or step == steps - 1:
            log(f"classifier step {step} loss {loss.item():.4f} cpu {time.process_time() - start:.0f}s")
    save_file(classifier.state_dict(), _CLASSIFIER_FILE)
    return classifier.eval()


def _degraded(image: Image.Image, rng: random.Random) -> Image.Image:
    """Sometimes softened and noisy, as a decoder's output is."""
    if rng.random() < 0.4:
        factor = rng.uniform(0.4, 0.8)
        width, height = image.size
        small = (max(round(width * factor), 8), max(round(height * factor), 8))
        image = image.resize(small, Image.Resampling.BOX).resize((width, height), Image.Resampling.BICUBIC)
    if rng.random() < 0.4:
        noise = np.random.default_rng(rng.getrandbits(30)).normal(0.0, rng.uniform(2, 10), (*image.size[::-1], 3))
        image = Image.fromarray(np.clip(np.asarray(image) + noise, 0, 255).astype(np.uint8))
    return image


# ------------------------------------------------------------------------------------------------------ measure


def see(images: Sequence[Image.Image], classifier: nn.Sequential | None = None) -> list[Seen]:
    """Read each picture, without knowing what it should show. Meant for one object on a plain background."""
    network = load_classifier() if classifier is None else classifier
    seen = []
    for image in images:
        distance, background = _distance_map(image)
        mask = _object_mask(distance)
        if mask is None:
            seen.append(Seen("", "", _nearest_colour(background), "", 0.0))
            continue
        pixels = np.asarray(image.convert("RGB"), dtype=np.float32) / 255.0
        with torch.no_grad():
            shape = _CLASSES[int(network(_crop(distance, mask)[None, None]).argmax())]
        seen.append(
            Seen(
                shape=shape,
                colour=_nearest_colour(np.median(pixels[mask], axis=0)),
                background=_nearest_colour(background),
                position=_position(_box(mask), distance.shape),
                hollowness=_hollowness(mask),
            )
        )
    return seen


def measure(images: Sequence[Image.Image], scenes: Sequence[Scene]) -> dict[str, float]:
    """Shares in [0, 1] of pictures with the scene's colour, background, position and shape, and of hollow objects.

    Takes single-object scenes on plain backgrounds. ``hollow`` says how many pictures show an outlined object, whatever
    the scene's style; it means nothing for rings.
    """
    if len(images) != len(scenes) or not scenes:
        raise ValueError(f"{len(images)} pictures for {len(scenes)} scenes; there must be as many, and at least one")
    seen = see(images)
    counts = dict.fromkeys(("colour", "background", "position", "shape", "hollow"), 0)
    for found, scene in zip(seen, scenes, strict=True):
        counts["colour"] += found.colour == scene.colour
        counts["background"] += found.background == scene.background
        counts["position"] += found.position == scene.position
        counts["shape"] += found.shape == scene.shape
        counts["hollow"] += found.hollowness >= HOLLOW
    return {name: count / len(scenes) for name, count in counts.items()}


# --------------------------------------------------------------------------------------------------- command line


def generate(
    pipeline: Any,
    captions: Sequence[str],
    sizes: Sequence[tuple[int, int]],
    *,
    steps: int,
    guidance_scale: float,
    seed: int = 0,
    batch_size: int = 24,
) -> list[Image.Image]:
    """One picture per caption. Picture ``i`` starts from seed ``seed + i`` whatever the batching."""
    images: dict[int, Image.Image] = {}
    for size in dict.fromkeys(sizes):
        indices = [index for index, other in enumerate(sizes) if other == size]
        for start in range(0, len(indices), batch_size):
            batch = indices[start : start + batch_size]
            arguments: dict[str, Any] = {
                "prompt": [captions[index] for index in batch],
                "height": size[0],
                "width": size[1],
                "num_inference_steps": steps,
                "generator": [torch.Generator().manual_seed(seed + index) for index in batch],
            }
            if hasattr(pipeline, "transformer"):
                # The pipeline's default pads T5 to 512 tokens, which destroys a model trained on 32.
                arguments["max_sequence_length"] = pipeline.tokenizer_2.model_max_length
                arguments["true_cfg_scale"] = guidance_scale
                arguments["negative_prompt"] = [""] * len(batch)
            else:
                arguments["guidance_scale"] = guidance_scale
            with torch.no_grad():
                made = pipeline(**arguments).images
            images.update(zip(batch, made, strict=True))
    return [images[index] for index in range(len(captions))]


def contact_sheet(images: Sequence[Image.Image], captions: Sequence[str], *, columns: int = 12) -> Image.Image:
    """All pictures doubled in size, each above its caption."""
    width, height = 132, 168
    sheet = Image.new("RGB", (columns * width, -(-len(images) // columns) * height), (90, 90, 90))
    pen = ImageDraw.Draw(sheet)
    for index, (image, text) in enumerate(zip(images, captions, strict=True)):
        x, y = index % columns * width, index // columns * height
        sheet.paste(image.resize((2 * image.width, 2 * image.height), Image.Resampling.NEAREST), (x + 2, y + 2))
        short = text.replace(" background", "").replace("a ", "", 1)
        for line in range(3):
            pen.text((x + 2, y + 131 + 12 * line), short[22 * line : 22 * line + 22], fill=(255, 255, 255))
    return sheet


def measure_base(
    folder: Path, *, count: int = 96, steps: int | None = None, guidance_scale: float | None = None, seed: int = 77
) -> tuple[dict[str, dict[str, float]], Image.Image]:
    """Accuracies on held-out and on seen pairs, ``count`` pictures each, and a contact sheet of the held-out ones.

    Unset values come from the folder's ``safelight.json``.
    """
    from diffusers import DiffusionPipeline

    preview = json.loads((folder / "safelight.json").read_text("utf-8"))["preview"]
    pipeline = DiffusionPipeline.from_pretrained(folder, torch_dtype=torch.float32)
    return measure_pipeline(
        pipeline,
        count=count,
        steps=steps or preview["steps"],
        guidance_scale=preview["guidance_scale"] if guidance_scale is None else guidance_scale,
        seed=seed,
    )


def measure_pipeline(
    pipeline: Any,
    *,
    count: int,
    steps: int,
    guidance_scale: float,
    seed: int,
    kinds: Sequence[Pairs] = ("held_out", "seen"),
) -> tuple[dict[str, dict[str, float]], Image.Image]:
    """Accuracies by kind of pair, ``count`` pictures each over all trained sizes, and a sheet of the held-out ones."""
    pipeline.set_progress_bar_config(disable=True)
    results: dict[str, dict[str, float]] = {}
    sheet = Image.new("RGB", (1, 1))
    for pairs in kinds:
        scenes = sample_scenes(seed, count, pairs=pairs, two_objects=0.0, gradients=0.0)
        captions = [caption(scene) for scene in scenes]
        sizes = [(SIZES[0], *SIZES)[index % (len(SIZES) + 1)] for index in range(count)]
        random.Random(seed).shuffle(sizes)
        images = generate(
            pipeline,
            captions,
            sizes,
            steps=steps,
            guidance_scale=guidance_scale,
            seed=seed,
        )
        results[pairs] = measure(images, scenes)
        if pairs == "held_out":
            sheet = contact_sheet(images, captions)
    return results, sheet


def measure_checkpoints(run: Path, *, count: int) -> Iterator[tuple[int, dict[str, float]]]:
    """Held-out accuracies of the averaged weights in each checkpoint of a full training run: its learning curve."""
    from diffusers import DiffusionPipeline

    from engine import checkpoints, settings, trained

    base = Path(settings.parse(settings.read_toml(run / "settings.toml")).base.source)
    preview = json.loads((base / "safelight.json").read_text("utf-8"))["preview"]
    pipeline = DiffusionPipeline.from_pretrained(base, torch_dtype=torch.float32)
    name = "unet" if hasattr(pipeline, "unet") else "transformer"
    for step in checkpoints.list_steps(run / "checkpoints"):
        folder = checkpoints.step_folder(run / "checkpoints", step)
        average = checkpoints.read_tensors(checkpoints.file_path(folder, "ema", "lagging"))
        state = {key.removeprefix(f"members.{name}."): tensor for key, tensor in average.items()}
        trained.replace_parameters(getattr(pipeline, name), state)
        results, _ = measure_pipeline(pipeline, count=count, seed=77, kinds=("held_out",), **preview)
        yield step, results["held_out"]


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m engine.embedded.measure")
    parser.add_argument("--base", type=Path, required=True, help="a diffusers folder with a safelight.json")
    parser.add_argument("--count", type=int, default=96, help="pictures for held-out pairs, and as many for seen ones")
    parser.add_argument("--steps", type=int)
    parser.add_argument("--guidance", type=float)
    parser.add_argument("--seed", type=int, default=77)
    parser.add_argument("--sheet", type=Path, help="contact sheet PNG; default BASE/../NAME_measure.png")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    start = time.process_time()
    results, sheet = measure_base(
        options.base, count=options.count, steps=options.steps, guidance_scale=options.guidance, seed=options.seed
    )
    path = options.sheet or options.base.parent / f"{options.base.name}_measure.png"
    sheet.save(path)
    report: dict[str, Any] = {
        "base": str(options.base),
        "count": options.count,
        "results": results,
        "sheet": str(path),
        "cpu_s": round(time.process_time() - start, 1),
    }
    print(json.dumps(report, indent=2))


if __name__ == "__main__":
    main()
