"""A process told so that another one on the same machine can see whether it still lives."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from pathlib import Path

PROC = Path("/proc")
# Field 22 of /proc/<pid>/stat, counted behind the name in brackets, which may hold anything.
_STATE, _START_TIME = 0, 19
_DEAD = "ZXx"


@dataclass(frozen=True, slots=True)
class ProcessMark:
    """A process; `machine` is empty where the system tells too little to know it again."""

    machine: str
    """One boot of one machine and one space of process ids: containers number theirs anew."""
    pid: int
    start_time: str
    """In ticks since the boot: process ids are used again."""

    def is_here(self) -> bool:
        """True where this process is on the same machine, so that their clocks since the boot are one."""
        return bool(self.machine) and self.machine == _machine()

    def is_gone(self) -> bool:
        """True only where the process surely is no more."""
        return self.is_here() and _start_time(self.pid) != self.start_time


def this_process() -> ProcessMark:
    """The mark of the process that asks."""
    pid = os.getpid()
    start_time = _start_time(pid)
    return ProcessMark(_machine() if start_time else "", pid, start_time)


def seconds_since_boot() -> float:
    """A clock that all processes of a machine share; it counts while a laptop sleeps."""
    return time.clock_gettime(getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC))


def _machine() -> str:
    try:
        boot = (PROC / "sys/kernel/random/boot_id").read_text().strip()
        return f"{boot}/{os.readlink(PROC / 'self/ns/pid')}"
    except OSError:
        return ""


def _start_time(pid: int) -> str:
    """Empty for a process that is not there, or only waits to be buried."""
    try:
        fields = (PROC / str(pid) / "stat").read_text().rpartition(")")[2].split()
    except OSError:
        return ""
    return "" if fields[_STATE] in _DEAD else fields[_START_TIME]
