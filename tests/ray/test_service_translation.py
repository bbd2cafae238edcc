"""What the Ray wiring does without a cluster: errors, metrics, sizes, settings of a file."""

import asyncio

import pytest

ray = pytest.importorskip("ray")
pytestmark = [pytest.mark.ray, pytest.mark.filterwarnings("ignore")]


def _remote(error):
    """As Ray raises it from a call: an instance of both classes."""
    return ray.exceptions.RayTaskError("step", "the traceback", error).as_instanceof_cause()


def test_a_remote_error_of_ours_comes_out_as_itself():
    from orthros_deployments.remote_errors import orthros_errors
    from orthros_service.errors import ContextTooLongError

    with pytest.raises(ContextTooLongError) as caught, orthros_errors("decode"):
        raise _remote(ContextTooLongError("Too long.", limit=3, actual=4))
    assert type(caught.value) is ContextTooLongError
    assert caught.value.details == {"limit": 3, "actual": 4}
    assert caught.value.phase is None


@pytest.mark.parametrize(
    ("make", "code", "is_retryable"),
    [
        (lambda e, s: e.ActorDiedError(), "unavailable", True),
        (lambda e, s: e.ActorUnavailableError("away", None), "unavailable", True),
        (lambda e, s: e.WorkerCrashedError(), "unavailable", True),
        (lambda e, s: e.OwnerDiedError("00" * 28, None, ""), "unavailable", True),
        (lambda e, s: e.GetTimeoutError("late"), "unavailable", True),
        (lambda e, s: e.ObjectLostError("00" * 28, None, ""), "state_error", False),
        (lambda e, s: e.ObjectStoreFullError("full"), "overloaded", True),
        (
            lambda e, s: s.BackPressureError(num_queued_requests=1, max_queued_requests=1),
            "overloaded",
            True,
        ),
        (lambda e, s: s.RequestCancelledError("r"), "cancelled", False),
        (lambda e, s: ValueError("a bug"), "engine_error", False),
        (lambda e, s: _remote(ValueError("a bug")), "engine_error", False),
        (lambda e, s: _remote(e.ActorDiedError()), "unavailable", True),
    ],
)
def test_every_failure_of_ray_has_a_code_and_a_phase(make, code, is_retryable):
    from ray.serve import exceptions as serve_errors

    from orthros_deployments.remote_errors import orthros_errors
    from orthros_service.errors import OrthrosError

    with pytest.raises(OrthrosError) as caught, orthros_errors("handoff"):
        raise make(ray.exceptions, serve_errors)
    assert (caught.value.code, caught.value.phase) == (code, "handoff")
    assert caught.value.is_retryable is is_retryable


def test_being_cancelled_is_no_error_to_translate():
    from orthros_deployments.remote_errors import orthros_errors

    with pytest.raises(asyncio.CancelledError), orthros_errors("decode"):
        raise asyncio.CancelledError


def test_pages_are_merged_under_their_replicas_and_unrecorded_zeros_are_left_out():
    from orthros_deployments.cluster_metrics import merge_pages
    from orthros_deployments.metrics import MetricsPage
    from orthros_service.telemetry import PrometheusMetrics

    pages = []
    for replica, amount in (("one", 2), ("two", 3)):
        metrics = PrometheusMetrics()
        metrics.increment("orthros_generated_tokens_total", amount)
        metrics.observe("orthros_inter_token_seconds", 0.003)
        pages.append(
            MetricsPage(
                deployment="Gateway",
                replica=replica,
                recorded=frozenset(
                    {"orthros_generated_tokens_total", "orthros_inter_token_seconds"}
                ),
                text=metrics.render(),
            )
        )
    merged = merge_pages(pages)
    where = 'deployment="Gateway",replica='
    assert f'orthros_generated_tokens_total{{{where}"one"}} 2.0' in merged
    assert f'orthros_generated_tokens_total{{{where}"two"}} 3.0' in merged
    assert f'orthros_inter_token_seconds_sum{{{where}"one"}} 0.003' in merged
    assert merged.count("# TYPE orthros_generated_tokens_total counter") == 1
    assert "orthros_prompt_tokens_total{" not in merged
    assert "_created" not in merged


def test_a_cluster_of_our_own_is_sized_by_its_settings():
    from orthros_deployments.machine import MIN_LOGICAL_CPUS, plan_cluster
    from orthros_service.settings import MIB, DeploymentSettings, Settings, StateSettings

    small = plan_cluster(Settings(state=StateSettings(memory_bytes=300 * MIB)))
    assert small.object_store_bytes == 450 * MIB
    assert small.num_cpus >= MIN_LOGICAL_CPUS
    assert "450 MiB" in small.reason
    wide = DeploymentSettings(num_decode_workers=30, object_store_bytes=200 * MIB)
    planned = plan_cluster(Settings(deployment=wide))
    assert planned.num_cpus >= 32
    assert planned.object_store_bytes == 200 * MIB
    huge = plan_cluster(Settings(state=StateSettings(memory_bytes=2**50)))
    assert huge.object_store_bytes < 2**45


def test_a_worker_computes_on_all_physical_cores_unless_told_otherwise():
    from orthros_deployments.machine import num_physical_cores, with_worker_threads
    from orthros_service.settings import ModelSettings, Settings

    assert with_worker_threads(Settings()).model.num_threads == num_physical_cores() >= 1
    told = Settings(model=ModelSettings(num_threads=3))
    assert with_worker_threads(told).model.num_threads == 3


def test_a_config_file_with_a_setting_that_does_not_exist_is_refused():
    from orthros_deployments.app import from_config
    from orthros_service.errors import InvalidValueError

    with pytest.raises(InvalidValueError, match="directroy"):
        from_config({"model": {"directroy": "/models/x"}})
