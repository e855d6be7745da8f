"""Choice of the tools that a model may or must call."""

from collections.abc import Sequence
from typing import Literal

from pydantic import Field

from jpaged.serving.conversation import MAX_TOOLS, Function
from jpaged.serving.errors import invalid
from jpaged.serving.fields import Items, Open

TOOL_CHOICES = (
    '"none", "auto", "required", {"type": "function", "function": {"name": NAME}} or '
    '{"type": "allowed_tools", "allowed_tools": {"mode": "auto" or "required", "tools": [...]}}'
)


class NamedFunction(Open):
    """Name of a function."""

    name: str


class NamedToolChoice(Open):
    """Choice of a tool by its name."""

    type: Literal["function"]
    function: NamedFunction


class AllowedTools(Open):
    """Some of the tools, and whether one of them must be called."""

    mode: Literal["auto", "required"]
    tools: Items[NamedToolChoice] = Field(min_length=1, max_length=MAX_TOOLS)


class AllowedToolsChoice(Open):
    """Choice of some tools. The prompt has all of them, so that requests with other choices share its blocks."""

    type: Literal["allowed_tools"]
    allowed_tools: AllowedTools


ToolChoice = Literal["none", "auto", "required"] | NamedToolChoice | AllowedToolsChoice


def must_call(choice: ToolChoice | None) -> bool:
    """Return whether the model must call a tool."""
    if isinstance(choice, AllowedToolsChoice):
        return choice.allowed_tools.mode == "required"
    return choice == "required" or isinstance(choice, NamedToolChoice)


def chosen_functions(choice: ToolChoice | None, functions: Sequence[Function]) -> list[Function]:
    """Return the functions that the model may call; ApiError 400 if the choice is impossible."""
    if choice == "none":
        return []
    if isinstance(choice, str | None):
        if choice is not None and not functions:
            raise invalid("tool_choice", f"{choice!r} needs tools")
        return list(functions)
    named = [choice] if isinstance(choice, NamedToolChoice) else choice.allowed_tools.tools
    wanted = {each.function.name for each in named}
    if unknown := wanted - {function.name for function in functions}:
        raise invalid("tool_choice", f"{min(unknown)!r} is none of the tools")
    return [function for function in functions if function.name in wanted]
