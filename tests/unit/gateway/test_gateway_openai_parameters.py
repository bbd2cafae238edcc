"""Which of OpenAI's parameters are honoured, which are harmless, and which are refused."""

import pytest

CHAT = "/v1/chat/completions"


def chat(**more):
    return {"model": "tiny-model", "messages": [{"role": "user", "content": "hi"}], **more}


@pytest.mark.parametrize(
    "parameters",
    [
        {
            "user": "u",
            "metadata": {"a": "b"},
            "store": False,
            "service_tier": "auto",
            "parallel_tool_calls": True,
            "safety_identifier": "s",
            "prompt_cache_key": "k",
        },
        {
            "n": 1,
            "tools": [],
            "tool_choice": "none",
            "logprobs": False,
            "logit_bias": {},
            "presence_penalty": 0,
            "frequency_penalty": 0.0,
            "response_format": {"type": "text"},
            "modalities": ["text"],
        },
        {"n": None, "tools": None, "stop": None, "temperature": None, "stream_options": None},
        {"stop": None, "max_tokens": None, "seed": None, "stream": None},
    ],
)
async def test_parameters_that_change_nothing_are_accepted(service, parameters):
    response = await service.client.post(CHAT, json=chat(**parameters))
    assert response.status_code == 200, response.text


@pytest.mark.parametrize(
    ("parameter", "value"),
    [
        ("n", 2),
        ("n", 0),
        ("n", True),
        ("tools", [{"type": "function", "function": {"name": "f"}}]),
        ("tool_choice", "required"),
        ("functions", [{"name": "f"}]),
        ("logprobs", True),
        ("top_logprobs", 3),
        ("logit_bias", {"5": 1}),
        ("presence_penalty", 0.5),
        ("frequency_penalty", 1),
        ("response_format", {"type": "json_object"}),
        ("modalities", ["text", "audio"]),
        ("audio", {"voice": "a"}),
        ("prediction", {}),
        ("web_search_options", {}),
        ("reasoning_effort", "high"),
        ("unheard_of", 1),
        ("max_tokens", 0),
        ("max_completion_tokens", "5"),
        ("temperature", -0.1),
        ("top_p", 0),
        ("seed", -1),
        ("stop", [""]),
        ("stop", 5),
        ("stop", ["x"] * 17),
        ("stream", "yes"),
        ("stream_options", {"include_usage": True}),
        ("model", 5),
    ],
)
async def test_parameters_that_cannot_be_honoured_are_refused_by_name(service, parameter, value):
    response = await service.client.post(CHAT, json=chat() | {parameter: value})
    assert response.status_code == 400
    error = response.json()["error"]
    assert (error["type"], error["code"]) == ("invalid_request_error", "invalid_value")
    assert error["param"].split(".")[0] in (parameter, "body")
    assert parameter in error["message"]
    assert service.backend.requests == []


async def test_two_different_token_limits_are_refused(service):
    response = await service.client.post(CHAT, json=chat(max_tokens=5, max_completion_tokens=6))
    assert response.status_code == 400
    assert "max_completion_tokens" in response.json()["error"]["message"]
