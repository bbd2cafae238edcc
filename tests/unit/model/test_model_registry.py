import logging
import shutil
from pathlib import Path
from typing import Any

import pytest

from orthros_service.errors import ModelError
from orthros_service.model.loading import load_model
from orthros_service.model.registry import describe_model, list_models


@pytest.mark.parametrize("is_tied", [True, False])
def test_parameters_are_counted_without_loading_them(is_tied: bool, write_model: Any) -> None:
    directory = write_model(tie_word_embeddings=is_tied)
    summary = describe_model(directory)
    loaded = load_model(directory, device="cpu", dtype="float32")
    assert summary.num_parameters == loaded.num_parameters
    assert summary.weight_bytes == 4 * loaded.num_parameters
    assert (summary.name, summary.path) == ("tiny", directory)
    assert (summary.architecture, summary.dtype) == ("LlamaForCausalLM", "float32")
    assert not summary.is_converted
    assert summary.trained_context_tokens == summary.full_prefill_max_tokens == 512
    assert summary.licence is None


def test_orthros_json_names_model_licence_and_contexts(write_model: Any, edit_json: Any) -> None:
    directory = write_model()
    edit_json(
        directory / "orthros.json",
        name="small-one",
        licence="cc-by-4.0",
        weights_note="a note",
        is_converted=True,
        trained_context_tokens=4096,
        max_context_tokens=8192,
    )
    summary = describe_model(directory)
    assert (summary.name, summary.licence) == ("small-one", "cc-by-4.0")
    assert summary.weights_note == "a note"
    assert summary.is_converted
    assert summary.trained_context_tokens == 4096
    assert summary.full_prefill_max_tokens == 2048
    assert summary.max_context_tokens == 8192


def test_a_wrong_name_is_refused(write_model: Any, edit_json: Any) -> None:
    directory = write_model()
    edit_json(directory / "orthros.json", name=7)
    with pytest.raises(ModelError, match="'name' is 7; allowed is a string"):
        describe_model(directory)


def test_the_list_holds_every_model_by_name_and_warns_of_broken_ones(
    write_model: Any, edit_json: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    first = write_model(name="b")
    for name in ("a", "broken", ".being-written"):
        shutil.copytree(first, tmp_path / name)
    edit_json(tmp_path / "broken" / "config.json", hidden_act="gelu")
    (tmp_path / "no-model").mkdir()
    (tmp_path / "README.md").write_text("models")
    with caplog.at_level(logging.WARNING):
        assert [summary.name for summary in list_models(tmp_path)] == ["a", "b"]
    assert len(caplog.records) == 1
    assert "broken is left out of the list" in caplog.text
    assert "gelu" in caplog.text


def test_a_missing_root_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="orthros models prepare"):
        list_models(tmp_path / "absent")
