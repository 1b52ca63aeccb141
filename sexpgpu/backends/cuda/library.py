"""What a library computes: contractions, attention, and every op that no kernel of ours is worth.

A function of `OUT` writes into a given tensor; any other op is called through its reference, on the device.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from sexpgpu.ir import Node
from sexpgpu.ops import table
from sexpgpu.passes.schedule.views import LAYOUTS


def _rows(x: torch.Tensor) -> torch.Tensor | None:
    """[… m n] as […·m n] without a copy, or None."""
    try:
        return x.view(-1, x.shape[-1])
    except RuntimeError:
        return None


def matmul(node: Node, a: torch.Tensor, b: torch.Tensor, out: torch.Tensor) -> None:
    """The matrix product, summed in f32; one product of two matrices where the operands allow it."""
    wide = node.type.dtype != node.inputs[0].type.dtype
    if out.device.type == "cpu" and a.dtype in (torch.bfloat16, torch.float16):
        out.copy_(torch.matmul(a.float(), b.float()))
        return
    if a.dim() > 1 and b.dim() == 2:
        flat = a if a.dim() == 2 else _rows(a)
        if flat is not None:
            target = out.view(-1, out.shape[-1])
            if wide:
                torch.mm(flat, b, out_dtype=out.dtype, out=target)
            else:
                torch.mm(flat, b, out=target)
            return
    if wide:
        out.copy_(torch.matmul(a.float(), b.float()))
    elif a.dim() == b.dim() == 3 and a.shape[0] == b.shape[0]:
        torch.bmm(a, b, out=out)
    else:
        torch.matmul(a, b, out=out)


def _masked(node: Node, device: torch.device, keys: int, masks: list[Any]) -> Any:
    """The mask that torch's attention takes, or None."""
    causal, window = node.attrs["causal"], node.attrs["window"]
    band = None
    if window is not None or (causal and masks):
        place = torch.arange(keys, device=device)
        apart = place[:, None] - place
        band = apart >= 0 if causal else None
        if window is not None:
            band = apart.abs() < window if band is None else band & (apart.abs() < window)
    if not masks:
        return band
    if band is None:
        return masks[0]
    return masks[0] & band if masks[0].dtype == torch.bool else masks[0].masked_fill(~band, float("-inf"))


def _fused(q: torch.Tensor, v: torch.Tensor, node: Node, masks: list[Any]) -> bool:
    return q.dtype in (torch.bfloat16, torch.float16) and q.dim() == 4 and not masks and node.attrs["window"] is None and q.shape[-1] == v.shape[-1]


class Attention:
    """Attention by torch's kernels; what a forward pass leaves for its gradient is kept until that has run."""

    def __init__(self, deterministic: bool):
        self.deterministic = deterministic
        self.left: dict[Any, Any] = {}

    def forward(self, node: Node, operands: list[Any]) -> torch.Tensor:
        q, k, v, *masks = operands
        if q.shape[-3:-2] != k.shape[-3:-2]:
            k, v = (x.repeat_interleave(q.shape[-3] // x.shape[-3], -3) for x in (k, v))
        a = node.attrs
        if _fused(q, v, node, masks):
            aten = torch.ops.aten
            if self.deterministic:
                out, *rest = aten._scaled_dot_product_flash_attention(q, k, v, 0.0, a["causal"], False, scale=a["scale"])
            else:
                out, *rest = aten._scaled_dot_product_cudnn_attention(q, k, v, None, True, 0.0, a["causal"], False, scale=a["scale"])
            self.left[node] = rest
            return out
        mask = _masked(node, q.device, k.shape[-2], masks)
        return torch.nn.functional.scaled_dot_product_attention(
            q, k, v, None if mask is None else mask.expand(*q.shape[:-1], k.shape[-2]), is_causal=a["causal"] and mask is None, scale=a["scale"]
        )

    def backward(self, node: Node, operands: list[Any]) -> torch.Tensor:
        key = node.inputs
        if key not in self.left:
            self.left[key] = self._gradients(node, operands)
        parts = self.left[key]
        found, parts[node.attrs["of"]] = parts[node.attrs["of"]], None
        if all(p is None for p in parts):
            del self.left[key]
        return found

    def _gradients(self, node: Node, operands: list[Any]) -> list[Any]:
        ct, q, k, v, out, *masks = operands
        a, aten = node.attrs, torch.ops.aten
        rest = self.left.pop(node.inputs[4], None)
        if rest is not None and q.shape[-3] == k.shape[-3]:
            sums, cum_q, cum_k, max_q, max_k, seed, offset = rest[:7]
            if self.deterministic:
                return list(aten._scaled_dot_product_flash_attention_backward(ct, q, k, v, out, sums, cum_q, cum_k, max_q, max_k, 0.0, a["causal"], seed, offset, scale=a["scale"]))
            return list(aten._scaled_dot_product_cudnn_attention_backward(ct, q, k, v, out, sums, seed, offset, None, cum_q, cum_k, max_q, max_k, 0.0, a["causal"], scale=a["scale"]))
        with torch.inference_mode(False), torch.enable_grad():
            leaves = [x.clone().requires_grad_() for x in (q, k, v)]
            wide = leaves if q.shape[-3:-2] == k.shape[-3:-2] else [leaves[0], *(x.repeat_interleave(q.shape[-3] // x.shape[-3], -3) for x in leaves[1:])]
            mask = _masked(node, q.device, k.shape[-2], [m.clone() for m in masks])
            found = torch.nn.functional.scaled_dot_product_attention(
                *wide, None if mask is None else mask.expand(*q.shape[:-1], k.shape[-2]), is_causal=a["causal"] and mask is None, scale=a["scale"]
            )
            return list(torch.autograd.grad(found, leaves, ct.clone()))


OUT: dict[str, Callable[..., None]] = {"matmul": matmul, "matmul-f32": matmul}


def call(node: Node, operands: list[Any], device: torch.device, attention: Attention) -> torch.Tensor:
    """The op's value on the device, in new memory of the op's layout."""
    order = LAYOUTS.get(node.op)
    if order is not None and device.type == "cuda":
        out = attention.forward(node, operands) if node.op == "attend" else attention.backward(node, operands)
        return out.permute(order).contiguous() if len(order) == node.type.rank else out.contiguous()
    if order is not None and len(order) == node.type.rank:
        return table()[node.op].reference(torch, node, operands).permute(order).contiguous()
    with torch.device(device):
        return table()[node.op].reference(torch, node, operands).contiguous()
