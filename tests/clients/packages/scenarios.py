"""The frame of the scripts beside this file: each runs its scenarios with one client package against a server.

`uv run --script SCRIPT URL` prints lines of JSON: the versions of the packages, then for each scenario its name and
the traceback of its failure, or null.
"""

import asyncio
import inspect
import json
import re
import socket
import subprocess
import sys
import time
import traceback
import urllib.request
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path

sys.stdout = sys.stderr  # Some packages print.
URL = sys.argv[1]
MODEL = "demo"
PROMPT = "Tell me a story about a fox."
# Generating so many tokens takes seconds.
MANY = 900
LONG = {"max_tokens": MANY, "extra_body": {"ignore_eos": True}}
TIMEOUT_S = 120


def metric(name: str) -> float:
    """Return the sum of the server's samples of a metric."""
    with urllib.request.urlopen(f"{URL}/metrics", timeout=TIMEOUT_S) as response:
        lines = response.read().decode().splitlines()
    return sum(float(line.split()[-1]) for line in lines if line.startswith(name))


@contextmanager
def cancelled():
    """Check that the request of LONG that the block begins and cancels ends early."""
    before, end = metric("vllm:generation_tokens_total"), time.monotonic() + TIMEOUT_S
    yield
    while metric("vllm:num_requests_running"):
        assert time.monotonic() < end, "the cancelled request goes on"
        time.sleep(0.02)
    generated = metric("vllm:generation_tokens_total") - before
    assert 0 < generated < MANY, f"{generated} tokens were generated"


@contextmanager
def raises(kind, words: str = ""):
    """Check that the block raises an exception of a kind whose message contains the words."""
    try:
        yield
    except kind as error:
        assert words in str(error), error
    else:
        raise AssertionError(f"no {kind.__name__} was raised")


def say(text: str) -> str:
    """Return a text that makes the scripted server answer with another one."""
    return f"<<say>>{text}<<done>>"


def call(name: str, **arguments: str) -> str:
    """Return a call as the scripted model writes it."""
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


# A loop of three turns: the results of its two calls have the scripts of the turns that follow.
QUESTION = f"Is it warmer in Rome or in Oslo? {say('I look.' + call('weather', city='Rome'))}"
ANSWER = "It is warmer in Rome."
WEATHER = {"Rome": f"25 degrees {say(call('weather', city='Oslo'))}", "Oslo": f"5 degrees {say(ANSWER)}"}


@contextmanager
def program(name: str, *flags, path: str):
    """Run a server of the client's packages within the block, from when it answers at the path; yield its address."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    address, end = f"http://127.0.0.1:{port}", time.monotonic() + TIMEOUT_S
    command = [Path(sys.executable).with_name(name), *flags, "--host", "127.0.0.1", "--port", str(port)]
    process = subprocess.Popen(command, stdout=sys.stderr)
    try:
        while True:
            try:
                urllib.request.urlopen(address + path, timeout=5).close()
                break
            except OSError:
                assert time.monotonic() < end and process.poll() is None, f"{name} does not start"
                time.sleep(0.2)
        yield address
    finally:
        process.terminate()
        process.wait()


def versions() -> dict[str, str]:
    """Return the installed versions of the packages that the script declares."""
    declared = re.search(r"^# dependencies = \[(.*)\]$", Path(sys.argv[0]).read_text(), re.MULTILINE)[1]
    return {name: version(name) for name in re.findall(r'"([\w-]+)', declared)}


def run(*scenarios) -> None:
    """Run functions or coroutine functions in order, each whether or not the one before failed."""
    print(json.dumps({"versions": versions()}), file=sys.__stdout__, flush=True)
    for scenario in scenarios:
        error = None
        try:
            result = scenario()
            if inspect.iscoroutine(result):
                asyncio.run(result)
        except Exception:
            error = traceback.format_exc()
        print(json.dumps({"scenario": scenario.__name__, "error": error}), file=sys.__stdout__, flush=True)
