"""Who gets the page, and what a page of the service's own may ask."""

from __future__ import annotations

import re

import pytest

from pipelines.service.config import ServiceConfig
from pipelines.service.keys import key_hash
from tests.pipelines.service.scripted import MODEL, world

CHAT = {"model": MODEL, "messages": [{"role": "user", "content": "x"}]}


@pytest.fixture(scope="module")
def here():
    with world() as made:
        yield made


def test_the_page_needs_nothing_from_elsewhere_and_the_browser_is_told_so(here):
    page = here.http.get("/")
    assert page.headers["content-type"] == "text/html; charset=utf-8"
    assert not re.findall(r"(?:src|href|url)\s*[=(]\s*[\"']?(?!data:)[\w/]", page.text)
    assert "http" not in page.text
    policy = page.headers["content-security-policy"]
    assert "default-src 'none'" in policy and "unsafe" not in policy and "*" not in policy


def test_the_page_keeps_no_key_in_the_browser(here):
    assert not re.search(r"localStorage|sessionStorage|indexedDB|cookie", here.http.get("/").text)


def test_the_page_is_there_by_default_only_where_this_machine_alone_reaches_the_service():
    assert ServiceConfig().shows_page
    assert not ServiceConfig(host="0.0.0.0", allow_anonymous=True).shows_page
    assert ServiceConfig(host="0.0.0.0", allow_anonymous=True, page=True).shows_page
    with world(settings={"page": False}) as without:
        assert without.http.get("/").json() == {"message": "hello"}


@pytest.mark.parametrize(
    ("host", "origin", "status"),
    [
        ("127.0.0.1:8000", "http://127.0.0.1:8000", 200),
        ("localhost:8000", "http://localhost:8000", 200),
        ("[::1]:8000", "http://[::1]:8000", 200),
        ("192.168.1.5", "https://192.168.1.5", 200),
        ("127.0.0.1:8000", "http://127.0.0.1:9000", 403),
        ("127.0.0.1:8000", "null", 403),
        # A name that its owner has pointed to this machine.
        ("evil.example:8000", "http://evil.example:8000", 403),
        ("evil.example", "http://[", 403),
    ],
)
def test_only_the_page_of_this_very_address_may_ask_without_a_key(here, host, origin, status):
    asked = here.http.post("/v1/chat/completions", json=CHAT, headers={"host": host, "origin": origin})
    assert asked.status_code == status


def test_a_service_without_a_page_lets_no_page_in():
    with world(settings={"page": False}) as without:
        headers = {"host": "127.0.0.1:8000", "origin": "http://127.0.0.1:8000"}
        assert without.http.post("/v1/chat/completions", json=CHAT, headers=headers).status_code == 403


def test_live_figures_are_for_those_who_have_a_key(tmp_path):
    keys = tmp_path / "keys.yaml"
    keys.write_text(f"keys: [{{hash: {key_hash('k')}, owner: o}}]")
    with world(settings={"keys": keys}) as keyed:
        assert keyed.http.get("/live").status_code == 401
        assert keyed.http.get("/live", headers={"x-api-key": "k"}).json()["model"] == MODEL
        assert keyed.http.get("/").status_code == 200


def blocks_of(here, **options):
    body = {**CHAT, "stream": True, "stream_options": options} if options else {**CHAT, "stream": True}
    text = here.http.post("/v1/chat/completions", json=body).text
    return re.findall(r'"block_tokens":(\d+)', text), text


def test_streams_say_where_blocks_begin_only_when_asked():
    with world("Hello, world!", step=5) as five:
        assert blocks_of(five, include_blocks=True)[0] == ["5", "5", "3"]
        for options in ({}, {"include_usage": True}, {"include_blocks": False}):
            assert blocks_of(five, **options)[0] == []


def test_a_block_whose_text_is_held_back_is_told_all_the_same():
    # A stop text that may have begun holds back the text of the second block.
    with world("abcdXYef", step=2) as here:
        body = {**CHAT, "stream": True, "stop": "dXYZ", "stream_options": {"include_blocks": True}}
        text = here.http.post("/v1/chat/completions", json=body).text
    told = re.findall(r'"delta":(\{.*?\}),.*?"block_tokens":(\d)', text)
    assert [int(tokens) for _, tokens in told] == [2, 2, 2, 2]
    assert told[2][0] == "{}"
