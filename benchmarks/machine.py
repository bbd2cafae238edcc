"""What a figure must name: the machine and the versions that it was measured with."""

import datetime
import os
import platform
from importlib.metadata import version
from pathlib import Path
from typing import Any


def describe_machine(*packages: str) -> dict[str, Any]:
    """Processor, cores, memory and versions, for the head of a result file."""
    model = "unknown"
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            model = line.split(":", 1)[1].strip()
            break
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return {
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "processor": model,
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(memory / 2**30, 1),
        "python": platform.python_version(),
        "versions": {name: version(name) for name in packages},
    }
