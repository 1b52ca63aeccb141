"""Generated kernels of the equivariant tensor product and all its derivatives (docs/decisions/0042-tensor-product-kernels.md).

`product` says what a launch makes, `source` writes it as Triton, `plan` cuts work into launches, `launch` runs them, `join` finds in a
graph what may share a launch; `config` holds the FLASHCART_* settings, `cache` the sources on disk, `tune` the kept choices.
"""
