"""Decode: evidence is the attention itself, and a sequence that fails, fails alone."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from orthros_service.engine.types import DecodeDelta
from orthros_service.errors import EngineError, StateMismatchError
from orthros_service.model.reference import phase_logits
from orthros_service.model.rope import RotaryTable, rotate


def test_evidence_points_at_the_tokens_that_were_attended_to(bench, tokens) -> None:
    """The masses equal the plain model's probabilities, averaged over queries and heads."""
    state = bench.prefill(tokens(150, 1), "linear")
    work = replace(bench.work("a", [("d", state)], tokens(9, 2), max_tokens=5), wants_evidence=True)
    engine = bench.engine()
    engine.add(work, [state])
    _, finished = bench.run(engine)
    (evidence,) = finished["a"].evidence
    assert evidence.char_starts.tolist() == list(range(150))
    assert 0 < float(evidence.mass.sum()) < 1
    expected = _plain_mass(
        bench, state, list(work.tail_ids) + bench.ids(finished["a"].text)[:-1], len(work.tail_ids)
    )
    np.testing.assert_allclose(evidence.mass, expected, atol=2e-6)


def _plain_mass(bench, state, rest: list[int], tail: int) -> np.ndarray:
    """Attention of layer 1's answer rows over the document, straight from the softmax."""
    model, config = bench.loaded.model, bench.loaded.config
    ids = torch.tensor(np.concatenate([s.token_ids for s in state.segments]).tolist() + rest)
    captured = {}
    module = model.layers[1].attention
    original = module.project

    def capture(x):
        captured["qkv"] = original(x)
        return captured["qkv"]

    module.project = capture
    try:
        phase_logits(model, ids, num_prefill=150)
    finally:
        module.project = original
    q, k, _ = captured["qkv"]
    rotary = RotaryTable(config, device="cpu")
    cos_sin = rotary.cos_sin(torch.arange(len(ids)))
    q, k = rotate(q, *cos_sin), rotate(k, *cos_sin).repeat_interleave(3, 0)
    scores = q @ k.transpose(1, 2) * config.head_dim**-0.5
    scores = scores.masked_fill(torch.ones(len(ids), len(ids)).triu(1).bool(), -torch.inf)
    rows = torch.softmax(scores, -1)[:, 150 + tail :, :150]
    return rows.mean((0, 1)).numpy()


def test_sequences_with_bad_logits_fail_alone(bench, tokens) -> None:
    state = bench.prefill(tokens(150, 1), "linear")
    engine = bench.engine()
    engine.add(bench.work("good", [("d", state)], tokens(9, 2)), [state])
    expected = bench.run(engine)[0]["good"]
    broken = bench.prefill(tokens(97, 5), "linear")
    broken.segments[0].kv[:] = np.nan
    engine.add(bench.work("good", [("d", state)], tokens(9, 2)), [state])
    engine.add(bench.work("bad", [("b", broken)], tokens(9, 2)), [broken])
    text = ""
    errors = []
    while engine.has_work:
        for name, output in engine.step():
            if isinstance(output, EngineError):
                errors.append(name)
            elif isinstance(output, DecodeDelta):
                assert name == "good"
                text += output.text
    assert errors == ["bad"]
    assert text == expected


def test_wrong_work_is_refused(bench, tokens) -> None:
    state = bench.prefill(tokens(20), "linear")
    engine = bench.engine()
    engine.add(bench.work("a", [("d", state)], [1]), [state])
    with pytest.raises(EngineError, match="already"):
        engine.add(bench.work("a", [("d", state)], [1]), [state])
    with pytest.raises(EngineError, match="at least one"):
        engine.add(bench.work("b", [("d", state)], []), [state])
    other = replace(state, layout=replace(state.layout, model_digest="other"))
    with pytest.raises(StateMismatchError, match="model_digest is 'other'"):
        engine.add(bench.work("c", [("d", other)], [1]), [other])
