"""Which KV blocks hold which tokens: vLLM's prefix cache over the block pool, in plain Python, written to be read.

Every rule here is one of vLLM 0.27.1 (`vllm/v1/core/block_pool.py`, `kv_cache_manager.py`,
`single_type_kv_cache_manager.py`) for one group of full-attention layers. `kernel_blocks` computes the same.
"""

from __future__ import annotations

from collections import deque
from typing import Protocol

from ppas_core.sim.prefixes import SharedPrefixes

Content = tuple[str, int, int]
"""What a full block holds, all tokens before it included: equal exactly when vLLM's chained block hashes are equal."""


class Holder(Protocol):
    """A request, as far as its blocks need it."""

    index: int
    num_prompt_tokens: int


class PrefixCache:
    """The pool of one replay, with what its blocks hold.

    A full block keeps its content when nobody uses it any more, until it is handed out anew. The free blocks are
    handed out in this order: those without content, last released first; those never used; those with content,
    longest unused first. (vLLM has one queue: it puts back the former at its front and the latter at its end.)

    num_blocks: without the null block. prefixes: which prompts begin alike, None when none do.
    evicted_blocks: blocks that lost their content so far.
    """

    def __init__(self, num_blocks: int, block_size: int, prefixes: SharedPrefixes | None) -> None:
        self.block_size = block_size
        self.prefixes = prefixes
        self.evicted_blocks = 0
        self._blank: list[int] = []
        self._unused = deque(range(num_blocks))
        self._idle: dict[int, None] = {}  # in the order of release
        self._users = [0] * num_blocks
        self._content: dict[int, Content] = {}
        self._alike: dict[Content, list[int]] = {}  # in the order in which they were filled
        self._tables: dict[int, list[int]] = {}  # the blocks of each running request
        self._num_kept: dict[int, int] = {}  # how many of these have content

    @property
    def num_free(self) -> int:
        """Blocks that nobody uses, with content or without."""
        return len(self._blank) + len(self._unused) + len(self._idle)

    @property
    def num_contents(self) -> int:
        """Different contents that a prompt could hit now."""
        return len(self._alike)

    def find_hits(self, request: Holder, num_tokens: int) -> list[int]:
        """The cached blocks at the beginning of the request, which has `num_tokens` tokens now.

        Whole blocks only, and never the last token: its logits are needed, so it is always computed.
        """
        hits: list[int] = []
        while (len(hits) + 1) * self.block_size < num_tokens:
            alike = self._alike.get(self._content_at(request, len(hits)))
            if not alike:
                break
            hits.append(alike[0])
        return hits

    def num_needed(self, hits: list[int], num_tokens: int) -> int:
        """Free blocks that a request of `num_tokens` takes: new ones, and hits that nobody uses."""
        idle = sum(self._users[block] == 0 for block in hits)
        return -(-num_tokens // self.block_size) - len(hits) + idle

    def admit(self, request: Holder, hits: list[int]) -> None:
        """Give the request the blocks that it hit; shared from now on, and safe from eviction."""
        for block in hits:
            self._idle.pop(block, None)
            self._users[block] += 1
        self._tables[request.index] = list(hits)
        self._num_kept[request.index] = len(hits)

    def allocate(self, request: Holder, count: int) -> None:
        """Give the request `count` more blocks; there are enough."""
        for _ in range(count):
            if self._blank:
                block = self._blank.pop()
            elif self._unused:
                block = self._unused.popleft()
            else:
                block = next(iter(self._idle))
                del self._idle[block]
                self._evict(block)
            self._users[block] = 1
            self._tables[request.index].append(block)

    def keep(self, request: Holder, num_tokens: int) -> None:
        """The request's first `num_tokens` are known and scheduled: its full blocks among them can be hit from now on.

        Also by a request that is admitted in the same step. Equal blocks are not merged; the oldest is hit.
        """
        table = self._tables[request.index]
        for place in range(self._num_kept[request.index], num_tokens // self.block_size):
            content = self._content_at(request, place)
            self._content[table[place]] = content
            self._alike.setdefault(content, []).append(table[place])
            self._num_kept[request.index] = place + 1

    def release(self, request: Holder) -> None:
        """Take back the request's blocks, its last block first, so that the beginning of its prompt stays longest."""
        table = self._tables.pop(request.index)
        del self._num_kept[request.index]
        blank = [block for block in table if block not in self._content]
        for block in table:
            self._users[block] -= 1
        self._blank += blank
        self._idle.update((b, None) for b in reversed(table) if b in self._content and self._users[b] == 0)

    def _evict(self, block: int) -> None:
        content = self._content.pop(block)
        self._alike[content].remove(block)
        if not self._alike[content]:
            del self._alike[content]
        self.evicted_blocks += 1

    def _content_at(self, request: Holder, place: int) -> Content:
        """A block within a prompt whose trace blocks are known belongs to the node that covers its last token; any
        other block, such as one with generated tokens, to its request alone.
        """
        last_token = (place + 1) * self.block_size - 1
        if self.prefixes is not None and last_token < request.num_prompt_tokens:
            start, end = self.prefixes.node_start[request.index : request.index + 2].tolist()
            if end > start:
                return "shared", int(self.prefixes.nodes[start + last_token // self.prefixes.block_size]), place
        return "own", request.index, place
