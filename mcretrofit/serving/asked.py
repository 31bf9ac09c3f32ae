"""A request's JSON, checked: OpenAI's fields, those that a recurrent model can honour."""

from __future__ import annotations

import json
from difflib import get_close_matches
from typing import Any, NamedTuple

DEFAULT_TOKENS = 256
STOPS = 4
# accepted and without effect, or only at the value that has none
_IGNORED = {"user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key"}
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "n": (1, None),
    "best_of": (1, None),
    "echo": (False, None),
    "suffix": ("", None),
    "logprobs": (False, 0, None),
    "top_logprobs": (0, None),
    "logit_bias": ({}, None),
    "presence_penalty": (0, None),
    "frequency_penalty": (0, None),
    "tools": ([], None),
    "tool_choice": ("none", None),
    "response_format": ({"type": "text"}, None),
}
_OURS = {"model", "max_tokens", "temperature", "top_p", "seed", "stop", "stream", "stream_options"}
_CHAT, _TEXT = {"messages", "max_completion_tokens"}, {"prompt"}


class Refused(Exception):
    """An answer that is an error: HTTP status, OpenAI's type, the field and a code."""

    def __init__(
        self,
        message: str,
        param: str | None = None,
        *,
        status: int = 400,
        kind: str = "invalid_request_error",
        code: str | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.error = {"message": message, "type": kind, "param": param, "code": code}


class Asked(NamedTuple):
    """What a client wants; `prompt` is text, token ids or chat messages."""

    prompt: str | list[int] | list[dict[str, str]]
    model: str | None = None
    max_tokens: int = DEFAULT_TOKENS
    temperature: float = 1.0
    top_p: float = 1.0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stream: bool = False
    usage: bool = False  # counts at the end of a stream


def read(body: Any, chat: bool) -> Asked:
    """The request of a JSON body; raises `Refused` for whatever cannot be done."""
    if not isinstance(body, dict):
        raise Refused("the body has to be a JSON object")
    _check_names(body, _OURS | (_CHAT if chat else _TEXT))
    _check_text(body)
    most = _most(body)
    return Asked(
        _messages(body) if chat else _prompt(body),
        _typed(body, "model", (str,), None),
        most,
        float(_number(body, "temperature", 1.0, 0.0, 2.0)),
        _nucleus(body),
        _typed(body, "seed", (int,), None),
        _stop(body),
        bool(_typed(body, "stream", (bool,), False)),
        bool((_typed(body, "stream_options", (dict,), None) or {}).get("include_usage")),
    )


def _check_names(body: dict[str, Any], known: set[str]) -> None:
    for name, value in body.items():
        if name in _NEUTRAL and not any(
            type(v) is type(value) and v == value for v in _NEUTRAL[name]
        ):
            if isinstance(value, float) and value == 0 and 0 in _NEUTRAL[name]:
                continue
            raise Refused(f"'{name}' is not supported by this server: leave it out", name)
        if name not in known | _IGNORED | _NEUTRAL.keys():
            near = get_close_matches(name, sorted(known), 1)
            hint = f": did you mean '{near[0]}'?" if near else ""
            raise Refused(f"unknown field '{name[:100]}'{hint}", name[:100])


def _check_text(body: dict[str, Any]) -> None:
    """JSON can escape halves of characters, which no tokenizer reads."""
    for name, value in body.items():
        try:
            json.dumps(value, ensure_ascii=False).encode()
        except UnicodeEncodeError as error:
            raise Refused(
                f"'{name}' has half of a surrogate pair, which is no text", name
            ) from error


def _typed(body: dict[str, Any], name: str, kinds: tuple[type, ...], default: Any) -> Any:
    value = body.get(name)
    if value is None:
        return default
    if type(value) not in kinds:
        expected = " or ".join(kind.__name__ for kind in kinds)
        raise Refused(f"'{name}' has to be {expected}", name)
    return value


def _number(body: dict[str, Any], name: str, default: float, low: float, high: float) -> float:
    value = _typed(body, name, (int, float), default)
    if not low <= value <= high:
        raise Refused(f"'{name}' has to be from {low:g} to {high:g}", name)
    return value


def _nucleus(body: dict[str, Any]) -> float:
    value = float(_number(body, "top_p", 1.0, 0.0, 1.0))
    if value == 0:
        raise Refused(
            "'top_p' has to be above 0; 'temperature' 0 takes the likeliest token", "top_p"
        )
    return value


def _most(body: dict[str, Any]) -> int:
    name = (
        "max_completion_tokens" if body.get("max_completion_tokens") is not None else "max_tokens"
    )
    most = _typed(body, name, (int,), DEFAULT_TOKENS)
    if most < 1:
        raise Refused(f"'{name}' has to be at least 1", name)
    return most


def _stop(body: dict[str, Any]) -> tuple[str, ...]:
    value = _typed(body, "stop", (str, list), [])
    stops = [value] if isinstance(value, str) else value
    if len(stops) > STOPS or not all(isinstance(s, str) and 0 < len(s) <= 1000 for s in stops):
        raise Refused(f"'stop' has to be up to {STOPS} texts that are not empty", "stop")
    return tuple(stops)


def _prompt(body: dict[str, Any]) -> str | list[int]:
    value = _typed(body, "prompt", (str, list), None)
    if isinstance(value, list) and len(value) == 1 and isinstance(value[0], (str, list)):
        value = value[0]
    ids = isinstance(value, list) and all(type(i) is int for i in value)
    if not value or not (isinstance(value, str) or ids):
        raise Refused("'prompt' has to be one text, or the ids of its tokens, not empty", "prompt")
    return value


def _messages(body: dict[str, Any]) -> list[dict[str, str]]:
    value = _typed(body, "messages", (list,), None)
    if not value:
        raise Refused("'messages' has to be a list that is not empty", "messages")
    made = []
    for number, one in enumerate(value):
        role = one.get("role") if isinstance(one, dict) else None
        if role not in ("system", "developer", "user", "assistant"):
            raise Refused(f"messages[{number}]: no 'role' of system, user or assistant", "messages")
        made.append({"role": role, "content": _content(one.get("content"), number)})
    return made


def _content(value: Any, number: int) -> str:
    """Text, or parts that are all text."""
    if isinstance(value, list) and all(
        isinstance(p, dict) and p.get("type") == "text" for p in value
    ):
        value = "".join(part["text"] for part in value if isinstance(part.get("text"), str))
    if not isinstance(value, str):
        raise Refused(f"messages[{number}]: 'content' has to be text", "messages")
    return value
