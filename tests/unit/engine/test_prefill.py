"""Prefill: steps equal one pass, and every split of the phases equals the reference."""

import numpy as np
import pytest
import torch

from orthros_service.engine import prefill as prefill_module
from orthros_service.engine.prefill import PrefillEngine
from orthros_service.engine.types import PrefillStep
from orthros_service.errors import CancelledError, StateMismatchError
from orthros_service.model.batches import (
    DecodeBatch,
    PrivateTail,
    SharedContext,
    layer_views,
    segment_views,
)
from orthros_service.model.reference import phase_logits
from orthros_service.model.rope import RotaryTable, rotate
from orthros_service.model.transformer import full_logits
from orthros_service.state.tensors import kv_tensor


def _kv(state) -> torch.Tensor:
    return torch.cat([torch.from_numpy(s.kv) for s in state.segments], 3)


def _decode_rest(bench, state, rest: list[int]) -> torch.Tensor:
    """Logits of the tail [t:] in decode mode over a prefilled state."""
    model = bench.loaded.model
    start, count = state.num_tokens, len(rest)
    segments = tuple(kv_tensor(s, "float32", torch.device("cpu")) for s in state.segments)
    batch = DecodeBatch(
        cos_sin=RotaryTable(model.config, device="cpu").cos_sin(torch.arange(start, start + count)),
        documents=(SharedContext(layers=segment_views(segments), rows=None, cos_sin=None),)
        if segments
        else (),
        tails=(
            PrivateTail(
                first_row=0, num_rows=count, layers=layer_views(model.new_kv(count)), length=0
            ),
        ),
    )
    with torch.inference_mode():
        return model.logits(model.hidden_states(torch.tensor(rest), batch)).float()


@pytest.mark.parametrize("segment_tokens", [32, 48, 96, 160, 320])
def test_linear_keys_and_values_do_not_depend_on_the_step_size(
    bench, tokens, segment_tokens
) -> None:
    ids = tokens(300)
    whole = _kv(bench.prefill(ids, "linear", 320))
    torch.testing.assert_close(
        _kv(bench.prefill(ids, "linear", segment_tokens)), whole, atol=2e-5, rtol=1e-4
    )


@pytest.mark.parametrize("chunk", [16, 32, 48, 80])
def test_chunks_inside_a_step_change_nothing(bench, tokens, chunk, monkeypatch) -> None:
    ids = tokens(300)
    expected = {mode: _kv(bench.prefill(ids, mode, 160)) for mode in ("linear", "full")}
    monkeypatch.setattr(prefill_module, "CHUNK_TOKENS", chunk)
    for mode, kv in expected.items():
        torch.testing.assert_close(_kv(bench.prefill(ids, mode, 160)), kv, atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("split", [0, 1, 5, 15, 16, 17, 33, 48, 49, 64, 97, 128, 160, 191, 199])
def test_prefill_then_decode_equals_one_pass_with_the_phase_mask(bench, tokens, split) -> None:
    ids = tokens(200)
    state = bench.prefill(ids[:split], "linear", 96)
    expected = phase_logits(bench.loaded.model, torch.tensor(ids), num_prefill=split)[split:]
    torch.testing.assert_close(
        _decode_rest(bench, state, ids[split:]), expected, atol=2e-4, rtol=1e-3
    )


def test_without_prefill_the_reference_is_full_attention(bench, tokens) -> None:
    ids = torch.tensor(tokens(150))
    torch.testing.assert_close(
        phase_logits(bench.loaded.model, ids, num_prefill=0),
        full_logits(bench.loaded.model, ids),
        atol=2e-4,
        rtol=1e-3,
    )


def test_a_document_inside_the_window_is_prefilled_as_in_full_attention(bench, tokens) -> None:
    ids = tokens(48)
    torch.testing.assert_close(
        _kv(bench.prefill(ids, "linear")), _kv(bench.prefill(ids, "full")), atol=1e-5, rtol=1e-4
    )


def test_a_longer_document_is_not(bench, tokens) -> None:
    ids = tokens(200)
    difference = _kv(bench.prefill(ids, "linear")) - _kv(bench.prefill(ids, "full"))
    assert difference[1:, :, :, :48].abs().max() < 1e-4
    assert difference[1:, :, :, 64:].abs().max() > 1e-2


@pytest.mark.parametrize("segment_tokens", [32, 96, 160, 320])
def test_full_mode_equals_full_attention_at_every_split(bench, tokens, segment_tokens) -> None:
    ids = tokens(240)
    expected = full_logits(bench.loaded.model, torch.tensor(ids))
    for split in (40, 96, 200):
        state = bench.prefill(ids[:split], "full", segment_tokens)
        rest = _decode_rest(bench, state, ids[split:])
        torch.testing.assert_close(rest, expected[split:], atol=2e-4, rtol=1e-3)


def test_prefill_is_causal_so_later_text_changes_no_earlier_key(bench, tokens) -> None:
    ids = tokens(200)
    for mode in ("linear", "full"):
        longer, shorter = bench.prefill(ids, mode), bench.prefill(ids[:120], mode)
        torch.testing.assert_close(_kv(longer)[:, :, :, :120], _kv(shorter), atol=2e-5, rtol=1e-4)


def test_a_step_of_another_model_or_position_is_refused(bench, tokens) -> None:
    layout = bench.layout("linear")
    engine = PrefillEngine(bench.loaded, layout)
    part = np.asarray(tokens(10), np.int32)
    places = np.zeros(10, np.int64)
    arguments = {"token_ids": part, "char_starts": places, "char_ends": places}
    other = bench.layout("linear", 192)
    with pytest.raises(StateMismatchError, match="segment_tokens is 192"):
        engine.step(PrefillStep(layout=other, start=0, **arguments), [])
    with pytest.raises(StateMismatchError, match="not a multiple"):
        engine.step(PrefillStep(layout=layout, start=10, **arguments), [])
    with pytest.raises(StateMismatchError, match="needs the first segment"):
        engine.step(PrefillStep(layout=layout, start=96, **arguments), [])
    with pytest.raises(StateMismatchError, match="at least the window"):
        PrefillEngine(bench.loaded, bench.layout("linear", 16))


def test_cancellation_is_seen_between_chunks(bench, tokens, monkeypatch) -> None:
    monkeypatch.setattr(prefill_module, "CHUNK_TOKENS", 16)
    layout = bench.layout("linear")
    places = np.zeros(96, np.int64)
    step = PrefillStep(
        layout=layout,
        start=0,
        token_ids=np.asarray(tokens(96), np.int32),
        char_starts=places,
        char_ends=places,
    )
    polls = []

    def is_cancelled() -> bool:
        polls.append(True)
        return len(polls) > 2

    with pytest.raises(CancelledError):
        PrefillEngine(bench.loaded, layout).step(step, [], is_cancelled=is_cancelled)
    assert len(polls) == 3


def test_keys_before_rotation_can_be_read_back_so_a_state_over_them_could_be_rebuilt(
    bench, tokens
) -> None:
    """What the linear branch would need, unrotated keys and values, is a function of the cache."""
    ids = tokens(150)
    kv = _kv(bench.prefill(ids, "linear"))
    model = bench.loaded.model
    rotary = RotaryTable(model.config, device="cpu")
    cos, sin = rotary.cos_sin(torch.arange(150))
    x = model.layers[0].input_norm(model.embed_tokens(torch.tensor(ids)))
    _, k_raw, v = model.layers[0].attention.project(x)
    torch.testing.assert_close(rotate(kv[0, 0], cos, -sin), k_raw, atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(kv[0, 1], v, atol=1e-5, rtol=1e-4)
