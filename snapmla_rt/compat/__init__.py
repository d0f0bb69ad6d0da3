"""Drop-in faces: the calls of FlashMLA (`flash_mla`) and of FluentLLM (`flash_mla_fp8`).

Each takes the arguments of the library it stands for and runs this package's kernels. Arrays are
torch tensors; NumPy and CuPy arrays work too (NumPy: by the reference).
"""
