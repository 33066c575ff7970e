"""Serve a model over HTTP, by OpenAI's and Anthropic's APIs, on Ray Serve.

    python jobs/serve_online.py --config configs/serve/local.yaml

Listens on 127.0.0.1 unless service.host says otherwise, and then demands keys (service.keys) or
service.allow_anonymous. SIGTERM and Ctrl-C end it once the answers that run are made. Exit code 0: ended as
asked; 1: it did not come up; 2: it cannot start as asked. The last line printed is JSON.
"""

from __future__ import annotations

import argparse
import json
import sys

from dflash_engine.errors import ConfigError
from pipelines.errors import JobError, JobRefused
from pipelines.service.online import serve_online
from pipelines.service.serving_config import load_serving


def arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--config", required=True, metavar="FILE", help="YAML with the service's settings")
    parser.add_argument("--port", type=int, metavar="N", help="instead of the config's")
    parser.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE", dest="settings",
        help="a setting such as replicas.max=2; may be given often",
    )  # fmt: skip
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    args = arguments(argv)
    try:
        config = load_serving(args.config, args.settings, port=args.port)
        served_s = serve_online(config, progress=sys.stderr)
    except ConfigError as error:
        print(f"serve_online: {error}", file=sys.stderr)
        return JobRefused.exit_code
    except JobError as error:
        print(f"serve_online: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        print("serve_online: interrupted", file=sys.stderr)
        return 130
    print(json.dumps({"name": config.name, "model": config.engine.model, "served_s": round(served_s, 3)}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
