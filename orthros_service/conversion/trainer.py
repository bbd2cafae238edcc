"""The training loop: one packed row a step, checkpoints that a run goes on from exactly."""

import json
import logging
import math
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
from torch import Tensor, nn

from orthros_kernels import PhaseLayout
from orthros_kernels.phase_training.layout import TILE
from orthros_service.conversion.adapter import attach, load_adapter, updates
from orthros_service.conversion.checkpoint import Checkpoints
from orthros_service.conversion.config import ConversionConfig
from orthros_service.conversion.failures import ConversionError
from orthros_service.conversion.rows import TrainingRow
from orthros_service.conversion.schedule import schedule
from orthros_service.model.batches import TrainingBatch
from orthros_service.model.loading import LoadedModel
from orthros_service.model.rope import RotaryTable

logger = logging.getLogger(__name__)

LOG_FILE = "log.jsonl"
_LOGITS_ROWS = 4096
_CLIP = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class StepReport:
    """What one step did.

    Args:
        step: From 1.
        loss: Weighted mean over the row.
        learning_rate: Of this step.
        tokens: Trained on so far, earlier parts of the run included.
        tokens_per_s: Of this step.
    """

    step: int
    loss: float
    learning_rate: float
    tokens: int
    tokens_per_s: float


class Trainer:
    """Trains the updates of one conversion.

    Args:
        config: The conversion.
        loaded: The model, which gets updates on its linear layers.
        make_row: Row by number, the same one for the same number.
    """

    def __init__(
        self,
        config: ConversionConfig,
        loaded: LoadedModel,
        make_row: Callable[[int], TrainingRow],
    ) -> None:
        self._config = config
        self._make_row = make_row
        self._device = loaded.device
        self.model = loaded.model
        theta = config.attention.rope_theta or loaded.config.rope_theta
        self._rope = RotaryTable(replace(loaded.config, rope_theta=theta), device=self._device)
        attach(self.model, config.training.rank, seed=config.training.seed)
        self._parameters = list(updates(self.model).values())
        self._optimizer = torch.optim.AdamW(
            self._parameters, lr=config.training.learning_rate, betas=(0.9, 0.95), weight_decay=0.0
        )
        self._base_digest = loaded.digest
        self._checkpoints = Checkpoints(config.output / "checkpoints", base_digest=loaded.digest)
        self.step = 0

    def start_from(self, adapter: Path) -> None:
        """Begin with the updates of another run.

        Raises:
            ModelError: They cannot be read, or belong to another model or rank.
        """
        load_adapter(self.model, adapter, base_digest=self._base_digest)

    def resume(self) -> int:
        """Go on from the last checkpoint, if there is one; returns the steps already done.

        Raises:
            ModelError: A checkpoint belongs to another model or conversion.
        """
        self.step = self._checkpoints.restore(self.model, self._optimizer, self._settings())
        if self.step:
            logger.info("resumed after step %d", self.step)
        _truncate_log(self._config.output / LOG_FILE, self.step)
        return self.step

    def run(self, on_step: Callable[[StepReport], None]) -> None:
        """Train to the last step, with checkpoints on the way and one at the end.

        Raises:
            ConversionError: The loss is not a number; the last checkpoint is from before.
            ModelError: A checkpoint cannot be written; the one before it stays.
        """
        training = self._config.training
        self._config.output.mkdir(parents=True, exist_ok=True)
        with (self._config.output / LOG_FILE).open("a", encoding="utf-8") as log:
            while self.step < training.steps:
                report = self._train_step()
                log.write(json.dumps(asdict(report)) + "\n")
                log.flush()
                on_step(report)
                if self.step % training.checkpoint_every == 0 or self.step == training.steps:
                    self._checkpoints.save(
                        self.model, self._optimizer, step=self.step, settings=self._settings()
                    )

    def loss(self, row: TrainingRow) -> Tensor:
        """Weighted loss of a row; differentiable."""
        tokens, learned, weights = (
            torch.from_numpy(each).to(self._device)
            for each in (row.tokens, row.learned, row.weights)
        )
        hidden = self.model.hidden_states(tokens, self._batch(row))[learned]
        targets = tokens[learned + 1]
        total = torch.zeros((), device=self._device)
        parts = (torch.split(each, _LOGITS_ROWS) for each in (hidden, targets, weights))
        for part, target, weight in zip(*parts, strict=True):
            logits = self.model.logits(part).float()
            losses = nn.functional.cross_entropy(logits, target, reduction="none")
            total = total + (losses * weight).sum()
        return total

    def _batch(self, row: TrainingRow) -> TrainingBatch:
        attention = self._config.attention
        positions = torch.from_numpy(row.positions).to(self._device)
        reach = attention.window + TILE + attention.num_sinks - 1
        layout = PhaseLayout.build(row.spans, num_tokens=len(row.tokens)).to(self._device)
        cos, sin = self._rope.cos_sin(positions)
        sink_cos, sink_sin = self._rope.cos_sin(positions.clamp(max=reach))
        return TrainingBatch(
            layout=layout,
            cos_sin=(cos[:, None], sin[:, None]),
            sink_cos_sin=(sink_cos[:, None], sink_sin[:, None]),
            window=attention.window,
            num_sinks=attention.num_sinks,
        )

    def _train_step(self) -> StepReport:
        training = self._config.training
        started = time.monotonic()
        row = self._make_row(self.step)
        rate = training.learning_rate * schedule(
            self.step, training.steps, warm_up=training.warm_up, floor=training.floor
        )
        for group in self._optimizer.param_groups:
            group["lr"] = rate
        loss = self.loss(row)
        value = float(loss.detach())
        if not math.isfinite(value):
            raise ConversionError(
                f"The loss of step {self.step + 1} is {value}. The last checkpoint is from before; "
                "lower training.learning_rate and start the run again, or look at the data."
            )
        torch.autograd.backward(loss)
        nn.utils.clip_grad_norm_(self._parameters, _CLIP)
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        self.step += 1
        return StepReport(
            step=self.step,
            loss=value,
            learning_rate=rate,
            tokens=self.step * training.row_tokens,
            tokens_per_s=training.row_tokens / (time.monotonic() - started),
        )

    def _settings(self) -> str:
        """What must be the same for a run to go on: everything but where and how long."""
        values = self._config.model_dump(mode="json", exclude={"model", "output", "device", "name"})
        del values["training"]["checkpoint_every"]
        for name in ("texts", "questions"):
            values["data"][name] = [Path(each).name for each in values["data"][name]]
        return json.dumps(values, sort_keys=True)


def _truncate_log(path: Path, step: int) -> None:
    """Drop the lines of steps that will be done again."""
    if path.exists():
        lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
        path.write_text("".join(lines[:step]), encoding="utf-8")
