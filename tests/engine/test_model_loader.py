from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from batchgen.engine.model_loader import load_model
from batchgen.errors import ModelError
from tests.engine.families import small_model
from tests.tokenizers import byte_level, save

pytestmark = pytest.mark.usefixtures("own_cache")


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    small_model("llama").save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def edit(file: Path, **values: Any) -> None:
    contents = json.loads(file.read_text()) if file.exists() else {}
    file.write_text(json.dumps({**contents, **values}))


def test_the_weights_and_sizes_are_those_of_the_checkpoint(directory: Path) -> None:
    loaded = load_model(directory)
    stored = load_file(directory / "model.safetensors")
    assert torch.equal(loaded.model.model.layers[1].mlp.up_proj.weight, stored["model.layers.1.mlp.up_proj.weight"])
    assert (loaded.vocab_size, loaded.max_model_len, len(loaded.layers)) == (128, 2048, 2)
    assert loaded.attention_modules == [layer.self_attn for layer in loaded.model.model.layers]
    assert not loaded.model.training
    assert not any(parameter.requires_grad for parameter in loaded.model.parameters())


@pytest.mark.parametrize(
    ("stored", "asked", "expected"),
    [
        ("bfloat16", "auto", torch.bfloat16),
        ("float32", "auto", torch.float32),
        ("float32", "bfloat16", torch.bfloat16),
        ("bfloat16", torch.float32, torch.float32),
        (None, "auto", torch.float32),
    ],
)
def test_dtype_is_what_was_asked_or_what_the_checkpoint_says(
    directory: Path, stored: str | None, asked: str | torch.dtype, expected: torch.dtype
) -> None:
    edit(directory / "config.json", dtype=stored)
    loaded = load_model(directory, asked)
    assert loaded.dtype == expected
    assert {parameter.dtype for parameter in loaded.model.parameters()} == {expected}


def test_without_a_dtype_in_the_config_the_stored_one_counts(directory: Path) -> None:
    edit(directory / "config.json", dtype=None)
    file = directory / "model.safetensors"
    save_file({name: tensor.bfloat16() for name, tensor in load_file(file).items()}, file, {"format": "pt"})
    assert load_model(directory).dtype == torch.bfloat16


def test_eos_ids_are_the_union_of_all_who_name_them(directory: Path) -> None:
    edit(directory / "config.json", eos_token_id=7)
    edit(directory / "generation_config.json", eos_token_id=[9, 11], temperature=0.7)
    save(byte_level(), directory)
    loaded = load_model(directory)
    assert loaded.eos_token_ids == {7, 9, 11, 1}
    assert loaded.unused_settings == {"temperature": 0.7}


@pytest.mark.parametrize(
    "settings",
    [
        {"quant_method": "gptq", "bits": 4, "group_size": 128},
        {"quant_method": "awq", "bits": 4, "group_size": 128},
        {"quant_method": "fp8", "activation_scheme": "dynamic"},
    ],
    ids=lambda settings: settings["quant_method"],
)
def test_a_quantized_checkpoint_is_refused_by_its_method(directory: Path, settings: dict[str, Any]) -> None:
    edit(directory / "config.json", quantization_config=settings)
    with pytest.raises(ModelError, match=f"quantized by {settings['quant_method']}; use the unquantized one"):
        load_model(directory)


@pytest.mark.parametrize("name", ["quantize_config.json", "quant_config.json", "hf_quant_config.json"])
def test_a_quantized_checkpoint_of_an_older_tool_is_refused_too(directory: Path, name: str) -> None:
    (directory / name).write_text('{"bits": 4}')
    with pytest.raises(ModelError, match=f"quantized, as {name} says"):
        load_model(directory)


def test_missing_weights_are_refused_rather_than_invented(directory: Path) -> None:
    file = directory / "model.safetensors"
    weights = load_file(file)
    del weights["model.layers.1.self_attn.q_proj.weight"]
    save_file(weights, file, {"format": "pt"})
    with pytest.raises(ModelError, match=r"1 weights are missing .* model\.layers\.1\.self_attn\.q_proj\.weight"):
        load_model(directory)


def test_weights_of_another_shape_are_refused(directory: Path) -> None:
    file = directory / "model.safetensors"
    weights = load_file(file)
    weights["model.norm.weight"] = torch.ones(65)
    save_file(weights, file, {"format": "pt"})
    with pytest.raises(ModelError, match=r"model\.norm\.weight|weights of llama cannot be loaded"):
        load_model(directory)


def test_cut_weights_are_refused(directory: Path) -> None:
    file = directory / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(ModelError, match="the weights of llama cannot be loaded"):
        load_model(directory)


def test_an_unknown_architecture_is_refused_by_name(directory: Path) -> None:
    edit(directory / "config.json", model_type="hyperllama")
    with pytest.raises(ModelError, match=r"config\.json \(hyperllama\) cannot be read"):
        load_model(directory)


def test_code_of_the_models_own_is_not_run_unasked(directory: Path) -> None:
    edit(directory / "config.json", model_type="hyperllama", auto_map={"AutoConfig": "evil.Config"})
    (directory / "evil.py").write_text("raise SystemExit('it ran')")
    with pytest.raises(ModelError, match="hyperllama needs Python code from its own repository"):
        load_model(directory)


def test_a_broken_config_is_refused(directory: Path) -> None:
    (directory / "config.json").write_text("{")
    with pytest.raises(ModelError, match=r"config\.json: not JSON"):
        load_model(directory)


def test_a_refused_architecture_loads_no_weights(directory: Path) -> None:
    edit(directory / "config.json", model_type="mamba")
    (directory / "model.safetensors").write_bytes(b"not read")
    with pytest.raises(ModelError, match="mamba models cannot run here"):
        load_model(directory)


def test_quickstart_model_loads_with_its_own_settings(smollm2: Path) -> None:
    loaded = load_model(smollm2)
    assert (loaded.dtype, loaded.max_model_len, loaded.vocab_size) == (torch.bfloat16, 8192, 49152)
    assert loaded.eos_token_ids == {2}
    assert {layer[1:] for layer in loaded.layers} == {(9, 3, 64, 64, None)}


def test_loading_shows_no_bar_and_leaves_bars_as_they_were(directory: Path, capfd: pytest.CaptureFixture[str]) -> None:
    load_model(directory)
    assert "Loading weights" not in capfd.readouterr().err
    AutoModelForCausalLM.from_pretrained(directory)
    assert "Loading weights" in capfd.readouterr().err
