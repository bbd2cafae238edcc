"""Between stored segments (numpy bits) and torch tensors; `state.types` stays torch-free."""

import warnings

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from orthros_service.state.types import STORAGE_DTYPES, KVDtype, Segment

TORCH_DTYPES: dict[KVDtype, torch.dtype] = {
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float32": torch.float32,
}


def kv_tensor(segment: Segment, dtype: KVDtype, device: torch.device) -> Tensor:
    """K/V of a segment, [L, 2, G, n, D]; on the CPU a view of the stored bits: read only."""
    with warnings.catch_warnings():
        # Shared memory arrives read-only; the engine never writes to a stored segment.
        warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
        bits = torch.from_numpy(segment.kv)
    return bits.view(TORCH_DTYPES[dtype]).to(device)


def kv_bits(kv: Tensor, dtype: KVDtype) -> npt.NDArray[np.generic]:
    """The storage form of keys and values; shares memory with a CPU tensor."""
    storage = STORAGE_DTYPES[dtype]
    plain = kv.detach().cpu()
    return (plain.view(torch.int16) if storage == np.int16 else plain).numpy()
