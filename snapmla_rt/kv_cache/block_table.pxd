# C types of block_table.py, which stays plain Python: see the .py for what everything means.
cimport cython
from libc.stdint cimport int32_t, int64_t

from .block_pool cimport BlockPool
from .request_blocks cimport RequestBlocks

cdef int _SHIFT
cdef int64_t _OFFSET
cdef int64_t _MAX_TOKENS


@cython.final
cdef class BlockTable:
    cdef readonly Py_ssize_t max_num_reqs
    cdef readonly Py_ssize_t max_num_blocks
    cdef readonly Py_ssize_t max_num_tokens
    cdef readonly Py_ssize_t num_reqs
    cdef readonly object block_table
    cdef readonly object cache_seqlens
    cdef readonly object slots
    cdef int32_t[::1] _rows
    cdef int32_t[::1] _seqlens
    cdef int64_t[::1] _slots
    cdef Py_ssize_t _num_slots
    cdef list _states
    cdef int32_t[::1] _row_len
    cdef int64_t[::1] _row_version
    cdef int32_t[::1] _counts

    @cython.locals(i=Py_ssize_t)
    cdef Py_ssize_t _first_unmapped(self, const int64_t[::1] positions, const int32_t[::1] rows,
                                    Py_ssize_t n) except -2
    @cython.locals(i=Py_ssize_t, position=int64_t, block=int64_t)
    cdef int _map(self, const int64_t[::1] positions, const int32_t[::1] rows, Py_ssize_t n,
                  int64_t[::1] out, Py_ssize_t size) except -1
    @cython.locals(base=Py_ssize_t, have=Py_ssize_t, first=Py_ssize_t, j=Py_ssize_t)
    cdef int _sync(self, Py_ssize_t row, RequestBlocks state) except -1
    @cython.locals(base=Py_ssize_t, j=Py_ssize_t)
    cdef int _clear_row(self, Py_ssize_t row, Py_ssize_t first) except -1
    @cython.locals(i=Py_ssize_t)
    cdef int _pad_slots(self, Py_ssize_t used) except -1
    cdef int _replace(self, Py_ssize_t row, Py_ssize_t index, RequestBlocks state) except -1
    @cython.locals(row=Py_ssize_t)
    cdef int _fill_counts(self, int32_t count) except -1
    @cython.locals(need=Py_ssize_t, tokens=Py_ssize_t, shared=bint, row=Py_ssize_t,
                   state=RequestBlocks, end=int64_t, total=Py_ssize_t)
    cdef Py_ssize_t _plan_step(self, BlockPool pool, int64_t look) except -1
    @cython.locals(state=RequestBlocks, limit=int64_t)
    cdef int _refuse_row(self, Py_ssize_t row, int64_t end) except -1
    @cython.locals(row=Py_ssize_t, state=RequestBlocks, block=int32_t)
    cdef Py_ssize_t _count_copies(self, BlockPool pool, int64_t look) except -1
    @cython.locals(k=Py_ssize_t, row=Py_ssize_t, state=RequestBlocks, count=int64_t, was=int64_t,
                   total=Py_ssize_t, position=int64_t, block=int64_t)
    cdef Py_ssize_t _run_step(self, BlockPool pool, int64_t look, list copies) except -1
    @cython.locals(row=Py_ssize_t, state=RequestBlocks, count=int64_t)
    cdef int _check_commit(self, BlockPool pool, const int32_t[::1] tokens, Py_ssize_t width) except -1
    @cython.locals(row=Py_ssize_t, state=RequestBlocks, was=int64_t)
    cdef int _run_commit(self, BlockPool pool, const int32_t[::1] tokens, Py_ssize_t width,
                         bint roll_back) except -1
    @cython.locals(row=Py_ssize_t)
    cdef int _bind(self, list states) except -1
