"""What int8 decode weights cost in quality: next-token loss and agreement with fp32 on real text.

.venv/bin/python benchmarks/int8_weights.py
"""

import json
from pathlib import Path

import numpy as np
import torch
from machine import describe_machine
from rich.console import Console
from rich.table import Table
from torch import Tensor

from orthros_service.model import int8_linear
from orthros_service.model.loading import load_model
from orthros_service.model.transformer import full_logits
from orthros_service.tokenization import Tokenizer

ROOT = Path(__file__).parents[1]
MODEL = ROOT / "models" / "smollm2-135m-instruct"
STORY = ROOT / "deployments" / "orthros_deployments" / "demo" / "a_scandal_in_bohemia.txt"
RESULT = Path(__file__).parent / "results" / "int8_weights.json"
NUM_TOKENS = 2000


def logits(token_ids: Tensor, dtype: str, *, is_int8: bool) -> Tensor:
    """Full-attention logits of the text; int8 is used for every row, however many there are."""
    model = load_model(MODEL, device="cpu", dtype=dtype).model
    if is_int8:
        int8_linear.MAX_ROWS = NUM_TOKENS
        int8_linear.quantize_for_decode(model)
    return full_logits(model, token_ids)


def main() -> None:
    """Measure, print a table, write the result."""
    text = STORY.read_text(encoding="utf-8")
    encoded = Tokenizer.from_directory(MODEL).encode_text(text).token_ids[:NUM_TOKENS]
    token_ids = torch.from_numpy(encoded.astype(np.int64))
    reference = logits(token_ids, "float32", is_int8=False)
    rows = {}
    for name, dtype, is_int8 in (
        ("fp32", "float32", False),
        ("bf16", "bfloat16", False),
        ("bf16 with int8 weights", "bfloat16", True),
    ):
        values = logits(token_ids, dtype, is_int8=is_int8)
        rows[name] = {
            "loss": torch.nn.functional.cross_entropy(values[:-1], token_ids[1:]).item(),
            "top1_agreement_ratio": (values.argmax(-1) == reference.argmax(-1))
            .float()
            .mean()
            .item(),
            "kl_to_fp32": torch.nn.functional.kl_div(
                values.log_softmax(-1),
                reference.log_softmax(-1),
                log_target=True,
                reduction="batchmean",
            ).item(),
        }
    result = {
        "what": f"smollm2-135m-instruct, {NUM_TOKENS} tokens of the demo's story, full attention",
        "command": "python benchmarks/int8_weights.py",
        "machine": describe_machine("torch", "orthros-service"),
        "rows": rows,
    }
    RESULT.write_text(json.dumps(result, indent=2) + "\n")
    table = Table("weights", "loss", "top-1 as fp32", "KL to fp32", title="int8 decode weights")
    for name, row in rows.items():
        table.add_row(
            name,
            f"{row['loss']:.4f}",
            f"{row['top1_agreement_ratio']:.1%}",
            f"{row['kl_to_fp32']:.4f}",
        )
    Console().print(table)


if __name__ == "__main__":
    main()
