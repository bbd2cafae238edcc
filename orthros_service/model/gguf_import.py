"""Turn a llama-type GGUF file with a SmolLM tokenizer into a Hugging Face model directory.

GGUF stores everything in one file and may quantize the matrices. Here they become bfloat16 again,
so what comes out is the model *as dequantized*, not its original weights.
"""

import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from gguf import GGUFReader, ReaderTensor, dequantize
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from orthros_service.errors import ModelError
from orthros_service.model.writing import write_json, write_weights

logger = logging.getLogger(__name__)

CONTROL_TOKEN = 3
"""GGUF's token type of control tokens such as <|im_start|>."""

LAYER_NAMES = {
    "attn_norm.weight": "input_layernorm.weight",
    "attn_q.weight": "self_attn.q_proj.weight",
    "attn_k.weight": "self_attn.k_proj.weight",
    "attn_v.weight": "self_attn.v_proj.weight",
    "attn_output.weight": "self_attn.o_proj.weight",
    "ffn_norm.weight": "post_attention_layernorm.weight",
    "ffn_gate.weight": "mlp.gate_proj.weight",
    "ffn_up.weight": "mlp.up_proj.weight",
    "ffn_down.weight": "mlp.down_proj.weight",
}
TOP_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class GgufModel:
    """What a GGUF file says, in Hugging Face terms.

    Args:
        config: Members of config.json.
        weights: Tensors by their Hugging Face names, bfloat16 on the CPU.
        tokenizer: Byte-level BPE with the control tokens as special tokens.
        chat_template: Jinja text.
        control_tokens: Control tokens by name.
        licence: SPDX-like name of the weights' licence.
        quantization: Names of the formats that the matrices were dequantized from, such as "Q4_1".
    """

    config: dict[str, Any]
    weights: dict[str, torch.Tensor]
    tokenizer: Tokenizer
    chat_template: str
    control_tokens: dict[str, int]
    licence: str
    quantization: tuple[str, ...]


def read_gguf(path: Path) -> GgufModel:
    """Read and dequantize a GGUF file.

    Raises:
        ModelError: The file cannot be read, lacks a field, or is not a llama model with a SmolLM
            tokenizer.
    """
    try:
        reader = GGUFReader(path)
    except (OSError, ValueError, IndexError) as error:
        raise ModelError(f"{path} cannot be read as a GGUF file: {error}") from error
    _require(reader, "general.architecture", "llama")
    _require(reader, "tokenizer.ggml.model", "gpt2")
    _require(reader, "tokenizer.ggml.pre", "smollm")
    config = _config(reader)
    formats = {tensor.tensor_type.name for tensor in reader.tensors} - {"F32", "F16", "BF16"}
    return GgufModel(
        config=config,
        weights=_weights(reader, config),
        tokenizer=_tokenizer(reader),
        chat_template=str(_field(reader, "tokenizer.chat_template")),
        control_tokens=_control_tokens(reader),
        licence=str(_field(reader, "general.license")),
        quantization=tuple(sorted(formats)),
    )


def write_directory(model: GgufModel, directory: Path) -> None:
    """Write config, weights, tokenizer and generation settings into an existing folder.

    Raises:
        ModelError: The weights cannot be written.
    """
    stops = [model.config["eos_token_id"]]
    end_of_text = model.control_tokens.get("<|endoftext|>")
    if end_of_text is not None and end_of_text not in stops:
        stops.append(end_of_text)
    ids = {key: model.config[key] for key in ("bos_token_id", "pad_token_id")}
    write_json(directory / "config.json", model.config)
    write_json(directory / "generation_config.json", {**ids, "eos_token_id": stops})
    write_json(directory / "tokenizer_config.json", _tokenizer_config(model))
    model.tokenizer.save(str(directory / "tokenizer.json"))
    write_weights(directory, model.weights)


def _field(reader: GGUFReader, name: str) -> Any:
    field = reader.get_field(name)
    if field is None:
        raise ModelError(f"The GGUF file lacks the field {name!r}.")
    return field.contents()


def _require(reader: GGUFReader, name: str, allowed: str) -> None:
    value = _field(reader, name)
    if value != allowed:
        raise ModelError(f"The GGUF field {name!r} is {value!r}; only {allowed!r} can be imported.")


def _config(reader: GGUFReader) -> dict[str, Any]:
    num_heads = int(_field(reader, "llama.attention.head_count"))
    hidden_size = int(_field(reader, "llama.embedding_length"))
    head_dim = int(_field(reader, "llama.rope.dimension_count"))
    if head_dim * num_heads != hidden_size:
        raise ModelError(
            f"The GGUF file has {num_heads} heads of {head_dim} for an embedding of {hidden_size}; "
            "only rotary embeddings over the whole head can be imported."
        )
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": int(_field(reader, "llama.vocab_size")),
        "hidden_size": hidden_size,
        "intermediate_size": int(_field(reader, "llama.feed_forward_length")),
        "num_hidden_layers": int(_field(reader, "llama.block_count")),
        "num_attention_heads": num_heads,
        "num_key_value_heads": int(_field(reader, "llama.attention.head_count_kv")),
        "head_dim": head_dim,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "max_position_embeddings": int(_field(reader, "llama.context_length")),
        "rms_norm_eps": _shortest_decimal(_field(reader, "llama.attention.layer_norm_rms_epsilon")),
        "rope_theta": _shortest_decimal(_field(reader, "llama.rope.freq_base")),
        "tie_word_embeddings": all(tensor.name != "output.weight" for tensor in reader.tensors),
        "bos_token_id": int(_field(reader, "tokenizer.ggml.bos_token_id")),
        "eos_token_id": int(_field(reader, "tokenizer.ggml.eos_token_id")),
        "pad_token_id": int(_field(reader, "tokenizer.ggml.padding_token_id")),
        "torch_dtype": "bfloat16",
    }


def _shortest_decimal(value: float) -> float:
    """The decimal that was meant: GGUF keeps 1e-5 as the nearest fp32, 9.99999974e-06."""
    return float(str(np.float32(value)))


def _weights(reader: GGUFReader, config: dict[str, Any]) -> dict[str, torch.Tensor]:
    num_heads = {
        "attn_q.weight": int(config["num_attention_heads"]),
        "attn_k.weight": int(config["num_key_value_heads"]),
    }
    weights = {}
    for tensor in reader.tensors:
        values = dequantize(tensor.data, tensor.tensor_type)
        suffix = tensor.name.split(".", 2)[-1]
        if tensor.name.startswith("blk.") and suffix in num_heads:
            values = _unpermute(values, num_heads[suffix])
        array = np.array(values, dtype=np.float32)
        weights[_hugging_face_name(tensor)] = torch.from_numpy(array).to(torch.bfloat16)
    return weights


def _hugging_face_name(tensor: ReaderTensor) -> str:
    if tensor.name in TOP_NAMES:
        return TOP_NAMES[tensor.name]
    prefix, _, rest = tensor.name.partition(".")
    layer, _, suffix = rest.partition(".")
    if prefix != "blk" or not layer.isdigit() or suffix not in LAYER_NAMES:
        raise ModelError(
            f"The GGUF file holds an unknown tensor {tensor.name!r}; it is no plain llama model."
        )
    return f"model.layers.{layer}.{LAYER_NAMES[suffix]}"


def _unpermute(rows: npt.NDArray[np.float32], num_heads: int) -> npt.NDArray[np.float32]:
    """Reorder a query or key projection from interleaved rotary pairs to half-split ones.

    GGUF's llama rotates rows (2i, 2i+1) of a head together; Hugging Face rotates (i, i + D/2).
    """
    num_rows, width = rows.shape
    pairs = rows.reshape(num_heads, num_rows // num_heads // 2, 2, width)
    return pairs.swapaxes(1, 2).reshape(num_rows, width)


def _control_tokens(reader: GGUFReader) -> dict[str, int]:
    tokens: list[str] = _field(reader, "tokenizer.ggml.tokens")
    types: list[int] = _field(reader, "tokenizer.ggml.token_type")
    return {tokens[i]: i for i, kind in enumerate(types) if kind == CONTROL_TOKEN}


def _tokenizer(reader: GGUFReader) -> Tokenizer:
    tokens: list[str] = _field(reader, "tokenizer.ggml.tokens")
    merges: list[str] = _field(reader, "tokenizer.ggml.merges")
    pairs = []
    for merge in merges:
        left, _, right = merge.partition(" ")
        pairs.append((left, right))
    vocabulary = {token: index for index, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=pairs))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    specials = [
        AddedToken(name, special=True, normalized=False) for name in _control_tokens(reader)
    ]
    tokenizer.add_special_tokens(specials)
    return tokenizer


def _tokenizer_config(model: GgufModel) -> dict[str, Any]:
    names = {index: name for name, index in model.control_tokens.items()}
    roles = {
        key: names[model.config[f"{key}_id"]] for key in ("bos_token", "eos_token", "pad_token")
    }
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        **roles,
        "additional_special_tokens": [n for n in model.control_tokens if n not in roles.values()],
        "add_prefix_space": False,
        "clean_up_tokenization_spaces": False,
        "model_max_length": model.config["max_position_embeddings"],
        "chat_template": model.chat_template,
    }
