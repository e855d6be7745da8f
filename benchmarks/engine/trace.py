"""The kernels of steps back to back, from a trace of jax's profiler: their times, and the idle time between steps."""

import re
import statistics
import tempfile
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax


class Event(NamedTuple):
    """A kernel on the device; `module` is the executable that it belongs to, None if the trace does not tell."""

    start_ns: float
    end_ns: float
    module: str | None
    name: str = ""


def trace(dispatch: Callable[[], Any], steps: int) -> list[Event]:
    """Return the kernels of equal steps back to back, in order; `dispatch` starts a step and returns it pending."""
    options = jax.profiler.ProfileOptions()
    options.python_tracer_level = 0  # it would slow the host down
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder, profiler_options=options):
            for pending in [dispatch() for _ in range(steps)]:
                pending.result()
        paths = list(Path(folder).rglob("*.xplane.pb"))
        return sorted(_events(jax.profiler.ProfileData.from_file(str(paths[0])))) if paths else []


def idle_between(events: Sequence[Event], steps: int) -> float | None:
    """Return the median of the seconds from a step's last kernel to the next one's first, None if it is not known."""
    found = gaps(events, steps)
    return statistics.median(found) * 1e-9 if found else None


def busiest(events: Sequence[Event], steps: int, most: int = 16) -> list[dict[str, Any]]:
    """Return the kernels that take most of a step: name without numbers at its end, launches and microseconds."""
    times, launches = Counter[str](), Counter[str]()
    for event in events:
        name = re.sub(r"[_.]\d+$", "", event.name)[:80]
        times[name] += event.end_ns - event.start_ns
        launches[name] += 1
    return [
        dict(kernel=name, launches=launches[name] / steps, us=1e-3 * time_ns / steps)
        for name, time_ns in times.most_common(most)
    ]


def gaps(events: Sequence[Event], steps: int) -> list[float]:
    """Return the nanoseconds between equal steps, from their kernels in order; none if they can't be told apart."""
    modules = [event.module for event in events]
    if None in modules:  # equal steps have equally many kernels
        size, rest = divmod(len(events), steps)
        starts = list(range(0, len(events), size)) if size and not rest else []
    else:
        starts = [i for i, module in enumerate(modules) if module == modules[0] and (not i or modules[i - 1] != module)]
    if len(starts) != steps:
        return []
    return [max(0.0, events[i].start_ns - max(event.end_ns for event in events[:i])) for i in starts[1:]]


def _events(data: Any) -> Iterator[Event]:
    """Yield the kernels of a GPU, without copies; without a GPU the operations on the host that name their module."""
    planes = list(data.planes)
    device = [plane for plane in planes if plane.name.startswith("/device:GPU")]
    for plane in device or planes:
        for line in plane.lines:
            if line.name.startswith(("XLA ", "Steps", "Framework", "Source")):  # derived from the kernels
                continue
            for event in line.events:
                module = _module(event)
                if (device or module) and not event.name.lower().startswith(("memcpy", "memset")):
                    yield Event(event.start_ns, event.start_ns + event.duration_ns, module, event.name)


def _module(event: Any) -> str | None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of the binding's own class
        return next((str(value) for name, value in event.stats if name == "hlo_module"), None)
