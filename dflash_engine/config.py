"""What an engine is made of: model, draft, precision, memory, and nothing that changes later."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from dflash_engine.errors import ConfigError, describe


class EngineConfig(BaseModel):
    """Settings of one engine, checked once and then frozen.

    Raises `ConfigError` that names the setting; an unknown key is an error.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    model: str = "smollm2-135m"
    """An embedded model's name, a Hugging Face id, a folder, or a GGUF file."""
    draft: str | None = "auto"
    """A draft folder or id; `auto` takes the one known for the model; `none` decodes plainly."""
    dtype: Literal["bfloat16", "float32"] = "bfloat16"
    device: str = "auto"
    """`auto`, `cpu`, `cuda` or `cuda:N`."""
    ops: Literal["auto", "reference", "cpu"] = "auto"
    """Which operations compute: torch reference, or the compiled CPU kernels."""
    block_length: int | None = Field(default=None, ge=1, le=64)
    """Anchor plus drafted tokens per verify; default is the draft's own block size."""
    max_num_seqs: int = Field(default=16, ge=1)
    max_step_tokens: int = Field(default=512, ge=1)
    """Most query tokens in one step; long prompts are prefilled in chunks of what is left."""
    max_model_len: int | None = Field(default=None, ge=2)
    """Prompt plus answer, in tokens; default is what the model was trained for."""
    kv_block_size: int = Field(default=16, ge=1)
    kv_cache_tokens: int | None = Field(default=None, ge=1)
    """Tokens the KV pools hold; default from memory."""
    gpu_memory_utilization: float = Field(default=0.9, gt=0, le=1)
    prefix_caching: bool = True
    threads: int | None = Field(default=None, ge=1)
    """CPU threads of the engine; default is one per core."""
    default_max_tokens: int = Field(default=512, ge=1)
    """`max_tokens` of requests that name none."""

    def __init__(self, **values: Any) -> None:
        try:
            super().__init__(**values)
        except ValidationError as error:
            raise ConfigError(f"engine settings: {describe(error.errors())}") from error

    @field_validator("draft", mode="before")
    @classmethod
    def _none_is_a_word(cls, value: object) -> object:
        return None if value == "none" else value
