"""Training attention with the phase mask: checks, dispatch and the gradient."""

from typing import Any, cast

import torch
from torch import Tensor

from orthros_kernels.errors import Backend, check, resolve_backend
from orthros_kernels.phase_training.layout import TILE, PhaseLayout
from orthros_kernels.phase_training.reference import phase_training_reference

HEAD_DIMS = (64, 80, 96, 128)
DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def phase_training_attention(
    q: Tensor,
    q_sink: Tensor,
    k: Tensor,
    v: Tensor,
    layout: PhaseLayout,
    *,
    window: int,
    num_sinks: int,
    scale: float,
    backend: Backend = "auto",
) -> Tensor:
    """Attend a packed row of documents and their question segments, differentiably.

    Token p of a document sees the sinks {0 .. min(s - 1, p)} of it, scored by `q_sink`, and
    {max(s, 128 * (p // 128) - W) .. p}, scored by `q`. A token of a segment sees its whole document
    and its own segment up to itself, scored by `q`; segments do not see one another. Linear in
    the document tokens for a given number of segment tokens. Gradients are the same bits in every
    run of the Triton backend.

    Args:
        q: Queries rotated at their positions, [T, H, D], bf16 or fp16 on CUDA, fp32 too elsewhere;
            any strides but 1 in D. Rows of padding must be finite here and in the others.
        q_sink: The same queries rotated as they score the sinks, [T, H, D]; only document rows are
            read.
        k: Rotated keys, [T, G, D], H a multiple of G; any strides but 1 in D.
        v: Values, like k.
        layout: Which rows belong to which document and segment; its tables on q's device.
        window: W, a positive multiple of 128.
        num_sinks: s, 0 to 128.
        scale: Softmax scale, usually D ** -0.5; positive.
        backend: "auto" takes Triton on CUDA and the reference, which is quadratic, elsewhere.

    Returns:
        [T, H, D] in q's dtype, accumulated in fp32; zeros in rows of padding, whose gradients are
        zero.

    Raises:
        KernelError: A shape, dtype, stride or device is not as above.

    Source: docs/architecture.md, "The attention"; gradients after Dao 2023, "FlashAttention-2",
        section 3.
    """
    check(q.dim() == 3, f"q has shape {tuple(q.shape)}; [tokens, heads, head size] is needed")
    num_tokens, num_q_heads, head_dim = q.shape
    check(head_dim in HEAD_DIMS, f"q has head size {head_dim}; allowed are {HEAD_DIMS}")
    check(q.dtype in DTYPES, f"q is {q.dtype}; allowed are {DTYPES}")
    check(num_tokens == layout.num_tokens, f"q has {num_tokens} rows, layout {layout.num_tokens}")
    check(
        layout.items.device == q.device,
        f"layout is on {layout.items.device}, q is on {q.device}; use layout.to(device)",
    )
    check(k.dim() == 3 and k.shape[1] > 0, f"k has shape {tuple(k.shape)}; 3 dimensions are needed")
    num_kv_heads = k.shape[1]
    check(num_q_heads % num_kv_heads == 0, f"{num_q_heads} query heads on {num_kv_heads} KV heads")
    wanted = {"q": num_q_heads, "q_sink": num_q_heads, "k": num_kv_heads, "v": num_kv_heads}
    for (name, heads), x in zip(wanted.items(), (q, q_sink, k, v), strict=True):
        shape = (num_tokens, heads, head_dim)
        check(tuple(x.shape) == shape, f"{name} has shape {tuple(x.shape)}; {shape} is needed")
        check(x.dtype == q.dtype, f"{name} is {x.dtype}, q is {q.dtype}")
        check(x.device == q.device, f"{name} is on {x.device}, q is on {q.device}")
        check(x.stride(-1) == 1, f"{name} must have unit stride in its last dimension")
    check(
        window > 0 and window % TILE == 0,
        f"window {window} must be a positive multiple of {TILE}",
    )
    check(0 <= num_sinks <= TILE, f"num_sinks {num_sinks} is not between 0 and {TILE}")
    check(scale > 0, f"scale {scale} must be positive")
    if resolve_backend(backend, q, has_gradients=True) == "triton":
        check(
            not (q.is_cuda and q.dtype == torch.float32),
            "q is torch.float32, which the kernels do not take on CUDA; use bf16, fp16 or the "
            "reference backend",
        )
        out = _PhaseTraining.apply(q, q_sink, k, v, layout, window, num_sinks, scale)  # type: ignore[no-untyped-call]
        return cast("Tensor", out)
    return phase_training_reference(
        q, q_sink, k, v, layout, window=window, num_sinks=num_sinks, scale=scale
    )


class _PhaseTraining(torch.autograd.Function):
    """The kernels as one differentiable function."""

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        q_sink: Tensor,
        k: Tensor,
        v: Tensor,
        layout: PhaseLayout,
        window: int,
        num_sinks: int,
        scale: float,
    ) -> Tensor:
        from orthros_kernels.phase_training.triton_kernel import phase_training_forward

        ctx.layout = layout
        ctx.arguments = {"window": window, "num_sinks": num_sinks, "scale": scale}
        out, lse = phase_training_forward(q, q_sink, k, v, layout, **ctx.arguments)
        ctx.save_for_backward(q, q_sink, k, v, out, lse)
        return out

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor | None, ...]:
        from orthros_kernels.phase_training.triton_kernel import phase_training_backward

        q, q_sink, k, v, out, lse = ctx.saved_tensors
        grads = phase_training_backward(
            grad_out.contiguous(), q, q_sink, k, v, out, lse, ctx.layout, **ctx.arguments
        )
        return *grads, None, None, None, None
