# ruff: noqa: RUF001 - DeepSeek's marks have full-width bars
"""Minimal chat templates: the assistant's part of a conversation, in the form that each model's documents describe.

They are not the models' own templates. Texts that Mistral's own encoder wrote are in `test_tool_forms`.
"""

import json

import jinja2

JSON = '{"name": "{{ call.name }}", "%s": {{ call.arguments | tojson }}}'
FUNCTION = """<function={{ call.name }}>
{% for key, value in call.arguments.items() -%}
<parameter={{ key }}>
{{ value if value is string else value | tojson }}
</parameter>
{% endfor -%}
</function>"""
TIGHT_FUNCTION = FUNCTION.replace(">\n{{ value", ">{{ value").replace("}}\n</parameter>", "}}</parameter>")
GEMMA = "call:{{ call.name }}{{ call.arguments | gemma(quote) }}"
PYTHON = "[{% for call in calls %}{{ ', ' if not loop.first }}{{ call | python }}{% endfor %}]"
EACH = "{%% for call in calls %%}{{ '%s' if not loop.first }}%s{%% endfor %%}"

TEMPLATES = {
    "deepseek_v3": "{{ content }}<｜tool▁calls▁begin｜>"
    + EACH % (r"\n", "<｜tool▁call▁begin｜>function<｜tool▁sep｜>{{ call.name }}\n```json\n"
              "{{ call.arguments | tojson }}\n```<｜tool▁call▁end｜>")
    + "<｜tool▁calls▁end｜>",
    "deepseek_v31": "{{ content }}<｜tool▁calls▁begin｜>"
    + EACH % ("", "<｜tool▁call▁begin｜>{{ call.name }}<｜tool▁sep｜>{{ call.arguments | tojson }}<｜tool▁call▁end｜>")
    + "<｜tool▁calls▁end｜>",
    "functiongemma": "{{ content }}{% set quote = '<escape>' %}"
    + EACH % ("", f"<start_function_call>{GEMMA}<end_function_call>"),
    "gemma4": """{{ content }}{% set quote = '<|"|>' %}""" + EACH % ("", f"<|tool_call>{GEMMA}<tool_call|>"),
    "glm45": "{{ content }}" + EACH % (
        r"\n",
        """<tool_call>{{ call.name }}
{% for key, value in call.arguments.items() -%}
<arg_key>{{ key }}</arg_key>
<arg_value>{{ value if value is string else value | tojson }}</arg_value>
{% endfor -%}
</tool_call>""",
    ),
    "glm47": "{{ content }}" + EACH % (
        "",
        "<tool_call>{{ call.name }}{% for key, value in call.arguments.items() %}<arg_key>{{ key }}</arg_key>"
        "<arg_value>{{ value if value is string else value | tojson }}</arg_value>{% endfor %}</tool_call>",
    ),
    "granite": "{{ content }}<|tool_call|>[" + EACH % (", ", JSON % "arguments") + "]",
    "hermes": "{{ content }}" + EACH % (r"\n", f"<tool_call>\n{JSON % 'arguments'}\n</tool_call>"),
    "kimi_k2": "{{ content }}<|tool_calls_section_begin|>"
    + EACH % ("", "<|tool_call_begin|>functions.{{ call.name }}:{{ loop.index0 }}<|tool_call_argument_begin|>"
              "{{ call.arguments | tojson }}<|tool_call_end|>")
    + "<|tool_calls_section_end|>",
    "llama3_json": EACH % ("; ", JSON % "parameters"),
    "llama4_json": EACH % ("; ", JSON % "parameters"),
    "llama4_pythonic": f"<|python_start|>{PYTHON}<|python_end|>",
    "minimax_m2": "{{ content }}<minimax:tool_call>\n" + EACH % (
        r"\n",
        """<invoke name="{{ call.name }}">
{% for key, value in call.arguments.items() -%}
<parameter name="{{ key }}">{{ value if value is string else value | tojson }}</parameter>
{% endfor -%}
</invoke>""",
    ) + "\n</minimax:tool_call>",
    "mistral": "{{ content }}[TOOL_CALLS][" + EACH % (", ", JSON % "arguments") + "]",
    "mistral named": "{{ content }}" + EACH % ("", "[TOOL_CALLS]{{ call.name }}[ARGS]{{ call.arguments | tojson }}"),
    "olmo3": "{{ content }}<function_calls>\n" + EACH % (r"\n", "{{ call | python }}") + "\n</function_calls>",
    "openai": "{{ content }}"
    + EACH % ("", "<|channel|>commentary to=functions.{{ call.name }} <|constrain|>json<|message|>"
              "{{ call.arguments | tojson }}<|call|>"),
    "phi4_mini_json": "{{ content }}functools[" + EACH % (", ", JSON % "arguments") + "]",
    "pythonic": PYTHON,
    "qwen3_coder": "{{ content }}" + EACH % (r"\n", f"<tool_call>\n{FUNCTION}\n</tool_call>"),
    "seed_oss": "{{ content }}" + EACH % (r"\n", f"<seed:tool_call>\n{TIGHT_FUNCTION}\n</seed:tool_call>"),
}  # fmt: skip
WITHOUT_CONTENT = {name for name, template in TEMPLATES.items() if "content" not in template}


def gemma(value, quote):
    """Return a value in Gemma's form."""
    if isinstance(value, str):
        return f"{quote}{value}{quote}"
    if isinstance(value, dict):
        return "{" + ",".join(f"{key}:{gemma(each, quote)}" for key, each in sorted(value.items())) + "}"
    if isinstance(value, list):
        return "[" + ",".join(gemma(each, quote) for each in value) + "]"
    return json.dumps(value)


def python(call):
    """Return a call in Python."""
    return f"{call['name']}({', '.join(f'{key}={_literal(value)}' for key, value in call['arguments'].items())})"


def _literal(value):
    """Return a value in Python, with double quotation marks as in the examples of the documents."""
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False)
    if isinstance(value, dict):
        return "{" + ", ".join(f"{_literal(key)}: {_literal(each)}" for key, each in value.items()) + "}"
    return "[" + ", ".join(map(_literal, value)) + "]" if isinstance(value, list) else repr(value)


def _environment():
    environment = jinja2.Environment(keep_trailing_newline=True)
    to_json = lambda value: json.dumps(value, ensure_ascii=False)
    environment.filters |= {"tojson": to_json, "gemma": gemma, "python": python}
    return environment


_ENVIRONMENT = _environment()
_COMPILED = {name: _ENVIRONMENT.from_string(source) for name, source in TEMPLATES.items()}


def rendered(name, calls, content=""):
    """Return the assistant's message with calls as (name, arguments)."""
    named = [{"name": called, "arguments": arguments} for called, arguments in calls]
    return _COMPILED[name].render(calls=named, content=content)
