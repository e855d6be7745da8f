"""Requests of every kind over a fake runner, and the result of each alone."""

import pickle
import random
from typing import NamedTuple

from jpaged.config import Limits
from jpaged.core.beam import Beam, BeamSearch
from jpaged.core.block_pool import BlockPool
from jpaged.core.cache_events import CacheEvents
from jpaged.core.commit import Committed
from jpaged.core.drafts import Drafter, Offer
from jpaged.core.params import BeamSearchParams, SamplingParams
from jpaged.core.plan import StepPlan
from jpaged.core.request import FinishReason, Request, Sequence
from jpaged.core.scheduler import Scheduler
from tests.core.reader import Reader
from tests.support.fake_runner import VOCAB, FakeRunner, beams, digests, next_token, prompt_samples


class Oracle(Drafter):
    """A drafter that knows most of the next tokens of a request, and rests at times."""

    def __init__(self, request: Request):
        self._request, self.most, self.rests_until = request, 4, 0

    def __copy__(self):
        return Oracle(self._request)

    def offer(self, tokens, forced, most):
        rng = random.Random(digests(list(tokens))[-1])
        if self.rests_until > len(tokens) and rng.random() > 0.3:
            return None
        drafts = mostly_right(self._request, tokens, most, rng)
        if not drafts:
            self.rests_until = len(tokens) + rng.randint(0, 3)
        return Offer(drafts, [1.0] * len(drafts)) if drafts else None

    def wake_up(self):
        self.rests_until = 0

    def rest(self, num_tokens):
        self.rests_until = num_tokens + 1

    def learn(self, drafts, kept):
        assert 0 <= kept <= drafts > 0

    def end(self, tokens, num_prompt_tokens):
        assert len(tokens) > num_prompt_tokens


def mostly_right(request: Request, tokens: list[int], most: int, rng: random.Random) -> list[int]:
    """Return at most `most` drafts, of which three in four are the next tokens of one of the request's sequences."""
    drafts: list[int] = []
    for _ in range(rng.randint(0, most) if most > 0 else 0):
        seed = request.seed + rng.randrange(request.num_sequences)
        drafts.append(next_token([*tokens, *drafts], seed) if rng.random() < 0.75 else rng.randrange(VOCAB))
    return drafts


def of_model(scheduler: Scheduler) -> dict[Sequence, list[int]]:
    """Return drafts as a draft model would: for each sequence that wants some, or for none."""
    found = {}
    for sequence, count in scheduler.wanted_drafts():
        assert sequence in sequence.request.live and 0 < count < sequence.request.max_length - sequence.num_tokens
        rng = random.Random(digests(list(sequence.tokens))[-1])
        found[sequence] = mostly_right(sequence.request, sequence.tokens, count, rng)
    return found


class CheckedScheduler(Scheduler):
    """A scheduler that compares the claims of each step with a sum over all running requests, and events with texts.

    Attributes:
        num_from_past: number of sequences in a step whose drafts follow no earlier place of their own text.
    """

    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        self.num_from_past = 0
        self.pool.tree.events = CacheEvents(self.pool.block_size)
        self.reader = Reader(self.pool.tree)
        self._arrivals_by_epoch: list[tuple[int, Request]] = []

    def add(self, *args, **options):
        request = super().add(*args, **options)
        (first,) = request.sequences
        if first.drafter is not None and self.drafting.past_outputs is None and self.drafting.settings.model is None:
            first.drafter = Oracle(request)
        self._arrivals_by_epoch.append((self.pool.epoch, request))
        return request

    def check_invariants(self):
        super().check_invariants()
        self.reader.check()

    def check_origins(self, plan: StepPlan) -> None:
        """Check that drafts continue the sequence's own text, or an output that it may know.

        That has the same salt and has ended by itself, and its request came in the present epoch of the prefix cache.
        """
        drafts: dict[int, list[int]] = {}
        for index, token in plan.drafts:
            drafts.setdefault(plan.rows[index].row, []).append(token)
        least = self.drafting.settings.shortest
        for row, found in drafts.items():
            sequence = self.rows[row]
            wanted = [*sequence.tokens[-least:], *found]
            if _holds([*sequence.tokens, *found][:-1], wanted):
                continue
            self.num_from_past += 1
            known = [
                each.tokens[max(0, each.num_prompt_tokens - self.drafting.settings.longest) :]
                for epoch, request in self._arrivals_by_epoch
                if epoch == self.pool.epoch and request.cache_salt == sequence.request.cache_salt
                for each in request.sequences
                if each.finish_reason in (FinishReason.STOP, FinishReason.LENGTH)
            ]
            assert any(_holds(text, wanted) for text in known), f"{found} continue no output that {row} may know"

    def _schedule_waiting(self, budget, step, shares):
        num_seats = sum(request.seats for request in self.running) + len(self.memory.leaving)
        assert step.claims() == (num_seats, step.lack(self.running)), "a running request is forgotten"
        super()._schedule_waiting(budget, step, shares)


def make(
    blocks=16, size=4, *, seqs=4, tokens=16, length=64, cache=True, eos=(), host=0, drafts=0, exact=False,
    method="ngram", windows=(None,), pages=0, adapters=0, tier=True, files=0, **options,
):  # fmt: skip
    """Return a scheduler and its fake runner. Instead of those of the method ngram, drafts are an oracle's.

    Those of a draft model are those of `of_model`.
    """
    groups = {"windows": windows, "reach": 2 * tokens}
    pool = BlockPool(blocks, size, enable_prefix_caching=cache, num_pages=pages, **groups)
    host_pages = min(pages, host)
    host_pool = None
    if host:
        host_pool = BlockPool(
            host, size, enable_prefix_caching=False, num_pages=host_pages, copies_of=pool if tier else None, **groups
        )
    model = {"model": "any"} if method == "draft_model" else {}
    speculative_config = {"method": method, "num_speculative_tokens": drafts, **model} if drafts else None
    limits = Limits(length, seqs, tokens, speculative_config=speculative_config, exact=exact)
    scheduler = CheckedScheduler(pool, limits, vocab_size=VOCAB, eos_token_ids=eos, host_pool=host_pool,
                                 num_adapters=adapters, **options)  # fmt: skip
    scheduler.memory._every = 4 * size
    if files and scheduler.memory.tier:
        scheduler.memory.tier.open_files((), files, token_s=1.0)
    return scheduler, FakeRunner(blocks, size, host, scheduler=scheduler)


def fetch(scheduler: Scheduler, runner: FakeRunner) -> None:
    """Read the files that the next step wants."""
    for files in scheduler.wanted_files():
        scheduler.disk.arrive(runner.fetch(files), seconds=0.5 * len(files))
        scheduler.check_invariants()


def dispatch(scheduler: Scheduler, runner: FakeRunner, plan: StepPlan):
    """Start a step, and write the files of the blocks that it brings to the host."""
    pending = runner.dispatch(plan)
    if scheduler.disk:
        runner.save(*scheduler.disk.take())
        assert set(scheduler.disk._names) >= set(runner.files), "a file is forgotten, and not deleted"
    return pending


def schedule(scheduler: Scheduler) -> StepPlan | None:
    in_flight = len(scheduler._in_flight)
    plan = scheduler.schedule(of_model(scheduler))
    scheduler.check_invariants()
    if plan is None:
        idle = not scheduler.has_work or (scheduler.holds_new and not scheduler.has_started)
        assert in_flight or idle, "there is work, and none of it is scheduled"
        return None
    assert plan.num_tokens <= scheduler.limits.max_num_batched_tokens
    assert len(plan.rows) - len(plan.drafts) <= scheduler.limits.max_num_seqs
    assert len(plan.drafts) <= scheduler.limits.max_num_drafts
    assert all(scheduled.num_tokens > 0 for scheduled in plan.rows)
    assert pickle.loads(pickle.dumps(plan)) == plan
    if scheduler.drafting.past_outputs is not None:
        scheduler.check_origins(plan)
    return plan


def _holds(text: list[int], part: list[int]) -> bool:
    return any(text[at : at + len(part)] == part for at in range(len(text) - len(part) + 1))


class Step(NamedTuple):
    """A step that has been committed."""

    plan: StepPlan
    committed: Committed

    @property
    def counts(self) -> list[int]:
        return [scheduled.num_tokens for scheduled in self.plan.rows]

    @property
    def served(self) -> list[Request]:
        return list(self.committed.served)

    @property
    def preempted(self) -> list[Request]:
        return [request for request, _ in self.committed.preempted]

    @property
    def resumed(self) -> list[Request]:
        return list(self.committed.resumed)

    @property
    def advanced(self) -> list[Sequence]:
        return list(self.committed.advanced)


def step(scheduler: Scheduler, runner: FakeRunner) -> Step:
    """Run one step alone; there must be work."""
    fetch(scheduler, runner)
    plan = schedule(scheduler)
    assert plan is not None
    committed = scheduler.commit(plan, dispatch(scheduler, runner, plan).result())
    scheduler.check_invariants()
    return Step(plan, committed)


def most_steps(request: Request) -> int:
    """A request that nobody may preempt any more writes at least one token a step, but in the one that brings it back
    from the host."""
    return request.num_sequences * (len(request.prompt_token_ids) + request.max_tokens) + 1


def drain(scheduler: Scheduler, runner: FakeRunner) -> None:
    """Runs until nothing is left: of requests, of blocks held, of rows taken."""
    waiting = list(scheduler.requests.values())
    # One that was let in before its elders, by priority, may be preempted once by each of them.
    bound = len(waiting) * sum(map(most_steps, waiting))
    while scheduler.has_work:
        assert bound, f"{len(scheduler.requests)} of {len(waiting)} requests don't end"
        bound -= 1
        step(scheduler, runner)
    assert_nothing_leaked(scheduler)


def assert_nothing_leaked(scheduler: Scheduler) -> None:
    assert not scheduler.requests and not scheduler.waiting and not scheduler.running
    scheduler.check_invariants()
    for pool in (scheduler.pool, scheduler.host_pool):
        assert pool is None or pool.num_used == 0, f"{pool.num_used} blocks are never given back"
        assert pool is None or pool.num_free_pages == pool.num_pages, "pages are never given back"
    assert len(scheduler.rows.free) == scheduler.limits.max_num_seqs


def assert_cache_is_true(scheduler: Scheduler, runner: FakeRunner) -> None:
    """Check that the prefix cache offers what was computed of its texts, with the present parameters."""
    pool, size = scheduler.pool, scheduler.pool.block_size
    remembered = [(parent, parent, []) for parent in pool.tree.children if isinstance(parent, str)]
    for salt, parent, text in remembered:
        for node in pool.tree.children.get(parent, ()):
            longer, count = [*text, *node.tokens], len(node.tokens)
            if pool.num_pages and (page := node.blocks[-1]) is not None:
                state = digests(longer, salt)[-1], runner.version
                assert runner.states[page.block_id - pool.num_blocks] == state, "the cache offers another state"
            if pool.num_pages and (page := node.copies[-1]) is not None:
                at = page.block_id - scheduler.host_pool.num_blocks
                assert runner.host_states[at] == (digests(longer, salt)[-1], runner.version), "the host, another state"
            memories = (runner.memory, runner.versions), (runner.host, runner.host_versions)
            for blocks, (memory, versions) in zip((node.blocks, node.copies), memories):
                for group, block in enumerate(blocks[: len(pool.windows)]):
                    if block is not None:
                        slots = slice(block.block_id * size, block.block_id * size + count)
                        written = [(digest, group) for digest in digests(longer, salt)[-count:]]
                        assert memory[slots] == written, "the cache offers something else"
                        assert set(versions[slots]) == {runner.version}, "the cache offers what is out of date"
            remembered.append((salt, node.number, longer))


def draw(rng: random.Random, scheduler: Scheduler, longest: int = 12):
    """Return any request that fits: its prompt, its parameters, and further arguments of `add`."""
    prompt = [rng.randrange(1, 3)] * rng.randrange(0, longest - 2) + [rng.randrange(VOCAB)]
    width = rng.choice([1, rng.randint(1, scheduler.limits.max_num_seqs)])
    while (room := scheduler.capacity.max_sequence_len(len(prompt), width) - len(prompt)) < 1:
        if width > 1:
            width -= 1
        else:
            prompt.pop()
    if scheduler.pool.num_pages:
        width = max(1, min(width, scheduler.pool.num_pages // 2))
    most = min(longest, room)
    max_tokens = rng.choice([most, rng.randint(1, most)])
    common = {
        "max_tokens": max_tokens,
        "min_tokens": rng.choice([0, 0, rng.randint(0, max_tokens)]),
        "stop_token_ids": [rng.randrange(VOCAB) for _ in range(rng.choice([0, 0, 3]))],
        "ignore_eos": rng.random() < 0.5,
        "presence_penalty": rng.choice([0, 0, 1]),  # the fake runner only keeps the state that it needs
        "prompt_logprobs": rng.choice([None, None, None, 0]),
    }
    params: SamplingParams | BeamSearchParams
    if rng.random() < 0.35:
        params = BeamSearchParams(
            beam_width=width, n=rng.choice([None, rng.randint(1, width)]),
            early_stopping=rng.choice([True, False, "never"]), length_penalty=rng.choice([0.0, 1.0, -1.0]), **common,
        )  # fmt: skip
    else:
        params = SamplingParams(n=rng.randint(1, width), best_of=rng.choice([None, width]), **common)
    options = {"cache_salt": rng.choice(["", "", "a"])}
    if scheduler.policy == "priority":
        options["priority"] = rng.randrange(3)
    return prompt, params, options


def alone(request: Request, eos: frozenset[int]) -> list[list[int]]:
    """The outputs of a request, of which it returns some, without an engine: every text from scratch."""
    params, prompt = request.params, request.prompt_token_ids
    ends = {*params.stop_token_ids} | (set() if params.ignore_eos else eos)

    def forbidden(length):
        return eos | {*params.stop_token_ids} if length < params.min_tokens else ()

    if isinstance(params, BeamSearchParams):
        return _beam_search(prompt, params, request.max_tokens, ends, forbidden)
    outputs = []
    for seed in range(request.seed, request.seed + request.num_sequences):
        output: list[int] = []
        while len(output) < request.max_tokens and not (output and output[-1] in ends):
            output.append(next_token(prompt + output, seed, forbidden(len(output))))
        outputs.append(output)
    return outputs


def _beam_search(prompt, params, max_tokens, ends, forbidden):
    search = BeamSearch(params.beam_width, max_tokens, params.length_penalty, params.early_stopping)
    live, scores = [[]], [0.0]
    for length in range(max_tokens):
        extended = [Beam(score, *beams(prompt + tokens, forbidden(length))) for tokens, score in zip(live, scores)]

        def end(candidate, live=live, last=length + 1 == max_tokens):
            return [*live[candidate.beam], candidate.token] if last or candidate.token in ends else None

        chosen = search.advance(extended, length + 1, end)
        live, scores = [[*live[c.beam], c.token] for c in chosen], [c.score for c in chosen]
        if search.done:
            break
    return [beam for _, beam in search.hypotheses]


def assert_as_alone(request: Request, eos: frozenset[int] = frozenset()) -> None:
    """Check that an ended request has its result alone, and an aborted one the beginning of that."""
    assert request.finished
    expected = alone(request, eos)
    got = [sequence.output_token_ids for sequence in request.sequences]
    aborted = [sequence.finish_reason == FinishReason.ABORT for sequence in request.sequences]
    if any(aborted):
        if not request.beam:
            for tokens, whole, cut in zip(got, expected, aborted):
                assert tokens == (whole[: len(tokens)] if cut else whole)
        return
    assert got == expected
    wanted = prompt_samples(request.prompt_token_ids) if request.params.prompt_logprobs is not None else []
    assert request.prompt_samples == wanted
    if not request.beam:
        best = sorted(expected, key=lambda tokens: sum(tokens) / len(tokens)) if not request.streams else expected
        assert [s.output_token_ids for s in request.outputs] == best[: request.params.num_outputs]


def add(scheduler, name, prompt, client=None, **params):
    return scheduler.add(str(name), prompt, SamplingParams(**params), seed=0, client=client)
