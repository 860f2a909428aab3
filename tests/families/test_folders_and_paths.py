"""Which folders are opened as bases, which are refused, and what the refusal says."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine.errors import BaseModelError, SettingsError
from engine.families import hub, sources
from engine.families.loading import load, skeleton
from engine.families.registry import open_base
from engine.settings.schema import Base

WEIGHTS = "diffusion_pytorch_model.safetensors"
Bases = Callable[[str], Path]


@pytest.fixture
def copy(base: Bases, tmp_path: Path) -> Callable[[str], Path]:
    """A tiny base of the test's own, to be broken."""

    def make(name: str = "sd15") -> Path:
        return Path(shutil.copytree(base(name), tmp_path / "copy"))

    return make


def open_and_load(source: Path | str, *names: str, **settings: Any) -> Any:
    family, located = open_base(Base(source=str(source), **settings))
    names = names or (family.spec.denoiser, *family.text_components(), "vae", "scheduler")
    return load(family, located, names, dtype=torch.float32)


def refusal(source: Path | str, *names: str, **settings: Any) -> BaseModelError:
    with pytest.raises(BaseModelError) as caught:
        open_and_load(source, *names, **settings)
    assert caught.value.hint, "a refusal says what to do"
    return caught.value


def change_json(path: Path, **changes: Any) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def change_weights(path: Path, change: Callable[[dict[str, torch.Tensor]], None]) -> None:
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path, metadata={"format": "pt"})


# --- paths ------------------------------------------------------------------------------------------------------------


def test_a_path_may_be_relative_a_link_or_hold_spaces_and_any_letters(
    base: Bases, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    odd = tmp_path / "my modèles" / "猫 base"
    odd.parent.mkdir()
    os.symlink(base("sd15"), odd)
    for source in (odd, "my modèles/猫 base", "./my modèles/猫 base/"):
        parts = open_and_load(source, "scheduler", "tokenizer", "vae")
        assert parts["vae"].config["scaling_factor"] == 0.5
        assert parts.located.path.is_absolute()


def test_a_folder_wins_over_a_hub_id_of_the_same_name(
    base: Bases, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    shutil.copytree(base("sd15"), tmp_path / "owner" / "name")
    assert open_base(Base(source="owner/name"))[1].path == tmp_path / "owner" / "name"


@pytest.mark.parametrize(
    "source",
    [
        "C:\\models\\sd15", "C:/sd15", "models\\sd15", "..\\models/sd15", "\\\\server/share", "./nothing", "../nothing",
        "~/nothing-here", "/nothing", "nothing", "a/b/c", "owner/model.safetensors", "owner/", "/name", "owner/na me",
        "https://huggingface.co/owner/name", "owner/name@main", "owner/..", "owner/a--b",
    ],
)  # fmt: skip
def test_what_is_no_path_and_no_hub_id_never_asks_the_hub(source: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def ask(*_: object, **__: object) -> None:
        raise AssertionError("the hub was asked")

    monkeypatch.setattr(hub, "file", ask)
    assert "does not exist" in refusal(source).message


def test_the_address_of_a_model_page_is_answered_with_what_to_write_instead() -> None:
    assert "'owner/name'" in refusal("https://huggingface.co/owner/name").hint


def test_a_misspelt_embedded_base_is_answered_with_the_ones_there_are() -> None:
    assert "embedded/unet and embedded/flow" in refusal("embedded/typo").hint


@pytest.mark.parametrize("suffix", [".ckpt", ".pt", ".pth", ".bin", ".pkl", ".CKPT"])
def test_pickle_files_are_refused_unopened(suffix: str, tmp_path: Path) -> None:
    path = tmp_path / f"model{suffix}"
    path.write_bytes(b"cos\nsystem\n(S'false'\ntR.")
    assert "pickle" in refusal(path).message
    assert "convert it to .safetensors" in refusal(path).hint


def test_settings_that_would_be_ignored_are_refused(base: Bases) -> None:
    assert "base.revision" in refusal(base("sd15"), revision="main").message
    assert "base.revision" in refusal("embedded/unet", revision="main").message
    assert "no weights of the variant 'fp16'" in refusal(base("sd15"), variant="fp16").message


# --- what a folder must be --------------------------------------------------------------------------------------------


def test_a_folder_without_an_index_is_refused(tmp_path: Path) -> None:
    assert "no model_index.json" in refusal(tmp_path).message


def test_the_family_comes_from_the_index_and_a_wrong_one_is_refused(base: Bases) -> None:
    assert open_base(Base(source=str(base("flux1"))))[0].spec.id == "flux1"
    error = refusal(base("flux1"), family="sd15")
    assert "is of family 'flux1'" in error.message
    assert "set base.family to 'flux1'" in error.hint
    assert "family 'flux1'" in refusal(base("flux1"), family="nonsense").message


@pytest.mark.parametrize("pipeline", ["StableDiffusionXLPipeline", "NotInDiffusersPipeline"])
def test_a_pipeline_of_no_family_is_named(pipeline: str, copy: Callable[..., Path]) -> None:
    folder = copy()
    change_json(folder / "model_index.json", _class_name=pipeline)
    error = refusal(folder)
    assert pipeline in error.message
    assert "StableDiffusionPipeline, FluxPipeline" in error.hint


@pytest.mark.parametrize("name", [["my_pipeline", "MyPipeline"], None])
def test_a_pipeline_with_code_of_its_own_is_refused(name: object, copy: Callable[..., Path]) -> None:
    folder = copy()
    change_json(folder / "model_index.json", _class_name=name)
    assert "code of its own" in refusal(folder).message


@pytest.mark.parametrize("entry", [["evil", "UNet"], ["evil.deep", "UNet"], ["os", "system"], ["torch", "load"]])
def test_a_component_of_another_library_is_refused_and_nothing_of_it_is_imported(
    entry: list[str], copy: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = copy()
    for place in (folder, folder / "unet"):
        (place / "evil.py").write_text("raise AssertionError('it was imported')")
    monkeypatch.syspath_prepend(folder)
    monkeypatch.chdir(folder)
    change_json(folder / "model_index.json", unet=entry)
    error = refusal(folder, "unet")
    assert "'unet' wants code from" in error.message
    assert "only classes of diffusers and transformers" in error.hint


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        (["diffusers", "NoSuchModel"], "no class NoSuchModel"),
        (["transformers", "pipeline"], "no class pipeline"),
        (["diffusers", 7], "no class 7"),
        ([None, None], "has no component 'unet'"),
        ("diffusers", "has no component 'unet'"),
        (["diffusers"], "has no component 'unet'"),
    ],
)
def test_an_index_that_names_no_class_is_refused(entry: Any, message: str, copy: Callable[..., Path]) -> None:
    folder = copy()
    change_json(folder / "model_index.json", unet=entry)
    assert message in refusal(folder, "unet").message


def test_custom_code_named_in_a_configuration_is_not_run(copy: Callable[..., Path]) -> None:
    folder = copy()
    (folder / "text_encoder" / "evil.py").write_text("raise AssertionError('it was imported')")
    change_json(folder / "text_encoder" / "config.json", auto_map={"AutoModel": "evil.Model"})
    assert open_and_load(folder, "text_encoder")["text_encoder"].config.hidden_size == 32


# --- broken files -----------------------------------------------------------------------------------------------------


def cut(path: Path, keep: float) -> None:
    data = path.read_bytes()
    path.write_bytes(data[: int(len(data) * keep)])


@pytest.mark.parametrize(
    ("component", "file"),
    [("unet", WEIGHTS), ("vae", WEIGHTS), ("text_encoder", "model.safetensors")],
)
@pytest.mark.parametrize("keep", [0.9, 0.01, 0.0])
def test_weights_that_were_cut_off_are_refused(
    component: str, file: str, keep: float, copy: Callable[..., Path]
) -> None:
    folder = copy()
    cut(folder / component / file, keep)
    message = refusal(folder, component).message
    assert f"{component}/{file} is not a whole safetensors file" in message.replace("\\", "/")


@pytest.mark.parametrize("component", ["unet", "vae", "text_encoder", "tokenizer", "scheduler"])
def test_a_missing_component_is_named(component: str, copy: Callable[..., Path]) -> None:
    folder = copy()
    shutil.rmtree(folder / component)
    assert f"'{component}'" in refusal(folder, component).message
    with pytest.raises(BaseModelError, match=component):
        open_base(Base(source=str(folder)))[1].identity([component])


@pytest.mark.parametrize(
    ("component", "file"),
    [
        ("unet", "config.json"), ("vae", "config.json"), ("text_encoder", "config.json"),
        ("scheduler", "scheduler_config.json"), ("tokenizer", "tokenizer.json"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("content", ["{", "[]", ""])
def test_a_configuration_that_is_not_json_is_refused(
    component: str, file: str, content: str, copy: Callable[..., Path]
) -> None:
    folder = copy()
    (folder / component / file).write_text(content)
    assert component in refusal(folder, component).message
    if component != "tokenizer":
        with pytest.raises(BaseModelError, match="JSON"):
            open_base(Base(source=str(folder)))[1].config(component)


def test_an_index_that_is_not_json_is_refused(copy: Callable[..., Path]) -> None:
    folder = copy()
    (folder / "model_index.json").write_text("{")
    assert "model_index.json cannot be read as JSON" in refusal(folder).message


@pytest.mark.parametrize(("component", "file"), [("unet", WEIGHTS), ("text_encoder", "model.safetensors")])
def test_a_tensor_that_is_missing_is_named_and_not_invented(
    component: str, file: str, copy: Callable[..., Path]
) -> None:
    folder = copy()
    removed: list[str] = []

    def remove(tensors: dict[str, torch.Tensor]) -> None:
        removed.append(next(key for key in sorted(tensors) if key.endswith("norm1.weight") or "fc1.weight" in key))
        del tensors[removed[0]]

    change_weights(folder / component / file, remove)
    message = refusal(folder, component).message
    assert f"the weights lack {component}.{removed[0]}" in message.replace("text_model.", "")


@pytest.mark.parametrize(("component", "file"), [("vae", WEIGHTS), ("text_encoder", "model.safetensors")])
def test_weights_of_another_shape_are_refused(component: str, file: str, copy: Callable[..., Path]) -> None:
    folder = copy()

    def widen(tensors: dict[str, torch.Tensor]) -> None:
        key = next(key for key in tensors if tensors[key].ndim == 2)
        tensors[key] = torch.zeros(tensors[key].shape[0] + 1, tensors[key].shape[1])

    change_weights(folder / component / file, widen)
    assert f"'{component}'" in refusal(folder, component).message


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize(
    ("component", "file"), [("unet", WEIGHTS), ("vae", WEIGHTS), ("text_encoder", "model.safetensors")]
)
def test_weights_that_are_no_numbers_are_refused(
    component: str, file: str, value: float, copy: Callable[..., Path]
) -> None:
    folder = copy()

    def spoil(tensors: dict[str, torch.Tensor]) -> None:
        tensors[max(tensors, key=lambda key: tensors[key].numel())].view(-1)[-1] = value

    change_weights(folder / component / file, spoil)
    assert f"{component}." in refusal(folder, component).message
    assert "holds NaN or infinity" in refusal(folder, component).message


def test_a_missing_shard_is_refused(base: Bases, copy: Callable[..., Path]) -> None:
    folder = copy()
    parts = open_and_load(base("sd15"), "unet", "text_encoder")
    for name in ("unet", "text_encoder"):
        shutil.rmtree(folder / name)
        parts[name].save_pretrained(folder / name, max_shard_size="60KB")
    assert len(list((folder / "unet").glob("*-of-*.safetensors"))) > 2
    again = open_and_load(folder, "unet", "text_encoder")
    for name in ("unet", "text_encoder"):
        assert all(torch.equal(a, b) for a, b in zip(parts[name].parameters(), again[name].parameters(), strict=True))
        sorted((folder / name).glob("*-of-*.safetensors"))[1].unlink()
        assert f"'{name}'" in refusal(folder, name).message


def test_weights_that_are_only_there_as_pickle_are_refused(copy: Callable[..., Path]) -> None:
    folder = copy()
    (folder / "vae" / WEIGHTS).rename(folder / "vae" / "diffusion_pytorch_model.bin")
    assert "'vae' are only there as pickle files" in refusal(folder).message


def test_pickles_beside_safetensors_do_no_harm(copy: Callable[..., Path]) -> None:
    folder = copy()
    (folder / "unet" / "diffusion_pytorch_model.bin").write_bytes(b"cos\nsystem\n(S'false'\ntR.")
    assert open_and_load(folder, "unet")["unet"] is not None


def test_the_vae_of_stable_diffusion_with_its_old_names_of_attention_layers_is_whole(
    base: Bases, copy: Callable[..., Path]
) -> None:
    """The published VAE files of Stable Diffusion 1 call them query, key, value and proj_attn."""
    folder = copy()
    old = {"to_q.": "query.", "to_k.": "key.", "to_v.": "value.", "to_out.0.": "proj_attn."}

    def rename(tensors: dict[str, torch.Tensor]) -> None:
        for key in list(tensors):
            for new, former in old.items():
                if new in key:
                    tensors[key.replace(new, former)] = tensors.pop(key)

    change_weights(folder / "vae" / WEIGHTS, rename)
    ours, theirs = open_and_load(folder, "vae")["vae"], open_and_load(base("sd15"), "vae")["vae"]
    assert all(torch.equal(a, b) for a, b in zip(ours.parameters(), theirs.parameters(), strict=True))


def test_loading_freezes_and_keeps_the_wanted_number_format(base: Bases) -> None:
    family, located = open_base(Base(source=str(base("sd15"))))
    parts = load(family, located, ["unet", "text_encoder", "vae", "tokenizer"], dtype=torch.bfloat16)
    for name in ("unet", "text_encoder", "vae"):
        assert {p.dtype for p in parts[name].parameters()} == {torch.bfloat16}
        assert not any(p.requires_grad for p in parts[name].parameters())
        assert not parts[name].training


# --- variants ---------------------------------------------------------------------------------------------------------


def test_a_variant_is_taken_where_there_is_one(base: Bases, copy: Callable[..., Path]) -> None:
    folder = copy()
    pipeline_unet = open_and_load(base("sd15"), "unet")["unet"]
    with torch.no_grad():
        pipeline_unet.conv_in.bias.fill_(0.25)
    pipeline_unet.save_pretrained(folder / "unet", variant="fp16")
    assert bool((open_and_load(folder, "unet", variant="fp16")["unet"].conv_in.bias == 0.25).all())
    assert not bool((open_and_load(folder, "unet")["unet"].conv_in.bias == 0.25).any())
    assert open_and_load(folder, "vae", variant="fp16")["vae"] is not None, "the VAE has no variant and needs none"
    plain, chosen = (open_base(Base(source=str(folder), variant=v))[1] for v in (None, "fp16"))
    assert plain.identity(["unet"]) != chosen.identity(["unet"])
    assert plain.identity(["vae"]) == chosen.identity(["vae"])


def test_weights_that_are_only_there_as_a_variant_are_offered(copy: Callable[..., Path]) -> None:
    folder = copy()
    (folder / "unet" / WEIGHTS).rename(folder / "unet" / "diffusion_pytorch_model.fp16.safetensors")
    assert "set base.variant to 'fp16'" in refusal(folder, "unet").hint
    assert open_and_load(folder, "unet", variant="fp16")["unet"] is not None


# --- identity ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("large", [False, True])
def test_the_identity_is_that_of_the_content_alone(
    large: bool, base: Bases, copy: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A base that is downloaded again is the same base; one number more or less in any tensor's middle is another."""
    if large:
        monkeypatch.setattr(sources, "WHOLE_FILE_BYTES", 1000)
        monkeypatch.setattr(sources, "SAMPLE_BYTES", 64)
    folder = copy()
    path = folder / "unet" / WEIGHTS

    def identity(at: Path) -> str:
        return open_base(Base(source=str(at)))[1].identity(["unet"])

    before = identity(folder)
    os.utime(path, (1, 1))
    assert identity(folder) == before == identity(base("sd15"))
    keys = sorted(load_file(path))
    for key in (keys[0], keys[len(keys) // 2], keys[-1]):
        original = path.read_bytes()
        change_weights(path, lambda tensors, key=key: tensors[key].mul_(1.5).add_(1))  # type: ignore[misc]
        assert identity(folder) != before
        path.write_bytes(original)
    (folder / "unet" / "diffusion_pytorch_model.bin").write_bytes(b"never read")
    assert identity(folder) == before
    change_json(folder / "unet" / "config.json", sample_size=16)
    assert identity(folder) != before


def test_a_skeleton_has_the_layers_of_the_model_and_no_weights(base: Bases) -> None:
    for name in ("sd15", "flux1"):
        family, located = open_base(Base(source=str(base(name))))
        bare = skeleton(family, located)
        full = open_and_load(base(name), family.spec.denoiser)[family.spec.denoiser]
        assert [n for n, _ in bare.named_modules()] == [n for n, _ in full.named_modules()]
        assert all(p.is_meta for p in bare.parameters())
        assert family.lora_modules(bare, "all") == family.lora_modules(full, "all")
    with pytest.raises(SettingsError, match="no layer"):
        family.lora_modules(bare, ["nonsense"])
