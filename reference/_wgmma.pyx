# cython: language_level=3, boundscheck=False, wraparound=False, freethreading_compatible=True
"""Compiled backend of tensor_core.py: chains of wgmma steps on one accumulator matrix.

Both functions change `d` in place (C on entry, D on return) and release the GIL; parts of one
matrix may be worked on by several threads. tensor_core.py checks shapes before it calls; what would
read outside the arrays is checked again here.
"""

from libc.stddef cimport ptrdiff_t
from libc.stdint cimport uint8_t, uint16_t, uint32_t


cdef extern from "_wgmma_inner.h" nogil:
    void wg_chain_e4m3(
        const uint8_t *a, ptrdiff_t a_row, const uint8_t *b, ptrdiff_t b_column, ptrdiff_t b_k,
        uint32_t *c, ptrdiff_t c_row, ptrdiff_t m, ptrdiff_t n, ptrdiff_t depth)
    void wg_chain_bf16(
        const uint16_t *a, ptrdiff_t a_row, const uint16_t *b, ptrdiff_t b_column,
        uint32_t *c, ptrdiff_t c_row, ptrdiff_t m, ptrdiff_t n, ptrdiff_t depth)


def chain_e4m3(const uint8_t[:, :] a, const uint8_t[:, :] b, uint32_t[:, :] d):
    """d [M, N] = a [M, K] * b [N, K]^T + d in steps of 32.

    a and d have contiguous rows; b any strides: rows contiguous (keys) or columns (values).
    """
    cdef ptrdiff_t m = d.shape[0], n = d.shape[1], depth = a.shape[1]
    if a.shape[0] != m or b.shape[0] != n or b.shape[1] != depth or depth % 32:
        raise ValueError("a [M, K], b [N, K] and d [M, N] do not fit together in steps of 32")
    if m == 0 or n == 0 or depth == 0:
        return
    if a.strides[1] != 1 or d.strides[1] != 4 or d.strides[0] % 4:
        raise ValueError("a and d need contiguous rows")
    with nogil:
        wg_chain_e4m3(
            &a[0, 0], a.strides[0], &b[0, 0], b.strides[0], b.strides[1],
            &d[0, 0], d.strides[0] // 4, m, n, depth)


def chain_bf16(const uint16_t[:, :] a, const uint16_t[:, :] b, uint32_t[:, :] d):
    """d [M, N] = a [M, K] * b [N, K]^T + d in steps of 16; all rows contiguous."""
    cdef ptrdiff_t m = d.shape[0], n = d.shape[1], depth = a.shape[1]
    if a.shape[0] != m or b.shape[0] != n or b.shape[1] != depth or depth % 16:
        raise ValueError("a [M, K], b [N, K] and d [M, N] do not fit together in steps of 16")
    if m == 0 or n == 0 or depth == 0:
        return
    if a.strides[1] != 2 or b.strides[1] != 2 or d.strides[1] != 4:
        raise ValueError("a, b and d need contiguous rows")
    if a.strides[0] % 2 or b.strides[0] % 2 or d.strides[0] % 4:
        raise ValueError("a, b and d need aligned rows")
    with nogil:
        wg_chain_bf16(
            &a[0, 0], a.strides[0] // 2, &b[0, 0], b.strides[0] // 2,
            &d[0, 0], d.strides[0] // 4, m, n, depth)
