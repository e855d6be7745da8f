"""Every command's help, and errors about mistakes, which come before jax is loaded."""

import re
import shlex
import subprocess
import sys

import pytest

from jpaged.cli import main as cli
from jpaged.cli.main import COMMANDS, load, main, parser
from tests.bench.fake_server import FakeServer
from tests.support.patience import PATIENCE_S


def ended(argv):
    """The exit status, as a process would have it."""
    with pytest.raises(SystemExit) as error:
        main(argv)
    code = error.value.code
    return code if isinstance(code, int | None) else 1


def made(command):
    return parser(command, load(command), f"jpaged {command}")


@pytest.mark.parametrize("argv", [["--help"], ["-h"]])
def test_the_overview_names_every_command(argv, capsys):
    assert ended(argv) is None
    text = capsys.readouterr().out
    assert all(f"  {name} " in text and about in text for name, about in COMMANDS.items())


def test_without_a_command_there_is_the_overview_and_no_success(capsys):
    assert ended([]) == 2 and "bench serve" in capsys.readouterr().out
    assert ended(["bench"]) == 2
    text = capsys.readouterr().out
    assert "  bench serve " in text and "  chat " not in text


@pytest.mark.parametrize("command", COMMANDS)
def test_help_explains_every_flag(command, capsys):
    assert ended([*command.split(), "--help"]) == 0
    text = " ".join(capsys.readouterr().out.split())
    for action in made(command)._actions:
        assert action.help, action
        assert all(flag in text for flag in action.option_strings)
        shown = action.option_strings and action.default not in (None, False, [], "==SUPPRESS==")
        if shown and "default" not in action.help:
            assert f"(default: {action.default})" in text


@pytest.mark.parametrize("command", COMMANDS)
def test_the_examples_of_the_help_are_taken(command, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "serve.yaml").write_text("port: 8000")
    examples = [line for line in (load(command).__doc__ or "").splitlines() if line.startswith("  ")]
    assert examples
    for example in examples:
        words = shlex.split(re.split(r"(?<=\S)   *(?=\w)|<", example.partition("|")[2] or example)[0])
        assert words[: 1 + len(command.split())] == ["jpaged", *command.split()]
        made(command).parse_args(words[1 + len(command.split()) :])


def test_help_needs_no_jax():
    lines = ["import contextlib, sys", "from jpaged.cli.main import COMMANDS, main"]
    for command in ("", *COMMANDS):
        lines += ["with contextlib.suppress(SystemExit):", f"    main([*{command!r}.split(), '--help'])"]
    lines += ["sys.exit(int(bool({'jax', 'transformers'} & set(sys.modules))))"]
    code = "\n".join(lines)
    assert subprocess.run([sys.executable, "-c", code], stdout=subprocess.DEVNULL).returncode == 0
    code = code.replace("sys.exit(", "sys.modules['jax'] = None; sys.exit(")  # it can fail
    assert subprocess.run([sys.executable, "-c", code], stdout=subprocess.DEVNULL).returncode == 1


@pytest.mark.parametrize(
    "line, words",
    [
        ("serve --max-num-seq 8", "jpaged serve: error: unknown flag --max-num-seq; did you mean --max-num-seqs?"),
        ("serve --prot=8123", "jpaged serve: error: unknown flag --prot; did you mean --port?"),
        ("chat --request-rate 3", "unknown flag --request-rate; it is one of jpaged bench serve"),
        ("convert a b --to orbax --url x", "it is one of jpaged chat, jpaged complete, jpaged bench serve"),
        ("bench serve --frobnicate", "unknown flag --frobnicate; jpaged bench serve --help lists them"),
        ("serve --max-model 8", "unknown flag --max-model; did you mean --max-model-len?"),  # and not an abbreviation
        ("srve", "jpaged: error: unknown command srve; did you mean jpaged serve?"),
        ("bench srve", "jpaged: error: unknown command bench srve; did you mean jpaged bench serve?"),
        ("frobnicate", "unknown command frobnicate; jpaged --help lists the commands"),
        ("--vesion", "unknown flag --vesion; did you mean jpaged --version?"),
        ("complete x --chat-template /no/t.jinja", "argument --chat-template: no such file: /no/t.jinja"),
        ("serve --chat-template missing.jinja", "argument --chat-template: no such file: missing.jinja"),
        ("serve --ssl-keyfile /no/key", "argument --ssl-keyfile: no such file: /no/key"),
        ("serve --ssl-certfile /no/such.pem", "argument --ssl-certfile: no such file: /no/such.pem"),
        ("serve --enable-dbx", "unknown flag --enable-dbx; did you mean --enable-dbo?"),
        ("serve --enable-loops", "unknown flag --enable-loops; jpaged serve --help lists them"),  # not --enable-lora
        ("serve --gpu-memory", "unknown flag --gpu-memory; did you mean --gpu-memory-utilization?"),
        ("serve --max-num", "unknown flag --max-num; jpaged serve --help lists them"),  # of several
        ("serve --dtype int8", "argument --dtype: invalid choice: 'int8'"),
        ("convert a b", "the following arguments are required: --to"),
        ("bench serve --goodput ttft", "argument --goodput: invalid limit value: 'ttft'"),
    ],
)
def test_mistakes_are_named_in_one_line(line, words, capsys):
    assert ended(line.split()) == 2
    said = capsys.readouterr()
    assert words in said.err and said.err.count("\n") == 1 and said.out == ""


def test_what_follows_two_dashes_is_no_flag():
    args = made("complete").parse_args(["--n", "2", "--", "--max-num-seq", "a -- b"])
    assert args.prompts == ["--max-num-seq", "a -- b"]
    for text in ("--a dash, and a space", "--lora-a b", "trust_remote-code.x=1"):
        assert made("complete").parse_args([text]).prompts == [text]


@pytest.mark.parametrize(
    "line, words",
    [
        ("complete x --url http://127.0.0.1:9", "jpaged complete: error: no connection: http://127.0.0.1:9"),
        ("complete x --url ftp://a", "jpaged complete: error: url: must begin with http:// or https://, not 'ftp://a'"),
        ("complete x --model /no/where", "jpaged complete: error: model: /no/where is not a directory"),
        ("complete x --url http://a --block-size 8", "--block-size is for a model in this process"),
        ("bench serve --concurrency 0", "jpaged bench serve: error: concurrency: must be at least 1, not 0"),
        ("bench throughput --workload file", "jpaged bench throughput: error: file: the workload file needs one"),
        ("convert /no/where t --to orbax", "jpaged convert: error: model: /no/where is not a directory"),
        ("serve --block-size 0", "jpaged serve: error: block_size: must be a power of two between 1 and 256, not 0"),
    ],
)
def test_errors_are_one_line(line, words):
    with pytest.raises(SystemExit) as error:
        main(line.split())
    assert words in error.value.code and "\n" not in error.value.code


def test_interrupts_are_quiet(monkeypatch, capsys):
    def interrupted(args):
        raise KeyboardInterrupt

    monkeypatch.setattr(load("convert"), "run", interrupted)
    assert ended(["convert", "a", "b", "--to", "orbax"]) == 130
    assert capsys.readouterr() == ("", "")


def test_a_reader_that_goes_away_ends_it_quietly():
    with FakeServer(answer=lambda body: ["text "] * 5000).serving() as url:
        command = [sys.executable, "-m", "jpaged.cli.main", "complete", "x", "--url", url]
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
            process.stdout.read(5)
            process.stdout.close()
            assert process.stderr.read() == b"" and process.wait(PATIENCE_S) == 1


def test_version(capsys, monkeypatch):
    main(["--version"])
    assert re.fullmatch(r"jpaged \d+\.\d+\.\d+\n", capsys.readouterr().out)
    monkeypatch.setattr(cli.importlib.metadata, "version", lambda name: cli.importlib.metadata.distribution("no-such"))
    main(["--version"])
    assert capsys.readouterr().out == "jpaged (not installed)\n"
