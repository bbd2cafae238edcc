import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from orthros_service.errors import ModelError
from orthros_service.model.config import RopeScaling, load_model_config

REPOSITORY = Path(__file__).resolve().parents[3]

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


def test_a_llama_config_is_read(tmp_path: Path) -> None:
    config, orthros = load_model_config(write(tmp_path, LLAMA))
    assert (config.num_layers, config.num_q_heads, config.num_kv_heads) == (30, 9, 3)
    assert config.head_dim == 64
    assert config.rope_theta == 100000.0
    assert config.rope_scaling is None
    assert config.has_tied_embeddings
    assert not any((config.has_qkv_bias, config.has_o_bias, config.has_mlp_bias))
    assert not config.has_qk_norm
    assert (orthros.window, orthros.num_sinks, orthros.tile) == (512, 4, 128)


def test_without_orthros_json_a_model_is_unconverted_and_full_up_to_its_context(
    tmp_path: Path,
) -> None:
    _, orthros = load_model_config(write(tmp_path, LLAMA))
    assert not orthros.is_converted
    assert orthros.trained_context_tokens == orthros.full_prefill_max_tokens == 8192
    assert orthros.max_context_tokens == 2**21
    assert orthros.decode_temperature is None
    assert orthros.evidence_layers == (18, 19, 20)


@pytest.mark.parametrize(
    ("num_layers", "layers"), [(1, (0,)), (2, (0, 1)), (3, (0, 1, 2)), (4, (1, 2, 3))]
)
def test_evidence_layers_of_shallow_models_exist(
    num_layers: int, layers: tuple[int, ...], tmp_path: Path
) -> None:
    write(tmp_path, {**LLAMA, "num_hidden_layers": num_layers})
    assert load_model_config(tmp_path)[1].evidence_layers == layers


@pytest.mark.parametrize(
    ("config", "context"),
    [
        ({**LLAMA, "rope_scaling": YARN}, 4096),
        ({**LLAMA, "rope_scaling": LLAMA3}, 2048),
        ({**LLAMA, "rope_scaling": {"type": "linear", "factor": 2}}, 8192),
        ({**MISTRAL, "sliding_window": 1024}, 1024),
        ({**MISTRAL, "sliding_window": None}, 8192),
        (MISTRAL, 4096),
        ({**QWEN2, "sliding_window": 1024, "use_sliding_window": False}, 8192),
        ({**QWEN2, "sliding_window": 1024, "use_sliding_window": True}, 1024),
        ({**LLAMA, "sliding_window": 1024}, 8192),
    ],
)
def test_the_full_prefill_limit_is_the_original_context(
    config: dict[str, Any], context: int, tmp_path: Path
) -> None:
    _, orthros = load_model_config(write(tmp_path, config))
    assert orthros.trained_context_tokens == orthros.full_prefill_max_tokens == context


def test_old_and_new_forms_of_rope_settings_mean_the_same(tmp_path: Path) -> None:
    old = load_model_config(write(tmp_path, {**LLAMA, "rope_scaling": YARN}))
    new_form = {**LLAMA, "rope_parameters": {**YARN, "rope_theta": 100000.0}}
    new_form.pop("rope_theta")
    assert load_model_config(write(tmp_path, new_form)) == old
    renamed = {**YARN, "type": "yarn"}
    renamed.pop("rope_type")
    assert load_model_config(write(tmp_path, {**LLAMA, "rope_scaling": renamed})) == old


def test_rope_parameters_of_the_default_type_are_no_scaling(tmp_path: Path) -> None:
    parameters = {"rope_type": "default", "rope_theta": 5e5}
    config, _ = load_model_config(write(tmp_path, {**LLAMA, "rope_parameters": parameters}))
    assert config.rope_scaling is None
    assert config.rope_theta == 5e5


def test_yarn_options_are_read(tmp_path: Path) -> None:
    yarn = {**YARN, "attention_factor": 1.2, "beta_fast": 16, "beta_slow": 2, "truncate": False}
    config, _ = load_model_config(write(tmp_path, {**LLAMA, "rope_scaling": yarn}))
    assert config.rope_scaling == RopeScaling(
        kind="yarn",
        factor=4.0,
        original_max_position_embeddings=4096,
        attention_factor=1.2,
        beta_fast=16.0,
        beta_slow=2.0,
        is_truncated=False,
    )


def test_architectures_decide_biases_and_norms(tmp_path: Path) -> None:
    qwen2, _ = load_model_config(write(tmp_path, QWEN2))
    assert (qwen2.has_qkv_bias, qwen2.has_o_bias, qwen2.has_qk_norm) == (True, False, False)
    qwen3, _ = load_model_config(write(tmp_path, QWEN3))
    assert (qwen3.has_qkv_bias, qwen3.has_o_bias, qwen3.has_qk_norm) == (False, False, True)
    assert qwen3.head_dim == 128
    llama, _ = load_model_config(write(tmp_path, {**LLAMA, "attention_bias": True}))
    assert (llama.has_qkv_bias, llama.has_o_bias) == (True, True)


def test_orthros_json_overrides_the_defaults(tmp_path: Path) -> None:
    temperature = [[0.01 * layer] * 9 for layer in range(30)]
    settings = {
        **ORTHROS,
        "window": 1024,
        "num_sinks": 64,
        "decode_temperature": temperature,
        "evidence_layers": [3, 17],
        "licence": "apache-2.0",
    }
    _, orthros = load_model_config(write(tmp_path, LLAMA, settings))
    assert orthros.is_converted
    assert (orthros.window, orthros.num_sinks) == (1024, 64)
    assert orthros.trained_context_tokens == 131072
    assert orthros.full_prefill_max_tokens == 2048
    assert orthros.decode_temperature is not None
    assert orthros.decode_temperature[29] == (0.29,) * 9
    assert orthros.evidence_layers == (3, 17)


def test_integers_are_accepted_where_fractions_are_meant(tmp_path: Path) -> None:
    config, _ = load_model_config(write(tmp_path, {**LLAMA, "rope_theta": 10000}))
    same, _ = load_model_config(write(tmp_path, {**LLAMA, "rope_theta": 10000.0}))
    assert config == same == replace(config, rope_theta=10000.0)


def test_kv_heads_may_be_left_out_for_llama_only(tmp_path: Path) -> None:
    llama = {**LLAMA, "num_key_value_heads": None}
    assert load_model_config(write(tmp_path, llama))[0].num_kv_heads == 9
    with pytest.raises(ModelError, match="num_key_value_heads"):
        load_model_config(write(tmp_path, {**QWEN2, "num_key_value_heads": None}))


def test_reading_configs_and_headers_never_loads_torch() -> None:
    code = (
        "import sys; sys.path.insert(0, sys.argv[1])\n"
        "import orthros_service.model.config, orthros_service.model.registry\n"
        "import orthros_service.model.digest\n"
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-P", "-c", code, str(REPOSITORY)], check=True)
