"""Decisions by the costs of steps, and the file that remembers them."""

import json
import logging
import math
import types

import pytest

from jpaged.config import CPU, GPU
from jpaged.runtime.batch import Bucket
from jpaged.start import measure
from jpaged.start.measure import (
    CPU_TOKEN_S,
    fastest,
    forget_costs,
    further_shapes,
    step_overhead,
    stored_costs,
    tokens_beside_decodes,
)


def costs_of(decode: dict[int, float], mixed: dict[int, float], seqs: tuple[int, ...] = ()) -> dict[Bucket, float]:
    """Return costs in seconds by tokens; those of steps with a prompt hold for each number of sequences."""
    costs = {Bucket(s, s, True): seconds for s, seconds in decode.items()}
    return costs | {Bucket(t, s, False): c for t, c in mixed.items() for s in seqs or (max(decode),)}


def test_a_shape_pays_between_two_of_which_the_larger_is_much_dearer():
    decode = {1: 0.013, 2: 0.019, 4: 0.029, 8: 0.0301, 16: 0.06}
    mixed = {32: 0.1, 64: 0.15, 128: 0.2251, 256: 0.5}
    paying = further_shapes(costs_of(decode, mixed, (4, 16)))
    costs = {Bucket(3, 3, True): 0.024, Bucket(12, 12, True): 0.04505}
    costs |= {Bucket(t, s, False): c for t, c in ((96, 0.18755), (192, 0.36255)) for s in (4, 16)}
    assert paying == pytest.approx(costs)


@pytest.mark.parametrize("largest, pays", [(0.02, 0), (0.0201, 1)])
def test_a_shape_between_short_steps_does_not_pay(largest, pays):
    assert len(further_shapes(costs_of({8: 0.001}, {16: 0.001, 32: largest}))) == pays


def test_nothing_lies_between_one_and_two():
    assert further_shapes(costs_of({1: 1.0, 2: 2.0}, {16: 1.0})) == {}


@pytest.mark.parametrize(
    "mixed, expected",
    [
        ({32: 0.03, 64: 0.04, 128: 0.0625}, 128),
        ({32: 0.03, 64: 0.04, 128: 0.0626}, 96),
        ({32: 0.03, 64: 0.04, 128: 0.085}, 96),
        ({32: 0.03, 64: 0.04, 128: 0.0851}, 64),
        ({32: 0.2, 64: 0.29, 128: 0.4}, 32),  # room for as many tokens of prompts as there are sequences
        ({16: 0.01, 32: 0.2, 64: 0.3}, 32),
        ({16: 0.9}, 16),
        ({16: 0.01, 24: 0.9}, 24),  # none has that room
    ],
)
def test_a_chunk_costs_at_most_two_and_a_half_decode_steps(mixed, expected):
    assert tokens_beside_decodes(costs_of({8: 0.02, 16: 0.025}, mixed), GPU.max_chunk_cost) == expected


@pytest.mark.parametrize(
    "largest, shape, between",
    [(0.15, 128, 128), (0.1501, 96, 127), (0.26, 96, 96), (0.2601, 64, 95), (9.0, 64, 64)],
)
def test_a_chunk_costs_at_most_six_decode_steps_on_a_cpu(largest, shape, between):
    """Without padding it may have a size between two shapes."""
    costs = costs_of({8: 0.02, 16: 0.025}, {32: 0.03, 64: 0.04, 128: largest})
    assert tokens_beside_decodes(costs, CPU.max_chunk_cost) == shape
    assert tokens_beside_decodes(costs, CPU.max_chunk_cost, padded=False) == between


def test_a_chunk_without_padding_leaves_room_for_prompts():
    assert tokens_beside_decodes(costs_of({16: 0.025}, {32: 9.0, 64: 9.0}), CPU.max_chunk_cost, padded=False) == 32
    assert tokens_beside_decodes(costs_of({16: 0.025}, {16: 0.1, 24: 9.0}), CPU.max_chunk_cost, padded=False) == 24


def test_the_dearest_step_with_a_chunk_counts():
    costs = costs_of({64: 0.025}, {128: 0.06, 256: 0.2}, (16, 64)) | {Bucket(256, 16, False): 0.06}
    assert tokens_beside_decodes(costs, GPU.max_chunk_cost) == 128


def test_the_overhead_of_a_step_is_told_in_tokens():
    """Each token takes a millisecond, and each step ten."""
    costs = costs_of({n: 0.01 + 0.001 * n for n in (1, 2, 4, 8)}, {n: 0.01 + 0.001 * n for n in (16, 256)}, (4, 8))
    assert step_overhead(costs, "gpu") == pytest.approx(10)


def test_a_cpus_own_work_on_tokens_lowers_the_overhead():
    costs = costs_of(
        {n: 0.001 + 0.00005 * n for n in (1, 2, 4, 8)}, {n: 0.001 + 0.00005 * n for n in (16, 256)}, (4, 8)
    )
    assert step_overhead(costs, "cpu") == pytest.approx(0.001 / (0.00005 + CPU_TOKEN_S))
    assert step_overhead(costs_of({16: 0.01}, {16: 0.02}), "cpu") == step_overhead({}, "cpu") == math.inf


def test_the_overhead_follows_from_short_steps_as_much_as_from_long_ones():
    costs = costs_of({1: 0.011, 2: 0.012, 4: 0.014, 8: 0.018}, {64: 0.074, 2048: 4.0})
    assert 7 < step_overhead(costs, "gpu") < 14


@pytest.mark.parametrize(
    "decode, mixed, overhead",
    [
        ({1: 0.01}, {16: 0.01, 64: 0.0099}, math.inf),
        ({16: 0.01}, {16: 0.02}, math.inf),
        ({1: 0.001}, {16: 0.02, 64: 0.09}, 0),
    ],
    ids=["tokens cost nothing", "one size", "a step costs nothing"],
)
def test_the_overhead_is_bounded(decode, mixed, overhead):
    assert step_overhead(costs_of(decode, mixed), "gpu") == overhead


def test_a_time_is_the_shortest_of_several_until_the_result_is_there(monkeypatch):
    """The runs take turns."""
    turns, waits = [], []
    clock = iter([10.0, 13.0, 20.0, 21.5, 30.0, 32.0, 40.0, 41.0])

    class Result:
        def block_until_ready(self):
            waits.append(len(turns))

    def run(name):
        return lambda: turns.append(name) or Result()

    monkeypatch.setattr(measure, "time", types.SimpleNamespace(perf_counter=lambda: next(clock)))
    assert fastest([run("a"), run("b")], repeats=2) == [2.0, 1.0]
    assert turns == ["a", "b", "a", "b"] and waits == [1, 2, 3, 4]


BUCKETS = (Bucket(2, 2, True), Bucket(16, 2, False))


class Clock:
    """Measures steps: each takes a quarter of a second for each of its tokens."""

    def __init__(self, buckets=BUCKETS):
        self.buckets, self.asked = buckets, []

    def __call__(self) -> list[float]:
        self.asked += self.buckets
        return [bucket.num_tokens / 4 for bucket in self.buckets]


EXPECTED = {bucket: bucket.num_tokens / 4 for bucket in BUCKETS}


def test_costs_are_remembered_by_their_key(tmp_path):
    clock = Clock()
    for key in ("a", "a", "b"):
        assert stored_costs(tmp_path / "new" / "costs", key, BUCKETS, clock) == EXPECTED
    assert clock.asked == [*BUCKETS, *BUCKETS]
    assert len(list((tmp_path / "new" / "costs").iterdir())) == 2


def test_forgotten_costs_are_measured_again(tmp_path):
    clock = Clock()
    for key in ("a", "b", "c"):
        stored_costs(tmp_path, key, BUCKETS, clock)
    forget_costs(tmp_path, ["a", "never measured", "c"])
    for key in ("a", "b", "c"):
        assert stored_costs(tmp_path, key, BUCKETS, clock) == EXPECTED
    assert clock.asked == [*BUCKETS] * 5


def test_other_shapes_are_measured_again(tmp_path):
    clock = Clock()
    stored_costs(tmp_path, "a", BUCKETS[:1], Clock(BUCKETS[:1]))
    assert stored_costs(tmp_path, "a", BUCKETS, clock) == stored_costs(tmp_path, "a", BUCKETS, clock) == EXPECTED
    assert clock.asked == [*BUCKETS]


@pytest.mark.parametrize(
    "content",
    [
        "", "{", "[]", "{}", '{"key": "a", "seconds": 3}',
        '{"key": "b", "seconds": [[2, 2, true, 9.0], [16, 2, false, 9.0]]}',
        '{"key": "a", "seconds": [[2, 2, true, 0.0], [16, 2, false, 9.0]]}', '{"key": "a", "seconds": [[2, 2, true]]}',
        '{"key": "a", "seconds": [[2, 2, true, NaN], [16, 2, false, 9.0]]}',
    ],
)  # fmt: skip
def test_a_broken_file_is_written_again(tmp_path, content):
    stored_costs(tmp_path, "a", BUCKETS, Clock())
    (file,) = tmp_path.iterdir()
    file.write_text(content)
    assert stored_costs(tmp_path, "a", BUCKETS, clock := Clock()) == EXPECTED and clock.asked
    assert len(json.loads(file.read_text())["seconds"]) == 2


def test_costs_that_others_may_write_are_neither_read_nor_written(tmp_path, caplog):
    stored_costs(folder := tmp_path / "costs", "a", BUCKETS, Clock())
    before = {file: file.read_bytes() for file in folder.iterdir()}
    folder.chmod(0o770)
    for _ in range(2):
        assert stored_costs(folder, "a", BUCKETS, clock := Clock()) == EXPECTED and len(clock.asked) == len(BUCKETS)
    assert before and before == {file: file.read_bytes() for file in folder.iterdir()}
    assert [message.startswith(f"cache: not used: {folder} may be written") for message in caplog.messages] == [True]


def test_a_folder_that_cannot_be_written_is_named_in_a_warning(tmp_path, caplog):
    (tmp_path / "file").write_text("")
    with caplog.at_level(logging.WARNING):
        assert stored_costs(tmp_path / "file" / "costs", "a", BUCKETS, Clock()) == EXPECTED
    (message,) = caplog.messages
    assert message.startswith("cache: not used: [Errno ")
