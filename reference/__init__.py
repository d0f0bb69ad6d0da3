"""The NumPy reference: the specification that the CUDA kernels equal byte for byte.

Each stage is one file with the same name as its kernel in ``cuda_src``; no CUDA is imported here.
"""
