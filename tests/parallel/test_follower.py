"""A follower dispatches the plans of well-formed frames, and ends with its reason at any other."""

import os
import socket
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from jpaged.core.params import SamplingParams
from jpaged.core.plan import Admitted, Done, Scheduled, StepPlan, StepResult
from jpaged.parallel.channel import Channel
from jpaged.parallel.follower import replay
from jpaged.parallel.frame import Frame, FrameError, Kind, encode_frame
from jpaged.parallel.mask_frame import encode_masks
from jpaged.parallel.plan_frame import Sizes, encode_plan
from tests.support.patience import PATIENCE_S

SIZES = Sizes(
    num_rows=2, max_model_len=16, max_num_batched_tokens=8, table_width=4, vocab_size=40, num_blocks=8,
    num_host_blocks=0,
)  # fmt: skip
ROOT = Path(__file__).parents[2]


class FakeRunner:
    """It keeps the plans and the masks that it is given."""

    class blocks:
        pool = ()

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
    admitted = Admitted(0, (token,), 1, SamplingParams(), 0, (0,))
    masks = ((0, frozenset([3])),) if masked else ()
    return StepPlan(rows=(Scheduled(0, 0, 1, 1),), admitted=(admitted,), masked=masks)


def plan_frame(*args, **options) -> Frame:
    return Frame(Kind.PLAN, encode_plan(plan(*args, **options)))


MASKS = np.array([[5, 6]], np.uint32)
END, RECOVER = Frame(Kind.END), Frame(Kind.RECOVER)


def test_plans_and_masks_are_dispatched_in_order():
    runner = FakeRunner()
    frames = iter(
        [plan_frame(1), plan_frame(2, masked=True), Frame(Kind.MASKS, encode_masks(MASKS)), plan_frame(3), END]
    )
    replay(runner, SIZES, frames.__next__)
    assert runner.calls == [plan(1), plan(2, masked=True), MASKS.tolist(), plan(3)]


def test_a_dropped_step_is_recovered_from():
    runner = FakeRunner()
    frames = iter([plan_frame(1, masked=True), RECOVER, plan_frame(2), RECOVER, plan_frame(3), END])
    replay(runner, SIZES, frames.__next__)
    assert runner.calls == [plan(1, masked=True), "recover", plan(2), "recover", plan(3)]


@pytest.mark.parametrize(
    "frames, words, executed",
    [
        ([Frame(Kind.PLAN, b"\0")], "plan: must have at least 4 bytes, not 1", 0),
        ([plan_frame(1), plan_frame(40)], "admitted.token_ids: must be below 40, not 40", 1),
        ([Frame(Kind.MASKS, encode_masks(MASKS))], "kind: must be", 0),
        ([Frame(Kind.WELCOME, b"{}")], "kind: must be", 0),
        ([plan_frame(1, masked=True), plan_frame(2)], "kind: must be .* after a plan with masks", 1),
        ([plan_frame(1, masked=True), Frame(Kind.MASKS, encode_masks(MASKS[:, :1]))], "masks: must be", 1),
    ],
)
def test_a_malformed_frame_is_refused_and_not_executed(frames, words, executed):
    runner = FakeRunner()
    with pytest.raises(FrameError, match=words):
        replay(runner, SIZES, iter([*frames, END]).__next__)
    assert runner.calls == [plan(1), plan(1, masked=True)][:executed] or runner.calls == [plan(1, masked=True)]


FOLLOWER = """
import os, socket, sys
from jpaged.config import Limits
from jpaged.parallel import follower
from jpaged.parallel.channel import Channel
from tests.parallel.test_follower import SIZES, FakeRunner

follower.sizes_of = lambda *_: SIZES
runner = FakeRunner()
dispatch = runner.dispatch
runner.dispatch = lambda *args: os.write(1, b"dispatched\\n") and dispatch(*args)
connected = socket.create_connection(("127.0.0.1", int(sys.argv[1])))
follower.follow(runner, None, follower.Leader(Channel(connected, "leader")))
"""
CORRUPT = bytearray(encode_frame(plan_frame(2)))
CORRUPT[-1] ^= 1


@pytest.mark.parametrize(
    "data, words",
    [
        (bytes(CORRUPT), "checksum: must be 0x"),
        (encode_frame(Frame(Kind.PLAN, b"\xff" * 8)), "plan: 4294967295 words need 17179869184 bytes, but it has 8"),
        (b"GET / HTTP/1.1\r\n\r\n", "magic: must be b'JPGD', not b'GET '"),
        (b"JPGD\1\0\5\0\xff\xff\xff\xff\0\0\0\0", "payload: must have at most 268435456 bytes, not 4294967295"),
    ],
    ids=["corrupted", "malformed", "not a frame", "oversized"],
)
def test_a_process_ends_with_its_reason_at_a_malformed_frame(data, words):
    """It tells the leader, too, and has executed the plans before the frame only."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        command = [sys.executable, "-c", FOLLOWER, str(server.getsockname()[1])]
        pipes = dict(stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        with subprocess.Popen(command, cwd=ROOT, text=True, **pipes) as process:
            connected, _ = server.accept()
            with connected:
                connected.sendall(encode_frame(plan_frame(1)) + data)
                kind, payload = Channel(connected, "follower").receive(timeout_s=PATIENCE_S)
                out, err = process.communicate(timeout=PATIENCE_S)
    assert kind == Kind.FAULT and words in payload.decode()
    assert process.returncode == os.EX_PROTOCOL == 76 and out in ("dispatched\n", "")
    assert err.count("\n") == 1 and "replica ended: malformed frame from the leader: " + words in err
