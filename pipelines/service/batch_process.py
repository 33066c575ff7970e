"""The process of one batch's job: `python -m pipelines.service.batch_process`, its config on stdin.

It ends as `batch_generate` does, by the same exit codes, and when stdin ends: then the service is no more.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from types import FrameType
from typing import NoReturn

from pipelines.batch import run_batch
from pipelines.config import BatchConfig
from pipelines.errors import JobError

STDIN = 0


def main() -> int:
    signal.signal(signal.SIGTERM, _leave)
    # Unbuffered: at the end of a process nobody may wait for the lock of a buffer.
    with open(STDIN, "rb", buffering=0, closefd=False) as stdin:
        config = BatchConfig.model_validate_json(stdin.readline())
    threading.Thread(target=_end_with_stdin, name="parent", daemon=True).start()
    try:
        return run_batch(config, progress=sys.stderr).exit_code
    except JobError as error:
        print(error, file=sys.stderr)
        return error.exit_code


def _leave(number: int, frame: FrameType | None) -> NoReturn:
    """By the way that gives the lease back and ends the cluster."""
    sys.exit(128 + number)


def _end_with_stdin() -> None:
    while os.read(STDIN, 4096):
        pass
    os.kill(os.getpid(), signal.SIGTERM)


if __name__ == "__main__":
    sys.exit(main())
