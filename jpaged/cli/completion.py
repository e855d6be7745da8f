"""Print a script that completes commands, flags and their choices in a shell.

  jpaged completion bash     for ~/.local/share/bash-completion/completions/jpaged
  jpaged completion zsh      for ~/.zshrc
  jpaged completion fish     for ~/.config/fish/completions/jpaged.fish

The script contains the flags of this version; print it again after an upgrade.
"""

import argparse
import re
from collections.abc import Iterator, Mapping

SHELLS = ("bash", "zsh", "fish")

Commands = Mapping[str, list[argparse.Action]]  # the flags of each

# Words for a flag's choices, or for flags; without any, the shell completes files.
BASH = """\
_jpaged() {{
  local cur="${{COMP_WORDS[COMP_CWORD]}}" prev="${{COMP_WORDS[COMP_CWORD-1]}}" command="${{COMP_WORDS[1]}}" words=
  if [ "$COMP_CWORD" = 1 ]; then
    words="{commands}"
  else
    case "$command" in {groups}) [ "$COMP_CWORD" = 2 ] || command="$command ${{COMP_WORDS[2]}}" ;; esac
    case "$command $prev" in
{values}
    *) case "$command" in
{flags}
      esac ;;
    esac
  fi
  COMPREPLY=($(compgen -W "$words" -- "$cur"))
}}
complete -o default -F _jpaged jpaged
"""
ZSH = "autoload -U +X compinit bashcompinit && compinit && bashcompinit\n"


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add the argument of `jpaged completion`."""
    parser.usage = "%(prog)s SHELL"
    parser.add_argument("shell", metavar="SHELL", choices=SHELLS, help=" or ".join(SHELLS))


def run(args: argparse.Namespace) -> None:
    """Run `jpaged completion`."""
    from jpaged.cli.main import COMMANDS, load, parser

    actions = {name: _flags(parser(name, load(name), name)) for name in COMMANDS}
    if args.shell == "fish":
        print("\n".join(_fish(COMMANDS, actions)))
    else:
        print((ZSH if args.shell == "zsh" else "") + _bash(actions), end="")


def _flags(parser: argparse.ArgumentParser) -> list[argparse.Action]:
    return [each for each in parser._actions if each.option_strings and each.help != argparse.SUPPRESS]


def _bash(commands: Commands) -> str:
    groups: dict[str, list[str]] = {}
    for name in commands:
        first, _, second = name.partition(" ")
        groups.setdefault(first, []).extend([second] if second else [])
    values = [
        f'    "{name} {flag}") words="{_choices(action)}" ;;'
        for name, actions in commands.items()
        for action in actions
        if action.choices
        for flag in action.option_strings
    ]
    flags = [f'      "{name}") words="{" ".join(seconds)}" ;;' for name, seconds in groups.items() if seconds] + [
        f'      "{name}") [[ "$cur" != -* ]] || words="{" ".join(f for a in actions for f in a.option_strings)}" ;;'
        for name, actions in commands.items()
    ]
    return BASH.format(
        commands=" ".join(groups), groups="|".join(name for name, seconds in groups.items() if seconds),
        values="\n".join(values), flags="\n".join(flags),
    )  # fmt: skip


def _fish(about: Mapping[str, str], commands: Commands) -> Iterator[str]:
    given = "(string join ' ' -- jpaged (commandline -opc)[2..])"  # the words before the one that is completed
    for name, actions in commands.items():
        *group, last = name.split()
        place = _quoted(f"test {given} = '{' '.join(['jpaged', *group])}'")
        yield f"complete -c jpaged -n {place} -f -a {last} -d {_quoted(about[name])}"
        if group:
            yield f"complete -c jpaged -n {_quoted(f'test {given} = jpaged')} -f -a {' '.join(group)}"
        place = _quoted(f"string match -q 'jpaged {name}*' -- {given}")
        for action in actions:
            value = "" if action.nargs == 0 else f" -x -a '{_choices(action)}'" if action.choices else " -r"
            for flag in action.option_strings:
                kind = f"-l {flag[2:]}" if flag.startswith("--") else f"-s {flag[1:]}"
                yield f"complete -c jpaged -n {place} {kind}{value} -d {_quoted(str(action.help))}"


def _choices(action: argparse.Action) -> str:
    return " ".join(map(str, action.choices or ()))


def _quoted(text: str) -> str:
    return '"' + re.sub(r'(["\\\\$])', r"\\\1", text) + '"'
