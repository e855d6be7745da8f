"""Structured outputs on the demo model: every text matches its constraint."""

import gc
import itertools
import json
import random
import re
from fractions import Fraction

import jsonschema
import pytest

from jpaged import BeamSearchParams, SamplingParams, StructuredOutputsParams
from jpaged.child import Children
from jpaged.core.block_pool import BlockPool
from jpaged.core.params import InvalidParameter
from jpaged.core.scheduler import Scheduler
from jpaged.demo import DIRECTORY
from jpaged.engine.engine import Engine
from jpaged.structured import grammar_check
from jpaged.structured.compiler import MAX_GRAMMAR_BYTES, GrammarCompiler
from jpaged.structured.grammar import Compiler, native_grammar
from jpaged.structured.sound import LARGEST, sound_schema
from jpaged.tokenizer import backend, encode, load_tokenizer
from tests.support import schemas

pytestmark = pytest.mark.slow

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 10},
        "age": {"type": "integer", "minimum": 0, "maximum": 99},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def compiler():
    return made_compiler()


def made_compiler(**options):
    tokenizer = backend(load_tokenizer(DIRECTORY))
    return GrammarCompiler(tokenizer, tokenizer.get_vocab_size(), [1], **options)


def texts(demo, params, prompt="The fox said"):
    (output,) = demo.generate(prompt, params, use_tqdm=False)
    return [(choice.text, choice.finish_reason) for choice in output.outputs]


def sampled(max_tokens=120, **wanted):
    return SamplingParams(
        temperature=1.0, seed=7, n=4, max_tokens=max_tokens, structured_outputs=StructuredOutputsParams(**wanted)
    )


@pytest.mark.parametrize("schema", [PERSON, json.dumps(PERSON)])
def test_json(demo, schema):
    for text, reason in texts(demo, sampled(json=schema)):
        assert reason == "stop"
        jsonschema.validate(json.loads(text), PERSON)


def test_the_white_space_of_json(demo):
    for text, _ in texts(demo, sampled(json=PERSON, disable_any_whitespace=True)):
        assert text == json.dumps(json.loads(text), separators=(",", ":"), ensure_ascii=False)
    for text, _ in texts(demo, sampled(json=PERSON, whitespace_pattern=" ")):
        assert re.fullmatch(r'\{ ?"name" ?: ?".*" ?, ?"age" ?: ?\d+ ?\}', text)


def test_any_object_a_regular_expression_choices_and_grammars(demo):
    for text, reason in texts(demo, sampled(json_object=True, max_tokens=200)):
        assert text.lstrip()[:1] == "{" and (reason == "length" or isinstance(json.loads(text), dict))
    for text, reason in texts(demo, sampled(regex=r"[A-Z][a-z]{2,5} (?:runs|sleeps)\.")):
        assert reason == "stop" and re.fullmatch(r"[A-Z][a-z]{2,5} (?:runs|sleeps)\.", text)
    choice = ["yes", 'no, "never"', "vielleicht\nmörgen"]
    assert {text for text, _ in texts(demo, sampled(choice=choice))} <= set(choice)
    lark = 'start: "(" inner ")"\ninner: start | WORD\nWORD: /[ab]{1,3}/'
    gbnf = 'root ::= "(" inner ")"\ninner ::= root | [ab] [ab]? [ab]?'
    for grammar in (lark, gbnf):
        for text, reason in texts(demo, sampled(grammar=grammar)):
            assert reason == "length" or re.fullmatch(r"(\(+)[ab]{1,3}(\)+)", text), text
            assert reason == "length" or text.count("(") == text.count(")")


def test_beams_keep_to_it_too(demo):
    wanted = StructuredOutputsParams(json=PERSON, disable_any_whitespace=True)
    params = BeamSearchParams(beam_width=4, max_tokens=60, structured_outputs=wanted)
    found = texts(demo, params)
    assert len(set(found)) == 4
    for text, reason in found:
        if reason == "stop":
            jsonschema.validate(json.loads(text), PERSON)
    assert any(reason == "stop" for _, reason in found)


@pytest.mark.parametrize("mode", [pytest.param("recompute", marks=pytest.mark.deep), "swap"])
def test_preemption_does_not_lose_the_place(demo, mode):
    """A pool too small for all: each request has its result alone."""
    whole = demo.engine.scheduler
    host = BlockPool(32, whole.pool.block_size, enable_prefix_caching=False)
    scheduler = Scheduler(
        BlockPool(17, whole.pool.block_size), whole.limits, vocab_size=whole.vocab_size,
        eos_token_ids=sorted(whole.eos_token_ids), host_pool=host, preemption=mode,
    )  # fmt: skip
    small = Engine(scheduler, demo.engine.runner, demo.engine.tokenizer)
    prompts = [f"The fox said {i}" for i in range(8)]
    params = SamplingParams(temperature=1.0, seed=3, max_tokens=120, min_tokens=30,
                            structured_outputs=StructuredOutputsParams(json=PERSON))  # fmt: skip
    start = demo.engine.grammar_compiler().compile(params.structured_outputs)
    together = [small.add(prompt, encode(demo.tokenizer, prompt), params, constraint=start) for prompt in prompts]
    while small.has_work:
        small.step()
    assert scheduler.num_preemptions > 0 and (scheduler.num_swapped_blocks > 0) == (mode == "swap")
    alone = [demo.generate(prompt, params, use_tqdm=False)[0] for prompt in prompts]
    assert [request.outputs[0].text for request in together] == [output.outputs[0].text for output in alone]


def test_a_text_that_is_complete_ends_before_min_tokens(demo):
    params = SamplingParams(max_tokens=20, min_tokens=15, structured_outputs=StructuredOutputsParams(choice=["yes"]))
    assert texts(demo, params) == [("yes", "stop")]


def test_a_grammar_that_fails_midway_ends_the_request_with_the_reason(demo):
    """An object with very many optional properties can be compiled, but not followed once it has begun."""
    properties = {f"property {i}": {"type": "integer"} for i in range(1200)}
    params = SamplingParams(
        max_tokens=20, structured_outputs=StructuredOutputsParams(json={"type": "object", "properties": properties})
    )
    (output,) = demo.generate("The fox", params, use_tqdm=False)
    assert output.outputs[0].finish_reason == "error" and "items" in str(output.outputs[0].stop_reason)
    assert demo.engine.scheduler.pool.num_used == 0


@pytest.mark.parametrize(
    "wanted, words",
    [
        ({"json": {"type": "nothing"}}, "Invalid type: nothing"),
        ({"json": "{no json"}, "key must be a string"),
        ({"json": {"$ref": "http://127.0.0.1:9/schema"}}, "127.0.0.1"),
        ({"json": {"$ref": "file:///etc/hostname"}}, "hostname"),
        ({"json": {"allOf": [{"type": "string"}, {"type": "number"}]}}, "Unsatisfiable"),
        ({"regex": "a(b"}, "unclosed group"),
        ({"regex": "(?=a)b"}, "look-around"),
        ({"grammar": "start: nowhere"}, 'unknown name: "nowhere"'),
        ({"grammar": "(" * 10**5}, "grammar"),
        ({"json": '{"type":"array","items":' * 5000}, "recursion limit"),
        ({"json": {"enum": ["x" * MAX_GRAMMAR_BYTES]}}, f"exceed {MAX_GRAMMAR_BYTES}"),
        ({"choice": ["\ud800"]}, "structured_outputs"),
    ],
)
def test_what_cannot_be_compiled_is_refused_with_the_reason(compiler, wanted, words):
    with pytest.raises(InvalidParameter) as error:
        compiler.compile(StructuredOutputsParams(**wanted))
    assert error.value.field == "structured_outputs"
    assert words in str(error.value) and "\n" not in str(error.value)


def test_the_longest_chains_of_rules_do_not_overflow_the_stack(compiler):
    count = 5000
    rules = "\n".join(f"r{i}: r{i + 1}" for i in range(count))
    compiler.compile(StructuredOutputsParams(grammar=f'start: r0\n{rules}\nr{count}: "a"'))
    definitions = {f"a{i}": {"$ref": f"#/$defs/a{i + 1}"} for i in range(3000)} | {"a3000": {"type": "null"}}
    compiler.compile(StructuredOutputsParams(json={"$ref": "#/$defs/a0", "$defs": definitions}))


def test_a_grammar_that_crashes_its_compiler_costs_no_more_than_itself(compiler):
    """llguidance 1.9 recurses without end on the least number of 64 bits."""
    for i in range(2):
        with pytest.raises(InvalidParameter, match="gave up"):
            compiler.compile(StructuredOutputsParams(json={"const": -(2**63)}))
        compiler.compile(StructuredOutputsParams(json={"const": -(2**62) + i}))


def test_a_grammar_that_takes_too_long_is_given_up(compiler, monkeypatch):
    compiler.compile(StructuredOutputsParams(regex="[a-z]{7}"))
    monkeypatch.setattr(grammar_check, "COMPILE_TIMEOUT_S", 0.01)
    many = {f"property {i}": {"type": "integer"} for i in range(2500)}
    with pytest.raises(InvalidParameter, match=r"not done within 0\.01 seconds"):
        compiler.compile(StructuredOutputsParams(json={"type": "object", "properties": many}))
    with monkeypatch.context() as patched:
        patched.setattr(Children, "ask", lambda *_: pytest.fail("the fault is remembered"))
        with pytest.raises(InvalidParameter, match=r"not done within 0\.01 seconds"):
            compiler.compile(StructuredOutputsParams(json={"type": "object", "properties": many}))
    monkeypatch.undo()
    compiler.compile(StructuredOutputsParams(regex="[a-z]{8}"))


def test_the_process_that_tries_grammars_ends_with_its_compiler():
    compiler = made_compiler()
    compiler.compile(StructuredOutputsParams(regex="a"))
    (process,) = (child.process for child in compiler._check_and_compiler[0]._children._idle)
    assert process.poll() is None
    del compiler
    gc.collect()
    assert process.poll() is not None


def test_what_can_be_asked_for():
    for wanted in ({}, {"json": {}, "regex": "a"}, {"json_object": False}):
        with pytest.raises(InvalidParameter, match="must have one of"):
            StructuredOutputsParams(**wanted)
    with pytest.raises(InvalidParameter, match="choice must be texts"):
        StructuredOutputsParams(choice=[])
    for wanted, words in (
        (
            {"regex": "a", "disable_any_whitespace": True},
            "disable_any_whitespace is allowed only for JSON",
        ),
        ({"choice": ["a"], "whitespace_pattern": " "}, "whitespace_pattern is allowed only for JSON, not for choice"),
        ({"json_object": True, "whitespace_pattern": " ", "disable_any_whitespace": True}, "contradicts"),
    ):
        with pytest.raises(InvalidParameter, match=words):
            StructuredOutputsParams(**wanted)
    regex = StructuredOutputsParams(regex="a")
    for name, value in (("allowed_token_ids", [1]), ("bad_words", ["a"]), ("ignore_eos", True)):
        with pytest.raises(InvalidParameter, match=f"{name}: can't be combined"):
            SamplingParams(structured_outputs=regex, **{name: value})


def test_compiled_grammars_are_kept_and_forgotten():
    compiler = made_compiler(max_cached=2)
    first = compiler.compile(StructuredOutputsParams(regex="ab"))
    first.take(backend(load_tokenizer(DIRECTORY)).token_to_id("x"))
    assert first.error and not compiler.compile(StructuredOutputsParams(regex="ab")).error  # a copy of its own
    for letter in "cded":
        compiler.compile(StructuredOutputsParams(regex=letter))
    compiler.compile(StructuredOutputsParams(regex="f"))
    assert [grammar[8] for grammar in compiler._cache] == ["d", "f"]


def test_the_generators_give_what_they_say():
    """Else the tests that use them would test less than they seem to."""
    made = [schemas.schema(random.Random(i)) for i in range(200)]
    for schema in made:
        jsonschema.Draft202012Validator.check_schema(schema)
    assert len({json.dumps(schema) for schema in made}) > 180
    for i in range(100):
        re.compile(schemas.regex(random.Random(i)))


def test_masks_are_made_while_the_device_works(demo, monkeypatch):
    """After the model's part of a step has been sent off, and before anything of it is waited for."""
    runner, order = demo.engine.runner, []

    def noted(name, call):
        return lambda *args: (order.append(name), call(*args))[1]

    for owner, name in ((runner.step, "forward"), (demo.engine._masks, "write"), (runner.step, "choose")):
        monkeypatch.setattr(owner, name, noted(name, getattr(owner, name)))
    texts(demo, SamplingParams(max_tokens=4, structured_outputs=StructuredOutputsParams(regex="[a-z]{9}")))
    assert order == ["forward", "write", "choose"] * 4


@pytest.fixture(scope="module")
def accepted():
    """A function that returns the texts which a schema's grammar accepts."""
    tokenizer = backend(load_tokenizer(DIRECTORY))
    compiler, tokens = Compiler(tokenizer, tokenizer.get_vocab_size(), [1]), {}

    def accepted(schema, texts):
        start, found = compiler.matcher(native_grammar(StructuredOutputsParams(json=schema))), set()
        for text in texts:
            if text not in tokens:
                tokens[text] = encode(tokenizer, text, add_special_tokens=False)
            matcher = start.deep_copy()
            if matcher.try_consume_tokens(tokens[text]) == len(tokens[text]) and matcher.is_accepting():
                found.add(text)
        return found

    return accepted


def allows(schema, text):
    """Whether a JSON number satisfies a schema without subschemas."""
    value, bound = Fraction(text), {name: Fraction(str(value)) for name, value in schema.items() if name != "type"}
    return (
        bound.get("minimum", value) <= value <= bound.get("maximum", value)
        and not ("exclusiveMinimum" in bound and value <= bound["exclusiveMinimum"])
        and not ("exclusiveMaximum" in bound and value >= bound["exclusiveMaximum"])
        and (schema["type"] == "number" or value.denominator == 1)
        and ("multipleOf" not in bound or (value / bound["multipleOf"]).denominator == 1)
    )


def written(value):
    """The number with its own decimals, and with one more."""
    decimals = next(d for d in range(9) if value * 10**d % 1 == 0)
    return {f"{float(value):.{d}f}" for d in (decimals, decimals + 1)}


def near(bounds):
    """Numbers close to bounds: in steps of several sizes, and the whole numbers around."""
    steps = [Fraction(count, 10**d) for d in range(5) for count in (-11, -10, -1, 0, 1, 9, 10)]
    return {Fraction(str(bound)) + step for bound in bounds for step in steps} | set(map(Fraction, range(-2, 3)))


BOUNDS = [-10, -1.5, -1, -0.25, 0, 0.001, 0.5, 1.0, 1.75, 9, 9.99, 99, 99.5, 1000.25]
FEW_BOUNDS = [-10, -0.25, 0, 0.5, 9.99, 99]


@pytest.mark.parametrize("bounds", [FEW_BOUNDS, pytest.param(BOUNDS, marks=pytest.mark.deep)], ids=["few", "many"])
@pytest.mark.parametrize("kind", ["number", "integer"])
def test_numbers_keep_to_their_bounds(kind, bounds, accepted):
    """Of all pairs of bounds: no text of a wrong number is accepted, and each right number has an accepted text."""
    given = 0
    for low, high in itertools.product([None, *bounds], repeat=2):
        for names in itertools.product(("minimum", "exclusiveMinimum"), ("maximum", "exclusiveMaximum")):
            pairs = {name: bound for name, bound in zip(names, (low, high)) if bound is not None}
            texts = {number: written(number) for number in near(pairs.values())}
            schema = {"type": kind} | pairs
            right = {number for number in texts if allows(schema, min(texts[number]))}
            if not right or not pairs:
                continue
            found = accepted(schema, set().union(*texts.values()))
            given += 1
            assert all(allows(schema, text) for text in found), schema
            assert all(texts[number] & found for number in right), schema
    assert given > len(bounds) ** 2


def test_bounds_of_one_number_in_several_places(accepted):
    texts, right = ["0", "0.0", "0.5", "0.25", "0.0001", "-0", "1"], {"0.5", "0.25", "0.0001"}
    positive, small = {"exclusiveMinimum": 0}, {"maximum": 0.5}
    for schema in (
        {"minimum": 0, "exclusiveMinimum": True, **small},  # as in draft 4
        {"minimum": -1, **positive, **small},
        {"allOf": [positive, small], "type": "number"},
        {"$ref": "#/$defs/p", **small, "$defs": {"p": positive}},
        {"$ref": "#/parts/minimum", **small, "parts": {"minimum": positive}},
        {"anyOf": [{"type": "string"}, positive | small]},
        json.dumps(positive | small),
        positive | small | {"multipleOf": 0.0001},
    ):
        assert accepted(schema, texts) == right, schema
    inner = {"type": "object", "properties": {"const": {"items": positive | small}}, "required": ["const"]}
    assert accepted(inner, ['{"const":[0]}', '{"const":[0.5]}', '{"const":[0,0.5]}']) == {'{"const":[0.5]}'}
    negative = {"type": "number", "minimum": -0.5, "exclusiveMaximum": 0}
    assert accepted(negative, ["-0", "-0.0", "0", "-0.5", "-0.01"]) == {"-0.5", "-0.01"}


def test_bounds_beyond_the_whole_numbers_of_floats(accepted):
    whole = 2**53
    texts = [str(sign * (whole + step)) for sign in (1, -1) for step in range(-1, 12)]
    for low, high in itertools.product(range(4, 9), repeat=2):
        schema = {"type": "integer", "exclusiveMinimum": -whole - low, "exclusiveMaximum": whole + high}
        found = accepted(schema, texts)
        assert all(allows(schema, text) for text in found) and {str(whole), str(-whole)} <= found
    schema = {"type": "integer", "minimum": -(2**63), "maximum": 2**64 - 1}
    assert accepted(schema, ["5", "-5", str(LARGEST), str(-LARGEST)]) == {"5", "-5", str(LARGEST), str(-LARGEST)}
    for bound, words in (
        ({"minimum": 1e20}, "minimum: must be at most"),
        ({"maximum": -1e20}, "maximum: must be at least"),
    ):
        with pytest.raises(ValueError, match=f"^{words} -?{LARGEST}, not -?1e"):
            sound_schema({"items": bound})
    with pytest.raises(ValueError, match=r"^exclusiveMaximum: 0 must be at least 1e-45 from the other bound"):
        sound_schema({"exclusiveMaximum": 0, "minimum": -1e-50})


def test_schemas_are_changed_only_where_numbers_need_it():
    bounds = {"exclusiveMinimum": 0, "maximum": 0.5}
    data = {"const": bounds, "enum": [bounds], "default": bounds, "examples": [bounds]}
    for schema in (
        {"exclusiveMinimum": 0}, {"exclusiveMinimum": 0, "maximum": 1}, {"exclusiveMinimum": -1, "maximum": -0.5},
        data, json.dumps(data), {"properties": {"exclusiveMinimum": {"maximum": 0.5}}}, True, "{", "[]", [],
        {"minimum": "0", "exclusiveMinimum": None}, {"exclusiveMinimum": True, "maximum": 1.5}, "[" * 100_000,
        {"anyOf": [{"exclusiveMinimum": 1}, {"maximum": 1}]},
    ):  # fmt: skip
        sound = sound_schema(schema)
        assert sound == schema or sound == json.loads(schema)
    given = {"type": "number", **bounds, **data}
    before = json.dumps(given)
    assert sound_schema(given) == {"type": "number", "minimum": 1e-45, "maximum": 0.5, **data}
    assert json.dumps(given) == before


@pytest.mark.parametrize(
    "given, expected",
    [
        ({"minimum": LARGEST}, {"minimum": LARGEST}),
        ({"maximum": -LARGEST}, {"maximum": -LARGEST}),
        ({"exclusiveMinimum": 2**53}, {"minimum": 2**53 + 2}),
        ({"exclusiveMaximum": -(2**53)}, {"maximum": -(2**53) - 2}),
        ({"minimum": 2**53 + 3}, {"minimum": 2**53 + 4}),
        ({"minimum": 2**53 + 2}, {"minimum": 2**53 + 2}),
        ({"exclusiveMinimum": 0, "maximum": 1e-45}, {"minimum": 1e-45, "maximum": 1e-45}),
        ({"minimum": -0.5, "exclusiveMaximum": 0, "maximum": 1}, {"minimum": -0.5, "maximum": -1e-45}),
        ({"minimum": -0.5, "exclusiveMaximum": 0, "maximum": -0.25}, {"minimum": -0.5, "maximum": -0.25}),
    ],
)
def test_bounds_become_the_next_numbers_inside(given, expected):
    found = sound_schema(given)
    assert found == expected and [type(each) for each in found.values()] == [type(each) for each in expected.values()]


def test_the_nearest_of_several_other_bounds_is_the_one_that_counts():
    schema = {"exclusiveMinimum": 0, "allOf": [{"maximum": 0.5}, {"maximum": 1e-50}, {"maximum": 0.25}]}
    with pytest.raises(ValueError, match=r"^exclusiveMinimum: 0 must be at least 1e-45 from the other bound"):
        sound_schema(schema)
