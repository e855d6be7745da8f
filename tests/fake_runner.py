"""A runner without a model. Its KV is a list of slots that hold, per token, a digest of the whole text before it and of
the cache salt, so that any wrong block, missed copy, missed swap or stale cache entry changes what it reads; its next
token follows from the text and, of a request's branches, from which one it is."""

import functools
import hashlib
import itertools
import math
from collections.abc import Collection

from jpaged.core.params import MAX_TOP
from jpaged.core.request import Sample, Sequence, SequenceResult
from jpaged.core.scheduler import ScheduleDecision

VOCAB = 50


def extend(digest: int, token: int) -> int:
    """The digest of a text and one more token."""
    return (digest + token + 1) * 6364136223846793005 % 2**64


def digests(tokens: list[int], salt: str = "") -> list[int]:
    """Of everything that a text begins with: its first token, its first two, ..., all of it."""
    return list(itertools.accumulate(tokens, extend, initial=functools.reduce(extend, salt.encode(), 0)))[1:]


def next_token(tokens: list[int], seed: int = 0, forbidden: Collection[int] = ()) -> int:
    token = (digests([*tokens, seed] if seed else tokens)[-1] >> 40) % VOCAB
    while token in forbidden:
        token = (token + 1) % VOCAB
    return token


def generate(prompt: list[int], count: int, seed: int = 0) -> list[int]:
    """What any schedule must give."""
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(next_token(tokens, seed))
    return tokens[len(prompt) :]


def beams(tokens: list[int], forbidden: Collection[int] = (), most: int = MAX_TOP) -> tuple[list[int], list[float]]:
    """The most likely tokens, best first, and their logprobs."""
    ranked = [pair for pair in _ranked(digests(tokens)[-1])[:MAX_TOP] if pair[0] not in forbidden][:most]
    return [token for token, _ in ranked], [logprob for _, logprob in ranked]


@functools.lru_cache(2**12)
def _ranked(digest: int) -> tuple[tuple[int, float], ...]:
    noise = hashlib.blake2b(digest.to_bytes(8), digest_size=VOCAB).digest()
    scores = [byte / 64 for byte in noise]
    norm = math.log(sum(map(math.exp, scores)))
    best = sorted(range(VOCAB), key=scores.__getitem__, reverse=True)
    return tuple((token, scores[token] - norm) for token in best)


def prompt_samples(prompt: list[int]) -> list[Sample]:
    """What each token of a prompt but the first is given."""
    return [Sample(token, -float(digest % VOCAB)) for token, digest in zip(prompt, digests(prompt))][1:]


class FakeRunner:
    """A branch says what `generate` says with its request's seed plus its index."""

    def __init__(self, num_blocks: int, block_size: int, num_host_blocks: int = 0, num_rows: int = 64):
        self.block_size = block_size
        self.memory: list[int | None] = [None] * (num_blocks * block_size)
        self.host: list[int | None] = [None] * (num_host_blocks * block_size)
        self.rows: list[list[int] | None] = [None] * num_rows  # the tokens that each row has counted
        self.num_steps = 0
        self.num_copies = 0

    def step(self, decision: ScheduleDecision) -> list[SequenceResult]:
        self.num_steps += 1
        for pairs in decision.swap_out:
            self._copy(pairs, self.memory, self.host)
        self._copy(decision.block_copies, self.memory, self.memory)
        self.num_copies += len(decision.block_copies)
        self._copy(decision.swap_in, self.host, self.memory)
        self._keep_rows(decision)
        size = self.block_size
        written: set[int] = set()
        texts = {s: digests(s.tokens, s.request.cache_salt) for s in decision.num_scheduled_tokens}
        for sequence, count in decision.num_scheduled_tokens.items():
            for position in range(sequence.num_computed_tokens, sequence.num_computed_tokens + count):
                slot = sequence.table.slot(position)
                assert slot not in written, f"slot {slot} is written twice in a step"
                assert sequence.table.pool.ref_count(slot // size) == 1, f"slot {slot} is in a shared block"
                assert not sequence.table.pool.is_cached(slot // size), f"slot {slot} is in a cached block"
                written.add(slot)
                self.memory[slot] = texts[sequence][position]
        return [
            self._result(sequence, count, texts[sequence], decision.forbidden.get(sequence, ()))
            for sequence, count in decision.num_scheduled_tokens.items()
        ]

    def recover(self) -> None:
        """Lose all content, as a runner whose donated arrays are gone."""
        self.memory, self.host = [None] * len(self.memory), [None] * len(self.host)
        self.rows = [None] * len(self.rows)

    def _result(self, sequence: Sequence, count: int, text: list[int], forbidden: Collection[int]) -> SequenceResult:
        start, request = sequence.num_computed_tokens, sequence.request
        end = start + count
        seen = [self.memory[sequence.table.slot(i)] for i in range(end)]
        assert seen == text[:end], "it reads what it did not write"
        prompt: list[Sample] = []
        if request.params.prompt_logprobs is not None:
            known = len(request.prompt_samples)
            assert start <= known or known == len(request.prompt_token_ids) - 1, f"{start} skipped, {known} known"
            prompt = prompt_samples(request.prompt_token_ids)[known:end]
        number = sequence.num_samples(count)
        if not number:
            return SequenceResult([], prompt)
        if request.params.has_state:
            assert sequence.row is not None
            row = self.rows[sequence.row]
            assert row is not None, f"row {sequence.row} was never written"
            if sequence.num_output_tokens:
                row.append(sequence.tokens[-1])
            assert row == sequence.tokens, f"row {sequence.row} has counted {row}, not {sequence.tokens}"
        if request.beam:
            # No more than a search needs: as many as go on, beside all that may end it (one of them the model's own).
            enough = request.num_sequences + len(request.params.stop_token_ids) + 1
            return SequenceResult([Sample(0, 0.0, 1, *beams(sequence.tokens, forbidden, enough))], prompt)
        seed = request.seed + sequence.index
        tokens = [next_token(sequence.tokens, seed + branch, forbidden) for branch in range(number)]
        return SequenceResult([Sample(token, -float(token)) for token in tokens], prompt)

    def _keep_rows(self, decision: ScheduleDecision) -> None:
        before = list(self.rows)
        for destination, source in decision.row_copies.items():
            row = before[source]
            self.rows[destination] = None if row is None else list(row)
        for sequence in decision.row_writes:
            assert sequence.row is not None
            # The last token of output is counted by the step that takes it in.
            self.rows[sequence.row] = sequence.tokens[: len(sequence.tokens) - bool(sequence.num_output_tokens)]

    def _copy(self, pairs: list[tuple[int, int]], source: list, destination: list) -> None:
        if not pairs:
            return
        before, size = list(source), self.block_size
        for i, o in pairs:
            destination[o * size : (o + 1) * size] = before[i * size : (i + 1) * size]
