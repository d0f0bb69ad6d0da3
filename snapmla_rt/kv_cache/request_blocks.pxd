# C types of request_blocks.py, which stays plain Python.
cimport cython
from libc.stdint cimport int32_t, int64_t

from .block_pool cimport BlockPool

cdef int _SHIFT
cdef int64_t _OFFSET


@cython.final
cdef class RequestBlocks:
    cdef readonly object request
    cdef readonly bytes extra
    cdef bytes digest
    cdef int32_t[::1] blocks
    cdef int32_t[::1] tail
    cdef Py_ssize_t capacity
    cdef readonly Py_ssize_t num_blocks
    cdef readonly int64_t num_tokens
    cdef readonly int64_t num_committed
    cdef int64_t version
    cdef readonly bint alive

    @cython.locals(grown=Py_ssize_t)
    cdef int reserve(self, Py_ssize_t capacity) except -1
    cdef bint tail_is_shared(self, BlockPool pool) except -1
    @cython.locals(index=Py_ssize_t, block=int32_t)
    cdef int open_tail(self, BlockPool pool, list copies) except -1
    @cython.locals(done=int64_t, i=Py_ssize_t, j=Py_ssize_t, block=int32_t, base=Py_ssize_t, same=bint)
    cdef int check_known_content(self, BlockPool pool, const int32_t[::1] tokens,
                                  Py_ssize_t start, Py_ssize_t n) except -1
    @cython.locals(first=Py_ssize_t, parent=int64_t, j=Py_ssize_t, block=int32_t)
    cdef int seal_run(self, BlockPool pool, const int32_t[::1] tokens, Py_ssize_t at,
                      Py_ssize_t count) except -1
    @cython.locals(i=Py_ssize_t, count=Py_ssize_t)
    cdef int commit(self, BlockPool pool, const int32_t[::1] tokens, Py_ssize_t start,
                     Py_ssize_t stop) except -1
    @cython.locals(index=Py_ssize_t, parent=int64_t)
    cdef int seal(self, BlockPool pool) except -1
    @cython.locals(keep=Py_ssize_t, gone=Py_ssize_t)
    cdef Py_ssize_t truncate(self, BlockPool pool, int64_t n) except -1
    @cython.locals(index=Py_ssize_t, block=Py_ssize_t, j=Py_ssize_t)
    cdef int reload_tail(self, BlockPool pool, int64_t n) except -1
