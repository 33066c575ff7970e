"""The page in a real Chromium: tints, figures, stopping, errors in words, keyboard, a phone's width."""

from __future__ import annotations

import re
from contextlib import contextmanager
from itertools import pairwise

import pytest
from playwright.sync_api import expect

from dflash_engine.stats import EngineStats
from pipelines.service.keys import key_hash
from tests.pipelines.service.browser import browser, chromium
from tests.pipelines.service.scripted import world

CHROMIUM = chromium()
pytestmark = [
    pytest.mark.browser,
    pytest.mark.skipif(CHROMIUM is None, reason="no Chromium or Chrome on this machine"),
]
ANSWER = "Order 12, 二十 shoes: <b>not</b> &amp; a tag.\nBye!"


@pytest.fixture(scope="module")
def chrome():
    expect.set_options(timeout=20_000)  # which page.set_default_timeout does not speak for
    with browser(CHROMIUM) as made:
        yield made


@contextmanager
def opened(chrome, url, **context):
    """A page that may log no error and ask nobody but the service; `allowed` are errors that are meant."""
    allowed = context.pop("allowed", None)
    where = chrome.new_context(**context)
    page = where.new_page()
    page.set_default_timeout(20_000)
    told, asked = [], []
    page.on("console", lambda message: told.append(message.text) if message.type == "error" else None)
    page.on("pageerror", lambda error: told.append(str(error)))
    page.on("request", lambda request: asked.append(request.url))
    try:
        page.goto(url)
        yield page
        assert [text for text in told if not (allowed and re.search(allowed, text))] == []
        assert all(one.startswith((url, "data:")) for one in asked)
    finally:
        where.close()


def send(page, text):
    page.get_by_label("Message (Enter").fill(text)
    page.keyboard.press("Enter")


def test_an_answer_streams_in_with_a_tint_for_each_accepted_block(chrome):
    with world(ANSWER, step=4) as here, opened(chrome, here.url) as page:
        send(page, "Where is my order?")
        expect(page.get_by_text("tokens in 12 passes")).to_be_visible()
        runs = page.locator("article").nth(1).locator("span.block")
        texts = runs.all_inner_texts()
        assert "".join(runs.evaluate_all("runs => runs.map(run => run.textContent)")) == ANSWER
        assert len(texts) == -(-len(ANSWER) // 4) == 12
        assert runs.first.get_attribute("title") == "4 tokens in this pass"
        tints = runs.evaluate_all("runs => runs.map(run => getComputedStyle(run).backgroundColor)")
        assert all(one != two for one, two in pairwise(tints))
        assert "rgba(0, 0, 0, 0)" not in tints
        # The conversation goes on: the second request has the first answer in it.
        send(page, "And now?")
        expect(page.get_by_text("tokens in 12 passes")).to_have_count(2)
        turns = here.letters.seen[-1][0]
        assert [turn["content"] for turn in turns] == ["Where is my order?", ANSWER, "And now?"]


def test_stop_ends_the_answer_in_the_engine_and_keeps_what_came(chrome):
    with world(ANSWER, step=4, hold_at=3) as here, opened(chrome, here.url) as page:
        send(page, "x")
        expect(page.locator("article span.block")).to_have_count(3)
        page.get_by_role("button", name="Stop").click()
        expect(page.get_by_text("stopped after 12 tokens in 3 passes")).to_be_visible()
        assert here.engine.any_abort.wait(20) and here.engine.ended.wait(20)
        expect(page.get_by_role("button", name="Send")).to_be_enabled()


def test_live_figures_are_shown_and_an_unknown_price_is_called_so(chrome):
    async def stats():
        return {"0": EngineStats(running=3, waiting=2, drafts=4, accepted_tokens=6)}

    with world(app={"engine_stats": stats}) as here, opened(chrome, here.url) as page:
        expect(page.locator("#running")).to_have_text("3")
        expect(page.locator("#waiting")).to_have_text("2")
        expect(page.locator("#acceptance_length")).to_have_text("2.50")
        expect(page.locator("#cost_usd")).to_have_text("unknown")
        expect(page.locator("#tokens_per_s")).to_have_text("0.0")
        expect(page.locator("#model")).to_have_text("echo-1")


def test_a_service_with_keys_says_what_is_missing_and_takes_one(chrome, tmp_path):
    keys = tmp_path / "keys.yaml"
    keys.write_text(f"keys: [{{hash: {key_hash('sk-right')}, owner: o}}]")
    with (
        world(settings={"keys": keys}) as here,
        opened(chrome, here.url, allowed="401") as page,
    ):
        expect(page.locator("#live-alarm")).to_contain_text("no API key given")
        send(page, "x")
        expect(page.get_by_role("alert")).to_contain_text("no API key given")
        page.get_by_text("Settings and API key", exact=True).click()
        page.get_by_label("API key").fill("sk-right")
        page.get_by_label("API key").press("Tab")
        expect(page.locator("#live-alarm")).to_be_hidden()
        # What could not be sent is still there.
        page.get_by_role("button", name="Send").click()
        expect(page.get_by_text("Hello, world!")).to_be_visible()
        kept = page.evaluate("[localStorage.length, sessionStorage.length, document.cookie.length]")
        assert kept == [0, 0, 0]


def test_a_full_queue_and_a_service_that_is_gone_are_told_in_words(chrome):
    with (
        world(settings={"max_requests": 1}, hold_at=1) as here,
        opened(chrome, here.url) as first,
        opened(chrome, here.url, allowed="429|ERR_") as second,
    ):
        send(first, "x")
        assert here.engine.holding.wait(20)
        send(second, "y")
        expect(second.get_by_role("alert")).to_contain_text("too many requests are waiting")
        expect(second.get_by_role("alert")).to_contain_text("try again in 1 s")
        second.route("**/v1/*/*", lambda route: route.abort())
        send(second, "y")
        expect(second.get_by_role("alert")).to_contain_text("the service does not answer")
        first.get_by_role("button", name="Stop").click()
        expect(first.get_by_text("stopped after")).to_be_visible()


def test_it_fits_a_phone_and_a_dark_room(chrome):
    phone = {"viewport": {"width": 320, "height": 640}, "color_scheme": "dark", "has_touch": True}
    with world("word " * 200, step=9) as here, opened(chrome, here.url, **phone) as page:
        send(page, "x")
        expect(page.get_by_text("passes")).to_have_count(1)
        width, ground = page.evaluate(
            "[document.documentElement.scrollWidth, getComputedStyle(document.body).backgroundColor]"
        )
        assert width <= 320
        assert ground == "rgb(22, 24, 27)"


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_words_stand_out_against_every_tint(chrome, scheme):
    """WCAG's 4.5 to 1, by its formula."""
    with world() as here, opened(chrome, here.url, color_scheme=scheme) as page:
        names = [
            ("text", ground) for ground in ("ground", "raised", "block-a", "block-b", "single")
        ] + [("quiet", "ground"), ("quiet", "raised"), ("alarm", "ground"), ("accent", "ground"),
             ("on-accent", "accent")]  # fmt: skip
        colour = "name => getComputedStyle(document.documentElement).getPropertyValue(name)"
        for words, ground in names:
            one, two = (luminance(page.evaluate(colour, f"--{name}").strip()) for name in (words, ground))
            assert (max(one, two) + 0.05) / (min(one, two) + 0.05) >= 4.5, (words, ground)


def luminance(colour):
    channels = [int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)]
    linear = [value / 12.92 if value <= 0.04045 else ((value + 0.055) / 1.055) ** 2.4 for value in channels]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def test_the_whole_page_can_be_used_by_keyboard(chrome):
    with world(hold_at=1) as here, opened(chrome, here.url) as page:
        page.get_by_label("Message (Enter").focus()
        page.keyboard.type("one")
        page.keyboard.press("Shift+Enter")
        page.keyboard.type("two")
        page.keyboard.press("Enter")
        assert here.engine.holding.wait(20)
        assert here.letters.seen[-1][0][-1]["content"] == "one\ntwo"
        page.keyboard.press("Tab")
        expect(page.get_by_role("button", name="Stop")).to_be_focused()
        page.keyboard.press("Enter")
        expect(page.get_by_text("stopped after")).to_be_visible()
