"""Prompts of conversations: rendered by a chat template, and encoded so that no user's text becomes a control token."""

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any, Literal, NamedTuple

from tokenizers import AddedToken, Tokenizer

from jpaged.chat_revisions import Message, revisions
from jpaged.tokenizer import backend, encode

ContentFormat = Literal["auto", "string", "openai"]

# Parameters of transformers' `render_jinja_template`, which are variables of templates.
OPTIONS = {
    "conversations", "messages", "tools", "documents", "chat_template", "return_assistant_tokens_mask",
    "continue_final_message", "add_generation_prompt",
}  # fmt: skip
SHORT = 8  # a text of fewer characters without white space may be in a prompt by chance
PRINTED_PART = "{'type': 'text', "
PRIVATE = range(0x10F000, 0x10FFFD)  # characters for private use, which a tokenizer has no tokens for
ANCHOR = "\U0010fffd"


class Template(NamedTuple):
    """Chat template."""

    source: str  # in Jinja
    variables: Mapping[str, str]  # the names and texts of the tokenizer's special tokens


def template_of(tokenizer: Any, source: str | None = None, *, with_tools: bool = False) -> Template:
    """Return the chat template of a tokenizer.

    Args:
        source: a chat template in Jinja that replaces the tokenizer's.
        with_tools: prefer the template for tools, if the tokenizer has several templates.

    Raises:
        ValueError: there is no template.
    """
    sources = sources_of(tokenizer) if source is None else {"default": source}
    source = sources.get("tool_use" if with_tools else "default", sources.get("default"))
    if source is None:
        raise ValueError("the model has no chat template; pass one with --chat-template")
    return Template(source, {name: str(token) for name, token in tokenizer.special_tokens_map.items()})


def sources_of(tokenizer: Any) -> Mapping[str, str]:
    """Return the chat templates of a tokenizer by name; a single one is the "default"."""
    template = getattr(tokenizer, "chat_template", None) or {}
    return {"default": template} if isinstance(template, str) else template


def check_template(tokenizer: Any, source: str) -> None:
    """Check the syntax of a chat template.

    Raises:
        ValueError: the syntax is wrong, or the model has no tokenizer, which templates need.
    """
    from jinja2 import Environment, TemplateSyntaxError

    if tokenizer is None:
        raise ValueError("chat_template: needs a tokenizer, and the model has none")
    environment = Environment(extensions=["jinja2.ext.loopcontrols"])
    try:
        environment.parse(re.sub(r"\{%-?\s*(end)?generation\s*-?%\}", "", source))
    except TemplateSyntaxError as error:
        raise ValueError(f"chat_template: line {error.lineno}: {error.message}") from error


def render(
    template: Template,
    messages: Sequence[Message],
    *,
    tools: Sequence[Mapping[str, Any]] | None = None,
    add_generation_prompt: bool = True,
    continue_final_message: bool = False,
    variables: Mapping[str, Any] | None = None,
    content_format: ContentFormat = "auto",
) -> str:
    """Return the text of a conversation.

    A template that refuses messages with calls, or leaves calls out, gets revisions of them.

    Args:
        messages: in the form of the OpenAI API; content is text.
        tools: as in the OpenAI API; some templates do not print them.
        add_generation_prompt: end the text with the beginning of the assistant's message.
        continue_final_message: leave the last message open, to be continued.
        variables: more variables for the template.
        content_format: form of a message's content for the template: "string": text; "openai": a list of one part;
            "auto": text, and if the prompt would lack it, a list.

    Raises:
        ValueError: the template rejects the conversation, or leaves out the text or a call of a message.
    """
    if taken := (variables or {}).keys() & OPTIONS:
        raise ValueError(f"a template has no variable of its own called {min(taken)!r}")
    if continue_final_message and add_generation_prompt:
        raise ValueError("continue_final_message contradicts add_generation_prompt")
    options = {
        **template.variables, **(variables or {}), "tools": tools and list(tools),
        "add_generation_prompt": add_generation_prompt, "continue_final_message": continue_final_message,
    }  # fmt: skip
    faults: list[str] = []
    forms = {"string": (_as_text,), "openai": (_as_parts,)}.get(content_format, (_as_text, _as_parts))
    for talk in revisions(messages):
        for form in forms:
            text, fault = _attempt(template.source, talk, options, form)
            if fault is None:
                return text
            faults.append(fault)
    raise ValueError(faults[0])


def _attempt(
    source: str, messages: Sequence[Message], options: Mapping[str, Any], form: Callable[[str], Any]
) -> tuple[str, str | None]:
    """Return the text of a conversation whose contents have a form, and its fault; None if it has none."""
    from transformers.utils.chat_template_utils import render_jinja_template

    def run(messages: Sequence[Message]) -> str:
        talk = [{**message, "content": message["content"] and form(message["content"])} for message in messages]
        texts, _ = render_jinja_template(conversations=[talk], chat_template=source, **options)
        return str(texts[0])

    try:
        text = run(messages)
    except MemoryError:
        raise ValueError("the chat template needs too much memory") from None
    except Exception as error:  # templates raise any type
        return "", f"the chat template refuses these messages: {error}"
    if (missing := _left_out(messages, text, run)) is not None:
        index, part = missing
        role = messages[index]["role"]
        return text, f"the chat template leaves out the {part} of message {index}, of the role {role!r}"
    if form is _as_parts and PRINTED_PART in text:
        return text, "the chat template prints the parts of a message's content, and not their texts"
    return text, None


def _as_text(content: str) -> str:
    return content


def _as_parts(content: str) -> list[dict[str, str]]:
    return [{"type": "text", "text": content}]


def _left_out(
    messages: Sequence[Message], text: str, again: Callable[[Sequence[Message]], str]
) -> tuple[int, str] | None:
    """Return the index of the first message whose text or calls a prompt lacks, and this part; None if it has all.

    Texts of the assistant are not checked: templates may drop parts of them, such as earlier reasoning. White space
    may differ, and text may be escaped as in JSON. `again` renders other messages.
    """
    prompt, at, unsure = _squeezed(text), 0, list[tuple[int, str]]()
    for index, message in enumerate(messages):
        unsure += [(index, "calls")] if message.get("tool_calls") else []  # the names are also in the list of tools
        if message["role"] == "assistant":
            continue
        content = message["content"]
        wanted = _squeezed(content)
        place = prompt.find(wanted, at)
        if place < 0 and not any(_squeezed(form) in prompt for form in (content, *_in_json(content))):
            return index, "text"
        at = max(at, place)
        if 0 < len(wanted) < SHORT:
            unsure.append((index, "text"))
    if not unsure:
        return None
    marked, words = list(messages), list[tuple[int, str, str]]()
    for index, part in unsure:
        marked[index], used = _marked(marked[index], part, f"zqx{index}x")
        words += [(index, part, word) for word in used]
    try:
        prompt = again(marked).casefold()
    except Exception:  # the template accepts only certain words there, and therefore reads them
        return None
    return next(((index, part) for index, part, word in words if word not in prompt), None)


def _marked(message: Message, part: str, word: str) -> tuple[Message, list[str]]:
    """Return a message with a word as its text, or with one as the name of each call; and the words."""
    if part == "text":
        return {**message, "content": f"{word}qz"}, [f"{word}qz"]
    words = [f"{word}{number}qz" for number in range(len(message["tool_calls"]))]
    calls = [
        {**call, "function": {**call["function"], "name": name}}
        for call, name in zip(message["tool_calls"], words, strict=True)
    ]
    return {**message, "tool_calls": calls}, words


def _squeezed(text: str) -> str:
    return "".join(text.split())


def _in_json(text: str) -> tuple[str, str]:
    return json.dumps(text, ensure_ascii=False)[1:-1], json.dumps(text)[1:-1]


class Encoder:
    """Encoder of rendered conversations.

    The text of a special token in a message is encoded as plain text: `protect` replaces it by a character for private
    use before the conversation is rendered, and `encode` restores it between the tokens of the template.
    """

    def __init__(self, tokenizer: Any):
        self._tokenizer = backend(tokenizer)
        self._added = self._tokenizer.get_added_tokens_decoder()
        special = [token for token in self._added.values() if token.special]
        self._pattern = re.compile("|".join(re.escape(token.content) for token in special)) if special else None
        self._normalizes = self._tokenizer.normalizer is not None and any(token.normalized for token in special)

    def protect[Value](self, value: Value) -> tuple[Value, dict[str, str]]:
        """Replace the texts of special tokens in JSON values by characters for private use.

        Returns:
            The new values, and the replaced texts by character.

        Raises:
            ValueError: a text becomes that of a special token when the tokenizer normalizes it.
        """
        pattern, whole = self._pattern, "\0".join(_strings(value))
        if pattern is None:
            return value, {}
        texts = list(dict.fromkeys(pattern.findall(whole)))
        if self._normalizes:
            assert self._tokenizer.normalizer is not None
            if again := pattern.search(self._tokenizer.normalizer.normalize_str(pattern.sub("\0", whole))):
                raise ValueError(f"the tokenizer would read a part of the text as the special token {again[0]!r}")
        if not texts:
            return value, {}
        stand_ins = dict(zip(texts, (chr(code) for code in PRIVATE if chr(code) not in whole)))
        protected: Value = _replaced(value, lambda text: pattern.sub(lambda match: stand_ins[match[0]], text))
        return protected, {stand_in: text for text, stand_in in stand_ins.items()}

    def encode(self, text: str, stand_ins: Mapping[str, str]) -> list[int]:
        """Return the token ids of a rendered conversation.

        Raises:
            ValueError: the tokenizer has no plain tokens for a text in its place.
        """
        if not stand_ins:
            return encode(self._tokenizer, text, add_special_tokens=False)
        for stand_in in stand_ins:
            for escaped in _in_json(stand_in):
                text = text.replace(escaped, stand_in)
        encoding = self._tokenizer.encode(text, add_special_tokens=False)
        stands = re.compile("|".join(map(re.escape, stand_ins)))
        tokens: list[int] = []
        begin, run = 0, []
        for token, (start, end) in [*zip(encoding.ids, encoding.offsets), (-1, (len(text), len(text)))]:
            if token >= 0 and token not in self._added:
                run.append(token)
                continue
            piece, count = stands.subn(lambda m: stand_ins[m[0]], text[begin:start])
            tokens += self._plain_tokens(piece, begin > 0) if count else run
            tokens += [token] if token >= 0 else []
            begin, run = end, []
        return tokens

    def _plain_tokens(self, text: str, is_inside: bool) -> list[int]:
        """Return the tokens of a piece of text without any special token."""
        encoding = self._plain.encode(ANCHOR * is_inside + text, add_special_tokens=False)
        tokens: list[int] = encoding.ids[is_inside:]
        if any(token in self._added and self._added[token].special for token in tokens):
            raise ValueError("the tokenizer can't encode the text of a special token as plain text")
        return tokens

    @cached_property
    def _plain(self) -> Tokenizer:
        plain = Tokenizer.from_str(self._tokenizer.to_str())
        plain.encode_special_tokens = True  # as plain text
        plain.add_tokens([AddedToken(ANCHOR, normalized=False)])  # text behind it is no beginning
        return plain


def _strings(value: Any) -> Iterator[str]:
    """Yield the strings within JSON values, those of names too."""
    values = [value]
    while values:
        each = values.pop()
        if isinstance(each, str):
            yield each
        elif isinstance(each, Mapping):
            values += [*each, *each.values()]
        elif isinstance(each, Sequence):
            values += each


def _replaced(value: Any, replace: Callable[[str], str]) -> Any:
    if isinstance(value, str):
        return replace(value)
    if isinstance(value, Mapping):
        return {_replaced(name, replace): _replaced(each, replace) for name, each in value.items()}
    if isinstance(value, Sequence):
        return [_replaced(each, replace) for each in value]
    return value


def prompt_of(
    tokenizer: Any, messages: Sequence[Message], source: str | None = None, *,
    tools: Sequence[Mapping[str, Any]] | None = None, encoder: Encoder | None = None, **options: Any,
) -> list[int]:  # fmt: skip
    """Return the token ids of a conversation, rendered in this process.

    Args:
        source: a chat template that replaces the tokenizer's own.
        encoder: the tokenizer's encoder, to be used for several conversations; None: a new one.
        options: further arguments of `render`.

    Raises:
        ValueError: as `render`.
    """
    encoder = encoder or Encoder(tokenizer)
    (messages, tools), stand_ins = encoder.protect((messages, tools))
    text = render(template_of(tokenizer, source, with_tools=bool(tools)), messages, tools=tools, **options)
    return encoder.encode(text, stand_ins)
