"""A picture of the page after an answer of the embedded model.

python -m tests.pipelines.service.picture docs/page.png
"""

from __future__ import annotations

import argparse
import asyncio
from pathlib import Path

from playwright.sync_api import expect

from dflash_engine.config import EngineConfig
from pipelines.service.app import create_app
from pipelines.service.config import ServiceConfig
from pipelines.service.engine_price import engine_price
from pipelines.service.local import open_local, served_model, serving
from tests.pipelines.service.browser import browser, chromium

QUESTION = "How do I return a jacket?"
ANSWER_MS = 120_000


def take(path: Path) -> None:
    """Raises `RuntimeError` where there is no Chromium."""
    executable = chromium()
    if executable is None:
        raise RuntimeError("no Chromium or Chrome on this machine (apt-get install chromium)")
    engine_config, config = EngineConfig(model="smollm2-135m", device="cpu"), ServiceConfig()
    engine = open_local(engine_config)
    app = create_app(
        engine, served_model(engine_config, config), config, price=engine_price(config, use_gpu=False)
    )
    with serving(app) as url, browser(executable) as chrome:
        page = chrome.new_page(viewport={"width": 900, "height": 760})
        page.goto(url)
        page.get_by_text("Settings and API key", exact=True).click()
        page.get_by_label("Maximum tokens").fill("110")
        page.get_by_text("Settings and API key", exact=True).click()
        page.get_by_label("Message (Enter").fill(QUESTION)
        page.keyboard.press("Enter")
        expect(page.get_by_text("passes")).to_be_visible(timeout=ANSWER_MS)
        # The figures of this second.
        expect(page.locator("#tokens_per_s")).not_to_have_text("0.0")
        expect(page.locator("#running")).to_have_text("0")
        page.screenshot(path=path)
    asyncio.run(engine.close())


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("path", type=Path)
    take(parser.parse_args().path)
