"""Length of the text that a grammar may force."""

import math
import re
from collections import Counter

MAX_FORCED = 8192
REPETITION = re.compile(r'(?:[{~]\s*|"min(?:Items|Length|Properties|Contains)"\s*:\s*)(\d{1,18})')
RULE = re.compile(r"^[?!]?([A-Za-z_]\w*+)[^\n:]*+:", re.MULTILINE)


def forces_little(grammar: str) -> bool:
    """Return whether no part without alternatives can be longer than MAX_FORCED characters.

    True is certain, and False is not: the whole grammar is counted as such text, multiplied by all repetitions and
    references.

    Args:
        grammar: in llguidance's dialect of Lark.
    """
    if len(grammar) > MAX_FORCED:
        return False
    repeated = math.prod(max(1, int(count)) for count in REPETITION.findall(grammar))
    words = Counter(re.findall(r"\w+", grammar))
    referred = math.prod(words[name] for name in set(RULE.findall(grammar)))
    references: int = 2 ** grammar.count('"$ref"')
    return len(grammar) * repeated * referred * references <= MAX_FORCED
