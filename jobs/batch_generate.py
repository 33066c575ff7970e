"""Generate an answer for every row of a file, folder or glob of prompts.

    python jobs/batch_generate.py --config configs/batch/demo.yaml --input prompts.jsonl --output out/answers
    ray job submit --working-dir . -- python jobs/batch_generate.py --config configs/batch/demo.yaml

Running the same command again goes on where it was broken off. Rows that failed stand in <output>/errors: put
their `raw` right and give the lines as --input or --repairs with the same output, or try them all again
with --retry-errors. Exit code 0: done, bad rows counted; 1: every row failed, or the job broke off; 2: it
cannot start as asked; 3: budget_usd is spent, a higher one goes on. The last line printed is JSON.
"""

from __future__ import annotations

import argparse
import sys

from pipelines.batch import run_batch
from pipelines.config import load_config
from pipelines.dry_run import dry_run
from pipelines.errors import JobError
from pipelines.estimate import print_estimate
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
    parser.add_argument("--repairs", metavar="URI", help="lines of errors/ that were put right")
    parser.add_argument(
        "--retry-errors", action="store_const", const=True, help="do the rows again that failed before"
    )
    parser.add_argument(
        "--dry-run", action="store_true", help="check and count all rows, and estimate hours and money"
    )
    parser.add_argument(
        "--sample", type=int, default=16, metavar="N", help="rows that a dry run answers for it (default 16)"
    )
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    args = arguments(argv)
    try:
        config = load_config(
            args.config,
            args.settings,
            input=args.input,
            output=args.output,
            limit=args.limit,
            repairs=args.repairs,
            retry_errors=args.retry_errors,
        )
        if args.dry_run:
            estimate = dry_run(config, max(args.sample, 0), sys.stderr)
            print_estimate(estimate, sys.stdout)
            return estimate.exit_code
        summary = run_batch(config, progress=sys.stderr)
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
