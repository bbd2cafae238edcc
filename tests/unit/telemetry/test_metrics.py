import re

import pytest
from prometheus_client.parser import text_string_to_metric_families

from orthros_service import errors
from orthros_service.telemetry import METRICS, MetricSpec, PrometheusMetrics
from orthros_service.telemetry.metrics import CODES


@pytest.mark.parametrize("spec", METRICS, ids=lambda spec: spec.name)
def test_a_metric_is_named_and_declared_by_the_rules(spec: MetricSpec) -> None:
    assert re.fullmatch(r"orthros_[a-z0-9_]+", spec.name)
    assert spec.help.endswith(".")
    assert (spec.kind == "counter") == spec.name.endswith("_total")
    assert (spec.kind == "histogram") == bool(spec.buckets)
    assert all(bound > 0 for bound in spec.buckets)
    assert list(spec.buckets) == sorted(set(spec.buckets))
    for name, values in spec.labels.items():
        assert not name.endswith("id")
        assert len(values) == len(set(values)) > 1


def test_names_are_unique() -> None:
    assert len({spec.name for spec in METRICS}) == len(METRICS)


def _codes(error: type[errors.OrthrosError]) -> set[str]:
    return {error.code}.union(*(_codes(child) for child in error.__subclasses__()))


def test_every_error_code_of_the_service_is_a_label_value() -> None:
    assert _codes(errors.OrthrosError) <= set(CODES)


def test_recorded_values_appear_in_the_rendered_text() -> None:
    metrics = PrometheusMetrics()
    metrics.increment("orthros_generated_tokens_total", 5)
    metrics.increment("orthros_generated_tokens_total", 2)
    metrics.set("orthros_queue_depth", 3)
    metrics.observe("orthros_request_phase_seconds", 0.5, phase="decode")
    samples = {
        (sample.name, sample.labels.get("phase"), sample.labels.get("le")): sample.value
        for family in text_string_to_metric_families(metrics.render())
        for sample in family.samples
    }
    assert samples["orthros_generated_tokens_total", None, None] == 7
    assert samples["orthros_queue_depth", None, None] == 3
    assert samples["orthros_request_phase_seconds_count", "decode", None] == 1
    assert samples["orthros_request_phase_seconds_bucket", "decode", "0.25"] == 0
    assert samples["orthros_request_phase_seconds_bucket", "decode", "0.5"] == 1


def test_a_label_value_outside_its_set_is_recorded_as_other() -> None:
    metrics = PrometheusMetrics()
    metrics.observe("orthros_request_duration_seconds", 1, endpoint="/v1/documents/doc_42")
    assert "doc_42" not in metrics.render()
    assert 'orthros_request_duration_seconds_count{endpoint="other"} 1.0' in metrics.render()


def test_an_undeclared_metric_a_wrong_kind_and_wrong_labels_are_refused() -> None:
    metrics = PrometheusMetrics()
    with pytest.raises(ValueError, match="declare it"):
        metrics.increment("orthros_surprises_total")
    with pytest.raises(ValueError, match="no gauge"):
        metrics.set("orthros_generated_tokens_total", 1)
    with pytest.raises(ValueError, match="takes the labels"):
        metrics.observe("orthros_request_phase_seconds", 1, request_id="x")


def test_two_instances_share_nothing() -> None:
    one, other = PrometheusMetrics(), PrometheusMetrics()
    one.set("orthros_queue_depth", 9)
    assert "orthros_queue_depth 0.0" in other.render()
