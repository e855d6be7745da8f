"""`jpaged chat` and `jpaged complete`, with a model in the process and with one on a server."""

import io
import os
import pty
import signal
import subprocess
import sys
import time

import pytest

from jpaged.cli.main import main
from jpaged.core.params import SamplingParams
from jpaged.demo import DIRECTORY as DEMO
from jpaged.models.config_file import sampling_defaults
from tests.bench.fake_server import FakeServer
from tests.support.few_shapes import few_shapes
from tests.support.patience import PATIENCE_S

# The limits of the fixture `demo`, whose executables are then loaded.
FEW = ["--max-num-seqs", "16", "--max-num-batched-tokens", "32", "--max-model-len", "512",
       "--num-gpu-blocks-override", "512"]  # fmt: skip


def echo(body):
    """Return the prompt, word by word; of several choices each with its number."""
    asked = body["messages"][-1]["content"] if "messages" in body else body["prompt"]
    n = body.get("n", 1)
    return [f"{word}{i if n > 1 else ''} " for word in asked.split() for i in range(n)]


@pytest.fixture
def server():
    server = FakeServer(answer=echo)
    with server.serving() as server.url:
        yield server


def piped(monkeypatch, text):
    monkeypatch.setattr(sys, "stdin", io.StringIO(text))


def test_chat_says_one_message_from_stdin(server, monkeypatch, capsys):
    piped(monkeypatch, "Who are you?\n")
    main(["chat", "--url", server.url, "--system", "Be brief.", "--temperature", "0.5", "--top-p", "0.9", "--top-k",
          "7", "--max-tokens", "9", "--seed", "3", "--stop", "x", "--stop", "y"])  # fmt: skip
    assert capsys.readouterr().out == "Who are you? \n"
    assert server.bodies == [
        {
            "messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Who are you?"}],
            "model": "fake", "stream": True, "temperature": 0.5, "top_p": 0.9, "top_k": 7, "max_tokens": 9, "seed": 3,
            "stop": ["x", "y"],
        }
    ]  # fmt: skip


def test_what_is_left_open_is_left_to_the_server(server, monkeypatch):
    piped(monkeypatch, "Hello")
    main(["chat", "--url", server.url, "--model", "other"])
    assert server.bodies[0].keys() == {"messages", "model", "stream"} and server.bodies[0]["model"] == "other"


def test_complete_prints_a_single_continuation_as_it_comes(server, monkeypatch, capsys):
    piped(monkeypatch, "one day\nin may\n")
    main(["complete", "--url", server.url])
    assert capsys.readouterr().out == "one day in may \n"
    assert server.bodies == [{"prompt": "one day\nin may", "model": "fake", "stream": True, "max_tokens": 128}]


def test_complete_prints_several_under_their_prompts(server, capsys):
    main(["complete", "--url", server.url, "--n", "2", "a b", "c"])
    assert capsys.readouterr().out == "== a b (1)\na0 b0 \n== a b (2)\na1 b1 \n== c (1)\nc0 \n== c (2)\nc1 \n"
    main(["complete", "--url", server.url, "a b", "c"])
    assert capsys.readouterr().out == "== a b\na b \n== c\nc \n"


@pytest.mark.parametrize("argv", [["complete"], ["complete", "a", ""], ["chat"]])
def test_nothing_to_say(server, monkeypatch, argv):
    piped(monkeypatch, "\n")
    with pytest.raises(SystemExit, match="empty"):
        main([*argv, "--url", server.url])
    assert not server.bodies


@pytest.mark.parametrize("name", ["JPAGED_API_KEY", "OPENAI_API_KEY", None])
def test_keys_come_from_the_flag_or_from_the_environment(monkeypatch, name, capsys):
    server = FakeServer(answer=echo, api_key="secret")
    flags = [] if name else ["--api-key", "secret"]
    for each in ("JPAGED_API_KEY", "OPENAI_API_KEY"):
        monkeypatch.delenv(each, raising=False)
    with server.serving() as url:
        with pytest.raises(SystemExit, match="jpaged complete: error: HTTP 401: a valid API key is needed"):
            main(["complete", "a", "--url", url])
        if name:
            monkeypatch.setenv(name, "secret")
        main(["complete", "a", "--url", url, *flags])
    assert capsys.readouterr().out == "a \n"


def test_a_stream_that_breaks_is_an_error(capsys):
    words = "jpaged complete: error: error in the stream: the engine has failed"
    with FakeServer({0: "error"}, answer=echo).serving() as url, pytest.raises(SystemExit, match=words):
        main(["complete", "a b c d", "--url", url])
    assert capsys.readouterr().out == "a b "


def test_the_demo_model_in_this_process(demo, monkeypatch, capsys):
    with few_shapes():
        main(["complete", "Once upon a time", "The little fox", "--temperature", "0", "--max-tokens", "12", *FEW])
        completed = capsys.readouterr().out
        piped(monkeypatch, "Who are you?")
        main(["chat", "--system", "Be brief.", "--seed", "7", "--max-tokens", "12", *FEW])
        answer = capsys.readouterr().out

    greedy = SamplingParams(temperature=0, max_tokens=12)
    texts = [each.outputs[0].text for each in demo.generate(["Once upon a time", "The little fox"], greedy)]
    assert completed == f"== Once upon a time\n{texts[0]}\n== The little fox\n{texts[1]}\n" and texts[0] != texts[1]
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Who are you?"}]
    drawn = SamplingParams(**sampling_defaults(DEMO), seed=7, max_tokens=12)
    assert answer == demo.chat(messages, drawn)[0].outputs[0].text + "\n" and len(answer) > 10


class Terminal:
    """A command on a terminal of its own."""

    def __init__(self, *argv):
        self.own, other = pty.openpty()
        handler = signal.signal(signal.SIGINT, signal.SIG_IGN)  # as shells start their background jobs
        environment = os.environ | {"TERM": "dumb", "PYTHONUNBUFFERED": "1"}
        self.process = subprocess.Popen(
            [sys.executable, "-m", "jpaged.cli.main", *argv], stdin=other, stdout=other, stderr=other,
            start_new_session=True, env=environment,
        )  # fmt: skip
        signal.signal(signal.SIGINT, handler)
        os.close(other)
        self.text = ""

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.process.kill()
        self.process.wait()
        os.close(self.own)

    def until(self, words):
        """Read up to these words, and return the text with them."""
        end = time.monotonic() + PATIENCE_S
        while words not in self.text:
            assert time.monotonic() < end, self.text
            try:
                self.text += os.read(self.own, 4096).decode()
            except OSError:  # the other side has closed it
                raise AssertionError(self.text) from None
        read, _, self.text = self.text.partition(words)
        return read + words

    def type(self, text):
        os.write(self.own, text.encode())


def test_a_conversation(server):
    server.pause = 0.05
    with Terminal("chat", "--url", server.url, "--system", "Be kind.") as terminal:
        terminal.until("/help lists the commands.")
        terminal.until("> ")
        terminal.type("hello there\n")
        terminal.until("\nhello there \r\n> ")
        terminal.type("again\n")
        terminal.until("\nagain \r\n> ")
        assert [message["content"] for message in server.bodies[1]["messages"]] == [
            "Be kind.", "hello there", "hello there ", "again",
        ]  # fmt: skip
        terminal.type("/help\n")
        assert "/reset  forget the conversation" in terminal.until("> ")
        terminal.type("/rest\n")
        terminal.until("unknown command /rest; did you mean /reset?")
        terminal.type("/reset\n")
        terminal.until("A new conversation.")
        terminal.until("> ")
        terminal.type(" ".join(f"w{i}" for i in range(200)) + "\n")
        terminal.until("\nw0 w1 ")
        server.pause = PATIENCE_S
        terminal.process.send_signal(signal.SIGINT)  # the answer ends, the conversation goes on
        assert "w199" not in terminal.until("> ")
        server.pause = 0.05
        terminal.type("and now?\n")
        terminal.until("\nand now? \r\n> ")
        system, long, stopped, now = server.bodies[-1]["messages"]
        assert system["role"] == "system" and stopped["role"] == "assistant" and now["content"] == "and now?"
        assert stopped["content"].startswith("w0 w1 ") and len(stopped["content"]) < len(long["content"])
        terminal.type("\x04")
        assert terminal.process.wait(PATIENCE_S) == 0


def test_an_error_does_not_end_a_conversation():
    server = FakeServer({0: "refuse"}, answer=echo)
    with server.serving() as url, Terminal("chat", "--url", url) as terminal:
        terminal.until("> ")
        terminal.type("one\n")
        terminal.until("error: HTTP 503: too busy")
        terminal.until("> ")
        terminal.type("two\n")
        terminal.until("\ntwo \r\n> ")
        assert [message["content"] for message in server.bodies[1]["messages"]] == ["two"]
        terminal.type("\x04")
        assert terminal.process.wait(PATIENCE_S) == 0
