"""Exported files in real diffusers pipelines: same pictures, every key used, and verification that notices faults."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from engine.errors import ExportError, LoraFileError
from engine.exports import verification
from engine.exports.formats import read_lora, write_lora
from engine.exports.verification import load_into_pipeline, loaded_layers, verify_export
from engine.lora_weights import LoraLayer, LoraWeights
from tests.tiny import random_lora_layer, tiny_flux1, tiny_sd15

DENOISER = {"sd15": "unet", "flux1": "transformer"}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("tiny")
    return {"sd15": tiny_sd15(folder / "sd15"), "flux1": tiny_flux1(folder / "flux1")}


@dataclass(frozen=True)
class Kind:
    """A way to adapt a model."""

    rank: int = 4
    alpha: float = 4.0
    rank_stabilised: bool = False
    dora: bool = False


KINDS = {
    "alpha=rank": Kind(),
    "alpha<rank": Kind(alpha=1.5),
    "alpha>rank": Kind(rank=3, alpha=24.0),
    "rank-stabilised": Kind(rank=8, alpha=5.0, rank_stabilised=True),
    "dora": Kind(alpha=2.0, dora=True),
}


def fresh(folder: Path) -> Any:
    from diffusers import DiffusionPipeline
    from diffusers.utils import logging as diffusers_logging
    from transformers.utils import logging as transformers_logging

    diffusers_logging.disable_progress_bar()
    transformers_logging.disable_progress_bar()
    pipeline = DiffusionPipeline.from_pretrained(folder, local_files_only=True)
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


def picture(pipeline: Any) -> Tensor:
    """(1, 3, 64, 64) in [0, 1], two steps from a fixed seed."""
    arguments = {"max_sequence_length": 32} if hasattr(pipeline, "transformer") else {}
    images = pipeline(
        "a red cat", height=64, width=64, num_inference_steps=2, output_type="pt", guidance_scale=2.0,
        generator=torch.Generator().manual_seed(3), **arguments,
    ).images  # fmt: skip
    return torch.as_tensor(images)


def target_names(model: nn.Module, component: str) -> list[str]:
    """Every layer that training may adapt: linear layers and convolutions inside the blocks."""
    lists = {
        "unet": ("down_blocks.", "mid_block.", "up_blocks."),
        "transformer": ("transformer_blocks.", "single_transformer_blocks."),
        "text_encoder": ("encoder.layers.", "text_model.encoder.layers."),
    }
    kinds = (nn.Linear, nn.Conv2d)
    return [n for n, m in model.named_modules() if isinstance(m, kinds) and n.startswith(lists[component])]


def adapt(model: nn.Module, names: list[str], kind: Kind, seed: int = 0) -> None:
    """Put a training adapter with random weights into the model, as training does."""
    from peft import LoraConfig, inject_adapter_in_model

    config = LoraConfig(
        r=kind.rank, lora_alpha=kind.alpha, use_rslora=kind.rank_stabilised, use_dora=kind.dora, target_modules=names
    )
    inject_adapter_in_model(config, model, adapter_name="default")
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        if "lora_B" in name or "lora_A" in name:
            parameter.data = torch.randn(parameter.shape, generator=generator) * (0.5 / math.sqrt(parameter[0].numel()))
        if "lora_magnitude" in name:
            parameter.data *= 1 + 0.1 * torch.rand(parameter.shape, generator=generator)


def trained_weights(pipeline: Any, kind: Kind) -> LoraWeights:
    """What the training side hands over: factors and alpha as they were trained."""
    weights: dict[str, dict[str, LoraLayer]] = {}
    for (component, module), layer in loaded_layers(pipeline, "default").items():
        weights.setdefault(component, {})[module] = LoraLayer(
            layer.down, layer.up, kind.alpha, kind.rank_stabilised, layer.magnitude
        )
    return weights


@dataclass(frozen=True)
class Trained:
    pipeline: Any
    weights: LoraWeights
    family: str

    @property
    def models(self) -> dict[str, nn.Module]:
        return {name: getattr(self.pipeline, name) for name in (DENOISER[self.family], "text_encoder")}


def train(folders: dict[str, Path], family: str, kind: Kind, *, text_encoder: bool = True) -> Trained:
    pipeline = fresh(folders[family])
    for name in (DENOISER[family], "text_encoder") if text_encoder else (DENOISER[family],):
        adapt(getattr(pipeline, name), target_names(getattr(pipeline, name), name), kind)
    return Trained(pipeline, trained_weights(pipeline, kind), family)


def write(trained: Trained, path: Path, format: str, dtype: torch.dtype = torch.float32) -> Path:
    return write_lora(trained.weights, path, format=format, family=trained.family, metadata={}, dtype=dtype)


def set_training_adapter(trained: Trained, enabled: bool) -> None:
    from peft.tuners.tuners_utils import BaseTunerLayer

    for model in trained.models.values():
        for module in model.modules():
            if isinstance(module, BaseTunerLayer):
                module.enable_adapters(enabled)


def prediction_of(trained: Trained) -> Callable[[], Tensor]:
    def predict() -> Tensor:
        with torch.no_grad():
            return picture(trained.pipeline)

    return predict


def verify(trained: Trained, path: Path) -> verification.Verification:
    predict = prediction_of(trained)
    set_training_adapter(trained, True)
    live = predict()
    set_training_adapter(trained, False)
    try:
        return verify_export(
            path,
            pipeline=trained.pipeline,
            denoiser_name=DENOISER[trained.family],
            expected=trained.weights,
            predict=predict,
            live_prediction=live,
            family=trained.family,
        )
    finally:
        set_training_adapter(trained, True)


CASES = [
    (family, format, kind)
    for family in ("sd15", "flux1")
    for format in ("diffusers", "kohya")
    for kind in KINDS
    if not (format == "kohya" and kind == "dora")
]


def reader_of(family: str, format: str) -> str:
    """diffusers reads kohya files of FLUX.1 only at the released width, which has its own test."""
    return "safelight" if (family, format) == ("flux1", "kohya") else "diffusers"


@pytest.mark.parametrize(("family", "format", "kind"), CASES)
def test_a_fresh_pipeline_with_the_file_draws_the_picture_of_the_trained_one(
    folders: dict[str, Path], tmp_path: Path, family: str, format: str, kind: str
) -> None:
    trained = train(folders, family, KINDS[kind])
    path = write(trained, tmp_path / "a.safetensors", format)
    pipeline = fresh(folders[family])
    before = picture(pipeline)
    report = load_into_pipeline(pipeline, path)
    assert report.complete and report.unread == () and report.warnings == ()
    assert report.reader == reader_of(family, format)
    assert report.modules == sum(len(layers) for layers in trained.weights.values()) >= 40
    assert report.keys == len(load_file(path))
    live = picture(trained.pipeline)
    assert float((live - before).abs().max()) > 1e-3  # the adapter does something
    assert float((picture(pipeline) - live).abs().max()) < 1e-5


@pytest.mark.parametrize(("family", "format", "kind"), CASES)
def test_a_good_file_is_verified_in_the_pipeline_that_was_trained(
    folders: dict[str, Path], tmp_path: Path, family: str, format: str, kind: str
) -> None:
    trained = train(folders, family, KINDS[kind])
    path = write(trained, tmp_path / "a.safetensors", format)
    result = verify(trained, path)
    assert result.max_delta_error < 1e-5 and result.max_prediction_error < 1e-5
    assert result.modules == sum(len(layers) for layers in trained.weights.values())
    assert result.keys == len(load_file(path))
    assert result.reader == reader_of(family, format)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("format", ["diffusers", "kohya"])
def test_files_in_half_formats_are_verified_within_their_rounding(
    folders: dict[str, Path], tmp_path: Path, format: str, dtype: torch.dtype
) -> None:
    trained = train(folders, "sd15", KINDS["alpha<rank"])
    result = verify(trained, write(trained, tmp_path / "a.safetensors", format, dtype))
    assert 0 < result.max_delta_error < 0.05


def test_ranks_and_alphas_that_differ_between_modules_are_right_in_diffusers(
    folders: dict[str, Path], tmp_path: Path
) -> None:
    for family, format in (("sd15", "kohya"), ("sd15", "diffusers"), ("flux1", "diffusers")):
        pipeline = fresh(folders[family])
        weights: dict[str, dict[str, LoraLayer]] = {}
        for component in (DENOISER[family], "text_encoder"):
            model = getattr(pipeline, component)
            modules = dict(model.named_modules())
            for n, name in enumerate(target_names(model, component)):
                layer = lora_layer(modules[name].weight, 2 + n % 3, 1.0 + n % 4, seed=n)
                weights.setdefault(component, {})[name] = layer
        path = write_lora(
            weights, tmp_path / f"{family}.safetensors", format=format, family=family, metadata={}, dtype=torch.float32
        )
        assert load_into_pipeline(pipeline, path).complete
        for (component, module), layer in loaded_layers(pipeline, "verification").items():
            torch.testing.assert_close(layer.delta(), weights[component][module].delta())


def lora_layer(weight: Tensor, rank: int, alpha: float, seed: int) -> LoraLayer:
    return random_lora_layer(weight.shape, rank=rank, alpha=alpha, rank_stabilised=seed % 2 == 0, seed=seed)


def test_diffusers_reads_kohya_files_of_flux1_at_its_released_width(tmp_path: Path) -> None:
    from diffusers import FluxPipeline

    shapes = {
        "transformer_blocks.0.attn.to_q": (3072, 3072),
        "transformer_blocks.0.attn.to_v": (3072, 3072),
        "transformer_blocks.18.attn.add_k_proj": (3072, 3072),
        "single_transformer_blocks.0.attn.to_k": (3072, 3072),
        "single_transformer_blocks.0.proj_mlp": (12288, 3072),
        "single_transformer_blocks.37.proj_out": (3072, 15360),
    }
    weights = {"transformer": {m: random_lora_layer(s, alpha=3.0, seed=n) for n, (m, s) in enumerate(shapes.items())}}
    path = write_lora(
        weights, tmp_path / "a.safetensors", format="kohya", family="flux1", metadata={}, dtype=torch.float32
    )
    state = FluxPipeline.lora_state_dict(str(path.parent), weight_name=path.name)
    state = state[0] if isinstance(state, tuple) else state
    assert {key.removeprefix("transformer.").split(".lora")[0] for key in state} >= set(shapes)
    for key in [key for key in state if key.endswith("lora_A.weight")]:
        module = key.removeprefix("transformer.").removesuffix(".lora_A.weight")
        probe = torch.randn(state[key].shape[1], generator=torch.Generator().manual_seed(0))
        change = state[f"transformer.{module}.lora_B.weight"] @ (state[key] @ probe)  # the whole matrix takes seconds
        if module in shapes:
            layer = weights["transformer"][module]
            torch.testing.assert_close(change, layer.scale * (layer.up @ (layer.down @ probe)), atol=1e-4, rtol=1e-4)
        else:
            assert not bool(change.any())  # the part that was not trained


# --- faults are noticed ----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def trained(folders: dict[str, Path]) -> Trained:
    return train(folders, "sd15", KINDS["alpha<rank"])


def changed(path: Path, change: Callable[[dict[str, Tensor], dict[str, str]], object]) -> Path:
    tensors = load_file(path)
    with safe_open(str(path), framework="pt") as file:
        metadata = dict(file.metadata())
    change(tensors, metadata)
    save_file(tensors, path, metadata=metadata)
    return path


def test_R79_one_altered_tensor_fails_verification_and_is_named(trained: Trained, tmp_path: Path) -> None:
    def alter(tensors: dict[str, Tensor], metadata: dict[str, str]) -> None:
        tensors["lora_unet_mid_block_attentions_0_proj_in.lora_up.weight"][3] += 1e-3

    path = changed(write(trained, tmp_path / "a.safetensors", "kohya"), alter)
    with pytest.raises(ExportError, match=r"1 of \d+ modules differ, first unet\.mid_block\.attentions\.0\.proj_in"):
        verify(trained, path)


def test_a_wrong_alpha_fails_verification(trained: Trained, tmp_path: Path) -> None:
    def double(tensors: dict[str, Tensor], metadata: dict[str, str]) -> None:
        for key in [key for key in tensors if key.endswith(".alpha")]:
            tensors[key] = tensors[key] * 2

    def header(tensors: dict[str, Tensor], metadata: dict[str, str]) -> None:
        config = json.loads(metadata["lora_adapter_metadata"])
        metadata["lora_adapter_metadata"] = json.dumps({**config, "unet.lora_alpha": 1})

    for format, change in (("kohya", double), ("diffusers", header)):
        path = changed(write(trained, tmp_path / "a.safetensors", format), change)
        with pytest.raises(ExportError, match="is not what was trained"):
            verify(trained, path)


def test_a_module_that_is_missing_from_the_file_fails_verification(trained: Trained, tmp_path: Path) -> None:
    module = "lora_te_text_model_encoder_layers_0_mlp_fc1"

    def drop(tensors: dict[str, Tensor], metadata: dict[str, str]) -> None:
        for key in [key for key in tensors if key.startswith(f"{module}.")]:
            del tensors[key]

    path = changed(write(trained, tmp_path / "a.safetensors", "kohya"), drop)
    with pytest.raises(ExportError, match=r"text_encoder\.encoder\.layers\.0\.mlp\.fc1") as caught:
        verify(trained, path)
    assert "is not in the file" in str(caught.value)


def test_keys_that_belong_to_nothing_fail_verification(trained: Trained, tmp_path: Path) -> None:
    def add(tensors: dict[str, Tensor], metadata: dict[str, str]) -> None:
        tensors["lora_unet_mid_block_attentions_0_unknown.lora_up.weight"] = torch.zeros(4, 4)

    path = changed(write(trained, tmp_path / "a.safetensors", "kohya"), add)
    with pytest.raises(ExportError, match="keys that belong to no module: lora_unet_mid_block_attentions_0_unknown"):
        verify(trained, path)


def test_a_module_that_the_base_does_not_have_is_not_silently_skipped(trained: Trained, tmp_path: Path) -> None:
    def move(tensors: dict[str, Tensor], metadata: dict[str, str]) -> None:
        for key in [key for key in tensors if "mid_block_attentions_0_proj_in" in key]:
            tensors[key.replace("mid_block_attentions_0", "up_blocks_3_attentions_0")] = tensors.pop(key)

    path = changed(write(trained, tmp_path / "a.safetensors", "kohya"), move)
    with pytest.raises(ExportError, match="up_blocks"):
        verify(trained, path)
    report = load_into_pipeline(fresh(Path(trained.pipeline.config._name_or_path)), path)
    assert report.missing == ("unet.up_blocks.3.attentions.0.proj_in",)
    assert all("up_blocks_3_attentions_0_proj_in" in key for key in report.unread) and len(report.unread) == 3


def test_a_prediction_that_differs_fails_verification(trained: Trained, tmp_path: Path) -> None:
    path = write(trained, tmp_path / "a.safetensors", "kohya")
    set_training_adapter(trained, False)
    with pytest.raises(ExportError, match="prediction with the file differs"):
        verify_export(
            path, pipeline=trained.pipeline, denoiser_name="unet", expected=trained.weights,
            predict=prediction_of(trained), live_prediction=prediction_of(trained)(), family="sd15",
        )  # fmt: skip
    set_training_adapter(trained, True)


def test_a_file_of_another_size_is_refused_and_leaves_the_pipeline_as_it_was(
    folders: dict[str, Path], tmp_path: Path
) -> None:
    pipeline = fresh(folders["sd15"])
    before = [(name, type(module)) for name, module in pipeline.unet.named_modules()]
    module = "down_blocks.0.attentions.0.proj_in"
    path = write_lora(
        {"unet": {module: lora_layer(torch.zeros(320, 320, 1, 1), 4, 4.0, 0)}},
        tmp_path / "a.safetensors", format="kohya", family="sd15", metadata={}, dtype=torch.float32,
    )  # fmt: skip
    with pytest.raises(LoraFileError, match=r"diffusers cannot load a\.safetensors"):
        load_into_pipeline(pipeline, path)
    assert [(name, type(module)) for name, module in pipeline.unet.named_modules()] == before


def test_an_adapter_name_that_is_taken_is_refused_and_the_first_adapter_stays(
    folders: dict[str, Path], trained: Trained, tmp_path: Path
) -> None:
    path = write(trained, tmp_path / "a.safetensors", "kohya")
    pipeline = fresh(folders["sd15"])
    load_into_pipeline(pipeline, path)
    drawn = picture(pipeline)
    with pytest.raises(LoraFileError, match="'verification' is loaded already"):
        load_into_pipeline(pipeline, path)
    assert torch.equal(picture(pipeline), drawn)


# --- the pipeline afterwards -----------------------------------------------------------------------------------------


def state_of(model: nn.Module) -> dict[str, object]:
    from peft.tuners.tuners_utils import BaseTunerLayer

    return {
        "modules": [(name, type(module), module.training) for name, module in model.named_modules()],
        "identities": [id(parameter) for parameter in model.parameters()],
        "trainable": [(name, p.requires_grad, p.dtype) for name, p in model.named_parameters()],
        "adapters": [
            (name, module.active_adapters, module.disable_adapters, sorted(module.lora_A), sorted(module.scaling))
            for name, module in model.named_modules()
            if isinstance(module, BaseTunerLayer)
        ],
        "configs": sorted(getattr(model, "peft_config", {})),
        "loaded": getattr(model, "_hf_peft_config_loaded", None),
    }


@pytest.mark.parametrize("kind", ["alpha<rank", "dora"])
def test_verification_leaves_modules_weights_trainability_and_modes_as_they_were(
    folders: dict[str, Path], tmp_path: Path, kind: str
) -> None:
    trained = train(folders, "sd15", KINDS[kind])
    path = write(trained, tmp_path / "a.safetensors", "diffusers")
    for model in trained.models.values():
        model.requires_grad_(False)
        model.train()
        for name, parameter in model.named_parameters():
            parameter.requires_grad_("lora_" in name and "q_proj" not in name)  # any choice must survive
    check_untouched(trained, path)


def check_untouched(trained: Trained, path: Path) -> None:
    set_training_adapter(trained, False)
    states = {name: state_of(model) for name, model in trained.models.items()}
    weights = {name: [p.detach().clone() for p in model.parameters()] for name, model in trained.models.items()}
    # It ends with an error here, which must not leave anything behind either.
    with pytest.raises(ExportError, match="prediction"):
        verify_export(
            path, pipeline=trained.pipeline, denoiser_name=DENOISER[trained.family], expected=trained.weights,
            predict=lambda: torch.zeros(1), live_prediction=torch.ones(1), family=trained.family,
        )  # fmt: skip
    for name, model in trained.models.items():
        assert state_of(model) == states[name]
        assert all(torch.equal(a, b) for a, b in zip(weights[name], model.parameters(), strict=True))


def test_verification_keeps_fp32_adapters_of_a_bf16_base_in_fp32(folders: dict[str, Path], tmp_path: Path) -> None:
    pipeline = fresh(folders["sd15"])
    pipeline.to(torch.bfloat16)
    for name in ("unet", "text_encoder"):
        adapt(getattr(pipeline, name), target_names(getattr(pipeline, name), name), KINDS["alpha<rank"])
    trained = Trained(pipeline, trained_weights(pipeline, KINDS["alpha<rank"]), "sd15")
    adapters = [p for model in trained.models.values() for n, p in model.named_parameters() if "lora_" in n]
    assert {p.dtype for p in adapters} == {torch.float32}
    check_untouched(trained, write(trained, tmp_path / "a.safetensors", "diffusers"))


def test_verification_of_a_fused_file_removes_the_parts_that_it_added(folders: dict[str, Path], tmp_path: Path) -> None:
    pipeline = fresh(folders["flux1"])
    adapt(pipeline.transformer, ["transformer_blocks.0.attn.to_q", "transformer_blocks.1.attn.add_v_proj"], Kind())
    trained = Trained(pipeline, trained_weights(pipeline, Kind()), "flux1")
    path = write(trained, tmp_path / "a.safetensors", "kohya")
    assert load_file(path)["lora_unet_double_blocks_0_img_attn_qkv.lora_up.weight"].shape == (96, 12)
    before = state_of(pipeline.transformer)
    result = verify(trained, path)
    assert (result.modules, result.keys, result.reader) == (2, 6, "diffusers")
    assert state_of(pipeline.transformer) == before


def test_a_pipeline_without_adapters_is_verified_with_plain_weights(folders: dict[str, Path], tmp_path: Path) -> None:
    trained = train(folders, "sd15", KINDS["alpha<rank"], text_encoder=False)
    live = picture(trained.pipeline)
    path = write(trained, tmp_path / "a.safetensors", "kohya")
    pipeline = fresh(folders["sd15"])
    before = state_of(pipeline.unet)
    result = verify_export(
        path, pipeline=pipeline, denoiser_name="unet", expected=trained.weights,
        predict=lambda: picture(pipeline), live_prediction=live, family="sd15",
    )  # fmt: skip
    assert result.max_prediction_error < 1e-5
    assert state_of(pipeline.unet) == before and not hasattr(pipeline.unet, "peft_config")


def test_what_diffusers_itself_saves_is_read_exactly(folders: dict[str, Path], tmp_path: Path) -> None:
    from diffusers.training_utils import _collate_lora_metadata
    from peft import get_peft_model_state_dict

    for family, kind in (("sd15", "rank-stabilised"), ("flux1", "alpha<rank"), ("sd15", "dora")):
        trained = train(folders, family, KINDS[kind], text_encoder=False)
        name = DENOISER[family]
        model = trained.models[name]
        type(trained.pipeline).save_lora_weights(
            tmp_path,
            **{f"{name}_lora_layers": get_peft_model_state_dict(model)},
            **_collate_lora_metadata({name: model}),
        )
        file = read_lora(tmp_path / "pytorch_lora_weights.safetensors")
        assert (file.leftover, file.family, file.format) == ((), family, "diffusers")
        for module, layer in trained.weights[name].items():
            torch.testing.assert_close(file.weights[name][module].delta(), layer.delta())
            assert file.weights[name][module].alpha == layer.alpha
