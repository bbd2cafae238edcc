"""The device and the number format of weights and K/V."""

import torch

from orthros_service.errors import InvalidValueError

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}

BFLOAT16_COMPUTE_CAPABILITY = 8
"""First NVIDIA generation (Ampere) whose matrix units compute in bfloat16."""


def choose_device(setting: str) -> torch.device:
    """Turn the setting into a device.

    Args:
        setting: "auto", "cpu", "cuda" or "cuda:N"; "auto" is the first GPU if there is one.

    Raises:
        InvalidValueError: The setting is none of these, or no such GPU is present.
    """
    num_gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if setting == "auto":
        return torch.device("cuda", 0) if num_gpus else torch.device("cpu")
    if setting == "cpu":
        return torch.device("cpu")
    kind, _, index = setting.partition(":")
    if kind != "cuda" or not (setting == "cuda" or (index.isascii() and index.isdigit())):
        raise InvalidValueError(
            f"The device is {setting!r}; allowed are 'auto', 'cpu', 'cuda' and 'cuda:N'."
        )
    number = int(index or 0)
    if number >= num_gpus:
        raise InvalidValueError(
            f"The device is {setting!r}, but this machine has {num_gpus} usable GPUs; "
            "choose another or 'auto'."
        )
    return torch.device("cuda", number)


def choose_dtype(setting: str, device: torch.device) -> tuple[torch.dtype, str]:
    """Turn the setting into a dtype.

    Args:
        setting: "auto", "bfloat16", "float16" or "float32". "auto" is bfloat16 where the device
            computes in it and float32 elsewhere.
        device: Where the model will run.

    Returns:
        The dtype and the reason for it.

    Raises:
        InvalidValueError: The setting is none of these.
    """
    if setting in DTYPES:
        return DTYPES[setting], "set explicitly"
    if setting != "auto":
        raise InvalidValueError(
            f"The dtype is {setting!r}; allowed are 'auto', {', '.join(map(repr, DTYPES))}."
        )
    if device.type == "cuda":
        major, minor = torch.cuda.get_device_capability(device)
        has_bfloat16 = major >= BFLOAT16_COMPUTE_CAPABILITY
        what = f"the GPU has compute capability {major}.{minor}"
    else:
        features = _bfloat16_features()
        has_bfloat16 = bool(features)
        what = f"the processor has {', '.join(features) or 'no bfloat16 instructions'}"
    return (torch.bfloat16 if has_bfloat16 else torch.float32), what


def _bfloat16_features() -> list[str]:
    """The processor's bfloat16 instruction sets, such as avx512_bf16, amx_bf16 or Arm's bf16."""
    return sorted(
        name for name, value in torch.cpu.get_capabilities().items() if "bf16" in name and value
    )
