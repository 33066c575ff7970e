"""Errors that end a job, each one clear sentence for the person who started it.

    JobError             exit code 1: the job broke off; running the same command again goes on
    ├── BudgetReached    exit code 3: the money is spent; a higher budget goes on
    └── JobRefused       exit code 2: the job cannot start as asked
        └── NotFound     an input, object or file that is not there

A bad row is no error here: it is data (`rows.RowError`). `dflash_engine.ConfigError` counts as refused too.
"""

from __future__ import annotations


class JobError(Exception):
    """The job could not go on; what is written stays and a rerun resumes."""

    exit_code = 1


class BudgetReached(JobError):
    """The job stopped because its budget is spent; what is written stays."""

    exit_code = 3


class JobRefused(JobError):
    """The job cannot start as asked; nothing was generated."""

    exit_code = 2


class NotFound(JobRefused):
    """Something named by the user is not there."""


def job_error(message: str, exit_code: int) -> JobError:
    """The error of an exit code, for one that was told by another process."""
    kinds = {kind.exit_code: kind for kind in (JobError, BudgetReached, JobRefused)}
    return kinds[exit_code](message)
