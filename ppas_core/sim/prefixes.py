"""Which prompts of a trace begin with the same tokens: the prefix tree over the trace's block hashes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from ppas_core.errors import InvalidInput

_Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class SharedPrefixes:
    """The nodes of the tree along each prompt; build it with `of`.

    A node stands for one trace block and everything before it: two prompts have the same node at a depth exactly when
    they begin with the same blocks up to there. A partial last block has the node of the whole one, of which it is the
    beginning, as the replay client draws it.

    block_size: prompt tokens per node, the trace's, which need not be the server's.
    node_start: int64[N + 1], each request's place in nodes; a request without any has a prompt of its own.
    nodes: int64[sum], numbered from 0.
    """

    block_size: int
    node_start: _Ints
    nodes: _Ints

    @classmethod
    def of(cls, block_size: int, block_hashes: Sequence[Sequence[Any]]) -> SharedPrefixes:
        """The tree over `block_hashes`, those of each request in order, of `block_size` tokens each.

        Raises InvalidInput when block_size is not a whole number of at least 1.
        """
        if isinstance(block_size, bool) or not isinstance(block_size, int) or not 1 <= block_size < 2**31:
            raise InvalidInput(f"block_size is {block_size!r}; allowed: a whole number of tokens, 1 to {2**31 - 1}")
        children: dict[tuple[int, Any], int] = {}
        nodes = np.empty(sum(map(len, block_hashes)), np.int64)
        node_start = np.zeros(len(block_hashes) + 1, np.int64)
        place = 0
        for request, hashes in enumerate(block_hashes):
            node = -1
            for block in hashes:
                node = children.setdefault((node, block), len(children))
                nodes[place] = node
                place += 1
            node_start[request + 1] = place
        for column in (nodes, node_start):
            column.setflags(write=False)
        return cls(block_size, node_start, nodes)

    def require_cover(self, prompt_tokens: _Ints) -> None:
        """Raise InvalidInput, naming the first such request, where a prompt has neither no node nor one per block."""
        if len(self.node_start) != len(prompt_tokens) + 1:
            raise InvalidInput(
                f"prefixes of {len(self.node_start) - 1} requests for {len(prompt_tokens)} prompts; give one a request"
            )
        have = np.diff(self.node_start)
        need = -(-prompt_tokens // self.block_size)
        wrong = (have != 0) & (have != need)
        if np.any(wrong):
            index = int(np.argmax(wrong))
            raise InvalidInput(
                f"request {index} has {have[index]} block hashes for {prompt_tokens[index]} prompt tokens; blocks of "
                f"{self.block_size} need {need[index]}, or none for a prompt of its own"
            )
