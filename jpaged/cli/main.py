"""`jpaged COMMAND`: find the command, parse its flags and run it. Only this command is imported."""

import importlib.metadata
import os
import sys
from collections.abc import Collection, Mapping, Sequence
from types import ModuleType

from jpaged.cli.loading import exit_on_interrupt
from jpaged.cli.parser import Parser, closest

COMMANDS = {
    "serve": "serve a model over HTTP with the OpenAI API",
    "worker": "follow a server on another host, which shares its model",
    "chat": "chat with a model in this process or on a server",
    "complete": "complete texts",
    "bench serve": "measure a server under load",
    "bench throughput": "measure an engine without a server",
    "plan": "predict the users that a GPU holds, and their latencies",
    "doctor": "report on this machine and test the kernels",
    "verify": "compute certified outputs again, and compare them to the bit",
    "convert": "convert a model's parameters to another format",
    "completion": "print a completion script for a shell",
}


def main(argv: Sequence[str] | None = None) -> None:
    """Run a command line; None: the command line of the process.

    Raises:
        SystemExit: status 1 for an error, 2 for a wrong command or flag, 130 after Ctrl-C.
    """
    words = list(sys.argv[1:] if argv is None else argv)
    if words[:1] in (["--version"], ["version"]):
        try:
            version = importlib.metadata.version("jpaged")
        except importlib.metadata.PackageNotFoundError:
            version = "(not installed)"
        return print(f"jpaged {version}")
    for length in (2, 1):
        if (name := " ".join(words[:length])) in COMMANDS:
            return run(name, words[length:])
    of_group = {name for name in COMMANDS if name.startswith(f"{' '.join(words[:1])} ")}
    rest = words[len(words[:1]) if of_group else 0 :]
    if not rest or rest[0] in ("-h", "--help"):
        print(overview(of_group or COMMANDS.keys()))
        sys.exit(None if rest else 2)
    command = " ".join(words[: 2 if of_group else 1])
    kind = "flag" if command.startswith("-") else "command"
    meant = closest(command, [*(of_group or COMMANDS), "--help", "--version"])
    hint = f"did you mean jpaged {meant}?" if meant else "jpaged --help lists the commands"
    sys.stderr.write(f"jpaged: error: unknown {kind} {command}; {hint}\n")
    sys.exit(2)


def run(command: str, argv: Sequence[str], prog: str | None = None) -> None:
    """Run one command; `prog` is its name in messages."""
    prog = prog or f"jpaged {command}"
    with exit_on_interrupt():
        module = load(command)
        args = parser(command, module, prog).parse_args(argv)
    for notice in args.notices:
        print(f"{prog}: {notice}", file=sys.stderr)
    try:
        module.run(args)
    except KeyboardInterrupt:
        sys.exit(130)
    except BrokenPipeError:  # the reader of the output has gone, and the rest can't be written at exit either
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
    except (ValueError, NotImplementedError, OSError) as error:
        sys.exit(f"{prog}: error: {' '.join(str(error).split())}")


def load(command: str) -> ModuleType:
    """Return a command's module: its docstring is the help text, and it defines `add_flags(parser)` and `run(args)`.

    If it accepts flags of vLLM and SGLang, its PEERS is their table.
    """
    return importlib.import_module(f"jpaged.cli.{command.replace(' ', '_')}")


def parser(command: str, module: ModuleType, prog: str) -> Parser:
    """Return the parser of a command; `prog` is its name in messages."""

    def flags_elsewhere() -> Mapping[str, Collection[str]]:
        others = {name: load(name) for name in COMMANDS if name != command}
        return {f"jpaged {name}": parser(name, other, name).flags for name, other in others.items()}

    made = Parser(prog, module.__doc__, getattr(module, "PEERS", None), flags_elsewhere)
    module.add_flags(made)
    return made


def overview(names: Collection[str]) -> str:
    """Return the help text of `jpaged`, with these commands."""
    width = max(map(len, names))
    lines = "\n".join(f"  {name:{width}}  {text}" for name, text in COMMANDS.items() if name in names)
    return f"""usage: jpaged COMMAND [flags]

A paged LLM engine for JAX.

{lines}

`jpaged COMMAND --help` explains a command and its flags. To begin with:

  jpaged complete "Once upon a time"   the demo model, nothing to download
  jpaged serve --port 8000             the same on http://127.0.0.1:8000
  jpaged chat --url http://127.0.0.1:8000"""


if __name__ == "__main__":
    main()
