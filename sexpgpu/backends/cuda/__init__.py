"""The CUDA backend: Triton kernels and library calls over planned memory, captured as CUDA graphs.

Without a GPU the same kernels run under Triton's interpreter on CPU tensors: that is how they are tested.
"""
