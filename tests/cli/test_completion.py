"""Completion scripts, and the ways to start the program."""

import subprocess
import sys

import pytest

from jpaged.cli.completion import SHELLS
from jpaged.cli.main import COMMANDS, main

COMPLETED = {
    "be": "bench",
    "bench ": "serve throughput",
    "serve --max-model": "--max-model-len",
    "serve --dtype b": "bfloat16",
    "serve --port 1 --dtype ": "auto float32 bfloat16 float16 half float",
    "bench serve --request-r": "--request-rate",
    "serve --request-r": "",
    "serve --chat-template /usr/bi": "/usr/bin",
    "serve /usr/bi": "/usr/bin",
}


def script(shell, capsys):
    main(["completion", shell])
    return capsys.readouterr().out


@pytest.mark.parametrize("shell", SHELLS)
def test_scripts_name_every_command_and_flag(shell, capsys):
    text = script(shell, capsys)
    assert all(word in text for name in COMMANDS for word in name.split())
    flags = ("max-model-len", "no-enable-prefix-caching", "burstiness")
    assert all(flag in text for flag in flags) and "pipeline-parallel-size" not in text


def test_bash_completes_commands_flags_choices_and_files(capsys):
    lines = [script("bash", capsys)]
    for typed in COMPLETED:
        words = " ".join(f"'{word}'" for word in typed.split(" "))
        lines.append(
            f'COMP_WORDS=(jpaged {words}) COMP_CWORD={len(typed.split(" "))}; _shtab_jpaged; echo "${{COMPREPLY[*]}}"'
        )
    done = subprocess.run(["bash"], input="\n".join(lines), capture_output=True, text=True)
    assert dict(zip(COMPLETED, done.stdout.splitlines())) == COMPLETED
    assert not done.stderr


def test_an_unknown_shell_is_an_error(capsys):
    with pytest.raises(SystemExit):
        main(["completion", "ksh"])
    assert "invalid choice: 'ksh'" in capsys.readouterr().err


def test_the_package_runs_as_a_module_and_has_its_version():
    done = subprocess.run([sys.executable, "-m", "jpaged", "version"], capture_output=True, text=True)
    import jpaged

    assert done.stdout == f"jpaged {jpaged.__version__}\n" and done.returncode == 0
    assert {"LLM", "__version__"} <= set(dir(jpaged))
