"""The service as processes: what they load, what they tell, how they stop."""

import contextlib
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

pytestmark = [pytest.mark.ray, pytest.mark.timeout(180), pytest.mark.filterwarnings("ignore")]


@pytest.fixture
def run_orthros() -> Callable[..., "subprocess.CompletedProcess[str]"]:
    """A function that runs the command `orthros` to its end."""

    def run(*arguments: str) -> "subprocess.CompletedProcess[str]":
        command = [Path(sys.executable).with_name("orthros"), *arguments]
        return subprocess.run(command, check=False, capture_output=True, text=True, timeout=60)

    return run


def _has_torch(pid: int) -> bool:
    return "libtorch" in Path(f"/proc/{pid}/maps").read_text()


def test_only_prefill_and_decode_load_torch(service):
    loads = {
        name: _has_torch(service.replica_pid(name))
        for name in ("Gateway", "Coordinator", "Prefill", "Decode")
    }
    assert loads == {"Gateway": False, "Coordinator": False, "Prefill": True, "Decode": True}
    assert not _has_torch(service.process.pid)


def test_the_metrics_of_all_replicas_are_on_one_page(service):
    document = service.ready("Numbers to be counted. " * 20)
    service.ask(document)
    families = text_string_to_metric_families(service.http.get("/metrics").text)
    samples = [sample for family in families for sample in family.samples]
    seen = {(sample.labels["deployment"], sample.name) for sample in samples}
    assert {
        ("Gateway", "orthros_requests_total"),
        ("Gateway", "orthros_generated_tokens_total"),
        ("Coordinator", "orthros_ingestions_total"),
        ("Coordinator", "orthros_state_bytes"),
        ("Prefill", "orthros_prefill_tokens_total"),
        ("Decode", "orthros_handoff_bytes_total"),
    } <= seen
    assert ("Prefill", "orthros_generated_tokens_total") not in seen
    prefilled = [s.value for s in samples if s.name == "orthros_prefill_tokens_total"]
    assert sum(prefilled) >= 400


def test_what_is_known_before_the_start_is_refused_in_a_sentence(service, run_orthros, tmp_path):
    taken = run_orthros("serve", "--port", str(service.port), "--model", str(service.model))
    assert taken.returncode == 1
    assert f"Port {service.port} on 127.0.0.1 is taken" in taken.stderr
    missing = run_orthros("serve", "--model", str(tmp_path / "none"))
    assert missing.returncode == 1
    assert "orthros models prepare" in missing.stderr
    assert "Traceback" not in taken.stderr + missing.stderr


def test_a_batch_job_finds_the_running_service_and_shows_only_its_own_lines(
    service, run_orthros, tmp_path, monkeypatch
):
    import pyarrow as pa
    import pyarrow.parquet as pq

    monkeypatch.setenv("TMPDIR", service.tmpdir)
    pq.write_table(pa.table({"text": ["The lamps burned low.", "  "]}), tmp_path / "in.parquet")
    job = run_orthros(
        *("batch", "run", "--input", str(tmp_path / "in.parquet")),
        *("--output", str(tmp_path / "out"), "--question", "What burned?", "--max-tokens", "4"),
    )
    assert job.returncode == 3, job.stderr
    # Ray's core writes a line of its own about the restart of actors, past every logger.
    lines = [line for line in job.stderr.splitlines() if "core_worker.cc" not in line]
    assert lines[1].startswith(f"using the service that runs on Ray at {service.ray_address}")
    assert all("rows" in line or "using" in line for line in lines), job.stderr


def _refused(service, document):
    answer = service.ask(document)
    return answer if answer.status_code == 503 else None


@pytest.mark.last_of_service
def test_a_stop_ends_every_process_and_frees_the_port(service, eventually):
    processes = service.descendants()
    assert len(processes) > 6
    document = service.ready("Asked while the service stops. ")
    with service.streaming(document, max_tokens=6000) as running:
        next(running)
        service.process.send_signal(signal.SIGTERM)
        refused = eventually(lambda: _refused(service, document), 10)
        assert "Retry-After" in refused.headers
        assert refused.json()["retryable"] is True
        # What runs may end; it is cut off when its time is over.
        with contextlib.suppress(httpx.HTTPError):
            assert list(running)[-1][0] in ("completed", "error")
    assert service.process.wait(60) == 0
    eventually(lambda: not any(Path(f"/proc/{pid}").exists() for pid in processes), 10)
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        probe.bind(("127.0.0.1", service.port))
    assert "Traceback" not in (service.home / "log.txt").read_text().split("Stopping;")[-1]
