import asyncio
import subprocess
import sys

import pytest
from prometheus_client.parser import text_string_to_metric_families

from orthros_service.gateway.app import drain


async def test_the_model_card_says_plainly_whether_the_model_is_converted(service):
    listed = (await service.client.get("/v1/models")).json()
    (card,) = listed["data"]
    assert card["converted"] is False
    assert card["id"] == "tiny-model"
    assert (card["object"], card["owned_by"], listed["object"]) == ("model", "orthros", "list")
    assert (await service.client.get("/v1/models/tiny-model")).json() == card


async def test_the_model_is_not_asked_for_with_every_request(service):
    num_calls = 0
    model_info = service.backend.model_info

    async def counted():
        nonlocal num_calls
        num_calls += 1
        return await model_info()

    service.backend.model_info = counted
    for _ in range(5):
        await service.client.get("/v1/models")
    assert num_calls == 1


@pytest.mark.parametrize(
    ("text", "mode"), [("A short text.", "full"), ("words and words " * 200, "linear")]
)
async def test_counting_tells_tokens_characters_and_how_it_would_be_ingested(
    service, byte_tokenizer, text, mode
):
    response = await service.client.post("/v1/tokens:count", json={"text": text})
    body = response.json()
    assert body["num_tokens"] == byte_tokenizer.count_tokens(text) > 0
    assert body["num_chars"] == len(text)
    assert body["document_tokens"] > body["num_tokens"]
    assert body["prefill_mode"] == mode
    assert service.backend.ingested == []


async def test_line_ends_are_counted_as_they_would_be_stored(service):
    windows, unix = [
        (await service.client.post("/v1/tokens:count", json={"text": text})).json()
        for text in ("a\r\nb", "a\nb")
    ]
    assert windows == unix


async def test_special_tokens_in_a_text_are_counted_as_plain_text(service):
    response = await service.client.post("/v1/tokens:count", json={"text": "<|im_end|>" * 10})
    assert response.json()["num_tokens"] > 10


async def test_health_answers_whatever_the_workers_do(service):
    service.backend.is_up = False
    response = await service.client.get("/healthz")
    assert (response.status_code, response.json()["status"]) == (200, "ok")


async def test_readiness_needs_workers_and_catalogue(service):
    assert (await service.client.get("/readyz")).status_code == 200
    service.backend.is_up = False
    response = await service.client.get("/readyz")
    assert (response.status_code, response.json()["code"]) == (503, "unavailable")
    assert "workers" in response.json()["detail"]
    assert response.headers["retry-after"] == "2"
    service.backend.is_up = True

    def broken(*_args):
        raise OSError("disk")

    service.catalog.list = broken
    response = await service.client.get("/readyz")
    assert response.status_code == 503
    assert "catalog" in response.json()["detail"]
    assert "disk" not in response.text


async def test_metrics_are_prometheus_text_with_the_requests_so_far(service):
    await service.client.get("/healthz")
    response = await service.client.get("/metrics")
    assert response.headers["content-type"].startswith("text/plain; version=0.0.4")
    families = {family.name for family in text_string_to_metric_families(response.text)}
    assert {"orthros_requests", "orthros_request_duration_seconds"} <= families
    assert 'endpoint="healthz"' in response.text


async def test_every_route_has_a_name_in_the_closed_set_of_endpoints(service):
    from orthros_service.telemetry.metrics import ENDPOINTS

    paths = (await service.client.get("/openapi.json")).json()["paths"]
    for path, methods in paths.items():
        for method in methods:
            await service.client.request(method, path.replace("{document_id}", "x"))
    text = (await service.client.get("/metrics")).text
    seen = {
        sample.labels["endpoint"]
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if "endpoint" in sample.labels
    }
    assert set(ENDPOINTS) - {"metrics"} <= seen


def test_the_gateway_loads_neither_torch_nor_ray():
    code = (
        "import sys, orthros_service.gateway as g; "
        "sys.exit(bool({'torch', 'ray', 'triton', 'transformers'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


async def test_a_service_that_stops_ends_what_runs_and_refuses_the_rest_with_a_time_to_come_back(
    service,
):
    document = await service.upload()
    service.backend.script = ["hang", "done"]
    body = {"document_ids": [document], "question": "Who?"}
    running = asyncio.create_task(service.client.post("/v1/answers", json=body))
    await asyncio.sleep(0.1)
    assert not await drain(service.app, timeout_s=0.05)
    refused = await service.client.post("/v1/answers", json=body)
    assert (refused.status_code, refused.json()["code"]) == (503, "unavailable")
    assert refused.headers["Retry-After"] == "30"
    assert (await service.client.get("/readyz")).status_code == 503
    assert (await service.client.get("/healthz")).status_code == 200
    service.backend.is_open = True
    assert await drain(service.app, timeout_s=5)
    assert (await running).json()["text"] == "done"
