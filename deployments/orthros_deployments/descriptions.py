"""What processes without torch need to know of the loaded model."""

from dataclasses import dataclass

from orthros_service.settings import Settings
from orthros_service.state.types import StateLayout
from orthros_service.types import ModelInfo


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerDescription:
    """What a worker has loaded.

    Args:
        model: The served model.
        layout: Layout of its states; `mode` is a placeholder.
        tile: C, the grain of prefill.
    """

    model: ModelInfo
    layout: StateLayout
    tile: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceDescription:
    """What a client of the deployments needs to build its pipeline.

    Args:
        settings: The service's settings, whatever the caller's own environment says.
        worker: What the workers have loaded.
    """

    settings: Settings
    worker: WorkerDescription
