"""One real service for the whole run: `orthros serve` with a tiny random model, on its own Ray."""

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest

ORTHROS = Path(sys.executable).with_name("orthros")
Event = tuple[str, dict[str, Any]]
SPECIAL_TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The test that stops the service comes last."""
    items.sort(key=lambda item: item.get_closest_marker("last_of_service") is not None)


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "last_of_service: stops the shared service")


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model directory that loads in a moment and never ends an answer by itself."""
    directory = tmp_path_factory.mktemp("models") / "tiny"
    directory.mkdir()
    vocab_size = _write_tokenizer(directory)
    _write_weights(directory, vocab_size)
    (directory / "orthros.json").write_text(
        json.dumps({"window": 32, "tile": 16, "full_prefill_max_tokens": 1024})
    )
    return directory


def _write_tokenizer(directory: Path) -> int:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({letter: i for i, letter in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(SPECIAL_TOKENS)
    tokenizer.save(str(directory / "tokenizer.json"))
    config = {"chat_template": CHATML, "eos_token": "<|im_end|>"}
    (directory / "tokenizer_config.json").write_text(json.dumps(config))
    return tokenizer.get_vocab_size()


def _write_weights(directory: Path, vocab_size: int) -> None:
    import torch
    from safetensors.torch import save_file

    layers, hidden, inner, heads, kv_heads, head_dim = 2, 64, 128, 4, 2, 16
    generator = torch.Generator().manual_seed(11)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator) * 0.3

    weights = {
        "model.embed_tokens.weight": random(vocab_size, hidden),
        "model.norm.weight": torch.ones(hidden),
        "lm_head.weight": random(vocab_size, hidden),
    }
    # Logits of 0 are never the largest: no answer ends before max_tokens.
    weights["lm_head.weight"][-len(SPECIAL_TOKENS) :] = 0
    shapes = {
        "self_attn.q_proj": (heads * head_dim, hidden),
        "self_attn.k_proj": (kv_heads * head_dim, hidden),
        "self_attn.v_proj": (kv_heads * head_dim, hidden),
        "self_attn.o_proj": (hidden, heads * head_dim),
        "mlp.gate_proj": (inner, hidden),
        "mlp.up_proj": (inner, hidden),
        "mlp.down_proj": (hidden, inner),
    }
    for name in (f"model.layers.{layer}" for layer in range(layers)):
        weights |= {f"{name}.{part}.weight": random(*shape) for part, shape in shapes.items()}
        for norm in ("input_layernorm", "post_attention_layernorm"):
            weights[f"{name}.{norm}.weight"] = torch.ones(hidden)
    save_file(weights, str(directory / "model.safetensors"))
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": vocab_size,
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "max_position_embeddings": 4096,
        "tie_word_embeddings": False,
    }
    (directory / "config.json").write_text(json.dumps(config))


@dataclass(kw_only=True)
class Service:
    """A running `orthros serve`."""

    process: "subprocess.Popen[str]"
    port: int
    ray_address: str
    home: Path
    model: Path
    tmpdir: str
    http: httpx.Client = field(init=False)

    def __post_init__(self) -> None:
        self.http = httpx.Client(base_url=self.url, timeout=60, trust_env=False)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def descendants(self) -> dict[int, str]:
        """Every process that the service has started, by id, with its title."""
        parents, found = _parents(), {self.process.pid: "orthros serve"}
        while new := {
            pid: title
            for pid, (parent, title) in parents.items()
            if parent in found and pid not in found
        }:
            found |= new
        return found

    def replica_pid(self, deployment: str) -> int:
        """The process of a deployment's only replica; waits for one that is being started."""
        title = f"ServeReplica:orthros:{deployment}"
        pids = _eventually(lambda: [p for p, t in self.descendants().items() if title in t], 60)
        return int(pids[0])

    def kill(self, deployment: str) -> None:
        os.kill(self.replica_pid(deployment), signal.SIGKILL)

    def upload(self, text: str, **options: Any) -> str:
        response = self.http.post("/v1/documents", json={"text": text, **options})
        assert response.status_code in (200, 201, 202), response.text
        return str(response.json()["id"])

    def events(self, document_id: str) -> list[dict[str, Any]]:
        """All progress events of a document, until it is ready or failed."""
        with self.http.stream("GET", f"/v1/documents/{document_id}/events") as response:
            assert response.status_code == 200
            return [data for _, data in sse(response)]

    def ready(self, text: str, **options: Any) -> str:
        document_id = self.upload(text, **options)
        assert self.events(document_id)[-1]["status"] == "ready"
        return document_id

    def document(self, document_id: str) -> Any:
        return self.http.get(f"/v1/documents/{document_id}").json()

    def ask(self, *document_ids: str, timeout: float = 60, **options: Any) -> httpx.Response:
        return self.http.post("/v1/answers", json=_body(document_ids, options), timeout=timeout)

    @contextlib.contextmanager
    def streaming(self, *document_ids: str, **options: Any) -> Iterator[Iterator[Event]]:
        """A streamed answer, event by event; leaving the block early leaves the answer."""
        body = _body(document_ids, {"stream": True, **options})
        with (
            httpx.Client(base_url=self.url, timeout=60, trust_env=False) as client,
            client.stream("POST", "/v1/answers", json=body) as response,
        ):
            assert response.status_code == 200, response.read()
            yield sse(response)


def _body(document_ids: tuple[str, ...], options: dict[str, Any]) -> dict[str, Any]:
    defaults = {"question": "What?", "max_tokens": 12, "temperature": 0}
    return {**defaults, "document_ids": document_ids, **options}


def sse(response: httpx.Response) -> Iterator[Event]:
    """Names and data of server-sent events."""
    name = ""
    for line in response.iter_lines():
        if line.startswith("event: "):
            name = line.removeprefix("event: ")
        elif line.startswith("data: "):
            yield name, json.loads(line.removeprefix("data: "))


def _eventually(look: Callable[[], Any], timeout_s: float = 15) -> Any:
    """Look until something is seen, and return it."""
    ends_at = time.monotonic() + timeout_s
    while not (seen := look()):
        assert time.monotonic() < ends_at, f"not seen within {timeout_s} s"
        time.sleep(0.05)
    return seen


def _parents() -> dict[int, tuple[int, str]]:
    processes = {}
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            status = (folder / "stat").read_text().rsplit(")", 1)[1].split()
            title = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            if status[0] != "Z":
                processes[int(folder.name)] = (int(status[1]), title)
    return processes


@pytest.fixture(scope="session")
def eventually() -> Callable[..., Any]:
    """A function that looks until something is seen."""
    return _eventually


@pytest.fixture(scope="session")
def service(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    """The shared service."""
    home = tmp_path_factory.mktemp("service")
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = int(probe.getsockname()[1])
    settings = {
        "ORTHROS_MODEL__DTYPE": "float32",
        "ORTHROS_MODEL__NUM_THREADS": "1",
        "ORTHROS_PREFILL__SEGMENT_TOKENS": "64",
        "ORTHROS_DECODE__MAX_SEQUENCES": "64",
        "ORTHROS_DOCUMENTS__DATABASE_URL": f"sqlite:///{home}/orthros.db",
        "ORTHROS_DOCUMENTS__TEXT_URI": f"{home}/texts",
        "ORTHROS_STATE__URI": f"{home}/states",
        "ORTHROS_STATE__MEMORY_BYTES": str(256 * 2**20),
        "ORTHROS_DEPLOYMENT__SHUTDOWN_TIMEOUT_S": "5",
    }
    # Where services of this machine are found (others that run here are not meant), and where
    # Ray's sockets lie, whose paths must be short.
    short = tempfile.TemporaryDirectory(prefix="ot-", ignore_cleanup_errors=True)
    with short as tmpdir, (home / "log.txt").open("w") as stderr:
        process = subprocess.Popen(
            [ORTHROS, "serve", "--port", str(port), "--model", tiny_model],
            env={**os.environ, **settings, "TMPDIR": tmpdir},
            stdout=subprocess.PIPE,
            stderr=stderr,
            text=True,
            cwd=home,
        )
        try:
            running = Service(
                process=process,
                port=port,
                ray_address=_ray_address(process, home / "log.txt"),
                home=home,
                model=tiny_model,
                tmpdir=tmpdir,
            )
            with running.http:
                yield running
        finally:
            process.terminate()
            try:
                process.wait(60)
            except subprocess.TimeoutExpired:
                process.kill()
            process.communicate()


def _ray_address(process: "subprocess.Popen[str]", log: Path) -> str:
    assert process.stdout is not None
    for line in process.stdout:
        if found := re.search(r"Ray: (\S+)", line):
            return found[1]
    pytest.fail(f"the service did not start:\n{log.read_text()}")


@pytest.fixture(scope="session")
def cluster_of_service(service: Service) -> Iterator[None]:
    """This process joined to the service's cluster."""
    from orthros_deployments.environment import connect_ray
    from orthros_service.settings import DeploymentSettings, Settings

    owns_ray = connect_ray(Settings(deployment=DeploymentSettings(ray_address=service.ray_address)))
    assert not owns_ray
    yield
    import ray

    ray.shutdown()
