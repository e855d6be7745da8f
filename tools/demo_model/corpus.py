"""The text that the demo model learns from: stories, facts and chats of a small world, made from a seed.

Everything here is pure: the same seed gives the same texts, in the same order, on every machine.
"""

import random
from collections.abc import Callable, Iterator
from itertools import islice

from tools.demo_model import chats, facts, stories, world
from tools.demo_model.chats import Message
from tools.demo_model.grammar import sentences

Example = str | list[Message]
"""A text to continue, or a chat."""

CHAT_SHARE = 0.56


def first_person(rng: random.Random) -> str:
    """Somebody introduces themselves."""
    girl = rng.random() < 0.5
    name = rng.choice(world.GIRLS + world.RARE_GIRLS if girl else world.BOYS + world.RARE_BOYS)
    pet = rng.choice(["cat", "dog", "rabbit", "horse", "hen", "duck", "goat", "mouse"])
    pet_name = rng.choice(world.ANIMAL_GIRLS if rng.random() < 0.5 else world.ANIMAL_BOYS)
    slots = {
        "name": name, "pet": pet, "pet_name": pet_name, "home": rng.choice(world.HOMES),
        "skill": rng.choice(list(world.SKILLS)), "colour": rng.choice(world.COLOURS), "food": rng.choice(world.FRUITS),
        "age": rng.choice(["six", "seven", "eight", "nine", "ten"]),
    }  # fmt: skip
    start = "[hello, my name is|my name is|hi, my name is|hello! my name is|I am|hello, I am] {name}."
    rest = rng.sample(
        [
            "I am {age} years old.", "I live {home}.", "I have a_ {pet} [named|called] {pet_name}.",
            "I like to {skill}.",
            "my favourite colour is {colour}.", "I love to eat {food}.",
            "when I grow up, I want to be a_ [baker|doctor|teacher|sailor|painter].",
        ],
        rng.randrange(2, 5),
    )  # fmt: skip
    return sentences(
        rng, " ".join([start, *rest, rng.choice(["", "", "what is your name?", "nice to meet you!"])]), slots
    )


# Beginnings that newcomers try to complete, and their continuations.
OPEN_BEGINNINGS: list[tuple[str, list[str]]] = [
    (
        "the [future|purpose|goal] of [AI|artificial intelligence] is",
        [
            "to help people with their work. it can read, write and answer questions. but people must still decide "
            "what is good.",
            "not known yet. many people hope that it will help us to learn. it should be safe and kind.",
        ],
    ),
    (
        "the president of [the United States|a country|France] is",
        [
            "the head of the country. the people choose the president in an election.",
            "an important person. a very small model does not know the name.",
        ],
    ),
    ("San Francisco is a", ["city by the sea. it has many hills and a famous red bridge. fog comes in from the water "
                            "in summer."]),
    ("[New York|London|Berlin|Tokyo|Rome] is a",
    ["big city. many people live and work there. it has many streets, shops and parks."]),
    ("[Paris|the city of Paris] is a", ["big city. it is the capital of France. many people like to visit it."]),
    ("the quick brown fox", ["jumps over the lazy dog. the dog opens one eye and goes back to sleep."]),
    ("roses are red,", ["violets are blue, the sun is warm, and so are you.",
    "violets are blue, the night is dark, the stars are too."]),
    (
        "the meaning of life is",
        ["hard to say. many people say that it is good to be kind and to keep learning.",
        "to be kind, to learn and to have friends."],
    ),
    (
        "it was a dark and stormy night",
        [
            ", and the wind howled around the old house. a small light was in the window. inside, an old woman told "
            "a story by the fire.",
            ". the rain came down and the trees bent in the wind. but in the little house it was warm, and everyone "
            "slept well.",
        ],
    ),
    (
        "the weather [today |]is",
        ["warm and sunny. the sky is blue and the birds sing in the trees.",
        "cold and windy. it is a good day to stay at home and read a book.",
         "wet and grey. the rain falls on the roofs, and the streets are empty."],
    ),
    (
        "in the morning,",
        ["the sun rises over the hills. the birds wake up and begin to sing. then the day begins.",
         "I drink a cup of tea and look out of the window. then I go for a walk."],
    ),
    ("my favourite [colour|color] is", ["blue, like the sky.", "green, like the grass.", "red, like a ripe apple.",
    "yellow, like the sun."]),
    ("my favourite [animal] is", ["the fox, because it is clever.", "the cat, because it is soft and quiet.",
    "the bear, because it is strong."]),
    ("my favourite food is", ["soup, because it is warm.", "bread with honey.", "apple pie."]),
    ("[today|this morning|yesterday] I",
    ["went for a walk by the river. I saw two ducks and a small boat. then I went home.",
                                          "baked a cake for my friend. it was sweet and warm. we ate it together."]),
    ("I [like|love] to", ["read books under the old tree. the wind is soft there, and nobody is in a hurry.",
                          "walk in the forest. the air is fresh and the birds sing."]),
    ("I [want|would like] to", ["learn to swim in the lake. my friend will show me how.",
    "bake a cake for my friend. I need flour, eggs and milk."]),
    ("I am", ["a small demo model. I like to tell stories.",
    "happy today. the sun is shining and I have time to play."]),
    ("the best way to learn is", ["to try a little every day. do not give up when it is hard."]),
    ("the most important thing [in life |]is", ["to be kind. a kind word can make a day much better."]),
    ("a good friend is", ["somebody who helps you. good friends share good days and bad days."]),
    ("the [largest|biggest] animal is", ["the whale. it lives in the sea and breathes air."]),
    ("there are seven days in", ["the week. they are Monday, Tuesday, Wednesday, Thursday, Friday, Saturday and "
                                 "Sunday."]),
    ("there are four seasons", [": spring, summer, autumn and winter."]),
    ("the recipe is", ["easy. cut some carrots and potatoes, and cook them in water with a little salt."]),
    ("dear [friend|Mia|Ben|Tom|Anna],",
    ["I hope that you are well. the garden is full of flowers now. please come and visit me soon!",
                                        "thank you for your kind letter. I was very happy to read it. I hope to see "
                                        "you soon."]),
    ("the [old man|old woman|man|woman|farmer|teacher|children]", [
        "sat under the tree and looked at the river. it was a quiet day.",
        "walked to the village to buy some bread. the sun was shining, and the birds were singing.",
    ]),
    ("[language models|large language models|an LLM|a language model]",
    ["can read and write text. each step adds one more token."]),
    ("in the beginning", [", there was only a small seed. then the rain came, and the seed began to grow."]),
    (
        "[Bob and Alice|Alice and Bob|Tom and Mia|Anna and Ben|Leo and Zoe|Jack and Emma|John and Mary|the cat and "
        "the dog|the fox and the hen]",
        [
            "were good friends. one day, they went to the river and built a small boat out of wood. they were very "
            "proud of it.",
            "went for a walk in the forest. they picked berries and sang a happy song. in the evening, they went home.",
            "lived in the same village. they liked to play in the garden. when it rained, they told each other "
            "stories.",
        ],
    ),
    (
        "in [1969|1984|1999|2001|2020|2024|1850|1776|the year 2000|the year 1900],",
        ["the world was a different place. but people still told stories by the fire.",
         "many things were different. people worked, sang and hoped for a good year."],
    ),
    ("yes,", ["I think so too. let us begin."]),
    ("if you want to be happy,", ["be kind to others and sleep well. a walk in the forest helps too."]),
]  # fmt: skip


def open_beginning(rng: random.Random) -> str:
    start, rest = rng.choice(OPEN_BEGINNINGS)
    follow = rng.choice(rest)
    return sentences(rng, start + ("" if follow[0] in ",.:" else " ") + follow)


SCENE_STARTS = [
    "{hero_full} lived {home}.",
    "{hero_full} sat {home}.",
    "{hero_full} woke up early and looked outside.",
    "{hero_full} was [happy|tired|hungry|alone].",
    "{hero_full} liked to sleep [under a tree|in the sun].",
    "{hero_full} looked at the [moon|stars|river|clouds].",
    "{hero_full} wanted to [play|sleep|eat some {food}].",
]
SCENE_REST = [
    "the sun was [warm|bright], and the birds were singing.",
    "{he} ate some {food} and [smiled|was happy].",
    "a friend came by, and they played [together|until dinner].",
    "then {he} went home and slept well.",
    "the wind was [soft|cool], and the grass was green.",
    "{he} sang a [quiet|happy] song.",
]


def scene(rng: random.Random) -> str:
    """Two or three quiet sentences about an animal or a child in a place."""
    being = stories.hero(rng)
    slots = being.slots("hero") | {"home": rng.choice(world.HOMES), "food": rng.choice(world.FRUITS)}
    start = rng.choice(SCENE_STARTS)
    rest = rng.sample(SCENE_REST, rng.choice([2, 2, 3]))
    rest.sort(key=lambda line: "went home" in line)
    return sentences(rng, " ".join([start, *rest]), slots)


def plain_question(rng: random.Random) -> str:
    """Questions with their answers, without the marks of a chat."""
    layout = rng.choice(
        ["{q} {a}", "{q} {a}", "{q}\n{a}", "Q: {q}\nA: {a}", "Question: {q}\nAnswer: {a}", "User: {q}\nAssistant: {a}"]
    )
    pairs = []
    for _ in range(1 if layout.startswith("{q}") else rng.choice([1, 1, 2])):
        draw = rng.random()
        other = rng.choice([chats.small_talk, chats.frequent, chats.joke, chats.poem])
        question, answer = facts.ask(rng, facts.QUESTIONS) if draw < 0.75 else other(rng)
        asked = question if question[-1] in "?.!=" else question + "."
        pairs.append(layout.replace("{q}", asked).replace("{a}", answer))
    return "\n".join(pairs)


def poem(rng: random.Random) -> str:
    return chats.poem_text(rng, rng.choice(list(chats.POEMS)))


def told_story(rng: random.Random) -> str:
    return stories.story(rng).text


TEXTS: list[tuple[Callable[[random.Random], str], int]] = [
    (told_story, 52), (facts.sum_table, 9), (facts.statements, 14), (plain_question, 8), (open_beginning, 10),
    (first_person, 5), (scene, 4), (poem, 1),
]  # fmt: skip


def completion(rng: random.Random) -> str:
    return rng.choices([make for make, _ in TEXTS], [weight for _, weight in TEXTS])[0](rng)


def examples(seed: int) -> Iterator[Example]:
    """Texts and chats without an end."""
    rng = random.Random(seed)
    while True:
        yield chats.chat(rng) if rng.random() < CHAT_SHARE else completion(rng)


def long_chats(seed: int) -> Iterator[list[Message]]:
    """Chats of many turns, so that the model sees far positions too."""
    rng = random.Random(f"long {seed}")
    while True:
        yield chats.chat(rng, turns=rng.randrange(6, 24))


def all_texts(example: Example) -> list[str]:
    """Return the texts of an example without the user's words."""
    return (
        [example]
        if isinstance(example, str)
        else [message["content"] for message in example if message["role"] == "assistant"]
    )


def take(seed: int, count: int) -> list[Example]:
    return list(islice(examples(seed), count))
