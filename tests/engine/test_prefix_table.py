"""The table of prefixes, by hand and against a brute-force search."""

import random

import pytest

from jpaged.engine.prefix_table import PrefixTable

IDLE = {"a": 0, "b": 0}


def test_choose_a_known_prefix_returns_its_replica():
    table = PrefixTable(step=4)
    table.remember("the cat sat", "b")
    assert table.choose("the cat ran", IDLE) == "b"
    assert table.choose("the dog", IDLE) == "b"  # by its first 4 characters
    assert table.choose("a dog ran", IDLE) == "a"


def test_choose_the_longest_prefix_takes_precedence():
    table = PrefixTable(step=4)
    table.remember("the cat sat", "a")
    table.remember("the dog sat", "b")  # takes the common prefix over
    assert table.choose("the cat sat", IDLE) == "a"
    assert table.choose("the dog sat", IDLE) == "b"
    assert table.choose("the owl sat", IDLE) == "b"


@pytest.mark.parametrize("prompt", ["x" * 64, b"x" * 64, [7] * 64, (7,) * 64, range(64)], ids=lambda p: str(type(p)))
def test_choose_accepts_texts_bytes_and_token_ids(prompt):
    table = PrefixTable(step=16)
    table.remember(prompt, "b")
    assert len(table) == table._num_prefixes["b"] == 4
    assert table.choose(prompt, IDLE) == "b"
    assert table.choose(prompt[:16], IDLE) == "b"
    assert table.choose(prompt[:15], IDLE) == "a"


def test_choose_differs_by_salt():
    table = PrefixTable(step=4)
    table.remember("the cat", "b", salt="one")
    assert table.choose("the cat", IDLE, salt="one") == "b"
    assert table.choose("the cat", IDLE, salt="two") == table.choose("the cat", IDLE) == "a"


def test_choose_leaves_a_busy_replica():
    table = PrefixTable(step=4, max_imbalance=3)
    table.remember("the cat", "b")
    assert table.choose("the cat", {"a": 5, "b": 8}) == "b"
    assert table.choose("the cat", {"a": 5, "b": 9}) == "a"
    assert table.choose("the cat", {"a": 5, "b": 9, "c": 6}) == "a"


def test_choose_takes_a_shorter_prefix_if_the_longest_is_busy_or_gone():
    table = PrefixTable(step=4, max_imbalance=2)
    table.remember("the cat sat on it", "b")
    table.remember("the cat", "c")
    loads = {"a": 0, "b": 0, "c": 1}
    assert table.choose("the cat sat on it", loads) == "b"
    assert table.choose("the cat sat on it", loads | {"b": 3}) == "c"
    assert table.choose("the cat sat on it", {"a": 0, "c": 1}) == "c"


def test_choose_an_unknown_prompt_takes_the_least_loaded_with_the_fewest_prefixes():
    table = PrefixTable(step=4)
    assert table.choose("tea and cake", {"a": 1, "b": 0}) == "b"
    table.remember("tea and cake", "a")
    table.remember("ham", "b")
    assert table.choose("soup of the day", IDLE) == "b"
    assert table.choose("soup of the day", {"a": 0, "b": 1}) == "a"


def test_remember_drops_the_longest_of_the_oldest_prefixes_first():
    table = PrefixTable(capacity=5, step=1)
    table.remember("abc", "b")
    table.remember("xyz", "c")
    assert len(table) == 5 and table._num_prefixes["b"] == 2
    loads = dict.fromkeys("acb", 0)
    assert table.choose("abc", loads) == "b"
    table.remember("pqrstuvw", "a")
    assert len(table) == 5 and table._num_prefixes["b"] == table._num_prefixes["c"] == 0
    assert table.choose("pqrstuvw", loads) == "a"


def test_forget_drops_all_prefixes_of_a_replica():
    table = PrefixTable(step=4)
    table.remember("the cat sat", "b")
    table.remember("the dog sat on it", "a")
    table.forget("a")
    assert len(table) == table._num_prefixes["b"] == 1 and table._num_prefixes["a"] == 0
    assert table.choose("the cat sat", {"b": 0, "a": 0}) == "b"
    table.forget("nobody")


@pytest.mark.parametrize("options", [{"capacity": 0}, {"step": 0}, {"max_imbalance": -1}])
def test_a_value_out_of_range_is_rejected_by_name(options):
    (name,) = options
    with pytest.raises(ValueError, match=f"{name}: must be at least"):
        PrefixTable(**options)


def test_choose_without_replicas_is_rejected():
    with pytest.raises(ValueError, match="loads: must hold"):
        PrefixTable().choose("a", {})


def test_random_prompts_agree_with_a_search_of_all_prefixes():
    choices, step = random.Random(0), 2
    table, last, owners = PrefixTable(step=step, max_imbalance=1), {}, "abc"
    for _ in range(2000):
        prompt = "".join(choices.choice("xy") for _ in range(choices.randrange(12)))
        loads = {owner: choices.randrange(4) for owner in owners if choices.random() < 0.8} or {"a": 0}
        known = [prompt[:end] for end in range(step, len(prompt) + 1, step) if prompt[:end] in last]
        allowed = [last[each] for each in known if loads.get(last[each], 9) <= min(loads.values()) + 1]
        chosen = table.choose(prompt, loads)
        counts = {owner: list(last.values()).count(owner) for owner in owners}
        assert counts == {owner: table._num_prefixes[owner] for owner in owners}
        expected = allowed[-1] if allowed else min(loads, key=lambda owner: (loads[owner], counts[owner]))
        assert chosen == expected
        table.remember(prompt, chosen)
        last |= {prompt[:end]: chosen for end in range(step, len(prompt) + 1, step)}
        if choices.random() < 0.01:
            gone = choices.choice(owners)
            table.forget(gone)
            last = {prefix: owner for prefix, owner in last.items() if owner != gone}
    assert len(table) == len(last)
