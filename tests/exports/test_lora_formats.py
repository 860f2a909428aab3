"""LoRA files: names, shapes, alphas, what is refused, and what damaged files do."""

from __future__ import annotations

import json
import pickle
import struct
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from engine.errors import ExportError, LoraFileError
from engine.exports.formats import LoraFile, describe, read_lora, write_lora
from engine.exports.fusing import fuse, scaled, split
from engine.lora_weights import LoraLayer, LoraWeights
from tests.tiny import random_lora_layer

Shapes = dict[str, tuple[int, ...]]  # module -> shape of its weight

UNET: Shapes = {
    "down_blocks.0.attentions.0.transformer_blocks.0.attn1.to_q": (16, 16),
    "down_blocks.0.attentions.0.transformer_blocks.0.attn1.to_out.0": (16, 16),
    "mid_block.attentions.0.proj_in": (32, 32, 1, 1),
    "up_blocks.1.resnets.0.conv1": (16, 32, 3, 3),
    "up_blocks.1.resnets.0.time_emb_proj": (16, 64),
}
TEXT: Shapes = {"encoder.layers.0.self_attn.q_proj": (32, 32), "encoder.layers.1.mlp.fc1": (64, 32)}
FLUX: Shapes = {
    "transformer_blocks.0.attn.to_q": (32, 32),
    "transformer_blocks.0.attn.to_v": (32, 32),
    "transformer_blocks.0.attn.add_k_proj": (32, 32),
    "transformer_blocks.1.ff.net.0.proj": (128, 32),
    "single_transformer_blocks.0.attn.to_k": (32, 32),
    "single_transformer_blocks.0.proj_mlp": (128, 32),
    "single_transformer_blocks.1.attn.to_q": (32, 32),
    "single_transformer_blocks.1.proj_out": (32, 160),
}
FAMILY_SHAPES: dict[str, dict[str, Shapes]] = {
    "sd15": {"unet": UNET, "text_encoder": TEXT},
    "flux1": {"transformer": FLUX, "text_encoder": TEXT},
}


def adapter(family: str, *, rank: int = 4, alpha: float = 4.0, rank_stabilised: bool = False) -> LoraWeights:
    return {
        component: {
            module: random_lora_layer(shape, rank=rank, alpha=alpha, rank_stabilised=rank_stabilised, seed=seed)
            for seed, (module, shape) in enumerate(shapes.items())
        }
        for component, shapes in FAMILY_SHAPES[family].items()
    }


def write(weights: LoraWeights, path: Path, format: str, family: str, dtype: torch.dtype = torch.float32) -> Path:
    return write_lora(weights, path, format=format, family=family, metadata={"modelspec.title": "test"}, dtype=dtype)


def assert_same_change(read: LoraWeights, written: LoraWeights, tolerance: float = 1e-6) -> None:
    assert {c: set(layers) for c, layers in read.items()} == {c: set(layers) for c, layers in written.items()}
    for component, layers in written.items():
        for module, layer in layers.items():
            torch.testing.assert_close(read[component][module].delta(), layer.delta(), atol=tolerance, rtol=tolerance)


# --- round trips -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["sd15", "flux1"])
@pytest.mark.parametrize("format", ["diffusers", "kohya"])
@pytest.mark.parametrize("kind", [(4, 4.0, False), (4, 1.0, False), (4, 13.7, False), (8, 3.0, True)])
def test_a_written_file_reads_back_with_the_same_change_of_every_weight(
    tmp_path: Path, family: str, format: str, kind: tuple[int, float, bool]
) -> None:
    rank, alpha, rank_stabilised = kind
    weights = adapter(family, rank=rank, alpha=alpha, rank_stabilised=rank_stabilised)
    file = read_lora(write(weights, tmp_path / "a.safetensors", format, family))
    assert (file.format, file.family, file.leftover) == (format, family, ())
    assert file.metadata["modelspec.title"] == "test"
    assert_same_change(file.weights, weights)


@pytest.mark.parametrize("format", ["diffusers", "kohya"])
@pytest.mark.parametrize("family", ["sd15", "flux1"])
def test_modules_may_differ_in_rank_alpha_and_stabilisation(tmp_path: Path, format: str, family: str) -> None:
    weights = {
        component: {
            module: random_lora_layer(shape, rank=2 + n % 3, alpha=1.0 + n, rank_stabilised=n % 2 == 0, seed=n)
            for n, (module, shape) in enumerate(shapes.items())
        }
        for component, shapes in FAMILY_SHAPES[family].items()
    }
    assert_same_change(read_lora(write(weights, tmp_path / "a.safetensors", format, family)).weights, weights)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float16, 1e-3), (torch.bfloat16, 8e-3)])
@pytest.mark.parametrize("format", ["diffusers", "kohya"])
def test_half_formats_round_the_weights_and_keep_alpha_exact(
    tmp_path: Path, format: str, dtype: torch.dtype, tolerance: float
) -> None:
    weights = adapter("sd15", alpha=13.7)
    path = write(weights, tmp_path / "a.safetensors", format, "sd15", dtype)
    stored = load_file(path)
    assert {t.dtype for key, t in stored.items() if not key.endswith(".alpha")} == {dtype}
    assert all(t.item() == pytest.approx(13.7, abs=1e-6) for key, t in stored.items() if key.endswith(".alpha"))
    assert_same_change(read_lora(path).weights, weights, tolerance)


def test_a_small_strength_survives_half_precision(tmp_path: Path) -> None:
    layer = random_lora_layer((64, 64), rank=128, alpha=1.0, size=0.02)
    layer = LoraLayer(layer.down, layer.up * 0.02, layer.alpha)  # ups stay small in training
    weights = {"transformer": {"transformer_blocks.0.attn.to_q": layer}}
    read = read_lora(write(weights, tmp_path / "a.safetensors", "diffusers", "flux1", torch.float16)).weights
    change = read["transformer"]["transformer_blocks.0.attn.to_q"].delta()
    assert float((change - layer.delta()).norm() / layer.delta().norm()) < 2e-3


def test_dora_magnitudes_survive_in_the_diffusers_format(tmp_path: Path) -> None:
    weights = with_magnitudes(adapter("sd15", alpha=8.0))
    file = read_lora(write(weights, tmp_path / "a.safetensors", "diffusers", "sd15"))
    assert_same_change(file.weights, weights)
    for component, layers in weights.items():
        for module, layer in layers.items():
            magnitude = file.weights[component][module].magnitude
            assert magnitude is not None and layer.magnitude is not None and torch.equal(magnitude, layer.magnitude)


def with_magnitudes(weights: LoraWeights) -> LoraWeights:
    def magnitude(layer: LoraLayer) -> Tensor:
        rows = layer.up.shape[0]
        return 1 + torch.rand(rows) if layer.up.ndim == 2 else 1 + torch.rand(1, rows, 1, 1)

    return {
        component: {m: LoraLayer(x.down, x.up, x.alpha, x.rank_stabilised, magnitude(x)) for m, x in layers.items()}
        for component, layers in weights.items()
    }


# --- fusing ----------------------------------------------------------------------------------------------------------


def test_fused_parts_stack_their_changes_and_missing_parts_change_nothing() -> None:
    first, third = random_lora_layer((8, 8), rank=2, alpha=3.0), random_lora_layer((24, 8), rank=4, alpha=1.0, seed=1)
    fused = fuse([first, None, third], [8, 8, 24])
    torch.testing.assert_close(fused.delta(), torch.cat([first.delta(), torch.zeros(8, 8), third.delta()]))
    assert fused.rank == 12 and fused.alpha == pytest.approx(first.scale * 12)
    parts = split(fused, [8, 8, 24])
    assert parts[1] is None
    torch.testing.assert_close(parts[0].delta() if parts[0] else None, first.delta())
    torch.testing.assert_close(parts[2].delta() if parts[2] else None, third.delta())


def test_alpha_of_a_fused_layer_is_multiplied_by_the_number_of_parts() -> None:
    part = random_lora_layer((8, 8), rank=4, alpha=2.0)
    assert fuse([part, part, part], [8, 8, 8]).alpha == 6.0


def test_a_dense_fused_layer_splits_into_parts_that_share_the_down() -> None:
    dense = random_lora_layer((24, 8), rank=3, alpha=1.5)
    parts = [part for part in split(dense, [8, 8, 8]) if part is not None]
    assert [part.rank for part in parts] == [3, 3, 3]
    torch.testing.assert_close(torch.cat([part.delta() for part in parts]), dense.delta())


@pytest.mark.parametrize(("format", "family"), [("kohya", "sd15"), ("kohya", "flux1"), ("diffusers", "sd15")])
def test_an_alpha_of_zero_stays_no_change(tmp_path: Path, format: str, family: str) -> None:
    weights = {
        component: {m: LoraLayer(x.down, x.up, alpha=float(n % 2)) for n, (m, x) in enumerate(layers.items())}
        for component, layers in adapter(family).items()
    }
    assert_same_change(read_lora(write(weights, tmp_path / "a.safetensors", format, family)).weights, weights)


def test_scaling_a_layer_keeps_its_change() -> None:
    for alpha in (0.5, 4.0, 64.0):
        layer = random_lora_layer((8, 8), rank=4, alpha=alpha, rank_stabilised=True)
        assert scaled(layer, 1.0).scale == 1.0
        torch.testing.assert_close(scaled(layer, 1.0).delta(), layer.delta())


# --- names of real models --------------------------------------------------------------------------------------------


def real_unet() -> nn.Module:
    from diffusers import UNet2DConditionModel

    with torch.device("meta"):
        unet: nn.Module = UNet2DConditionModel(  # unet/config.json of Stable Diffusion 1.5
            sample_size=64,
            layers_per_block=2,
            block_out_channels=(320, 640, 1280, 1280),
            cross_attention_dim=768,
            attention_head_dim=8,
        )
    return unet


def real_flux() -> nn.Module:
    from diffusers import FluxTransformer2DModel

    with torch.device("meta"):
        transformer: nn.Module = FluxTransformer2DModel(guidance_embeds=True)  # the class's defaults are FLUX.1's
    return transformer


def rank_one(model: nn.Module, names: list[str]) -> dict[str, LoraLayer]:
    modules = dict(model.named_modules())
    return {name: random_lora_layer(modules[name].weight.shape, rank=1, alpha=1.0) for name in names}


def sd15_attention_names_by_hand() -> set[str]:
    """kohya's names of every attention and feed-forward layer of the SD 1.5 UNet, spelled out from its architecture."""
    places = [f"down_blocks_{block}_attentions_{n}" for block in (0, 1, 2) for n in (0, 1)]
    places += ["mid_block_attentions_0"]
    places += [f"up_blocks_{block}_attentions_{n}" for block in (1, 2, 3) for n in (0, 1, 2)]
    layers = ["proj_in", "proj_out", "transformer_blocks_0_ff_net_0_proj", "transformer_blocks_0_ff_net_2"]
    layers += [f"transformer_blocks_0_attn{n}_to_{x}" for n in (1, 2) for x in ("q", "k", "v", "out_0")]
    return {f"lora_unet_{place}_{layer}" for place in places for layer in layers}


def test_kohya_names_of_the_sd15_unet_are_the_192_that_other_programs_know(tmp_path: Path) -> None:
    unet = real_unet()
    kinds = (nn.Linear, nn.Conv2d)
    names = [n for n, m in unet.named_modules() if isinstance(m, kinds) and ".attentions." in n]
    assert len(names) == 192
    stored = load_file(write({"unet": rank_one(unet, names)}, tmp_path / "a.safetensors", "kohya", "sd15"))
    assert len(stored) == 3 * 192
    expected = sd15_attention_names_by_hand()
    assert len(expected) == 192
    endings = ("lora_down.weight", "lora_up.weight", "alpha")
    assert set(stored) == {f"{name}.{ending}" for name in expected for ending in endings}
    block = "lora_unet_down_blocks_0_attentions_0"
    assert stored[f"{block}_proj_in.lora_down.weight"].shape == (1, 320, 1, 1)
    assert stored[f"{block}_proj_in.lora_up.weight"].shape == (320, 1, 1, 1)
    assert stored[f"{block}_transformer_blocks_0_attn2_to_k.lora_down.weight"].shape == (1, 768)
    assert stored[f"{block}_transformer_blocks_0_ff_net_0_proj.lora_up.weight"].shape == (2560, 1)
    assert stored[f"{block}_proj_in.alpha"].shape == ()


def test_every_layer_of_the_sd15_unet_has_a_kohya_name_that_reads_back(tmp_path: Path) -> None:
    unet = real_unet()
    names = [n for n, m in unet.named_modules() if isinstance(m, nn.Linear | nn.Conv2d)]
    assert len(names) == 282  # 192, 86 convolutions and time projections in blocks, and 4 outside
    file = read_lora(write({"unet": rank_one(unet, names)}, tmp_path / "a.safetensors", "kohya", "sd15"))
    assert set(file.weights["unet"]) == set(names) and file.leftover == ()


def flux_names_by_hand() -> dict[str, tuple[int, int]]:
    """kohya's names of FLUX.1's layers -> (output, input) features, spelled out from the original architecture."""
    width = 3072
    found: dict[str, tuple[int, int]] = {}
    for n in range(19):
        for stream in ("img", "txt"):
            found |= {
                f"lora_unet_double_blocks_{n}_{stream}_attn_qkv": (9216, width),
                f"lora_unet_double_blocks_{n}_{stream}_attn_proj": (width, width),
                f"lora_unet_double_blocks_{n}_{stream}_mlp_0": (12288, width),
                f"lora_unet_double_blocks_{n}_{stream}_mlp_2": (width, 12288),
                f"lora_unet_double_blocks_{n}_{stream}_mod_lin": (18432, width),
            }
    for n in range(38):
        found |= {
            f"lora_unet_single_blocks_{n}_linear1": (21504, width),
            f"lora_unet_single_blocks_{n}_linear2": (width, 15360),
            f"lora_unet_single_blocks_{n}_modulation_lin": (9216, width),
        }
    return found


def test_kohya_names_and_shapes_of_flux1_are_the_304_of_its_original_layers(tmp_path: Path) -> None:
    transformer = real_flux()
    names = [n for n, m in transformer.named_modules() if isinstance(m, nn.Linear) and "transformer_blocks." in n]
    assert len(names) == 494
    stored = load_file(
        write({"transformer": rank_one(transformer, names)}, tmp_path / "a.safetensors", "kohya", "flux1")
    )
    expected = flux_names_by_hand()
    assert len(expected) == 304 and len(stored) == 3 * 304
    parts = {"qkv": 3, "linear1": 4}
    for name, (rows, columns) in expected.items():
        rank = parts.get(name.rsplit("_", 1)[-1], 1)
        assert stored[f"{name}.lora_up.weight"].shape == (rows, rank), name
        assert stored[f"{name}.lora_down.weight"].shape == (rank, columns), name
        assert stored[f"{name}.alpha"].item() == rank, name


def test_kohya_and_diffusers_spell_text_model_whether_transformers_has_that_level_or_not(tmp_path: Path) -> None:
    layer = random_lora_layer((32, 32))
    for family, prefix in (("sd15", "lora_te_"), ("flux1", "lora_te1_")):
        for module in ("encoder.layers.0.self_attn.q_proj", "text_model.encoder.layers.0.self_attn.q_proj"):
            weights = {"text_encoder": {module: layer}}
            kohya = load_file(write(weights, tmp_path / "k.safetensors", "kohya", family))
            assert f"{prefix}text_model_encoder_layers_0_self_attn_q_proj.lora_up.weight" in kohya
            diffusers = load_file(write(weights, tmp_path / "d.safetensors", "diffusers", family))
            assert "text_encoder.text_model.encoder.layers.0.self_attn.q_proj.lora_B.weight" in diffusers


# --- the header ------------------------------------------------------------------------------------------------------


def test_the_diffusers_header_has_the_fields_that_diffusers_itself_writes(tmp_path: Path) -> None:
    from peft import LoraConfig

    path = write(adapter("sd15", alpha=8.0), tmp_path / "a.safetensors", "diffusers", "sd15")
    with safe_open(str(path), framework="pt") as file:
        metadata = file.metadata()
    header = json.loads(metadata["lora_adapter_metadata"])
    fields = set(LoraConfig(r=4, target_modules=["x"]).to_dict())
    assert set(header) == {f"{component}.{name}" for component in ("unet", "text_encoder") for name in fields}
    assert header["unet.target_modules"] == sorted(UNET)
    assert header["text_encoder.target_modules"] == sorted(TEXT)
    assert metadata["format"] == "pt"


@pytest.mark.parametrize("family", ["sd15", "flux1"])
def test_alpha_keys_and_adapter_metadata_are_never_in_one_file(tmp_path: Path, family: str) -> None:
    for format in ("diffusers", "kohya"):
        path = write(adapter(family, alpha=2.0), tmp_path / "a.safetensors", format, family)
        with safe_open(str(path), framework="pt") as file:
            has_alpha = any(key.endswith(".alpha") for key in file.keys())  # noqa: SIM118
            has_header = "lora_adapter_metadata" in file.metadata()
        assert (has_alpha, has_header) == ((False, True) if format == "diffusers" else (True, False))


def test_the_factors_of_a_diffusers_file_are_right_for_readers_that_ignore_its_header(tmp_path: Path) -> None:
    weights = adapter("flux1", rank=4, alpha=1.0)
    stored = load_file(write(weights, tmp_path / "a.safetensors", "diffusers", "flux1"))
    for module, layer in weights["transformer"].items():
        name = f"transformer.{module}"
        torch.testing.assert_close(stored[f"{name}.lora_B.weight"] @ stored[f"{name}.lora_A.weight"], layer.delta())


def test_layers_of_one_kohya_component_share_one_alpha(tmp_path: Path) -> None:
    shapes = list(UNET.items())
    weights = {"unet": {m: random_lora_layer(s, rank=2 + n, alpha=1.0 + n, seed=n) for n, (m, s) in enumerate(shapes)}}
    path = write(weights, tmp_path / "a.safetensors", "kohya", "sd15")
    alphas = {tensor.item() for key, tensor in load_file(path).items() if key.endswith(".alpha")}
    assert len(alphas) == 1
    assert_same_change(read_lora(path).weights, weights)


# --- refusals --------------------------------------------------------------------------------------------------------


def test_dora_is_refused_in_the_kohya_format_and_names_the_way_out(tmp_path: Path) -> None:
    with pytest.raises(ExportError, match=r"DoRA.*to_q") as caught:
        write(with_magnitudes(adapter("sd15")), tmp_path / "a.safetensors", "kohya", "sd15")
    assert "export.formats = ['diffusers']" in caught.value.hint
    assert not list(tmp_path.iterdir())


def test_modules_without_a_kohya_name_are_refused_by_name(tmp_path: Path) -> None:
    for family, component, module in (
        ("flux1", "transformer", "proj_out"),
        ("flux1", "transformer", "time_text_embed.timestep_embedder.linear_1"),
        ("flux1", "text_encoder_2", "encoder.block.0.layer.0.SelfAttention.q"),
        ("sd15", "unet", "class_embedding.linear_1"),
        ("sd15", "text_encoder", "final_projection"),
    ):
        with pytest.raises(ExportError, match="no name for") as caught:
            write({component: {module: random_lora_layer((8, 8))}}, tmp_path / "a.safetensors", "kohya", family)
        assert module in str(caught.value) and "export.formats" in caught.value.hint
    assert not list(tmp_path.iterdir())


def test_a_component_with_dora_in_only_some_modules_is_refused(tmp_path: Path) -> None:
    plain, dora = adapter("sd15"), with_magnitudes(adapter("sd15"))
    mixed = {"unet": {**plain["unet"], "up_blocks.1.resnets.0.conv1": dora["unet"]["up_blocks.1.resnets.0.conv1"]}}
    with pytest.raises(ExportError, match="no reader can apply"):
        write(mixed, tmp_path / "a.safetensors", "diffusers", "sd15")


def test_values_that_are_not_finite_are_not_written(tmp_path: Path) -> None:
    layer = random_lora_layer((8, 8))
    broken = LoraLayer(layer.down, layer.up * float("nan"), layer.alpha)
    with pytest.raises(ExportError, match=r"not finite[\s\S]*unet\.conv_in: up"):
        write({"unet": {"conv_in": broken}}, tmp_path / "a.safetensors", "kohya", "sd15")
    huge = LoraLayer(layer.down, layer.up * 1e7, layer.alpha)
    with pytest.raises(ExportError, match=r"does not fit into torch\.float16"):
        write({"unet": {"conv_in": huge}}, tmp_path / "a.safetensors", "kohya", "sd15", torch.float16)
    assert not list(tmp_path.iterdir())


def test_nothing_to_write_and_unknown_choices_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ExportError, match="no LoRA weights"):
        write({"unet": {}}, tmp_path / "a.safetensors", "kohya", "sd15")
    with pytest.raises(ExportError, match="no LoRA format 'a1111'"):
        write(adapter("sd15"), tmp_path / "a.safetensors", "a1111", "sd15")
    with pytest.raises(ExportError, match="family 'sdxl'"):
        write(adapter("sd15"), tmp_path / "a.safetensors", "kohya", "sdxl")


def test_writing_replaces_an_older_file_whole_and_leaves_no_temporary_file(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "a.safetensors"
    write(adapter("sd15"), path, "kohya", "sd15")
    write(adapter("flux1"), path, "kohya", "flux1")
    assert read_lora(path).family == "flux1"
    assert [p.name for p in path.parent.iterdir()] == ["a.safetensors"]


# --- damaged and foreign files ---------------------------------------------------------------------------------------


def test_R79_every_kind_of_broken_file_is_an_error_that_says_what_is_wrong(tmp_path: Path) -> None:
    good = write(adapter("sd15"), tmp_path / "good.safetensors", "kohya", "sd15").read_bytes()
    header = struct.unpack("<Q", good[:8])[0]
    cases = {
        "empty": (b"", "empty or cut off"),
        "short": (good[:5], "empty or cut off"),
        "no_header": (good[:200], "cut off inside its header"),
        "half": (good[: header + 8 + 100], "damaged"),
        "text": (b"<html>404 not found</html>", "not a safetensors file"),
        "zeros": (bytes(64), "not a safetensors file"),
        "huge": (struct.pack("<Q", 2**40) + b"{" + bytes(64), "not a safetensors file"),
        "bad_json": (struct.pack("<Q", 16) + b"{" + b"x" * 63, "damaged"),
        "no_tensors": (struct.pack("<Q", 8) + b"{}      ", "no tensors"),
    }
    for name, (content, message) in cases.items():
        path = tmp_path / f"{name}.safetensors"
        path.write_bytes(content)
        with pytest.raises(LoraFileError, match=message):
            read_lora(path)
    with pytest.raises(LoraFileError, match="is a folder"):
        read_lora(tmp_path)
    with pytest.raises(LoraFileError, match="no file"):
        read_lora(tmp_path / "missing.safetensors")


class _Trap:
    def __reduce__(self) -> tuple[object, ...]:
        return Path.touch, (Path("pickle-was-executed"),)


def test_pickles_are_refused_without_being_opened_under_any_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    torch.save({"a": torch.zeros(1), "trap": _Trap()}, tmp_path / "archive.bin")
    for name in ("a.ckpt", "a.pt", "a.bin", "a.safetensors"):
        (tmp_path / name).write_bytes(pickle.dumps(_Trap()))
        with pytest.raises(LoraFileError, match="pickle"):
            read_lora(tmp_path / name)
    (tmp_path / "zip.safetensors").write_bytes((tmp_path / "archive.bin").read_bytes())
    with pytest.raises(LoraFileError, match="pickle"):
        read_lora(tmp_path / "zip.safetensors")
    assert not (tmp_path / "pickle-was-executed").exists()


def test_a_header_whose_length_begins_like_a_pickle_is_read(tmp_path: Path) -> None:
    weights = {"unet": {"conv_in": random_lora_layer((8, 8))}}
    for padding in range(0, 400, 8):
        path = tmp_path / "a.safetensors"
        write_lora(weights, path, format="kohya", family="sd15", metadata={"note": "x" * padding}, dtype=torch.float32)
        if path.read_bytes()[:1] == b"\x80":
            break
    else:
        pytest.fail("no header length with that first byte")
    assert read_lora(path).format == "kohya"


def test_values_that_are_not_finite_are_reported_by_layer(tmp_path: Path) -> None:
    stored = load_file(write(adapter("sd15"), tmp_path / "a.safetensors", "kohya", "sd15"))
    stored["lora_unet_mid_block_attentions_0_proj_in.lora_up.weight"][0] = float("inf")
    save_file(stored, tmp_path / "b.safetensors")
    with pytest.raises(LoraFileError, match=r"mid_block_attentions_0_proj_in: up has values that are not finite"):
        read_lora(tmp_path / "b.safetensors")


def test_pairs_that_do_not_fit_together_are_reported_together(tmp_path: Path) -> None:
    stored = load_file(write(adapter("flux1"), tmp_path / "a.safetensors", "kohya", "flux1"))
    stored["lora_unet_single_blocks_1_linear2.lora_up.weight"] = torch.zeros(32, 3)
    stored["lora_unet_double_blocks_0_img_attn_qkv.lora_up.weight"] = torch.zeros(95, 12)
    stored["lora_unet_double_blocks_1_img_mlp_0.lora_up.weight"] = torch.zeros(128, 4, dtype=torch.int32)
    save_file(stored, tmp_path / "b.safetensors")
    with pytest.raises(LoraFileError) as caught:
        read_lora(tmp_path / "b.safetensors")
    reasons = str(caught.value)
    assert len(caught.value.problems) == 3
    assert "no common rank" in reasons and "cannot be 3 parts" in reasons and "int32" in reasons


def test_keys_that_are_not_understood_are_left_over_and_the_rest_is_read(tmp_path: Path) -> None:
    stored = load_file(write(adapter("sd15"), tmp_path / "a.safetensors", "kohya", "sd15"))
    half = "lora_unet_mid_block_attentions_0_proj_in"
    del stored[f"{half}.lora_up.weight"]
    dora = "lora_unet_up_blocks_1_resnets_0_conv1"
    stored[f"{dora}.dora_scale"] = torch.ones(16, 1, 1, 1)
    stored["lora_te2_text_model_encoder_layers_0_mlp_fc1.lora_down.weight"] = torch.zeros(4, 8)
    stored["something.else"] = torch.zeros(1)
    save_file(stored, tmp_path / "b.safetensors")
    file = read_lora(tmp_path / "b.safetensors")
    assert set(file.leftover) == {
        f"{half}.lora_down.weight",
        f"{half}.alpha",
        f"{dora}.lora_down.weight",
        f"{dora}.lora_up.weight",
        f"{dora}.alpha",
        f"{dora}.dora_scale",
        "lora_te2_text_model_encoder_layers_0_mlp_fc1.lora_down.weight",
        "something.else",
    }
    assert set(file.weights["unet"]) == set(UNET) - {"mid_block.attentions.0.proj_in", "up_blocks.1.resnets.0.conv1"}
    assert describe(file)["leftover"] == list(file.leftover)


def test_other_families_and_other_adapters_are_refused_and_the_first_key_is_shown(tmp_path: Path) -> None:
    save_file({"lora_unet_input_blocks_4_1_proj_in.lora_up.weight": torch.zeros(4, 4)}, tmp_path / "sdxl.safetensors")
    with pytest.raises(LoraFileError, match=r"no known model family[\s\S]*input_blocks_4_1"):
        read_lora(tmp_path / "sdxl.safetensors")
    save_file({"lora_unet_mid_block_attentions_0_proj_in.lokr_w1": torch.zeros(4, 4)}, tmp_path / "lokr.safetensors")
    with pytest.raises(LoraFileError, match=r"none of its 1 keys[\s\S]*LoKr"):
        read_lora(tmp_path / "lokr.safetensors")
    with pytest.raises(LoraFileError, match="family 'sdxl' is not supported"):
        read_lora(tmp_path / "lokr.safetensors", "sdxl")


@pytest.mark.parametrize(
    "header",
    ["{", "[]", '{"unet.lora_alpha": NaN}', '{"unet.lora_alpha": "4"}', '{"unet.alpha_pattern": {"(a+)+": 1}}'],
)
def test_a_strange_adapter_header_is_an_error(tmp_path: Path, header: str) -> None:
    stored = load_file(write(adapter("sd15"), tmp_path / "a.safetensors", "diffusers", "sd15"))
    save_file(stored, tmp_path / "b.safetensors", metadata={"lora_adapter_metadata": header})
    with pytest.raises(LoraFileError, match="lora_adapter_metadata cannot be read"):
        read_lora(tmp_path / "b.safetensors")


# --- older and other spellings ---------------------------------------------------------------------------------------


def respelled(stored: dict[str, Tensor], replacements: list[tuple[str, str]]) -> dict[str, Tensor]:
    result = {}
    for key, tensor in stored.items():
        for old, new in replacements:
            key = key.replace(old, new)
        result[key] = tensor
    return result


@pytest.mark.parametrize(
    "replacements",
    [
        [(".lora_A.weight", ".lora.down.weight"), (".lora_B.weight", ".lora.up.weight")],
        [(".lora_A.weight", ".lora_A.default.weight"), (".lora_B.weight", ".lora_B.default.weight")],
        [(".lora_A.weight", ".lora_down.weight"), (".lora_B.weight", ".lora_up.weight")],
        [(".lora_A.weight", ".lora_linear_layer.down.weight"), (".lora_B.weight", ".lora_linear_layer.up.weight")],
        [
         ("attn1.to_q.lora_A", "attn1.processor.to_q_lora.down"), ("attn1.to_q.lora_B", "attn1.processor.to_q_lora.up"),
         ("attn1.to_out.0.lora_A", "attn1.processor.to_out_lora.down"),
         ("attn1.to_out.0.lora_B", "attn1.processor.to_out_lora.up"),
         ("self_attn.q_proj.lora_A", "self_attn.to_q_lora.down"),
         ("self_attn.q_proj.lora_B", "self_attn.to_q_lora.up"),
        ],
        [("unet.", ""), ("text_encoder.", "")],
        [("unet.", "base_model.model.unet.")],
        [("text_model.", "")],
    ],
)  # fmt: skip
def test_older_spellings_of_the_diffusers_format_are_read(tmp_path: Path, replacements: list[tuple[str, str]]) -> None:
    weights = adapter("sd15")
    stored = load_file(write(weights, tmp_path / "a.safetensors", "diffusers", "sd15"))
    save_file(respelled(stored, replacements), tmp_path / "b.safetensors")
    file = read_lora(tmp_path / "b.safetensors")
    assert (file.leftover, file.format, file.family) == ((), "diffusers", "sd15")
    assert_same_change(file.weights, weights)


def test_alpha_is_taken_from_the_layer_then_from_the_header_and_else_is_the_rank(tmp_path: Path) -> None:
    layer = random_lora_layer((8, 8), rank=4)
    names = ("transformer_blocks.0.attn.to_q", "transformer_blocks.0.attn.to_k", "transformer_blocks.1.attn.to_k")
    stored = {f"transformer.{n}.lora_{x}.weight": t for n in names for x, t in (("A", layer.down), ("B", layer.up))}
    stored = {key: tensor.clone() for key, tensor in stored.items()}
    stored[f"transformer.{names[0]}.alpha"] = torch.tensor(1.0)
    header = {
        "transformer.lora_alpha": 2,
        "transformer.alpha_pattern": {"0.attn.to_k": 3},
        "transformer.use_rslora": False,
    }
    save_file(stored, tmp_path / "a.safetensors", metadata={"lora_adapter_metadata": json.dumps(header)})
    layers = read_lora(tmp_path / "a.safetensors").weights["transformer"]
    assert [layers[name].alpha for name in names] == [1.0, 3.0, 2.0]
    save_file(stored, tmp_path / "b.safetensors")
    layers = read_lora(tmp_path / "b.safetensors").weights["transformer"]
    assert [layers[name].alpha for name in names] == [1.0, 4.0, 4.0]


def test_a_header_of_diffusers_with_rank_stabilisation_is_applied(tmp_path: Path) -> None:
    layer = random_lora_layer((8, 8), rank=4, alpha=3.0, rank_stabilised=True)
    stored = {"unet.conv_in.lora_A.weight": layer.down, "unet.conv_in.lora_B.weight": layer.up}
    header = json.dumps({"unet.lora_alpha": 3.0, "unet.use_rslora": True})
    save_file(stored, tmp_path / "a.safetensors", metadata={"lora_adapter_metadata": header})
    read = read_lora(tmp_path / "a.safetensors").weights["unet"]["conv_in"]
    torch.testing.assert_close(read.delta(), layer.delta())


def test_flux_files_with_the_original_names_and_dots_are_read(tmp_path: Path) -> None:
    weights = adapter("flux1")
    kohya = load_file(write({"transformer": weights["transformer"]}, tmp_path / "a.safetensors", "kohya", "flux1"))
    dotted = respelled(
        kohya,
        [("lora_unet_", "diffusion_model."), ("double_blocks_", "double_blocks."), ("single_blocks_", "single_blocks."),
         ("_linear", ".linear"), ("_img_", ".img_"), ("_txt_", ".txt_"), ("attn_", "attn."), ("mlp_", "mlp."),
         (".lora_down.", ".lora_A."), (".lora_up.", ".lora_B.")],
    )  # fmt: skip
    assert "diffusion_model.double_blocks.0.img_attn.qkv.lora_A.weight" in dotted
    save_file(dotted, tmp_path / "b.safetensors")
    file = read_lora(tmp_path / "b.safetensors")
    assert (file.leftover, file.family) == ((), "flux1")
    assert_same_change(file.weights, {"transformer": weights["transformer"]})


def test_a_file_with_a_text_encoder_only_is_recognised(tmp_path: Path) -> None:
    weights = {"text_encoder": adapter("sd15")["text_encoder"]}
    assert read_lora(write(weights, tmp_path / "a.safetensors", "kohya", "sd15")).family == "sd15"
    path = write_lora(
        weights, tmp_path / "b.safetensors", format="kohya", family="flux1",
        metadata={"modelspec.architecture": "flux-1-dev/lora"}, dtype=torch.float32,
    )  # fmt: skip
    assert read_lora(path).family == "flux1"


# --- describing ------------------------------------------------------------------------------------------------------


def test_a_description_is_plain_data_about_components_ranks_blocks_and_metadata(tmp_path: Path) -> None:
    weights = adapter("sd15", rank=4, alpha=2.0)
    path = write_lora(
        weights, tmp_path / "a.safetensors", format="kohya", family="sd15",
        metadata={"modelspec.title": "my cat", "ss_tag": "x" * 1000, "safelight.settings": "{}"}, dtype=torch.float16,
    )  # fmt: skip
    told = json.loads(json.dumps(describe(read_lora(path))))
    assert (told["file"], told["format"], told["family"], told["modules"]) == ("a.safetensors", "kohya", "sd15", 7)
    unet = told["components"]["unet"]
    assert (unet["modules"], unet["ranks"], unet["alphas"], unet["dora"]) == (5, [4], [2.0], False)
    assert unet["blocks"] == {"down_blocks.0": 2, "mid_block": 1, "up_blocks.1": 2} and unet["dtypes"] == ["float16"]
    assert told["components"]["text_encoder"]["blocks"] == {"encoder.layers.0": 1, "encoder.layers.1": 1}
    assert told["metadata"]["modelspec.title"] == "my cat" and len(told["metadata"]["ss_tag"]) == 200


def test_lora_file_is_a_frozen_value(tmp_path: Path) -> None:
    file = read_lora(write(adapter("sd15"), tmp_path / "a.safetensors", "kohya", "sd15"))
    with pytest.raises(AttributeError):
        file.format = "diffusers"  # type: ignore[misc]
    assert isinstance(file, LoraFile)
