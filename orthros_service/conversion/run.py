"""One conversion from its file to a model directory."""

import logging
from collections.abc import Callable
from pathlib import Path

from orthros_service.conversion.adapter import merge, save_adapter
from orthros_service.conversion.checkpoint import ADAPTER_FILE
from orthros_service.conversion.config import ConversionConfig
from orthros_service.conversion.estimate import Estimate, estimate
from orthros_service.conversion.examples import ExampleSource
from orthros_service.conversion.export import export_model
from orthros_service.conversion.trainer import StepReport, Trainer
from orthros_service.model.loading import choose_device, load_model
from orthros_service.tokenization import Tokenizer

logger = logging.getLogger(__name__)

MODEL_FOLDER = "model"


def convert(
    config: ConversionConfig,
    *,
    adapter: Path | None = None,
    on_start: Callable[[Estimate, int], None] = lambda _needs, _done: None,
    on_step: Callable[[StepReport], None] = lambda _report: None,
) -> Path:
    """Train and export; a run that was cut goes on from its last checkpoint.

    Args:
        config: The conversion.
        adapter: Updates of another run to begin with, where there is no checkpoint yet.
        on_start: Told what the conversion will take and how many steps are done already.
        on_step: Told after every step.

    Returns:
        The directory of the converted model.

    Raises:
        ModelError: The model cannot be loaded, or something cannot be written.
        InvalidValueError: The data or the device cannot be used.
        ConversionError: The loss is not a number.
    """
    tokenizer = Tokenizer.from_directory(config.model)
    source = ExampleSource(config, tokenizer)
    device = choose_device(config.device)
    dtype = "bfloat16" if device.type == "cuda" else "float32"
    loaded = load_model(config.model, device=config.device, dtype=dtype)
    needs = estimate(config, loaded.config, loaded.device)
    trainer = Trainer(config, loaded, source.row)
    done = trainer.resume()
    if adapter is not None and not done:
        trainer.start_from(adapter)
    on_start(needs, done)
    trainer.run(on_step)
    save_adapter(trainer.model, config.output / ADAPTER_FILE, base_digest=loaded.digest)
    merge(trainer.model)
    target = config.output / MODEL_FOLDER
    export_model(trainer.model, loaded.config, config, target)
    logger.info("the converted model is in %s", target)
    return target
