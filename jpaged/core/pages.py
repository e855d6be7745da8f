"""Numbers of pages for the states of recurrent layers."""

# For each sequence: one that it writes, one that a step in flight reads, and two in the prefix cache.
PAGES_PER_SEQUENCE = 4
# A prompt's state is kept after every so many tokens. A page takes as much memory as the keys and values of hundreds of
# tokens, and a prompt that has only a beginning in common with others is computed again from the last state in it.
STATE_EVERY = 1024


def divide_memory(num_blocks: int, block_bytes: float, page_bytes: int, pages_wanted: int) -> tuple[int, int]:
    """Divide the memory of some blocks into blocks and pages, which take at most half of it; return both numbers."""
    if not (num_blocks and page_bytes):
        return num_blocks, 0
    num_pages = max(1, min(pages_wanted, int(num_blocks * block_bytes / 2 / page_bytes)))
    return num_blocks - int(-(-num_pages * page_bytes // block_bytes)), num_pages
