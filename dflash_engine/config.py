"""What an engine is made of: model, draft, precision, memory, and nothing that changes later."""

from __future__ import annotations

from typing import Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from dflash_engine.errors import ConfigError, describe

_DEFAULTS = {
    "cpu": {"max_num_seqs": 16, "max_step_tokens": 512},
    "cuda": {"max_num_seqs": 256, "max_step_tokens": 2048},
}


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
    ops: Literal["auto", "reference", "cpu", "triton"] = "auto"
    """Which operations compute: torch reference, the compiled CPU kernels, or the GPU kernels."""
    block_length: int | None = Field(default=None, ge=1, le=64)
    """Anchor plus drafted tokens per verify; default is the draft's own block size."""
    max_num_seqs: int | None = Field(default=None, ge=1)
    """Sequences that run at once; default is 16 on a CPU, 256 on a GPU."""
    max_step_tokens: int | None = Field(default=None, ge=1)
    """Most query tokens in one step; long prompts are prefilled in chunks of what is left. Default is 512 on
    a CPU, 2048 on a GPU."""
    batch_slowdown: float = Field(default=1.1, ge=1)
    """While online requests run, batch requests in a step make it at most so many times as long, by the times
    of steps measured at the start and observed since: more lets batch do more, at the cost of online's time
    per token. 1 gives batch only what fills up a step that takes no longer."""
    batch_starvation_s: float | None = Field(default=None, gt=0)
    """A batch request that online has kept from going on for so long is treated as online until it has a new
    token; of those that wait this is the first one, while none of batch runs. By default there is no bound:
    as long as online leaves nothing free, batch stands still."""
    tensor_parallel_size: int = Field(default=1, ge=1)
    """GPUs of this machine that share the model: `cuda` then means as many, from the first on. Answers are
    the same within one size."""
    verify: Literal["adaptive", "block"] = "adaptive"
    """How many drafted tokens a step verifies on a GPU: as many as pay, or always the whole block."""
    cuda_graphs: bool = True
    exact: bool = True
    """False lets the GPU vendor's fastest matrix products compute: an answer may then depend on what else
    is running."""
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
    weights: Literal["checkpoint", "random"] = "checkpoint"
    """`random` reads config.json alone and makes up the weights, to measure speed; prompts are token ids."""
    simulated_acceptance: float | None = Field(default=None, ge=1)
    """With random weights on a GPU: drafted tokens count as right by chance, so that a whole block gives this
    many tokens. Answers are then without any meaning."""

    def __init__(self, **values: Any) -> None:
        try:
            super().__init__(**values)
        except ValidationError as error:
            raise ConfigError(f"engine settings: {describe(error.errors())}") from error

    def limit(self, name: Literal["max_num_seqs", "max_step_tokens"], device: str) -> int:
        """The setting, or its default on this kind of device ("cpu" or "cuda")."""
        value: int | None = getattr(self, name)
        return value if value is not None else _DEFAULTS[device][name]

    @model_validator(mode="after")
    def _only_random_weights_are_simulated(self) -> Self:
        if self.simulated_acceptance is not None and self.weights != "random":
            raise ValueError("simulated_acceptance makes up answers, so it needs weights: random")
        return self

    @model_validator(mode="after")
    def _parallel_ranks_are_exact(self) -> Self:
        if self.tensor_parallel_size > 1 and not self.exact:
            raise ValueError("exact: false computes on one GPU, so it needs tensor_parallel_size 1")
        return self

    @field_validator("draft", mode="before")
    @classmethod
    def _none_is_a_word(cls, value: object) -> object:
        return None if value == "none" else value
