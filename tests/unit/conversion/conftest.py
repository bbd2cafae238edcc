"""A tiny model with a tokenizer, a corpus, and a conversion of it that takes a second."""

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from orthros_service.conversion.config import ConversionConfig

PARAGRAPH = "The keeper of the light wrote in the log every night, and the sea answered."


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory, tiny_tokenizer, write_tokenizer_dir) -> Path:
    import transformers

    directory = tmp_path_factory.mktemp("conversion") / "tiny"
    torch.manual_seed(3)
    config = transformers.LlamaConfig(
        vocab_size=tiny_tokenizer.get_vocab_size(),
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=64,
        max_position_embeddings=512,
        tie_word_embeddings=True,
        eos_token_id=tiny_tokenizer.token_to_id("<|im_end|>"),
        bos_token_id=None,
    )
    model = transformers.LlamaForCausalLM(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(std=0.2)
    model.save_pretrained(directory)
    return write_tokenizer_dir(directory, tiny_tokenizer)


@pytest.fixture(scope="session")
def corpus(tmp_path_factory) -> Path:
    """A folder `texts` of long texts and a file `questions.parquet`."""
    folder = tmp_path_factory.mktemp("corpus")
    (folder / "texts").mkdir()
    text = "\n\n".join(f"{number}. {PARAGRAPH}" for number in range(200))
    pq.write_table(
        pa.table({"text": [text, "secret " * 500], "licence": ["Public domain", "proprietary"]}),
        folder / "texts" / "a.parquet",
    )
    passage = "In the tower lived an owl. Its name was Strix. It slept all day."
    begin = passage.index("Strix")
    qas = [{"question": "What was the owl called?", "answers": ["Strix"],
            "evidence": [[begin, begin + 5]]}]  # fmt: skip
    pq.write_table(
        pa.table({"text": [passage], "licence": ["CC-BY-4.0"], "qas": [qas]}),
        folder / "questions.parquet",
    )
    return folder


@pytest.fixture
def make_config(tiny_model, corpus, tmp_path):
    def make(**groups) -> ConversionConfig:
        values = {
            "model": tiny_model,
            "output": tmp_path / "run",
            "data": {
                "texts": (corpus / "texts",),
                "questions": (corpus / "questions.parquet",),
                "min_document_tokens": 400,
                "max_document_tokens": 600,
                "needles": 2,
                "passages": 1,
                "continuation_tokens": 16,
            },
            "training": {
                "steps": 4,
                "row_tokens": 1536,
                "rank": 4,
                "checkpoint_every": 2,
                "learning_rate": 1e-2,
            },
            "attention": {"window": 128, "rope_theta": 5e4},
        }
        for name, group in groups.items():
            values[name] = {**values[name], **group} if isinstance(group, dict) else group
        return ConversionConfig.model_validate(values)

    return make
