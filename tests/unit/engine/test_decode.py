"""Decode: batching, sharing and composing documents change no answer."""

import numpy as np
import pytest
import torch

from orthros_service.engine import decode as decode_module
from orthros_service.engine.types import DecodeDelta
from orthros_service.model import attention
from orthros_service.model.reference import phase_logits
from orthros_service.model.rope import RotaryTable, rotate
from orthros_service.model.transformer import full_logits
from orthros_service.state.types import AttentionState, Segment


def test_greedy_decoding_equals_whole_passes_with_the_phase_mask(bench, tokens) -> None:
    document, tail = tokens(150, 1), tokens(9, 2)
    engine = bench.engine()
    state = bench.prefill(document, "linear")
    engine.add(bench.work("a", [("d", state)], tail, max_tokens=12), [state])
    deltas, finished = bench.run(engine)
    expected = bench.greedy(
        lambda ids: phase_logits(bench.loaded.model, ids, num_prefill=150), document + tail, 12
    )
    assert bench.ids(deltas["a"]) == expected
    assert finished["a"].text == deltas["a"]
    assert finished["a"].finish_reason == "length"
    assert finished["a"].completion_tokens == 12


def test_without_documents_decoding_is_the_plain_transformer(bench, tokens) -> None:
    tail = tokens(70, 3)
    engine = bench.engine()
    engine.add(bench.work("a", [], tail, max_tokens=10), [])
    deltas, _ = bench.run(engine)
    assert bench.ids(deltas["a"]) == bench.greedy(
        lambda ids: full_logits(bench.loaded.model, ids), tail, 10
    )


@pytest.mark.parametrize("extend_tokens", [1, 7, 64])
def test_a_tail_run_in_slices_gives_the_same_answer(
    bench, tokens, monkeypatch, extend_tokens
) -> None:
    state, tail = bench.prefill(tokens(150, 1), "linear"), tokens(40, 2)
    answers = []
    for limit in (512, extend_tokens):
        monkeypatch.setattr(decode_module, "EXTEND_TOKENS", limit)
        engine = bench.engine()
        engine.add(bench.work("a", [("d", state)], tail), [state])
        answers.append(bench.run(engine)[0]["a"])
    assert answers[0] == answers[1]


def test_answers_do_not_depend_on_the_batch(bench, tokens) -> None:
    """Different, shared and no documents, sampled and greedy, joining at different times."""
    states = {
        key: bench.prefill(tokens(n, n), "linear") for key, n in (("x", 150), ("y", 97), ("z", 33))
    }
    keys = {"a": "x", "b": "x", "c": "y", "d": "", "e": "xy", "f": "zx", "g": "x"}
    pairs = {name: [(key, states[key]) for key in chosen] for name, chosen in keys.items()}
    works = {
        name: bench.work(
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
        engine = bench.engine()
        engine.add(work, [state for _, state in pairs[name]])
        alone.update(bench.run(engine)[0])
    engine = bench.engine()
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
    engine = bench.engine()
    for index in range(3):
        engine.add(bench.work(str(index), [("d", state)], tokens(30, index)), [state])
    bench.run(engine)
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
    reference = bench.engine_of(layout)
    reference.add(
        bench.work("r", [("joined", reference_state)], tail, max_tokens=12), [reference_state]
    )
    engine = bench.engine()
    engine.add(bench.work("r", [("1", first), ("2", second)], tail, max_tokens=12), [first, second])
    assert bench.run(engine)[0] == bench.run(reference)[0]


def test_the_same_document_twice_is_two_documents(bench, tokens) -> None:
    state, tail = bench.prefill(tokens(97, 2), "linear"), tokens(6, 3)
    answers = []
    for keys in (("1", "2"), ("1", "1")):
        engine = bench.engine()
        engine.add(bench.work("r", [(key, state) for key in keys], tail), [state, state])
        answers.append(bench.run(engine)[0])
    assert answers[0] == answers[1]


def test_a_decode_temperature_of_long_contexts_matches_the_reference(
    warm_bench, tokens, monkeypatch
) -> None:
    monkeypatch.setattr(attention, "TEMPERATURE_START", 64)
    document, tail = tokens(150, 1), tokens(3, 2)
    engine = warm_bench.engine()
    state = warm_bench.prefill(document, "linear")
    engine.add(warm_bench.work("a", [("d", state)], tail, max_tokens=12), [state])
    expected = warm_bench.greedy(
        lambda ids: phase_logits(warm_bench.loaded.model, ids, num_prefill=150), document + tail, 12
    )
    assert warm_bench.ids(warm_bench.run(engine)[0]["a"]) == expected
    monkeypatch.setattr(attention, "TEMPERATURE_START", 8192)
    engine.add(warm_bench.work("a", [("d", state)], tail, max_tokens=12), [state])
    assert warm_bench.ids(warm_bench.run(engine)[0]["a"]) != expected


def test_stop_ids_end_the_answer_and_are_not_part_of_it(bench, tokens) -> None:
    state, tail = bench.prefill(tokens(150, 1), "linear"), tokens(9, 2)
    engine = bench.engine()
    engine.add(bench.work("a", [("d", state)], tail, max_tokens=12), [state])
    free = bench.ids(bench.run(engine)[0]["a"])
    stop = free[4]
    engine.add(bench.work("a", [("d", state)], tail, max_tokens=12, stop_ids=[stop]), [state])
    deltas, finished = bench.run(engine)
    assert bench.ids(finished["a"].text) == free[: free.index(stop)]
    assert finished["a"].finish_reason == "stop"
    assert deltas.get("a", "") == finished["a"].text


def test_stop_strings_end_the_answer(bench, tokens) -> None:
    state, tail = bench.prefill(tokens(150, 1), "linear"), tokens(9, 2)
    engine = bench.engine()
    engine.add(bench.work("a", [("d", state)], tail, max_tokens=12), [state])
    free = bench.run(engine)[0]["a"]
    engine.add(bench.work("a", [("d", state)], tail, max_tokens=12, stop=(free[3:6],)), [state])
    deltas, finished = bench.run(engine)
    assert finished["a"].text == deltas["a"] == free[: free.index(free[3:6])]
    assert finished["a"].finish_reason == "stop"


def test_cancelling_drops_one_sequence_and_leaves_the_others_alone(bench, tokens) -> None:
    state = bench.prefill(tokens(150, 1), "linear")
    engine = bench.engine()
    engine.add(bench.work("a", [("d", state)], tokens(9, 2)), [state])
    expected = bench.run(engine)[0]["a"]
    engine.add(bench.work("a", [("d", state)], tokens(9, 2)), [state])
    engine.add(bench.work("b", [("d", state)], tokens(5, 4)), [state])
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
