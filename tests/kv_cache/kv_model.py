"""A simple model of the cache manager: lists, dicts and no cleverness.

It predicts every block id (so the eviction order), every count and every refusal, and it keeps a
memory of its own: what a device that obeys the manager would have written in each slot. A value
is the hash of everything that decides it: extra keys and all tokens up to the position.
"""

from __future__ import annotations

from typing import Any

BLOCK = 64


class Request:
    def __init__(self, extra: str) -> None:
        self.extra = extra
        self.blocks: list[int] = []
        self.tokens: list[int] = []  # one for each position with a slot
        self.committed = 0

    def values(self) -> list[int]:
        """The right value at each position."""
        seen = hash(self.extra)
        result = []
        for token in self.tokens:
            seen = hash((seen, token))
            result.append(seen)
        return result


class Model:
    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self.free = list(range(1, num_blocks))
        self.ref = [0] * num_blocks
        self.requests: dict[Any, Request] = {}
        self.memory: dict[int, list[int | None]] = {b: [None] * BLOCK for b in range(num_blocks)}
        # content[b] = (parent chain, tokens, chain): known content; lists: chain -> blocks
        self.content: dict[int, tuple[Any, tuple[int, ...], int]] = {}
        self.lists: dict[int, list[int]] = {}
        self.next_chain = 0

    # --- blocks -----------------------------------------------------------------------------

    def take(self) -> int:
        block = self.free.pop(0)
        assert self.ref[block] == 0
        self.ref[block] = 1
        self.forget(block)
        return block

    def hold(self, block: int) -> None:
        if self.ref[block] == 0:
            self.free.remove(block)
        self.ref[block] += 1

    def release(self, blocks: list[int]) -> None:
        for block in reversed(blocks):
            self.ref[block] -= 1
            if self.ref[block] == 0:
                if self.cached(block):
                    self.free.append(block)
                else:
                    self.forget(block)
                    self.free.insert(0, block)

    # --- prefix cache -----------------------------------------------------------------------

    def cached(self, block: int) -> bool:
        return block in self.content and block in self.lists.get(self.content[block][2], ())

    def forget(self, block: int) -> None:
        self.unmap(block)
        self.content.pop(block, None)

    def unmap(self, block: int) -> None:
        if self.cached(block):
            chain = self.content[block][2]
            self.lists[chain].remove(block)
            if not self.lists[chain]:
                del self.lists[chain]

    def find(self, parent: Any, tokens: tuple[int, ...]) -> int | None:
        for chain, blocks in self.lists.items():
            if self.content[blocks[0]] == (parent, tokens, chain):
                return blocks[0]
        return None

    def root(self, extra: str) -> Any:
        """A root lives while a first block with it is known, in the map or only in use."""
        return ("root", extra)

    def insert(self, block: int, parent: Any, tokens: tuple[int, ...]) -> None:
        first = self.find(parent, tokens)
        if first is not None:
            chain = self.content[first][2]
            self.lists[chain].insert(1, block)
        else:
            chain = self.next_chain
            self.next_chain += 1
            self.lists[chain] = [block]
        self.content[block] = (parent, tokens, chain)

    def lookup(self, tokens: list[int], extra: str) -> list[int]:
        found: list[int] = []
        parent = self.root(extra)
        for i in range((len(tokens) - 1) // BLOCK if tokens else 0):
            block = self.find(parent, tuple(tokens[i * BLOCK : (i + 1) * BLOCK]))
            if block is None:
                break
            found.append(block)
            parent = self.content[block][2]
        return found

    def evict(self, blocks: list[int]) -> int:
        count = 0
        for block in blocks:
            if self.cached(block):
                count += 1
                if self.ref[block]:
                    self.unmap(block)
                else:
                    self.forget(block)
                    self.free.remove(block)
                    self.free.insert(0, block)
        return count

    def reset(self) -> bool:
        if any(self.ref):
            return False
        self.content.clear()
        self.lists.clear()
        return True

    # --- requests ---------------------------------------------------------------------------

    @staticmethod
    def blocks_for(tokens: int) -> int:
        return -(-tokens // BLOCK)

    def tail(self, request: Request) -> int | None:
        n = len(request.tokens)
        return request.blocks[n // BLOCK] if n % BLOCK else None

    def need(self, request: Request, new: int, look: int) -> int:
        total = self.blocks_for(len(request.tokens) + new + look)
        tail = self.tail(request)
        copy = new + look > 0 and tail is not None and self.ref[tail] > 1
        return max(total - len(request.blocks), 0) + copy

    def never_fits(self, request: Request | None, hits: int, new: int, look: int) -> bool:
        before = len(request.tokens) if request else hits * BLOCK
        return self.blocks_for(before + new + look) > self.num_blocks - 1

    def extend(
        self, request: Request, tokens: list[int], look: int
    ) -> tuple[list[int], list[tuple[int, int]]]:
        """There is room. Returns blocks gained and copies, and writes the values."""
        copies = []
        tail = self.tail(request)
        if tokens or look:
            if tail is not None and self.ref[tail] > 1:
                new = self.take()
                request.blocks[len(request.tokens) // BLOCK] = new
                self.release([tail])
                self.memory[new] = list(self.memory[tail])
                copies.append((tail, new))
            elif tail is not None:
                self.forget(tail)
        total = self.blocks_for(len(request.tokens) + len(tokens) + look)
        gained = [self.take() for _ in range(total - len(request.blocks))]
        request.blocks += gained
        start = len(request.tokens)
        request.tokens += tokens
        for position, value in list(enumerate(request.values()))[start:]:
            block = request.blocks[position // BLOCK]
            assert self.ref[block] == 1, "a shared block is never written to"
            self.memory[block][position % BLOCK] = value
        return gained, copies

    def admit(self, key: Any, extra: str, hits: list[int], tokens: list[int]) -> Request:
        request = self.requests[key] = Request(extra)
        for block in hits:
            self.hold(block)
        request.blocks = list(hits)
        request.tokens = tokens[: len(hits) * BLOCK]
        request.committed = len(request.tokens)
        return request

    def commit(self, request: Request, count: int) -> None:
        for _ in range(count):
            request.committed += 1
            if request.committed % BLOCK:
                continue
            i = request.committed // BLOCK - 1
            if request.blocks[i] in self.content:
                continue
            parent = self.content[request.blocks[i - 1]][2] if i else self.root(request.extra)
            tokens = tuple(request.tokens[i * BLOCK : (i + 1) * BLOCK])
            self.insert(request.blocks[i], parent, tokens)

    def truncate(self, request: Request, n: int) -> int:
        keep = self.blocks_for(n)
        gone = request.blocks[keep:]
        self.release(gone)
        del request.blocks[keep:]
        del request.tokens[n:]
        request.committed = min(request.committed, n)
        return len(gone)

    def fork(self, key: Any, new_key: Any) -> None:
        parent = self.requests[key]
        child = self.requests[new_key] = Request(parent.extra)
        child.tokens = list(parent.tokens)
        child.committed = parent.committed
        child.blocks = parent.blocks[: self.blocks_for(len(child.tokens))]
        for block in child.blocks:
            self.hold(block)

    def finish(self, key: Any) -> int:
        request = self.requests.pop(key)
        self.release(request.blocks)
        return len(request.blocks)
