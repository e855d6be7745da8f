"""Print a script that completes commands, flags and their choices in a shell.

  jpaged completion bash     for ~/.local/share/bash-completion/completions/jpaged
  jpaged completion zsh      for a file _jpaged in a directory of $fpath
  jpaged completion fish     for ~/.config/fish/completions/jpaged.fish

The script contains the flags of this version; print it again after an upgrade.
"""

import argparse

SHELLS = ("bash", "zsh", "fish", "tcsh")


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add the argument of `jpaged completion`."""
    parser.usage = "%(prog)s SHELL"
    parser.add_argument("shell", metavar="SHELL", choices=SHELLS, help=", ".join(SHELLS))


def run(args: argparse.Namespace) -> None:
    """Run `jpaged completion`: the script is of one parser with all commands below it."""
    import shtab

    from jpaged.cli.main import COMMANDS, load

    root = argparse.ArgumentParser("jpaged")
    groups = {"": root.add_subparsers()}
    for name, text in COMMANDS.items():
        group, _, last = name.rpartition(" ")
        if group not in groups:
            groups[group] = groups[""].add_parser(group, help=f"{group} commands").add_subparsers()
        command = groups[group].add_parser(last, help=text)
        load(name).add_flags(command)
        for action in command._actions:
            if action.nargs != 0 and not action.choices:
                action.complete = shtab.FILE  # type: ignore[attr-defined]
    print(shtab.complete(root, args.shell))
