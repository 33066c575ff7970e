"""Generate an answer for every row of a file, folder or glob of prompts.

    python jobs/batch_generate.py --config configs/batch/demo.yaml --input prompts.jsonl --output out/answers
    ray job submit --working-dir . -- python jobs/batch_generate.py --config configs/batch/demo.yaml

Running the same command again goes on where it was broken off. Exit code 0: done, bad rows counted;
1: every row failed, or the job broke off; 2: it cannot start as asked. The last line printed is JSON.
"""

from __future__ import annotations

import argparse
import sys

from pipelines.batch import dry_run, run_batch
from pipelines.config import load_config
from pipelines.errors import JobError
from pipelines.report import print_report


def arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--config", required=True, metavar="FILE", help="YAML with the settings of the job")
    parser.add_argument("--input", metavar="URI", help="file, folder or glob; instead of the config's")
    parser.add_argument("--output", metavar="URI", help="folder of the parts; instead of the config's")
    parser.add_argument("--limit", type=int, metavar="N", help="only the first N rows")
    parser.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE", dest="settings",
        help="a setting such as sampling.temperature=0.7; may be given often",
    )  # fmt: skip
    parser.add_argument("--dry-run", action="store_true", help="read and check the rows, generate nothing")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    args = arguments(argv)
    try:
        config = load_config(
            args.config, args.settings, input=args.input, output=args.output, limit=args.limit
        )
        summary = dry_run(config) if args.dry_run else run_batch(config, progress=sys.stderr)
    except JobError as error:
        print(f"batch_generate: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        print("batch_generate: interrupted; the same command goes on from here", file=sys.stderr)
        return 130
    print_report(summary, sys.stdout)
    return summary.exit_code


if __name__ == "__main__":
    sys.exit(main())
