"""The evidence pass: which document tokens the answer's tokens attended to."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from orthros_kernels import attention_mass
from orthros_service.engine.sequence import DocumentContext, QueryTrace
from orthros_service.engine.types import DocumentEvidence
from orthros_service.model.rope import RotaryTable, rotate

# Queries beyond this many are thinned out evenly: the pass must not hold up the other sequences.
MAX_QUERIES = 64


def document_evidence(
    traces: Sequence[QueryTrace], documents: Sequence[DocumentContext], rotary: RotaryTable
) -> tuple[DocumentEvidence, ...]:
    """Attention mass per document token, averaged over queries, recorded layers and heads.

    Args:
        traces: One per generated token.
        documents: The sequence's documents, in order.
        rotary: Rotation by position.

    Returns:
        One entry per document; header tokens are left out. Empty if nothing was generated.
    """
    if not traces:
        return ()
    stride = -(-len(traces) // MAX_QUERIES)
    chosen = list(traces)[::stride]
    return tuple(_one_document(chosen, document, rotary) for document in documents)


def _one_document(
    traces: Sequence[QueryTrace], document: DocumentContext, rotary: RotaryTable
) -> DocumentEvidence:
    first_layer = document.layers[0]
    masses = [torch.zeros(k.shape[1]) for k, _ in first_layer]
    layers = sorted(traces[0].queries)
    positions = torch.tensor(
        [trace.position - document.offset for trace in traces], device=first_layer[0][0].device
    )
    cos_sin = rotary.cos_sin(positions)
    num_heads = traces[0].queries[layers[0]].shape[0]
    for layer in layers:
        q_HRD = rotate(torch.stack([t.queries[layer] for t in traces], 1), *cos_sin)
        lse_HR = torch.stack([t.lse[layer] for t in traces], 1)
        for index, (k, _) in enumerate(document.layers[layer]):
            masses[index] += _segment_mass(q_HRD, lse_HR, k)
    mass = torch.cat(masses) / (len(layers) * len(traces) * num_heads)
    char_starts = np.concatenate([s.char_starts for s in document.state.segments])
    char_ends = np.concatenate([s.char_ends for s in document.state.segments])
    covers_text = char_ends > char_starts
    return DocumentEvidence(
        char_starts=char_starts[covers_text],
        char_ends=char_ends[covers_text],
        mass=mass.numpy()[covers_text],
    )


def _segment_mass(q_HRD: Tensor, lse_HR: Tensor, k_GND: Tensor) -> Tensor:
    num_kv_heads, _, head_dim = k_GND.shape
    q_GRD = q_HRD.reshape(num_kv_heads, -1, head_dim)
    lse_GR = lse_HR.reshape(num_kv_heads, -1)
    return attention_mass(q_GRD, k_GND, lse_GR, scale=head_dim**-0.5).cpu()
