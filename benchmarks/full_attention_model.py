"""The baseline of `model_prefill.py`: transformers' Llama with torch's full attention."""

from typing import Any

import torch
from gpu_timing import random_tokens, seconds
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

DTYPE = torch.bfloat16


def baseline_part() -> list[dict[str, Any]]:
    """transformers' Llama: one forward that keeps its K/V, last logits only."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=576, intermediate_size=1536, num_hidden_layers=30, num_attention_heads=9,
        num_key_value_heads=3, vocab_size=49152, max_position_embeddings=2**21,
        tie_word_embeddings=True, attn_implementation="sdpa",
    )  # fmt: skip
    with torch.device("cuda"):
        model = LlamaForCausalLM(config).to(DTYPE).eval()
    rows = []
    for name, backend in (
        ("flash", SDPBackend.FLASH_ATTENTION),
        ("cudnn", SDPBackend.CUDNN_ATTENTION),
    ):
        for length in (2**13, 2**15, 2**17, 3 * 2**16, 2**18):
            tokens = random_tokens(length)[None]

            def run(t: Tensor = tokens) -> None:
                with torch.inference_mode():
                    model(input_ids=t, use_cache=True, logits_to_keep=1)

            try:
                with sdpa_kernel(backend):
                    run()
                    taken = seconds(run, 3 if length <= 2**17 else 1)
            except RuntimeError as problem:
                rows.append({"part": "baseline", "tokens": length, "problem": str(problem)[:200]})
                print(f"  {name} {length}: {str(problem)[:200]}")
                continue
            rows.append(
                {"part": "baseline", "kernel": name, "tokens": length, "seconds": taken,
                 "of": "transformers, whole model"}
            )  # fmt: skip
            print(f"  {name} {length:>8} tokens: {taken * 1e3:.1f} ms")
        rows.append(_one_layer_at_1m(name, backend))
        print(f"  {name} 1M tokens: {rows[-1]}")
    return rows


def _one_layer_at_1m(name: str, backend: SDPBackend) -> dict[str, Any]:
    """One layer's attention at 1M tokens, times 30: a lower bound of a full prefill."""
    q, k, v = (torch.randn(1, n, 2**20, 64, device="cuda", dtype=DTYPE) for n in (9, 3, 3))

    def run() -> None:
        torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)

    with sdpa_kernel(backend):
        taken = seconds(run, 1) * 30
    return {
        "part": "baseline", "kernel": name, "tokens": 2**20, "seconds": taken,
        "of": "attention of one layer times 30, extrapolated",
    }  # fmt: skip
