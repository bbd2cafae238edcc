"""Loading the model in a replica so that its compute thread gets all of the processors."""

import torch

from orthros_deployments.machine import with_worker_threads
from orthros_service.engine.served_model import ServedModel, load_served_model
from orthros_service.settings import Settings


def load_worker_model(settings: Settings, *, for_decode: bool) -> ServedModel:
    """Load the model that the settings name, for an engine that runs in a thread of its own.

    Every thread that computes in parallel gets OpenMP helpers of its own, which stay. With those
    of the loading thread beside those of the engine's, OpenMP counts more threads than processors
    and hardly spins any more, which costs a quarter of the decode speed. So the loading thread
    computes alone.

    Args:
        settings: All settings; an open `model.num_threads` becomes the number of physical cores.
        for_decode: Whether this process decodes.

    Raises:
        ModelError: The directory is missing, damaged or of an unsupported kind.
        InvalidValueError: A setting does not fit the model or the machine.
    """
    num_threads = with_worker_threads(settings).model.num_threads
    assert num_threads is not None
    alone = settings.model.model_copy(update={"num_threads": 1})
    served = load_served_model(settings.model_copy(update={"model": alone}), for_decode=for_decode)
    # For threads to come; sets nothing up in this one.
    torch.set_num_threads(num_threads)
    return served
