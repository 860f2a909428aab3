"""What an exported file says about itself, and what it must not say."""

from __future__ import annotations

import hashlib
import json
import struct
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save

from engine.errors import LoraFileError
from engine.exports.formats import read_lora, write_lora
from engine.exports.metadata import base_name, build_metadata, settings_from_metadata
from engine.families.family import BaseNames
from engine.settings.loading import parse
from engine.settings.schema import Settings
from tests.tiny import random_lora_layer


def settings(**sections: object) -> Settings:
    return parse(
        {
            "name": "cats",
            "base": {"source": "/home/someone/models/secret-client/dream.safetensors", "family": "sd15"},
            "dataset": {"folder": "/home/someone/pictures", "folder_repeats": {"holiday": 3}, "repeats": 2},
            "method": {"type": "lora", "rank": 16, "alpha": 8.0},
            "optimizer": {"type": "prodigy", "lr": 1.0},
            "captions": {"trigger": "sks cat"},
            "train": {"steps": 1200, "batch_size": 2},
            **sections,
        }
    )


SD15 = BaseNames("stable-diffusion-v1", "sd_v1", prediction_type="epsilon")


def metadata_of(value: Settings, names: BaseNames = SD15) -> dict[str, str]:
    return build_metadata(
        value, names=names, steps=600, epochs=3, images=20, title="cats-000600", trigger="sks cat",
        resolution=(768, 512), date="2026-01-02T03:04:05",
    )  # fmt: skip


def test_metadata_names_the_model_the_network_and_the_training() -> None:
    metadata = metadata_of(settings())
    assert (
        metadata.items()
        >= {
            "modelspec.sai_model_spec": "1.0.1",
            "modelspec.architecture": "stable-diffusion-v1/lora",
            "modelspec.implementation": "diffusers",
            "modelspec.title": "cats-000600",
            "modelspec.trigger_phrase": "sks cat",
            "modelspec.resolution": "512x768",
            "modelspec.prediction_type": "epsilon",
            "modelspec.date": "2026-01-02T03:04:05",
            "ss_v2": "False",
            "ss_base_model_version": "sd_v1",
            "ss_network_module": "networks.lora",
            "ss_network_dim": "16",
            "ss_network_alpha": "8.0",
            "ss_network_args": "{}",
            "ss_output_name": "cats-000600",
            "ss_steps": "600",
            "ss_max_train_steps": "1200",
            "ss_epoch": "3",
            "ss_num_train_images": "20",
            "ss_optimizer": "Prodigy",
            "ss_sd_model_name": "dream.safetensors",
        }.items()
    )


def test_metadata_of_flux_and_of_v_prediction_differ() -> None:
    flux = metadata_of(settings(), BaseNames("flux-1-schnell", "flux1"))
    assert flux["modelspec.architecture"] == "flux-1-schnell/lora" and flux["ss_base_model_version"] == "flux1"
    assert "modelspec.prediction_type" not in flux
    v = metadata_of(settings(), BaseNames("stable-diffusion-v1", "sd_v1_v", prediction_type="v"))
    assert v["modelspec.prediction_type"] == "v" and v["ss_base_model_version"] == "sd_v1_v"


def test_the_alpha_in_the_metadata_is_the_alpha_in_a_kohya_file(tmp_path: Path) -> None:
    for method in ({"rank": 16, "alpha": 8.0, "rank_stabilised": True}, {"rank": 16}):
        value = settings(method={"type": "lora", **method})
        layer = random_lora_layer((8, 8), rank=16, alpha=method.get("alpha", 16.0), rank_stabilised=len(method) == 3)
        path = write_lora(
            {"unet": {"conv_in": layer}}, tmp_path / "a.safetensors", format="kohya", family="sd15",
            metadata=metadata_of(value), dtype=torch.float32,
        )  # fmt: skip
        file = read_lora(path)
        assert float(file.metadata["ss_network_alpha"]) == pytest.approx(file.weights["unet"]["conv_in"].alpha)


def test_every_value_is_a_string_and_no_path_folder_or_caption_statistic_is_in_it() -> None:
    metadata = metadata_of(settings())
    assert all(isinstance(key, str) and isinstance(value, str) and value for key, value in metadata.items())
    everything = json.dumps(metadata)
    for private in ("/home", "someone", "secret-client", "pictures", "holiday", "\\\\"):
        assert private not in everything.replace('\\"', '"'), private
    assert not {"ss_dataset_dirs", "ss_tag_frequency", "ss_reg_dataset_dirs", "ss_datasets"} & metadata.keys()


@pytest.mark.parametrize(
    ("source", "told"),
    [
        ("embedded/unet", "embedded/unet"),
        ("owner/model-1.5", "owner/model-1.5"),
        ("/srv/models/x", "x"),
        ("~/models/x", "x"),
        ("./models/x.safetensors", "x.safetensors"),
        ("C:\\Users\\me\\x.safetensors", "x.safetensors"),
        ("\\\\server\\share\\x", "x"),
        ("https://host/x.safetensors?token=hf_secret", "x.safetensors"),
        ("../x/", "x"),
        ("/", "base"),
    ],
)
def test_only_embedded_bases_and_hub_ids_are_told_in_full(source: str, told: str) -> None:
    assert base_name(source) == told


def test_a_folder_that_looks_like_a_hub_id_is_told_by_its_last_part(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "private" / "model").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    assert base_name("private/model") == "model"


def test_a_lora_opens_as_a_preset_that_trains_the_same_way(tmp_path: Path) -> None:
    original = settings(base={"source": "embedded/unet"})
    path = write_lora(
        {"unet": {"conv_in": random_lora_layer((8, 8))}}, tmp_path / "a.safetensors", format="kohya", family="sd15",
        metadata=metadata_of(original), dtype=torch.float32,
    )  # fmt: skip
    preset = settings_from_metadata(read_lora(path).metadata)
    assert "folder" not in preset["dataset"]
    again = parse({**preset, "dataset": {**preset["dataset"], "folder": original.dataset.folder}})
    assert again == original.model_copy(update={"dataset": original.dataset.model_copy(update={"folder_repeats": {}})})


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        (None, "does not carry training settings"),
        ("{", "not JSON"),
        ("[]", "not a table"),
        ("x" * 70_000, "at most"),
        ('{"base": {"source": "a/b"}, "evil": 1}', "evil"),
        ('{"base": {"source": "a/b"}, "method": {"type": "lora", "rank": 0}}', "method.rank"),
        ("[" * 60_000, "not JSON"),
    ],
)
def test_settings_of_strange_files_are_refused(raw: str | None, message: str) -> None:
    with pytest.raises(LoraFileError) as caught:
        settings_from_metadata({} if raw is None else {"safelight.settings": raw})
    assert message in str(caught.value)


def test_places_in_the_settings_of_a_foreign_file_are_dropped() -> None:
    raw = {"base": {"source": "/etc/passwd"}, "dataset": {"folder": "/etc", "repeats": 2}}
    preset = settings_from_metadata({"safelight.settings": json.dumps(raw)})
    assert preset == {"base": {"source": "passwd"}, "dataset": {"repeats": 2}}


def test_hashes_are_those_that_other_programs_compute_from_the_file(tmp_path: Path) -> None:
    big = {"conv_in": random_lora_layer((640, 640), rank=512), "conv_out": random_lora_layer((8, 8))}
    path = write_lora(
        {"unet": big}, tmp_path / "a.safetensors", format="kohya", family="sd15", metadata=metadata_of(settings()),
        dtype=torch.float32,
    )  # fmt: skip
    with safe_open(str(path), framework="pt") as file:
        metadata = file.metadata()
    raw = path.read_bytes()
    tensor_bytes = raw[8 + struct.unpack("<Q", raw[:8])[0] :]
    assert metadata["sshs_model_hash"] == hashlib.sha256(tensor_bytes).hexdigest()
    assert metadata["modelspec.hash_sha256"] == "0x" + metadata["sshs_model_hash"]
    plain = save(load_file(path), {key: value for key, value in metadata.items() if key.startswith("ss_")})
    assert len(plain) > 0x110000
    assert metadata["sshs_legacy_hash"] == hashlib.sha256(plain[0x100000:0x110000]).hexdigest()[:8]


def test_the_diffusers_format_leaves_out_what_describes_a_kohya_network(tmp_path: Path) -> None:
    path = write_lora(
        {"unet": {"conv_in": random_lora_layer((8, 8))}}, tmp_path / "a.safetensors", format="diffusers", family="sd15",
        metadata={**metadata_of(settings()), "lora_adapter_metadata": "forged", "format": "tf"}, dtype=torch.float32,
    )  # fmt: skip
    metadata = read_lora(path).metadata
    assert "ss_network_alpha" not in metadata and "ss_steps" in metadata
    assert metadata["format"] == "pt" and metadata["lora_adapter_metadata"] != "forged"
