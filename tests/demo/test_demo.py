"""The demo model: its text, its tokenizer, its training, and the output of the shipped weights."""

import dataclasses
import random
import re
from collections.abc import Iterator

import numpy as np
import pytest
from flax import nnx
from tokenizers import Tokenizer
from transformers import AutoTokenizer

from jpaged import LLM, SamplingParams
from jpaged.demo import DIRECTORY
from jpaged.models.checkpoint import Form, load_safetensors
from jpaged.models.config import ModelConfig
from jpaged.models.llama import Llama
from jpaged.models.registry import read_config
from jpaged.serving.tool_parsers.detect import detect
from tools.demo_model import corpus, stories, train
from tools.demo_model import tokenizer as demo_tokenizer
from tools.demo_model.grammar import fill, variants

MAX_BYTES = 4_000_000
MAX_HELD_OUT_LOSS = 0.48
GREEDY = SamplingParams(temperature=0, max_tokens=192)
PRONOUNS = [{"he": "he", "him": "him", "his": "his"}, {"he": "she", "him": "her", "his": "her"}]
Bindings = dict[str, str]


# A parser of stories: the templates of `stories`, read backwards. Each slot must have one value in a whole story.


def parse_template(template: str) -> list:
    """Literals (str), slots (tuple of the name) and choices (list of sequences)."""
    stack: list[list[list]] = [[[]]]
    for token in re.findall(r"\[|\]|\||\{\w+\}|a_ |[^\[\]|{}]+?(?=\[|\]|\||\{|\ba_ |$)", template):
        if token == "[":
            stack.append([[]])
        elif token == "]":
            choice = stack.pop()
            stack[-1][-1].append(choice)
        elif token == "|":
            stack[-1].append([])
        elif token == "a_ ":
            stack[-1][-1].append([["a "], ["an "]])
        elif token.startswith("{"):
            stack[-1][-1].append((token[1:-1].lower(),))
        else:
            stack[-1][-1].append(token.lower())
    assert len(stack) == 1, template
    return stack[0][0]


def match(nodes: list, text: str, position: int, bound: Bindings) -> Iterator[tuple[int, Bindings]]:
    """All the places where `nodes` may end, if they begin at `position`."""
    if not nodes:
        yield position, bound
        return
    node, rest = nodes[0], nodes[1:]
    if isinstance(node, str):
        if text.startswith(node, position):
            yield from match(rest, text, position + len(node), bound)
    elif isinstance(node, list):
        for option in node:
            yield from match(option + rest, text, position, bound)
    else:
        (slot,) = node
        ends = [position + len(bound[slot])] if slot in bound else _ends(text, position)
        for end in ends:
            value = text[position:end]
            if bound.get(slot, value) == value:
                yield from match(rest, text, end, bound | {slot: value})


def _ends(text: str, position: int, words: int = 8) -> list[int]:
    """Where a slot's value may end: after one to eight words."""
    ends = (found.end() for found in re.finditer(r"[a-z]+(?![a-z])", text[position : position + 80]))
    return [position + end for end, _ in zip(ends, range(words))]


def _alternatives(templates: list[str]) -> list[list]:
    """Sentences as choices. A full stop is added where a template's own last words have no mark."""
    return [parse_template(template) + ([] if template[-1] in '.!?"' else [[["."], []]]) for template in templates]


def story_grammar() -> list[list]:
    """For each plot, the whole story: an opening, a trait, the plot's sentences and an ending."""
    openings = _alternatives(stories.OPENINGS + stories.FULL_OPENINGS)
    traits = _alternatives(stories.world.HERO_TRAITS)
    endings = _alternatives(stories.ENDINGS)
    start = [[], *([*opening, " "] for opening in openings)]
    start += [[*opening, " ", traits, " "] for opening in openings]
    finish = [[], *([" ", *ending] for ending in endings)]
    grammars = []
    for sentences in stories.PLOTS.values():
        middle: list = []
        for sentence in sentences:
            middle += [" ", _alternatives(variants(sentence))]
        grammars.append([start, *middle[1:], finish])
    return grammars


def consistent(bound: Bindings) -> bool:
    """Whether names fit introductions, and pronouns fit each other."""

    def being(prefix: str, start: str) -> bool:
        pronouns = {word: bound[start + word] for word in ("he", "him", "his") if start + word in bound}
        fits = any(pronouns.items() <= {word: p[word] for word in p}.items() for p in PRONOUNS)
        short = bound.get(prefix, "").removeprefix("the ")
        introductions = [bound[name] for name in (f"{prefix}_intro", f"{prefix}_full") if name in bound]
        return fits and all(short in introduction.split() or not short for introduction in introductions)

    if bound["who"] in ("he", "she"):
        bound = bound | {"he": bound.get("he", bound["who"])}
        known = bound["he"] == bound["who"]
    else:
        names = [bound[name].split() for name in ("hero", "hero_full", "hero_intro") if name in bound]
        known = all(bound["who"].split()[-1] in words or words[-1] in bound["who"].split() for words in names)
    return known and being("hero", "") and being("friend", "friend_")


@pytest.fixture(scope="module")
def grammar() -> list[list]:
    return story_grammar()


def is_story(grammar: list[list], text: str) -> bool:
    text = text.lower()
    return any(end == len(text) and consistent(bound) for plot in grammar for end, bound in match(plot, text, 0, {}))


@pytest.fixture(scope="module")
def examples() -> list[corpus.Example]:
    return corpus.take(0, 8000)


def words(text: str) -> set[str]:
    return set(re.findall(r"[a-z]+", text.lower()))


@pytest.fixture(scope="module")
def known_words(examples: list[corpus.Example]) -> set[str]:
    return set().union(*(words(text) for example in examples for text in corpus.all_texts(example)))


# The text.


def test_a_template_has_choices_slots_and_articles():
    rng = random.Random(0)
    picked = {fill(rng, "a_ [{x}|[owl|hen]]", {"x": "egg"}) for _ in range(50)}
    assert picked == {"an egg", "an owl", "a hen"}
    with pytest.raises(KeyError, match="missing"):
        fill(rng, "{missing}")


def test_the_text_depends_on_the_seed_alone(examples):
    assert corpus.take(0, 500) == examples[:500]
    assert corpus.take(1, 500) != examples[:500]


def test_there_are_many_different_texts(examples):
    assert len({str(example) for example in examples}) > 0.85 * len(examples)


def test_every_text_is_well_formed(examples):
    for example in examples:
        for text in corpus.all_texts(example):
            assert text[0].isupper() or text[0].isdigit(), text
            assert text[-1] in '.!?"', text
            assert not re.search(r"  | \n|\n | [.,!]|[a-z] \?|\.\.|[{}|]|\[|\]|a_ ", text), text
            assert not re.search(r"(?<![.=])\. [a-z]|\n[a-z]", text), text


def test_every_chat_alternates_and_is_answered(examples):
    for example in examples:
        if not isinstance(example, str):
            roles = [message["role"] for message in example]
            assert roles[roles[0] == "system" :] == ["user", "assistant"] * (len(roles) // 2)
            assert all(message["content"] for message in example)


def test_the_grammar_takes_every_story_and_no_mixed_up_one(grammar):
    rng = random.Random(0)
    told = [stories.story(rng) for _ in range(150)]
    assert all(is_story(grammar, story.text) for story in told)
    for story in told[:50]:
        other = next(one for one in told if one.plot != story.plot)
        half, rest = story.text.split(". ")[:2], other.text.split(". ")[2:]
        assert not is_story(grammar, ". ".join(half + rest))
    assert not is_story(grammar, told[0].text + " The")
    text = next(story.text for story in told if story.hero.name and story.text.count(story.hero.name) > 2)
    name = re.search(r"(?:named|called) ([A-Z][a-z]+)", text).group(1)
    assert not is_story(grammar, "Nobody".join(text.rsplit(name, 1)))


# The tokenizer.


@pytest.fixture(scope="module")
def tokens():
    return AutoTokenizer.from_pretrained(DIRECTORY)


@pytest.mark.parametrize(
    "text",
    [
        "Once upon a time",
        "  two  spaces ",
        "tab\tand\nlines\r\n",
        "größer, naïve, 東京, привет, 🦊👨‍👩‍👧",
        "12345 + 6.78",
        "\x00\x7f\u200b",
        "it's",
    ],
)
def test_the_tokenizer_gives_back_every_text(tokens, text):
    ids = tokens(text).input_ids
    assert ids[0] == tokens.bos_token_id
    assert tokens.decode(ids[1:]) == text


def test_each_digit_is_a_token(tokens):
    assert [tokens.decode([token]) for token in tokens("2024", add_special_tokens=False).input_ids] == list("2024")


def test_the_chat_template_renders_what_was_trained(tokens, examples):
    chats = [example for example in examples[:300] if not isinstance(example, str)]
    plain = Tokenizer.from_file(str(DIRECTORY / "tokenizer.json"))
    for chat in chats:
        assert tokens.apply_chat_template(chat, tokenize=False) == demo_tokenizer.render(chat)
        assert tokens.apply_chat_template(chat, return_dict=False) == train.encode(plain, chat)
    prompt = tokens.apply_chat_template(chats[0][:-1], tokenize=False, add_generation_prompt=True)
    assert demo_tokenizer.render(chats[0]).startswith(prompt)


def test_a_completion_prompt_begins_as_trained_texts_do(tokens):
    plain = Tokenizer.from_file(str(DIRECTORY / "tokenizer.json"))
    text = "The little fox lived by the sea."
    assert [*tokens(text).input_ids, tokens.eos_token_id] == train.encode(plain, text)


def test_the_chat_template_prints_calls_as_generated_and_results_as_messages_of_a_user(tokens):
    assert tokens.chat_template == demo_tokenizer.CHAT_TEMPLATE and detect(tokens.chat_template) == "hermes"
    call = {"name": "add", "arguments": {"numbers": [3, 4]}}
    messages = [
        {"role": "assistant", "content": "", "tool_calls": [{"id": "1", "type": "function", "function": call}]},
        {"role": "tool", "content": "7"},
    ]
    rendered = tokens.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    printed = '<tool_call>{"name": "add", "arguments": {"numbers": [3, 4]}}</tool_call>'
    assert rendered == f"<|begin|><|assistant|>{printed}<|end|><|user|>7<|end|><|assistant|>"


def test_an_unknown_role_is_an_error(tokens):
    with pytest.raises(Exception, match="role"):
        tokens.apply_chat_template([{"role": "robot", "content": "Hi"}], tokenize=False)


# Training.

TINY = train.Recipe(
    vocab_size=400, hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=1,
    num_key_value_heads=1,
    head_dim=32, row_lengths=(128,), batch_tokens=512, tokenizer_examples=300, peak_rate=1e-2,
)  # fmt: skip


def test_packing_keeps_documents_apart():
    batch = train.pack([[[1, 2, 3], [4, 5]], [[6, 7, 8, 9]]], 5)
    assert batch.inputs_bt.tolist() == [[1, 2, 4, 0, 0], [6, 7, 8, 0, 0]]
    assert batch.targets_bt.tolist() == [[2, 3, 5, 0, 0], [7, 8, 9, 0, 0]]
    assert batch.documents_bt.tolist() == [[1, 1, 2, 0, 0], [1, 1, 1, 0, 0]]
    assert batch.positions_bt.tolist() == [[0, 1, 0, 0, 0], [0, 1, 2, 0, 0]]


@pytest.mark.deep
def test_a_packed_document_has_the_loss_that_it_has_alone():
    recipe = dataclasses.replace(TINY, vocab_size=20)
    model = Llama(ModelConfig.from_hf(recipe.hf_config()), dtype="float32", rngs=nnx.Rngs(0))
    long, short = [1, 5, 6, 7, 8, 2], [1, 9, 4, 2]
    token_losses = nnx.jit(train.token_losses)
    losses, _ = token_losses(model, *train.pack([[long, short]], 9).arrays())
    alone, counts = token_losses(model, *train.pack([[short]], 4).arrays())
    assert counts.tolist() == [1, 1, 1, 0]
    np.testing.assert_allclose(losses[5:8], alone[:3], rtol=1e-5)


@pytest.mark.deep
def test_training_lowers_the_loss_and_the_same_seed_gives_the_same_bytes(tmp_path):
    histories = [train.train(TINY, 30, 0, tmp_path / name) for name in ("one", "two")]
    assert histories[0] == histories[1]
    assert np.mean(histories[0][-5:]) < histories[0][0] - 1.0
    files = sorted(path.name for path in (tmp_path / "one").iterdir())
    assert files == [
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    ]
    for name in files:
        assert (tmp_path / "one" / name).read_bytes() == (tmp_path / "two" / name).read_bytes(), name


def test_steps_must_be_positive(monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["train", "--steps", "0"])
    with pytest.raises(SystemExit):
        train.main()
    assert "at least 1" in capsys.readouterr().err


# The shipped model.


def whole(outputs) -> list[str]:
    assert all(output.outputs[0].finish_reason == "stop" for output in outputs), "a text without an end"
    return [output.outputs[0].text for output in outputs]


def completed(demo: LLM, prompts: list[str]) -> list[str]:
    """The prompts with the likeliest continuation of each."""
    texts = whole(demo.generate(prompts, GREEDY, use_tqdm=False))
    return [prompt + text for prompt, text in zip(prompts, texts)]


def answered(demo: LLM, chats: list[list[dict[str, str]]]) -> list[str]:
    return whole(demo.chat(chats, GREEDY, use_tqdm=False))


def test_the_directory_is_small_and_fits_the_kernels():
    assert sum(path.stat().st_size for path in DIRECTORY.iterdir()) <= MAX_BYTES
    config = read_config(DIRECTORY)
    assert (config.head_dim, config.dtype, config.tie_word_embeddings) == (64, "bfloat16", True)
    assert config.eos_token_ids == (AutoTokenizer.from_pretrained(DIRECTORY).eos_token_id,)


@pytest.mark.deep
def test_the_model_expects_text_that_it_has_not_seen():
    plain = Tokenizer.from_file(str(DIRECTORY / "tokenizer.json"))
    model = load_safetensors(DIRECTORY, read_config(DIRECTORY), Form("float32"), progress=False)
    assert train.held_out_loss(train.Recipe(), plain, model, count=4) < MAX_HELD_OUT_LOSS


@pytest.mark.deep
def test_stories_go_on_as_the_grammar_tells_them_and_end(demo, grammar, known_words):
    prompts = [
        "Once upon a time",
        "One day, the little fox",
        "Mia went to the market",
        "Tom wanted to learn to",
        "There once was a brave bear",
    ]
    told = completed(demo, prompts)
    for text in told:
        assert words(text) <= known_words, text
    parsed = [is_story(grammar, text) for text in told]
    assert sum(parsed) >= len(parsed) - 1, [text for text, good in zip(told, parsed) if not good]


def test_common_openings_are_completed(demo, known_words):
    prompts = [
        "The capital of France is",
        "Hello, my name is",
        "The sky is",
        "San Francisco is a",
        "The future of AI is",
    ]
    texts = completed(demo, prompts)
    for text in texts:
        assert words(text) <= known_words, text
        assert text[-1] in ".!?", text
    assert texts[0].startswith("The capital of France is Paris.")
    assert texts[2].startswith("The sky is blue.")


QUESTIONS = [
    ("Hello!", "help|like to know|story"),
    ("Who are you?", "demo model"),
    ("What is the capital of France?", "Paris"),
    ("what is the capital of japan", "Tokyo"),
    ("What is 2 + 3?", r"\b5\b"),
    ("What is 9 - 4?", r"\b5\b"),
    ("What is PagedAttention?", "blocks"),
    ("What is a block table?", "which blocks"),
    ("What does a cow say?", "moo"),
    ("What is the opposite of hot?", "cold"),
    ("Count to ten.", r"8, 9, 10\.|eight, nine, ten\."),
    ("What comes after Saturday?", "Sunday"),
    ("What is 7 times 9?", "too hard"),
    ("Say hello in French.", "bonjour"),
    ("What day comes after Monday?", "Tuesday"),
    ("Tell me a joke", r"\?.*\."),
    ("My name is Anna.", "Anna"),
    ("Who won the football match?", "not know|too hard|not sure"),
]


def test_questions_are_answered(demo, known_words):
    answers = answered(demo, [[{"role": "user", "content": question}] for question, _ in QUESTIONS])
    for (question, expected), answer in zip(QUESTIONS, answers):
        assert re.search(expected, answer, re.DOTALL), (question, answer)
        assert words(answer) <= known_words, (question, answer)


def test_a_chat_remembers_and_tells_stories(demo, grammar):
    name = [
        {"role": "system", "content": "You are a helpful assistant."},
        {"role": "user", "content": "Hi, my name is Tom."},
        {"role": "assistant", "content": "Nice to meet you, Tom! How can I help you?"},
        {"role": "user", "content": "What is my name?"},
    ]
    remembered, story = answered(demo, [name, [{"role": "user", "content": "Tell me a story about a fox."}]])
    assert remembered == "Your name is Tom."
    assert "fox" in story
    assert is_story(grammar, story), story
