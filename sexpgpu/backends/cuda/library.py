"""What a library computes: contractions, attention, and every op that no kernel of ours is worth.

A function of `OUT` writes into a given tensor; any other op is called through its reference, on the device.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from sexpgpu.backends.cuda import modules
from sexpgpu.backends.cuda.attention import backward as gradients
from sexpgpu.backends.cuda.attention import fits
from sexpgpu.backends.cuda.cartesian.launch import Products, on_device
from sexpgpu.diagnostics import fail
from sexpgpu.ir import Node, Origins
from sexpgpu.ops import table
from sexpgpu.ops.random import DRAWS
from sexpgpu.passes.schedule.views import layout


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


def matmul_bias(node: Node, a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor, out: torch.Tensor) -> None:
    """The product plus a row, added to the sums before they are rounded where the library takes it so."""
    flat = a if a.dim() == 2 else _rows(a)
    if out.device.type == "cpu" or flat is None:
        out.copy_(table()[node.op].reference(torch, node, [a, b, bias]))
        return
    torch.addmm(bias, flat, b, out=out.view(-1, out.shape[-1]))


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
    """Attention by torch's kernels; what a forward pass leaves for its gradient is kept until that has run.

    Deterministic, or where its three parts belong side by side, the gradient is by our kernels, which need what cuDNN's forward pass
    leaves; deterministic where they do not fit, by torch's flash attention. Otherwise by cuDNN's, which adds in an order of its own.
    """

    def __init__(self, deterministic: bool):
        self.deterministic = deterministic
        self.left: dict[Any, Any] = {}

    def forward(self, node: Node, operands: list[Any]) -> torch.Tensor:
        q, k, v, *masks = operands
        if q.shape[-3:-2] != k.shape[-3:-2]:
            k, v = (x.repeat_interleave(q.shape[-3] // x.shape[-3], -3) for x in (k, v))
        a, aten = node.attrs, torch.ops.aten
        if _fused(q, v, node, masks):
            if self.deterministic and not fits(q, k, v):
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

    def packed(self, node: Node, operands: list[Any]) -> torch.Tensor:
        """The three gradients side by side: [b t 3·h·d]."""
        q = operands[1]
        b, h, t, d = q.shape
        joint = torch.empty((b, t, 3, h, d), dtype=q.dtype, device=q.device)
        homes = [joint[:, :, i].transpose(1, 2) for i in range(3)]
        for home, found in zip(homes, self._gradients(node, operands, homes), strict=True):
            if found is not home:
                home.copy_(found)
        return joint.view(node.type.shape)

    def _gradients(self, node: Node, operands: list[Any], homes: list[Any] | None = None) -> list[Any]:
        ct, q, k, v, out, *masks = operands
        a, aten = node.attrs, torch.ops.aten
        rest = self.left.pop(node.inputs[4], None)
        if rest is not None and q.shape[-3] == k.shape[-3]:
            sums, cum_q, cum_k, max_q, max_k, seed, offset = rest[:7]
            if fits(q, k, v) and (self.deterministic or homes is not None):
                if homes is None:
                    homes = [torch.empty_like(out) for _ in range(3)]
                gradients(ct, q, k, v, out, sums, (homes[0], homes[1], homes[2]), a["causal"], a["scale"])
                return homes
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


CHUNK = 1 << 30  # bytes of logits that stand at once


class Heads:
    """linear-cross-entropy: the logits of some rows at a time, turned into their gradient where they stand."""

    def __init__(self) -> None:
        self.left: dict[Any, list[Any]] = {}

    def forward(self, node: Node, operands: list[Any]) -> torch.Tensor:
        x, weight, labels = operands
        return self._run(x, weight, labels, None)[2].view(node.type.shape)

    def backward(self, node: Node, operands: list[Any]) -> torch.Tensor:
        key, of = node.inputs, node.attrs["of"]
        if key not in self.left:
            self.left[key] = self._run(*operands)
        parts = self.left[key]
        found, parts[of] = parts[of], None
        return found.view(node.type.shape) if of != 1 else found

    def forget(self) -> None:
        """What no gradient asked for."""
        self.left.clear()

    def _run(self, x: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor, ct: torch.Tensor | None) -> list[Any]:
        entropy_rows = modules.by_hand("entropy_rows")
        x, labels = x.reshape(-1, x.shape[-1]), labels.reshape(-1)
        rows, classes = x.shape[0], weight.shape[1]
        step = min(rows, max(1, CHUNK // (classes * x.element_size())))
        step = -(-rows // -(-rows // step))
        wide = torch.float64 if x.dtype == torch.float64 else torch.float32
        logits = torch.empty((step, classes), dtype=x.dtype, device=x.device)
        losses = torch.empty(rows, dtype=torch.float32, device=x.device)
        low = x.dtype != wide
        block, warps = min(4096, 1 << (classes - 1).bit_length()), 8
        by_x = by_weight = None
        if ct is not None:
            ct = ct.reshape(-1).contiguous()
            by_x = torch.empty_like(x, memory_format=torch.contiguous_format)
            turned = weight.stride(0) == 1
            by_weight = torch.empty((classes, x.shape[1]) if turned else tuple(weight.shape), dtype=wide, device=x.device)
        for start in range(0, rows, step):
            stop = min(rows, start + step)
            part, piece = logits[: stop - start], x[start:stop]
            torch.mm(piece, weight, out=part)
            given = losses if ct is None else ct[start:]
            entropy_rows[(stop - start,)](part, labels[start:], given, losses[start:], classes, block, low, ct is not None, 3, num_warps=warps)
            if ct is None:
                continue
            torch.mm(part, weight.T, out=by_x[start:stop])
            a, b = (part.T, piece) if turned else (piece.T, part)
            if not low:
                torch.mm(a, b, out=by_weight) if start == 0 else torch.addmm(by_weight, a, b, out=by_weight)
            elif start == 0:
                torch.mm(a, b, out_dtype=wide, out=by_weight)
            else:
                torch.ops.aten.addmm.dtype_out(by_weight, a, b, wide, out=by_weight)
        return [by_x, by_weight, losses]


OUT: dict[str, Callable[..., None]] = {"matmul": matmul, "matmul-f32": matmul, "matmul-bias": matmul_bias}


class Library:
    """What calls leave for one another within a step: attention for its gradient, a head its three results."""

    def __init__(self, deterministic: bool):
        self.attention, self.heads = Attention(deterministic), Heads()
        self.products = Products(on_device)
        self.own: dict[str, Callable[..., torch.Tensor]] = {
            "attend": self.attention.forward,
            "attend-grad": self.attention.backward,
            "attend-grad-packed": self.attention.packed,
            "linear-cross-entropy": self.heads.forward,
            "linear-cross-entropy-grad": self.heads.backward,
            "tensor-product": self.products.call,
            "tensor-product-grad": self.products.call,
            "tensor-product-joint": self.products.call,
        }

    def forget(self) -> None:
        self.heads.forget()
        self.products.forget()
        self.attention.left.clear()


def require(node: Node, origins: Origins | None) -> None:
    """E-DEV-006 for an op that neither a kernel nor a call computes: a draw, or a marker that a pass should have replaced."""
    if node.op not in DRAWS and node.op != "grad":
        return
    origin = origins.of(node) if origins is not None else None
    where = f" in {origin.paths[0]}" if origin is not None and origin.paths else ""
    fail("E-DEV-006", f"`{node.op}` {node.type}{where} has no kernel for `cuda`", origin.spans[0] if origin is not None and origin.spans else None,
         help="--device cpu runs every op")


def call(node: Node, operands: list[Any], device: torch.device, kept: Library) -> torch.Tensor:
    """The op's value on the device, in new memory of the op's layout."""
    if node.op in kept.own and device.type == "cuda":
        found = kept.own[node.op](node, operands)
        order = layout(node)
        if node.op == "linear-cross-entropy-grad" and node.attrs["of"] == 1:
            return found  # made in its layout
        return found.contiguous() if order is None else found.permute(order).contiguous()
    order = layout(node)
    if order is not None:
        return table()[node.op].reference(torch, node, operands).permute(order).contiguous()
    with torch.device(device):
        return table()[node.op].reference(torch, node, operands).contiguous()
