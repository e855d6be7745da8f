"""Steps of an engine in which a request that raises an exception ends alone."""

import logging
from collections.abc import Iterable

from jpaged.core.params import SamplingParams
from jpaged.core.plan import ParamsDeleted
from jpaged.core.request import Request
from jpaged.engine.engine import Engine, StepOutput

logger = logging.getLogger(__name__)

PROBE = "probe of the engine"  # request id


class Guard:
    """Steps of an engine, and the search for the request that makes a step fail.

    The scheduler knows the request that it is working on, and an exception there ends it at once. An exception on the
    device side names no request. All requests are then computed again. If another exception comes before each of them
    has a further token, the search halves the group of suspects, and tries each half without the other requests.
    """

    def __init__(self, engine: Engine):
        self._engine = engine
        # Groups of requests to try, the present one last, with the number of tokens of each request at the beginning.
        self._groups: list[dict[Request, int]] = []
        self._is_trying = False  # these groups, without the other requests

    def step(self) -> StepOutput:
        """Run `Engine.step`.

        Raises:
            ParamsDeleted: as `Engine.step`.
            Exception: a failure that is not due to a request.
        """
        self._go_on()
        try:
            output = self._engine.step()
        except ParamsDeleted:
            raise
        except Exception as error:
            output = self._search(error)
        for request, cause in output.faults.items():
            logger.error("request %s ended by a fault of its own", request.request_id, exc_info=cause)
        return output

    def _go_on(self) -> None:
        """Begin the trial of the next group if each request of the present one has ended, or has a further token."""
        scheduler = self._engine.scheduler
        if self._is_trying and not scheduler.is_trying:  # new parameters, for example, have started all requests again
            self._groups, self._is_trying = [], False
        while self._groups and not self._suspects(self._groups[-1]):
            self._groups.pop()
            if self._is_trying:
                scheduler.release(self._groups[-1] if self._groups else None)
                self._is_trying = bool(self._groups)

    def _suspects(self, requests: Iterable[Request]) -> list[Request]:
        """Return the requests without a further token since the beginning of their trial."""
        before = self._groups[-1] if self._groups else {}
        return [r for r in requests if not r.finished and before.get(r, _num_tokens(r)) == _num_tokens(r)]

    def _search(self, error: Exception) -> StepOutput:
        scheduler = self._engine.scheduler
        suspects = self._suspects(self._groups[-1] if self._is_trying else scheduler.touched)
        if not self._groups and suspects:
            logger.warning("a step failed, and its requests are computed again: %s: %s", type(error).__name__, error)
            self._groups = [_progress(suspects)]
        elif len(suspects) > 1:
            half = len(suspects) // 2
            self._groups[-1:] = [_progress(suspects[half:]), _progress(suspects[:half])]
            self._is_trying = True
            self._engine.restart(tried=self._groups[-1])
        elif suspects and self._is_sound():
            self._groups, self._is_trying = [], False
            self._engine.restart(expelled=suspects)
            return StepOutput(faults={suspects[0]: error})
        else:
            raise error
        return StepOutput()

    def _is_sound(self) -> bool:
        """Return whether the engine can compute a simple request without the others."""
        engine = self._engine
        engine.restart(tried=())
        probe = engine.add(PROBE, [0], SamplingParams(max_tokens=1, temperature=0, seed=0))
        engine.scheduler.release([probe])
        try:
            while not probe.finished:
                engine.step()
        except Exception:
            logger.exception("the engine can't compute any request")
            engine.abort(PROBE)
        return bool(probe.sequences[0].samples)


def _num_tokens(request: Request) -> int:
    return sum(len(sequence.samples) for sequence in request.sequences)


def _progress(requests: list[Request]) -> dict[Request, int]:
    return {request: _num_tokens(request) for request in requests}
