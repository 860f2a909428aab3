"""Checkpoints in one file, in the original layout of Stable Diffusion, with a folder for configuration beside."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from engine.errors import BaseModelError
from engine.families import hub
from engine.families.loading import load
from engine.families.registry import open_base
from engine.noise import Diffusion
from engine.plan import plan_base, plan_run
from engine.settings.schema import Base
from tests.training import choose

Bases = Callable[[str], Path]
ALL = ("unet", "text_encoder", "tokenizer", "vae", "scheduler")


# --- the original layout, written down from the original code's module names ------------------------------------------

RESNET = {
    "norm1": "in_layers.0", "conv1": "in_layers.2", "time_emb_proj": "emb_layers.1", "norm2": "out_layers.0",
    "conv2": "out_layers.3", "conv_shortcut": "skip_connection",
}  # fmt: skip


def original_names(folder: Path) -> dict[str, Tensor]:
    """The weights of a StableDiffusionPipeline folder under the names of a .safetensors checkpoint of one file."""
    weights = "diffusion_pytorch_model.safetensors"
    unet = {f"model.diffusion_model.{_unet(k)}": v for k, v in load_file(folder / "unet" / weights).items()}
    vae = dict(_vae(k, v) for k, v in load_file(folder / "vae" / weights).items())
    text = load_file(folder / "text_encoder" / "model.safetensors")
    clip = {f"cond_stage_model.transformer.text_model.{k.removeprefix('text_model.')}": v for k, v in text.items()}
    clip["cond_stage_model.transformer.text_model.embeddings.position_ids"] = torch.arange(77)[None]
    return {**unet, **{f"first_stage_model.{k}": v for k, v in vae.items()}, **clip}


def _unet(key: str) -> str:
    """Two levels of one layer: input 0 conv, 1 layer, 2 downsampling, 3 layer; output 0, 1 (upsampling in it), 2, 3."""
    simple = {
        "conv_in.": "input_blocks.0.0.", "time_embedding.linear_1.": "time_embed.0.",
        "time_embedding.linear_2.": "time_embed.2.", "conv_norm_out.": "out.0.", "conv_out.": "out.2.",
    }  # fmt: skip
    for ours, theirs in simple.items():
        if key.startswith(ours):
            return theirs + key.removeprefix(ours)
    if found := re.fullmatch(r"mid_block\.(resnets|attentions)\.(\d)\.(.+)", key):
        place = {"resnets": {"0": 0, "1": 2}, "attentions": {"0": 1}}[found[1]][found[2]]
        return f"middle_block.{place}.{_inner(found[1], found[3])}"
    if found := re.fullmatch(r"down_blocks\.(\d)\.(resnets|attentions)\.0\.(.+)", key):
        return f"input_blocks.{1 + 2 * int(found[1])}.{int(found[2] == 'attentions')}.{_inner(found[2], found[3])}"
    if found := re.fullmatch(r"down_blocks\.0\.downsamplers\.0\.conv\.(.+)", key):
        return f"input_blocks.2.0.op.{found[1]}"
    if found := re.fullmatch(r"up_blocks\.(\d)\.(resnets|attentions)\.(\d)\.(.+)", key):
        place = 2 * int(found[1]) + int(found[3])
        return f"output_blocks.{place}.{int(found[2] == 'attentions')}.{_inner(found[2], found[4])}"
    if found := re.fullmatch(r"up_blocks\.0\.upsamplers\.0\.conv\.(.+)", key):
        return f"output_blocks.1.1.conv.{found[1]}"
    raise AssertionError(f"a layer that the tiny UNet should not have: {key}")


def _inner(kind: str, rest: str) -> str:
    if kind == "attentions":
        return rest
    layer, _, leaf = rest.rpartition(".")
    return f"{RESNET[layer]}.{leaf}"


def _vae(key: str, value: Tensor) -> tuple[str, Tensor]:
    key = key.replace("conv_norm_out", "norm_out").replace("conv_shortcut", "nin_shortcut")
    key = re.sub(r"mid_block\.resnets\.(\d)", lambda m: f"mid.block_{int(m[1]) + 1}", key)
    key = re.sub(r"down_blocks\.(\d)\.resnets\.(\d)", r"down.\1.block.\2", key)
    key = re.sub(r"down_blocks\.(\d)\.downsamplers\.0", r"down.\1.downsample", key)
    key = re.sub(r"up_blocks\.(\d)\.resnets\.(\d)", lambda m: f"up.{3 - int(m[1])}.block.{m[2]}", key)
    key = re.sub(r"up_blocks\.(\d)\.upsamplers\.0", lambda m: f"up.{3 - int(m[1])}.upsample", key)
    if "mid_block.attentions.0" in key:
        key = key.replace("mid_block.attentions.0", "mid.attn_1").replace("group_norm", "norm")
        for ours, theirs in {"to_q": "q", "to_k": "k", "to_v": "v", "to_out.0": "proj_out"}.items():
            key = key.replace(f"attn_1.{ours}.", f"attn_1.{theirs}.")
        if value.ndim == 2:
            value = value[:, :, None, None]  # a 1x1 convolution in the original
    return key, value


def configuration_of(folder: Path, target: Path) -> Path:
    """A diffusers folder without its weights."""
    return Path(shutil.copytree(folder, target, ignore=shutil.ignore_patterns("*.safetensors")))


@pytest.fixture
def checkpoint(base: Bases, tmp_path: Path) -> Callable[..., Path]:
    """A tiny base as one file, with its configuration in a folder of the same name."""

    def make(name: str = "sd15", *, stem: str = "model.v1", metadata: Mapping[str, str] = {}, **more: Tensor) -> Path:
        path = tmp_path / f"{stem}.safetensors"
        tensors = {**original_names(base(name)), **more}
        save_file({k: v.contiguous() for k, v in tensors.items()}, path, metadata=dict(metadata))
        configuration_of(base(name), tmp_path / stem)
        return path

    return make


def open_and_load(source: Path, names: tuple[str, ...] = ALL, dtype: torch.dtype = torch.float32) -> Any:
    family, located = open_base(Base(source=str(source)))
    return load(family, located, names, dtype=dtype)


def refusal(source: Path, names: tuple[str, ...] = ALL) -> BaseModelError:
    with pytest.raises(BaseModelError) as caught:
        open_and_load(source, names)
    assert caught.value.hint, "a refusal says what to do"
    return caught.value


# --- tests ------------------------------------------------------------------------------------------------------------


def test_one_file_predicts_encodes_and_draws_what_the_folder_does(base: Bases, checkpoint: Callable[..., Path]) -> None:
    family, _ = open_base(Base(source=str(base("sd15"))))
    folder, file = open_and_load(base("sd15")), open_and_load(checkpoint())
    for name in ("unet", "text_encoder", "vae"):
        ours, theirs = file[name].state_dict(), folder[name].state_dict()
        assert ours.keys() == theirs.keys()
        assert all(torch.equal(ours[key], theirs[key]) for key in theirs), name
    one, other = (family.encode_text(parts, ["a red ball"])[0]["hidden"] for parts in (file, folder))
    assert torch.equal(one, other)
    pixels = torch.rand(1, 3, 64, 64, generator=torch.Generator().manual_seed(0)) * 2 - 1
    latents = [family.encode_media(parts, pixels, [torch.Generator().manual_seed(1)]) for parts in (file, folder)]
    assert torch.equal(*latents)
    pictures = []
    for parts in (file, folder):
        pipeline = family.pipeline(parts)
        pipeline.set_progress_bar_config(disable=True)
        generator = torch.Generator().manual_seed(2)
        pictures.append(pipeline("a red ball", num_inference_steps=2, generator=generator, output_type="pt").images)
    torch.testing.assert_close(*pictures, rtol=0, atol=1e-6)


def test_only_what_is_asked_for_is_built(checkpoint: Callable[..., Path]) -> None:
    for names in (("vae",), ("text_encoder", "tokenizer"), ("unet", "scheduler")):
        parts = open_and_load(checkpoint(stem="-".join(names)), names)
        assert set(parts.components) == set(names)
        for name in names:
            module = parts[name]
            if isinstance(module, torch.nn.Module):
                assert not any(p.requires_grad or p.is_meta for p in module.parameters())


def test_half_precision_is_taken_from_the_settings(checkpoint: Callable[..., Path]) -> None:
    parts = open_and_load(checkpoint(), ("unet", "text_encoder", "vae"), torch.bfloat16)
    for name in ("unet", "text_encoder", "vae"):
        assert {p.dtype for p in parts[name].parameters()} == {torch.bfloat16}


@pytest.mark.parametrize(("name", "kind"), [("sd15", "epsilon"), ("sd15-v", "v_prediction")])
def test_everything_that_is_planned_comes_from_the_configuration_beside_the_file(
    name: str, kind: str, base: Bases, checkpoint: Callable[..., Path], pictures: Path
) -> None:
    path = checkpoint(name)
    plan, of_folder = (plan_base(choose(source, pictures)) for source in (path, base(name)))
    assert isinstance(plan.parameterisation, Diffusion) and isinstance(of_folder.parameterisation, Diffusion)
    assert plan.parameterisation.prediction_type == kind
    assert torch.equal(plan.parameterisation.alphas_cumprod, of_folder.parameterisation.alphas_cumprod)
    assert plan.family.resolution(plan.located) == 64
    assert plan.family.pixel_multiple(plan.located) == 16
    assert plan.located.notes == ()
    whole = plan_run(choose(path, pictures, "method.targets=['*.to_q']"))
    assert whole.doubts() == []
    assert whole.preview_size == (64, 64)
    with pytest.raises(Exception, match="no layer"):
        plan_run(choose(path, pictures, "method.targets=['*.nonsense']"))


def test_settings_of_the_base_may_lie_in_the_folder_beside_the_file(checkpoint: Callable[..., Path]) -> None:
    path = checkpoint()
    defaults = {"resolution": 128, "preview": {"steps": 9, "guidance_scale": 2.5}}
    (path.with_suffix("") / "safelight.json").write_text(json.dumps(defaults))
    family, located = open_base(Base(source=str(path)))
    assert family.resolution(located) == 128
    assert family.preview_defaults(located) == (9, 2.5)


@pytest.mark.parametrize(
    ("name", "metadata", "more"),
    [
        ("sd15", {"modelspec.prediction_type": "v"}, {}),
        ("sd15", {}, {"v_pred": torch.zeros(1)}),
        ("sd15-v", {"modelspec.prediction_type": "epsilon"}, {}),
    ],
)
def test_a_file_that_says_it_predicts_something_else_than_its_configuration_is_refused(
    name: str, metadata: dict[str, str], more: dict[str, Tensor], checkpoint: Callable[..., Path]
) -> None:
    error = refusal(checkpoint(name, metadata=metadata, **more))
    assert "says that it predicts" in error.message
    assert "model.v1" in error.hint


def test_a_file_that_agrees_with_its_configuration_is_taken(checkpoint: Callable[..., Path]) -> None:
    assert open_base(Base(source=str(checkpoint("sd15-v", metadata={"modelspec.prediction_type": "v"}))))


def test_a_configuration_that_was_assumed_is_a_doubt_of_the_run(
    checkpoint: Callable[..., Path], pictures: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    path = checkpoint()
    usual = Path(shutil.move(path.with_suffix(""), tmp_path / "usual"))
    monkeypatch.setattr(hub, "configuration", lambda repository: usual)
    plan = plan_run(choose(path, pictures))
    assert any("which predicts epsilon" in doubt for doubt in plan.doubts())
    assert plan.summary()["notes"] == plan.doubts()


def test_without_configuration_and_network_the_refusal_says_where_to_put_one(
    checkpoint: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "empty"))
    path = checkpoint()
    shutil.rmtree(path.with_suffix(""))
    error = refusal(path)
    assert "does not say how it is built" in error.message
    assert "stable-diffusion-v1-5/stable-diffusion-v1-5" in error.message
    assert str(path.with_suffix("")) in error.hint


def test_the_identity_covers_the_file_and_its_configuration(checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    path = checkpoint()

    def identity(at: Path = path) -> str:
        return open_base(Base(source=str(at)))[1].identity(["text_encoder", "tokenizer"])

    before = identity()
    shutil.copytree(path.with_suffix(""), tmp_path / "other")
    assert identity(Path(shutil.copy(path, tmp_path / "other.safetensors"))) == before
    config = path.with_suffix("") / "tokenizer" / "tokenizer_config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "model_max_length": 40}))
    assert identity() != before


def test_the_family_is_that_of_the_configuration(checkpoint: Callable[..., Path], base: Bases) -> None:
    path = checkpoint()
    with pytest.raises(BaseModelError, match="is of family 'sd15'"):
        open_base(Base(source=str(path), family="flux1"))
    shutil.rmtree(path.with_suffix(""))
    configuration_of(base("flux1"), path.with_suffix(""))
    assert "not read from a single file" in refusal(path).message


@pytest.mark.parametrize("setting", ["revision", "variant"])
def test_settings_that_would_be_ignored_are_refused(setting: str, checkpoint: Callable[..., Path]) -> None:
    with pytest.raises(BaseModelError, match=f"base.{setting}"):
        open_base(Base.model_validate({"source": str(checkpoint()), setting: "fp16"}))


def test_what_is_not_a_whole_checkpoint_is_refused(checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    lora = tmp_path / "lora.safetensors"
    save_file({"lora_unet_down_blocks_0_attentions_0_proj_in.lora_down.weight": torch.zeros(4, 16)}, lora)
    assert "not a whole checkpoint" in refusal(lora).message
    empty = tmp_path / "empty.safetensors"
    save_file({}, empty)
    assert "not a whole checkpoint" in refusal(empty).message
    text = tmp_path / "text.safetensors"
    text.write_text("not a model")
    assert "not a whole safetensors file" in refusal(text).message
    other = tmp_path / "model.gguf"
    other.write_bytes(b"GGUF")
    assert "not a .safetensors file" in refusal(other).message


@pytest.mark.parametrize("keep", [0.95, 0.5, 0.001])
def test_a_file_that_was_cut_off_is_refused_before_anything_is_loaded(
    keep: float, checkpoint: Callable[..., Path]
) -> None:
    path = checkpoint()
    data = path.read_bytes()
    path.write_bytes(data[: int(len(data) * keep)])
    with pytest.raises(BaseModelError, match="not a whole safetensors file"):
        open_base(Base(source=str(path)))


@pytest.mark.parametrize(
    ("prefix", "component"),
    [
        ("model.diffusion_model.out.2.", "unet"),
        ("model.diffusion_model.output_blocks.1.", "unet"),
        ("first_stage_model.decoder.conv_out.", "vae"),
        ("first_stage_model.", "vae"),
        ("cond_stage_model.transformer.text_model.final_layer_norm.", "text_encoder"),
        ("cond_stage_model.", "text_encoder"),
    ],
)
def test_a_part_that_is_missing_from_the_file_is_refused(
    prefix: str, component: str, checkpoint: Callable[..., Path]
) -> None:
    path = checkpoint()
    save_file({key: value for key, value in load_file(path).items() if not key.startswith(prefix)}, path)
    error = refusal(path, (component,))
    assert "lack" in error.message or "cannot be loaded" in error.message


def test_weights_that_are_no_numbers_are_refused(checkpoint: Callable[..., Path]) -> None:
    path = checkpoint()
    tensors = load_file(path)
    tensors["first_stage_model.decoder.conv_in.bias"][0] = float("nan")
    save_file(tensors, path)
    assert "vae.decoder.conv_in.bias holds NaN" in refusal(path, ("vae",)).message


def test_a_configuration_that_does_not_fit_the_file_is_refused(checkpoint: Callable[..., Path]) -> None:
    path = checkpoint()
    config = path.with_suffix("") / "unet" / "config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "cross_attention_dim": 64}))
    assert "cannot be loaded as a Stable Diffusion" in refusal(path, ("unet",)).message
