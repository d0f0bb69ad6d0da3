# C types of manager.py, which stays plain Python: see the .py for what everything means.
cimport cython
from libc.stdint cimport int32_t, int64_t

from .block_pool cimport BlockPool
from .block_table cimport BlockTable
from .request_blocks cimport RequestBlocks

cdef int _SHIFT
cdef int64_t _OFFSET
cdef int64_t _MAX_TOKENS


@cython.final
cdef class KVCacheManager:
    cdef readonly BlockPool pool
    cdef dict _requests
    cdef object _lock

    @cython.locals(i=Py_ssize_t)
    cdef int _note_chains(self, const int32_t[::1] blocks, int64_t[::1] chains, Py_ssize_t start,
                          Py_ssize_t stop) except -1
    @cython.locals(i=Py_ssize_t)
    cdef Py_ssize_t _stale(self, const int32_t[::1] blocks, const int64_t[::1] chains,
                           Py_ssize_t n) except -2
    @cython.locals(hits=Py_ssize_t, total=Py_ssize_t, need=Py_ssize_t, idle=Py_ssize_t,
                   end=int64_t, state=RequestBlocks)
    cdef object _admit(self, object request, int64_t new, int64_t look, object computed,
                       object extra_keys, bint loud)
    @cython.locals(have=Py_ssize_t, total=Py_ssize_t, need=Py_ssize_t, extra=Py_ssize_t)
    cdef object _extend(self, RequestBlocks state, int64_t new, int64_t look, bint loud)
    @cython.locals(idle=Py_ssize_t, have=Py_ssize_t, end=int64_t, total=Py_ssize_t, need=Py_ssize_t)
    cdef bint _has_room(self, RequestBlocks state, object computed, int64_t new, int64_t look) except -1
    cdef Py_ssize_t _blocks_for(self, int64_t num_tokens) except -1
    @cython.locals(total=Py_ssize_t)
    cdef Py_ssize_t _checked_size(self, object request, int64_t end, int64_t look) except -1
    @cython.locals(i=Py_ssize_t, idle=Py_ssize_t)
    cdef Py_ssize_t _count_idle(self, const int32_t[::1] blocks, Py_ssize_t n) except -1

    @cython.locals(state=RequestBlocks)
    cdef int _bind_table(self, BlockTable table, list wanted) except -1
    @cython.locals(need=Py_ssize_t, total=Py_ssize_t)
    cdef object _step_table(self, BlockTable table, object counts, int64_t look, bint loud)
    cdef int _commit_table(self, BlockTable table, const int32_t[::1] tokens, Py_ssize_t width,
                           object accepted, bint roll_back) except -1
    cdef int _set_counts(self, BlockTable table, str name, object counts, int64_t high) except -1
    cdef RequestBlocks _known(self, object request)
