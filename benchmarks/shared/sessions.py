"""Sessions of agents: prompts that grow by turns, with pauses between them.

All sessions of a kind of agent begin with one system prompt and its tools. Each turn appends a tool result or a message
of the user to the history, and the model's output. Pauses are log-normal, so that a few are long; sessions arrive as a
Poisson process.

The defaults give the mean prompt of the public conversations of Mooncake, 12,035 tokens (Qin et al., FAST '25; in
`FAST25-release/traces` of kvcache-ai/Mooncake), and the mean output of its technical report, 182 tokens
(arXiv:2407.00079). An unlimited cache would find 63 % of the prompts' tokens; it would find 37 % in these
conversations, which have fewer turns. The distributions are assumed.
"""

import heapq
import itertools
import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from jpaged.simulator.traffic import Call, Segment


class Turn(NamedTuple):
    """Turn of a session.

    Attributes:
        message: tokens that it appends to the history before the model's output.
        output: tokens of the output.
        pause_s: seconds from the end of the turn before.
    """

    message: int
    output: int
    pause_s: float


class Session(NamedTuple):
    """Session of an agent.

    Attributes:
        arrival: seconds from the beginning to its first turn.
        kind: number of the kind of agent, and of its system prompt.
        system: tokens of the system prompt.
        text: number of its first message; those of its outputs and further messages follow.
    """

    arrival: float
    kind: int
    system: int
    text: int
    turns: tuple[Turn, ...]

    def num_prompt_tokens(self, turn: int) -> int:
        """Return the number of tokens of the prompt of a turn."""
        return sum(tokens for _, tokens in self.prompt(turn))

    def prompt(self, turn: int) -> tuple[Segment, ...]:
        """Return the texts of the prompt of a turn: system prompt, messages and outputs so far, and the new message."""
        segments = [(self.kind, self.system)] if self.system else []
        for number, each in enumerate(self.turns[: turn + 1]):
            segments += [(self.text + 2 * number, each.message), (self.answer(number), each.output)]
        return tuple(segments[:-1])

    def continues(self, turn: int) -> bool:
        """Return whether another turn follows."""
        return turn + 1 < len(self.turns)

    def answer(self, turn: int) -> int:
        """Return the number of the text of a turn's output."""
        return self.text + 2 * turn + 1


@dataclass(frozen=True)
class Agents:
    """Distributions of sessions.

    Attributes:
        kinds: number of kinds of agents.
        system: mean tokens of a system prompt; they are uniform from half of it to one and a half.
        turns, most_turns: mean and maximum number of turns; they are geometric.
        message, output: mean tokens of a message and of an output; they are log-normal.
        pause_s: median of the pauses; they are log-normal with the exponent `pause_spread`, and at most `most_pause_s`.
        most_tokens: maximum tokens of a session, and twice those of a message; later turns are left out.
    """

    kinds: int = 8
    system: float = 1800
    turns: float = 2.1
    most_turns: int = 24
    message: float = 4800
    output: float = 182
    pause_s: float = 15.0
    pause_spread: float = 1.5
    most_pause_s: float = 1800.0
    most_tokens: int = 65_536

    def scaled(self, scale: float) -> "Agents":
        """Return the distributions with texts of another length."""
        sizes = {name: scale * getattr(self, name) for name in ("system", "message", "output")}
        return Agents(**{**self.__dict__, **sizes, "most_tokens": round(scale * self.most_tokens)})

    def draw(self, count: int, rate: float, seed: int = 0) -> list[Session]:
        """Return sessions in the order of their arrivals, `rate` of them per second."""
        rng = random.Random(seed)
        systems = [max(1, round(self.system * rng.uniform(0.5, 1.5))) for _ in range(self.kinds)]
        text, now, sessions = self.kinds, 0.0, list[Session]()
        for _ in range(count):
            now += rng.expovariate(rate)
            kind = rng.randrange(self.kinds)
            turns = self._turns(rng, systems[kind])
            sessions.append(Session(now, kind, systems[kind], text, turns))
            text += 2 * len(turns)
        return sessions

    def _turns(self, rng: random.Random, total: int) -> tuple[Turn, ...]:
        turns = list[Turn]()
        while len(turns) < self.most_turns:
            pause = min(self.most_pause_s, rng.lognormvariate(math.log(self.pause_s), self.pause_spread))
            message = min(self.most_tokens // 2, _tokens(rng, self.message, 1.0))
            turn = Turn(message, _tokens(rng, self.output, 0.6), pause if turns else 0.0)
            total += turn.message + turn.output
            if turns and total > self.most_tokens:
                break
            turns.append(turn)
            if rng.random() < 1 / self.turns:
                break
        return tuple(turns)


def _tokens(rng: random.Random, mean: float, spread: float) -> int:
    """Return a log-normal number of tokens."""
    return max(1, round(rng.lognormvariate(math.log(mean) - spread**2 / 2, spread)))


def separated(sessions: Sequence[Session]) -> list[Session]:
    """Return as many prompts of the same lengths, as sessions of one turn that have no text in common."""
    numbers = itertools.count(0, 2)
    return [
        Session(session.arrival, 0, 0, next(numbers), (each._replace(message=session.num_prompt_tokens(turn)),))
        for session in sessions
        for turn, each in enumerate(session.turns)
    ]


def mean_prompt(sessions: Sequence[Session]) -> float:
    """Return the mean tokens of the prompts."""
    prompts = [session.num_prompt_tokens(turn) for session in sessions for turn in range(len(session.turns))]
    return sum(prompts) / len(prompts)


def ideal_hits(sessions: Sequence[Session]) -> float:
    """Return the share of the prompts' tokens that a cache without limits finds, by the order of the sessions."""
    known: set[Segment] = set()
    hits = total = 0
    for session in sessions:
        for turn in range(len(session.turns)):
            segments = session.prompt(turn)
            hits += sum(tokens for _, tokens in itertools.takewhile(known.__contains__, segments))
            total += sum(tokens for _, tokens in segments)
            known |= {*segments, (session.answer(turn), session.turns[turn].output)}
    return hits / total


def in_order(sessions: Sequence[Session]) -> list[tuple[int, int]]:
    """Return (session, turn) of all turns in the order in which they arrive if answers take no time."""
    times = []
    for number, session in enumerate(sessions):
        pauses = itertools.accumulate(each.pause_s for each in session.turns)
        times += [(session.arrival + pause, number, turn) for turn, pause in enumerate(pauses)]
    return [(number, turn) for _, number, turn in sorted(times)]


class SessionArrivals:
    """Turns of sessions for the simulator: each but the first arrives a pause after the end of the one before.

    Args:
        pin_s: seconds for which each turn but the last one of a session pins its prefix.
    """

    def __init__(self, sessions: Sequence[Session], pin_s: float = 0.0):
        self._next = [(session.arrival, number, 0) for number, session in enumerate(sessions)]
        heapq.heapify(self._next)
        self._sessions, self._pin_s = sessions, pin_s
        self._places = dict[int, tuple[int, int]]()  # of each answer that is awaited

    def due(self, now: float) -> Iterator[Call]:
        """Yield the turns that have arrived until now, each once."""
        while self._next and self._next[0][0] <= now:
            arrival, number, turn = heapq.heappop(self._next)
            session = self._sessions[number]
            self._places[session.answer(turn)] = number, turn
            pin_s = self._pin_s if session.continues(turn) else 0.0
            output, answer = session.turns[turn].output, session.answer(turn)
            yield Call(arrival, session.prompt(turn), output, answer, pin_s=pin_s)

    def next_arrival(self) -> float | None:
        """Return the time of the next turn; None while all sessions wait for answers, or after the last turn."""
        return self._next[0][0] if self._next else None

    def ended(self, call: Call, now: float) -> None:
        """Let a session pause, and then send its next turn."""
        number, turn = self._places.pop(call.answer)
        session = self._sessions[number]
        if session.continues(turn):
            heapq.heappush(self._next, (now + session.turns[turn + 1].pause_s, number, turn + 1))
