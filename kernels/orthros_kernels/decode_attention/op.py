"""Decode-mode attention of a whole batch: checks and dispatch."""

import torch
from torch import Tensor

from orthros_kernels.decode_attention.plan import DecodePlan
from orthros_kernels.decode_attention.reference import decode_attention_reference
from orthros_kernels.errors import Backend, KernelError, resolve_backend

HEAD_DIMS = (16, 32, 64, 80, 96, 128)


def decode_attention(
    q: Tensor,
    plan: DecodePlan,
    layer: int,
    *,
    cos_sin: tuple[Tensor, Tensor],
    scale: float,
    log_length: Tensor | None = None,
    temperature: Tensor | None = None,
    backend: Backend = "auto",
) -> tuple[Tensor, Tensor]:
    """Attend every row of a batch to all its keys: documents, composed or shared, and its tail.

    One call serves the decode step (one row per sequence), the extension by a question (many rows
    of one sequence) and any mixture. Keys that several rows share are read once per block of rows.

    Args:
        q: Queries, not rotated, [R, H, D], fp32, bf16 or fp16; any strides but 1 in D.
        plan: Who sees what, on q's device.
        layer: Index into the segments.
        cos_sin: cos and sin at (row's position - offset of the run) of each entry of the plan, two
            contiguous fp32 [entries, D/2]: composed documents keep their own positions.
        scale: Softmax scale, usually D ** -0.5.
        log_length: ln(max(1, t / 8192)) of each row, fp32 [R]; with `temperature`.
        temperature: c_h, fp32 [H]: scores are multiplied by 1 + c_h * log_length.
        backend: "auto" takes Triton on CUDA and the reference elsewhere.

    Returns:
        Output [R, H, D] in q's dtype and natural log-sum-exp of the scores, fp32 [R, H]. A row
        without a key gets zeros and -inf.

    Raises:
        KernelError: A shape, dtype or device is not as above.

    Source: split over keys after Dao et al. 2023, "Flash-Decoding".
    """
    num_rows, _, head_dim = q.shape
    first = plan.keep_alive[0].segments[0]
    if q.stride(-1) != 1:
        raise KernelError("q must have unit stride in its last dimension")
    if head_dim not in HEAD_DIMS:
        raise KernelError(f"q has head size {head_dim}; allowed are {HEAD_DIMS}")
    if first.shape[4] != head_dim:
        raise KernelError(f"keys have head size {first.shape[4]}, q has {head_dim}")
    if plan.kv_dtype not in (q.dtype, torch.int8):
        raise KernelError(f"keys are {plan.kv_dtype}, q is {q.dtype}")
    if not 0 <= layer < first.shape[0]:
        raise KernelError(f"layer {layer} is not in 0..{first.shape[0] - 1}")
    if plan.size.rows != num_rows:
        raise KernelError(f"the plan is for {plan.size.rows} rows, q has {num_rows}")
    if plan.tables.device != q.device:
        raise KernelError(f"the plan is on {plan.tables.device}, q on {q.device}")
    for name, x in zip(("cos", "sin"), cos_sin, strict=True):
        wanted = (plan.size.entries, head_dim // 2)
        if not (tuple(x.shape) == wanted and x.dtype == torch.float32 and x.is_contiguous()):
            raise KernelError(
                f"{name} must be contiguous fp32 {wanted}, is {x.dtype} {tuple(x.shape)}"
            )
    if (log_length is None) != (temperature is None):
        raise KernelError("log_length and temperature go together")
    if resolve_backend(backend, q) == "triton":
        from orthros_kernels.decode_attention.triton_kernel import decode_attention_triton

        return decode_attention_triton(
            q, plan, layer, cos_sin=cos_sin, num_kv_heads=first.shape[2], scale=scale,
            log_length=log_length, temperature=temperature,
        )  # fmt: skip
    stretch = None
    if log_length is not None and temperature is not None:
        stretch = 1 + log_length[:, None] * temperature[None]
    out, lse = decode_attention_reference(
        q, plan.keep_alive, layer, cos_sin=cos_sin, scale=scale, temperature_RH=stretch
    )
    return out.to(q.dtype), lse
