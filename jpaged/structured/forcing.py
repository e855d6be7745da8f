"""Length of the text that a grammar may force."""

import math
import re

MAX_FORCED = 8192
REPETITION = re.compile(r'(?:[{~]\s*|"min(?:Items|Length|Properties|Contains)"\s*:\s*)(\d{1,18})')
RULE = re.compile(r"^[?!]?([A-Za-z_]\w*)[^\n:]*:", re.MULTILINE)


def forces_little(grammar: str) -> bool:
    """Return whether no part without alternatives can be longer than MAX_FORCED characters.

    This is certain if it returns True: everything in the grammar is counted as such text, repetitions and references
    multiply it.

    Args:
        grammar: in llguidance's dialect of Lark.
    """
    repeated = math.prod(max(1, int(count)) for count in REPETITION.findall(grammar))
    referred = math.prod(len(re.findall(rf"\b{name}\b", grammar)) for name in set(RULE.findall(grammar)))
    references: int = 2 ** grammar.count('"$ref"')
    return len(grammar) * repeated * referred * references <= MAX_FORCED
