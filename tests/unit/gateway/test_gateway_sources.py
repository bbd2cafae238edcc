"""What is asked, and what the answer points at: documents, inline texts, citations, warnings."""

import pytest

from orthros_service.types import EvidenceSpan, IngestProgress

TEXT = "Mr. Darcy owns Pemberley. Mr. Bingley rents Netherfield."


async def test_a_document_that_is_not_ready_is_a_409_with_progress_and_a_time_to_come_back(
    service,
):
    service.backend.progress = IngestProgress(
        status="ingesting", mode="linear", num_tokens=10_000, tokens_done=4_000, tokens_per_s=500.0
    )
    document_id = await service.upload(TEXT)
    response = await service.client.post(
        "/v1/answers", json={"document_ids": [document_id], "question": "Who?"}
    )
    assert response.status_code == 409
    problem = response.json()
    assert problem["code"] == "document_not_ready"
    assert problem["retryable"] is True
    assert (problem["tokens_done"], problem["tokens_total"]) == (4_000, 10_000)
    assert response.headers["retry-after"] == "12"
    assert service.backend.requests == []


async def test_a_failed_document_is_a_409_with_its_reason_that_is_not_retryable(service):
    service.backend.progress = IngestProgress(
        status="failed",
        mode=None,
        num_tokens=None,
        tokens_done=0,
        tokens_per_s=None,
        error_code="document_too_large",
        error_message="The document has 9 tokens; at most 5 are taken.",
    )
    document_id = await service.upload(TEXT)
    response = await service.client.post(
        "/v1/answers", json={"document_ids": [document_id], "question": "Who?"}
    )
    problem = response.json()
    assert (response.status_code, problem["code"]) == (409, "document_not_ready")
    assert "at most 5 are taken" in problem["detail"]
    assert problem["ingestion_code"] == "document_too_large"
    assert problem["retryable"] is False
    assert "retry-after" not in response.headers


@pytest.mark.parametrize("document_id", ["doc_000000000000000000000000", "../x", "é", "a" * 5000])
async def test_an_unknown_document_is_a_404(service, document_id):
    response = await service.client.post(
        "/v1/answers", json={"document_ids": [document_id], "question": "Who?"}
    )
    assert (response.status_code, response.json()["code"]) == (404, "not_found")
    assert len(response.text) < 1000


async def test_citations_quote_the_stored_text_and_wrong_ones_are_dropped_and_counted(service):
    def span(index=0, start=0, end=9, answer_start=0, answer_end=9):
        return EvidenceSpan(
            document_index=index,
            start_char=start,
            end_char=end,
            answer_start=answer_start,
            answer_end=answer_end,
            score=0.5,
        )

    wrong = [
        span(index=1),
        span(index=-1),
        span(end=10_000),
        span(start=-3),
        span(start=5, end=5),
        span(answer_end=500),
        span(start=3, end=4),
    ]
    service.backend.evidence = (span(), *wrong)
    document_id = await service.upload(TEXT)
    body = {"document_ids": [document_id], "question": "Who?"}
    response = await service.client.post("/v1/answers", json=body)
    assert response.json()["citations"] == [
        {
            "document_id": document_id,
            "start_char": 0,
            "end_char": 9,
            "quote": "Mr. Darcy",
            "answer_start": 0,
            "answer_end": 9,
            "score": 0.5,
        }
    ]
    assert service.metric("orthros_citations_total", verdict="exact") == 1
    assert service.metric("orthros_citations_total", verdict="dropped") == len(wrong)


async def test_citations_of_one_of_several_documents_name_it(service):
    first, second = await service.upload("First text."), await service.upload("Second text.")
    service.backend.evidence = (
        EvidenceSpan(
            document_index=1, start_char=0, end_char=6, answer_start=0, answer_end=3, score=1.0
        ),
    )
    response = await service.client.post(
        "/v1/answers", json={"document_ids": [first, second], "question": "Which?"}
    )
    (citation,) = response.json()["citations"]
    assert (citation["document_id"], citation["quote"]) == (second, "Second")


async def test_inline_text_goes_along_with_the_request_and_its_citations_have_no_document(service):
    service.backend.evidence = (
        EvidenceSpan(
            document_index=0, start_char=0, end_char=3, answer_start=0, answer_end=3, score=1.0
        ),
    )
    response = await service.client.post(
        "/v1/answers", json={"text": TEXT, "question": "Who?", "prefill_mode": "full"}
    )
    assert response.status_code == 200
    (document,) = service.backend.requests[0].documents
    assert (document.text, document.mode, document.document_id) == (TEXT, "full", None)
    (citation,) = response.json()["citations"]
    assert (citation["document_id"], citation["quote"]) == (None, "Mr.")
    listed = (await service.client.get("/v1/documents")).json()
    assert listed["data"] == []


@pytest.mark.parametrize("is_inline", [True, False])
async def test_a_linear_prefill_by_an_unconverted_model_is_told_as_a_warning(service, is_inline):
    service.backend.progress = IngestProgress(
        status="ready", mode="linear", num_tokens=500, tokens_done=500, tokens_per_s=9.0
    )
    source = {"text": TEXT} if is_inline else {"document_ids": [await service.upload(TEXT)]}
    response = await service.client.post("/v1/answers", json={**source, "question": "Who?"})
    (warning,) = response.json()["warnings"]
    assert "converted: false" in warning


async def test_a_clamped_max_tokens_is_told(service):
    service.backend.max_tokens = 90
    service.backend.finish_reason = "length"
    response = await service.client.post(
        "/v1/answers", json={"text": TEXT, "question": "Who?", "max_tokens": 500}
    )
    body = response.json()
    assert body["usage"]["max_tokens"] == 90
    assert body["finish_reason"] == "length"
    assert "from 500 to 90" in body["warnings"][0]
