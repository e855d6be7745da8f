"""Requests whose JSON has the right fields, with harmful values: extreme numbers, hostile grammars, random
schemas. Some of the clients do not wait for their answers."""

import json
import random
import string
from collections.abc import Callable
from typing import Any

from tests.attack.fuzz_target import Tally, Target, call

Value = Callable[[random.Random], Any]

INTEGERS = (0, 1, -1, 2, 7, 63, 64, 65, 1279, 1280, 2**31 - 1, 2**31, 2**63 - 1, -(2**63), 2**64, 10**30, -(10**300))
FLOATS = (0.0, -0.0, 1.0, 0.5, 2.0, -2.0, 1e-320, 1e-45, 1e-7, 1e7, 3.5e38, 1.7e308, -1.7e308, 100, -100, 16, -16)
ALPHABETS = (
    string.ascii_letters + " ",
    string.printable,
    "\x00\x01\x1b\u2028",
    "äß語🦊\u0301\u202e",
    "<|>{}[]()\\\"'%$#",
)
TEXTS = ("", " ", "Once upon a time", "<|end|><|user|>", "{{ 1/0 }}", "a" * 3000, "\ufeff", "\U0010ffff" * 20)


def text(rng: random.Random) -> str:
    if rng.random() < 0.4:
        return rng.choice(TEXTS)
    return "".join(rng.choices(rng.choice(ALPHABETS), k=rng.choice((1, 3, 20, 100))))


def integer(rng: random.Random) -> int:
    return rng.choice(INTEGERS) if rng.random() < 0.5 else rng.randint(0, 20)


def number(rng: random.Random) -> float:
    return rng.choice(FLOATS) if rng.random() < 0.6 else rng.uniform(0, 2)


def flag(rng: random.Random) -> bool:
    return rng.random() < 0.5


def several(value: Value, most: int = 4) -> Value:
    return lambda rng: [value(rng) for _ in range(rng.choice((0, 1, 2, most)))]


def one_of(*values: Value) -> Value:
    return lambda rng: rng.choice(values)(rng)


def token(rng: random.Random) -> int:
    return rng.randrange(1280) if rng.random() < 0.9 else integer(rng)


def anything(rng: random.Random, depth: int = 3) -> Any:
    """Any JSON."""
    kind = rng.randrange(8 if depth else 6)
    if kind == 6:
        return [anything(rng, depth - 1) for _ in range(rng.randrange(4))]
    if kind == 7:
        return {text(rng): anything(rng, depth - 1) for _ in range(rng.randrange(4))}
    return (None, flag(rng), integer(rng), number(rng), text(rng), rng.choice(TEXTS))[kind]


def regex(rng: random.Random, depth: int = 3) -> str:
    """A regular expression, mostly one that can be read."""
    atoms = (
        "a",
        "b+",
        r"\d{2,5}",
        "[^a-z]",
        ".",
        r"\w*",
        "(?i)x",
        "[",
        "(",
        "*",
        r"\1",
        "(?=a)",
        "\\",
        "é",
        "^",
        "$",
        r"\p{L}",
    )
    if not depth or rng.random() < 0.3:
        return rng.choice(atoms[:6] if rng.random() < 0.7 else atoms)
    parts = [regex(rng, depth - 1) for _ in range(rng.randint(1, 3))]
    suffix = rng.choice(("", "", "*", "+", "?", "{0,3}", "{2}", "{1,300}", "{9999}"))
    return f"({rng.choice(('', '|')).join(parts)}){suffix}"


def grammar(rng: random.Random) -> str:
    """A grammar in Lark's form or in GBNF: left-recursive, ambiguous, endless, without an end, or broken."""
    rules = rng.choice(
        (
            'start: "a" start | "b"',
            "start: start start | /[a-z]/",
            "start: start",
            "start: x\nx: y\ny: x",
            'start: ("a" | "a")*',
            'start: /.*/ ","  start?',
            'start: "' + text(rng).replace('"', "") + '"',
            "start: A\nA: /" + regex(rng) + "/",
            "start: %json {}",
            'root ::= "a" root | "b"',
            "root ::= [a-z]{1,9} root?",
            "root ::= root",
            'root ::= ""',
            "start:",
            "nothing",
            "",
            "start: missing",
            'start: %regex { "substring_chars": "abc" }',
            'start: "x"{500}',
            "start: " + " | ".join(f'"{i}"' for i in range(300)),
        )
    )
    return rules if rng.random() < 0.8 else rules + text(rng)


def schema(rng: random.Random, depth: int = 3) -> Any:
    """A JSON schema, contradictory or recursive now and then."""
    kind = rng.choice(
        ("string", "integer", "number", "boolean", "null", "array", "object", "enum", "anyOf", "ref", "odd")
    )
    if kind == "enum":
        return {"enum": [anything(rng, 1) for _ in range(rng.randrange(4))]}
    if kind == "anyOf":
        name = rng.choice(("anyOf", "oneOf", "allOf"))
        return {name: [schema(rng, depth - 1) for _ in range(rng.randrange(3))]} if depth else {}
    if kind == "ref":
        return {
            "$ref": rng.choice(("#", "#/$defs/a", "#/nowhere", "http://example.org/s", "")),
            "$defs": {"a": {"type": "array"}},
        }
    if kind == "odd":
        return rng.choice(
            (
                True,
                False,
                {},
                {"type": "thing"},
                {"type": 5},
                {"not": {}},
                {"const": anything(rng, 1)},
                {"format": "date"},
            )
        )
    found: dict[str, Any] = {"type": kind}
    if kind == "object" and depth:
        names = [text(rng) for _ in range(rng.randrange(4))]
        found["properties"] = {name: schema(rng, depth - 1) for name in names}
        found["required"] = rng.sample(names, rng.randint(0, len(names))) + ["absent"] * (rng.random() < 0.1)
        found["additionalProperties"] = rng.choice((True, False, {"type": "integer"}))
    if kind == "array" and depth:
        found |= {"items": schema(rng, depth - 1), "minItems": rng.randrange(3), "maxItems": rng.choice((0, 2, 10**6))}
    if kind == "string":
        found |= rng.choice(
            (
                {},
                {"pattern": regex(rng)},
                {"minLength": 5, "maxLength": 2},
                {"maxLength": integer(rng)},
                {"format": "uuid"},
            )
        )
    if kind in ("integer", "number"):
        found |= rng.choice(({}, {"minimum": number(rng), "maximum": number(rng)}, {"multipleOf": number(rng)}))
    return found


def structured_outputs(rng: random.Random) -> Any:
    kinds: dict[str, Value] = {
        "json": one_of(schema, lambda rng: json.dumps(schema(rng)), text), "regex": regex, "choice": several(text),
        "grammar": grammar, "json_object": lambda rng: True,
    }  # fmt: skip
    names = rng.sample(list(kinds), 1 if rng.random() < 0.95 else 2)
    wanted = {name: kinds[name](rng) for name in names}
    if rng.random() < 0.1:
        wanted["whitespace_pattern"] = regex(rng)
    return wanted


def response_format(rng: random.Random) -> Any:
    wanted = {"type": "json_schema", "json_schema": {"name": text(rng), "schema": schema(rng)}}
    return rng.choice(({"type": "text"}, {"type": "json_object"}, wanted, wanted))


def tools(rng: random.Random) -> Any:
    def tool(rng: random.Random) -> Any:
        name = rng.choice(("look_up", "add", "a.b-c", text(rng)))
        return {"type": "function", "function": {"name": name, "parameters": schema(rng), "strict": flag(rng)}}

    return several(tool)(rng)


def tool_choice(rng: random.Random) -> Any:
    return rng.choice(
        ("none", "auto", "required", {"type": "function", "function": {"name": rng.choice(("look_up", "add"))}})
    )


def message(rng: random.Random) -> Any:
    role = rng.choice(("system", "developer", "user", "user", "user", "assistant", "tool"))
    found: dict[str, Any] = {"role": role, "content": text(rng)}
    if rng.random() < 0.2:
        found["content"] = [{"type": "text", "text": text(rng)} for _ in range(rng.randrange(3))]
    if role == "tool":
        found["tool_call_id"] = text(rng)
    if role == "assistant" and rng.random() < 0.5:
        arguments = rng.choice(("{}", '{"a": 1}', "[" * 5000, "1" * 5000, "NaN", text(rng), json.dumps(anything(rng))))
        found["tool_calls"] = [{"id": text(rng), "function": {"name": text(rng), "arguments": arguments}}]
    return found


GENERATION: dict[str, Value] = {
    "n": integer, "best_of": integer, "temperature": number, "top_p": number, "top_k": integer, "min_p": number,
    "seed": integer, "use_beam_search": flag, "length_penalty": number,
    "early_stopping": one_of(flag, lambda rng: "never"),
    "min_tokens": integer, "stop": one_of(text, several(text, 100)), "stop_token_ids": several(token),
    "include_stop_str_in_output": flag, "ignore_eos": flag, "presence_penalty": number, "frequency_penalty": number,
    "repetition_penalty": number,
    "logit_bias": lambda rng: {str(token(rng)): number(rng) for _ in range(rng.choice((1, 300)))},
    "allowed_token_ids": several(token, 100), "bad_words": several(text, 50), "prompt_logprobs": integer,
    "truncate_prompt_tokens": integer, "skip_special_tokens": flag, "priority": integer, "cache_salt": text,
    "pin_s": number, "prompt_cache_key": text, "return_token_ids": flag, "response_format": response_format,
    "structured_outputs": structured_outputs,
    "user": text,
    "metadata": lambda rng: {text(rng): text(rng)}, "stream_options": lambda rng: {"include_usage": flag(rng)},
    "model": one_of(text, lambda rng: "demo"),
}  # fmt: skip
COMPLETION: dict[str, Value] = {"echo": flag, "logprobs": integer, "suffix": text}
CHAT: dict[str, Value] = {
    "logprobs": flag, "top_logprobs": integer, "tools": tools, "tool_choice": tool_choice, "parallel_tool_calls": flag,
    "chat_template": text, "chat_template_kwargs": lambda rng: {text(rng): anything(rng)},
    "add_generation_prompt": flag,
    "continue_final_message": flag, "max_completion_tokens": integer,
}  # fmt: skip
PROMPTS = one_of(
    text, several(text), several(token, 60), several(several(token)), lambda rng: ["a"] * rng.choice((2, 30))
)
GRAMMARS = ("structured_outputs", "response_format", "tools")  # seldom alone in a plain choice of fields


def parts(*types: str) -> Value:
    """Return the maker of a message's content: a text, or a list of texts of some type."""
    return lambda rng: text(rng) if flag(rng) else [{"type": rng.choice(types), "text": text(rng)} for _ in range(2)]


def arguments(rng: random.Random) -> Any:
    return rng.choice(("{}", '{"a": 1}', "[" * 5000, "NaN", text(rng), json.dumps(anything(rng))))


def item(rng: random.Random) -> Any:
    """An item of the Responses API."""
    content = parts("input_text", "output_text", "text", "input_image")
    return one_of(
        lambda rng: {"role": rng.choice(("user", "user", "assistant", "developer")), "content": content(rng)},
        lambda rng: {"type": "function_call", "call_id": text(rng), "name": text(rng), "arguments": arguments(rng)},
        lambda rng: {"type": "function_call_output", "call_id": text(rng), "output": content(rng)},
        lambda rng: {"type": "reasoning", "content": [{"type": "reasoning_text", "text": text(rng)}]},
        lambda rng: {"type": text(rng)},
    )(rng)


def block(rng: random.Random) -> Any:
    """A block of a message in Anthropic's API."""
    return one_of(
        lambda rng: {"type": "text", "text": text(rng)},
        lambda rng: {"type": "tool_use", "id": text(rng), "name": text(rng), "input": {text(rng): anything(rng)}},
        lambda rng: {"type": "tool_result", "tool_use_id": text(rng), "content": parts("text", "image")(rng)},
        lambda rng: {"type": "thinking", "thinking": text(rng)},
        lambda rng: {"type": text(rng)},
    )(rng)


def flat_tools(rng: random.Random) -> Any:
    """Tools of the Responses API, and such as it does not know."""
    return [each["function"] | {"type": rng.choice(("function", "function", text(rng)))} for each in tools(rng)]


def client_tools(rng: random.Random) -> Any:
    """Tools of Anthropic's API, and such as its servers run."""
    kind = lambda: {} if rng.random() < 0.8 else {"type": text(rng)}
    return [
        {"name": each["function"]["name"], "input_schema": each["function"]["parameters"], "strict": flag(rng)} | kind()
        for each in tools(rng)
    ]


SHARED_BY_AGENTS: dict[str, Value] = {
    "temperature": number, "top_p": number, "top_k": integer, "seed": integer, "cache_salt": text,
    "pin_s": number, "prompt_cache_key": text,
    "cache_control": lambda rng: {"type": "ephemeral", "ttl": rng.choice(("5m", "1h", text(rng)))},
    "min_tokens": integer, "chat_template_kwargs": lambda rng: {text(rng): anything(rng)},
    "metadata": lambda rng: {text(rng): text(rng)}, "model": one_of(text, lambda rng: "demo"), "unknown": anything,
}  # fmt: skip
RESPONSES: dict[str, Value] = SHARED_BY_AGENTS | {
    "instructions": text, "tools": flat_tools, "parallel_tool_calls": flag, "store": flag, "include": several(text),
    "tool_choice": lambda rng: rng.choice(("auto", "required", {"type": "function", "name": "add"})),
    "text": lambda rng: {"format": {"type": "json_schema", "name": text(rng), "schema": schema(rng)}},
    "reasoning": lambda rng: {"effort": rng.choice(("low", text(rng)))}, "stop": one_of(text, several(text)),
}  # fmt: skip
MESSAGES: dict[str, Value] = SHARED_BY_AGENTS | {
    "system": parts("text"), "tools": client_tools, "stop_sequences": several(text),
    "tool_choice": lambda rng: {"type": rng.choice(("auto", "any", "tool", "none")), "name": "add"},
    "thinking": lambda rng: {"type": rng.choice(("enabled", "disabled", "adaptive"))},
    "output_config": lambda rng: {"format": {"type": "json_schema", "schema": schema(rng)}},
}  # fmt: skip


def agents(rng: random.Random) -> tuple[str, dict[str, Any]]:
    """A path and a body of an agent's API."""
    limit = rng.randint(1, 12) if rng.random() < 0.9 else rng.choice(INTEGERS)
    if flag(rng):
        path, known = "/v1/responses", RESPONSES
        body = {"input": one_of(text, several(item))(rng), "max_output_tokens": limit}
    else:
        path, known = rng.choice(("/v1/messages",) * 4 + ("/v1/messages/count_tokens",)), MESSAGES
        roles = ("user", "user", "user", "assistant", "system")
        made = [
            {"role": rng.choice(roles), "content": one_of(text, several(block))(rng)} for _ in range(rng.randint(1, 3))
        ]
        body = {"model": "demo", "messages": made, "max_tokens": limit}
    body |= {name: known[name](rng) for name in rng.sample(list(known), rng.choice((0, 0, 1, 1, 2, 4)))}
    if rng.random() < 0.03:
        body[rng.choice((*known, text(rng)))] = anything(rng)
    return path, body | ({"stream": True} if rng.random() < 0.4 else {})


OF_PROMPTS: dict[str, Value] = {
    "add_special_tokens": flag, "cache_salt": text, "priority": integer, "user": text,
}  # fmt: skip
EMBEDDINGS: dict[str, Value] = OF_PROMPTS | {
    "encoding_format": lambda rng: rng.choice(("float", "base64", text(rng))), "use_activation": flag,
    "dimensions": lambda rng: rng.choice((1, 7, 160, 10**6, *INTEGERS)),
    "pooling": lambda rng: rng.choice(("last", "mean", "mean", text(rng))),
    "truncate_prompt_tokens": lambda rng: rng.choice((1, 3, -1, *INTEGERS)),
    "truncation_side": lambda rng: rng.choice(("left", "right")),
}  # fmt: skip
SCORES: dict[str, Value] = OF_PROMPTS | {"apply_softmax": flag, "item_first": flag}


def of_prompts(rng: random.Random) -> tuple[str, dict[str, Any]]:
    """A path and a body for vectors or scores."""
    if flag(rng):
        path, known, body = "/v1/embeddings", EMBEDDINGS, {"input": PROMPTS(rng)}
    else:
        path, known = rng.choice(("/v1/score", "/score", "/generative_scoring")), SCORES
        labels = [rng.choice((3, 5, 9, 200, *INTEGERS)) for _ in range(rng.randint(1, 3))]
        body = {"query": text(rng), "items": one_of(text, several(text))(rng), "label_token_ids": labels}
    body |= {name: known[name](rng) for name in rng.sample(list(known), rng.choice((0, 1, 1, 2)))}
    if rng.random() < 0.05:
        body[rng.choice((*known, text(rng)))] = anything(rng)
    return path, body


def generation(rng: random.Random) -> tuple[str, dict[str, Any]]:
    """A path and a body. Few fields at a time, so that most are accepted."""
    kind = rng.random()
    if kind < 0.3:
        return agents(rng)
    if kind < 0.4:
        return of_prompts(rng)
    chat = flag(rng)
    body: dict[str, Any] = (
        {"messages": several(message, 3)(rng) or [message(rng)]} if chat else {"prompt": PROMPTS(rng)}
    )
    known = GENERATION | (CHAT if chat else COMPLETION)
    names = rng.sample(list(known), rng.choice((0, 1, 1, 2, 3, 6)))
    if rng.random() < 0.3:
        names = [rng.choice(GRAMMARS[: 3 if chat else 2])]
    body |= {name: known[name](rng) for name in names}
    if rng.random() < 0.03:
        body[rng.choice((*known, text(rng)))] = anything(rng)
    if rng.random() < 0.9:
        body.setdefault("max_tokens", rng.randint(1, 12) if rng.random() < 0.9 else rng.choice((None, *INTEGERS)))
    if rng.random() < 0.4:
        body["stream"] = True
    return ("/v1/chat/completions" if chat else "/v1/completions"), body


def other(rng: random.Random) -> tuple[str, dict[str, Any]]:
    found: list[tuple[str, dict[str, Any]]] = [
        ("/tokenize", {"prompt": text(rng), "add_special_tokens": flag(rng), "return_token_strs": flag(rng)}),
        ("/tokenize", {"messages": [message(rng)], "tools": tools(rng)}),
        ("/detokenize", {"tokens": several(token, 300)(rng)}),
    ]
    return rng.choice(found)


def attack(target: Target, rng: random.Random, tally: Tally) -> None:
    """Send one request."""
    path, body = generation(rng) if rng.random() < 0.95 else other(rng)
    call(target, rng, path, body, tally)
