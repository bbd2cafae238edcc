"""Decode: batching, sharing and composing documents change no answer."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from orthros_service.engine import decode as decode_module
from orthros_service.engine.decode import DecodeEngine
from orthros_service.engine.types import DecodeDelta, DecodeFinished, DecodeWork
from orthros_service.errors import EngineError, StateMismatchError
from orthros_service.model import attention
from orthros_service.model.reference import phase_logits
from orthros_service.model.rope import RotaryTable, rotate
from orthros_service.model.transformer import full_logits
from orthros_service.state.types import AttentionState, Segment, StateHandle
from orthros_service.types import SamplingParameters


class CharacterStream:
    """Each token is one printable character."""

    def push(self, token_id: int) -> str:
        return chr(0x100 + token_id)

    def flush(self) -> str:
        return ""


def _engine(bench, mode="linear") -> DecodeEngine:
    return DecodeEngine(bench.loaded, bench.layout(mode), new_stream=CharacterStream)


def _work(request_id, states, tail, *, max_tokens=8, stop_ids=(), **sampling) -> DecodeWork:
    handles = tuple(
        StateHandle(
            content_key=f"{key}",
            layout=state.layout,
            segments=(),
            num_tokens=state.num_tokens,
            num_bytes=state.num_bytes,
        )
        for key, state in states
    )
    return DecodeWork(
        request_id=request_id,
        documents=handles,
        tail_ids=tuple(tail),
        sampling=SamplingParameters(max_tokens=max_tokens, **sampling),
        stop_ids=frozenset(stop_ids),
    )


def _run(engine) -> tuple[dict[str, str], dict[str, DecodeFinished]]:
    deltas: dict[str, str] = {}
    finished: dict[str, DecodeFinished] = {}
    while engine.has_work:
        for request_id, output in engine.step():
            if isinstance(output, DecodeDelta):
                assert request_id not in finished
                deltas[request_id] = deltas.get(request_id, "") + output.text
            else:
                assert isinstance(output, DecodeFinished), output
                finished[request_id] = output
    return deltas, finished


def _ids(text: str) -> list[int]:
    return [ord(character) - 0x100 for character in text]


def _greedy(logits_of, prompt: list[int], count: int) -> list[int]:
    """Greedy tokens by whole passes, without any cache."""
    ids = list(prompt)
    for _ in range(count):
        ids.append(int(logits_of(torch.tensor(ids))[-1].argmax()))
    return ids[len(prompt) :]


def test_greedy_decoding_equals_whole_passes_with_the_phase_mask(bench, tokens) -> None:
    document, tail = tokens(150, 1), tokens(9, 2)
    engine = _engine(bench)
    state = bench.prefill(document, "linear")
    engine.add(_work("a", [("d", state)], tail, max_tokens=12), [state])
    deltas, finished = _run(engine)
    expected = _greedy(
        lambda ids: phase_logits(bench.loaded.model, ids, num_prefill=150), document + tail, 12
    )
    assert _ids(deltas["a"]) == expected
    assert finished["a"].text == deltas["a"]
    assert finished["a"].finish_reason == "length"
    assert finished["a"].completion_tokens == 12


def test_without_documents_decoding_is_the_plain_transformer(bench, tokens) -> None:
    tail = tokens(70, 3)
    engine = _engine(bench)
    engine.add(_work("a", [], tail, max_tokens=10), [])
    deltas, _ = _run(engine)
    assert _ids(deltas["a"]) == _greedy(lambda ids: full_logits(bench.loaded.model, ids), tail, 10)


@pytest.mark.parametrize("extend_tokens", [1, 7, 64])
def test_a_tail_run_in_slices_gives_the_same_answer(
    bench, tokens, monkeypatch, extend_tokens
) -> None:
    state, tail = bench.prefill(tokens(150, 1), "linear"), tokens(40, 2)
    answers = []
    for limit in (512, extend_tokens):
        monkeypatch.setattr(decode_module, "EXTEND_TOKENS", limit)
        engine = _engine(bench)
        engine.add(_work("a", [("d", state)], tail), [state])
        answers.append(_run(engine)[0]["a"])
    assert answers[0] == answers[1]


def test_answers_do_not_depend_on_the_batch(bench, tokens) -> None:
    """Different, shared and no documents, sampled and greedy, joining at different times."""
    states = {
        key: bench.prefill(tokens(n, n), "linear") for key, n in (("x", 150), ("y", 97), ("z", 33))
    }
    keys = {"a": "x", "b": "x", "c": "y", "d": "", "e": "xy", "f": "zx", "g": "x"}
    pairs = {name: [(key, states[key]) for key in chosen] for name, chosen in keys.items()}
    works = {
        name: _work(
            name,
            documents,
            tokens(5 + 3 * index, 50 + index),
            max_tokens=6 + index,
            temperature=0.9 if index % 2 else 0.0,
            seed=index,
        )
        for index, (name, documents) in enumerate(pairs.items())
    }
    alone = {}
    for name, work in works.items():
        engine = _engine(bench)
        engine.add(work, [state for _, state in pairs[name]])
        alone.update(_run(engine)[0])
    engine = _engine(bench)
    waiting = list(works.items())
    together: dict[str, str] = {}
    while waiting or engine.has_work:
        for _ in range(2):
            if waiting:
                name, work = waiting.pop()
                engine.add(work, [state for _, state in pairs[name]])
        for request_id, output in engine.step():
            if isinstance(output, DecodeDelta):
                together[request_id] = together.get(request_id, "") + output.text
    assert together == alone


def test_no_question_changes_a_documents_keys_and_values(bench, tokens) -> None:
    state = bench.prefill(tokens(150, 1), "linear")
    before = [segment.kv.copy() for segment in state.segments]
    engine = _engine(bench)
    for index in range(3):
        engine.add(_work(str(index), [("d", state)], tokens(30, index)), [state])
    _run(engine)
    assert all(np.array_equal(b, s.kv) for b, s in zip(before, state.segments, strict=True))


def test_composed_documents_equal_one_softmax_over_keys_rotated_to_their_offsets(
    bench, tokens
) -> None:
    """The reference moves every key of the second document to its offset and attends once."""
    loaded = bench.loaded
    first, second = bench.prefill(tokens(150, 1), "linear"), bench.prefill(tokens(97, 2), "linear")
    tail = tokens(6, 3)
    rotary = RotaryTable(loaded.config, device="cpu")
    kv = []
    for state, offset in ((first, 0), (second, 150)):
        whole = torch.cat([torch.from_numpy(s.kv) for s in state.segments], 3).clone()
        whole[:, 0] = rotate(whole[:, 0], *rotary.cos_sin(torch.tensor([offset])))
        kv.append(whole)
    joined = torch.cat(kv, 3)
    layout = bench.layout("linear", 4096)
    places = np.zeros(247, np.int64)
    segment = Segment(
        start=0,
        token_ids=np.zeros(247, np.int32),
        char_starts=places,
        char_ends=places,
        kv=joined.contiguous().numpy(),
    )
    reference_state = AttentionState(layout=layout, segments=(segment,))
    reference = DecodeEngine(loaded, layout, new_stream=CharacterStream)
    reference.add(_work("r", [("joined", reference_state)], tail, max_tokens=12), [reference_state])
    engine = _engine(bench)
    engine.add(_work("r", [("1", first), ("2", second)], tail, max_tokens=12), [first, second])
    assert _run(engine)[0] == _run(reference)[0]


def test_the_same_document_twice_is_two_documents(bench, tokens) -> None:
    state, tail = bench.prefill(tokens(97, 2), "linear"), tokens(6, 3)
    answers = []
    for keys in (("1", "2"), ("1", "1")):
        engine = _engine(bench)
        engine.add(_work("r", [(key, state) for key in keys], tail), [state, state])
        answers.append(_run(engine)[0])
    assert answers[0] == answers[1]


def test_a_decode_temperature_of_long_contexts_matches_the_reference(
    warm_bench, tokens, monkeypatch
) -> None:
    monkeypatch.setattr(attention, "TEMPERATURE_START", 64)
    document, tail = tokens(150, 1), tokens(3, 2)
    engine = _engine(warm_bench)
    state = warm_bench.prefill(document, "linear")
    engine.add(_work("a", [("d", state)], tail, max_tokens=12), [state])
    expected = _greedy(
        lambda ids: phase_logits(warm_bench.loaded.model, ids, num_prefill=150), document + tail, 12
    )
    assert _ids(_run(engine)[0]["a"]) == expected
    monkeypatch.setattr(attention, "TEMPERATURE_START", 8192)
    engine.add(_work("a", [("d", state)], tail, max_tokens=12), [state])
    assert _ids(_run(engine)[0]["a"]) != expected


def test_stop_ids_end_the_answer_and_are_not_part_of_it(bench, tokens) -> None:
    state, tail = bench.prefill(tokens(150, 1), "linear"), tokens(9, 2)
    engine = _engine(bench)
    engine.add(_work("a", [("d", state)], tail, max_tokens=12), [state])
    free = _ids(_run(engine)[0]["a"])
    stop = free[4]
    engine.add(_work("a", [("d", state)], tail, max_tokens=12, stop_ids=[stop]), [state])
    deltas, finished = _run(engine)
    assert _ids(finished["a"].text) == free[: free.index(stop)]
    assert finished["a"].finish_reason == "stop"
    assert deltas.get("a", "") == finished["a"].text


def test_stop_strings_end_the_answer(bench, tokens) -> None:
    state, tail = bench.prefill(tokens(150, 1), "linear"), tokens(9, 2)
    engine = _engine(bench)
    engine.add(_work("a", [("d", state)], tail, max_tokens=12), [state])
    free = _run(engine)[0]["a"]
    engine.add(_work("a", [("d", state)], tail, max_tokens=12, stop=(free[3:6],)), [state])
    deltas, finished = _run(engine)
    assert finished["a"].text == deltas["a"] == free[: free.index(free[3:6])]
    assert finished["a"].finish_reason == "stop"


def test_cancelling_drops_one_sequence_and_leaves_the_others_alone(bench, tokens) -> None:
    state = bench.prefill(tokens(150, 1), "linear")
    engine = _engine(bench)
    engine.add(_work("a", [("d", state)], tokens(9, 2)), [state])
    expected = _run(engine)[0]["a"]
    engine.add(_work("a", [("d", state)], tokens(9, 2)), [state])
    engine.add(_work("b", [("d", state)], tokens(5, 4)), [state])
    engine.step()
    assert engine.cancel("b")
    assert not engine.cancel("b")
    assert engine.num_sequences == 1
    deltas: list[str] = []
    while engine.has_work:
        deltas += [
            o.text for name, o in engine.step() if isinstance(o, DecodeDelta) and name == "a"
        ]
    assert expected.endswith("".join(deltas))
    assert not engine.has_work


def test_evidence_points_at_the_tokens_that_were_attended_to(bench, tokens) -> None:
    """The masses equal the plain model's probabilities, averaged over queries and heads."""
    state = bench.prefill(tokens(150, 1), "linear")
    work = replace(_work("a", [("d", state)], tokens(9, 2), max_tokens=5), wants_evidence=True)
    engine = _engine(bench)
    engine.add(work, [state])
    _, finished = _run(engine)
    (evidence,) = finished["a"].evidence
    assert evidence.char_starts.tolist() == list(range(150))
    assert 0 < float(evidence.mass.sum()) < 1
    expected = _plain_mass(
        bench, state, list(work.tail_ids) + _ids(finished["a"].text)[:-1], len(work.tail_ids)
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
    engine = _engine(bench)
    engine.add(_work("good", [("d", state)], tokens(9, 2)), [state])
    expected = _run(engine)[0]["good"]
    broken = bench.prefill(tokens(97, 5), "linear")
    broken.segments[0].kv[:] = np.nan
    engine.add(_work("good", [("d", state)], tokens(9, 2)), [state])
    engine.add(_work("bad", [("b", broken)], tokens(9, 2)), [broken])
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
    engine = _engine(bench)
    engine.add(_work("a", [("d", state)], [1]), [state])
    with pytest.raises(EngineError, match="already"):
        engine.add(_work("a", [("d", state)], [1]), [state])
    with pytest.raises(EngineError, match="at least one"):
        engine.add(_work("b", [("d", state)], []), [state])
    other = replace(state, layout=replace(state.layout, model_digest="other"))
    with pytest.raises(StateMismatchError, match="model_digest is 'other'"):
        engine.add(_work("c", [("d", other)], [1]), [other])
