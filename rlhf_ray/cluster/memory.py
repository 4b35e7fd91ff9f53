"""How worker processes on CPUs keep their memory."""

KEEP_MEMORY = {
    "MALLOC_ARENA_MAX": "1", "MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": str(1 << 40),
    "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1",
}
"""The C library keeps what is freed, and asks for large pages. Every optimizer step and every publication of weights
needs again what the one before let go: to have the kernel take and give the pages costs several times as much as a copy
into them, a seventh of a small model's update. (glibc's mallopt(3), and its manual's "Memory Allocation Tunables")"""
GIVE_BACK_LARGE = {**KEEP_MEMORY, "MALLOC_MMAP_MAX_": str(1 << 16), "MALLOC_MMAP_THRESHOLD_": str(8 << 20)}
"""The same, but blocks of 8 MiB and more come from the kernel and go back to it. Under ZeRO-3 whole weights come and go
in another order at each pass; what is kept of them breaks into pieces, and twice what is in use at a time was held."""
