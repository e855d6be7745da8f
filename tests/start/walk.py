"""The way of the configuration through the start of an engine: how many files a reader must follow it through.

A function is on the way if an `EngineConfig`, a `Setup`, a `Resolved` or a `Measured` is among its arguments or local
variables, or if such a function passes arguments to it. Functions are counted in the order of their first calls.

    python -m tests.start.walk MODEL      in a process of its own, because caches change which functions run
"""

import itertools
import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, NamedTuple

from jpaged.config import EngineConfig
from jpaged.runtime.block_store import BlockStore
from jpaged.runtime.device_rows import DeviceRows
from jpaged.runtime.runner import ModelRunner
from jpaged.start import measure
from jpaged.start.load import load_engine
from jpaged.start.measure import Measured
from jpaged.start.resolve import Resolved
from jpaged.start.setup import Setup
from tests.repository.test_layers import RANK, ROOT, module_name, package

CONFIGURATION = (EngineConfig, Setup, Resolved, Measured)
TOOL = 4  # an id of sys.monitoring that no other tool takes
PRODUCT = (str(ROOT / "jpaged"), str(ROOT / "pallas_kernels"))


class Walk(NamedTuple):
    """The files of the way, one for each stay.

    Attributes:
        climbs: stays that follow one in a file of a lower layer.
    """

    stays: list[str]

    @property
    def files(self) -> set[str]:
        return set(self.stays)

    @property
    def climbs(self) -> int:
        ranks = [RANK[package(module_name(Path(file))) or ""] for file in self.stays]
        return sum(after > before for before, after in itertools.pairwise(ranks))


class _Call:
    def __init__(self, code: CodeType, caller: "_Call | None"):
        self.code, self.caller, self.holds = code, caller, False
        names = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
        self.takes_arguments = names not in ((), ("self",))


def walk_of(start: Callable[[], Any]) -> Walk:
    """Return the way of the configuration through a call."""
    calls: list[_Call] = []
    running: dict[FrameType | None, _Call | None] = {None: None}

    def on_start(code: CodeType, *_: Any) -> Any:
        if not code.co_filename.startswith(PRODUCT):
            return sys.monitoring.DISABLE
        frame = above = sys._getframe(1)
        while (above := above and above.f_back) not in running:
            pass
        running[frame] = _Call(code, running[above])
        calls.append(running[frame])

    def on_return(code: CodeType, *_: Any) -> Any:
        if not code.co_filename.startswith(PRODUCT):
            return sys.monitoring.DISABLE
        frame = sys._getframe(1)
        if call := running.pop(frame, None):
            call.holds = any(isinstance(value, CONFIGURATION) for value in frame.f_locals.values())

    events = sys.monitoring.events
    sys.monitoring.use_tool_id(TOOL, "walk")
    sys.monitoring.register_callback(TOOL, events.PY_START, on_start)
    sys.monitoring.register_callback(TOOL, events.PY_RETURN, on_return)
    sys.monitoring.set_events(TOOL, events.PY_START | events.PY_RETURN)
    try:
        start()
    finally:
        sys.monitoring.set_events(TOOL, 0)
        sys.monitoring.free_tool_id(TOOL)
    on_the_way = [call for call in calls if call.holds or (call.takes_arguments and call.caller and call.caller.holds)]
    functions = dict.fromkeys((call.code.co_filename, call.code.co_qualname) for call in on_the_way)
    return Walk([file for file, _ in itertools.groupby(file for file, _ in functions)])


def main(model: str) -> None:
    compiling = (ModelRunner, "run_padding"), (ModelRunner, "compile_later"), (BlockStore, "warm_up")
    for owner, name in (*compiling, (DeviceRows, "warm_up")):
        setattr(owner, name, lambda *_, **__: None)  # compiles nothing
    measure.stored_costs = lambda _, key, buckets, *__: dict.fromkeys(buckets, 1.0)
    config = EngineConfig(model=model, max_num_seqs=2, max_num_batched_tokens=8, swap_space=0)
    walk = walk_of(lambda: load_engine(config, progress=False))
    files = [str(Path(file).relative_to(ROOT)) for file in walk.stays]
    print(json.dumps({"files": len(walk.files), "climbs": walk.climbs, "stays": files}))


if __name__ == "__main__":
    main(sys.argv[1])
