"""What the generated source calls that torch has no single public function for. Tensors are torch's, on the CPU.

Each pair shares with its gradient what the forward pass knows already: logarithms of probabilities, sums of exponents,
places of largest elements.
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Any

import torch

_aten = torch.ops.aten
_NO_LABEL = -(2**62)  # torch passes over rows of one label; no row has this one

flash = _aten._scaled_dot_product_flash_attention_for_cpu.default._op
flash_backward = _aten._scaled_dot_product_flash_attention_for_cpu_backward.default._op
layer_norm_backward = _aten.native_layer_norm_backward.default._op
convolution_backward = _aten.convolution_backward.default._op
nll_loss = _aten.nll_loss_forward.default._op
pool = _aten.max_pool2d_with_indices.default._op
pool_backward = _aten.max_pool2d_with_indices_backward.default._op
threshold_backward = _aten.threshold_backward.default._op
gelu_backward = _aten.gelu_backward.default._op


def attend(q: Any, k: Any, v: Any, causal: bool, scale: float) -> tuple[Any, Any]:
    """softmax(scale q kᵀ) v for [b h t d], and the logarithms of the sums of exponents [b h t], or None.

    torch's kernel makes 0 of a row whose scores are all NaN and calls its logarithm 0; where that may be, the formula
    itself decides, and None says so to the gradient.
    """
    q, k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k, v))
    out, sums = flash(q, k, v, 0.0, causal, scale=scale)
    if math.isfinite(sums.sum()) and bool((sums != 0).all()):
        return out, sums
    if math.isfinite(q.sum() + k.sum()):
        return out, sums
    return torch.matmul(_weights(q, k, causal, scale), v), None


def attend_grad(ct: Any, q: Any, k: Any, v: Any, out: Any, sums: Any, causal: bool, scale: float) -> Any:
    """Gradients by q, k and v; [b h t d] each, with heads innermost but one in memory."""
    if sums is not None:
        ct, q, k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (ct, q, k, v))
        return flash_backward(ct, q, k, v, out, sums, 0.0, causal, scale=scale)
    weights = _weights(q, k, causal, scale)
    inner = (ct * out).sum(-1, keepdim=True)
    by_scores = weights * (torch.matmul(ct, v.transpose(-1, -2)) - inner)
    by_q = torch.matmul(by_scores, k) * scale
    by_k = torch.matmul(by_scores.transpose(-1, -2), q * scale)
    return by_q, by_k, torch.matmul(weights.transpose(-1, -2), ct)


def _weights(q: Any, k: Any, causal: bool, scale: float) -> Any:
    scores = torch.matmul(q * scale, k.transpose(-1, -2))
    if causal:
        seen = torch.ones(scores.shape[-2:], dtype=torch.bool).tril()
        scores = scores.masked_fill(~seen, float("-inf"))
    return torch.softmax(scores, -1)


def entropy(logits: Any, labels: Any) -> tuple[Any, Any, Any]:
    """-log softmax(logits)[label] of each row, log softmax [rows classes], labels [rows 1] i64."""
    logs = torch.log_softmax(logits.reshape(-1, logits.shape[-1]), 1)
    index = labels.reshape(-1).long()
    loss = nll_loss(logs, index, None, 0, _NO_LABEL)[0]
    return loss.reshape(labels.shape), logs, index.unsqueeze(1)


def entropy_grad(logs: Any, index: Any, ct: Any, minus: Any) -> Any:
    """ct · (softmax - one-hot) [rows classes] over the memory of `logs`; minus: [rows 1] of -1; ct: [rows 1] or float."""
    return logs.exp_().scatter_add_(1, index, minus).mul_(ct)


@lru_cache(maxsize=64)
def minus_ones(rows: int, dtype: Any) -> Any:
    """[rows 1] of -1; only read."""
    return torch.full((rows, 1), -1.0, dtype=dtype, device="cpu")


def max_pool(x: Any, window: Any, stride: Any, padding: Any) -> tuple[Any, Any]:
    """The largest of each window of [n c h w] and its place, both contiguous.

    torch's kernel is vectorized for channels last only, and then so fast that reordering pays.
    """
    out, places = pool(x.contiguous(memory_format=torch.channels_last), window, stride, padding)
    return out.contiguous(), places.contiguous()
