"""The routes: `/v1/models`, `/v1/completions`, `/v1/chat/completions`, in OpenAI's JSON."""

from __future__ import annotations

import json
import logging
import secrets
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Collection
from pathlib import Path
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from mcretrofit.errors import RetrofitError
from mcretrofit.serving.asked import Asked, Refused, read
from mcretrofit.serving.engine import Engine, Piece, Ticket
from mcretrofit.serving.job import Job

BODY = 10_000_000  # bytes of a request
_log = logging.getLogger("mcretrofit.serving")


def app(engine: Engine, hosts: Collection[str] | None = None) -> Starlette:
    """The ASGI application of one model; `hosts` are the names it answers to (None: all).

    A page in a browser can reach a loopback server under a name of its own; `hosts` keeps it out.
    """
    started = int(time.time())

    async def models(_: Request) -> Response:
        one = {"id": engine.name, "object": "model", "created": started, "owned_by": "mcretrofit"}
        return JSONResponse({"object": "list", "data": [one]})

    async def completions(request: Request) -> Response:
        return await _answer(engine, request, chat=False)

    async def chat(request: Request) -> Response:
        return await _answer(engine, request, chat=True)

    def guarded(endpoint: Callable[[Request], Awaitable[Response]]) -> Callable:
        async def answer(request: Request) -> Response:
            try:
                _check_host(request, hosts)
                return await endpoint(request)
            except Refused as error:
                head = {"Retry-After": "1"} if error.status == 429 else None
                return JSONResponse({"error": error.error}, error.status, head)
            # raised further it would be printed, with whatever words it holds
            except Exception as error:
                return JSONResponse({"error": _error(error)}, 500)

        return answer

    routes = [
        Route("/v1/models", guarded(models)),
        Route("/v1/completions", guarded(completions), methods=["POST"]),
        Route("/v1/chat/completions", guarded(chat), methods=["POST"]),
    ]
    return Starlette(routes=routes, exception_handlers={HTTPException: _http})


async def _answer(engine: Engine, request: Request, chat: bool) -> Response:
    asked = read(await _body(request), chat)
    form = _Form(engine.name, chat)
    job = Job(engine, engine.admit(asked))
    if asked.stream:
        head = {"Cache-Control": "no-cache"}
        events = _events(job, form, asked)
        return StreamingResponse(events, media_type="text/event-stream", headers=head)
    text, last = [], Piece("", 0)
    async for last in job.pieces(request.is_disconnected):
        text.append(last.text)
    return JSONResponse(form.whole("".join(text), last, job.ticket))


async def _events(job: Job, form: _Form, asked: Asked) -> AsyncIterator[str]:
    """Server-sent events; one that fails on the way ends in an event with the error."""
    last = Piece("", 0)
    try:
        if form.chat:
            yield _event(form.part({"role": "assistant", "content": ""}, None))
        async for last in job.pieces():
            if last.text or last.finish:
                yield _event(form.part(last.text, last.finish))
    # the answer has begun: whatever happened can only be its last event
    except Exception as error:
        yield _event({"error": _error(error)})
        return
    if asked.usage:
        yield _event({**form.part("", None), "choices": [], "usage": _usage(last, job.ticket)})
    yield "data: [DONE]\n\n"


class _Form:
    """How one answer looks: its id and its objects, whole or in parts."""

    def __init__(self, model: str, chat: bool) -> None:
        self.chat = chat
        name = "chatcmpl" if chat else "cmpl"
        self.head = {"id": f"{name}-{secrets.token_hex(12)}", "created": int(time.time())}
        self.head["model"] = model

    def part(self, text: str | dict[str, str], finish: str | None) -> dict[str, Any]:
        """One event."""
        if self.chat:
            delta = text if isinstance(text, dict) else {"content": text} if text else {}
            choice: dict[str, Any] = {"index": 0, "delta": delta, "finish_reason": finish}
            return {**self.head, "object": "chat.completion.chunk", "choices": [choice]}
        choice = {"index": 0, "text": text, "logprobs": None, "finish_reason": finish}
        return {**self.head, "object": "text_completion", "choices": [choice]}

    def whole(self, text: str, last: Piece, ticket: Ticket) -> dict[str, Any]:
        """The answer in one object."""
        if self.chat:
            message = {"role": "assistant", "content": text}
            choice = {"index": 0, "message": message, "logprobs": None}
        else:
            choice = {"index": 0, "text": text, "logprobs": None}
        choice["finish_reason"] = last.finish
        kind = "chat.completion" if self.chat else "text_completion"
        counts = _usage(last, ticket)
        return {**self.head, "object": kind, "choices": [choice], "usage": counts}


def _usage(last: Piece, ticket: Ticket) -> dict[str, int]:
    read, made = len(ticket.ids), last.tokens
    return {"prompt_tokens": read, "completion_tokens": made, "total_tokens": read + made}


def _event(content: dict[str, Any]) -> str:
    return f"data: {json.dumps(content, allow_nan=False)}\n\n"


async def _body(request: Request) -> Any:
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    # a form of any web page can post other types across origins
    if kind != "application/json":
        raise Refused("send JSON, with the header Content-Type: application/json", status=415)
    raw = bytearray()
    async for chunk in request.stream():
        raw += chunk
        if len(raw) > BODY:
            raise Refused(f"the body has more than {BODY} bytes", status=413)
    try:
        return json.loads(raw.decode("utf-8"))
    except (ValueError, RecursionError) as error:
        raise Refused("the body is not valid JSON") from error


def _check_host(request: Request, hosts: Collection[str] | None) -> None:
    name = request.headers.get("host", "").lower()
    name = name if name.endswith("]") else name.rpartition(":")[0] or name
    if hosts is not None and name not in hosts:
        raise Refused("this server does not answer to that host name", status=403)


async def _http(_: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    return JSONResponse({"error": Refused(f"{error.detail}").error}, error.status_code)


def _error(error: Exception) -> dict[str, Any]:
    """For the client; what nobody foresaw keeps its text to itself, and shows where it arose."""
    if isinstance(error, Refused):
        return error.error
    if isinstance(error, RetrofitError):
        return Refused(str(error), kind="server_error").error
    place = error.__traceback__
    while place is not None and place.tb_next is not None:
        place = place.tb_next
    where = (
        "" if place is None else f"{Path(place.tb_frame.f_code.co_filename).name}:{place.tb_lineno}"
    )
    # without its message: that may hold a prompt or a key
    _log.error("internal error: %s at %s", type(error).__name__, where)
    return Refused("internal error", kind="server_error").error
