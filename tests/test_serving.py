"""`mcretrofit serve`: OpenAI's routes on a pico model, their limits, and what a client may send."""

from __future__ import annotations

import json
import logging
import threading

import pytest
import torch
from cli_helpers import pico

pytest.importorskip("starlette", reason="the server needs starlette")
pytest.importorskip("httpx", reason="starlette's test client needs httpx")
from starlette.testclient import TestClient  # noqa: E402

from mcretrofit.config import VARIANTS, CachingConfig  # noqa: E402
from mcretrofit.generate import Sampling, generate  # noqa: E402
from mcretrofit.model import Loaded, load  # noqa: E402
from mcretrofit.retrofit import every_head, retrofit_, revert_  # noqa: E402
from mcretrofit.serving.app import app  # noqa: E402
from mcretrofit.serving.asked import Asked, Refused, read  # noqa: E402
from mcretrofit.serving.engine import Engine, Limits, Until  # noqa: E402

TEXT, CHAT = "/v1/completions", "/v1/chat/completions"
PROMPT = "It was a bright cold day in April, and the clocks were striking thirteen."


@pytest.fixture(scope="module")
def wrapped(tmp_path_factory) -> Loaded:
    """A pico model with all heads cached."""
    torch.set_num_threads(1)
    loaded = load(pico(tmp_path_factory.mktemp("serve") / "base"))
    return cached(loaded, CachingConfig(segment=16, variant="grm", router="mean", rule="plain"))


def cached(loaded: Loaded, config: CachingConfig) -> Loaded:
    revert_(loaded.model)
    covers = every_head(loaded.model)
    retrofit_(loaded.model, config, covers)
    return loaded._replace(config=config, covers=covers)


@pytest.fixture
def engine(wrapped) -> Engine:
    return Engine(wrapped, "pico")


@pytest.fixture
def client(engine) -> TestClient:
    return TestClient(app(engine), raise_server_exceptions=False)


def ask(client: TestClient, **fields: object):
    """A completion of PROMPT, or whatever replaces its fields."""
    body = {"prompt": PROMPT, "max_tokens": 12, "temperature": 0, **fields}
    return client.post(TEXT, json=body)


def events(answer) -> list[dict]:
    """The objects of an event stream that ended as it should."""
    assert answer.headers["content-type"].startswith("text/event-stream")
    lines = [line for line in answer.text.split("\n") if line]
    assert all(line.startswith("data: ") for line in lines) and lines[-1] == "data: [DONE]"
    return [json.loads(line[6:]) for line in lines[:-1]]


def test_models(client):
    (one,) = client.get("/v1/models").json()["data"]
    assert (one["id"], one["object"]) == ("pico", "model")


def test_a_completion_is_what_generate_says(client, wrapped):
    said = "".join(s.text for s in generate(wrapped, PROMPT, 12, Sampling()))
    told = ask(client, model="pico").json()
    (choice,) = told["choices"]
    assert (choice["text"], choice["finish_reason"]) == (said, "length")
    counts = {"prompt_tokens": len(PROMPT), "completion_tokens": 12}
    assert told["usage"] == {**counts, "total_tokens": len(PROMPT) + 12}
    assert told["object"] == "text_completion" and told["id"].startswith("cmpl-")
    ids = ask(client, prompt=list(PROMPT.encode())).json()
    assert ids["choices"][0]["text"] == said


def test_sampling_has_a_seed(client):
    said = [
        ask(client, temperature=1, top_p=0.9, seed=seed).json()["choices"][0]["text"]
        for seed in (1, 1, 2)
    ]
    assert said[0] == said[1] != said[2]


def test_a_stream_is_the_answer_in_parts(client):
    whole = ask(client).json()
    parts = events(ask(client, stream=True, stream_options={"include_usage": True}))
    assert "".join(p["choices"][0]["text"] for p in parts[:-1]) == whole["choices"][0]["text"]
    assert parts[-2]["choices"][0]["finish_reason"] == "length"
    assert (parts[-1]["choices"], parts[-1]["usage"]) == ([], whole["usage"])
    assert len({p["id"] for p in parts}) == 1 and len(parts) > 3


def test_chat_whole_and_in_parts(client):
    body = {"messages": [{"role": "user", "content": "Hello"}], "max_completion_tokens": 8}
    body |= {"temperature": 0}
    told = client.post(CHAT, json=body).json()
    message = told["choices"][0]["message"]
    assert message["role"] == "assistant" and told["object"] == "chat.completion"
    assert told["usage"]["prompt_tokens"] == len("User: Hello\n\nAssistant:")
    first, *rest = events(client.post(CHAT, json={**body, "stream": True}))
    assert first["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    said = "".join(p["choices"][0]["delta"].get("content", "") for p in rest)
    assert said == message["content"] and rest[0]["object"] == "chat.completion.chunk"


def test_stop_ends_before_its_text(client):
    said = ask(client).json()["choices"][0]["text"]
    stop = said[4:6]
    told = ask(client, stop=[stop, "never"]).json()["choices"][0]
    assert (told["text"], told["finish_reason"]) == (said[: said.index(stop)], "stop")
    parts = events(ask(client, stop=stop, stream=True))
    assert "".join(p["choices"][0]["text"] for p in parts) == told["text"]


def test_an_answer_may_be_empty(client, engine, monkeypatch):
    ids = torch.tensor([list(PROMPT.encode())])
    first = int(engine.loaded.model(ids).logits[0, -1].argmax())
    monkeypatch.setattr(engine.tokenizer, "eos_id", first, raising=False)
    told = ask(client).json()
    assert (told["choices"][0]["text"], told["choices"][0]["finish_reason"]) == ("", "stop")
    assert told["usage"]["completion_tokens"] == 0
    assert events(ask(client, stream=True))[-1]["choices"][0]["finish_reason"] == "stop"


def test_a_stop_is_found_across_pieces():
    until = Until(("END", "and"))
    assert [until.add(t) for t in ("one E", "N", "x an")] == ["one ", "", "ENx "]
    assert (until.rest(), until.met) == ("an", False)
    assert (until.add("two E") + until.add("ND three"), until.met) == ("two ", True)


WRONG = {
    "no prompt": ({"prompt": None}, 400, "prompt"),
    "empty": ({"prompt": ""}, 400, "prompt"),
    "two prompts": ({"prompt": ["a", "b"]}, 400, "prompt"),
    "ids": ({"prompt": [1, 300]}, 400, "prompt"),
    "max_tokens": ({"max_tokens": 0}, 400, "max_tokens"),
    "type": ({"max_tokens": "many"}, 400, "max_tokens"),
    "boolean": ({"max_tokens": True}, 400, "max_tokens"),
    "temperature": ({"temperature": -1}, 400, "temperature"),
    "top_p": ({"top_p": 0}, 400, "top_p"),
    "stop": ({"stop": [""]}, 400, "stop"),
    "stops": ({"stop": ["a"] * 5}, 400, "stop"),
    "n": ({"n": 2}, 400, "n"),
    "penalty": ({"presence_penalty": 0.5}, 400, "presence_penalty"),
    "typo": ({"max_token": 3}, 400, "max_token"),
    "model": ({"model": "other"}, 404, "model"),
    "length": ({"max_tokens": 10**9}, 400, None),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_requests_are_errors_in_openai_s_shape(client, engine, case):
    fields, status, param = WRONG[case]
    answer = ask(client, **fields)
    error = answer.json()["error"]
    assert answer.status_code == status and error.keys() == {"message", "type", "param", "code"}
    assert error["param"] == param and error["message"].isprintable()
    assert not engine.running


def test_halves_of_characters_are_no_text():
    for body in ({"prompt": "\ud800"}, {"prompt": "a", "stop": ["\udfff"]}):
        with pytest.raises(Refused, match="half of a surrogate pair"):
            read(body, chat=False)


def test_what_is_no_request(client):
    for answer, status in (
        (client.post(TEXT, content=b"{", headers={"content-type": "application/json"}), 400),
        (
            client.post(TEXT, content=b"[" * 10**5, headers={"content-type": "application/json"}),
            400,
        ),
        (
            client.post(TEXT, content=b'{"prompt": "x"}', headers={"content-type": "text/plain"}),
            415,
        ),
        (client.post(TEXT, json=[1]), 400),
        (client.post(CHAT, json={"messages": []}), 400),
        (client.post(CHAT, json={"messages": [{"role": "tool", "content": "x"}]}), 400),
        (client.post(CHAT, json={"messages": [{"role": "user", "content": 3}]}), 400),
        (client.get("/v1/nothing"), 404),
        (client.get(TEXT), 405),
    ):
        assert answer.status_code == status, answer.text
        assert answer.json()["error"]["type"] == "invalid_request_error"


def test_neutral_values_and_zero_penalties_pass(client):
    fields = {"n": 1, "echo": False, "presence_penalty": 0.0, "user": "me", "logit_bias": {}}
    assert ask(client, **fields).status_code == 200


def test_other_host_names_are_kept_out(engine):
    client = TestClient(app(engine, {"localhost"}), base_url="http://evil.example:8000")
    assert client.get("/v1/models").json()["error"]["message"].startswith("this server does not")
    assert TestClient(app(engine, {"localhost"}), base_url="http://localhost:8000").get(
        "/v1/models"
    )


def test_more_requests_than_allowed_are_told_to_wait(wrapped):
    engine = Engine(wrapped, "pico", Limits(requests=1))
    client = TestClient(app(engine))
    ticket = engine.admit(Asked("first"))
    answer = ask(client)
    assert (answer.status_code, answer.headers["retry-after"]) == (429, "1")
    assert answer.json()["error"]["type"] == "rate_limit_error"
    engine.leave(ticket)
    assert ask(client).status_code == 200 and not engine.running


def test_segments_are_bounded_in_bytes(wrapped):
    room = Engine(wrapped, "pico").room(len(PROMPT) + 12)
    engine = Engine(wrapped, "pico", Limits(requests=9, cache_bytes=int(1.5 * room)))
    client = TestClient(app(engine))
    ticket = engine.admit(Asked(PROMPT, max_tokens=12))
    assert ask(client).status_code == 429
    engine.leave(ticket)
    assert ask(client).status_code == 200
    refused = ask(client, max_tokens=500)
    assert (refused.status_code, refused.json()["error"]["code"]) == (
        400,
        "context_length_exceeded",
    )


@pytest.mark.parametrize("variant", VARIANTS)
def test_no_request_holds_more_than_it_was_given_room_for(wrapped, variant):
    engine = Engine(cached(wrapped, CachingConfig(segment=8, variant=variant)), "pico")
    for tokens in (3, 20, 90):
        ticket = engine.admit(Asked("x" * tokens, max_tokens=40, temperature=0.0))
        most = 0
        for _ in engine.run(ticket):
            most = max(most, ticket.held)
        assert most <= ticket.room, f"{variant}: {most} bytes at {tokens} tokens"
    cached(wrapped, wrapped.config)


def test_requests_at_once_do_not_disturb_each_other(engine):
    prompts = [PROMPT, PROMPT[::-1], "A third one, much longer than the others. " * 3]

    def answer(prompt: str) -> str:
        ticket = engine.admit(Asked(prompt, max_tokens=30, temperature=0.0))
        return "".join(piece.text for piece in engine.run(ticket))

    alone, together = [answer(p) for p in prompts], [""] * 3

    def work(at: int) -> None:
        together[at] = answer(prompts[at])

    threads = [threading.Thread(target=work, args=(at,)) for at in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert together == alone and not engine.running


def test_a_failure_keeps_its_words_out_of_answer_and_log(client, engine, monkeypatch, caplog):
    def fail(*_: object) -> None:
        raise KeyError("secret words of a prompt")

    monkeypatch.setattr(engine, "_pieces", fail)
    with caplog.at_level(logging.ERROR):
        answer = ask(client)
    assert answer.status_code == 500 and answer.json()["error"]["type"] == "server_error"
    assert "internal error: KeyError at test_serving.py" in caplog.text
    assert "secret" not in caplog.text + answer.text and not engine.running
    assert '"message": "internal error"' in ask(client, stream=True).text
