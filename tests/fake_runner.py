"""A runner without a model. Its KV is a list of slots that hold, per token, a digest of the whole text before it, so
that any wrong block, missed copy or stale cache entry changes what it reads; its next token follows from the text."""

import hashlib

from jpaged.core.scheduler import ScheduleDecision

VOCAB = 50


def digest(tokens: list[int]) -> bytes:
    return hashlib.blake2b(bytes(tokens), digest_size=8).digest()


def next_token(tokens: list[int]) -> int:
    return digest(tokens)[0] % VOCAB


def generate(prompt: list[int], count: int) -> list[int]:
    """What any schedule must give."""
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(next_token(tokens))
    return tokens[len(prompt) :]


class FakeRunner:
    def __init__(self, num_blocks: int, block_size: int):
        self.block_size = block_size
        self.memory: list[bytes | None] = [None] * (num_blocks * block_size)
        self.num_steps = 0
        self.num_copies = 0

    def step(self, decision: ScheduleDecision):
        self.num_steps += 1
        before, size = list(self.memory), self.block_size
        for source, destination in decision.block_copies:
            self.num_copies += 1
            self.memory[destination * size : (destination + 1) * size] = before[source * size : (source + 1) * size]
        written: set[int] = set()
        for sequence, count in decision.num_scheduled_tokens.items():
            for position in range(sequence.num_computed_tokens, sequence.num_computed_tokens + count):
                slot = sequence.table.slot(position)
                assert slot not in written, f"slot {slot} is written twice in a step"
                assert sequence.table.pool.ref_count(slot // size) == 1, f"slot {slot} is in a shared block"
                written.add(slot)
                self.memory[slot] = digest(sequence.tokens[: position + 1])
        results = []
        for sequence, count in decision.num_scheduled_tokens.items():
            end = sequence.num_computed_tokens + count
            seen = [self.memory[sequence.table.slot(i)] for i in range(end)]
            assert seen == [digest(sequence.tokens[: i + 1]) for i in range(end)], "it reads what it did not write"
            results.append(next_token(sequence.tokens[:end]))
        return results, [-float(token) for token in results]
