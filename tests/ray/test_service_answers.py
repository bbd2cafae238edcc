"""The main job on the real deployments: ingest, watch, ask, compose, delete."""

import asyncio
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from orthros_service.citations import select_evidence
from orthros_service.documents import content_key, normalize_text
from orthros_service.ingest import Ingestor
from orthros_service.pipeline import Pipeline, PromptLimits, PromptPlanner
from orthros_service.settings import (
    DecodeSettings,
    ModelSettings,
    PrefillSettings,
    Settings,
    StateSettings,
)
from orthros_service.state.store import StateStore
from orthros_service.state.transport import LocalTransport
from orthros_service.tokenization import PromptFormat
from orthros_service.tokenization.stream import TextStream
from orthros_service.types import (
    DocumentText,
    GenerationFinished,
    GenerationRequest,
    Message,
    SamplingParameters,
)

pytestmark = [pytest.mark.ray, pytest.mark.timeout(180), pytest.mark.filterwarnings("ignore")]

SHORT = "The keeper of the light wrote in the log every night. The sea answered. " * 6
LONG = "A ship came in from the north with salt and letters, and left before dawn. " * 40
QUESTION = "Who wrote, and where?"


async def _answer_in_process(model: Path, texts: list[str], folder: Path) -> str:
    """The same request without Ray: one process, the same engines."""
    from orthros_service.engine.decode import DecodeEngine
    from orthros_service.engine.local import LocalDecodeWorker, LocalPrefillWorker
    from orthros_service.engine.prefill import PrefillEngine
    from orthros_service.engine.served_model import load_served_model

    class NoRecorder:
        def record(self, content_key, progress):
            pass

    settings = Settings(
        model=ModelSettings(directory=model, dtype="float32", num_threads=1),
        prefill=PrefillSettings(segment_tokens=64),
    )
    served = load_served_model(settings, for_decode=True)
    prompt_format, transport = PromptFormat(served.tokenizer), LocalTransport()
    engine = DecodeEngine(
        served.loaded, served.layout, new_stream=lambda: TextStream(served.tokenizer)
    )
    with ThreadPoolExecutor(1) as executor:
        ingestor = Ingestor(
            prompt_format=prompt_format,
            worker=LocalPrefillWorker(PrefillEngine(served.loaded, served.layout), executor),
            store=StateStore(settings=StateSettings(uri=str(folder)), transport=transport),
            transport=transport,
            layout=served.layout,
            full_prefill_max_tokens=served.info.full_prefill_max_tokens,
            max_context_tokens=served.info.max_context_tokens,
            max_document_tokens=100_000,
            settings=settings.prefill,
            recorder=NoRecorder(),
        )
        worker = LocalDecodeWorker(
            engine, transport=transport, layout=served.layout, settings=DecodeSettings()
        )
        limits = PromptLimits(
            full_prefill_max_tokens=served.info.full_prefill_max_tokens,
            max_context_tokens=served.info.max_context_tokens,
            max_tail_tokens=8192,
            tile=served.loaded.orthros.tile,
        )
        pipeline = Pipeline(
            coordinator=ingestor,
            decoder=worker,
            planner=PromptPlanner(prompt_format, limits),
            select_evidence=select_evidence,
            model=served.info,
            stop_ids=served.tokenizer.stop_ids,
        )
        request = GenerationRequest(
            request_id="local",
            documents=tuple(
                DocumentText(content_key=content_key(text, "auto"), text=text)
                for text in map(normalize_text, texts)
            ),
            messages=(Message(role="user", content=QUESTION),),
            sampling=SamplingParameters(max_tokens=40),
        )
        events = [event async for event in pipeline.generate(request)]
        await worker.close()
        await ingestor.close()
    assert isinstance(events[-1], GenerationFinished)
    return events[-1].text


def test_a_document_is_ingested_step_by_step_and_then_ready(service):
    document_id = service.upload(LONG, title="Ships")
    events = service.events(document_id)
    done = [event["prefill"]["tokens_done"] for event in events]
    assert events[-1]["status"] == "ready"
    assert done == sorted(done)
    assert done[-1] == events[-1]["num_tokens"] > 2048
    assert events[-1]["prefill"]["mode"] == "linear"
    assert service.http.get(f"/v1/documents/{document_id}").json() == events[-1]


@pytest.mark.parametrize(
    "texts", [[SHORT], [LONG], [SHORT, LONG]], ids=["full", "linear", "composed"]
)
def test_the_deployments_answer_what_one_process_answers(service, tiny_model, tmp_path, texts):
    documents = [service.ready(text) for text in texts]
    expected = asyncio.run(_answer_in_process(tiny_model, texts, tmp_path))
    answer = service.ask(*documents, question=QUESTION, max_tokens=40)
    assert answer.status_code == 200, answer.text
    assert answer.json()["text"] == expected
    assert len(expected) > 10


def test_a_stream_holds_the_same_text_as_the_plain_answer_and_ends_completed(service):
    document = service.ready(SHORT)
    plain = service.ask(document, max_tokens=30).json()
    with service.streaming(document, max_tokens=30) as events:
        streamed = list(events)
    names = [name for name, _ in streamed]
    assert names[-1] == "completed"
    assert set(names[:-1]) == {"delta"}
    assert "".join(data["text"] for name, data in streamed if name == "delta") == plain["text"]
    assert streamed[-1][1]["text"] == plain["text"]


def test_citations_are_slices_of_the_stored_text(service):
    document = service.ready(SHORT)
    answer = service.ask(document, citations=True).json()
    text = normalize_text(SHORT)
    assert answer["citations"]
    for citation in answer["citations"]:
        assert citation["document_id"] == document
        assert citation["quote"] == text[citation["start_char"] : citation["end_char"]]


def test_a_deleted_document_is_gone_from_catalogue_and_tiers(service):
    document = service.ready("Only here. " * 30)
    states = service.home / "states"
    before = {path.name for path in states.rglob("*") if path.is_dir()}
    assert service.http.delete(f"/v1/documents/{document}").status_code in (200, 204)
    assert service.ask(document).status_code == 404
    after = {path.name for path in states.rglob("*") if path.is_dir()}
    assert after < before


def test_a_process_of_the_cluster_can_use_the_workers_without_http(service, cluster_of_service):
    from orthros_deployments.backend import connect_backend

    text = normalize_text(SHORT)
    request = GenerationRequest(
        request_id="driver",
        documents=(DocumentText(content_key=content_key(text, "auto"), text=text),),
        messages=(Message(role="user", content=QUESTION),),
        sampling=SamplingParameters(max_tokens=12),
    )

    async def ask():
        backend = connect_backend()
        assert await backend.is_ready()
        model = await backend.model_info()
        return model, [event async for event in backend.generate(request)]

    model, events = asyncio.run(ask())
    over_http = service.ask(service.ready(SHORT), question=QUESTION).json()
    assert model.name == "tiny"
    assert model.full_prefill_max_tokens == 1024
    assert events[-1].text == over_http["text"]


def test_an_unknown_application_is_refused_by_name(cluster_of_service):
    from orthros_deployments.backend import connect_backend
    from orthros_service.errors import UnavailableError

    with pytest.raises(UnavailableError, match="'nobody'"):
        connect_backend("nobody")
