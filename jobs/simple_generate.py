"""Answer one prompt by hand: `python jobs/simple_generate.py --prompt "…" --use_dflash`."""

from __future__ import annotations

import argparse
import json
import sys
import time
from typing import Any

from dflash_engine import DFlashEngine, EngineError, Result, SamplingParams


def setting(text: str) -> tuple[str, str, Any]:
    """Section, key and value of `section.key=value`; a value that is not JSON is a text."""
    name, equals, value = text.partition("=")
    section, _, key = name.partition(".")
    if section not in ("engine", "sampling") or not (key and equals):
        raise argparse.ArgumentTypeError(f"{text!r} is neither engine.KEY=VALUE nor sampling.KEY=VALUE")
    try:
        return section, key, json.loads(value)
    except json.JSONDecodeError:
        return section, key, value


def arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Answer one prompt, printed as it comes.")
    parser.add_argument("--model_path", default="smollm2-135m", help="name, folder, GGUF file or hub id")
    parser.add_argument("--prompt", required=True)
    parser.add_argument("--max_tokens", type=int, default=128)
    parser.add_argument("--use_dflash", action="store_true", help="without it, plain decoding")
    parser.add_argument("--draft", default="auto", help="draft folder or id; %(default)s finds it")
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--seed", type=int)
    parser.add_argument(
        "--set",
        dest="settings",
        type=setting,
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="engine.block_length=4, sampling.top_p=0.9, …; repeatable",
    )
    return parser.parse_args(argv)


def sections(args: argparse.Namespace) -> tuple[dict[str, Any], dict[str, Any]]:
    """Engine settings and sampling fields; `--set` wins over the options."""
    draft = args.draft if args.use_dflash else "none"
    values: dict[str, dict[str, Any]] = {
        "engine": {"model": args.model_path, "draft": draft},
        "sampling": {"max_tokens": args.max_tokens, "temperature": args.temperature, "seed": args.seed},
    }
    for section, key, value in args.settings:
        values[section][key] = value
    return values["engine"], values["sampling"]


def report(result: Result, elapsed_s: float) -> None:
    usage = result.usage
    summary = {
        "text": result.text,
        "finish_reason": result.finish_reason,
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "steps": usage.steps,
        "acceptance_length": round(usage.acceptance_length, 3),
        "elapsed_s": round(elapsed_s, 3),
        "tokens_per_s": round(usage.completion_tokens / elapsed_s, 2),
        "seed": result.seed,
        "fingerprint": result.fingerprint,
    }
    print(
        f"\n\n{usage.completion_tokens} tokens in {elapsed_s:.2f} s (prompt included), "
        f"{summary['tokens_per_s']} tokens/s, acceptance length {usage.acceptance_length:.2f}"
    )
    print(json.dumps(summary, ensure_ascii=False))


def main(argv: list[str] | None = None) -> int:
    args = arguments(argv)
    engine_settings, sampling_fields = sections(args)
    try:
        sampling = SamplingParams(**sampling_fields)
        engine = DFlashEngine(**engine_settings)
        started = time.perf_counter()
        result = None
        for chunk in engine.stream(args.prompt, sampling):
            print(chunk.text, end="", flush=True)
            result = chunk.result
    except EngineError as error:
        print(f"{sys.argv[0]}: {error}", file=sys.stderr)
        return 2
    assert result is not None, "a stream ends with its result"
    report(result, time.perf_counter() - started)
    return 0


if __name__ == "__main__":
    sys.exit(main())
