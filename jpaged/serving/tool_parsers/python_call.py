"""Calls as Python calls with keyword arguments, or as a list of them: `[f(a=1, b="x"), g()]`.

Meta documents the list for Llama 4 and Llama 3.2
(https://www.llama.com/docs/model-cards-and-prompt-formats/llama4/), Google for Gemma 3. OLMo 3 writes each call in a
line of its own (https://docs.vllm.ai/en/latest/api/vllm/tool_parsers/olmo3_tool_parser/).
"""

from dataclasses import dataclass

from jpaged.serving.conversation import Function
from jpaged.serving.tool_parsers.form import Spell
from jpaged.serving.tool_parsers.json_call import NAME
from jpaged.serving.tool_parsers.literals import read_literal
from jpaged.serving.tool_parsers.pieces import NotACall, Reading
from jpaged.serving.tool_parsers.reader import CallReader
from jpaged.serving.tool_parsers.schema import in_order, json_rule, properties_of, types_of
from jpaged.serving.tool_parsers.values import converter, types_by_name


@dataclass(frozen=True)
class PythonCall:
    """Call. Values are literals of Python or JSON; tuples become lists.

    Llama 4's templates write all values in quotation marks. These are converted to the types of the schema.

    Attributes:
        is_list: calls are the items of a list.
    """

    is_list: bool = False

    @property
    def texts(self) -> tuple[str, ...]:
        """Texts that may hold marks."""
        return ()

    def read(self, reader: CallReader) -> Reading[None]:
        """Read a call, or a list. Each value is emitted as it comes."""
        yield from reader.items(lambda: self._call(reader)) if self.is_list else self._call(reader)

    def head(self, function: Function) -> str:
        """Return the name with the parenthesis behind it."""
        return f"{function.name}("

    def rules(self, function: Function, name: str, spell: Spell) -> list[str]:
        """Return the rules of a call: its arguments in the order of the schema."""
        schemas, required = properties_of(function)
        rules, parts = [], []
        for index, (key, schema) in enumerate(schemas.items()):
            value = f"{name}_{index}"
            is_flag = types_of(schema) == {"boolean"} and not {"const", "enum"} & schema.keys()
            rules.append(f"{value}: {spell(f'{key}=')} {'("True" | "False")' if is_flag else json_rule(schema)}")
            parts.append((value, key in required))
        return [f"{name}: {in_order(parts, spell(', '))} {spell(')')}", *rules]

    def _call(self, reader: CallReader) -> Reading[None]:
        name, separator = (yield from reader.word(NAME)), "{"
        yield from reader.expect("(")
        yield from reader.space()
        types: dict[str, frozenset[str]] = {}
        while (yield from reader.peek()) != ")":
            key = yield from reader.word(NAME)
            yield from reader.space()
            yield from reader.expect("=")
            yield from reader.space()
            if not key:
                raise NotACall
            if separator == "{":
                reader.begin(name)
                types = types_by_name(reader.functions[name])
            reader.append(f'{separator}"{key}": ')
            separator = ", "
            yield from read_literal(reader, converter(types.get(key, frozenset())))
            yield from reader.space()
            if (yield from reader.peek()) != ")":
                yield from reader.expect(",")
                yield from reader.space()
        reader.at += 1
        if separator == "{":
            reader.begin(name)
            reader.append("{")
        reader.append("}")
