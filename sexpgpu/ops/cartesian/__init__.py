"""Irreducible Cartesian tensors: their algebra in exact fractions, and the ops over it (docs/flashcart.md).

`algebra` knows neither nodes nor torch: kernels are generated from its tables. `expand`, `product` and `linear` are op
families.
"""
