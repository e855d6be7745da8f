"""A small template language: `[a|b]` is a choice, `{name}` a slot, `a_` an article that fits the word after it."""

import random
import re
from collections.abc import Mapping, Sequence

_CHOICE = re.compile(r"\[([^\[\]]*)\]")
_SLOT = re.compile(r"\{(\w+)\}")
_ARTICLE = re.compile(r"\b([Aa])_ (?=(\w+))")
_START = re.compile(r"(^|[.!?] |\n)([a-z])")
_SOUNDS_LIKE_YOU = ("uni", "use", "ewe")


def words(text: str) -> list[str]:
    return text.split()


def listed(text: str) -> list[str]:
    """Return the items between commas."""
    return text.split(",")


_SYLLABLES = words(
    "ba be bo bra cla da do dri fa flo ga gri ha ka ko la lo ma mi mu na no pa pli ra ri ro sa ska ta tro va vo wa "
    "zi zo"
)
NUMBERS = words(
    "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen seventeen "
    "eighteen nineteen twenty"
)


def fill(rng: random.Random, template: str, slots: Mapping[str, str] | None = None) -> str:
    """One text of a template. Choices nest, also inside a slot's value; KeyError names a slot that has no value."""
    text = template
    while (match := _CHOICE.search(text)) or _SLOT.search(text):
        if match:
            text = text[: match.start()] + rng.choice(match.group(1).split("|")) + text[match.end() :]
        else:
            text = _SLOT.sub(lambda slot: (slots or {})[slot.group(1)], text)
    text = _ARTICLE.sub(lambda match: article(match.group(2), match.group(1)) + " ", text)
    return re.sub(" +", " ", text).strip()


def sentences(rng: random.Random, template: str, slots: Mapping[str, str] | None = None) -> str:
    """A filled template with an upper-case letter at the start of each sentence and line."""
    return _START.sub(lambda match: match.group(1) + match.group(2).upper(), fill(rng, template, slots))


def article(word: str, a: str = "a") -> str:
    """`a`, or `a` + "n" where the word asks for it."""
    vowel = word[0].lower() in "aeiou" and not word.lower().startswith(_SOUNDS_LIKE_YOU)
    return a + "n" if vowel else a


def enumerate_words(words: Sequence[str]) -> str:
    """ "a", "a and b", "a, b and c"."""
    return words[0] if len(words) == 1 else ", ".join(words[:-1]) + " and " + words[-1]


def variants(template: str) -> list[str]:
    """Splits a template at the bars that are outside of brackets."""
    parts, depth, start = [], 0, 0
    for index, letter in enumerate(template):
        depth += (letter == "[") - (letter == "]")
        if letter == "|" and depth == 0:
            parts.append(template[start:index])
            start = index + 1
    return [*parts, template[start:]]


def pseudo_word(rng: random.Random) -> str:
    """A word that means nothing."""
    return "".join(rng.choice(_SYLLABLES) for _ in range(rng.randrange(2, 4))) + rng.choice(
        ["", "n", "r", "x", "m", "l", "t"]
    )
