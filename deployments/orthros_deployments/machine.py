"""How much of this machine the service takes, with the reason for every number."""

import logging
import math
import os
import shutil
from dataclasses import dataclass
from pathlib import Path

from ray._common.utils import get_system_memory
from ray._private.utils import get_num_cpus

from orthros_service.settings import MIB, Settings

logger = logging.getLogger(__name__)

MIN_LOGICAL_CPUS = 4
"""Logical processors of a local cluster at least; replicas share the real ones."""

_MIN_OBJECT_STORE_BYTES = 256 * MIB
_MAX_MEMORY_RATIO = 0.4
_MAX_SHM_RATIO = 0.9
_SHARED_MEMORY = Path("/dev/shm")  # noqa: S108 - its size is asked for, nothing is written


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterSize:
    """What a Ray on this machine may use.

    Args:
        num_cpus: Logical processors, for placement only.
        object_store_bytes: Shared memory for states.
        reason: Where the numbers come from, for the log.
    """

    num_cpus: int
    object_store_bytes: int
    reason: str


def num_physical_cores() -> int:
    """Cores that this process may use, hyperthreads and container limits taken into account."""
    allowed = min(len(os.sched_getaffinity(0)), math.ceil(get_num_cpus()))
    try:
        siblings = {
            path.read_text()
            for path in Path("/sys/devices/system/cpu").glob("cpu[0-9]*/topology/core_cpus_list")
        }
    except OSError:
        siblings = set()
    return max(1, min(allowed, len(siblings) or allowed))


def with_worker_threads(settings: Settings) -> Settings:
    """The settings with `model.num_threads` filled in for this machine.

    Ray sets OMP_NUM_THREADS to the processors that a replica reserves, which here are logical ones
    for placement: without a number of its own a worker would compute on a single core.
    """
    if settings.model.num_threads is not None:
        return settings
    cores = num_physical_cores()
    logger.info("model.num_threads is %d, the number of physical cores", cores)
    model = settings.model.model_copy(update={"num_threads": cores})
    return settings.model_copy(update={"model": model})


def plan_cluster(settings: Settings) -> ClusterSize:
    """Size a local Ray for these settings."""
    deployment = settings.deployment
    workers = deployment.num_prefill_workers + deployment.num_decode_workers
    needed = math.ceil(workers * deployment.worker_cpus) + 1
    cores = num_physical_cores()
    num_cpus = max(MIN_LOGICAL_CPUS, cores, needed)
    store_bytes, why = _object_store(settings)
    reason = (
        f"num_cpus={num_cpus} logical (cores {cores}, reserved by replicas {needed}, at least "
        f"{MIN_LOGICAL_CPUS}); object_store_memory={store_bytes // MIB} MiB ({why})"
    )
    return ClusterSize(num_cpus=num_cpus, object_store_bytes=store_bytes, reason=reason)


def _object_store(settings: Settings) -> tuple[int, str]:
    if settings.deployment.object_store_bytes is not None:
        return settings.deployment.object_store_bytes, "deployment.object_store_bytes"
    # States being made, and those that answers still read, come on top of the kept ones.
    wanted = settings.state.memory_bytes + settings.state.memory_bytes // 2
    limits = {
        "state.memory_bytes and a half": wanted,
        f"{_MAX_MEMORY_RATIO:.0%} of the memory": int(get_system_memory() * _MAX_MEMORY_RATIO),
    }
    if _SHARED_MEMORY.is_dir():
        free = shutil.disk_usage(_SHARED_MEMORY).free
        limits[f"{_MAX_SHM_RATIO:.0%} of what is free in {_SHARED_MEMORY}"] = int(
            free * _MAX_SHM_RATIO
        )
    why = min(limits, key=lambda name: limits[name])
    if limits[why] < _MIN_OBJECT_STORE_BYTES:
        return _MIN_OBJECT_STORE_BYTES, f"the least that works; {why} would be less"
    return limits[why], why
