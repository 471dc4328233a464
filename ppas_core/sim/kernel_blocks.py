"""Which KV blocks hold which tokens, for the compiled step loop: vLLM's prefix cache over the block pool.

`blocks` is the one to read and says what each rule means; both keep the same order in every queue. Blocks have the
numbers 1 to B; 0 is none. Nothing here is filled in advance, so a large pool costs only what a replay touches of it.
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


class BlockPool(NamedTuple):
    """The pool of one replay. int64 throughout, B: blocks, N: requests.

    A free block is in one of three places, and is handed out from them in this order: `blank`, a stack of those
    without content; those never used; and the ring of those with content, the longest unused first.

    next_idle, previous_idle: [B + 1], that ring, through place 0. users: [B + 1], requests that hold a block.
    content: [B + 1], what a full block holds (see `_content`), 0 for none. first_alike, last_alike: the chains of
    blocks by content, hashed; next_alike, previous_alike: [B + 1], in the order in which they were filled.
    tables: a row for each running request with its blocks in order. row, cached: [N], its row, and how many of its
    blocks have content.
    """

    next_idle: Any
    previous_idle: Any
    users: Any
    content: Any
    next_alike: Any
    previous_alike: Any
    first_alike: Any
    last_alike: Any
    blank: Any
    tables: Any
    spare_rows: Any
    row: Any
    cached: Any
    counts: Any


@compiled
def new_pool(num_blocks: int, num_requests: int, num_rows: int, row_length: int) -> BlockPool:
    """An empty pool of `num_blocks` for at most `num_rows` running requests of at most `row_length` blocks."""
    buckets = 64
    while buckets < num_blocks and buckets < num_requests * row_length:
        buckets *= 2
    spare_rows = np.arange(num_rows)
    counts = np.zeros(5, np.int64)
    counts[FREE] = num_blocks
    counts[UNUSED] = 1
    counts[SPARE_ROWS] = num_rows
    return BlockPool(
        np.zeros(num_blocks + 1, np.int64),
        np.zeros(num_blocks + 1, np.int64),
        np.zeros(num_blocks + 1, np.int64),
        np.zeros(num_blocks + 1, np.int64),
        np.zeros(num_blocks + 1, np.int64),
        np.zeros(num_blocks + 1, np.int64),
        np.zeros(buckets, np.int64),
        np.zeros(buckets, np.int64),
        np.empty(num_blocks + 1, np.int64),
        np.empty((num_rows, row_length), np.int64),
        spare_rows,
        np.full(num_requests, -1, np.int64),
        np.zeros(num_requests, np.int64),
        counts,
    )


@compiled
def _content(prefixes: Any, block_size: int, request: int, prompt_tokens: int, place: int) -> int:
    """A number for what the request's block at `place` holds, all before it included; equal for equal ones, never 0.

    A block within a prompt whose trace blocks are known is a place within the node of the prefix tree that covers its
    last token; any other block belongs to its request alone.
    """
    node_start, nodes, trace_block_size = prefixes
    known = nodes.shape[0] > 0 and node_start[request + 1] > node_start[request]
    if not known or (place + 1) * block_size > prompt_tokens:
        return -1 - ((request << 32) | place)
    depth = ((place + 1) * block_size - 1) // trace_block_size
    node = nodes[node_start[request] + depth]
    offset = place - depth * trace_block_size // block_size
    number: int = 1 + node * (trace_block_size // block_size + 1) + offset
    return number


@compiled
def _bucket(pool: BlockPool, content: int) -> int:
    mixed = (content ^ (content >> 29)) * 0x9E3779B1
    place: int = mixed & (pool.first_alike.shape[0] - 1)
    return place


@compiled
def find_hits(
    pool: BlockPool, prefixes: Any, block_size: int, request: int, prompt_tokens: int, num_tokens: int
) -> tuple[int, int]:
    """How many blocks at the beginning of the request are in the cache, and how many of those nobody uses.

    Noted in the row that the request would get. The last token is always computed, so its block is never a hit.
    """
    row = pool.tables[pool.spare_rows[pool.counts[SPARE_ROWS] - 1]]
    hits = idle = 0
    while (hits + 1) * block_size < num_tokens:
        content = _content(prefixes, block_size, request, prompt_tokens, hits)
        block = pool.first_alike[_bucket(pool, content)]
        while block != 0 and pool.content[block] != content:
            block = pool.next_alike[block]
        if block == 0:
            break
        row[hits] = block
        hits += 1
        if pool.users[block] == 0:
            idle += 1
    return hits, idle


@compiled
def admit(pool: BlockPool, request: int, hits: int) -> None:
    """Give the request its row, and the blocks that `find_hits` noted in it."""
    pool.counts[SPARE_ROWS] -= 1
    place = pool.spare_rows[pool.counts[SPARE_ROWS]]
    pool.row[request] = place
    pool.cached[request] = hits
    for index in range(hits):
        block = pool.tables[place, index]
        if pool.users[block] == 0:
            pool.next_idle[pool.previous_idle[block]] = pool.next_idle[block]
            pool.previous_idle[pool.next_idle[block]] = pool.previous_idle[block]
            pool.counts[FREE] -= 1
        pool.users[block] += 1


@compiled
def allocate(pool: BlockPool, request: int, held: int, new_blocks: int) -> None:
    """Give the request, which holds `held` blocks, `new_blocks` more; there are enough."""
    row = pool.tables[pool.row[request]]
    counts = pool.counts
    counts[FREE] -= new_blocks
    for index in range(held, held + new_blocks):
        if counts[BLANK] > 0:
            counts[BLANK] -= 1
            block = pool.blank[counts[BLANK]]
        elif counts[UNUSED] < pool.users.shape[0]:
            block = counts[UNUSED]
            counts[UNUSED] += 1
        else:
            block = pool.next_idle[0]
            pool.next_idle[0] = pool.next_idle[block]
            pool.previous_idle[pool.next_idle[block]] = 0
            _forget(pool, block)
        pool.users[block] = 1
        row[index] = block


@compiled
def _forget(pool: BlockPool, block: int) -> None:
    bucket = _bucket(pool, pool.content[block])
    before, after = pool.previous_alike[block], pool.next_alike[block]
    if before == 0:
        pool.first_alike[bucket] = after
    else:
        pool.next_alike[before] = after
    if after == 0:
        pool.last_alike[bucket] = before
    else:
        pool.previous_alike[after] = before
    pool.content[block] = 0
    pool.counts[EVICTED] += 1


@compiled
def keep(pool: BlockPool, prefixes: Any, block_size: int, request: int, prompt_tokens: int, num_tokens: int) -> None:
    """The request's first `num_tokens` are known and scheduled: its full blocks among them can be hit from now on."""
    row = pool.tables[pool.row[request]]
    for index in range(pool.cached[request], num_tokens // block_size):
        block = row[index]
        content = _content(prefixes, block_size, request, prompt_tokens, index)
        bucket = _bucket(pool, content)
        pool.content[block] = content
        last = pool.last_alike[bucket]
        pool.previous_alike[block] = last
        pool.next_alike[block] = 0
        if last == 0:
            pool.first_alike[bucket] = block
        else:
            pool.next_alike[last] = block
        pool.last_alike[bucket] = block
        pool.cached[request] = index + 1


@compiled
def release(pool: BlockPool, request: int, held: int) -> None:
    """Take back the request's blocks, its last block first, so that the beginning of its prompt stays longest."""
    place = pool.row[request]
    row = pool.tables[place]
    counts = pool.counts
    for index in range(held):
        block = row[index]
        if pool.content[block] == 0:
            pool.users[block] = 0
            pool.blank[counts[BLANK]] = block
            counts[BLANK] += 1
            counts[FREE] += 1
    for index in range(held - 1, -1, -1):
        block = row[index]
        if pool.content[block] == 0:
            continue
        pool.users[block] -= 1
        if pool.users[block] == 0:
            last = pool.previous_idle[0]
            pool.next_idle[last] = block
            pool.previous_idle[block] = last
            pool.next_idle[block] = 0
            pool.previous_idle[0] = block
            counts[FREE] += 1
    pool.row[request] = -1
    pool.cached[request] = 0
    pool.spare_rows[counts[SPARE_ROWS]] = place
    counts[SPARE_ROWS] += 1
