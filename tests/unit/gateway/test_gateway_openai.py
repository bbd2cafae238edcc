"""The OpenAI-compatible face: its rules, and the real `openai` package against a real server."""

import asyncio

import openai
import pytest

from orthros_service.errors import ContextTooLongError, EngineError, OverloadedError
from orthros_service.types import IngestProgress, Message

CHAT = "/v1/chat/completions"


def chat(content="hi", **more):
    return {"model": "tiny-model", "messages": [{"role": "user", "content": content}], **more}


@pytest.fixture
def openai_client(service, serve):
    with openai.OpenAI(
        base_url=f"{serve(service.app)}/v1", api_key="unused", max_retries=0, timeout=10
    ) as client:
        yield client


async def test_the_openai_package_chats_lists_models_and_streams(service, openai_client):
    document_id = await service.upload()
    content = [
        {"type": "file", "file": {"file_id": document_id}},
        {"type": "text", "text": "Who owns it?"},
    ]

    def talk():
        models = openai_client.models.list().data
        assert [model.id for model in models] == ["tiny-model"]
        assert openai_client.models.retrieve("tiny-model").owned_by == "orthros"
        whole = openai_client.chat.completions.create(**chat(content))
        stream = openai_client.chat.completions.create(
            **chat(content, stream=True, stream_options={"include_usage": True})
        )
        return whole, list(stream)

    whole, chunks = await asyncio.to_thread(talk)
    assert whole.choices[0].message.content == "Mr. Darcy."
    assert whole.choices[0].finish_reason == "stop"
    assert whole.usage.prompt_tokens == 62
    assert whole.usage.total_tokens == 65
    assert whole.usage.prompt_tokens_details.cached_tokens == 50
    assert whole.model_extra["orthros"] == {"converted": False, "warnings": []}
    assert chunks[0].choices[0].delta.role == "assistant"
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == "Mr. Darcy."
    assert chunks[-2].choices[0].finish_reason == "stop"
    assert (chunks[-1].choices, chunks[-1].usage) == ([], whole.usage)
    assert all(chunk.usage is None for chunk in chunks[:-1])
    assert {chunk.id for chunk in chunks} == {chunks[0].id}
    request = service.backend.requests[0]
    assert request.documents[0].document_id == document_id
    assert request.messages == (Message(role="user", content="Who owns it?"),)


async def test_the_openai_package_raises_its_own_classes_for_our_errors(service, openai_client):
    service.backend.progress = IngestProgress(
        status="queued", mode=None, num_tokens=None, tokens_done=0, tokens_per_s=None
    )
    waiting = await service.upload()
    create = openai_client.chat.completions.create

    def caught(kind, **body):
        with pytest.raises(kind) as info:
            create(**body)
        assert info.value.body["message"]
        return info.value.code

    def fail():
        assert caught(openai.NotFoundError, **chat() | {"model": "gpt-9"}) == "model_not_found"
        assert caught(openai.BadRequestError, **chat(temperature=3)) == "invalid_value"
        assert caught(openai.BadRequestError, **chat(n=2)) == "invalid_value"
        part = [{"type": "file", "file": {"file_id": waiting}}, {"type": "text", "text": "q"}]
        assert caught(openai.ConflictError, **chat(part)) == "document_not_ready"
        service.backend.script = [OverloadedError("Busy.", retry_after_s=1)]
        assert caught(openai.RateLimitError, **chat()) == "overloaded"
        service.backend.script = [ContextTooLongError("Too long.", limit=1, actual=2)]
        assert caught(openai.BadRequestError, **chat()) == "context_length_exceeded"
        service.backend.script = [RuntimeError("secret")]
        assert caught(openai.InternalServerError, **chat()) == "internal"

    await asyncio.to_thread(fail)


async def test_the_openai_package_sees_a_broken_stream_as_an_error(service, openai_client):
    service.backend.script = ["Mr. ", EngineError("The step failed.")]

    def read():
        stream = openai_client.chat.completions.create(**chat(stream=True))
        received = [next(stream).choices[0].delta.content for _ in range(2)]
        with pytest.raises(openai.APIError, match="The step failed"):
            next(stream)
        return received

    assert await asyncio.to_thread(read) == ["", "Mr. "]


async def test_done_is_sent_only_after_a_complete_stream(service, sse_events):
    whole = await service.client.post(CHAT, json=chat(stream=True))
    assert sse_events(whole.text)[-1] == (None, "[DONE]")
    service.backend.script = ["Mr. ", EngineError("The step failed.", phase="decode")]
    broken = await service.client.post(CHAT, json=chat(stream=True))
    assert "[DONE]" not in broken.text
    error = sse_events(broken.text)[-1][1]["error"]
    assert (error["code"], error["phase"]) == ("engine_error", "decode")


async def test_without_include_usage_no_chunk_has_a_usage(service, sse_events):
    response = await service.client.post(CHAT, json=chat(stream=True))
    assert all("usage" not in data for _, data in sse_events(response.text)[:-1])


async def test_sampling_and_stop_reach_the_backend(service):
    body = chat(max_completion_tokens=9, temperature=0.7, top_p=0.8, seed=4, stop="\nUser:")
    assert (await service.client.post(CHAT, json=body)).status_code == 200
    sampling = service.backend.requests[0].sampling
    assert (sampling.max_tokens, sampling.temperature, sampling.top_p) == (9, 0.7, 0.8)
    assert (sampling.seed, sampling.stop) == (4, ("\nUser:",))
    assert (await service.client.post(CHAT, json=chat(stop=["a", "b"]))).status_code == 200
    assert service.backend.requests[1].sampling.stop == ("a", "b")


async def test_messages_become_turns_with_instructions_first(service):
    messages = [
        {"role": "system", "content": "One."},
        {"role": "developer", "content": [{"type": "text", "text": "Two."}]},
        {"role": "user", "content": "Q1"},
        {"role": "user", "content": "Q1b", "name": "me"},
        {"role": "assistant", "content": "A1", "refusal": None, "tool_calls": None, "audio": None},
        {
            "role": "user",
            "content": [{"type": "text", "text": "Q2"}, {"type": "text", "text": "more"}],
        },
    ]
    response = await service.client.post(CHAT, json=chat() | {"messages": messages})
    assert response.status_code == 200, response.text
    assert service.backend.requests[0].messages == (
        Message(role="system", content="One."),
        Message(role="system", content="Two."),
        Message(role="user", content="Q1\n\nQ1b"),
        Message(role="assistant", content="A1"),
        Message(role="user", content="Q2\nmore"),
    )


async def test_a_document_and_its_question_may_come_as_two_messages_and_twice(service):
    document_id = await service.upload()
    part = {"type": "file", "file": {"file_id": document_id}}
    messages = [
        {"role": "user", "content": [part, part]},
        {"role": "user", "content": "Who?"},
    ]
    response = await service.client.post(CHAT, json=chat() | {"messages": messages})
    assert response.status_code == 200, response.text
    (request,) = service.backend.requests
    assert [document.document_id for document in request.documents] == [document_id]
    assert request.messages == (Message(role="user", content="Who?"),)


@pytest.mark.parametrize(
    ("messages", "param"),
    [
        ([], "messages"),
        ([{"role": "system", "content": "only"}], "messages"),
        ([{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}], "messages"),
        ([{"role": "user", "content": ""}], "messages"),
        ([{"role": "user", "content": " \n"}], "messages"),
        ([{"role": "user"}], "messages.0.content"),
        ([{"role": "user", "content": []}], "messages.0.content"),
        ([{"role": "user", "content": 5}], "messages.0.content"),
        ([{"role": "tool", "content": "x", "tool_call_id": "1"}], "messages.0"),
        ([{"content": "x"}], "messages.0"),
        (["x"], "messages.0"),
        (
            [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}],
            "messages.0.content.0",
        ),
        (
            [{"role": "user", "content": [{"type": "file", "file": {"file_data": "QQ=="}}]}],
            "messages.0.content.0.file",
        ),
        ([{"role": "user", "content": [{"type": "file", "file": {}}]}], "messages.0.content.0"),
        (
            [{"role": "user", "content": "q"}, {"role": "system", "content": "late"}],
            "messages.1.role",
        ),
        (
            [
                {"role": "system", "content": [{"type": "file", "file": {"file_id": "doc_1"}}]},
                {"role": "user", "content": "q"},
            ],
            "messages.0.content",
        ),
        (
            [
                {"role": "user", "content": "q"},
                {"role": "assistant", "content": "", "tool_calls": [{"id": "1"}]},
                {"role": "user", "content": "q"},
            ],
            "messages.1.tool_calls",
        ),
    ],
)
async def test_messages_of_another_shape_are_refused_with_their_place(service, messages, param):
    response = await service.client.post(CHAT, json=chat() | {"messages": messages})
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert (error["type"], error["code"]) == ("invalid_request_error", "invalid_value")
    assert error["param"].startswith(param)


async def test_an_unknown_document_or_model_is_a_404_in_openai_s_shape(service):
    part = [{"type": "file", "file": {"file_id": "doc_no"}}, {"type": "text", "text": "q"}]
    for response, code in (
        (await service.client.post(CHAT, json=chat(part)), "not_found"),
        (await service.client.post(CHAT, json=chat() | {"model": "other"}), "model_not_found"),
        (await service.client.get("/v1/models/some/other"), "model_not_found"),
    ):
        assert response.status_code == 404
        error = response.json()["error"]
        assert (error["type"], error["code"]) == ("invalid_request_error", code)


@pytest.mark.parametrize(
    ("answer", "content"),
    [
        ({"content": None}, ""),
        ({}, ""),
        ({"content": None, "refusal": "I cannot."}, "I cannot."),
        ({"content": "", "refusal": "I cannot."}, "I cannot."),
        ({"content": None, "tool_calls": [], "function_call": None, "annotations": []}, ""),
    ],
)
async def test_an_earlier_answer_may_have_no_content(service, answer, content):
    messages = [
        {"role": "user", "content": "q"},
        {"role": "assistant", **answer},
        {"role": "user", "content": "and?"},
    ]
    response = await service.client.post(CHAT, json=chat() | {"messages": messages})
    assert response.status_code == 200, response.text
    (request,) = service.backend.requests
    assert request.messages[1] == Message(role="assistant", content=content)


@pytest.mark.parametrize("role", ["user", "system"])
async def test_other_messages_need_content(service, role):
    messages = [{"role": role, "content": None}, {"role": "user", "content": "q"}]
    response = await service.client.post(CHAT, json=chat() | {"messages": messages})
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "messages.0.content"


@pytest.mark.parametrize("name", ["tool_calls", "function_call"])
async def test_tool_calls_of_an_earlier_answer_are_refused_in_words(service, name):
    messages = [
        {"role": "user", "content": "q"},
        {"role": "assistant", "content": None, name: [{"id": "1", "type": "function"}]},
        {"role": "user", "content": "q"},
    ]
    response = await service.client.post(CHAT, json=chat() | {"messages": messages})
    assert response.status_code == 400
    error = response.json()["error"]
    assert error["param"] == f"messages.1.{name}"
    assert "not supported" in error["message"]
