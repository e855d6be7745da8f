# ruff: noqa: RUF001 - DeepSeek's marks have full-width bars
"""Table of the forms of tool calls, by the names of vLLM's `--tool-call-parser`.

vLLM lists its parsers and their models at https://docs.vllm.ai/en/latest/features/tool_calling/. The chat templates of
the models have the exact texts; Mistral publishes its own as the package `mistral-common`, DeepSeek describes its forms
at https://huggingface.co/deepseek-ai/DeepSeek-V3.1, Moonshot at
https://github.com/MoonshotAI/Kimi-K2/blob/main/docs/tool_call_guidance.md, and MiniMax at
https://huggingface.co/MiniMaxAI/MiniMax-M2/blob/main/docs/tool_calling_guide.md.
"""

import re
from collections.abc import Iterable, Mapping

from jpaged.serving.tool_parsers.form import Form
from jpaged.serving.tool_parsers.gemma_call import GemmaCall
from jpaged.serving.tool_parsers.ids import NAMED, SHORT
from jpaged.serving.tool_parsers.json_call import ARGUMENTS, JsonList, JsonObject, NamedJson
from jpaged.serving.tool_parsers.python_call import PythonCall
from jpaged.serving.tool_parsers.tagged_call import Tags
from jpaged.tokenizer import CALL_TAGS

OPENING, CLOSING = CALL_TAGS
FUNCTION_TAGS = Tags(
    name_end=">\n", key_open="<parameter=", key_close=">", value_open="\n", value_close="\n</parameter>",
    value_end="\n", end="</function>",
)  # fmt: skip
TIGHT_FUNCTION_TAGS = Tags(
    name_end=">\n", key_open="<parameter=", key_close=">", value_open="", value_close="</parameter>",
    value_end="\n", end="</function>",
)  # fmt: skip
TIGHT_ARGUMENT_TAGS = Tags(
    name_end="", key_open="<arg_key>", key_close="</arg_key>", value_open="<arg_value>",
    value_close="</arg_value>", value_end="", end=CLOSING,
)  # fmt: skip
ARGUMENT_TAGS = Tags(
    name_end="\n", key_open="<arg_key>", key_close="</arg_key>\n", value_open="<arg_value>",
    value_close="</arg_value>", value_end="\n", end=CLOSING,
)  # fmt: skip
INVOKE_TAGS = Tags(
    name_end='">\n', key_open='<parameter name="', key_close='">', value_open="", value_close="</parameter>",
    value_end="\n", end="</invoke>",
)  # fmt: skip


def _python_begins(names: Iterable[str]) -> str:
    return rf"\[({'|'.join(map(re.escape, names))})\("


PYTHONIC = Form(PythonCall(is_list=True), begins=_python_begins)
LLAMA_JSON = Form(
    JsonObject(ARGUMENTS[1]), separator="; ", prefix="<|python_tag|>", begins=lambda names: r'\{"name":', is_json=True
)
MISTRAL_CALL = NamedJson(between="[ARGS]", pattern=r"(\[CALL_ID\]\w+)?(\[ARGS\])?\s*", id_mark="[CALL_ID]")
MISTRAL_LIST = JsonList(MISTRAL_CALL, item=JsonObject(may_have_id=True))
MISTRAL_NAMED = Form(JsonList(MISTRAL_CALL, writes_named=True), start="[TOOL_CALLS]", ids=SHORT)
HARMONY_HEADER = r"\s*(<\|channel\|>commentary)?\s*(<\|constrain\|>)?\s*(json)?\s*<\|message\|>\s*"

FORMS: Mapping[str, Form] = {
    "deepseek_v3": Form(
        NamedJson(between="\n```json\n", pattern=r"\s*```json\s*", after="\n```"),
        start="<｜tool▁calls▁begin｜>", opening="<｜tool▁call▁begin｜>function<｜tool▁sep｜>",
        closing="<｜tool▁call▁end｜>", separator="\n", end="<｜tool▁calls▁end｜>", repeats=True,
    ),
    "deepseek_v31": Form(
        NamedJson(between="<｜tool▁sep｜>", pattern=r"<｜tool▁sep｜>\s*"),
        start="<｜tool▁calls▁begin｜>", opening="<｜tool▁call▁begin｜>",
        closing="<｜tool▁call▁end｜>", end="<｜tool▁calls▁end｜>", repeats=True,
    ),
    "functiongemma": Form(
        GemmaCall("<escape>"), start="<start_function_call>", opening="call:", closing="<end_function_call>",
    ),
    "gemma4": Form(
        GemmaCall('<|"|>'), start="<|tool_call>", opening="call:", bare_opening=":", closing="<tool_call|>",
    ),
    "glm45": Form(ARGUMENT_TAGS, start=OPENING, separator="\n"),
    "glm47": Form(TIGHT_ARGUMENT_TAGS, start=OPENING),
    "granite": Form(JsonList(), start="<|tool_call|>", also=(OPENING,)),
    "hermes": Form(JsonObject(), start=f"{OPENING}\n", closing=f"\n{CLOSING}", separator="\n"),
    "kimi_k2": Form(
        NamedJson(
            before="functions.", has_index=True, between="<|tool_call_argument_begin|>",
            pattern=r"(:\d+)?\s*<\|tool_call_argument_begin\|>\s*",
        ),
        start="<|tool_calls_section_begin|>", opening="<|tool_call_begin|>", closing="<|tool_call_end|>",
        end="<|tool_calls_section_end|>", repeats=True, ids=NAMED,
    ),
    "llama3_json": LLAMA_JSON,
    "llama4_json": LLAMA_JSON,
    "llama4_pythonic": Form(
        PythonCall(is_list=True), prefix="<|python_start|>", closing="<|python_end|>", begins=_python_begins,
    ),
    "minimax_m2": Form(
        INVOKE_TAGS, start="<minimax:tool_call>\n", opening='<invoke name="', separator="\n",
        end="\n</minimax:tool_call>", repeats=True,
    ),
    "mistral": Form(
        MISTRAL_LIST, start="[TOOL_CALLS]", ids=SHORT, variant=("[ARGS]", MISTRAL_NAMED),
    ),
    "olmo3": Form(
        PythonCall(), start="<function_calls>\n", separator="\n", end="\n</function_calls>", repeats=True,
    ),
    "openai": Form(
        NamedJson(before="functions.", between=" <|constrain|>json<|message|>", pattern=HARMONY_HEADER),
        start="<|channel|>commentary to=", closing="<|call|>", marks=("<|start|>", "<|end|>"),
        reasoning="openai_gptoss",
    ),
    "phi4_mini_json": Form(JsonList(), start="functools"),
    "pythonic": PYTHONIC,
    "qwen3_coder": Form(
        FUNCTION_TAGS, start=f"{OPENING}\n", also=("<function=",), opening="<function=", closing=f"\n{CLOSING}",
        separator="\n",
    ),
    "seed_oss": Form(
        TIGHT_FUNCTION_TAGS, start="<seed:tool_call>\n", opening="<function=", closing="\n</seed:tool_call>",
        separator="\n",
    ),
}  # fmt: skip
