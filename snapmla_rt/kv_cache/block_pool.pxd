# C types of block_pool.py, which stays plain Python: see the .py for what everything means.
cimport cython
from libc.stdint cimport int32_t, int64_t

from .prefix_map cimport PrefixMap

cdef int _REF
cdef int _NEXT
cdef int _PREV
cdef int _SLOT
cdef int _FIELDS
cdef int _UNMAPPED


@cython.final
cdef class BlockPool:
    cdef readonly int32_t num_blocks
    cdef readonly bint enable_caching
    cdef readonly bint debug
    cdef object _storage
    cdef int32_t[::1] _node
    cdef int32_t _num_free
    cdef PrefixMap _map
    cdef dict _holders
    cdef dict _last_holder

    @cython.locals(i=Py_ssize_t, bad=Py_ssize_t, done=Py_ssize_t, block=int32_t)
    cdef Py_ssize_t _first_overfreed(self, const int32_t[::1] ids, Py_ssize_t n) except -2

    @cython.locals(i=Py_ssize_t, block=int32_t, following=int32_t, at=Py_ssize_t)
    cdef int _take(self, int32_t[::1] out, Py_ssize_t start, Py_ssize_t n, object owner) except -1
    cdef int32_t _count(self, int32_t block) except -1
    cdef int _add_to_count(self, int32_t block, int32_t change) except -1
    @cython.locals(at=Py_ssize_t)
    cdef int _hold(self, int32_t block, object owner) except -1
    @cython.locals(i=Py_ssize_t)
    cdef int _hold_all(self, const int32_t[::1] ids, Py_ssize_t start, Py_ssize_t stop, object owner) except -1
    @cython.locals(i=Py_ssize_t)
    cdef int _release(self, const int32_t[::1] ids, Py_ssize_t start, Py_ssize_t stop, object owner) except -1
    @cython.locals(at=Py_ssize_t, slot=int32_t, last=int32_t)
    cdef int _release_one(self, int32_t block, object owner) except -1
    @cython.locals(first=int32_t, at=Py_ssize_t)
    cdef int _push_head(self, int32_t block) except -1
    @cython.locals(before=int32_t, after=int32_t)
    cdef int _unlink(self, int32_t block) except -1

    cdef int _poison(self, int32_t block) except -1
    cdef int _note_taken(self, int32_t block, object owner) except -1
    cdef int _note_released(self, int32_t block, object owner) except -1
