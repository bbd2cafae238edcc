"""Process-wide memory settings of workers that compute on the CPU."""

import ctypes
import logging

logger = logging.getLogger(__name__)

# mallopt parameters of glibc, from malloc.h.
_M_TRIM_THRESHOLD = -1
_M_MMAP_THRESHOLD = -3
_LARGEST_BUFFER = 1 << 30


def keep_large_buffers() -> bool:
    """Let the allocator reuse large buffers instead of returning them to the system.

    By default glibc maps each buffer of more than 32 MiB anew (and trims the rest), so that every
    activation of a
    forward pass is paid for in page faults. Call it once, before the model is loaded.

    Returns:
        Whether the C library took the settings; other libraries keep their own and that is logged.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        logger.info("Allocator settings unchanged: the C library has no mallopt")
        return False
    taken = bool(
        mallopt(_M_MMAP_THRESHOLD, _LARGEST_BUFFER) and mallopt(_M_TRIM_THRESHOLD, _LARGEST_BUFFER)
    )
    logger.info("Large buffers are kept for reuse: %s", taken)
    return taken
