"""Tokenizer of a file in GGUF, made from its metadata: byte-level BPE (`gpt2`), and SentencePiece's BPE (`llama`)."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from jpaged.gguf_file import GgufFile

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED = 1, 2, 3, 4, 5  # types of tokens
SPACE = "▁"
MARKED = ("bos", "eos", "unknown", "padding")  # special tokens that a tokenizer has names for
HF_NAMES = {"bos": "bos_token", "eos": "eos_token", "unknown": "unk_token", "padding": "pad_token"}

# Expressions that cut a text into words before merges, by the names of llama.cpp (src/llama-vocab.cpp).
GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_SHORT = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_REST_WITH_SLASH = r" ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_BEFORE = r"[^\r\n\p{L}\p{N}]?"
LLAMA3 = rf"{_SHORT}|{_BEFORE}\p{{L}}+|\p{{N}}{{1,3}}|{_REST}"
QWEN2 = rf"{_SHORT}|{_BEFORE}\p{{L}}+|\p{{N}}|{_REST}"
QWEN35 = rf"{_SHORT}|{_BEFORE}[\p{{L}}\p{{M}}]+|\p{{N}}| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
SEED = rf"{_SHORT}|{_BEFORE}\p{{L}}+|\p{{N}}| ?[^\s\p{{L}}\p{{N}}\r\n]+|\s*[\r\n]+|\s+(?!\S)|\s+"
_IDEOGRAPHS = r"[一-龥ࠀ-一가-퟿]+"
_WIDE = r"\uff01-\uff0f\uff1a-\uff5e\u2018-\u201f\u3000-\u3002"  # punctuation
DEEPSEEK = (
    r"[\r\n]", r"\s?[\p{Lu}\p{Ll}\p{Lt}]+", rf"\s?[!-/:-~{_WIDE}]+", r"\s+$", _IDEOGRAPHS, r"\p{N}+",
)  # fmt: skip
DEEPSEEK_CODER = (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _IDEOGRAPHS, r"\p{N}")
DEEPSEEK3 = (
    r"\p{N}{1,3}", r"[一-龥\u3040-\u30ff]+",
    r"[!-/:-@\[-`{-~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
)  # fmt: skip
TEKKEN = rf"{_BEFORE}{_UPPER}*{_LOWER}+|{_BEFORE}{_UPPER}+{_LOWER}*|\p{{N}}|{_REST_WITH_SLASH}"
GPT4O = rf"{_BEFORE}{_UPPER}*{_LOWER}+{_SHORT}?|{_BEFORE}{_UPPER}+{_LOWER}*{_SHORT}?|\p{{N}}{{1,3}}|{_REST_WITH_SLASH}"


class Words(NamedTuple):
    """Cut of a text into words.

    Attributes:
        expressions: each one cuts the pieces of those before it.
        whole: whether words that are tokens are not merged from their parts.
        adds_bos: whether a text begins with the token of its beginning, unless the file says otherwise.
        nfc: whether texts are composed first, as the models' own tokenizers do.
    """

    expressions: tuple[str, ...]
    whole: bool = False
    adds_bos: bool = False
    nfc: bool = False


_GPT2, _DIGITS = Words((GPT2,)), Words((r"\p{N}", GPT2))
WORDS = {
    **dict.fromkeys(("gpt-2", "olmo", "phi-2", "mpt", "jais", "exaone4", "a.x-4.0", "gigachat", "mellum"), _GPT2),
    **dict.fromkeys(("trillion", "granite-docling"), _GPT2),
    **dict.fromkeys(("smollm", "refact", "starcoder", "command-r", "codeshell", "exaone", "minerva-7b"), _DIGITS),
    **dict.fromkeys(("llama3", "llama-v3", "llama-bpe", "falcon3", "pixtral", "lfm2"), Words((LLAMA3,), True, True)),
    **dict.fromkeys(("dbrx", "smaug-bpe"), Words((LLAMA3,))),
    "qwen2": Words((QWEN2,), nfc=True),
    "qwen35": Words((QWEN35,), nfc=True),
    **dict.fromkeys(("glm4", "chatglm-bpe"), Words((LLAMA3,))),
    "deepseek-llm": Words(DEEPSEEK),
    "deepseek-coder": Words(DEEPSEEK_CODER),
    "deepseek-v3": Words(DEEPSEEK3),
    "seed-coder": Words((SEED,)),
    **dict.fromkeys(("stablelm2", "deepseek-r1-qwen", "megrez", "hunyuan", "solar-open"), Words((QWEN2,))),
    "tekken": Words((TEKKEN,), True, True),
    **dict.fromkeys(("gpt-4o", "llama4", "kanana2"), Words((GPT4O,))),
    # The name of files without one. They may have been made with another expression.
    "default": Words((r"[\p{P}\$\+<=>\^~\|]+", GPT2, r"\p{N}+", r"[0-9][0-9][0-9]")),
}  # fmt: skip


def load_gguf_tokenizer(file: GgufFile) -> Any:
    """Return the Hugging Face tokenizer of a file in GGUF, with its chat templates; None if it has none.

    Raises:
        ValueError: its kind is not supported, or its fields contradict each other.
    """
    kind = file.text("tokenizer.ggml.model", "none")
    if kind in ("none", "no_vocab"):
        return None
    if kind not in ("gpt2", "llama"):
        file.fail("tokenizer.ggml.model", f"{kind!r:.100} is not supported; supported: gpt2, llama")
    tokens = _tokens(file)
    kinds = _list(file, "token_type", len(tokens)) or [NORMAL] * len(tokens)
    tokenizer, adds_bos = (_byte_level if kind == "gpt2" else _sentencepiece)(file, tokens, kinds)
    _add_special(file, tokenizer, tokens, kinds)
    marked = {name: _marked(file, name, tokens) for name in MARKED}
    if kind == "llama" and marked["bos"] is None and len(tokens) > 1:  # the defaults of llama.cpp
        marked["bos"] = tokens[1]
    _add_ends(file, tokenizer, marked, adds_bos)

    from transformers import PreTrainedTokenizerFast

    named = {HF_NAMES[name]: text for name, text in marked.items() if text is not None}
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, chat_template=_templates(file), clean_up_tokenization_spaces=False, **named
    )


def _tokens(file: GgufFile) -> list[str]:
    """Return the texts of the tokens, each different."""
    tokens: list[str] = _list(file, "tokens") or []
    if not all(isinstance(token, str) for token in tokens):
        file.fail("tokenizer.ggml.tokens", "must be texts")
    tokens = [token or f"[EMPTY_{index}]" for index, token in enumerate(tokens)]
    if not tokens or len(set(tokens)) < len(tokens):
        file.fail("tokenizer.ggml.tokens", "must be different texts" if tokens else "is missing or empty")
    return tokens


def _list(file: GgufFile, name: str, length: int | None = None) -> list[Any] | None:
    """Return a list about the tokens, of this length; None if it is missing."""
    items = file.items(f"tokenizer.ggml.{name}")
    if items is not None and length is not None and len(items) != length:
        file.fail(f"tokenizer.ggml.{name}", f"must have one item for each of {length} tokens, not {len(items)}")
    return items


def _marked(file: GgufFile, name: str, tokens: Sequence[str]) -> str | None:
    """Return the text of a special token; None if there is none."""
    field = f"tokenizer.ggml.{name}_token_id"
    if (token := file.number(field)) is None:
        return None
    if type(token) is not int or not 0 <= token < len(tokens):
        file.fail(field, f"must be a token, from 0 to {len(tokens) - 1}, not {token}")
    return tokens[token]


def _byte_level(file: GgufFile, tokens: Sequence[str], kinds: Sequence[int]) -> tuple[Tokenizer, bool]:
    """Return a tokenizer whose tokens are bytes, and whether texts begin with a token by default."""
    name, field = file.text("tokenizer.ggml.pre", "default"), "tokenizer.ggml.merges"
    if name not in WORDS:
        file.fail("tokenizer.ggml.pre", f"{name!r:.100} is not supported; supported: {', '.join(WORDS)}")
    words, vocab = WORDS[name], {token: index for index, token in enumerate(tokens)}
    merges = file.items(field) or file.fail(field, "is missing or empty")
    pairs = [_pair(file, merge, vocab) for merge in merges]
    tokenizer = Tokenizer(models.BPE(vocab, pairs, ignore_merges=words.whole))
    cuts = [pre_tokenizers.Split(Regex(expression), "isolated") for expression in words.expressions]
    prefix = file.flag("tokenizer.ggml.add_space_prefix", False)
    level = pre_tokenizers.ByteLevel(add_prefix_space=prefix, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*cuts, level])
    tokenizer.decoder = decoders.ByteLevel()
    if words.nfc:
        tokenizer.normalizer = normalizers.NFC()
    return tokenizer, words.adds_bos


def _pair(file: GgufFile, merge: object, vocab: Mapping[str, int]) -> tuple[str, str]:
    """Return the two parts of a merge, which a space separates."""
    head, _, tail = str(merge)[1:].partition(" ")
    first, second = str(merge)[:1] + head, tail
    if not {first, second, first + second} <= vocab.keys():
        file.fail("tokenizer.ggml.merges", f"{merge!r:.100} must be two tokens whose joint text is a token")
    return first, second


def _sentencepiece(file: GgufFile, tokens: Sequence[str], kinds: Sequence[int]) -> tuple[Tokenizer, bool]:
    """Return a tokenizer of characters with bytes for unknown ones; by default, texts begin with a token."""
    scores = _list(file, "scores", len(tokens)) or [0.0] * len(tokens)
    vocab = {token: index for index, token in enumerate(tokens)}
    unknown = _marked(file, "unknown", tokens) or tokens[0]
    merges = _merges(tokens, kinds, scores)
    model = models.BPE(vocab, merges, unk_token=unknown, fuse_unk=True, byte_fallback=True)
    tokenizer, prefix = Tokenizer(model), file.flag("tokenizer.ggml.add_space_prefix", True)
    spaces = normalizers.Replace(" ", SPACE)
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend(SPACE), spaces]) if prefix else spaces
    strip = [decoders.Strip(" ", 1, 0)] if prefix else []
    parts = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse(), *strip]
    tokenizer.decoder = decoders.Sequence(parts)
    return tokenizer, True


def _merges(tokens: Sequence[str], kinds: Sequence[int], scores: Sequence[float]) -> list[tuple[str, str]]:
    """Return the merges that scores imply: of two neighbours that are a token together, those of the highest score."""
    ordinary = {token for token, kind in zip(tokens, kinds) if kind in (NORMAL, UNUSED)}
    order = sorted(range(len(tokens)), key=lambda index: (-scores[index], index))
    return [
        (token[:at], token[at:])
        for token in (tokens[index] for index in order)
        if token in ordinary
        for at in range(1, len(token))
        if token[:at] in ordinary and token[at:] in ordinary
    ]


def _add_special(file: GgufFile, tokenizer: Tokenizer, tokens: Sequence[str], kinds: Sequence[int]) -> None:
    """Add the tokens that a text contains as they are: control tokens, which are special, and those of users."""
    strips = file.architecture == "phi3" and file.text("tokenizer.ggml.model") == "llama"
    added: dict[bool, list[AddedToken]] = {True: [], False: []}
    for token, kind in zip(tokens, kinds):
        if kind in (UNKNOWN, CONTROL, USER_DEFINED):
            rstrip = strips and kind != UNKNOWN and token not in ("<s>", "<|endoftext|>")  # as Phi-3's own tokenizer
            special = kind != USER_DEFINED
            added[special].append(AddedToken(token, normalized=False, special=special, rstrip=rstrip))
    tokenizer.add_special_tokens(added[True])
    tokenizer.add_tokens(added[False])


def _add_ends(file: GgufFile, tokenizer: Tokenizer, marked: Mapping[str, str | None], adds_bos: bool) -> None:
    """Let the tokenizer put the tokens of its beginning and its end around a text."""
    begin = marked["bos"] if file.flag("tokenizer.ggml.add_bos_token", adds_bos) else None
    end = marked["eos"] if file.flag("tokenizer.ggml.add_eos_token", False) else None
    around = [(text, tokenizer.token_to_id(text)) for text in dict.fromkeys((begin, end)) if text is not None]
    if around:
        parts = [text for text in (begin, "$A", end) if text is not None]
        tokenizer.post_processor = processors.TemplateProcessing(single=parts, special_tokens=around)


def _templates(file: GgufFile) -> str | dict[str, str] | None:
    """Return the chat template, or several by their names."""
    default, names = file.text("tokenizer.chat_template", ""), file.items("tokenizer.chat_templates") or []
    named = {name: file.text(f"tokenizer.chat_template.{name}") for name in names if isinstance(name, str)}
    templates = ({"default": default} if default else {}) | {name: text for name, text in named.items() if text}
    return (default or None) if templates.keys() <= {"default"} else templates
