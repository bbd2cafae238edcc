import asyncio
import logging
import subprocess
import sys
from contextlib import aclosing

import pytest

from orthros_service.engine.types import DecodeDelta
from orthros_service.errors import (
    CancelledError,
    ContextTooLongError,
    DeadlineExceededError,
    EngineError,
    InvalidValueError,
    StateMismatchError,
    UnavailableError,
)
from orthros_service.types import EvidenceSpan, GenerationFinished, Message, Timings, TokenDelta


async def test_an_answer_streams_and_ends_with_its_numbers(world):
    events = await world.collect(world.request("first", "second one", question="who?"))

    assert events[:-1] == [TokenDelta(text=letter, num_tokens=1) for letter in "yes!"]
    finished = events[-1]
    assert isinstance(finished, GenerationFinished)
    assert (finished.text, finished.finish_reason) == ("yes!", "stop")
    assert finished.document_tokens == 5 + 10 + 10 + 10
    assert finished.prompt_tokens == len("who?") + 1
    assert (finished.completion_tokens, finished.max_tokens) == (4, 50)
    timings = finished.timings
    assert timings.prefill_s > 0
    assert timings == Timings(
        queue_s=0.1,
        prefill_s=timings.prefill_s,
        handoff_s=0.2,
        first_token_s=0.3,
        decode_s=0.4,
    )


async def test_the_work_holds_states_in_order_and_the_tail(world):
    await world.collect(world.request("first", "second", question="ab"))

    work = world.decoder.works[0]
    keys = [world.document(text).content_key for text in ("first", "second")]
    assert [handle.content_key for handle in work.documents] == keys
    assert work.tail_ids == (97, 98, 2)
    assert work.stop_ids == {7}
    assert 4 < work.deadline_s <= 5
    assert not work.wants_evidence


async def test_a_finished_request_cancels_nothing(world):
    await world.collect(world.request("text"))

    assert world.decoder.cancelled == []
    assert world.decoder.num_closed == 1


# Evidence


async def test_evidence_is_selected_over_all_texts_and_the_whole_answer(world, evidence):
    span = EvidenceSpan(
        document_index=0, start_char=0, end_char=2, answer_start=0, answer_end=4, score=1.0
    )
    world.decoder.evidence = evidence
    world.spans = (span,)
    events = await world.collect(world.request("text", "more", wants_citations=True))

    assert events[-1].evidence == (span,)
    assert world.selections == [(["text", "more"], 1, "yes!")]


async def test_a_chat_without_documents_asks_for_no_evidence(world, evidence):
    world.decoder.evidence = evidence
    events = await world.collect(world.request(wants_citations=True))

    assert not world.decoder.works[0].wants_evidence
    assert events[-1].evidence == ()
    assert world.selections == []


# Lengths


@pytest.mark.parametrize(("num_letters", "allowed"), [(10, 50), (1459, 40), (1498, 1)])
async def test_max_tokens_is_clamped_to_what_the_tail_holds(world, num_letters, allowed):
    events = await world.collect(world.request("text", question="q" * num_letters))

    assert world.decoder.works[0].sampling.max_tokens == allowed
    assert events[-1].max_tokens == allowed


async def test_max_tokens_is_clamped_to_what_the_context_holds(world):
    events = await world.collect(world.request("x" * 3970, question="q" * 9))

    assert events[-1].max_tokens == 4000 - 3980 - 10
    assert world.decoder.works[0].sampling.max_tokens == 10


async def test_a_tail_without_room_for_an_answer_is_refused_before_any_prefill(world):
    with pytest.raises(ContextTooLongError) as caught:
        await world.collect(world.request("text", question="q" * 1499))

    assert caught.value.details == {"limit": 1500, "actual": 1501}
    assert world.coordinator.sources == []


async def test_documents_that_fill_the_context_are_refused(world):
    with pytest.raises(ContextTooLongError) as caught:
        await world.collect(world.request("x" * 2000, "y" * 1976, question="abc"))

    assert caught.value.details == {"limit": 4000, "actual": 4001}
    assert world.decoder.works == []


# Chat without documents


async def test_a_short_chat_is_all_tail(world):
    events = await world.collect(world.request(question="q" * 998, max_tokens=50))

    assert world.coordinator.sources == []
    assert len(world.decoder.works[0].tail_ids) == 1000
    assert (events[-1].document_tokens, events[-1].prompt_tokens) == (0, 1000)
    assert events[-1].timings.prefill_s == 0.0


async def test_a_long_chat_prefills_whole_tiles_and_keeps_the_end_in_decode_mode(world):
    history = [
        Message(role="user", content="a" * 2000),
        Message(role="assistant", content="b" * 100),
        Message(role="user", content="c" * 20),
    ]
    events = await world.collect(world.request(messages=history))

    (prefix,) = world.coordinator.sources
    work = world.decoder.works[0]
    num_tokens = 2000 + 100 + 20 + 4
    assert prefix.mode == "linear"
    assert len(prefix.token_ids) % 128 == 0
    assert len(prefix.token_ids) + len(work.tail_ids) == num_tokens
    assert 512 <= len(work.tail_ids) < 512 + 128
    assert prefix.token_ids.tolist()[-1] == ord("a")
    assert prefix.char_ends.tolist() == [0] * len(prefix.token_ids)
    assert (events[-1].document_tokens, events[-1].prompt_tokens) == (0, num_tokens)


async def test_a_short_last_turn_stays_whole_in_decode_mode(world):
    history = [
        Message(role="user", content="a" * 2000),
        Message(role="assistant", content="b"),
        Message(role="user", content="c" * 900),
    ]
    await world.collect(world.request(messages=history))

    tail = world.decoder.works[0].tail_ids
    assert 902 <= len(tail) < 902 + 128
    assert tail[-902:] == (1, *[ord("c")] * 900, 2)


async def test_a_last_turn_that_is_the_long_text_is_prefilled_too(world):
    await world.collect(world.request(question="t" * 3000 + "why?"))

    assert 512 <= len(world.decoder.works[0].tail_ids) < 512 + 128


async def test_a_chat_that_fits_full_attention_but_not_the_tail_is_prefilled_in_full_mode(world):
    world.build(max_tail_tokens=900)
    events = await world.collect(world.request(question="q" * 900))

    (prefix,) = world.coordinator.sources
    assert prefix.mode == "full"
    assert events[-1].max_tokens == 50


async def test_equal_prefixes_share_a_key_and_others_do_not(world):
    for index, question in enumerate(["t" * 3000 + "why", "t" * 3000 + "who", "u" * 3000 + "why"]):
        await world.collect(world.request(question=question, request_id=f"r{index}"))

    first, second, third = (source.content_key for source in world.coordinator.sources)
    assert first == second != third
    assert len(first) == 64


async def test_a_chat_over_the_context_is_refused_before_any_prefill(world):
    with pytest.raises(ContextTooLongError) as caught:
        await world.collect(world.request(question="q" * 4000))

    assert caught.value.details["limit"] == 4000
    assert world.coordinator.sources == []


# Failures


async def test_a_document_that_fails_ends_the_wait_for_the_others(world):
    keys = [world.document(text).content_key for text in ("slow", "bad")]
    world.coordinator.gates[keys[0]] = asyncio.Event()
    error = StateMismatchError("wrong model")
    world.coordinator.errors[keys[1]] = error
    with pytest.raises(StateMismatchError) as caught:
        await world.collect(world.request("slow", "bad"))
    await asyncio.sleep(0)

    assert caught.value is error
    assert world.coordinator.num_cancelled == 1
    assert world.decoder.works == []


async def dies(work):
    raise UnavailableError("replica died")
    yield


async def dies_late(work):
    yield DecodeDelta(text="y", num_tokens=1)
    raise UnavailableError("replica died")


async def fails(work):
    raise EngineError("out of pages")
    yield


async def ends_early(work):
    yield DecodeDelta(text="y", num_tokens=1)


async def test_a_worker_that_dies_before_the_first_output_is_replaced_once(world):
    world.decoder.scripts = [dies]
    events = await world.collect(world.request("text"))

    assert events[-1].text == "yes!"
    assert len(world.decoder.works) == 2

    world.decoder.scripts = [dies, dies]
    with pytest.raises(UnavailableError):
        await world.collect(world.request("text"))


async def test_a_worker_that_dies_after_text_was_sent_is_an_error(world):
    world.decoder.scripts = [dies_late]
    with pytest.raises(UnavailableError):
        await world.collect(world.request("text"))

    assert world.events == [TokenDelta(text="y", num_tokens=1)]
    assert len(world.decoder.works) == 1


async def test_other_errors_are_not_retried(world):
    world.decoder.scripts = [fails]
    with pytest.raises(EngineError, match="out of pages"):
        await world.collect(world.request("text"))

    assert len(world.decoder.works) == 1


async def test_a_stream_that_ends_without_a_result_is_an_error(world):
    world.decoder.scripts = [ends_early]
    with pytest.raises(EngineError, match="without a result"):
        await world.collect(world.request("text"))


async def test_an_id_that_is_running_is_refused_and_can_be_used_again_later(world):
    first = world.pipeline.generate(world.request("text"))
    await anext(first)
    with pytest.raises(InvalidValueError, match="r1"):
        await world.collect(world.request("text"))
    assert len([event async for event in first]) == 4
    assert len(await world.collect(world.request("text"))) == 5


# Deadlines


async def test_all_documents_share_what_is_left_of_the_deadline(world):
    await world.collect(world.request("a", "b", deadline_s=3.0))

    assert all(2 < timeout_s <= 3 for timeout_s in world.coordinator.timeouts)


async def test_a_deadline_during_prefill_names_the_phase_and_ends_the_waits(world):
    world.coordinator.gates[world.document("slow").content_key] = asyncio.Event()
    with pytest.raises(DeadlineExceededError) as caught:
        await world.collect(world.request("slow", deadline_s=0.05))
    await asyncio.sleep(0)

    assert caught.value.phase == "prefill"
    assert world.coordinator.num_cancelled == 1


async def test_a_deadline_during_decoding_names_the_phase_and_frees_the_sequence(world):
    world.decoder.gate = asyncio.Event()
    with pytest.raises(DeadlineExceededError) as caught:
        await world.collect(world.request("text", deadline_s=0.05))

    assert caught.value.phase == "decode"
    assert len(world.events) == 1
    assert world.decoder.num_closed == 1
    assert world.decoder.cancelled == ["r1"]


# Leaving


async def test_closing_the_stream_frees_the_sequence(world):
    world.decoder.gate = asyncio.Event()
    async with aclosing(world.pipeline.generate(world.request("text"))) as events:
        await anext(events)

    assert world.decoder.num_closed == 1
    assert world.decoder.cancelled == ["r1"]


async def test_cancelling_the_reading_task_frees_the_sequence(world):
    world.decoder.gate = asyncio.Event()
    task = asyncio.create_task(world.collect(world.request("text")))
    await world.until(lambda: world.decoder.works)
    await asyncio.sleep(0.01)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task

    assert world.decoder.num_closed == 1
    assert world.decoder.cancelled == ["r1"]


async def test_cancelling_the_reading_task_during_prefill_ends_the_wait(world):
    world.coordinator.gates[world.document("slow").content_key] = asyncio.Event()
    task = asyncio.create_task(world.collect(world.request("slow")))
    await world.until(lambda: world.coordinator.sources)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await asyncio.sleep(0)

    assert world.coordinator.num_cancelled == 1


async def test_revoking_during_prefill_ends_the_request_with_an_error(world):
    world.coordinator.gates[world.document("slow").content_key] = asyncio.Event()
    task = asyncio.create_task(world.collect(world.request("slow")))
    await world.until(lambda: world.coordinator.sources)
    await world.pipeline.cancel("r1")

    with pytest.raises(CancelledError) as caught:
        await task
    assert caught.value.phase == "prefill"
    assert world.decoder.works == []


async def test_revoking_during_decoding_reaches_the_worker(world):
    async def revoked(work):
        yield DecodeDelta(text="y", num_tokens=1)
        await world.until(lambda: world.decoder.cancelled)
        raise CancelledError("cancelled", phase="decode")

    world.decoder.scripts = [revoked]
    task = asyncio.create_task(world.collect(world.request("text")))
    await world.until(lambda: world.decoder.works)
    await world.pipeline.cancel("r1")

    with pytest.raises(CancelledError):
        await task


async def test_unknown_ids_are_passed_on_to_the_workers(world):
    await world.pipeline.cancel("of another gateway")

    assert world.decoder.cancelled == ["of another gateway"]


async def test_a_worker_that_cannot_confirm_a_cancellation_does_not_hide_the_error(world, caplog):
    world.decoder.gate = asyncio.Event()
    world.decoder.cancel_error = UnavailableError("replica died")
    with pytest.raises(DeadlineExceededError):
        await world.collect(world.request("text", deadline_s=0.05))

    assert "may still be decoding" in caplog.text


# Logs


async def test_a_request_leaves_one_line_with_numbers_and_no_text(world, caplog):
    with caplog.at_level(logging.INFO):
        await world.collect(world.request("the text", question="the question"))

    (record,) = [one for one in caplog.records if one.name.startswith("orthros_service.pipeline")]
    values = vars(record)
    assert values["request_id"] == "r1"
    assert values["outcome"] == "stop"
    assert values["document_tokens"] == 18
    assert values["completion_tokens"] == 4
    assert values["decode_s"] == 0.4
    assert not {"the text", "the question", "yes!"} & {str(value) for value in values.values()}


@pytest.mark.parametrize(
    ("script", "outcome"), [(fails, "engine_error"), (dies_late, "unavailable")]
)
async def test_a_failed_request_logs_its_code(world, caplog, script, outcome):
    world.decoder.scripts = [script]
    with (
        caplog.at_level(logging.INFO),
        pytest.raises(EngineError if script is fails else UnavailableError),
    ):
        await world.collect(world.request("text"))

    assert [vars(one)["outcome"] for one in caplog.records if hasattr(one, "outcome")] == [outcome]


async def test_an_abandoned_request_is_logged_as_cancelled(world, caplog):
    with caplog.at_level(logging.INFO):
        async with aclosing(world.pipeline.generate(world.request("text"))) as events:
            await anext(events)

    assert [one.outcome for one in caplog.records if hasattr(one, "outcome")] == ["cancelled"]


# The rest of the backend


async def test_documents_go_to_the_coordinator(world):
    document = world.document("text")
    await world.pipeline.ingest(document)
    progress = await world.pipeline.wait_ready(document, timeout_s=1)
    await world.pipeline.forget(document.content_key)

    assert world.coordinator.started == [document]
    assert (progress.status, progress.mode, progress.num_tokens) == ("ready", "full", 14)
    assert world.coordinator.forgotten == [document.content_key]


@pytest.mark.parametrize("missing", ["coordinator", "decoder", None])
async def test_readiness_needs_both_kinds_of_workers(world, missing):
    if missing is not None:
        getattr(world, missing).is_answering = False

    assert await world.pipeline.is_ready() == (missing is None)


async def test_the_model_is_told(world):
    assert (await world.pipeline.model_info()).is_converted is False


def test_the_pipeline_and_the_ingestion_load_no_torch():
    code = (
        "import sys, orthros_service.pipeline, orthros_service.ingest, "
        "orthros_service.engine.local; sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
