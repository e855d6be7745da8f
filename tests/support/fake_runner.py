"""A runner without a model. Its KV is a list of slots that hold, per token, a digest of the whole text before it and of
the cache salt, so that any wrong block, missed copy, missed swap or stale cache entry changes what it reads; its next
token follows from the text and, of a request's branches, from which one it is."""

import copy
import functools
import hashlib
import itertools
import math
from collections import deque
from collections.abc import Callable, Collection
from typing import NamedTuple

from jpaged.core.block_pool import GONE
from jpaged.core.block_table import BlockTable
from jpaged.core.commands import UpdateParams
from jpaged.core.params import MAX_TOP, BeamSearchParams
from jpaged.core.plan import (
    CONTINUES,
    NO_SLOT,
    NO_STATE,
    NOWHERE,
    Admitted,
    Pairs,
    Sample,
    Scheduled,
    StepPlan,
    StepResult,
)
from jpaged.core.scheduler import Scheduler

VOCAB = 50


def slot(table: BlockTable, position: int, group: int = 0) -> int:
    """The flat slot of the token at a position of a sequence."""
    index, offset = divmod(position, table.pool.block_size)
    assert table.block_ids[group][index] != GONE, f"position {position} is gone from group {group}"
    return table.block_ids[group][index] * table.pool.block_size + offset


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
    """Return the tokens that every schedule must give."""
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
    """Return the samples of a prompt's tokens except the first."""
    return [Sample(token, -float(digest % VOCAB)) for token, digest in zip(prompt, digests(prompt))][1:]


class Row:
    """A runner's knowledge of a row, from plans only.

    Attributes:
        tokens: those computed, and the next one if it is known.
        counted: the tokens that its sampling state has counted; None if it has no state.
        verified: the samples of its last step, if that had drafts, and the drafts. The host has yet to say where the
            sequence goes on.
    """

    def __init__(self, admitted: Admitted, salt: str):
        self.params, self.seed, self.num_prompt = admitted.params, admitted.seed, admitted.num_prompt_tokens
        self.tokens, self.tables, self.salt = list(admitted.token_ids), [*map(list, admitted.block_ids)], salt
        self.num_scored, self.adapter_slot = admitted.num_scored, admitted.adapter_slot
        # The last token of output is counted by the step that takes it in.
        has_output = len(self.tokens) > self.num_prompt
        self.counted = self.tokens[: len(self.tokens) - has_output] if self.params.has_state else None
        self.verified: tuple[list[int], list[int]] | None = None

    def take(self, token: int) -> None:
        """Take in the token that the host says is the last."""
        new = [token]
        if self.verified is not None:
            samples, drafts = self.verified
            kept = next((i for i, (a, b) in enumerate(zip(samples, drafts)) if a != b), len(drafts))
            new, self.verified = samples[: kept + 1], None
            assert new[-1] == token, f"the output goes on with {token} after {new}"
            if self.counted is not None:
                self.counted += new[:-1]
        self.tokens += new

    def copy(self) -> "Row":
        other = copy.copy(self)
        other.tokens, other.tables = list(self.tokens), [*map(list, self.tables)]
        other.counted = None if self.counted is None else list(self.counted)
        return other


class FakeRunner:
    """A branch says what `generate` says with its request's seed plus its index.

    Steps run when they are dispatched, as on a device that runs them in order. Until the result of one is taken, no
    later plan may give a block that it writes, or a row that it samples for, to another sequence.

    Args:
        scheduler: for facts outside plans: salts, and the shared or cached blocks.
    """

    def __init__(self, num_blocks: int, block_size: int, num_host_blocks: int = 0, *, scheduler: Scheduler):
        self.block_size = block_size
        self.scheduler = scheduler
        self.memory: list[tuple[int, int] | None] = [None] * (num_blocks * block_size)
        self.host: list[tuple[int, int] | None] = [None] * (num_host_blocks * block_size)
        self.rows: dict[int, Row] = {}
        self.in_flight: deque[tuple[StepPlan, dict[int, int]]] = deque()  # with {block: the row that writes it}
        self.num_steps = self.num_copies = self.num_replaced = 0
        # Whether the token in a slot was computed as part of an output.
        self.of_output = [False] * (num_blocks * block_size)
        self.host_of_output = [False] * (num_host_blocks * block_size)
        self.adapters: dict[int, int] = {}  # by slot
        self.version = 0  # of the parameters: who changes it resets the prefix cache
        self.versions: list[int | None] = [None] * (num_blocks * block_size)
        self.host_versions: list[int | None] = [None] * (num_host_blocks * block_size)
        # Of each page: the digest of the text before it, and the version of the parameters.
        self.states: list[tuple[int, int] | None] = [None] * scheduler.pool.num_pages
        self.host_states: list[tuple[int, int] | None] = [None] * num_host_blocks
        self.files: dict[str, object] = {}
        self.fetched: dict[int, object] = {}

    def step(self, plan: StepPlan) -> StepResult:
        return self.dispatch(plan).result()

    def dispatch(self, plan: StepPlan, make_masks: Callable | None = None) -> "Flying":
        self.num_steps += 1
        self._check_in_flight(plan)
        for source, place in plan.swap_out:
            assert (source < 0) == (place < 0), "a page is no block"
            if source < 0:
                self.host_states[-1 - place] = self.states[-1 - source]
        for place, destination in plan.swap_in:
            if place < 0:
                self.states[-1 - destination] = self.host_states[-1 - place]
        swap_out = [pair for pair in plan.swap_out if pair[0] >= 0]
        self._copy(swap_out, self.memory, self.host)
        self._copy(swap_out, self.versions, self.host_versions)
        self._copy(swap_out, self.of_output, self.host_of_output)
        self._copy(plan.block_copies, self.memory, self.memory)
        self._copy(plan.block_copies, self.versions, self.versions)
        self._copy(plan.block_copies, self.of_output, self.of_output)
        self.num_copies += len(plan.block_copies)
        swap_in = [pair for pair in plan.swap_in if pair[0] >= 0]
        self._copy(swap_in, self.host, self.memory)
        self._copy(swap_in, self.host_versions, self.versions)
        self._copy(swap_in, self.host_of_output, self.of_output)
        for block in plan.from_files:
            self._put(block, self.fetched[block])
        self.fetched = {}
        self._change_rows(plan)
        self.num_replaced += sum(slot in self.adapters for _, slot in plan.adapters)
        self.adapters |= {slot: adapter for adapter, slot in plan.adapters}
        self._check_adapters(plan)
        self._check_versions(plan)
        written: dict[int, int] = {}
        texts: dict[int, list[int]] = {}
        drafts, drafted = dict(plan.drafts), {}
        for index, (row, start, count, _) in enumerate(plan.rows):
            before = plan.rows[index - 1] if index else None
            follows = before is not None and (before.row, before.start + before.num_tokens) == (row, start)
            assert row not in texts or follows, f"row {row} is scheduled twice"
            one_by_one = start + count <= self.rows[row].num_prompt or count == 1
            assert one_by_one or not self.scheduler.limits.exact, "tokens of the output are computed one by one"
            if index in drafts:
                assert row in texts, "a draft follows no token"
                drafted.setdefault(row, []).append(drafts[index])
            known = self.rows[row].tokens + drafted.get(row, [])
            texts[row] = digests(known, self.rows[row].salt)
            for position, group in itertools.product(range(start, start + count), range(self.num_groups)):
                slot = self._slot(row, position, group)
                pool, block = self.scheduler.pool, slot // self.block_size
                assert slot not in written, f"slot {slot} is written twice in a step"
                assert pool.ref_count(block) == 1, f"slot {slot} is in a shared block"
                assert not pool.is_cached(block), f"slot {slot} is in a cached block"
                written[slot] = row
                self.memory[slot], self.versions[slot] = (texts[row][position], group), self.version
                self.of_output[slot] = position >= self.rows[row].num_prompt
        if plan.pages:
            self._advance_states(plan, texts)
        forbidden: dict[int, list] = {}
        for row, banned in plan.masked:
            forbidden.setdefault(row, []).append(banned)
        samples, prompt = [], {}
        for index, scheduled in enumerate(plan.rows):
            row, banned = scheduled.row, ()
            if scheduled.num_samples and forbidden.get(row):
                banned = forbidden[row].pop(0)
            if row in drafted:
                samples.append(self._verify(scheduled, texts[row], drafted[row], banned))
            else:
                samples += self._sample(scheduled, texts[row], banned)
            if told := self._prompt(scheduled):
                prompt[index] = told
        self.in_flight.append((plan, {slot // self.block_size: row for slot, row in written.items()}))
        return Flying(self, plan, StepResult(samples, prompt))

    def fetch(self, files: list[tuple[int, str]]) -> list[bool]:
        """Read files for blocks of the next plan."""
        self.fetched |= {block: self.files[name] for block, name in files if name in self.files}
        return [name in self.files for _, name in files]

    def save(self, written: list[tuple[int, str]], deleted: list[str]) -> None:
        """Write files of places on the host, and delete others."""
        self._save(written, self.host_states, (self.host, self.host_versions, self.host_of_output))
        for name in deleted:
            self.files.pop(name, None)

    def save_blocks(self, written: list[tuple[int, str]]) -> None:
        """Write files of blocks on the device."""
        self._save(written, self.states, (self.memory, self.versions, self.of_output))

    def _save(self, written: list[tuple[int, str]], states: list, parts: tuple[list, ...]) -> None:
        for block, name in written:
            slots = slice(block * self.block_size, (block + 1) * self.block_size)
            self.files[name] = states[-1 - block] if block < 0 else [part[slots] for part in parts]

    def _put(self, block: int, content) -> None:
        if block < 0:
            self.states[-1 - block] = content
            return
        slots = slice(block * self.block_size, (block + 1) * self.block_size)
        for part, values in zip((self.memory, self.versions, self.of_output), content):
            part[slots] = values

    def recover(self) -> None:
        """Lose all content, as a runner whose donated arrays are gone."""
        self.memory, self.host = [None] * len(self.memory), [None] * len(self.host)
        self.states, self.host_states = [None] * len(self.states), [None] * len(self.host_states)
        self.rows.clear()
        self.adapters.clear()
        self.in_flight.clear()

    def check(self, command: UpdateParams) -> None:
        """All parameters are alike."""

    def control(self, command: UpdateParams) -> None:
        """Lose all content: that of old parameters must not be read, so a reader finds nothing."""
        self.recover()
        self.version += 1

    def _advance_states(self, plan: StepPlan, texts: dict[int, list[int]]) -> None:
        """Let each row read the state of its text and write those after it. Rows run in any order."""
        pool = self.scheduler.pool
        admitted = {each.row for each in plan.admitted if not self._is_swapped(plan, each)}
        readers, writers, found = dict[int, set[int]](), dict[int, int](), dict[int, tuple[int, int]]()
        state = None
        for (row, start, count, _), (read, written) in zip(plan.rows, plan.pages, strict=True):
            text, salt = texts[row], self.rows[row].salt
            before = text[start - 1] if start else None
            if read == NO_STATE:
                assert start == 0, f"position {start} continues from no state"
            elif read != CONTINUES:
                state = self.states[read]
                readers.setdefault(read, set()).add(row)
                assert state is not None and state[0] == before, f"a state of another text, at {start} ({salt!r})"
                assert row not in admitted or state[1] == self.version, "a state is out of date"
            else:
                assert state is not None and state[0] == before, f"position {start} continues another text"
            state = text[start + count - 1], self.version
            if written != NOWHERE:
                assert writers.setdefault(written, row) == row, f"two rows write page {written}"
                assert pool.ref_count(pool.num_blocks + written) == 1, f"page {written} is shared"
                assert not pool.is_cached(pool.num_blocks + written), f"page {written} is cached"
                found[written] = state
        for page, row in writers.items():
            assert readers.get(page, set()) <= {row}, f"page {page} is read while another row writes it"
        for page, each in found.items():
            self.states[page] = each

    @property
    def num_groups(self) -> int:
        return len(self.scheduler.pool.windows)

    def _slot(self, row: int, position: int, group: int = 0) -> int:
        index, offset = divmod(position, self.block_size)
        block = self.rows[row].tables[group][index]
        assert block != GONE, f"position {position} is gone from group {group}"
        return block * self.block_size + offset

    def _seen(self, row: int, start: int, end: int) -> list[tuple[int, int, int]]:
        """Return group, position and slot of everything that the tokens [start, end) of a row see."""
        return [
            (group, position, self._slot(row, position, group))
            for group, window in enumerate(self.scheduler.pool.windows)
            for position in range(0 if window is None else max(0, start - window + 1), end)
        ]

    def _check_versions(self, plan: StepPlan) -> None:
        """Check that blocks from the prefix cache were computed with the present parameters."""
        start = {scheduled.row: scheduled.start for scheduled in reversed(plan.rows)}  # drafts come last
        for admitted in plan.admitted:
            if not self._is_swapped(plan, admitted):
                end = start.get(admitted.row, 0)
                for _, position, slot in self._seen(admitted.row, end, end):
                    found = self.versions[slot]
                    assert found == self.version, f"position {position} is of version {found}, not {self.version}"

    def _check_adapters(self, plan: StepPlan) -> None:
        """Check that each row finds its request's adapter in its slot."""
        for row in {scheduled.row for scheduled in plan.rows}:
            slot, wanted = self.rows[row].adapter_slot, self.scheduler.rows[row].request.adapter
            assert (slot == NO_SLOT) == (wanted is None), f"row {row} has slot {slot} for adapter {wanted}"
            assert self.adapters.get(slot) == wanted, f"slot {slot} has adapter {self.adapters.get(slot)}, not {wanted}"

    def _is_swapped(self, plan: StepPlan, admitted: Admitted) -> bool:
        """Whether a row returns from the host."""
        return not {block for _, block in plan.swap_in}.isdisjoint(itertools.chain.from_iterable(admitted.block_ids))

    def _check_in_flight(self, plan: StepPlan) -> None:
        """Check that no other sequence holds the blocks of a write in flight."""
        new = [(row, block) for row, _, _, block in plan.entries]
        new += [(each.row, block) for each in plan.admitted for block in itertools.chain.from_iterable(each.block_ids)]
        moved = [block for _, block in (*plan.block_copies, *plan.swap_in)] + [*plan.from_files]
        taken = {admitted.row for admitted in plan.admitted} | {row for _, row in plan.row_copies}
        for earlier, writers in self.in_flight:
            assert not taken & {scheduled.row for scheduled in earlier.rows}, "a row of a step in flight is taken"
            for row, block in new:
                assert writers.get(block, row) == row, f"block {block} is given away while a step in flight writes it"
            for block in moved:
                assert block not in writers, f"block {block} is overwritten while a step in flight writes it"
            for block, _ in plan.swap_out:
                assert block not in writers, f"block {block} leaves while a step in flight writes it"
            self._check_pages_in_flight(plan, earlier, moved)

    def _check_pages_in_flight(self, plan: StepPlan, earlier: StepPlan, moved: list[int]) -> None:
        """Check that no other sequence writes the pages that a step in flight reads or writes."""
        used = {page: row.row for row, pages in zip(earlier.rows, earlier.pages) for page in pages if page >= 0}
        for (row, *_), (_, written) in zip(plan.rows, plan.pages):
            assert used.get(written, row) == row, f"page {written} is taken from a step in flight"
        for block in (*moved, *(block for block, _ in plan.swap_out)):
            assert block >= 0 or -1 - block not in used, f"page {-1 - block} moves while a step in flight uses it"

    def _change_rows(self, plan: StepPlan) -> None:
        before = dict(self.rows)
        for row in plan.released_rows:
            self.rows.pop(row, None)
        for source, row in plan.row_copies:
            self.rows[row] = before[source].copy()
        for admitted in plan.admitted:
            salt = self.scheduler.rows[admitted.row].request.cache_salt
            self.rows[admitted.row] = Row(admitted, salt)
        for row, token, seed in plan.chosen:
            self.rows[row].take(token)
            self.rows[row].seed = seed
        for row, group, column, block in plan.entries:
            table = self.rows[row].tables[group]
            if self.scheduler.pool.windows[group] is not None:
                table += [GONE] * (column - len(table))
            assert column <= len(table), f"entry {column} of {len(table)}"
            table[column : column + 1] = [block]

    def _sample(self, scheduled: Scheduled, text: list[int], forbidden: Collection[int]) -> list[Sample]:
        _, start, count, number = scheduled
        row, end = self.rows[scheduled.row], start + count
        for group, position, slot in self._seen(scheduled.row, start, end):
            assert self.memory[slot] == (text[position], group), "it reads what it did not write"
            assert not (self.scheduler.limits.exact and self.of_output[slot] and position < row.num_prompt), (
                "a token of a prompt was computed as one of an output"
            )
        if not number:
            return []
        assert end == len(row.tokens), f"it samples after {end} of {len(row.tokens)} tokens"
        if end > row.num_prompt:
            self._count(scheduled.row)
        assert row.counted in (None, row.tokens), f"row {scheduled.row} has counted {row.counted}, not {row.tokens}"
        if isinstance(row.params, BeamSearchParams):
            # No more than a search needs: as many as go on, beside all that may end it (one of them the model's own).
            enough = row.params.beam_width + len(row.params.stop_token_ids) + 1
            return [Sample(0, 0.0, 1, *beams(row.tokens, forbidden, enough))]
        tokens = [next_token(row.tokens, row.seed + branch, forbidden) for branch in range(number)]
        if number == 1:
            row.tokens.append(tokens[0])
        return [Sample(token, -float(token)) for token in tokens]

    def _verify(self, scheduled: Scheduled, text: list[int], drafts: list[int], forbidden: Collection[int]) -> Sample:
        """Return the sample after the last token of a row or after one of its drafts."""
        _, start, count, number = scheduled
        row = self.rows[scheduled.row]
        assert (count, number) == (1, 1) and start >= row.num_prompt, "drafts follow a token of the output"
        assert not isinstance(row.params, BeamSearchParams), "the host chooses among the candidates of beams"
        for group, position, slot in self._seen(scheduled.row, start, start + 1):
            assert self.memory[slot] == (text[position], group), "it reads what it did not write"
        if row.verified is None:
            assert start + 1 == len(row.tokens), f"it samples after {start + 1} of {len(row.tokens)} tokens"
            row.verified = [], drafts
            self._count(scheduled.row)
        samples = row.verified[0]
        assert start + 1 == len(row.tokens) + len(samples), "a draft is missing"
        samples.append(next_token(row.tokens + drafts[: len(samples)], row.seed, forbidden))
        return Sample(samples[-1], -float(samples[-1]))

    def _count(self, number: int) -> None:
        """Count the last token of a row, if it has a sampling state. Drafts are counted once they are kept."""
        row = self.rows[number]
        if row.counted is not None:
            row.counted += row.tokens[-1:]
            assert row.counted == row.tokens, f"row {number} has counted {row.counted}, not {row.tokens}"

    def _prompt(self, scheduled: Scheduled) -> list[Sample]:
        _, start, count, _ = scheduled
        row = self.rows[scheduled.row]
        if row.num_scored is None:
            return []
        last = row.num_prompt - 1
        assert start <= row.num_scored or row.num_scored == last, f"{start} skipped, {row.num_scored} known"
        first, row.num_scored = row.num_scored, max(row.num_scored, min(start + count, last))
        return prompt_samples(row.tokens[: row.num_prompt])[first : row.num_scored]

    def _copy(self, pairs: Pairs, source: list, destination: list) -> None:
        if not pairs:
            return
        before, size = list(source), self.block_size
        for i, o in pairs:
            destination[o * size : (o + 1) * size] = before[i * size : (i + 1) * size]


class Flying(NamedTuple):
    """A dispatched step."""

    runner: FakeRunner
    plan: StepPlan
    known: StepResult

    def wait(self) -> None:
        pass

    def result(self) -> StepResult:
        plan, _ = self.runner.in_flight.popleft()
        assert plan is self.plan, "results are taken in the order of their steps"
        return self.known
