"""Keys, their limits, and who may be served without one."""

from __future__ import annotations

import hmac
import subprocess
import sys
from typing import Any

import anthropic
import openai
import pytest
import yaml

from dflash_engine.errors import ConfigError
from dflash_engine.request import Priority
from pipelines.service.config import ServiceConfig
from pipelines.service.errors import ApiError
from pipelines.service.keys import KeyEntry, KeyRing, Owner, key_hash, new_key
from pipelines.service.limits import Limits
from pipelines.service.usage_record import UsageRecord
from tests.pipelines.service.scripted import MODEL, world

HELLO: Any = [{"role": "user", "content": "Hi"}]
GOOD, OTHER = "sk-good", "sk-other"


def key_file(folder, *entries):
    path = folder / "keys.yaml"
    path.write_text(yaml.safe_dump({"keys": list(entries)}))
    return path


@pytest.fixture(scope="module")
def here(tmp_path_factory):
    path = key_file(
        tmp_path_factory.mktemp("keys"),
        {"hash": key_hash(GOOD), "owner": "search"},
        {"hash": key_hash(OTHER), "owner": "night", "priority": "batch"},
    )
    records: list[UsageRecord] = []
    with world(settings={"keys": path}, app={"on_usage": records.append}) as made:
        made.records = records
        yield made


def test_a_key_is_taken_from_either_header_by_either_client(here):
    ask: Any = {"model": MODEL, "messages": HELLO}
    with openai.OpenAI(base_url=f"{here.url}/v1", api_key=GOOD) as api:
        assert api.chat.completions.create(**ask).choices
        assert next(iter(api.models.list())).id == MODEL
    with anthropic.Anthropic(base_url=here.url, api_key=GOOD) as api:
        assert api.messages.create(**ask, max_tokens=5).content
    with anthropic.Anthropic(base_url=here.url, api_key=None, auth_token=GOOD) as api:
        assert api.messages.create(**ask, max_tokens=5).content


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions", "/v1/messages"])
def test_a_wrong_or_missing_key_is_refused_before_the_body_is_read(here, path):
    for headers in ({}, {"authorization": "Bearer no"}, {"authorization": GOOD}, {"x-api-key": "é".encode()}):
        answer = here.http.post(path, content=b"{", headers=headers)
        assert answer.status_code == 401, answer.text
        assert answer.json()["error"]["type"] == "authentication_error"


def test_clients_raise_their_own_error_for_a_wrong_key(here):
    with (
        openai.OpenAI(base_url=f"{here.url}/v1", api_key="no") as api,
        pytest.raises(openai.AuthenticationError),
    ):
        api.models.list()
    with (
        anthropic.Anthropic(base_url=here.url, api_key="no") as api,
        pytest.raises(anthropic.AuthenticationError),
    ):
        api.messages.count_tokens(model=MODEL, messages=HELLO)


def test_the_keys_priority_and_owner_reach_the_engine_and_the_books(here):
    for key in (GOOD, OTHER):
        with openai.OpenAI(base_url=f"{here.url}/v1", api_key=key) as api:
            api.chat.completions.create(model=MODEL, messages=HELLO)
    assert [request.priority for request in here.engine.requests[-2:]] == [Priority.ONLINE, Priority.BATCH]
    assert [record.owner for record in here.records[-2:]] == ["search", "night"]
    assert here.records[-1].usage.completion_tokens == 13


def test_each_key_has_a_cache_salt_of_its_own_that_is_not_what_the_file_holds(here, tmp_path):
    for key in (GOOD, OTHER, GOOD):
        with openai.OpenAI(base_url=f"{here.url}/v1", api_key=key) as api:
            api.chat.completions.create(model=MODEL, messages=HELLO)
    one, other, again = (request.cache_salt for request in here.engine.requests[-3:])
    assert one == again != other and one and other
    assert one not in key_hash(GOOD) and key_hash(GOOD).removeprefix("sha256:") not in one
    same_owner = [{"hash": key_hash(key), "owner": "search"} for key in (GOOD, OTHER)]
    ring = KeyRing.load(key_file(tmp_path, *same_owner))
    assert ring.owner(GOOD).cache_salt != ring.owner(OTHER).cache_salt


def test_limits_answer_429_with_the_time_to_wait(tmp_path):
    path = key_file(tmp_path, {"hash": key_hash(GOOD), "owner": "search", "requests_per_minute": 2})
    now = [0.0]
    with (
        world(settings={"keys": path}, app={"limits": Limits(lambda: now[0])}) as here,
        openai.OpenAI(base_url=f"{here.url}/v1", api_key=GOOD, max_retries=0) as api,
    ):
        ask: Any = {"model": MODEL, "messages": HELLO}
        api.chat.completions.create(**ask)
        api.chat.completions.create(**ask)
        with pytest.raises(openai.RateLimitError) as caught:
            api.chat.completions.create(**ask)
        assert caught.value.code == "rate_limit_exceeded"
        assert caught.value.response.headers["retry-after"] == "30"
        now[0] = 30.0
        api.chat.completions.create(**ask)


def test_tokens_are_paid_when_they_are_known_and_a_debt_takes_its_time():
    now = [0.0]
    limits = Limits(lambda: now[0])
    owner = Owner("search", tokens_per_minute=60)
    limits.admit(owner)
    limits.pay_tokens(owner, 90)
    with pytest.raises(ApiError) as caught:
        limits.admit(owner)
    assert caught.value.retry_after_s == pytest.approx(30, abs=0.1)
    now[0] = 31.0
    limits.admit(owner)


def test_idle_time_saves_up_no_more_than_a_minute():
    now = [0.0]
    limits = Limits(lambda: now[0])
    owner = Owner("search", requests_per_minute=2)
    limits.admit(owner)
    now[0] = 3600.0
    limits.admit(owner)
    limits.admit(owner)
    with pytest.raises(ApiError):
        limits.admit(owner)


def test_every_entry_is_compared_whichever_fits(monkeypatch):
    entries = [{"hash": key_hash(new_key()), "owner": f"owner-{index}"} for index in range(5)]
    entries[0]["hash"] = key_hash(GOOD)
    ring = KeyRing(tuple(KeyEntry(**entry) for entry in entries))
    compared = []

    def compare(one, other):
        compared.append(other)
        return one == other

    monkeypatch.setattr(hmac, "compare_digest", compare)
    assert ring.owner(GOOD).name == "owner-0"
    assert len(compared) == 5


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (None, "cannot be read"),
        ("keys: [", "not YAML"),
        ("keys: []", "keys"),
        ("keys: [{hash: plain-key, owner: a}]", "hash"),
        (f"keys: [{{hash: '{key_hash(GOOD)}', owner: a, color: 1}}]", "color"),
        (
            f"keys: [{{hash: '{key_hash(GOOD)}', owner: a}}, "
            f"{{hash: '{key_hash(OTHER)}', owner: a, tokens_per_minute: 5}}]",
            "different limits",
        ),
    ],
)
def test_a_bad_key_file_is_named_without_its_keys(tmp_path, text, said):
    path = tmp_path / "keys.yaml"
    if text is not None:
        path.write_text(text)
    with pytest.raises(ConfigError) as caught:
        KeyRing.load(path)
    assert str(path) in str(caught.value)
    assert said in str(caught.value)
    assert "plain-key" not in str(caught.value)


def test_the_command_makes_an_entry_that_its_key_opens(tmp_path):
    command = [sys.executable, "-m", "pipelines.service.keys", "search"]
    made = subprocess.run(command, capture_output=True, text=True, check=True)
    key = made.stderr.split()[-1]
    path = tmp_path / "keys.yaml"
    path.write_text(f"keys:\n{made.stdout}")
    assert KeyRing.load(path).owner(key).name == "search"
    assert key not in made.stdout


@pytest.mark.parametrize(
    ("host", "fits"),
    [
        ("127.0.0.1", True),
        ("::1", True),
        ("localhost", True),
        ("0.0.0.0", False),
        ("::", False),
        ("example.org", False),
    ],
)
def test_only_this_machine_is_served_without_keys(host, fits):
    if fits:
        assert ServiceConfig(host=host).host == host
    else:
        with pytest.raises(ValueError, match="allow_anonymous"):
            ServiceConfig(host=host)
        assert ServiceConfig(host=host, allow_anonymous=True)
