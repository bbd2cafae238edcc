"""Keys rotated and written, with the values, to where they are kept: checks and dispatch."""

import torch
from torch import Tensor

from orthros_kernels.errors import Backend, KernelError, resolve_backend
from orthros_kernels.rotary_write.reference import keys_values_reference

KeyNorm = tuple[Tensor, float]
"""Weight [D] and epsilon of a norm over every key (Qwen 3)."""


def rotary_write(
    qkv: Tensor,
    cos: Tensor,
    sin: Tensor,
    *,
    k_out: Tensor,
    v_out: Tensor,
    num_q_heads: int,
    k_norm: KeyNorm | None = None,
    backend: Backend = "auto",
) -> None:
    """Write one step's keys, rotated, and values, as they are, side by side.

    Args:
        qkv: Output of the fused projection, [R, (H + 2 G) * D]; any row stride.
        cos: fp32 [R, D/2], contiguous.
        sin: Like cos.
        k_out: Takes the keys, [G, R, D]; unit stride in D.
        v_out: Takes the values, like k_out.
        num_q_heads: H.
        k_norm: Applied before the rotation.
        backend: "auto" takes Triton on CUDA and torch elsewhere.

    Raises:
        KernelError: A shape, dtype or stride is not as above.
    """
    num_kv_heads = k_out.shape[0]
    head_dim = _check(qkv, cos, sin, num_q_heads, num_kv_heads)
    wanted = (num_kv_heads, qkv.shape[0], head_dim)
    for name, x in (("k_out", k_out), ("v_out", v_out)):
        if tuple(x.shape) != wanted:
            raise KernelError(f"{name} has shape {tuple(x.shape)}; {wanted} is needed")
        if x.dtype != qkv.dtype:
            raise KernelError(f"{name} is {x.dtype}, qkv is {qkv.dtype}")
        if x.stride(-1) != 1:
            raise KernelError(f"{name} must have unit stride in its last dimension")
    if resolve_backend(backend, qkv) == "triton":
        from orthros_kernels.rotary_write.triton_kernel import rotary_write_triton

        rotary_write_triton(
            qkv, cos, sin, k_out=k_out, v_out=v_out, num_q_heads=num_q_heads, k_norm=k_norm
        )
        return
    k, v = keys_values_reference(
        qkv, cos, sin, num_q_heads=num_q_heads, num_kv_heads=num_kv_heads, k_norm=k_norm
    )
    k_out.copy_(k)
    v_out.copy_(v)


def rotary_scatter(
    qkv: Tensor,
    cos: Tensor,
    sin: Tensor,
    *,
    base_addresses: Tensor,
    capacities: Tensor,
    rows: Tensor,
    layer: int,
    num_q_heads: int,
    num_kv_heads: int,
    k_norm: KeyNorm | None = None,
) -> None:
    """`rotary_write` where every row has a segment of its own, named by its address.

    Runs in Triton only: the reference is `rotary_write` into each segment.

    Args:
        qkv: [R, (H + 2 G) * D].
        cos: fp32 [R, D/2], contiguous.
        sin: Like cos.
        base_addresses: int64 [R]: where each row's segment [L, 2, G, capacity, D], contiguous and
            of qkv's dtype and device, begins. The caller keeps it alive.
        capacities: int64 [R]: tokens that it has room for.
        rows: int64 [R]: where in it the row goes, below its capacity; not checked.
        layer: Index into the segments.
        num_q_heads: H.
        num_kv_heads: G.
        k_norm: Applied before the rotation.

    Raises:
        KernelError: A shape or dtype is not as above.
    """
    _check(qkv, cos, sin, num_q_heads, num_kv_heads)
    for name, x in (("base_addresses", base_addresses), ("capacities", capacities), ("rows", rows)):
        if not (x.dtype == torch.int64 and tuple(x.shape) == (qkv.shape[0],) and x.is_contiguous()):
            raise KernelError(
                f"{name} must be contiguous int64 [{qkv.shape[0]}], is {x.dtype} {tuple(x.shape)}"
            )
        if x.device != qkv.device:
            raise KernelError(f"{name} is on {x.device}, qkv is on {qkv.device}")
    from orthros_kernels.rotary_write.triton_kernel import rotary_scatter_triton

    rotary_scatter_triton(
        qkv, cos, sin, base_addresses=base_addresses, capacities=capacities, rows=rows,
        layer=layer, num_q_heads=num_q_heads, num_kv_heads=num_kv_heads, k_norm=k_norm,
    )  # fmt: skip


def _check(qkv: Tensor, cos: Tensor, sin: Tensor, num_q_heads: int, num_kv_heads: int) -> int:
    head_dim = 2 * cos.shape[-1]
    wanted = (num_q_heads + 2 * num_kv_heads) * head_dim
    if not (qkv.dim() == 2 and qkv.shape[1] == wanted):
        raise KernelError(f"qkv has shape {tuple(qkv.shape)}; [R, {wanted}] is needed")
    if qkv.stride(1) != 1:
        raise KernelError("qkv must have unit stride in its last dimension")
    if qkv.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        raise KernelError(f"qkv is {qkv.dtype}; fp32, bf16 and fp16 are taken")
    for name, x in (("cos", cos), ("sin", sin)):
        if not (
            tuple(x.shape) == (qkv.shape[0], head_dim // 2)
            and x.dtype == torch.float32
            and x.is_contiguous()
        ):
            raise KernelError(
                f"{name} must be contiguous fp32 {(qkv.shape[0], head_dim // 2)}, is "
                f"{tuple(x.shape)}"
            )
    return head_dim
