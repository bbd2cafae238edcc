import asyncio

import pytest

TEXT = "Mr. Darcy owns Pemberley. Mr. Bingley rents Netherfield."


@pytest.mark.parametrize("is_streamed", [False, True])
async def test_the_backend_is_told_whether_text_is_delivered_as_it_comes(service, is_streamed):
    body = {"text": TEXT, "question": "Who?", "stream": is_streamed}
    await service.client.post("/v1/answers", json=body)
    assert [request.is_streamed for request in service.backend.requests] == [is_streamed]


@pytest.mark.parametrize("script", [["hang"], ["Mr. ", "hang"]])
async def test_a_deadline_that_passed_is_a_warning_without_a_traceback(service, caplog, script):
    service.backend.script = script
    body = {"text": TEXT, "question": "Who?", "deadline_s": 0.05, "stream": True}
    response = await service.client.post("/v1/answers", json=body)
    assert "deadline_exceeded" in response.text
    (record,) = [record for record in caplog.records if record.levelname in ("WARNING", "ERROR")]
    assert (record.levelname, record.exc_info) == ("WARNING", None)
    assert record.getMessage().endswith("failed: deadline_exceeded")


async def test_a_deadline_ends_a_hanging_generation_and_cancels_it(service):
    service.backend.script = ["hang"]
    started = asyncio.get_running_loop().time()
    response = await service.client.post(
        "/v1/answers", json={"text": TEXT, "question": "Who?", "deadline_s": 0.05}
    )
    assert (response.status_code, response.json()["code"]) == (504, "deadline_exceeded")
    assert response.json()["phase"] == "prefill"
    assert asyncio.get_running_loop().time() - started < 10
    assert service.backend.num_active == 0
