"""Prefill-mode attention of one step of document tokens: checks and dispatch."""

from torch import Tensor

from orthros_kernels.errors import check
from orthros_kernels.phase_attention.cpu import phase_attention_cpu


def phase_attention(
    q: Tensor,
    q_sink: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    k_sinks: Tensor,
    v_sinks: Tensor,
    start: int,
    window: int,
    tile: int,
    scale: float,
) -> Tensor:
    """Attend the tokens [start, start + n) of a document to the sinks and their window.

    Token i sees {0 .. s-1} and {max(s, tile * (i // tile) - window) .. i}. Linear in n; the carry
    from the steps
    before is the context at the front of k and v together with the sinks. Sinks, window and what
    lies between them
    partition the past.

    Args:
        q: Queries rotated at their positions, [H, n, D], fp32, bf16 or fp16.
        q_sink: The same queries rotated at min(position, window + tile + s - 1), [H, n, D]; they
            score the sinks.
        k: Rotated keys of the context and the step, [G, c + n, D] with c = min(start, window);
            unit stride in D.
        v: Values, like k.
        k_sinks: Keys of the document's first s tokens, [G, s, D]; s = 0 switches sinks off.
        v_sinks: Values of the sinks.
        start: Position of the first query; a multiple of tile.
        window: Window left of the query's own tile, a multiple of tile.
        tile: Tokens per tile.
        scale: Softmax scale, usually D ** -0.5.

    Returns:
        [H, n, D] in q's dtype; accumulated in fp32.

    Raises:
        KernelError: A shape, dtype or position is not as above; the message names the argument.

    Source: docs/architecture.md, "The attention"; log-sum-exp merge after Milakov and Gimelshein
        2018.
    """
    num_q_heads, num_tokens, head_dim = q.shape
    num_kv_heads = k.shape[0]
    check(
        tile > 0 and window > 0 and window % tile == 0,
        f"window {window} must be a multiple of tile {tile}",
    )
    check(start >= 0 and start % tile == 0, f"start {start} must be a multiple of tile {tile}")
    check(num_tokens > 0, "q must hold at least one token")
    check(
        q_sink.shape == q.shape, f"q_sink has shape {tuple(q_sink.shape)}, q has {tuple(q.shape)}"
    )
    check(num_q_heads % num_kv_heads == 0, f"{num_q_heads} query heads on {num_kv_heads} KV heads")
    wanted = (num_kv_heads, min(start, window) + num_tokens, head_dim)
    for name, x in (("k", k), ("v", v)):
        check(tuple(x.shape) == wanted, f"{name} has shape {tuple(x.shape)}, {wanted} is needed")
        check(x.dtype == q.dtype, f"{name} is {x.dtype}, q is {q.dtype}")
        check(x.stride(-1) == 1, f"{name} must have unit stride in its last dimension")
    check(
        k_sinks.shape == v_sinks.shape and k_sinks.shape[1] <= tile,
        f"k_sinks {tuple(k_sinks.shape)} and v_sinks {tuple(v_sinks.shape)} must agree and hold "
        f"at most {tile} tokens",
    )
    return phase_attention_cpu(
        q,
        q_sink,
        k,
        v,
        k_sinks=k_sinks,
        v_sinks=v_sinks,
        start=start,
        window=window,
        tile=tile,
        scale=scale,
    )
