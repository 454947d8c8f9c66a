"""The memory of the process between updates."""

import ctypes
import os
import platform

# Options of mallopt, from glibc's malloc.h, and what they are set to.
_KEEPING = {
    -1: 2**31 - 1,  # M_TRIM_THRESHOLD: free memory that is not given back
    -2: 2**27,  # M_TOP_PAD: bytes that are taken from the system at a time
    -4: 0,  # M_MMAP_MAX: large arrays are taken from the heap, too
    -8: 1,  # M_ARENA_MAX: one heap for all threads; those of others hold 64 MB
}


def keep() -> None:
    """Let the process keep the memory of an update for the next one.

    JAX takes memory for each call anew. By default glibc gives large parts of it back
    to the system, which clears their pages before the next call: a quarter of the time
    of updates with large results. Other C libraries are left as they are, and so is
    glibc where the user has set its variables. Call it before JAX is used.
    """
    set_by_user = any(n.startswith(("MALLOC_", "GLIBC_TUNABLES")) for n in os.environ)
    if platform.libc_ver()[0] == "glibc" and not set_by_user:
        for option, value in _KEEPING.items():
            ctypes.CDLL(None).mallopt(option, value)
