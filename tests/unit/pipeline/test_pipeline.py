import logging
import subprocess
import sys
from contextlib import aclosing

import pytest

from orthros_service.errors import UnavailableError
from orthros_service.types import EvidenceSpan, GenerationFinished, Timings, TokenDelta


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


async def test_an_abandoned_request_is_logged_as_cancelled(world, caplog):
    with caplog.at_level(logging.INFO):
        async with aclosing(world.pipeline.generate(world.request("text"))) as events:
            await anext(events)

    assert [one.outcome for one in caplog.records if hasattr(one, "outcome")] == ["cancelled"]


async def test_documents_go_to_the_coordinator(world):
    document = world.document("text")
    await world.pipeline.ingest(document)
    await world.pipeline.forget(document.content_key)

    assert world.coordinator.started == [document]
    assert world.coordinator.forgotten == [document.content_key]


@pytest.mark.parametrize("missing", ["coordinator", "decoder", None])
async def test_readiness_needs_both_kinds_of_workers(world, missing):
    if missing is not None:
        getattr(world, missing).is_answering = False

    assert await world.pipeline.is_ready() == (missing is None)


async def test_a_coordinator_that_cannot_be_reached_is_not_ready(world, monkeypatch):
    async def fail():
        raise UnavailableError("no coordinator")

    monkeypatch.setattr(world.coordinator, "is_ready", fail)

    assert not await world.pipeline.is_ready()


async def test_the_model_is_told(world):
    assert (await world.pipeline.model_info()).is_converted is False


def test_the_pipeline_and_the_ingestion_load_no_torch():
    code = (
        "import sys, orthros_service.pipeline, orthros_service.ingest, "
        "orthros_service.engine.local; sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
