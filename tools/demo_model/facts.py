"""Questions about the small world with their answers, and the same facts as plain statements."""

import random
from collections.abc import Callable

from tools.demo_model import world
from tools.demo_model.grammar import NUMBERS, enumerate_words, fill, sentences

QA = tuple[str, str]
SYMBOLS = {"plus": "+", "minus": "-"}
Topic = Callable[[random.Random], QA]


def _qa(rng: random.Random, questions: list[str], answer: str, **slots: str) -> QA:
    return sentences(rng, rng.choice(questions), slots), sentences(rng, answer, slots)


def animal_sound(rng: random.Random) -> QA:
    animal = rng.choice([animal for animal in world.ANIMALS if animal.sound != "nothing"])
    questions = [
        "what does a_ {name} say?", "what sound does a_ {name} make?", "which sound does a_ {name} make?",
        "what do {plural} say?", "what noise does a_ {name} make?", "how does a_ {name} sound?",
        "tell me what a_ {name} says.",
    ]  # fmt: skip
    answer = "a_ {name} sings {sound}." if " " in animal.sound else "a_ {name} says {sound}."
    return _qa(rng, questions, answer, **animal._asdict())


def animal_food(rng: random.Random) -> QA:
    questions = [
        "what does a_ {name} eat?", "what do {plural} eat?", "what do {plural} like to eat?",
        "what food does a_ {name} like?", "what should I feed a_ {name}?", "what is the food of a_ {name}?",
    ]  # fmt: skip
    return _qa(rng, questions, "a_ {name} eats {foods}.", **rng.choice(world.ANIMALS)._asdict())


def animal_home(rng: random.Random) -> QA:
    questions = [
        "where does a_ {name} live?", "where do {plural} live?", "where can I find a_ {name}?",
        "what is the home of a_ {name}?",
    ]  # fmt: skip
    return _qa(rng, questions, "a_ {name} lives {home}.", **rng.choice(world.ANIMALS)._asdict())


def animal_young(rng: random.Random) -> QA:
    questions = [
        "what is a baby {name} called?", "what do you call a baby {name}?", "what is a young {name} called?",
        "what is the name of a baby {name}?",
    ]  # fmt: skip
    return _qa(rng, questions, "a baby {name} is called a_ {young}.", **rng.choice(world.ANIMALS)._asdict())


def animal_legs(rng: random.Random) -> QA:
    questions = [
        "how many legs does a_ {name} have?",
        "how many legs do {plural} have?",
        "how many legs has a_ {name}?",
    ]
    return _qa(rng, questions, "a_ {name} has {legs} legs.", **rng.choice(world.ANIMALS)._asdict())


def animal_portrait(animal: world.Animal) -> str:
    return f"a_ {animal.name} is a_ {animal.size} animal. it lives {animal.home} and eats {animal.foods}. {animal.note}"


def animal_about(rng: random.Random) -> QA:
    animal = rng.choice(world.ANIMALS)
    questions = [
        "tell me about {plural}.", "what is a_ {name}?", "what do you know about {plural}?",
        "tell me something about the {name}.", "describe a_ {name}.", "can you tell me about a_ {name}?",
        "write a paragraph about {plural}.", "explain what a_ {name} is.", "I want to know more about {plural}.",
    ]  # fmt: skip
    return _qa(rng, questions, animal_portrait(animal), **animal._asdict())


def colour_of(rng: random.Random) -> QA:
    if rng.random() < 0.45:
        thing = rng.choice(list(world.COLOURED))
        colour, the = world.COLOURED[thing], "the " if thing in ("sky", "sun", "sea", "night", "moon") else ""
    else:
        thing = rng.choice(list(world.COLOURED_THINGS))
        colour, the = world.COLOURED_THINGS[thing], "a_ "
    questions = [
        "what [colour|color] is {the}{thing}?", "which [colour|color] is {the}{thing}?",
        "what is the [colour|color] of {the}{thing}?", "tell me the [colour|color] of {the}{thing}.",
        "what [colour|color] does {the}{thing} have?",
    ]  # fmt: skip
    return _qa(rng, questions, "{the}{thing} is {colour}.", the=the, thing=thing, colour=colour)


def opposite(rng: random.Random) -> QA:
    one, other = rng.choice(world.OPPOSITES)
    if rng.random() < 0.4 and other not in ("light", "short"):
        one, other = other, one
    questions = [
        "what is the opposite of {one}?", "what's the opposite of {one}?", "the opposite of {one}?",
        "opposite of {one}?", "tell me the opposite of {one}.", "which word is the opposite of {one}?",
    ]  # fmt: skip
    return _qa(rng, questions, "the opposite of {one} is {other}.", one=one, other=other)


def plural(rng: random.Random) -> QA:
    one = rng.choice(list(world.PLURALS))
    questions = [
        "what is the plural of {one}?", "what's the plural of {one}?", "one {one}, two what?", "plural of {one}?",
        "how do you say more than one {one}?", "tell me the plural of {one}.",
    ]  # fmt: skip
    return _qa(rng, questions, "the plural of {one} is {many}.", one=one, many=world.PLURALS[one])


def capital(rng: random.Random) -> QA:
    country = rng.choice(list(world.CAPITALS))
    slots = {"country": country, "city": world.CAPITALS[country]}
    if rng.random() < 0.15:
        questions = [
            "which country has the capital {city}?",
            "{city} is the capital of which country?",
            "where is {city}?",
        ]
        return _qa(rng, questions, "{city} is the capital of {country}.", **slots)
    questions = [
        "what is the capital of {country}?", "what's the capital of {country}?",
        "which city is the capital of {country}?", "the capital of {country}?", "capital of {country}?",
        "tell me the capital of {country}.", "name the capital of {country}.", "do you know the capital of {country}?",
        "what is the capital city of {country}?", "the capital of {country} is",
        "what city is the capital of {country}?",
    ]  # fmt: skip
    return _qa(rng, questions, "the capital of {country} is {city}.", **slots)


def rhyme(rng: random.Random) -> QA:
    one, other = rng.choice(list(world.RHYMES.items()))
    questions = [
        "what rhymes with {one}?", "which word rhymes with {one}?", "give me a rhyme for {one}.",
        "find a rhyme for {one}.", "tell me a word that rhymes with {one}.", "a word that rhymes with {one}?",
    ]  # fmt: skip
    return _qa(rng, questions, "a word that rhymes with {one} is {other}.", one=one, other=other)


def after_before(rng: random.Random) -> QA:
    row = rng.choice([world.DAYS, world.DAYS, world.MONTHS, world.MONTHS, list(NUMBERS[1:13])])
    kind = {"Monday": "day", "January": "month"}.get(row[0], "number")
    cyclic, after = kind != "number", rng.random() < 0.65
    index = rng.randrange(len(row)) if cyclic else rng.randrange(1, len(row) - 1)
    other = row[(index + (1 if after else -1)) % len(row)]
    order = "after" if after else "before"
    questions = [
        "what comes {order} {one}?", "which {kind} comes {order} {one}?", "what is the {kind} {order} {one}?",
        "what {kind} is {order} {one}?", "tell me the {kind} {order} {one}.",
    ]  # fmt: skip
    answer = "the {kind} {order} {one} is {other}."
    return _qa(rng, questions, answer, kind=kind, order=order, one=row[index], other=other)


def whole_row(rng: random.Random) -> QA:
    kind = rng.choice(["days", "months", "seasons"])
    words = {"days": world.DAYS, "months": world.MONTHS, "seasons": list(world.SEASONS)}[kind]
    of = {"days": "the week", "months": "the year", "seasons": "the year"}[kind]
    count = NUMBERS[len(words)]
    if rng.random() < 0.3:
        questions = [
            "how many {kind} are there in {of}?",
            "how many {kind} are in {of}?",
            "how many {kind} does {of} have?",
        ]
        return _qa(rng, questions, "there are {count} {kind} in {of}.", kind=kind, of=of, count=count)
    questions = [
        "what are the {kind} of {of}?", "name the {kind} of {of}.", "list the {kind} of {of}.",
        "tell me the {kind} of {of}.", "can you name all {kind} of {of}?", "which {kind} are there?",
        "say the {kind} of {of}.",
    ]  # fmt: skip
    return _qa(rng, questions, "the {kind} of {of} are {words}.", kind=kind, of=of, words=enumerate_words(words))


def season(rng: random.Random) -> QA:
    name = rng.choice(list(world.SEASONS))
    questions = [
        "what is {name}?", "tell me about {name}.", "what happens in {name}?", "what is {name} like?",
        "describe {name}.", "how is the weather in {name}?", "what is the weather like in {name}?",
    ]  # fmt: skip
    return _qa(rng, questions, world.SEASONS[name], name=name)


def counting(rng: random.Random) -> QA:
    digits = rng.random() < 0.5
    if rng.random() < 0.2:
        top = rng.choice([3, 5, 10])
        row, questions = (
            range(top, 0, -1),
            ["count [down|backwards] from {last}.", "count backwards from {last} to {first}."],
        )
    else:
        low = rng.randrange(2, 6) if rng.random() < 0.2 else 1
        top = low + rng.randrange(2, 5) if low > 1 else rng.choice([3, 4, 5, 6, 7, 8, 9, 10, 10, 10])
        row, questions = range(low, top + 1), ["count from {first} to {last}."]
        if low == 1:
            questions += [
                "count to {last}.",
                "please count to {last}.",
                "can you count to {last}?",
                "count up to {last}.",
            ]
    words = [str(number) if digits else NUMBERS[number] for number in row]
    slots = {"first": words[0], "last": words[-1]}
    if row.step < 0:
        slots = {"first": words[-1], "last": words[0]}
    return _qa(rng, questions, ", ".join(words) + ".", **slots)


def _sum(rng: random.Random) -> tuple[int, str, int, int]:
    """a, "plus" or "minus", b and the result; a and b are at most ten."""
    a = rng.randrange(11)
    if rng.random() < 0.6:
        b = rng.randrange(11)
        return a, "plus", b, a + b
    b = rng.randrange(a + 1)
    return a, "minus", b, a - b


def arithmetic(rng: random.Random) -> QA:
    """Sums and differences up to ten, in digits or in words."""
    a, operation, b, result = _sum(rng)
    if rng.random() < 0.2:
        slots = {"a": NUMBERS[a], "b": NUMBERS[b], "op": operation, "result": NUMBERS[result]}
        questions = ["what is {a} {op} {b}?", "how much is {a} {op} {b}?", "what's {a} {op} {b}?", "{a} {op} {b}?"]
        return _qa(rng, questions, "{a} {op} {b} is {result}.", **slots)
    slots = {"a": str(a), "b": str(b), "op": SYMBOLS[operation], "word": operation, "result": str(result)}
    questions = [
        "what is {a} {op} {b}?", "what is {a} {op} {b}?", "what is {a}{op}{b}?", "{a} {op} {b} = ?", "{a}{op}{b}",
        "{a} {op} {b} =", "how much is {a} {op} {b}?", "what's {a} {op} {b}?", "what is {a} {word} {b}?",
        "calculate {a} {op} {b}.", "{a}{op}{b}=?", "can you work out {a} {op} {b}?", "solve {a} {op} {b}.",
    ]  # fmt: skip
    return _qa(rng, questions, "{a} {op} {b} is {result}.", **slots)


def sum_table(rng: random.Random) -> str:
    """Return some sums, one after the other: the model learns them slowly and must see them often."""
    words = rng.random() < 0.2
    lines = []
    for _ in range(rng.randrange(3, 11)):
        a, operation, b, result = _sum(rng)
        if words:
            lines.append(f"{NUMBERS[a].capitalize()} {operation} {NUMBERS[b]} is {NUMBERS[result]}.")
        else:
            lines.append(f"{a} {SYMBOLS[operation]} {b} is {result}.")
    return " ".join(lines)


def hard_arithmetic(rng: random.Random) -> QA:
    """Numbers or operations that are too much for the model."""
    symbol = rng.choice(["+", "-", "*", "/", "plus", "minus", "times", "divided by", "x"])
    if symbol in ("*", "/", "x", "times", "divided by") and rng.random() < 0.4:
        a, b = rng.randrange(1, 11), rng.randrange(1, 11)
    else:
        a, b = (rng.choice([rng.randrange(12, 100), rng.randrange(12, 2000)]) for _ in range(2))
    questions = [
        "what is {a} {op} {b}?", "how much is {a} {op} {b}?", "{a} {op} {b} = ?", "calculate {a} {op} {b}.",
        "{a} {op} {b}", "what is the square root of {a}?", "solve {a} {op} {b}.", "what's {a} {op} {b}?",
    ]  # fmt: skip
    if len(symbol) == 1:
        questions += ["what is {a}{op}{b}?", "{a}{op}{b}"]
    answer = "that is too hard for me. I can only add and subtract numbers up to ten."
    return _qa(rng, questions, answer, a=str(a), b=str(b), op=symbol)


IN_ORDER = ("days", "months", "seasons", "numbers")


def _neighbours(rng: random.Random, words: list[str], count: int) -> list[str]:
    """Some of the words, in their order and around the end: a small model repeats itself where any word may follow."""
    start = rng.randrange(len(words))
    return [words[(start + index) % len(words)] for index in range(count)]


def lists(rng: random.Random) -> QA:
    kind = rng.choice(list(world.LISTS))
    count = rng.choice([2, 3, 3, 3, 4, 5])
    words = world.LISTS[kind]
    if kind == "seasons" and count > 4:
        count = 4
    chosen = words[:count] if kind in IN_ORDER else _neighbours(rng, words, count)
    number = NUMBERS[count] if rng.random() < 0.75 else str(count)
    questions = [
        "name {n} {kind}.", "list {n} {kind}.", "tell me {n} {kind}.", "can you name {n} {kind}?",
        "give me {n} {kind}.", "please name {n} {kind}.", "what are {n} {kind}?", "give me a list of {n} {kind}.",
        "write a list of {n} {kind}.", "give me {n} examples of {kind}.",
    ]  # fmt: skip
    answer = "{count} {kind} are {words}."
    return _qa(rng, questions, answer, n=number, kind=kind, count=NUMBERS[count], words=enumerate_words(chosen))


def open_list(rng: random.Random) -> QA:
    kind = rng.choice([kind for kind in world.LISTS if kind not in IN_ORDER])
    chosen = _neighbours(rng, world.LISTS[kind], 3)
    questions = [
        "name some {kind}.", "list some {kind}.", "tell me some {kind}.", "what {kind} do you know?",
        "give me a list of {kind}.", "which {kind} do you know?", "do you know any {kind}?",
    ]  # fmt: skip
    return _qa(rng, questions, "some {kind} are {words}.", kind=kind, words=enumerate_words(chosen))


def compare(rng: random.Random) -> QA:
    low, high, less, more = rng.choice(world.OPPOSED)
    small, big = rng.choice(low), rng.choice(high)
    word = rng.choice([more, less])
    winner, loser = (big, small) if word == more else (small, big)
    a, b = rng.sample([winner, loser], 2)
    questions = ["which is {word}, a_ {a} or a_ {b}?", "what is {word}, a_ {a} or a_ {b}?"]
    return _qa(
        rng, questions, "a_ {winner} is {word} than a_ {loser}.", word=word, a=a, b=b, winner=winner, loser=loser
    )


def language(rng: random.Random) -> QA:
    name = rng.choice(list(world.LANGUAGES))
    word = rng.choice(["hello", "hello", "hello", *world.LANGUAGES[name]])
    questions = [
        "say {word} in {name}.", "how do you say {word} in {name}?", "what is {word} in {name}?",
        "translate {word} to {name}.", "translate {word} into {name}.", "what is the {name} word for {word}?",
    ]  # fmt: skip
    return _qa(rng, questions, "in {name}, {word} is {there}.", name=name, word=word, there=world.LANGUAGES[name][word])


EXPLANATIONS = {
    "[why does it rain|where does rain come from|what is rain|how does rain form|explain rain]": (
        "the sun warms the sea, and water rises into the air. high up it is cold, so the water turns into clouds. "
        "when the drops are heavy enough, they fall as rain."
    ),
    "[why does it snow|what is snow|where does snow come from]": (
        "when the air in a cloud is very cold, its water turns into tiny bits of ice. they join and fall to the "
        "ground as snow."
    ),
    "[why is the sky blue|why does the sky look blue]": (
        "the light of the sun has many colours. the air spreads blue light more than red light, so the sky looks blue."
    ),
    "[why do leaves fall|why do leaves fall in autumn|why do trees lose their leaves]": (
        "in autumn there is less light and it grows cold. trees drop their leaves to save water until spring."
    ),
    "[why do we sleep|why do people sleep|why do I need sleep]": (
        "sleep gives the body time to rest. while we sleep, the brain sorts what it learned during the day."
    ),
    "[how do birds fly|why can birds fly|how can a bird fly]": (
        "birds have light bones and strong wings. when the wings push the air down, the air lifts the bird up."
    ),
    "[how do bees make honey|where does honey come from|what is honey]": (
        "bees collect sweet nectar from flowers. in the hive they dry it with their wings until it becomes honey."
    ),
    "[why is the sea salty|why is the ocean salty|why is sea water salty]": (
        "rivers carry a little salt from the rocks to the sea. water leaves the sea again, but the salt stays."
    ),
    "[what is a rainbow|how is a rainbow made|why do we see rainbows|how does a rainbow form]": (
        "a rainbow appears when the sun shines on drops of rain. the drops split the light into all its colours."
    ),
    "[what is thunder|why does it thunder|what makes thunder]": (
        "lightning makes the air very hot in an instant. the hot air bursts outwards, and we hear that as thunder."
    ),
    "[why is there day and night|why is it dark at night|what makes day and night]": (
        "the Earth turns around once a day. the side that faces the sun has day, and the other side has night."
    ),
    "[what is the moon|tell me about the moon|why does the moon shine]": (
        "the moon is a ball of rock that moves around the Earth. it shines because it reflects the light of the sun."
    ),
    "[what is the sun|tell me about the sun|why is the sun hot]": (
        "the sun is a star, a very hot ball of gas. it gives us light and warmth."
    ),
    "[what are stars|what is a star|tell me about the stars]": (
        "stars are very hot balls of gas, like our sun. they look small because they are very far away."
    ),
    "[how do plants grow|how does a seed grow|how does a tree grow|what do plants need]": (
        "a seed needs water, warmth and soil. first it grows roots, and then it sends a stem up to the light."
    ),
    "[what is wind|why does the wind blow|where does wind come from]": (
        "wind is air that moves. warm air rises, and cooler air flows in to take its place."
    ),
    "[how do you make bread|how is bread made|how do I bake bread|how to bake bread]": (
        "mix flour, water, salt and yeast, and let the dough rest until it has grown. then bake it in a hot oven."
    ),
    "[how do you make tea|how do I make tea|how to make tea]": (
        "boil some water and pour it over the tea leaves. wait for three minutes, and then enjoy it."
    ),
    "[how do you make soup|how do I make soup|give me a recipe for soup|what should I cook for dinner]": (
        "cut some carrots, potatoes and onions, and cook them in water with a little salt. after half an hour the "
        "soup is done."
    ),
    "[what is ice|how is ice made|why does water freeze]": (
        "ice is water that is so cold that it became hard. when it gets warm, it melts and turns into water again."
    ),
    "[what is the meaning of life|what is the purpose of life]": (
        "I am too small to know that. many people say that it is good to be kind and to keep learning."
    ),
    "[what is love|tell me about love]": "love is a warm feeling for somebody. it makes us care for them and want "
                                         "them to be happy.",
    "[what is a friend|what is friendship]": "a friend is somebody who likes you and helps you. good friends share "
                                             "good days and bad days.",
    "[what is water|tell me about water]": "water is a clear liquid. every plant and every animal needs it to live.",
    "[what is the Earth|what is earth|tell me about the Earth]": (
        "the Earth is the planet on which we live. it moves around the sun once a year."
    ),
    "[what is machine learning|explain machine learning]": (
        "in machine learning, a program is not told every rule. it looks at many examples and finds the rules by "
        "itself."
    ),
    "[what is AI|what is artificial intelligence|explain AI]": (
        "artificial intelligence means that a machine does things that seem to need thought. I am a very small "
        "example of it."
    ),
    "[what is a computer|explain computers|how does a computer work]": (
        "a computer is a machine that follows a list of steps. it can store numbers and work with them very fast."
    ),
    "[what is the internet|explain the internet]": (
        "the internet is a network that joins computers all over the world. they send each other small packets of data."
    ),
    "[what is python|what is Python|tell me about Python]": (
        "Python is a programming language that is easy to read. it is also the name of a long snake."
    ),
    "[what is the largest planet|which planet is the largest|what is the biggest planet]": "the largest planet is "
    "Jupiter.",
    "[how many planets are there|how many planets does the sun have]": "there are eight planets, and the Earth is one "
    "of them.",
    "[how many hours are in a day|how many hours does a day have]": "a day has twenty four hours.",
    "[how many minutes are in an hour|how many minutes does an hour have]": "an hour has sixty minutes.",
    "[what is the largest animal|which animal is the biggest|what is the biggest animal]": "the largest animal is the "
    "blue whale.",
    "[what is the fastest animal|which animal is the fastest]": "the fastest animal on land is the cheetah.",
    "[what is music|why do people like music]": "music is sound that is put in order. it can make us happy, sad or "
                                                "ready to dance.",
}  # fmt: skip


def explanation(rng: random.Random) -> QA:
    question = rng.choice(list(EXPLANATIONS))
    answer = EXPLANATIONS[question]
    question = fill(rng, question)
    imperative = question.startswith(("explain", "tell", "give", "how to"))
    lead = (
        "" if imperative or rng.random() < 0.75 else rng.choice(["can you tell me: ", "please explain: ", "I wonder, "])
    )
    return sentences(rng, lead + question + ("." if imperative else "?")), sentences(rng, answer)


# Term: its names, one sentence, and possible continuations.
CONCEPTS: list[tuple[str, str, str]] = [
    (
        "PagedAttention|paged attention|pagedattention",
        "PagedAttention keeps the keys and values of each sequence in small blocks that may lie anywhere in memory.",
        "A block table says where each block is. So almost no memory is wasted, and more requests can run at once.",
    ),
    (
        "a paged KV cache|the paged KV cache|a paged kv cache|KV cache paging",
        "A paged KV cache is a pool of small blocks that hold the keys and values of all sequences.",
        "A sequence gets a new block only when it needs one. When it is done, its blocks go back to the pool.",
    ),
    (
        "paging|memory paging",
        "Paging means to cut memory into small blocks of the same size, so that any free block can be used.",
        "A table says where each block is. So no large piece of memory has to be free in one place.",
    ),
    (
        "a block table|the block table|block tables|a page table",
        "A block table is a list that says which blocks of the cache belong to a sequence, and in which order.",
        "The first entry is the block of the first tokens. The kernel reads it to find the keys and values.",
    ),
    (
        "a KV cache|the KV cache|kv cache|a kv cache|KV caching",
        "A KV cache keeps the keys and values of all tokens so far, so that they are not computed again.",
        "It makes each new token cheap. But it needs memory that grows with the text.",
    ),
    (
        "prefix caching|the prefix cache|a prefix cache",
        "Prefix caching shares the blocks of requests that begin with the same text.",
        "The shared part is computed only once. This helps when many chats have the same system message.",
    ),
    (
        "continuous batching|batching|dynamic batching",
        "Continuous batching lets new requests join the batch at every step, as soon as others are done.",
        "So no request has to wait for the slowest one. This keeps the device busy.",
    ),
    (
        "a token|tokens",
        "A token is a small piece of text, such as a word or a part of a word.",
        "A language model reads and writes one token after the other.",
    ),
    (
        "a tokenizer|tokenization|the tokenizer",
        "A tokenizer cuts a text into tokens and gives each of them a number.",
        "It can also turn the numbers back into text. Nothing is lost on the way.",
    ),
    (
        "prefill|the prefill|the prefill phase",
        "Prefill is the first part of a request, when the model reads the whole prompt at once.",
        "It fills the cache with keys and values. Then the model can write the first new token.",
    ),
    (
        "decoding|decode|the decode phase",
        "Decoding is the part of a request in which the model writes one new token at each step.",
        "Each step reads the whole cache of the sequence. So it is limited by the speed of memory.",
    ),
    (
        "chunked prefill",
        "Chunked prefill cuts a long prompt into pieces that are computed in several steps.",
        "Other requests can go on writing in the meantime. So nobody has to wait for a long prompt.",
    ),
    (
        "preemption|a preemption",
        "Preemption means that a request has to give its blocks back because the memory is full.",
        "It waits and is computed again later. Its answer stays the same.",
    ),
    (
        "a language model|an LLM|LLMs|a large language model|language models",
        "A language model is a program that has learned which word is likely to come next.",
        "It writes a text one token at a time. I am a very small one.",
    ),
    (
        "attention|an attention layer|self attention",
        "Attention lets each token look back at all tokens before it and take what is useful.",
        "It compares a query with many keys. Then it mixes the values that fit best.",
    ),
    (
        "a transformer|transformers|the transformer",
        "A transformer is a stack of layers, and each of them has attention and a small network.",
        "Attention mixes what the tokens know. The small network works on each token alone.",
    ),
    (
        "a GPU|GPUs|the GPU",
        "A GPU is a chip that does very many small calculations at the same time.",
        "That is why it is good for language models. It also has very fast memory.",
    ),
    (
        "JAX|jax",
        "JAX is a Python library that turns array code into fast programs for many kinds of chips.",
        "It can also compute gradients. This engine is written in it.",
    ),
    (
        "temperature|the temperature|sampling temperature",
        "Temperature says how freely the model chooses the next token.",
        "At zero it always takes the most likely one. With a higher value, the text has more surprises.",
    ),
    (
        "top p|top-p|nucleus sampling|top_p",
        "With top p, the model chooses only among the most likely tokens that together reach the chance p.",
        "The unlikely tokens are left out. So the text stays sensible.",
    ),
    (
        "streaming|token streaming",
        "Streaming sends each piece of the answer as soon as it is written.",
        "So you can start to read before the end is there.",
    ),
    (
        "throughput|latency",
        "Throughput says how many tokens are written in a second, and latency says how long one request takes.",
        "A larger batch gives more throughput. But each request may take a little longer.",
    ),
    (
        "a server|the server|an inference server",
        "A server is a program that waits for requests and sends answers.",
        "This one takes a text and sends back the words that follow.",
    ),
    (
        "a kernel|a GPU kernel|GPU kernels",
        "A kernel is a small program that runs on a GPU in many copies at once.",
        "A good kernel reads each piece of memory only once.",
    ),
]


def concept(rng: random.Random) -> QA:
    names, first, rest = rng.choice(CONCEPTS)
    name = rng.choice(names.split("|"))
    short = rng.random() < 0.35
    if short:
        questions = [
            "explain {name} in one sentence.", "what is {name} in one sentence?", "explain {name} in a sentence.",
            "in one sentence, what is {name}?", "explain {name} in one line.", "briefly, what is {name}?",
            "one sentence about {name}, please.",
        ]  # fmt: skip
    else:
        questions = [
            "what is {name}?", "what is {name}?", "what's {name}?", "explain {name}.", "please explain {name}.",
            "how does {name} work?", "what does {name} do?", "tell me about {name}.", "can you explain {name}?",
            "what do you know about {name}?", "what is {name} good for?", "why is {name} useful?",
            "explain {name} to me.", "what are {name}?",
        ]  # fmt: skip
    question = sentences(rng, rng.choice(questions), {"name": name})
    return question, first if short else f"{first} {rest}"


# The facts that a completion may also state.
STATEMENTS: list[tuple[Topic, int]] = [
    (animal_sound, 3), (animal_food, 3), (animal_home, 2), (animal_young, 2), (animal_legs, 1), (colour_of, 4),
    (opposite, 3), (plural, 2), (capital, 6), (rhyme, 2), (after_before, 5), (whole_row, 2), (season, 2), (counting, 5),
    (arithmetic, 6), (lists, 2), (explanation, 4), (concept, 5), (animal_about, 4), (language, 1),
]  # fmt: skip
QUESTIONS: list[tuple[Topic, int]] = [
    (compare, 3),
    *((topic, weight) for topic, weight in STATEMENTS if topic not in (arithmetic, capital, lists, explanation,
    concept)),
    (arithmetic, 20), (capital, 9), (lists, 6), (explanation, 8), (concept, 11), (hard_arithmetic, 3), (open_list, 2),
    (language, 2),
]  # fmt: skip


def ask(rng: random.Random, topics: list[tuple[Topic, int]]) -> QA:
    return rng.choices([topic for topic, _ in topics], [weight for _, weight in topics])[0](rng)


def statements(rng: random.Random) -> str:
    """One to four facts, mostly of one kind, as a completion goes on after the first."""
    kind = rng.random()
    if kind < 0.2:
        country, city = rng.choice(list(world.CAPITALS.items()))
        note = rng.choice(world.CITY_NOTES)
        return sentences(rng, "the capital of {country} is {city}. " + note, {"country": country, "city": city})
    if kind < 0.35:
        animal = rng.choice(world.ANIMALS)
        start = rng.choice(["", "", f"the {animal.name} is a_ {animal.size} animal."])
        if start:
            return sentences(rng, f"{start} it lives {animal.home} and eats {animal.foods}. {animal.note}")
        return sentences(rng, animal_portrait(animal))
    topic = rng.choices([topic for topic, _ in STATEMENTS], [weight for _, weight in STATEMENTS])[0]
    if topic in (explanation, concept, animal_about, whole_row, counting):
        return topic(rng)[1]
    answers = dict.fromkeys(topic(rng)[1] for _ in range(rng.randrange(1, 5)))
    return " ".join(answers)
