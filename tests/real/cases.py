"""Texts, prompts and sizes of the tests of real models, which `make_fixtures.py` also reads."""

from pathlib import Path

FIXTURES = Path(__file__).parent / "fixtures"
MAX_TOKENS = 48  # of each greedy output
WINDOW = 512  # tokens of a window of a perplexity, of which the second half is scored
NUM_WINDOWS = 6
LONG = 8192  # tokens of the longest context: a half of it, twice
NUM_SCORED = 64  # tokens at the end of the longest context whose logprobs are compared


def text() -> str:
    """Return the text of perplexities, pages of this repository's documentation from November 2026."""
    return (FIXTURES / "text.txt").read_text()


TEXTS = (
    "Hello, world!",
    "",
    " ",
    "   three spaces, then\ttabs\t\tand\nnewlines\n\n\nat the end\n",
    "\r\nWindows line ends\r\n",
    "1234567890 3.14159 1,000,000 0x1F 1e-9 2026-11-26",
    "a  1 and b   22: digits behind several spaces",
    "I'm sure you've seen they'll say it's 'quoted', haven't you? I'D SAY SO.",
    "CamelCaseIdentifier snake_case_identifier SCREAMING_CASE kebab-case",
    "def f(x: int) -> int:\n    return x ** 2  # squares\n",
    "for (int i = 0; i < n; ++i) { sum += a[i] * b[i]; }",
    '{"name": "jpaged", "values": [1, 2.5, null, true], "nested": {"a": {}}}',
    "<html><body class='x'>&nbsp;&lt;tag&gt;</body></html>",
    "https://example.org/path?query=1&other=%20#fragment",
    "naïve café résumé coöperate Ångström",
    "cafe\u0301 is not the same sequence as caf\u00e9",
    "Ελληνικά, русский, עברית, العربية",
    "日本語のテキストと漢字、カタカナ。",
    "中文文本没有空格。",
    "한국어 문장입니다.",
    "हिन्दी में एक वाक्य।",
    "emoji: 😀 👩‍👩‍👧‍👦 🇩🇪 👍🏽",
    "mathematics: ∑ᵢ xᵢ² ≤ ∫₀^∞ e^{-t} dt ≠ ∅",
    "“curly quotes”, em\u2014dash, en\u2013dash, ellipsis… and a non-breaking\u00a0space",
    "zero\u200bwidth and \ufeffa byte order mark",
    "control characters: \x00\x01\x1b[0m\x7f",
    "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa",
    "................................----------------================________",
    "The quick brown fox jumps over the lazy dog. " * 4,
    "no special tokens here: <|im_start|user> <bos <|endoftext >",
)

QUESTIONS = (
    "What is the capital of France?",
    "Write a short poem about the sea.",
    "Explain in two sentences why the sky is blue.",
    "List three prime numbers.",
)
CHATS = (
    *([{"role": "user", "content": question}] for question in QUESTIONS),
    [
        {"role": "system", "content": "You answer in one word."},
        {"role": "user", "content": "Is water wet?"},
        {"role": "assistant", "content": "Yes."},
        {"role": "user", "content": "And is fire hot?\nThink first."},
    ],
)
PROMPTS = (
    "Once upon a time, in a village at the foot of a mountain,",
    "def fibonacci(n):\n",
    "The three laws of thermodynamics state that",
    "Ingredients for a simple bread: flour,",
)
