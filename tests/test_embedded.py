"""The embedded base's pictures, captions, tokenizers and metric."""

from __future__ import annotations

import math
import random
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from engine.embedded.scenes import (
    COLOURS,
    MASK_BACKGROUND,
    MASK_OBJECT,
    POSITIONS,
    SHAPES,
    SIZES,
    TRIGGER,
    Scene,
    Thing,
    caption,
    demo_dataset,
    demo_prompts,
    draw,
    fitting_sizes,
    is_held_out,
    mask,
    sample_scenes,
    silhouette,
    vocabulary,
    write_dataset,
)

# ---------------------------------------------------------------------------------------------------------- scenes


def test_sixteen_of_the_eighty_pairs_are_held_out_two_for_each_shape() -> None:
    held_out = [(shape, colour) for shape in SHAPES for colour in COLOURS if is_held_out(shape, colour)]
    assert len(held_out) == 16
    assert all(sum(shape == other for other, _ in held_out) == 2 for shape in SHAPES)


def test_seen_scenes_never_show_a_held_out_pair_even_as_second_object() -> None:
    scenes = sample_scenes(1, 2000, two_objects=0.3)
    assert sum(scene.second is not None for scene in scenes) > 400
    assert not any(is_held_out(thing.shape, thing.colour) for scene in scenes for thing in scene.things)


def test_sixteen_held_out_scenes_show_all_sixteen_held_out_pairs() -> None:
    scenes = sample_scenes(2, 16, pairs="held_out")
    assert {(scene.shape, scene.colour) for scene in scenes} == {
        (shape, colour) for shape in SHAPES for colour in COLOURS if is_held_out(shape, colour)
    }


def test_the_same_seed_gives_the_same_scenes_pictures_and_captions() -> None:
    first, again = sample_scenes(3, 20), sample_scenes(3, 20)
    assert first == again
    assert sample_scenes(4, 20) != first
    for scene in first:
        assert draw(scene, seed=5).tobytes() == draw(scene, seed=5).tobytes()
        assert caption(scene, random.Random(1)) == caption(scene, random.Random(1))
    assert draw(first[0], seed=5).tobytes() != draw(first[0], seed=6).tobytes()


@pytest.mark.parametrize("size", SIZES)
def test_pictures_and_masks_have_the_height_and_width_asked_for(size: tuple[int, int]) -> None:
    scene = Scene("star", "red", "large", "top left", ("white", "cyan"))
    for image in (draw(scene, size, seed=1), mask(scene, size, seed=1), silhouette(scene, size, seed=1)):
        assert (image.height, image.width) == size


def test_every_object_stays_mostly_inside_the_picture() -> None:
    def area(scene: Scene, size: tuple[int, int]) -> float:
        return float(np.asarray(silhouette(scene, size), dtype=np.float64).sum())

    for size in SIZES:
        for length in ("small", "medium", "large"):
            for shape in SHAPES:
                whole = area(Scene(shape, "red", length, "center", "white"), size)
                for position in POSITIONS:
                    assert area(Scene(shape, "red", length, position, "white"), size) > 0.8 * whole


def test_the_mask_covers_everything_that_differs_from_the_background() -> None:
    for index, scene in enumerate(sample_scenes(6, 60, gradients=0.0)):
        size = fitting_sizes(scene)[0]
        pixels = np.asarray(draw(scene, size, seed=index), dtype=np.int32)
        weights = np.asarray(mask(scene, size, seed=index))
        assert set(np.unique(weights)) == {MASK_BACKGROUND, MASK_OBJECT}
        background = pixels[weights == MASK_BACKGROUND]
        assert (background == background[0]).all()


def test_two_objects_do_not_overlap_on_the_sizes_that_fit_them() -> None:
    scenes = [scene for scene in sample_scenes(7, 600, two_objects=1.0) if scene.second is not None]
    assert len(scenes) > 500
    for scene in scenes[:100]:
        assert isinstance(scene.second, Thing)
        alone = Scene(scene.second.shape, scene.second.colour, scene.second.size, scene.second.position, "white")
        first = Scene(scene.shape, scene.colour, scene.size, scene.position, "white")
        for size in fitting_sizes(scene):
            both = [np.asarray(silhouette(part, size)) > 200 for part in (first, alone)]
            assert not (both[0] & both[1]).any()


def test_a_full_caption_names_every_attribute() -> None:
    scene = Scene("heart", "orange", "large", "bottom left", "blue")
    assert caption(scene) == "a large orange heart at the bottom left on a blue background"


def test_nearly_all_captions_name_shape_and_colour() -> None:
    rng = random.Random(1)
    scenes = sample_scenes(8, 500)
    assert all(scene.shape in caption(scene, rng) and scene.colour in caption(scene, rng) for scene in scenes)


def test_an_unknown_shape_is_refused_with_the_shapes_there_are() -> None:
    with pytest.raises(ValueError, match="unknown shape 'blob'; the shapes are circle"):
        draw(Scene("blob", "red", "small", "top", "white"))


# -------------------------------------------------------------------------------------------------------- data sets


def test_every_picture_of_a_data_set_has_a_caption_and_a_mask_of_its_size(tmp_path: Path) -> None:
    scenes = write_dataset(tmp_path, 60, seed=1)
    pictures = sorted(path for path in tmp_path.glob("*.png") if not path.name.endswith(".mask.png"))
    assert len(pictures) == len(scenes) == 60
    assert len(list(tmp_path.iterdir())) == 3 * 60
    sizes = set()
    for path in pictures:
        image = Image.open(path)
        weights = Image.open(path.with_name(path.stem + ".mask.png"))
        assert image.mode == "RGB" and weights.mode == "L" and weights.size == image.size
        words = path.with_suffix(".txt").read_text("utf-8").replace(",", "").split()
        assert words and set(words) <= set(vocabulary())
        sizes.add((image.height, image.width))
    assert sizes == set(SIZES)


def test_only_the_outlined_pictures_of_the_demo_set_carry_the_trigger(tmp_path: Path) -> None:
    scenes = demo_dataset(tmp_path, seed=1, count=20)
    captions = {path.stem: path.read_text("utf-8") for path in tmp_path.glob("*.txt")}
    assert len(captions) == len(scenes) == 20
    assert sum(text.startswith(TRIGGER) for text in captions.values()) == 15
    assert all(text.startswith(TRIGGER) == name.startswith("neon") for name, text in captions.items())


def test_demo_prompts_ask_for_the_style_on_pairs_that_no_training_picture_shows(tmp_path: Path) -> None:
    trained = {(scene.shape, scene.colour) for scene in demo_dataset(tmp_path, seed=1)}
    prompts = demo_prompts(1, 12)
    assert len(prompts) == 12
    assert all(text.startswith(TRIGGER) for text, _ in prompts)
    assert not trained & {(scene.shape, scene.colour) for _, scene in prompts}


# ------------------------------------------------------------------------------------------------------- tokenizers


def test_every_caption_word_is_one_token_of_both_tokenizers() -> None:
    from engine.embedded.text import new_clip_tokenizer, new_t5_tokenizer

    clip, t5 = new_clip_tokenizer(), new_t5_tokenizer()
    words = vocabulary()
    assert len(words) > 80
    assert [word for word in words if len(clip.tokenize(word)) != 1] == []
    assert [word for word in words if len(t5.tokenize(word)) != 1 or len(t5.tokenize(word.capitalize())) != 1] == []


@pytest.mark.parametrize("text", ["", "Zürich 日本 🙂", "qxyz_99 (sks:1.2)", "NEON   Style"])
def test_any_text_can_be_tokenized(text: str) -> None:
    from engine.embedded.text import new_clip_tokenizer, new_t5_tokenizer

    clip, t5 = new_clip_tokenizer(), new_t5_tokenizer()
    ids = clip(text).input_ids
    assert ids[0] == clip.bos_token_id and ids[-1] == clip.eos_token_id
    assert all(0 <= index < len(clip) for index in ids)
    assert (
        clip.decode(ids, skip_special_tokens=True).split()
        == clip.decode(clip(" ".join(text.lower().split())).input_ids, skip_special_tokens=True).split()
    )
    assert all(0 <= index < len(t5) for index in t5(text).input_ids)


def test_the_longest_captions_leave_room_for_a_nonsense_trigger() -> None:
    from engine.embedded.text import MAX_TOKENS, new_clip_tokenizer, new_t5_tokenizer

    scenes = sample_scenes(9, 500, styles=("outline", "checker"), two_objects=0.5, gradients=0.5)
    for tokenizer in (new_clip_tokenizer(), new_t5_tokenizer()):
        assert tokenizer.model_max_length == MAX_TOKENS
        longest = max(len(tokenizer("ohwxqz " + caption(scene)).input_ids) for scene in scenes)
        assert longest <= MAX_TOKENS


# ----------------------------------------------------------------------------------------------------------- metric


def _renders(seed: int, count: int, style: str = "filled") -> tuple[list[Image.Image], list[Scene]]:
    scenes = sample_scenes(seed, count, pairs="all", styles=(style,), two_objects=0.0, gradients=0.0)  # type: ignore[arg-type]  # parametrised
    images = [draw(scene, SIZES[index % len(SIZES)], seed=index) for index, scene in enumerate(scenes)]
    return images, scenes


def test_the_metric_reads_real_renders_almost_without_error() -> None:
    from engine.embedded.measure import measure

    result = measure(*_renders(31, 400))
    assert min(result["colour"], result["background"], result["position"], result["shape"]) >= 0.99


def test_the_metric_is_at_chance_when_pictures_and_scenes_do_not_belong_together() -> None:
    from engine.embedded.measure import measure

    images, scenes = _renders(32, 400)
    result = measure(images[7:] + images[:7], scenes)
    assert all(result[name] < 0.3 for name in ("colour", "background", "position", "shape"))


def test_outlined_objects_are_hollow_and_filled_ones_are_not() -> None:
    from engine.embedded.measure import HOLLOW, see

    for style, hollow in (("outline", True), ("filled", False)):
        images, scenes = _renders(33, 300, style)
        judged = [
            (seen.hollowness >= HOLLOW) == hollow
            for seen, scene in zip(see(images), scenes, strict=True)
            if scene.shape != "ring"
        ]
        assert len(judged) > 200
        assert sum(judged) >= 0.95 * len(judged)


def test_a_picture_without_an_object_counts_as_wrong_but_for_its_background() -> None:
    from engine.embedded.measure import measure

    image = Image.new("RGB", (48, 48), (245, 245, 245))
    result = measure([image], [Scene("circle", "red", "small", "top", "white")])
    assert result == {"colour": 0.0, "background": 1.0, "position": 0.0, "shape": 0.0, "hollow": 0.0}


def test_a_different_number_of_pictures_and_scenes_is_refused() -> None:
    from engine.embedded.measure import measure

    with pytest.raises(ValueError, match="0 pictures for 1 scenes"):
        measure([], [Scene("circle", "red", "small", "top", "white")])


# ------------------------------------------------------------------------------------------------------------ codec


def test_an_untrained_codec_already_reproduces_flat_colours() -> None:
    import torch

    from engine.embedded.codec import new_codec

    torch.manual_seed(0)
    codec = new_codec()
    colours = torch.tensor([[-0.8, 0.1, 0.6], [0.9, 0.9, -0.9]])
    images = colours[:, :, None, None].expand(2, 3, 48, 32).contiguous()
    with torch.no_grad():
        latents = codec.encode(images).latent_dist.mode()
        decoded = codec.decode(latents).sample
    assert latents.shape == (2, 4, 12, 8)
    centre = decoded[:, :, 12:36, 8:24].mean((2, 3))
    assert math.sqrt(float((centre - colours).square().mean())) < 0.3


def test_normalising_latents_changes_their_scale_but_not_the_pictures() -> None:
    import torch

    from engine.embedded.codec import codec_scenes, image_batch, new_codec, normalise_latents

    torch.manual_seed(0)
    codec = new_codec().eval()
    images = image_batch(codec_scenes(1, 40), (48, 48), 1)
    with torch.no_grad():
        before = codec.decode(codec.encode(images).latent_dist.mode()).sample
        normalise_latents(codec, seed=1)
        latents = codec.encode(images).latent_dist.mode()
        after = codec.decode(latents).sample
    assert float((after - before).abs().max()) < 1e-3
    assert torch.allclose(latents.std((0, 2, 3)), torch.ones(4), atol=0.25)


def test_sampling_a_latent_is_as_good_as_taking_its_mean() -> None:
    import torch

    from engine.embedded.codec import codec_scenes, image_batch, new_codec, normalise_latents

    torch.manual_seed(0)
    codec = new_codec().eval()
    normalise_latents(codec, seed=1)
    with torch.no_grad():
        posterior = codec.encode(image_batch(codec_scenes(2, 4), (48, 48), 1)).latent_dist
    assert float(posterior.std.max()) < 0.01


# -------------------------------------------------------------------------------------------------------- pipelines


def test_both_bases_are_ordinary_pipelines_that_draw_every_size(tmp_path: Path) -> None:
    import json

    from diffusers import FluxPipeline, StableDiffusionPipeline

    from engine.embedded.codec import new_codec
    from engine.embedded.denoisers import write_initial_bases
    from engine.embedded.measure import generate
    from engine.embedded.text import new_text, save_text

    new_codec().save_pretrained(tmp_path / "parts" / "vae")
    save_text(new_text(), tmp_path / "parts")
    write_initial_bases(tmp_path / "parts", tmp_path / "bases")
    for name, pipeline_class in (("unet", StableDiffusionPipeline), ("flow", FluxPipeline)):
        notes = json.loads((tmp_path / "bases" / name / "safelight.json").read_text("utf-8"))
        assert {tuple(size) for size in notes["sizes"]} == set(SIZES)
        pipeline = pipeline_class.from_pretrained(tmp_path / "bases" / name)
        pipeline.set_progress_bar_config(disable=True)
        images = generate(pipeline, ["a red circle"] * len(SIZES), SIZES, steps=2, guidance_scale=2.0)
        assert [(image.height, image.width) for image in images] == list(SIZES)


def test_untrained_denoisers_predict_exactly_nothing() -> None:
    import torch

    from engine.embedded.denoisers import new_flow_transformer, new_unet

    states, pooled, level = torch.randn(2, 32, 96), torch.randn(2, 96), torch.tensor([0.3, 0.9])
    with torch.no_grad():
        unet = new_unet()(torch.randn(2, 4, 12, 12), torch.tensor([10, 900]), states).sample
        flow = new_flow_transformer()(
            hidden_states=torch.randn(2, 36, 16),
            timestep=level,
            encoder_hidden_states=states,
            pooled_projections=pooled,
            txt_ids=torch.zeros(32, 3),
            img_ids=torch.zeros(36, 3),
        ).sample
    assert unet.shape == (2, 4, 12, 12) and not unet.any()
    assert flow.shape == (2, 36, 16) and not flow.any()
