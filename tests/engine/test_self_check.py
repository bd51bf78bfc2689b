from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from batchgen.engine import self_check
from batchgen.engine.layers import layer_specs
from batchgen.engine.probe import attention_calls
from batchgen.engine.self_check import check_architecture, compare, difference
from batchgen.errors import ModelError
from tests.engine.families import ACCEPTED, config_of, small_config, small_model

pytestmark = pytest.mark.usefixtures("own_cache")


@pytest.mark.parametrize("family", ACCEPTED)
def test_family_is_accepted(family: str) -> None:
    check_architecture(config_of(family))


WINDOWED: dict[str, dict[str, Any]] = {
    "phimoe": {"sliding_window": 64},
    "qwen2_moe": {"use_sliding_window": True, "max_window_layers": 3},
    "qwen2": {"use_sliding_window": True, "max_window_layers": 3},
    "mixtral": {"sliding_window": 64},
    "starcoder2": {"sliding_window": 64},
    "phi3": {"sliding_window": 64},
}


@pytest.mark.parametrize("family", WINDOWED)
def test_a_window_is_kept_also_where_it_exists_only_in_the_mask(family: str) -> None:
    model = small_model(family, **WINDOWED[family])
    layers = layer_specs(attention_calls(model, "eager"), model.config)
    assert 8 in {layer.window for layer in layers}
    assert compare(model, model.config) is None


@pytest.mark.parametrize("family", ["mistral", "gemma3_text", "phimoe"])
def test_a_lost_window_is_noticed(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: without windows the check must fail."""
    monkeypatch.setattr(
        self_check, "layer_specs", lambda *given: [spec._replace(window=None) for spec in layer_specs(*given)]
    )
    config = config_of(family, **WINDOWED.get(family, {}))
    assert "token 8 in a text of 37 differ" in str(difference(config))


def test_a_window_of_another_width_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        self_check, "layer_specs", lambda *given: [spec._replace(window=7) for spec in layer_specs(*given)]
    )
    assert "token 7 in a text of 37 differ" in str(difference(config_of("mistral")))


@pytest.mark.parametrize(("family", "settings"), [("gemma4_text", {"num_kv_shared_layers": 12}), ("gemma3n_text", {})])
def test_layers_that_share_keys_and_values_are_right(family: str, settings: dict[str, Any]) -> None:
    assert small_config(family, **settings).num_kv_shared_layers > 0
    assert difference(config_of(family, **settings)) is None


def test_rope_by_batch_is_frozen_for_the_check() -> None:
    rope = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}
    assert difference(config_of("llama", rope_parameters=rope, max_position_embeddings=64)) is None


def test_the_verdict_is_kept_by_config(own_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    monkeypatch.setattr(self_check, "difference", lambda config: asked.append(config.hidden_size))
    check_architecture(config_of("llama"))
    check_architecture(config_of("llama"))
    assert asked == [4096]
    check_architecture(config_of("llama", hidden_size=2048))
    assert asked == [4096, 2048]
    monkeypatch.setattr(self_check, "CHECK", "self_check-99")
    check_architecture(config_of("llama"))
    assert asked == [4096, 2048, 4096]
    assert len(list((own_cache / "verdicts").iterdir())) == 3


def test_a_refusal_is_kept_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(self_check, "difference", lambda config: "it is wrong")
    with pytest.raises(ModelError, match="llama models cannot run here: it is wrong"):
        check_architecture(config_of("llama"))
    monkeypatch.setattr(self_check, "difference", pytest.fail)
    with pytest.raises(ModelError, match="llama models cannot run here: it is wrong"):
        check_architecture(config_of("llama"))


def test_a_damaged_verdict_is_made_anew(own_cache: Path) -> None:
    check_architecture(config_of("llama"))
    (note,) = (own_cache / "verdicts").iterdir()
    note.write_text("{")
    check_architecture(config_of("llama"))
    assert note.read_text() == '""'


def test_without_a_cache_every_load_checks(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    check_architecture(config_of("llama"))
