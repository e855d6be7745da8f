"""A follower dispatches the plans of well-formed frames, and ends with its reason at any other."""

import os
import socket
import subprocess
import sys
import zlib
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from jpaged.config import Limits
from jpaged.core.groups import Groups
from jpaged.core.params import SamplingParams
from jpaged.core.plan import Admitted, Done, Scheduled, StepPlan, StepResult
from jpaged.parallel.channel import Channel
from jpaged.parallel.follower import replay
from jpaged.parallel.frame import HEADER, VERSION, FrameError, Sizes, encode_frame, message_of
from jpaged.parallel.messages import End, Fault, Masks, Plan, Recover, Welcome
from tests.support.patience import PATIENCE_S

SIZES = Sizes(
    Limits(max_model_len=16, max_num_seqs=2, max_num_batched_tokens=8, block_size=4), vocab_size=40, num_blocks=8,
    num_host_blocks=0,
)  # fmt: skip
ROOT = Path(__file__).parents[2]


class FakeRunner:
    """It keeps the plans and the masks that it is given."""

    vocab_size = SIZES.vocab_size

    class blocks:
        pool, num_blocks, num_host_blocks = (), SIZES.num_blocks, SIZES.num_host_blocks
        cache = SimpleNamespace(groups=Groups(1, (None,), ((0, 0),)))

    class rows:
        state = ()

    def __init__(self):
        self.calls = []

    def dispatch(self, plan, make_masks=None):
        self.calls.append(plan)
        if make_masks is not None:
            self.calls.append(make_masks().tolist())
        return Done(StepResult(()))

    def recover(self):
        self.calls.append("recover")


def plan(token: int, *, masked: bool = False) -> StepPlan:
    admitted = Admitted(0, (token,), 1, SamplingParams(), 0, ((0,),))
    masks = ((0, frozenset([3])),) if masked else ()
    return StepPlan(rows=(Scheduled(0, 0, 1, 1),), admitted=(admitted,), masked=masks)


def sent(token: int, *, masked: bool = False) -> Plan:
    return message_of(plan(token, masked=masked))


MASKS = np.array([[5, 6]], "<u4")


def test_plans_and_masks_are_dispatched_in_order():
    runner = FakeRunner()
    messages = iter([sent(1), sent(2, masked=True), Masks(MASKS.tobytes()), sent(3), End()])
    replay(runner, SIZES, messages.__next__)
    assert runner.calls == [plan(1), plan(2, masked=True), MASKS.tolist(), plan(3)]


def test_a_dropped_step_is_recovered_from():
    runner = FakeRunner()
    messages = iter([sent(1, masked=True), Recover(), sent(2), Recover(), sent(3), End()])
    replay(runner, SIZES, messages.__next__)
    assert runner.calls == [plan(1, masked=True), "recover", plan(2), "recover", plan(3)]


@pytest.mark.parametrize(
    "messages, words, executed",
    [
        ([sent(1), sent(40)], "^admitted.token_ids: must be between 0 and 39, not 40$", 1),
        ([Masks(MASKS.tobytes())], "^message: must be Plan or Recover or End, not Masks$", 0),
        ([Welcome({})], "^message: must be Plan or Recover or End, not Welcome$", 0),
        ([sent(1, masked=True), sent(2)], "^message: must be Masks, not Plan$", 1),
        ([sent(1, masked=True), Masks(MASKS[:, :1].tobytes())], "^masks: must have 8 bytes, not 4$", 1),
    ],
)
def test_an_unexpected_message_is_refused_and_not_executed(messages, words, executed):
    runner = FakeRunner()
    with pytest.raises(FrameError, match=words):
        replay(runner, SIZES, iter([*messages, End()]).__next__)
    assert runner.calls == [plan(1), plan(1, masked=True)][:executed] or runner.calls == [plan(1, masked=True)]


FOLLOWER = """
import os, socket, sys
from jpaged.config import Limits
from jpaged.parallel import follower
from jpaged.parallel.channel import Channel
from tests.parallel.test_follower import SIZES, FakeRunner

runner = FakeRunner()
dispatch = runner.dispatch
runner.dispatch = lambda *args: os.write(1, b"dispatched\\n") and dispatch(*args)
connected = socket.create_connection(("127.0.0.1", int(sys.argv[1])))
follower.follow(runner, SIZES.limits, follower.Leader(Channel(connected, "leader")))
"""
CORRUPT = bytearray(encode_frame(sent(2)))
CORRUPT[-1] ^= 1
NO_MESSAGE = b"\x91\xa6Reboot"


@pytest.mark.parametrize(
    "data, words",
    [
        (bytes(CORRUPT), "checksum: must be 0x"),
        (
            HEADER.pack(b"JPGD", VERSION, len(NO_MESSAGE), zlib.crc32(NO_MESSAGE)) + NO_MESSAGE,
            "payload: Invalid value 'Reboot'",
        ),
        pytest.param(b"GET / HTTP/1.1\r\n\r\n", "magic: must be b'JPGD', not b'GET '", marks=pytest.mark.deep),
        pytest.param(
            b"JPGD\2\0\xff\xff\xff\xff\0\0\0\0",
            "payload: must have at most 268435456 bytes, not 4294967295",
            marks=pytest.mark.deep,
        ),
    ],
    ids=["corrupted", "malformed", "not a frame", "oversized"],  # test_frames.py has the words of every wrong header
)
def test_a_process_ends_with_its_reason_at_a_malformed_frame(data, words):
    """It tells the leader, too, and has executed the plans before the frame only."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        command = [sys.executable, "-c", FOLLOWER, str(server.getsockname()[1])]
        pipes = dict(stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        with subprocess.Popen(command, cwd=ROOT, text=True, **pipes) as process:
            connected, _ = server.accept()
            with connected:
                connected.sendall(encode_frame(sent(1)) + data)
                fault = Channel(connected, "follower").receive(timeout_s=PATIENCE_S)
                out, err = process.communicate(timeout=PATIENCE_S)
    assert isinstance(fault, Fault) and words in fault.reason
    assert process.returncode == os.EX_PROTOCOL == 76 and out in ("dispatched\n", "")
    assert err.count("\n") == 1 and "replica ended: malformed frame from the leader: " + words in err
