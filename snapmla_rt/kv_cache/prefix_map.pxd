# C types of prefix_map.py, which stays plain Python: see the .py for what everything means.
cimport cython
from libc.stdint cimport int32_t, int64_t

cdef int _FIELDS
cdef int _SLOT
cdef int _UNMAPPED
cdef int32_t _BLOCK
cdef int32_t _WORDS


@cython.final
cdef class PrefixMap:
    cdef int64_t[::1] chain
    cdef int64_t[::1] parent
    cdef int64_t[::1] digest
    cdef int32_t[::1] table
    cdef int32_t[::1] node
    cdef int32_t[::1] dup_next
    cdef int32_t[::1] dup_prev
    cdef int32_t[::1] tokens
    cdef int64_t mask
    cdef int64_t next_chain
    cdef int64_t next_root
    cdef int32_t num_cached
    cdef dict root_ids
    cdef dict root_keys
    cdef dict root_count

    @cython.locals(mine=Py_ssize_t, k=Py_ssize_t)
    cdef bint same(self, int32_t block, const int64_t[::1] words, Py_ssize_t at, const int32_t[::1] tokens,
                    Py_ssize_t tok_at, int64_t parent) noexcept
    @cython.locals(i=int64_t, block=int32_t)
    cdef int32_t find(self, const int64_t[::1] words, Py_ssize_t at, const int32_t[::1] tokens,
                       Py_ssize_t tok_at, int64_t parent) except -1
    @cython.locals(j=Py_ssize_t, block=int32_t)
    cdef Py_ssize_t find_prefix(self, const int64_t[::1] words, const int32_t[::1] tokens, Py_ssize_t first,
                                 Py_ssize_t count, int64_t parent, int32_t[::1] out) except -1
    @cython.locals(i=int64_t, k=Py_ssize_t, other=int32_t, after=int32_t)
    cdef int insert(self, int32_t block, const int64_t[::1] words, Py_ssize_t at, const int32_t[::1] tokens,
                     Py_ssize_t tok_at, int64_t parent) except -1
    @cython.locals(slot=int32_t)
    cdef bint mapped(self, int32_t block) except -1
    @cython.locals(parent=int64_t)
    cdef int forget(self, int32_t block) except -1
    @cython.locals(slot=int32_t, after=int32_t, before=int32_t)
    cdef int unmap(self, int32_t block) except -1
    @cython.locals(i=int64_t, home=int64_t, block=int32_t)
    cdef int close_gap(self, int64_t hole) except -1
    cdef int64_t root_of(self, bytes extra) except 0
    cdef int drop_root(self, int64_t root) except -1
    cdef bytes digest_of(self, Py_ssize_t block)
