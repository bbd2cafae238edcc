import json
from pathlib import Path
from typing import Any

import pytest

from orthros_service.errors import ModelError
from orthros_service.model.config import load_model_config

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 49152,
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "hidden_act": "silu",
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    "rope_theta": 100000,
    "tie_word_embeddings": True,
}
MISTRAL = {**LLAMA, "architectures": ["MistralForCausalLM"], "model_type": "mistral"}
QWEN2 = {**LLAMA, "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2"}
QWEN3 = {**LLAMA, "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "head_dim": 128}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 4096}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8,
    "low_freq_factor": 1,
    "high_freq_factor": 4,
    "original_max_position_embeddings": 2048,
}
ORTHROS = {"is_converted": True, "trained_context_tokens": 131072}


def write(directory: Path, config: Any, orthros: Any = None) -> Path:
    (directory / "config.json").write_text(json.dumps(config))
    if orthros is not None:
        (directory / "orthros.json").write_text(json.dumps(orthros))
    return directory


BAD_CONFIGS: list[tuple[dict[str, Any], str, str]] = [
    ({**LLAMA, "architectures": ["GPT2LMHeadModel"]}, "architectures", "LlamaForCausalLM"),
    ({**LLAMA, "architectures": ["MixtralForCausalLM"]}, "architectures", "MistralForCausalLM"),
    ({**LLAMA, "architectures": "LlamaForCausalLM"}, "architectures", "a list"),
    ({**LLAMA, "architectures": []}, "architectures", "a list"),
    ({**LLAMA, "architectures": [["x"]]}, "architectures", "a list"),
    ({**LLAMA, "model_type": "mixtral"}, "model_type", "'llama'"),
    ({**LLAMA, "hidden_act": "gelu"}, "hidden_act", "'silu'"),
    ({**LLAMA, "num_experts": 8}, "num_experts", "mixtures of experts"),
    ({**LLAMA, "num_local_experts": 8}, "num_local_experts", "mixtures of experts"),
    ({**LLAMA, "quantization_config": {"bits": 4}}, "quantization_config", "quantized"),
    ({**LLAMA, "no_rope_layers": [1, 0]}, "no_rope_layers", "rotary"),
    ({**LLAMA, "partial_rotary_factor": 0.5}, "partial_rotary_factor", "whole head"),
    ({**LLAMA, "num_key_value_heads": 4}, "num_key_value_heads", "divisor of the 9"),
    ({**LLAMA, "num_key_value_heads": 0}, "num_key_value_heads", "from 1"),
    ({**LLAMA, "num_attention_heads": 7, "num_key_value_heads": 7}, "hidden_size", "multiple"),
    ({**LLAMA, "head_dim": 63}, "head size is 63", "even"),
    ({**LLAMA, "vocab_size": "49152"}, "vocab_size", "whole number"),
    ({**LLAMA, "vocab_size": 49152.5}, "vocab_size", "whole number"),
    ({**LLAMA, "num_hidden_layers": True}, "num_hidden_layers", "whole number"),
    ({**LLAMA, "num_hidden_layers": -3}, "num_hidden_layers", "whole number"),
    ({**LLAMA, "rms_norm_eps": 0}, "rms_norm_eps", "finite number"),
    ({**LLAMA, "rms_norm_eps": float("nan")}, "rms_norm_eps", "finite number"),
    ({**LLAMA, "rope_theta": float("inf")}, "rope_theta", "finite number"),
    ({**LLAMA, "rope_theta": -1}, "rope_theta", "finite number"),
    ({**LLAMA, "tie_word_embeddings": 1}, "tie_word_embeddings", "true or false"),
    ({**LLAMA, "layer_types": ["chunked_attention"]}, "layer_types", "full_attention"),
    ({**MISTRAL, "attention_bias": True}, "attention_bias", "false for Mistral"),
    ({**QWEN3, "mlp_bias": True}, "mlp_bias", "false for Qwen3"),
    ({**MISTRAL, "sliding_window": "on"}, "sliding_window", "whole number"),
    ({**LLAMA, "rope_scaling": "yarn"}, "rope_scaling", "an object"),
    ({**LLAMA, "rope_scaling": {"type": "dynamic", "factor": 2.0}}, "dynamic", "'linear'"),
    ({**LLAMA, "rope_scaling": {"type": ["yarn"]}}, "type", "'linear'"),
    ({**LLAMA, "rope_scaling": {"type": "linear"}}, "factor", "missing"),
    ({**LLAMA, "rope_scaling": {"type": "linear", "factor": 0.5}}, "factor", "at least 1"),
    ({**LLAMA, "rope_scaling": {**YARN, "low_freq_factor": 1}}, "low_freq_factor", "beta_fast"),
    ({**LLAMA, "rope_scaling": {**YARN, "beta_fast": 1}}, "beta_fast", "above beta_slow"),
    ({**LLAMA, "rope_scaling": {**LLAMA3, "high_freq_factor": 1}}, "high_freq_factor", "above"),
    ({**LLAMA, "rope_scaling": YARN, "rope_parameters": YARN}, "rope_parameters", "allowed is one"),
    ({**LLAMA, "rope_parameters": {"full_attention": YARN}}, "full_attention", "allowed"),
    (
        {**LLAMA, "rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.25}},
        "partial_rotary_factor",
        "whole head",
    ),
]


@pytest.mark.parametrize(("config", "field", "allowed"), BAD_CONFIGS)
def test_a_bad_config_is_refused_by_file_field_and_what_is_allowed(
    config: dict[str, Any], field: str, allowed: str, tmp_path: Path
) -> None:
    with pytest.raises(ModelError) as caught:
        load_model_config(write(tmp_path, config))
    message = caught.value.message
    assert "config.json" in message
    assert field in message
    assert allowed in message


REQUIRED = ["architectures", "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers"]
REQUIRED += ["num_attention_heads", "hidden_act", "max_position_embeddings", "rms_norm_eps"]


@pytest.mark.parametrize("name", REQUIRED)
@pytest.mark.parametrize("is_null", [False, True])
def test_a_missing_required_member_is_named(name: str, is_null: bool, tmp_path: Path) -> None:
    config = {key: value for key, value in LLAMA.items() if key != name}
    if is_null:
        config[name] = None
    with pytest.raises(ModelError, match=f"required member '{name}' is missing"):
        load_model_config(write(tmp_path, config))


BAD_ORTHROS: list[tuple[dict[str, Any], str]] = [
    ({"window": 500}, "multiple of 'tile', 128"),
    ({"window": 0}, "'window' is 0"),
    ({"tile": 0}, "'tile' is 0"),
    ({"num_sinks": -1}, "'num_sinks' is -1"),
    ({"num_sinks": 129}, "at most 'tile'"),
    ({"is_converted": True}, "'trained_context_tokens' is missing"),
    ({**ORTHROS, "max_context_tokens": 4096}, "at least trained_context_tokens"),
    ({"full_prefill_max_tokens": 2**30}, "at most max_context_tokens"),
    ({"decode_temperature": [[0.0] * 9] * 29}, "30 lists of 9 finite numbers"),
    ({"decode_temperature": [[0.0] * 8] * 30}, "30 lists of 9 finite numbers"),
    ({"decode_temperature": [[float("nan")] * 9] * 30}, "30 lists of 9 finite numbers"),
    ({"decode_temperature": 0.1}, "30 lists of 9 finite numbers"),
    ({"decode_temperature": [0.1] * 30}, "30 lists of 9 finite numbers"),
    ({"evidence_layers": []}, "at least one layer from 0 to 29"),
    ({"evidence_layers": [30]}, "at least one layer from 0 to 29"),
    ({"evidence_layers": [5, 4]}, "ascending"),
    ({"evidence_layers": [True]}, "at least one layer from 0 to 29"),
    ({"windows": 512}, "unknown members ['windows']"),
]


@pytest.mark.parametrize(("orthros", "problem"), BAD_ORTHROS)
def test_a_bad_orthros_json_is_refused(
    orthros: dict[str, Any], problem: str, tmp_path: Path
) -> None:
    with pytest.raises(ModelError) as caught:
        load_model_config(write(tmp_path, LLAMA, orthros))
    assert "orthros.json" in caught.value.message
    assert problem in caught.value.message


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (b"", "not valid JSON"),
        (b"{", "not valid JSON"),
        (b"\xff\xfe{}", "not valid JSON"),
        (b"[]", "an object is needed"),
        (b"[" * 100_000, "not valid JSON"),
    ],
)
def test_a_config_that_is_no_json_object_is_refused(
    content: bytes, problem: str, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(ModelError, match=problem):
        load_model_config(tmp_path)


def test_missing_files_and_directories_are_named(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="orthros models prepare"):
        load_model_config(tmp_path / "absent")
    with pytest.raises(ModelError, match=r"config\.json does not exist"):
        load_model_config(tmp_path)
    (tmp_path / "config.json").mkdir()
    with pytest.raises(ModelError, match="cannot be read"):
        load_model_config(tmp_path)
