"""Checkpoints: the adapter, the optimizer's state and the step, written beside and then renamed."""

import json
import logging
import shutil
from pathlib import Path
from pickle import UnpicklingError

import torch

from orthros_service.conversion.adapter import load_adapter, save_adapter
from orthros_service.errors import ModelError
from orthros_service.model.transformer import Transformer

logger = logging.getLogger(__name__)

ADAPTER_FILE = "adapter.safetensors"
_OPTIMIZER_FILE = "optimizer.pt"
_STATE_FILE = "state.json"
_KEPT = 2


class Checkpoints:
    """The checkpoints of one run; the last two are kept.

    Args:
        folder: Where; made when the first one is written.
        base_digest: Digest of the model that the updates belong to.
    """

    def __init__(self, folder: Path, *, base_digest: str) -> None:
        self._folder = folder
        self._base_digest = base_digest

    def save(
        self, model: Transformer, optimizer: torch.optim.Optimizer, *, step: int, settings: str
    ) -> None:
        """Write one; it is there as a whole or not at all.

        Raises:
            ModelError: It cannot be written; those before it stay.
        """
        target = self._folder / f"step-{step:07d}"
        partial = self._folder / f".{target.name}.partial"
        try:
            shutil.rmtree(partial, ignore_errors=True)
            partial.mkdir(parents=True)
            save_adapter(model, partial / ADAPTER_FILE, base_digest=self._base_digest)
            torch.save(optimizer.state_dict(), partial / _OPTIMIZER_FILE)
            state = {"step": step, "settings": settings}
            (partial / _STATE_FILE).write_text(json.dumps(state), encoding="utf-8")
            shutil.rmtree(target, ignore_errors=True)
            partial.replace(target)
        except (OSError, RuntimeError) as error:
            raise ModelError(
                f"The checkpoint {target} cannot be written: {error}. Earlier ones are kept; make "
                "room and start the same conversion again to go on."
            ) from error
        for old in self._all()[:-_KEPT]:
            shutil.rmtree(old, ignore_errors=True)

    def restore(self, model: Transformer, optimizer: torch.optim.Optimizer, settings: str) -> int:
        """Read the last one into a model and its optimizer; returns its step, 0 without one.

        Raises:
            ModelError: It belongs to another model, or to a conversion with other settings, or
                cannot be read.
        """
        found = self._all()
        if not found:
            return 0
        last = found[-1]
        try:
            state = json.loads((last / _STATE_FILE).read_text(encoding="utf-8"))
            step, own = int(state["step"]), state["settings"]
        except (OSError, ValueError, KeyError) as error:
            raise ModelError(f"The checkpoint {last} is damaged: {error}; delete it.") from error
        if own != settings:
            raise ModelError(
                f"{last} belongs to a conversion with other settings. Give another output folder, "
                "or start from its adapter alone with --adapter."
            )
        load_adapter(model, last / ADAPTER_FILE, base_digest=self._base_digest)
        try:
            optimizer.load_state_dict(torch.load(last / _OPTIMIZER_FILE, weights_only=True))
        except (OSError, RuntimeError, ValueError, UnpicklingError) as error:
            raise ModelError(f"The checkpoint {last} is damaged: {error}; delete it.") from error
        return step

    def _all(self) -> list[Path]:
        return sorted(self._folder.glob("step-*")) if self._folder.is_dir() else []
