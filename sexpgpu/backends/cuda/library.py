"""What a library computes: contractions, attention, and every op that no kernel of ours is worth.

A function of `OUT` writes into a given tensor, and one of `JOINT` into several. Matrix products are cuBLASLt's by the algorithm of choice
(`choice.py`), or torch's. Any other op is called through its reference, on the device.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from sexpgpu.backends.cuda import choice, modules
from sexpgpu.backends.cuda.attention import backward as gradients
from sexpgpu.backends.cuda.attention import fits, partial_sums
from sexpgpu.backends.cuda.cartesian import sweep
from sexpgpu.backends.cuda.cartesian.launch import Products, on_device
from sexpgpu.backends.cuda.chains import chain_ahead, chain_scratch, row_chain
from sexpgpu.backends.cuda.cublaslt import TYPES, Product
from sexpgpu.backends.cuda.rank_maps import map_ahead, rank_map, rank_weights, weights_ahead, weights_scratch
from sexpgpu.backends.cuda.references import reference
from sexpgpu.backends.cuda.tall import matmul_sum, tall_ahead, tall_scratch
from sexpgpu.backends.interpreter.dtypes import TORCH
from sexpgpu.diagnostics import fail
from sexpgpu.ir import Node, Origins
from sexpgpu.ops import build
from sexpgpu.ops.linear_entropy import LOSS
from sexpgpu.ops.random import DRAWS
from sexpgpu.passes.epilogues import sums_itself
from sexpgpu.passes.schedule.views import layout


def _rows(x: torch.Tensor) -> torch.Tensor | None:
    """[… m n] as […·m n] without a copy, or None."""
    try:
        return x.view(-1, x.shape[-1])
    except RuntimeError:
        return None


def multiply(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor, added: bool = False) -> None:
    """out [m n] = a [m k] · b [k n], or out += it; out in f32 where the operands are narrower. By the algorithm of choice."""
    wide = out.dtype != a.dtype

    def apart() -> None:
        if wide and added:
            torch.ops.aten.addmm.dtype_out(out, a, b, out.dtype, out=out)
        elif wide:
            torch.mm(a, b, out_dtype=out.dtype, out=out)
        elif added:
            torch.addmm(out, a, b, out=out)
        else:
            torch.mm(a, b, out=out)

    _run(lambda: Product(a, b, out, c=out if added else None, tf32=_tf32()), apart, [out])


def _run(make: Callable[[], Product], apart: Callable[[], Any], outputs: Sequence[torch.Tensor]) -> None:
    """By cuBLASLt where it has products of these types, on a device; else `apart`."""
    if outputs[0].device.type == "cuda" and all(out.dtype in TYPES for out in outputs):
        choice.run(make, apart, outputs)
    else:
        apart()


def _tf32() -> bool:
    return torch.backends.cuda.matmul.allow_tf32


def _reference(node: Node, operands: Sequence[torch.Tensor], out: torch.Tensor) -> bool:
    """Off the device, the op's reference, which rounds where the vendor's epilogue does; whether it was that."""
    if out.device.type == "cpu" or not out.numel():
        out.copy_(reference(node, operands))
        return True
    return False


def matmul(node: Node, a: torch.Tensor, b: torch.Tensor, out: torch.Tensor) -> None:
    """The matrix product, summed in f32; one product of two matrices where the operands allow it."""
    wide = out.dtype != a.dtype
    if (wide or a.dtype in (torch.bfloat16, torch.float16)) and _reference(node, (a, b), out):
        return
    if a.dim() > 1 and b.dim() == 2:
        flat = a if a.dim() == 2 else _rows(a)
        if flat is not None:
            multiply(flat, b, out.view(-1, out.shape[-1]))
            return
    if wide:
        out.copy_(torch.matmul(a.float(), b.float()))
    elif a.dim() == b.dim() == 3 and a.shape[0] == b.shape[0]:
        _run(lambda: Product(a, b, out, tf32=_tf32()), lambda: torch.bmm(a, b, out=out), [out])
    else:
        torch.matmul(a, b, out=out)


def matmul_bias(node: Node, a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor, out: torch.Tensor) -> None:
    """The product plus a row, added to the sums before they are rounded."""
    if not _reference(node, (a, b, bias), out):
        _biased(_flat(a), b, bias, out.view(-1, out.shape[-1]))


def _biased(a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor, out: torch.Tensor) -> None:
    _run(lambda: Product(a, b, out, "bias", bias), lambda: torch.addmm(bias, a, b, out=out), [out])


def _flat(a: torch.Tensor) -> torch.Tensor:
    """[… m n] as […·m n], copied where it must be."""
    found = a if a.dim() == 2 else _rows(a)
    return a.reshape(-1, a.shape[-1]) if found is None else found


def matmul_gelu(node: Node, operands: Sequence[torch.Tensor], outs: Mapping[int, torch.Tensor]) -> None:
    """0: gelu of the product plus a row; 1: what it is applied to. The vendor's epilogue takes gelu of the sums in f32; apart, of the
    rounded ones."""
    if _references(node, operands, outs):
        return
    a, b, bias = operands
    flat, found = _flat(a), {of: out.view(-1, out.shape[-1]) for of, out in outs.items()}
    if 0 not in found:
        _biased(flat, b, bias, found[1])
        return
    out, before = found[0], found.get(1)

    def apart() -> None:
        x = torch.addmm(bias, flat, b) if before is None else torch.addmm(bias, flat, b, out=before)
        torch.ops.aten.gelu.out(x, approximate="tanh", out=out)

    _run(lambda: Product(flat, b, out, "gelu" if before is None else "gelu-kept", bias, before), apart, [out] if before is None else [out, before])


def matmul_gelu_grad(node: Node, a: torch.Tensor, b: torch.Tensor, x: torch.Tensor, out: torch.Tensor) -> None:
    """The product times gelu's derivative at x; apart, the rounded product."""
    if _reference(node, (a, b, x), out):
        return
    flat, target, at = _flat(a), out.view(-1, out.shape[-1]), _flat(x)

    def apart() -> None:
        torch.mm(flat, b, out=target)
        torch.ops.aten.gelu_backward.grad_input(target, at, approximate="tanh", grad_input=target)

    _run(lambda: Product(flat, b, target, "gelu-grad", aux=at), apart, [target])


def matmul_rows(node: Node, operands: Sequence[torch.Tensor], outs: Mapping[int, torch.Tensor]) -> None:
    """0: a product in f32; 1: the sums over the rows of its right operand."""
    if _references(node, operands, outs):
        return
    a, b = operands
    if 0 not in outs:
        torch.sum(b, 0, dtype=outs[1].dtype, out=outs[1])
        return
    if 1 not in outs:
        multiply(a, b, outs[0])
        return

    def apart() -> None:
        torch.mm(a, b, out_dtype=outs[0].dtype, out=outs[0])
        torch.sum(b, 0, dtype=outs[1].dtype, out=outs[1])

    _run(lambda: Product(a, b, outs[0], "sum-of-b", outs[1]), apart, [outs[0], outs[1]])


def matmul_add(node: Node, a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor, c: torch.Tensor, out: torch.Tensor) -> None:
    """The product plus a row plus a tensor, all in f32."""
    if _reference(node, (a, b, bias, c), out):
        return
    flat, added, target = _flat(a), _flat(c), out.view(-1, out.shape[-1])

    def apart() -> None:
        torch.mm(flat, b, out_dtype=target.dtype, out=target)
        target.add_(bias).add_(added)

    _run(lambda: Product(flat, b, target, "bias", bias, c=added), apart, [target])


def _references(node: Node, operands: Sequence[torch.Tensor], outs: Mapping[int, torch.Tensor]) -> bool:
    return any([_reference(build(node.op, *node.inputs, **{**node.attrs, "of": of}), operands, out) for of, out in outs.items()])


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

    def packed(self, node: Node, operands: list[Any], outs: Mapping[int, torch.Tensor], parts: Sequence[torch.Tensor]) -> None:
        """0: the three gradients side by side, [b t 3·h·d]; 1: their sums over b and t, or `parts` of them. A way that is not our kernels'
        adds up what it rounded."""
        b, h, t, d = operands[1].shape
        out = outs[0] if 0 in outs else torch.empty((b, t, 3 * h * d), dtype=operands[1].dtype, device=operands[1].device)
        joint = out.view(b, t, 3, h, d)
        homes = [joint[:, :, i].transpose(1, 2) for i in range(3)]
        made = self._gradients(node, operands, homes, parts)
        for home, found in zip(homes, made, strict=True):
            if found is not home:
                home.copy_(found)
        if 1 in outs and not (parts and made[0] is homes[0]):
            _leave(torch.sum(out, (0, 1), dtype=outs[1].dtype), outs[1], parts)

    def _gradients(self, node: Node, operands: list[Any], homes: list[Any] | None = None, parts: Sequence[torch.Tensor] = ()) -> list[Any]:
        ct, q, k, v, out, *masks = operands
        a, aten = node.attrs, torch.ops.aten
        rest = self.left.pop(node.inputs[4], None)
        if rest is not None and q.shape[-3] == k.shape[-3]:
            sums, cum_q, cum_k, max_q, max_k, seed, offset = rest[:7]
            if fits(q, k, v) and (self.deterministic or homes is not None):
                if homes is None:
                    homes = [torch.empty_like(out) for _ in range(3)]
                gradients(ct, q, k, v, out, sums, (homes[0], homes[1], homes[2]), a["causal"], a["scale"], sums=tuple(parts))
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


def partials(node: Node) -> tuple[tuple[int, int], ...]:
    """Shapes of the partial sums, f32, in which the call of a node leaves it; whoever runs the call adds them up. (): it gives the value."""
    if node.op != "attend-grad-packed" or not node.attrs["of"] or not sums_itself(node):
        return ()
    b, h, t, d = node.inputs[1].type.shape
    return partial_sums(b, h, t, d)


def _leave(total: torch.Tensor, out: torch.Tensor, parts: Sequence[torch.Tensor]) -> None:
    """A row of sums into `out`, or where partial sums are wanted, all of it into the first of each."""
    start = 0
    for part in parts:
        part.zero_()
        part[0] = total[start : start + part.shape[1]]
        start += part.shape[1]
    if not parts:
        out.copy_(total)


TOGETHER = 32  # updates that one program adds, one after the other


def scatter_onto(node: Node, x: torch.Tensor, updates: torch.Tensor, indices: torch.Tensor, out: torch.Tensor) -> None:
    """x with each update added at its index, those of one index in the order in which they stand: always the same bits."""
    if _reference(node, (x, updates, indices), out):
        return
    if x.data_ptr() != out.data_ptr():
        out.copy_(x)
    if indices.numel():
        add_rows(out, updates.reshape(-1, out.shape[-1]).contiguous(), indices.reshape(-1))


def add_rows(out: torch.Tensor, rows: torch.Tensor, indices: torch.Tensor) -> None:
    """out[indices[e]] += rows[e]; out [places columns] and rows [count columns] f32 or f64, each in one piece."""
    count, columns = rows.shape
    keys, order = torch.sort(indices, stable=True)
    chunks, wide = -(-count // TOGETHER), min(256, 1 << (columns - 1).bit_length())
    ends = torch.empty((2, chunks, columns), dtype=out.dtype, device=out.device)
    grid = chunks, -(-columns // wide)
    modules.by_hand("scattered")[grid](keys, order, rows, out, ends[0], ends[1], count, out.shape[0], columns, TOGETHER, wide, num_warps=2)
    modules.by_hand("gathered_ends")[grid](keys, out, ends[0], ends[1], count, out.shape[0], columns, TOGETHER, wide, 8, num_warps=4)


CHUNK = 7 << 28  # bytes of logits that stand at once, about, at most
LEAST = 1 << 28  # and in few parts where they are fewer: a part is a product of its own
PARTS = 4  # each part adds its gradient by the weights to that of the others: GPT-2's, 154 MB, is read and written again for each part but the first
TILE = 256  # rows that a product of a part is cut into: what is left over is computed, too


def logits_rows(rows: int, classes: int, width: int) -> int:
    """Rows of a head whose logits of `width` bytes stand at once: equal parts, but for whole tiles."""
    most = min(CHUNK, max(LEAST, -(-rows // PARTS) * classes * width))
    step = min(rows, max(1, most // (classes * width)))
    step = -(-rows // -(-rows // step))
    return step if step < TILE else min(rows, -(-step // TILE) * TILE)


def heads_scratch(node: Node) -> int:
    """Bytes of the logits that a head makes beside its results."""
    x, weight = node.inputs[:2]
    width = x.type.bytes // max(1, x.type.size)
    rows, classes = x.type.size // x.type.shape[-1], weight.type.shape[1]
    return logits_rows(rows, classes, width) * classes * width


ROW = range(1 << 14, (1 << 16) + 1)  # classes whose logits a program of 16 warps holds in registers


def _row_kernel(dtype: torch.dtype, classes: int, grad: bool) -> tuple[str, tuple[Any, ...], dict[str, Any]]:
    """The kernel of a head's rows of logits, what follows its tensors, and Triton's options."""
    if choice.SWITCH.once and grad and dtype == torch.bfloat16 and classes % 2 == 0 and classes in ROW:
        return "entropy_once", (classes, 2048), {"num_warps": 16}  # four pairs a thread in each tile
    return "entropy_rows", (classes, min(4096, 1 << (classes - 1).bit_length()), dtype == torch.bfloat16, grad, 3), {"num_warps": 8}


def entropy(logits: torch.Tensor, labels: torch.Tensor, ct: torch.Tensor | None, losses: torch.Tensor) -> None:
    """Losses [n …] of rows of logits [n classes] at labels [n …], i32; with ct [n …] the gradient times it, over the logits."""
    rows, classes = logits.shape
    name, constants, options = _row_kernel(logits.dtype, classes, ct is not None)
    given = logits.view(torch.int32) if name == "entropy_once" else logits
    modules.by_hand(name)[(rows,)](given, labels, losses if ct is None else ct, losses, *constants, **options)


def heads_ahead(node: Node) -> list[modules.Wanted]:
    """What `entropy` launches, to be compiled with others."""
    x, weight, labels = (i.type for i in node.inputs[:3])
    wide = torch.float64 if x.dtype == "f64" else torch.float32
    name, constants, options = _row_kernel(TORCH[x.dtype], weight.shape[1], len(node.inputs) > 3)
    given = torch.int32 if name == "entropy_once" else TORCH[x.dtype]
    return [(modules.by_hand(name), (given, TORCH[labels.dtype], wide, wide, *constants), options)]


def heads(node: Node, operands: list[torch.Tensor], outs: dict[int, torch.Tensor], scratch: torch.Tensor) -> None:
    """linear-cross-entropy and its gradients (by x, by the weight, and the losses): the logits of some rows at a time, in
    `scratch`, turned into their gradient where they stand. `outs`: number of a result -> where it goes, those that are wanted."""
    if scratch.device.type == "cpu":
        for of, out in outs.items():
            one = build(node.op, *node.inputs, **({"of": of} if "of" in node.attrs else {}))
            order = layout(one)
            found = reference(one, operands)
            out.copy_(found if order is None else found.permute(order))
        return
    heads_in_parts(operands, outs, scratch)


def heads_in_parts(operands: Sequence[torch.Tensor], outs: Mapping[int, torch.Tensor], scratch: torch.Tensor) -> None:
    """What `heads` does on a device; the gradient by a weight that is a transposed matrix goes to where that matrix would lie."""
    x, weight, labels, *more = operands
    x, labels = x.reshape(-1, x.shape[-1]), labels.reshape(-1)
    rows, classes = x.shape[0], weight.shape[1]
    step = logits_rows(rows, classes, x.element_size())
    wide = torch.float64 if x.dtype == torch.float64 else torch.float32
    logits = scratch[: step * classes * x.element_size()].view(x.dtype).view(step, classes)
    losses = outs[LOSS].view(-1) if LOSS in outs else torch.empty(rows, dtype=wide, device=x.device)
    ct = more[0].reshape(-1).contiguous() if more else None
    turned = weight.stride(0) == 1
    by_x = outs[0].view(x.shape) if 0 in outs else None
    by_weight = outs.get(1)
    for start in range(0, rows, step):
        stop = min(rows, start + step)
        part, piece = logits[: stop - start], x[start:stop]
        multiply(piece, weight, part)
        entropy(part, labels[start:], None if ct is None else ct[start:], losses[start:])
        if by_x is not None:
            multiply(part, weight.T, by_x[start:stop])
        if by_weight is not None:
            a, b = (part.T, piece) if turned else (piece.T, part)
            multiply(a, b, by_weight, added=start > 0)


OUT: dict[str, Callable[..., None]] = {
    "matmul": matmul, "matmul-f32": matmul, "matmul-bias": matmul_bias, "matmul-gelu-grad": matmul_gelu_grad,
    "matmul-add": matmul_add, "rank-map": rank_map, "scatter-onto": scatter_onto,
}  # fmt: skip

#: op -> function (node, operands, number of the output -> tensor) that makes, at the first of several nodes over the same operands,
#: the outputs of all of them; a node's own number is its attribute `of`
JOINT: dict[str, Callable[..., None]] = {"rank-weights": rank_weights, "row-chain": row_chain, "matmul-sum": matmul_sum, "matmul-gelu": matmul_gelu, "matmul-rows": matmul_rows, "linear-cross-entropy": heads, "linear-cross-entropy-grad": heads}

#: op of `JOINT` -> bytes that its function takes beside its outputs, as a last argument
SCRATCH: dict[str, Callable[[Node], int]] = {"rank-weights": weights_scratch, "row-chain": chain_scratch, "matmul-sum": tall_scratch, "tensor-product-parts": sweep.scratch, "linear-cross-entropy": heads_scratch, "linear-cross-entropy-grad": heads_scratch}

#: op -> what it launches, to be compiled before anything runs
AHEAD: dict[str, Callable[[Node], list[modules.Wanted]]] = {"rank-map": map_ahead, "rank-weights": weights_ahead, "row-chain": chain_ahead, "matmul-sum": tall_ahead, "tensor-product-parts": sweep.ahead, "linear-cross-entropy": heads_ahead, "linear-cross-entropy-grad": heads_ahead}

#: ops that, as those of `JOINT`, write into given tensors, but by what their library left before (`Library.put`)
PUT = frozenset({"attend-grad-packed", "tensor-product-parts"})


class Library:
    """What calls leave for one another within a step: attention for its gradient."""

    def __init__(self, deterministic: bool):
        self.attention = Attention(deterministic)
        self.products = Products(on_device)
        self.own: dict[str, Callable[..., torch.Tensor]] = {
            "attend": self.attention.forward,
            "attend-grad": self.attention.backward,
            "tensor-product": self.products.call,
            "tensor-product-grad": self.products.call,
            "tensor-product-joint": self.products.call,
            "scatter-add": self.products.added,
        }

    def put(self, node: Node, operands: list[Any], outs: Mapping[int, torch.Tensor], more: Any = ()) -> None:
        """The values of an op of `PUT`, into `outs`, number of a result -> tensor. more: of an op of `SCRATCH` its bytes; else partial sums, of what has `partials`."""
        in_parts = node.op in SCRATCH
        if operands[0].device.type != "cpu" and (not in_parts or sweep.takes(node)):
            if in_parts:
                sweep.run(on_device(), node, operands, outs, more, self.products.edges_of(node, operands))
            else:
                self.attention.packed(node, operands, outs, more)
            return
        for of, out in outs.items():
            found = reference(build(node.op, *node.inputs, **{**node.attrs, "of": of}), operands)
            _leave(found, out, more) if of and not in_parts else out.copy_(found)

    def forget(self) -> None:
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
    if node.op in kept.own and device.type != "cpu":
        found = kept.own[node.op](node, operands)
        order = layout(node)
        return found.contiguous() if order is None else found.permute(order).contiguous()
    order, found = layout(node), reference(node, operands, device)
    return found.contiguous() if order is None else found.permute(order).contiguous()
