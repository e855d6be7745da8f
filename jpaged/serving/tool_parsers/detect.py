# ruff: noqa: RUF001 - DeepSeek's marks have full-width bars
"""Detection of the form of tool calls in a chat template."""

import re
from collections.abc import Mapping

# The first pattern that a template has tells its form. None: a form that is not read.
SIGNS: Mapping[str, str | None] = {
    r"<\|channel\|>": "openai",
    r"\[TOOL_CALLS\]": "mistral",
    r"<｜tool▁calls▁begin｜>(?s:.*)```json": "deepseek_v3",
    r"<｜tool▁calls▁begin｜>": "deepseek_v31",
    r"<\|tool_calls_section_begin\|>": "kimi_k2",
    r"<minimax:tool_call>": "minimax_m2",
    r"<seed:tool_call>": "seed_oss",
    r"<function_calls>": "olmo3",
    r"functools\[": "phi4_mini_json",
    r"<start_function_call>": "functiongemma",
    r"<\|tool_call>": "gemma4",
    r"<\|tool_call\|>": "granite",
    r"<tool_call>(?s:.*)<function=|<function=(?s:.*)<tool_call>": "qwen3_coder",
    r"</arg_key><arg_value>": "glm47",
    r"<tool_call>(?s:.*)<arg_key>|<arg_key>(?s:.*)<tool_call>": "glm45",
    r"\]<\]minimax\[>\[": None,  # MiniMax M3: tags with a prefix
    r"<tool_calls>\[": None,  # Apriel: a list
    r"<tool_call>": "hermes",
    r"\[func_name1\((?s:.*)<\|header_start\|>|<\|header_start\|>(?s:.*)\[func_name1\(": "llama4_pythonic",
    r"\[func_name1\(": "pythonic",
    r"<function=": None,  # Functionary: JSON in a tag
    # A call has "parameters" right after "name". A tool's definition has "description" between them.
    r"python_tag|" + r'"name\\?":[^,]*,[^,"]*"parameters': "llama3_json",
}


def detect(chat_template: str) -> str | None:
    """Return the name of a chat template's form, or None if it is none of the table."""
    return next((name for sign, name in SIGNS.items() if re.search(sign, chat_template)), None)
