import asyncio

import pytest

from orthros_service.errors import (
    ContextTooLongError,
    EngineError,
    OverloadedError,
    UnavailableError,
)
from orthros_service.types import Message, Timings

TEXT = "Mr. Darcy owns Pemberley. Mr. Bingley rents Netherfield."


async def test_an_answer_carries_text_usage_timings_and_the_model_state(service):
    service.backend.timings = Timings(queue_s=0.5, decode_s=0.25)
    document_id = await service.upload(TEXT)
    response = await service.client.post(
        "/v1/answers", json={"document_ids": [document_id], "question": "Who owns Pemberley?"}
    )
    assert response.status_code == 200
    body = response.json()
    assert body["object"] == "answer"
    assert body["text"] == "Mr. Darcy."
    assert body["finish_reason"] == "stop"
    assert body["model"] == "tiny-model"
    assert body["converted"] is False
    assert body["usage"] == {
        "document_tokens": 50,
        "prompt_tokens": 12,
        "completion_tokens": 3,
        "max_tokens": 256,
    }
    assert body["timings"]["queue_s"] >= 0.5
    assert body["timings"]["decode_s"] == 0.25
    assert body["timings"]["total_s"] > 0
    assert body["warnings"] == []


async def test_the_backend_gets_the_stored_text_the_turns_and_the_sampling(service):
    document_id = await service.upload("Line one.\r\nLine two.")
    await service.client.post(
        "/v1/answers",
        json={
            "document_ids": [document_id],
            "question": "And then?",
            "instructions": "Be brief.",
            "history": [
                {"role": "user", "content": "What first?"},
                {"role": "assistant", "content": "Line one."},
            ],
            "max_tokens": 7,
            "temperature": 0.5,
            "top_p": 0.9,
            "top_k": 40,
            "seed": 3,
            "stop": ["\nUser:"],
            "citations": False,
            "deadline_s": 30,
        },
    )
    (request,) = service.backend.requests
    (document,) = request.documents
    assert document.text == "Line one.\nLine two."
    assert document.document_id == document_id
    assert request.messages == (
        Message(role="system", content="Be brief."),
        Message(role="user", content="What first?"),
        Message(role="assistant", content="Line one."),
        Message(role="user", content="And then?"),
    )
    sampling = request.sampling
    assert (sampling.max_tokens, sampling.temperature, sampling.top_p) == (7, 0.5, 0.9)
    assert (sampling.top_k, sampling.seed, sampling.stop) == (40, 3, ("\nUser:",))
    assert request.wants_citations is False
    assert 0 < request.deadline_s <= 30


async def test_a_stream_gives_deltas_and_then_the_same_answer_as_without(service, sse_events):
    document_id = await service.upload(TEXT)
    body = {"document_ids": [document_id], "question": "Who?"}
    plain = (await service.client.post("/v1/answers", json=body)).json()
    response = await service.client.post("/v1/answers", json={**body, "stream": True})
    assert response.headers["content-type"].startswith("text/event-stream")
    assert "content-length" not in response.headers
    events = sse_events(response.text)
    assert [name for name, _ in events] == ["delta", "delta", "delta", "completed"]
    assert "".join(data["text"] for name, data in events if name == "delta") == plain["text"]
    streamed = events[-1][1]
    for volatile in ("id", "timings"):
        streamed.pop(volatile), plain.pop(volatile)
    assert streamed == plain


@pytest.mark.parametrize("is_stream", [True, False])
@pytest.mark.parametrize(
    ("error", "status", "code"),
    [
        (ContextTooLongError("Too long.", limit=10, actual=11), 413, "context_length_exceeded"),
        (OverloadedError("Busy.", retry_after_s=2.5), 429, "overloaded"),
        (UnavailableError("Gone."), 503, "unavailable"),
        (RuntimeError("secret detail"), 500, "internal"),
    ],
)
async def test_an_error_before_the_first_token_has_its_own_status_streamed_or_not(
    service, is_stream, error, status, code
):
    service.backend.script = [error]
    document_id = await service.upload(TEXT)
    response = await service.client.post(
        "/v1/answers",
        json={"document_ids": [document_id], "question": "Who?", "stream": is_stream},
    )
    assert response.status_code == status
    assert response.headers["content-type"] == "application/problem+json"
    assert response.json()["code"] == code
    assert "secret" not in response.text
    if code == "overloaded":
        assert response.headers["retry-after"] == "3"
        assert response.json()["retry_after_s"] == 2.5
    if code == "context_length_exceeded":
        assert (response.json()["limit"], response.json()["actual"]) == (10, 11)


@pytest.mark.parametrize(
    ("error", "code"),
    [(EngineError("The step failed."), "engine_error"), (ValueError("secret"), "internal")],
)
async def test_a_stream_that_breaks_ends_with_an_error_event_and_counts_as_failed(
    service, sse_events, error, code
):
    service.backend.script = ["Mr. ", "Darcy", error]
    document_id = await service.upload(TEXT)
    response = await service.client.post(
        "/v1/answers",
        json={"document_ids": [document_id], "question": "Who?", "stream": True},
        headers={"X-Request-ID": "my-request"},
    )
    events = sse_events(response.text)
    assert [name for name, _ in events] == ["delta", "delta", "error"]
    problem = events[-1][1]
    assert problem["code"] == code
    assert problem["request_id"] == "my-request"
    assert "secret" not in response.text
    counted = service.metric(
        "orthros_requests_total", endpoint="answers", outcome="server_error", code=code
    )
    assert counted == 1
    assert service.metric("orthros_requests_total", endpoint="answers", outcome="ok") == 0


async def test_a_generation_without_a_result_is_an_error_not_an_empty_answer(service, sse_events):
    service.backend.omits_result = True
    body = {"text": TEXT, "question": "Who?"}
    response = await service.client.post("/v1/answers", json=body)
    assert (response.status_code, response.json()["code"]) == (500, "engine_error")
    streamed = await service.client.post("/v1/answers", json={**body, "stream": True})
    assert sse_events(streamed.text)[-1][0] == "error"


async def test_more_requests_than_may_run_and_wait_get_429_at_once_and_the_rest_finish(service):
    service.backend.script = ["hang", "ok"]
    body = {"text": TEXT, "question": "Who?"}
    accepted = {
        asyncio.create_task(service.client.post("/v1/answers", json=body)) for _ in range(20)
    }
    refused = []
    while len(refused) < 16:
        done, accepted = await asyncio.wait(accepted, return_when=asyncio.FIRST_COMPLETED)
        refused += [task.result() for task in done]
    for response in refused:
        assert (response.status_code, response.json()["code"]) == (429, "overloaded")
        assert int(response.headers["retry-after"]) >= 1
    assert (await service.client.get("/healthz")).status_code == 200
    assert service.backend.num_active == 2
    service.backend.is_open = True
    assert [(await task).json()["text"] for task in accepted] == ["ok"] * 4
    assert service.metric("orthros_admission_rejections_total", reason="queue_full") == 16
    assert service.metric("orthros_requests_in_flight") == 0


@pytest.mark.parametrize("style", ["paragraph", "bullets", "one_sentence"])
async def test_every_summary_style_has_its_own_fixed_instruction(service, style):
    response = await service.client.post("/v1/summaries", json={"text": TEXT, "style": style})
    assert response.status_code == 200
    assert response.json()["object"] == "summary"
    (message,) = service.backend.requests[0].messages
    words = {"paragraph": "one paragraph", "bullets": "list", "one_sentence": "one sentence"}
    assert words[style] in message.content


async def test_a_summary_s_focus_and_instructions_reach_the_prompt(service, sse_events):
    response = await service.client.post(
        "/v1/summaries",
        json={"text": TEXT, "focus": "houses {0}", "instructions": "In French.", "stream": True},
    )
    assert sse_events(response.text)[-1][1]["object"] == "summary"
    system, user = service.backend.requests[0].messages
    assert system.content == "In French."
    assert "houses {0}" in user.content


async def test_generations_of_one_request_id_have_different_names(service):
    for _ in range(2):
        await service.client.post(
            "/v1/answers",
            json={"text": TEXT, "question": "Who?"},
            headers={"X-Request-ID": "same"},
        )
    one, other = service.backend.requests
    assert one.request_id != other.request_id


async def test_finished_requests_are_measured(service):
    service.backend.timings = Timings(prefill_s=1.0, decode_s=2.0)
    await service.client.post("/v1/answers", json={"text": TEXT, "question": "Who?"})
    assert service.metric("orthros_generated_tokens_total") == 3
    assert service.metric("orthros_prompt_tokens_total") == 12
    assert service.metric("orthros_request_phase_seconds_sum", phase="decode") == 2.0
    assert service.metric("orthros_time_to_first_token_seconds_count", cache="miss") == 1
    assert service.metric("orthros_inter_token_seconds_count") == 2
    assert service.metric("orthros_request_duration_seconds_count", endpoint="answers") == 1
    counted = service.metric(
        "orthros_requests_total", endpoint="answers", outcome="ok", code="none"
    )
    assert counted == 1
    assert service.metric("orthros_cancellations_total") == 0
    assert service.backend.cancelled == []


async def test_a_finished_answer_is_not_lost_when_the_workers_go_down_meanwhile(
    service, monkeypatch
):
    monkeypatch.setattr("orthros_service.gateway.context._MODEL_INFO_MAX_AGE_S", 0.0)
    generate = service.backend.generate

    async def generate_and_go_down(request):
        async for event in generate(request):
            yield event

            async def fail():
                raise UnavailableError("Gone.")

            service.backend.model_info = fail

    service.backend.generate = generate_and_go_down
    response = await service.client.post("/v1/answers", json={"text": TEXT, "question": "Who?"})
    assert (response.status_code, response.json()["text"]) == (200, "Mr. Darcy.")


async def test_the_line_of_a_finished_request_names_it_its_phase_and_its_numbers(service, caplog):
    caplog.set_level("INFO")
    await service.client.post(
        "/v1/answers",
        json={"text": TEXT, "question": "Who?"},
        headers={"X-Request-ID": "my-request"},
    )
    (record,) = [one for one in caplog.records if one.getMessage() == "request finished"]
    line = vars(record)
    assert (line["endpoint"], line["status"], line["outcome"]) == ("answers", 200, "ok")
    assert (line["phase"], line["completion_tokens"]) == ("decode", 3)
    assert line["duration_s"] > 0


async def test_workers_that_never_answer_are_a_503_not_an_endless_wait(service, monkeypatch):
    monkeypatch.setattr("orthros_service.gateway.waits.CALL_TIMEOUT_S", 0.05)

    async def hang(*_args):
        await asyncio.Event().wait()

    service.backend.ingest = hang
    upload = await service.client.post(
        "/v1/documents", content=b"text", headers={"Content-Type": "text/plain"}
    )
    assert (upload.status_code, upload.json()["code"]) == (503, "unavailable")
    service.backend.model_info = hang
    response = await service.client.get("/v1/models")
    assert (response.status_code, response.json()["error"]["code"]) == (503, "unavailable")
