"""From a finished generation to what is sent: checked citations, usage, timings, warnings."""

import logging
from collections.abc import Iterator
from typing import Literal

from orthros_client.types import Answer, Citation, TimingsInfo, Usage
from orthros_service.gateway.generation import Generation
from orthros_service.telemetry import MetricsSink
from orthros_service.types import DocumentText, EvidenceSpan, GenerationFinished, ModelInfo

logger = logging.getLogger(__name__)

_NOT_CONVERTED = (
    "The served model is not converted for linear prefill (converted: false) and a document was "
    "prefilled linearly, so the answer may miss what the document says."
)


def build_answer(
    generation: Generation,
    finished: GenerationFinished,
    *,
    kind: Literal["answer", "summary"],
    model: ModelInfo,
    total_s: float,
    metrics: MetricsSink,
) -> Answer:
    """Return the answer as it is sent."""
    job = generation.job
    timings = finished.timings
    return Answer(
        id=job.generation_id,
        object=kind,
        model=model.name,
        converted=model.is_converted,
        text=finished.text,
        finish_reason=finished.finish_reason,
        citations=(
            checked_citations(finished, job.documents, metrics=metrics)
            if job.wants_citations
            else []
        ),
        usage=Usage(
            document_tokens=finished.document_tokens,
            prompt_tokens=finished.prompt_tokens,
            completion_tokens=finished.completion_tokens,
            max_tokens=finished.max_tokens,
        ),
        timings=TimingsInfo(
            queue_s=timings.queue_s + generation.queue_s,
            prefill_s=timings.prefill_s,
            handoff_s=timings.handoff_s,
            first_token_s=timings.first_token_s,
            decode_s=timings.decode_s,
            total_s=total_s,
        ),
        warnings=list(warnings_of(generation, finished, model)),
    )


def warnings_of(
    generation: Generation, finished: GenerationFinished, model: ModelInfo
) -> Iterator[str]:
    """Yield what the caller should know of how the answer came about."""
    if finished.is_linear and not model.is_converted:
        yield _NOT_CONVERTED
    asked = generation.job.sampling.max_tokens
    if finished.max_tokens < asked:
        yield f"max_tokens was lowered from {asked} to {finished.max_tokens}, which is what fits."


def checked_citations(
    finished: GenerationFinished, documents: tuple[DocumentText, ...], *, metrics: MetricsSink
) -> list[Citation]:
    """Turn evidence into citations; what does not match the stored text is dropped and counted."""
    citations = []
    for span in finished.evidence:
        citation = _citation(span, finished.text, documents)
        verdict = "dropped" if citation is None else "exact"
        metrics.increment("orthros_citations_total", verdict=verdict)
        if citation is None:
            logger.warning("a citation did not match its document and was dropped")
        else:
            citations.append(citation)
    return citations


def _citation(
    span: EvidenceSpan, answer: str, documents: tuple[DocumentText, ...]
) -> Citation | None:
    if not 0 <= span.document_index < len(documents):
        return None
    document = documents[span.document_index]
    if not 0 <= span.start_char < span.end_char <= len(document.text):
        return None
    if not 0 <= span.answer_start < span.answer_end <= len(answer):
        return None
    quote = document.text[span.start_char : span.end_char]
    if not quote.strip():
        return None
    return Citation(
        document_id=document.document_id,
        start_char=span.start_char,
        end_char=span.end_char,
        quote=quote,
        answer_start=span.answer_start,
        answer_end=span.answer_end,
        score=span.score,
    )
