"""Rows of a conversion: what is in them, what is learned, and what may not be in them."""

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from orthros_service.conversion.config import load_config
from orthros_service.conversion.corpus import Corpus
from orthros_service.conversion.examples import ExampleSource
from orthros_service.errors import InvalidValueError
from orthros_service.tokenization import Tokenizer

CONFIG = """
model = "{model}"
output = "{output}"
[data]
texts = ["{texts}"]
passages = 0
"""


@pytest.fixture
def source(make_config, tiny_model):
    return ExampleSource(make_config(), Tokenizer.from_directory(tiny_model))


def test_a_row_is_the_same_for_the_same_number_and_another_for_another(
    source, make_config, tiny_model
):
    again = ExampleSource(make_config(), Tokenizer.from_directory(tiny_model))
    assert np.array_equal(source.row(3).tokens, again.row(3).tokens)
    assert np.array_equal(source.row(3).weights, again.row(3).weights)
    assert not np.array_equal(source.row(3).tokens, source.row(4).tokens)


def test_what_is_asked_stands_in_the_document_and_the_answer_ends_the_turn(source, tiny_model):
    tokenizer = Tokenizer.from_directory(tiny_model)
    num_questions = 0
    for number in range(8):
        row = source.row(number)
        for span in row.spans:
            document = tokenizer.decode(row.tokens[span.start : span.end].tolist())
            for begin, count in span.segments[:-1]:
                ids = row.tokens[begin : begin + count].tolist()
                assert ids[-1] in tokenizer.stop_ids
                text = tokenizer.decode(ids, skip_special_tokens=False)
                answer = text.split("assistant\n")[1].removesuffix("<|im_end|>")
                value = answer.removesuffix(".").split()[-1]
                assert value in document or "like" in text or "meet" in text
                assert "secret secret" not in document
                num_questions += 1
    assert num_questions > 8


def test_answers_continuations_and_a_share_of_the_document_are_learned(source):
    row = source.row(0)
    assert row.weights.sum() == pytest.approx(1, abs=1e-5)
    assert len(np.unique(row.learned)) == len(row.learned)
    (begin, count), *_ = row.spans[0].segments
    assert begin + count - 2 in row.learned
    assert begin not in row.learned
    inside = [n for n in row.learned if row.spans[0].start <= n < row.spans[0].end - 1]
    assert 0.05 < len(inside) / row.spans[0].num_tokens < 0.2


def test_only_rows_with_an_allowed_licence_are_used(corpus, caplog):
    texts = Corpus((corpus / "texts",), licences=("public domain",))
    assert len(texts) == 1
    assert "1 rows with the licence 'proprietary' are left out" in caplog.text
    with pytest.raises(InvalidValueError, match="No training row"):
        Corpus((corpus / "texts",), licences=("mit",))


def test_data_that_cannot_be_used_is_named(corpus, tmp_path):
    with pytest.raises(InvalidValueError, match="no Parquet file"):
        Corpus((tmp_path / "nothing",), licences=("mit",))
    with pytest.raises(InvalidValueError, match="lacks the column"):
        Corpus((corpus / "texts",), licences=("mit",), columns=("qas",))
    broken = tmp_path / "broken.parquet"
    broken.write_bytes(b"PAR1 nothing")
    with pytest.raises(InvalidValueError, match="cannot be read as Parquet"):
        Corpus((broken,), licences=("mit",))
    pq.write_table(pa.table({"text": ["x"]}), tmp_path / "bare.parquet")
    with pytest.raises(InvalidValueError, match="licence"):
        Corpus((tmp_path / "bare.parquet",), licences=("mit",))


def test_rows_that_are_too_short_for_a_document_are_refused(make_config, tiny_model):
    config = make_config(data={"min_document_tokens": 1400, "max_document_tokens": 1400})
    with pytest.raises(InvalidValueError, match=r"training\.row_tokens"):
        ExampleSource(config, Tokenizer.from_directory(tiny_model))


@pytest.mark.parametrize(
    ("extra", "said"),
    [
        ("needle = 3", r"data\.needle: Extra"),
        ("passages = 2", "passages need data.questions"),
        ("min_document_tokens = 999999", "above max_document_tokens"),
        ("[attention]\nwindow = 100", "multiples of 128"),
        ("[training]\nsteps = 0", r"training\.steps"),
        ("[training", "TOML"),
    ],
)
def test_a_file_that_is_wrong_is_refused_with_the_place(extra, said, tmp_path):
    path = tmp_path / "conversion.toml"
    lines = CONFIG.format(model="m", output="o", texts="t")
    if "passages = 2" in extra:
        lines = lines.replace("passages = 0\n", "")
    path.write_text(lines + extra + "\n")
    with pytest.raises(InvalidValueError, match=said):
        load_config(path)


def test_options_win_over_the_file(tmp_path):
    path = tmp_path / "conversion.toml"
    path.write_text(CONFIG.format(model="m", output="o", texts="t"))
    config = load_config(path, output=tmp_path, device=None)
    assert (config.output, str(config.model), config.device) == (tmp_path, "m", "auto")
