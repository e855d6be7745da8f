"""End of a process whose replica can't go on, with one line in the log and a status for a supervisor."""

import os
import select
import sys
import threading
import time
import traceback
from typing import NoReturn

INVALID = 1  # a setting or a file is invalid, as in any command
LOST = os.EX_UNAVAILABLE  # 69: another process of the replica has ended or can't be reached
FAILED = os.EX_SOFTWARE  # 70: a computation of this process has failed
MALFORMED = os.EX_PROTOCOL  # 76: this process has received a malformed frame
INTERRUPTED = 130

# A lost process makes computations fail, too. The connection to it has this time to report the cause first.
CAUSE_TIMEOUT_S = 1.0
MAX_LINE_BYTES = 4096  # PIPE_BUF: a write of so many bytes to a ready pipe does not block
WRITE_TIMEOUT_S = 1.0

_lock = threading.Lock()  # the first thread ends the process


def end_process(reason: str, status: int) -> NoReturn:
    """Write the reason to stderr and end the process at once: its threads may wait in a collective for ever."""
    _lock.acquire()
    now = time.strftime("%Y-%m-%d %H:%M:%S")
    line = f"{now} CRITICAL jpaged.parallel: replica ended: {' '.join(reason.split())}"
    end = f" (exit status {status})\n".encode()
    if select.select([], [sys.stderr.fileno()], [], WRITE_TIMEOUT_S)[1]:
        os.write(sys.stderr.fileno(), line.encode()[: MAX_LINE_BYTES - len(end)] + end)
    os._exit(status)


def wait_for_cause(error: BaseException) -> None:
    """Wait after an error of jax until the connections have had the time to end the process with its cause."""
    if isinstance(error, RuntimeError):
        time.sleep(CAUSE_TIMEOUT_S)


def end_after_failure(error: BaseException) -> NoReturn:
    """End the process because its computation has failed, unless a lost process turns out to be the cause."""
    wait_for_cause(error)
    end_process(f"a computation has failed: {words_of(error)}", FAILED)


def end_after_error(error: BaseException) -> NoReturn:
    """End the process because of an error, whose type decides the status.

    The end of a connected process by an exception would wait for the others, and then be an abort by jax.
    """
    if isinstance(error, ValueError | NotImplementedError | OSError):
        end_process(words_of(error), INVALID)
    if isinstance(error, KeyboardInterrupt):
        end_process("interrupted", INTERRUPTED)
    traceback.print_exception(error)
    end_process(words_of(error), FAILED)


def words_of(error: BaseException) -> str:
    """Return an error in words: the messages of invalid settings begin with the name of the field."""
    return str(error) if isinstance(error, ValueError) else f"{type(error).__name__}: {error}"
