"""Claude Code's own client against the service; skipped where it is not installed.

npm install @anthropic-ai/claude-code    # and its `claude` on the PATH
"""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path

import pytest

from pipelines.service.app import create_app
from pipelines.service.config import ServiceConfig
from pipelines.service.engine_client import ServedModel
from pipelines.service.local import serving
from tests.pipelines.service.scripted import MODEL, TOOLS, Letters, ScriptedEngine

CLAUDE = shutil.which("claude")
pytestmark = [pytest.mark.slow, pytest.mark.skipif(CLAUDE is None, reason="Claude Code is not installed")]
SECRET = "heliotrope"
LONG = 400_000
"""Letters are tokens here, and its first prompt has 76,000."""


def asked(tmp_path: Path, url: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """One question without a screen, with a home of its own and nothing of the environment but the path."""
    names = (
        "ANTHROPIC_DEFAULT_OPUS_MODEL",
        "ANTHROPIC_DEFAULT_SONNET_MODEL",
        "ANTHROPIC_DEFAULT_HAIKU_MODEL",
    )
    env = {
        "HOME": str(tmp_path),
        "PATH": "/usr/bin:/bin",
        "ANTHROPIC_BASE_URL": url,
        "ANTHROPIC_AUTH_TOKEN": "test",
        "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
        **dict.fromkeys(names, MODEL),
    }
    return subprocess.run(
        [CLAUDE, "-p", *arguments],
        env=env, cwd=tmp_path, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=60,
    )  # fmt: skip


def served(engine: ScriptedEngine, length: int):
    model = ServedModel(MODEL, length, Letters(TOOLS), 1_700_000_000)
    return serving(create_app(engine, model, ServiceConfig()))


def test_it_calls_a_tool_and_goes_on_with_the_result(tmp_path):
    note = tmp_path / "note.txt"
    note.write_text(f"the secret word is {SECRET}\n")

    def script(request):
        if SECRET in "".join(map(chr, request.token_ids)):
            return f"It says {SECRET}."
        call = {"name": "Read", "arguments": {"file_path": str(note)}}
        return f"<tool_call>{json.dumps(call)}</tool_call>"

    engine = ScriptedEngine(script)
    with served(engine, LONG) as url:
        done = asked(tmp_path, url, "What does note.txt say?", "--allowedTools", "Read")
    assert (done.returncode, done.stdout.strip()) == (0, f"It says {SECRET}."), done
    first, second = (request.token_ids for request in engine.requests)
    behind = len("<assistant>")
    assert second[: len(first) - behind] == first[:-behind]  # the prefix cache has all of it


def test_it_is_told_when_the_context_is_too_short(tmp_path):
    with served(ScriptedEngine(), 8192) as url:
        done = asked(tmp_path, url, "Hello")
    assert done.returncode == 1 and "Prompt is too long" in done.stdout, done
