"""What holds for every test: few threads, no network for models, the same seeds."""

import os
import random
import sys

import pytest

# Before torch is imported: small tensors are slower, and timings noisier, on many threads.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
# Before a kernel is imported: Triton's interpreter runs them on the CPU. `make test-gpu` sets 0.
os.environ.setdefault("TRITON_INTERPRET", "1")
os.environ["HF_HUB_OFFLINE"] = "1"


@pytest.fixture(autouse=True)
def _seeds() -> None:
    random.seed(0)
    if numpy := sys.modules.get("numpy"):
        numpy.random.seed(0)
    if torch := sys.modules.get("torch"):
        torch.manual_seed(0)


@pytest.fixture(autouse=True)
def _no_settings_from_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("ORTHROS_")]:
        monkeypatch.delenv(name)
