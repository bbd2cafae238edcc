"""What callers see when workers die, clients leave or work is impossible: an end, always."""

import contextlib
import threading

import pytest

pytestmark = [pytest.mark.ray, pytest.mark.timeout(180), pytest.mark.filterwarnings("ignore")]

ENDLESS = 6000
TEXT = "The harbour lay quiet under snow while the lamps burned low and blue. "


def _decoding(service) -> int:
    from ray import serve

    handle = serve.get_deployment_handle("Decode", "orthros")
    return handle.num_sequences.remote().result(timeout_s=30)


def test_a_document_becomes_ready_though_its_prefill_worker_is_killed(
    service, eventually, cluster_of_service
):
    document = service.upload(TEXT * 400)
    eventually(lambda: service.document(document)["prefill"]["tokens_done"] > 0)
    service.kill("Prefill")
    assert service.document(document)["status"] == "ingesting"
    last = service.events(document)[-1]
    assert last["status"] == "ready", last
    assert service.ask(document).status_code == 200


def test_a_stream_whose_decode_worker_is_killed_ends_with_a_retryable_error(
    service, cluster_of_service
):
    document = service.ready(TEXT * 4)
    expected = service.ask(document).json()["text"]
    events = []
    with service.streaming(document, max_tokens=ENDLESS) as stream:
        events.append(next(stream))
        service.kill("Decode")
        events += list(stream)
    name, problem = events[-1]
    assert name == "error"
    assert problem["code"] == "unavailable"
    assert problem["retryable"] is True
    assert problem["phase"] == "decode"
    assert "completed" not in [each for each, _ in events]
    # The next request waits for the new worker.
    assert service.ask(document).json()["text"] == expected


def test_documents_stay_ready_when_the_coordinator_is_killed(service):
    document = service.ready(TEXT * 5)
    expected = service.ask(document).json()["text"]
    service.kill("Coordinator")
    answer = service.ask(document)
    assert answer.status_code == 200, answer.text
    assert answer.json()["text"] == expected


def test_an_ingestion_goes_on_when_the_coordinator_is_killed(service, eventually):
    document = service.upload(TEXT * 401)
    eventually(lambda: service.document(document)["prefill"]["tokens_done"] > 1000)
    service.kill("Coordinator")
    assert service.document(document)["status"] == "ingesting"
    assert service.events(document)[-1]["status"] == "ready"


def test_clients_that_leave_free_their_sequences(service, eventually, cluster_of_service):
    document = service.ready(TEXT * 4)
    assert _decoding(service) == 0
    streams = [service.streaming(document, max_tokens=ENDLESS) for _ in range(30)]
    entered = [stream.__enter__() for stream in streams]
    for events in entered:
        next(events)
    assert _decoding(service) == len(streams)
    leaving = [threading.Thread(target=s.__exit__, args=(None, None, None)) for s in streams]
    for thread in leaving:
        thread.start()
    for thread in leaving:
        thread.join()
    eventually(lambda: _decoding(service) == 0, 5)


def test_an_answer_that_nobody_waits_for_any_more_is_stopped(
    service, eventually, cluster_of_service
):
    import httpx

    document = service.ready(TEXT * 4)
    with pytest.raises(httpx.ReadTimeout):
        service.ask(document, max_tokens=ENDLESS, timeout=1.0)
    eventually(lambda: _decoding(service) == 0, 5)


def test_a_deadline_ends_an_answer(service, eventually, cluster_of_service):
    document = service.ready(TEXT * 4)
    answer = service.ask(document, max_tokens=ENDLESS, deadline_s=0.5)
    assert answer.status_code == 504
    assert answer.json()["code"] == "deadline_exceeded"
    eventually(lambda: _decoding(service) == 0, 5)


def test_errors_of_the_workers_keep_their_kind_across_the_cluster(service, cluster_of_service):
    import asyncio

    from orthros_deployments.backend import connect_backend
    from orthros_service.errors import EmptyDocumentError
    from orthros_service.types import DocumentText, GenerationRequest, Message, SamplingParameters

    async def ingest_nothing():
        document = DocumentText(content_key="0" * 64, text="  ")
        request = GenerationRequest(
            request_id="nothing",
            documents=(document,),
            messages=(Message(role="user", content="What?"),),
            sampling=SamplingParameters(),
            deadline_s=20,
        )
        async for _ in connect_backend().generate(request):
            pass

    with pytest.raises(EmptyDocumentError) as caught:
        asyncio.run(ingest_nothing())
    assert type(caught.value) is EmptyDocumentError
    assert caught.value.phase == "prefill"


def test_a_state_whose_segments_are_lost_is_dropped_and_the_request_may_be_repeated(
    service, cluster_of_service
):
    import asyncio
    from dataclasses import replace

    from ray import serve

    from orthros_deployments.ports import CoordinatorReplica, DecodeReplicas
    from orthros_service.documents import content_key
    from orthros_service.engine.types import DecodeWork
    from orthros_service.errors import UnavailableError
    from orthros_service.types import DocumentText, SamplingParameters

    text = "Lost and found. " * 40
    source = DocumentText(content_key=content_key(text, "auto"), text=text)
    forgotten = []

    async def ask_over_a_lost_segment():
        coordinator = CoordinatorReplica(serve.get_deployment_handle("Coordinator", "orthros"))
        handle = await coordinator.wait_ready(source, timeout_s=20)

        async def forget(key):
            forgotten.append(key)
            await coordinator.forget(key)

        decoder = DecodeReplicas(serve.get_deployment_handle("Decode", "orthros"), forget=forget)
        lost = replace(handle, segments=(*handle.segments[:-1], "no reference"))
        work = DecodeWork(
            request_id="lost",
            documents=(lost,),
            tail_ids=(5,),
            sampling=SamplingParameters(max_tokens=3),
            stop_ids=frozenset(),
        )
        with pytest.raises(UnavailableError) as caught:
            await anext(decoder.generate(work))
        work = replace(work, documents=(await coordinator.wait_ready(source, timeout_s=20),))
        return caught.value, [output async for output in decoder.generate(work)]

    error, outputs = asyncio.run(ask_over_a_lost_segment())
    assert error.phase == "handoff"
    assert forgotten == [source.content_key]
    assert outputs[-1].completion_tokens == 3


def test_work_of_a_gateway_that_is_killed_is_freed(service, eventually, cluster_of_service):
    import httpx

    document = service.ready(TEXT * 4)
    clients = [
        threading.Thread(target=_ignore_loss, args=(httpx, service, body))
        for body in (
            {"document_ids": [document], "max_tokens": ENDLESS},
            {"text": TEXT * 3000, "max_tokens": 4},
        )
    ]
    for client in clients:
        client.start()
    eventually(lambda: _decoding(service) == 1 and _value(service, "orthros_ingestions_running"))
    service.kill("Gateway")
    for client in clients:
        client.join()
    eventually(lambda: _decoding(service) == 0, 40)
    eventually(lambda: not _value(service, "orthros_ingestions_running"), 40)
    assert not _value(service, "orthros_decode_sequences")
    assert not _value(service, "orthros_pending_prefill_tokens")


def _ignore_loss(httpx, service, body):
    with contextlib.suppress(httpx.HTTPError):
        httpx.post(f"{service.url}/v1/answers", json={"question": "What?", **body}, trust_env=False)


def _value(service, name: str) -> float:
    page = service.http.get("/metrics").text
    lines = [line for line in page.splitlines() if line.startswith((f"{name} ", f"{name}{{"))]
    return sum(float(line.split()[-1]) for line in lines)
