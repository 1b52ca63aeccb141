"""The binding: what it tells the library about row-major tensors gives the product that is meant, with every epilogue."""

from __future__ import annotations

import ctypes
from types import SimpleNamespace

import pytest
import torch
from vendor import Library, Vendor

from sexpgpu.backends.cuda import cublaslt
from sexpgpu.backends.cuda.cublaslt import EPILOGUES, Product, Unavailable

SPACE = torch.empty(64, dtype=torch.uint8)


@pytest.fixture(autouse=True)
def _stream(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: SimpleNamespace(cuda_stream=0))


def lying(generator: torch.Generator, shape: tuple[int, ...], turned: bool, dtype: torch.dtype, extra: int = 0) -> torch.Tensor:
    """Random values, transposed in memory or not, with `extra` elements between rows."""
    *stack, rows, columns = shape
    if turned:
        return torch.randn(*stack, columns, rows + extra, generator=generator).to(dtype)[..., :rows].mT
    return torch.randn(*stack, rows, columns + extra, generator=generator).to(dtype)[..., :columns]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("turned", [(False, False), (False, True), (True, False), (True, True)], ids=str)
@pytest.mark.parametrize("stack", [(), (3,)], ids=str)
def test_a_product_of_tensors_as_they_lie(dtype: torch.dtype, turned: tuple[bool, bool], stack: tuple[int, ...]):
    g, lt = torch.Generator().manual_seed(0), Library(Vendor())
    for extra in (0, 3):
        a, b = lying(g, (*stack, 5, 7), turned[0], dtype, extra), lying(g, (*stack, 7, 6), turned[1], dtype, extra)
        out = torch.full((*stack, 5, 6), float("nan"))
        product = Product(a, b, out, lt=lt)
        product.run(product.candidates(2)[0], SPACE)
        torch.testing.assert_close(out, a.float() @ b.float(), rtol=1e-5, atol=1e-5)


def test_sizes_of_one_and_slices_of_larger_tensors():
    g, lt = torch.Generator().manual_seed(1), Library(Vendor())
    for m, n, k in ((1, 6, 7), (5, 1, 7), (5, 6, 1), (1, 1, 1)):
        for a in (torch.randn(m, k, generator=g), torch.randn(k, m, generator=g).T, torch.randn(2 * m, 2 * k, generator=g)[:m, :k]):
            b, out = torch.randn(k, n, generator=g), torch.empty(m, n)
            product = Product(a, b, out, lt=lt)
            product.run(product.candidates(1)[0], SPACE)
            torch.testing.assert_close(out, a @ b, rtol=1e-5, atol=1e-5)


class Given:
    """Tensors of one product [16 24] over 32."""

    def __init__(self, out: torch.dtype = torch.bfloat16):
        g = torch.Generator().manual_seed(2)
        self.a, self.b = lying(g, (16, 32), True, torch.bfloat16), lying(g, (32, 24), False, torch.bfloat16) / 6
        self.out, self.c = torch.empty(16, 24, dtype=out), torch.randn(16, 24, generator=g).to(out)
        self.row, self.aux = torch.randn(24, generator=g).to(out), torch.randn(16, 24, generator=g).to(out)
        self.sums = self.a.float() @ self.b.float()

    def run(self, epilogue: str, row: torch.Tensor | None = None, aux: torch.Tensor | None = None, c: torch.Tensor | None = None) -> torch.Tensor:
        product = Product(self.a, self.b, self.out, epilogue, row, aux, c, lt=Library(Vendor()))
        product.run(product.candidates(1)[0], SPACE)
        return self.out


def near(found: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(found.float(), expected.float(), rtol=1e-2, atol=1e-2)


def test_gelu_and_what_it_is_applied_to():
    x = Given()
    kept = torch.empty_like(x.aux)
    near(x.run("gelu-kept", x.row, kept), torch.nn.functional.gelu(x.sums + x.row, approximate="tanh"))
    near(kept, x.sums + x.row)
    near(Given().run("gelu", x.row), x.out)
    near(Given().run("bias", x.row), kept)


def test_the_gradient_of_gelu_and_its_sums():
    x, sums = Given(), torch.empty(24, dtype=torch.bfloat16)
    expected = torch.ops.aten.gelu_backward(x.sums, x.aux.float(), approximate="tanh")
    near(x.run("gelu-grad", aux=x.aux), expected)
    near(x.run("gelu-grad-sum", sums, x.aux), expected)
    torch.testing.assert_close(sums.float(), expected.sum(0), rtol=1e-2, atol=2e-2)


def test_sums_of_operands_beside_the_product():
    x, by_b, by_a = Given(torch.float32), torch.empty(24), torch.empty(16)
    near(x.run("sum-of-b", by_b), x.sums)
    near(by_b, x.b.float().sum(0))
    near(x.run("sum-of-a", by_a), x.sums)
    near(by_a, x.a.float().sum(1))


def test_what_is_added_comes_before_the_epilogue_and_may_be_the_result():
    x = Given(torch.float32)
    near(x.run("bias", x.row, c=x.c), x.sums + x.row + x.c)
    before = x.out.clone()
    product = Product(x.a, x.b, x.out, c=x.out, lt=Library(Vendor()))
    product.run(product.candidates(1)[0], SPACE)
    assert product.onto
    near(x.out, before + x.sums)


def test_keys_tell_all_that_an_algorithm_depends_on():
    x, y = Given(), Given(torch.float32)
    lt = Library(Vendor())
    keys = [
        Product(x.a, x.b, x.out, lt=lt).key, Product(x.a, x.b, y.out, lt=lt).key, Product(x.a, x.b, x.out, "bias", x.row, lt=lt).key,
        Product(x.a, x.b, x.out, c=x.c, lt=lt).key, Product(x.a.contiguous(), x.b, x.out, lt=lt).key,
        Product(x.a.float(), x.b.float(), y.out, lt=lt).key, Product(x.a.float(), x.b.float(), y.out, tf32=True, lt=lt).key,
        Product(x.a[1:], x.b, x.out[1:], lt=lt).key,
    ]  # fmt: skip
    assert len(set(keys)) == len(keys)


def test_sums_are_never_in_parts_of_fewer_bits():
    for out, mask in ((torch.bfloat16, 2), (torch.float32, 7)):
        x, vendor = Given(out), Vendor()
        product = Product(x.a, x.b, x.out, lt=Library(vendor))
        product.candidates(4)
        assert vendor.preference[cublaslt.REDUCTIONS] == mask and vendor.preference[cublaslt.MAX_WORKSPACE] == cublaslt.WORKSPACE


def test_descriptors_are_given_back():
    x, vendor = Given(), Vendor()
    product = Product(x.a, x.b, x.out, lt=Library(vendor))
    product.candidates(4)
    assert vendor.made
    del product
    assert not vendor.made


@pytest.mark.parametrize("function", ["cublasLtMatmulDescCreate", "cublasLtMatrixLayoutCreate", "cublasLtMatmulDescSetAttribute", "cublasLtMatmulAlgoGetHeuristic", "cublasLtMatmul"])
def test_a_refused_call_is_named(function: str):
    x = Given()
    with pytest.raises(Unavailable, match=f"{function}: not supported"):
        product = Product(x.a, x.b, x.out, lt=Library(Vendor(refuses={function: 15})))
        product.run(product.candidates(1)[0], SPACE)


def test_what_the_library_cannot_take_is_said_before_it_is_asked():
    x, lt = Given(), Library(Vendor())
    cases = (
        lambda: Product(x.a.double(), x.b.double(), x.out, lt=lt),
        lambda: Product(x.a, x.b, x.out.T.contiguous().T, lt=lt),
        lambda: Product(x.a[::2], x.b, x.out[:8], lt=lt),
        lambda: Product(x.a, x.b[1:], x.out, lt=lt),
        lambda: Product(x.a, x.b.float(), x.out, lt=lt),
        lambda: Product(x.a, x.b, x.out, "bias", x.row[1:], lt=lt),
        lambda: Product(x.a, x.b, x.out, "gelu-grad", lt=lt),
        lambda: Product(x.a, x.b[:, :23], x.out[:, :23], "gelu-grad", aux=torch.empty(16, 23, dtype=x.out.dtype), lt=lt),
        lambda: Product(x.a, x.b, x.out, "gelu-grad", aux=x.aux.float(), lt=lt),
    )
    for case in cases:
        with pytest.raises(Unavailable):
            case()
    assert Library(Vendor(algorithms=0)) and pytest.raises(Unavailable, Product(x.a, x.b, x.out, lt=Library(Vendor(algorithms=0))).candidates, 4)


def test_a_library_that_is_not_there_or_too_old():
    with pytest.raises(Unavailable, match="libcublasLt is not there"):
        cublaslt.Library("libcublasLt-of-nobody.so")
    with pytest.raises(Unavailable, match="cublasLtCreate is not in the library"):
        cublaslt.Library("libc.so.6")


def test_numbers_are_those_of_the_installed_library():
    """Where the vendor's library is installed: sizes and defaults of attributes by the library's own word."""
    try:
        lt = cublaslt.Library()
    except Unavailable as error:
        pytest.skip(str(error))
    made, written = ctypes.c_void_p(), ctypes.c_size_t()
    lt.call("cublasLtMatmulDescCreate", ctypes.byref(made), cublaslt.COMPUTE_TF32, cublaslt.SCALE)
    sizes = {cublaslt.TRANSA: 4, cublaslt.TRANSB: 4, cublaslt.EPILOGUE: 4, cublaslt.BIAS_POINTER: 8, cublaslt.AUX_POINTER: 8, cublaslt.AUX_LD: 8, cublaslt.BIAS_TYPE: 4}
    for attribute, size in sizes.items():
        value = (ctypes.c_char * 8)()
        lt.call("cublasLtMatmulDescGetAttribute", made, attribute, value, size, ctypes.byref(written))
        assert written.value == size
    for number in EPILOGUES.values():
        value = ctypes.c_uint32(number)
        lt.call("cublasLtMatmulDescSetAttribute", made, cublaslt.EPILOGUE, ctypes.byref(value), 4)
    assert cublaslt.configuration(lt, cublaslt.Algorithm()).count(".") == len(cublaslt.CONFIGURATION) - 1
    x = Given()
    for epilogue in ("", "bias", "gelu", "gelu-kept", "gelu-grad"):
        Product(x.a, x.b, x.out, epilogue, x.row if epilogue not in ("", "gelu-grad") else None, x.aux, lt=lt)
