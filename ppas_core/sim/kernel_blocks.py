"""Which KV blocks hold which tokens, for the compiled step loop: vLLM's prefix cache over the block pool.

`blocks` is the one to read and says what each rule means; both keep the same order in every queue. Blocks have the
numbers 1 to B; 0 is none. Whoever changes this file touches `kernel` as well: numba looks at the age of the file with
the function that is called from Python, and would go on with what it compiled before.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, NamedTuple, TypeVar, cast

import numba
import numpy as np

_F = TypeVar("_F", bound=Callable[..., Any])


def compiled(function: _F) -> _F:
    """`function`, compiled at its first call, kept on disk, and run without the interpreter lock."""
    wrapped: Any = numba.njit(cache=True, nogil=True, error_model="numpy")(function)
    return cast("_F", wrapped)


# Places in `BlockPool.counts`.
FREE: Final = 0  # blocks that nobody uses, with their content or without
BLANK: Final = 1  # length of `blank`
UNUSED: Final = 2  # the first block that was never handed out
SPARE_ROWS: Final = 3
EVICTED: Final = 4  # blocks that lost their content so far

# Columns of `BlockPool.blocks`.
NEXT_IDLE: Final = 0
PREVIOUS_IDLE: Final = 1
USERS: Final = 2
CONTENT: Final = 3
NEXT_ALIKE: Final = 4


class BlockPool(NamedTuple):
    """The pool of one replay. int64 throughout, B: blocks, N: requests.

    A free block is in one of three places, and is handed out from them in this order: `blank`, a stack of those
    without content; those never used; and the ring of those with content, the longest unused first.

    blocks: [B + 1, 5], of each block its neighbours in that ring, which goes through place 0; how many requests hold
    it; what it holds (see `_own` and `_shared`), 0 for nothing; and the next block in its chain.
    newest: the chains of blocks with content, by a hash of it, the last filled first.
    tables: a row for each running request with its blocks in order. row, kept: [N], its row, and how many of its
    blocks have content.
    """

    blocks: Any
    newest: Any
    blank: Any
    tables: Any
    spare_rows: Any
    row: Any
    kept: Any
    counts: Any


def new_pool(num_blocks: int, num_requests: int, num_rows: int, row_length: int) -> BlockPool:
    """A pool of `num_blocks` for replays of at most `num_requests`, of which at most `num_rows` run at once, with at most
    `row_length` blocks each. Memory that no replay touches costs nothing; `reset` makes it ready for a replay.
    """
    buckets = 64
    while buckets < num_blocks and buckets < num_requests * row_length:
        buckets *= 2
    return BlockPool(
        np.zeros((num_blocks + 1, 5), np.int64),
        np.zeros(buckets, np.int64),
        np.empty(num_blocks + 1, np.int64),
        np.empty((num_rows, row_length), np.int64),
        np.arange(num_rows),
        np.zeros(num_requests, np.int64),
        np.zeros(num_requests, np.int64),
        np.zeros(5, np.int64),
    )


@compiled
def reset(pool: BlockPool) -> None:
    """Empty the pool."""
    counts = pool.counts
    if counts[UNUSED] > 0:  # it has served a replay
        pool.blocks[: counts[UNUSED]] = 0
        pool.newest[:] = 0
        pool.kept[:] = 0
    counts[FREE] = pool.blocks.shape[0] - 1
    counts[BLANK] = 0
    counts[UNUSED] = 1
    counts[EVICTED] = 0
    counts[SPARE_ROWS] = pool.spare_rows.shape[0]


# The functions called for each block take numbers alone: to hand over an array costs more than all they do.


@compiled
def _own(request: int, place: int) -> int:
    """What a block holds that belongs to its request alone, as a number below 0."""
    return -1 - ((request << 32) | place)


@compiled
def _shared(node: int, depth: int, place: int, block_size: int, trace_block_size: int) -> int:
    """What a block holds that lies within node `node`, at depth `depth`, of the prefix tree, as a number above 0."""
    offset = place - depth * trace_block_size // block_size
    return 1 + node * (trace_block_size // block_size + 1) + offset


@compiled
def _bucket(content: int, mask: int) -> int:
    """Neighbours of a prompt get neighbouring buckets: the processor's cache then holds the next one already."""
    if content < 0:
        own = -1 - content
        return ((own & 0xFFFFFFFF) + (own >> 32) * 0x9E3779B1) & mask
    return content & mask


@compiled
def _num_shared(prefixes: Any, block_size: int, request: int, prompt_tokens: int) -> int:
    """How many of the request's blocks lie within its prompt and in trace blocks that are known."""
    node_start = prefixes[0]
    known = node_start[request + 1] > node_start[request]
    count: int = prompt_tokens // block_size if known else 0
    return count


@compiled
def find_hits(
    pool: BlockPool, prefixes: Any, block_size: int, request: int, prompt_tokens: int, num_tokens: int
) -> tuple[int, int]:
    """How many blocks at the beginning of the request are in the cache, and how many of those nobody uses.

    Noted in the row that the request would get. Of several with equal content it is the one filled first. The last
    token is always computed, so its block is never a hit.
    """
    row = pool.tables[pool.spare_rows[pool.counts[SPARE_ROWS] - 1]]
    blocks = pool.blocks
    newest = pool.newest
    mask = newest.shape[0] - 1
    node_start, nodes, trace_block_size = prefixes
    num_shared = _num_shared(prefixes, block_size, request, prompt_tokens)
    hits = idle = 0
    while (hits + 1) * block_size < num_tokens:
        if hits < num_shared:
            depth = ((hits + 1) * block_size - 1) // trace_block_size
            node = nodes[node_start[request] + depth]
            content = _shared(node, depth, hits, block_size, trace_block_size)
        else:
            content = _own(request, hits)
        block = newest[_bucket(content, mask)]
        hit = 0
        while block != 0:
            if blocks[block, CONTENT] == content:
                hit = block
            block = blocks[block, NEXT_ALIKE]
        if hit == 0:
            break
        row[hits] = hit
        hits += 1
        if blocks[hit, USERS] == 0:
            idle += 1
    return hits, idle


@compiled
def admit(pool: BlockPool, request: int, hits: int) -> None:
    """Give the request its row, and the blocks that `find_hits` noted in it."""
    pool.counts[SPARE_ROWS] -= 1
    place = pool.spare_rows[pool.counts[SPARE_ROWS]]
    pool.row[request] = place
    pool.kept[request] = hits
    blocks = pool.blocks
    for index in range(hits):
        block = pool.tables[place, index]
        if blocks[block, USERS] == 0:
            before, after = blocks[block, PREVIOUS_IDLE], blocks[block, NEXT_IDLE]
            blocks[before, NEXT_IDLE] = after
            blocks[after, PREVIOUS_IDLE] = before
            pool.counts[FREE] -= 1
        blocks[block, USERS] += 1


@compiled
def allocate(pool: BlockPool, request: int, held: int, new_blocks: int) -> None:
    """Give the request, which holds `held` blocks, `new_blocks` more; there are enough."""
    if new_blocks == 0:
        return
    row = pool.tables[pool.row[request]]
    blocks = pool.blocks
    newest = pool.newest
    counts = pool.counts
    counts[FREE] -= new_blocks
    for index in range(held, held + new_blocks):
        if counts[BLANK] > 0:
            counts[BLANK] -= 1
            block = pool.blank[counts[BLANK]]
        elif counts[UNUSED] < blocks.shape[0]:
            block = counts[UNUSED]
            counts[UNUSED] += 1
        else:
            block = blocks[0, NEXT_IDLE]
            after = blocks[block, NEXT_IDLE]
            blocks[0, NEXT_IDLE] = after
            blocks[after, PREVIOUS_IDLE] = 0
            bucket = _bucket(blocks[block, CONTENT], newest.shape[0] - 1)
            after = blocks[block, NEXT_ALIKE]
            before = newest[bucket]
            if before == block:
                newest[bucket] = after
            else:
                while blocks[before, NEXT_ALIKE] != block:
                    before = blocks[before, NEXT_ALIKE]
                blocks[before, NEXT_ALIKE] = after
            blocks[block, CONTENT] = 0
            counts[EVICTED] += 1
        blocks[block, USERS] = 1
        row[index] = block


@compiled
def keep(pool: BlockPool, prefixes: Any, block_size: int, request: int, prompt_tokens: int, num_tokens: int) -> None:
    """The request's first `num_tokens` are known and scheduled: its full blocks among them can be hit from now on."""
    kept = pool.kept[request]
    num_full = num_tokens // block_size
    if num_full <= kept:
        return
    row = pool.tables[pool.row[request]]
    blocks = pool.blocks
    newest = pool.newest
    mask = newest.shape[0] - 1
    node_start, nodes, trace_block_size = prefixes
    num_shared = _num_shared(prefixes, block_size, request, prompt_tokens)
    for index in range(kept, num_full):
        if index < num_shared:
            depth = ((index + 1) * block_size - 1) // trace_block_size
            node = nodes[node_start[request] + depth]
            content = _shared(node, depth, index, block_size, trace_block_size)
        else:
            content = _own(request, index)
        bucket = _bucket(content, mask)
        block = row[index]
        blocks[block, CONTENT] = content
        blocks[block, NEXT_ALIKE] = newest[bucket]
        newest[bucket] = block
    pool.kept[request] = num_full


@compiled
def release(pool: BlockPool, request: int, held: int) -> None:
    """Take back the request's blocks, its last block first, so that the beginning of its prompt stays longest."""
    place = pool.row[request]
    row = pool.tables[place]
    blocks = pool.blocks
    counts = pool.counts
    kept = pool.kept[request]
    for index in range(kept, held):
        block = row[index]
        blocks[block, USERS] = 0
        pool.blank[counts[BLANK]] = block
        counts[BLANK] += 1
        counts[FREE] += 1
    last = blocks[0, PREVIOUS_IDLE]
    for index in range(kept - 1, -1, -1):
        block = row[index]
        blocks[block, USERS] -= 1
        if blocks[block, USERS] == 0:
            blocks[last, NEXT_IDLE] = block
            blocks[block, PREVIOUS_IDLE] = last
            last = block
            counts[FREE] += 1
    blocks[last, NEXT_IDLE] = 0
    blocks[0, PREVIOUS_IDLE] = last
    pool.kept[request] = 0
    pool.spare_rows[counts[SPARE_ROWS]] = place
    counts[SPARE_ROWS] += 1
