"""A driver in a process of its own, on the cluster of RAY_ADDRESS, that can be killed in the middle of a job.

python -m tests.pipelines.chaos_driver <pickled config and faults>; ends as `batch_generate.py` does.
"""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from pathlib import Path

import pytest

from pipelines.batch import run_batch
from pipelines.config import BatchConfig
from pipelines.errors import JobError
from tests.pipelines.chaos import Chaos, among_faults, chaos_factory

ROOT = Path(__file__).resolve().parents[2]


def start_driver(config: BatchConfig, chaos: Chaos, address: str) -> subprocess.Popen[str]:
    """The driver's process."""
    asked = chaos.folder / "driver.pickle"
    asked.write_bytes(pickle.dumps((config, chaos)))
    return subprocess.Popen(
        [sys.executable, "-m", "tests.pipelines.chaos_driver", str(asked)],
        cwd=ROOT,
        env={**os.environ, "RAY_ADDRESS": address},
        text=True,
        stderr=subprocess.PIPE,
    )


def main(asked: str) -> int:
    config, chaos = pickle.loads(Path(asked).read_bytes())
    chaos.here_is("driver", os.getpid())
    with pytest.MonkeyPatch.context() as patch:
        among_faults(config, chaos, patch)
        try:
            return run_batch(config, sys.stderr, chaos_factory(chaos)).exit_code
        except JobError as error:
            print(error, file=sys.stderr)
            return error.exit_code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
