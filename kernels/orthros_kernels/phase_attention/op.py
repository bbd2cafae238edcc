"""Prefill-mode attention of steps of document tokens: checks and dispatch."""

import torch
from torch import Tensor

from orthros_kernels.errors import Backend, KernelError, resolve_backend
from orthros_kernels.phase_attention.cpu import phase_attention_cpu
from orthros_kernels.phase_attention.packed import PackedCarry, PackedSteps
from orthros_kernels.phase_attention.reference import packed_phase_attention_reference

HEAD_DIMS = (16, 32, 64, 80, 96, 128)


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
    if not (tile > 0 and window > 0 and (window % tile == 0)):
        raise KernelError(f"window {window} must be a multiple of tile {tile}")
    if not (start >= 0 and start % tile == 0):
        raise KernelError(f"start {start} must be a multiple of tile {tile}")
    if num_tokens <= 0:
        raise KernelError("q must hold at least one token")
    if q_sink.shape != q.shape:
        raise KernelError(f"q_sink has shape {tuple(q_sink.shape)}, q has {tuple(q.shape)}")
    if num_q_heads % num_kv_heads != 0:
        raise KernelError(f"{num_q_heads} query heads on {num_kv_heads} KV heads")
    wanted = (num_kv_heads, min(start, window) + num_tokens, head_dim)
    for name, x in (("k", k), ("v", v)):
        if tuple(x.shape) != wanted:
            raise KernelError(f"{name} has shape {tuple(x.shape)}, {wanted} is needed")
        if x.dtype != q.dtype:
            raise KernelError(f"{name} is {x.dtype}, q is {q.dtype}")
        if x.stride(-1) != 1:
            raise KernelError(f"{name} must have unit stride in its last dimension")
    if not (k_sinks.shape == v_sinks.shape and k_sinks.shape[1] <= tile):
        raise KernelError(
            f"k_sinks {tuple(k_sinks.shape)} and v_sinks {tuple(v_sinks.shape)} must agree and "
            f"hold at most {tile} tokens"
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


def packed_phase_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    steps: PackedSteps,
    *,
    carry: PackedCarry | None,
    cos_sin: tuple[Tensor, Tensor],
    sink_cos_sin: tuple[Tensor, Tensor],
    num_sinks: int,
    scale: float,
    backend: Backend = "auto",
) -> Tensor:
    """Prefill-mode attention of one step of each of several documents, packed into one row.

    Token i of a document sees {0 .. min(s - 1, i)}, scored by the query rotated at min(i, W +
    tile + s - 1), and {max(s, tile * (i // tile) - W) .. i}. Linear in the number of tokens.

    Args:
        q: Queries, not rotated, [T, H, D], fp32, bf16 or fp16; any strides but 1 in D.
        k: Rotated keys of the steps' own tokens, [G, T, D]; any strides but 1 in D.
        v: Values, like k.
        steps: Which rows belong to which document.
        carry: Of the steps before; None if every step begins its document.
        cos_sin: cos and sin at each token's position, two contiguous fp32 [T, D/2].
        sink_cos_sin: The same at positions 0 .. W + tile + s - 1.
        num_sinks: s, at most `tile`.
        scale: Softmax scale, usually D ** -0.5.
        backend: "auto" takes Triton on CUDA and the reference elsewhere.

    Returns:
        [T, H, D] contiguous, in q's dtype; accumulated in fp32.

    Raises:
        KernelError: A shape, dtype, stride or device is not as above.

    Source: docs/architecture.md, "The attention".
    """
    num_tokens, num_q_heads, head_dim = q.shape
    num_kv_heads = k.shape[0]
    if head_dim not in HEAD_DIMS:
        raise KernelError(f"q has head size {head_dim}; allowed are {HEAD_DIMS}")
    if q.stride(-1) != 1:
        raise KernelError("q must have unit stride in its last dimension")
    if num_tokens != steps.num_tokens:
        raise KernelError(f"q has {num_tokens} tokens, steps {steps.num_tokens}")
    if num_q_heads % num_kv_heads != 0:
        raise KernelError(f"{num_q_heads} query heads on {num_kv_heads} KV heads")
    if not 0 <= num_sinks <= steps.tile:
        raise KernelError(f"num_sinks {num_sinks} is not between 0 and {steps.tile}")
    if steps.tiles.device != q.device:
        raise KernelError(f"steps are on {steps.tiles.device}, q is on {q.device}")
    expected = {"k": (k, num_tokens), "v": (v, num_tokens)}
    if carry is None:
        if any(steps.starts):
            raise KernelError("a step that does not begin its document needs a carry")
    else:
        context = steps.cu_context[-1]
        expected |= {
            "k_context": (carry.k_context, context),
            "v_context": (carry.v_context, context),
        }
        sinks = (len(steps.starts), num_kv_heads, num_sinks, head_dim)
        for name, x in (("k_sinks", carry.k_sinks), ("v_sinks", carry.v_sinks)):
            if tuple(x.shape) != sinks:
                raise KernelError(f"{name} has shape {tuple(x.shape)}; {sinks} is needed")
            if x.dtype != q.dtype:
                raise KernelError(f"{name} is {x.dtype}, q is {q.dtype}")
            if x.stride() != carry.k_sinks.stride():
                raise KernelError("k_sinks and v_sinks differ in strides")
    for name, (x, rows) in expected.items():
        wanted = (num_kv_heads, rows, head_dim)
        if tuple(x.shape) != wanted:
            raise KernelError(f"{name} has shape {tuple(x.shape)}; {wanted} is needed")
        if x.dtype != q.dtype:
            raise KernelError(f"{name} is {x.dtype}, q is {q.dtype}")
        if x.device != q.device:
            raise KernelError(f"{name} is on {x.device}, q is on {q.device}")
        if x.stride(-1) != 1:
            raise KernelError(f"{name} must have unit stride in its last dimension")
    tables = (
        ("cos_sin", cos_sin, num_tokens),
        ("sink_cos_sin", sink_cos_sin, steps.window + steps.tile + num_sinks),
    )
    for name, pair, rows in tables:
        for x in pair:
            if not (
                tuple(x.shape) == (rows, head_dim // 2)
                and x.dtype == torch.float32
                and x.is_contiguous()
            ):
                raise KernelError(
                    f"{name} must be contiguous fp32 {(rows, head_dim // 2)}, is {tuple(x.shape)}"
                )
    if resolve_backend(backend, q) == "triton":
        from orthros_kernels.phase_attention.triton_kernel import phase_attention_triton

        return phase_attention_triton(
            q, k, v, steps, carry=carry, cos_sin=cos_sin, sink_cos_sin=sink_cos_sin,
            num_sinks=num_sinks, scale=scale,
        )  # fmt: skip
    return packed_phase_attention_reference(
        q, k, v, steps, carry=carry, cos_sin=cos_sin, sink_cos_sin=sink_cos_sin,
        num_sinks=num_sinks, scale=scale,
    )  # fmt: skip
