"""What files and batches need: a place for them, and the job that a batch is."""

from __future__ import annotations

from pathlib import Path

from pydantic import Field

from dflash_engine.yaml_settings import Section
from pipelines.storage_config import StorageConfig

WINDOW_S = 24 * 3600
"""OpenAI's only completion window."""


class BatchesConfig(Section):
    """The section `batches` of the service's settings."""

    root: str
    """Folder or `s3://` that files, batches and their jobs are kept under; all replicas share it."""
    job: Path
    """YAML with the settings of a batch's job, as for `jobs/batch_generate.py`; input, output and format are
    the batch's own. Its engine is to be the one that is served."""
    settings: tuple[str, ...] = ()
    """`dotted.key=value` changes of that file."""
    storage: StorageConfig = Field(default_factory=StorageConfig)
    """How `root` is reached."""
    max_file_bytes: int = Field(default=200 << 20, ge=1)
    max_requests: int = Field(default=50_000, ge=1)
    """Most lines of a batch."""
    window_s: int = Field(default=WINDOW_S, ge=1)
    """A batch that is not done by then expires, with what is done."""
    jobs_at_once: int = Field(default=1, ge=1)
    """Jobs that run side by side; further batches wait."""
    lease_s: float = Field(default=30.0, gt=0)
    """How long a controller that has gone silent keeps the batches for itself."""
    poll_s: float = Field(default=5.0, gt=0)
    """How often the controller looks at its jobs, and for batches that another replica was asked for."""
    stop_s: float = Field(default=30.0, gt=0)
    """How long a job that is told to end has for it."""
