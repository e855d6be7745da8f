"""The results of mutation testing that are put together."""

from tests.repository.mutate import merge, report


def row(outcomes: str, *survivors: str, source: str = "a") -> dict:
    return {
        "module": "jpaged/core/beam.py", "outcomes": outcomes, "survivors": [*survivors], "date": "today",
        "source": source,
    }  # fmt: skip


def test_the_newer_result_of_each_mutant_counts():
    old, new = row("ks.s.s", "second", "fourth", "sixth"), row(".ktss.", "fourth again", "fifth")
    assert merge(old, new) == row("kktsss", "fourth again", "fifth", "sixth")
    assert merge(new, new) == new


def test_results_of_another_source_are_dropped():
    new = row("k..", source="b")
    assert merge(row("sss", "1", "2", "3"), new) == new


def test_the_report_counts_and_lists_survivors():
    text, open_ones = report([row("kkkut.ss", "known", "new")], {"jpaged/core/beam.py": {"known": "it is equal"}})
    assert "| jpaged/core/beam.py | 8 | 7 | 3 | 1 | 1 | 2 | 1 | today | a |" in text and open_ones == 1
    assert "- `known`: it is equal" in text and "- `new`: **open**" in text
