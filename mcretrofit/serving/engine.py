"""The model's turns: who may run, how many bytes of segments all may hold, and the text they get."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

from mcretrofit.errors import RetrofitError
from mcretrofit.generate import Sampling, growth, steps
from mcretrofit.model import Loaded
from mcretrofit.serving.asked import Asked, Refused
from mcretrofit.serving.chat import renderer

SPARE = 2  # buffers double when full


class Limits(NamedTuple):
    """What all requests together, and each, may take."""

    requests: int = 4
    cache_bytes: int = 1_000_000_000
    tokens: int = 131_072  # of a prompt and its answer


class Cancelled(Exception):
    """The client has gone."""


class Piece(NamedTuple):
    """Text that is certain; `finish` is `stop` or `length` on the last one."""

    text: str
    tokens: int
    finish: str | None = None


class Ticket:
    """A request that was let in: its tokens, what it may hold, and whether it is still wanted."""

    def __init__(self, asked: Asked, ids: list[int], room: int) -> None:
        self.asked, self.ids, self.room = asked, ids, room
        self.gone = threading.Event()
        self.held = 0  # bytes of segments at its latest token


class Engine:
    """One model, one pass at a time; requests take turns token by token, each with its own cache."""

    def __init__(self, loaded: Loaded, name: str, limits: Limits | None = None) -> None:
        self.loaded, self.name = loaded, name
        self.limits = Limits() if limits is None else limits
        self.tokenizer = loaded.tokenizer()
        self.chat = renderer(loaded.checkpoint.folder)
        # asked once: it runs the model without its caching
        self._each = growth(loaded, 0)[0]
        self.running: list[Ticket] = []
        self._door, self._model = threading.Lock(), threading.Lock()

    def admit(self, asked: Asked) -> Ticket:
        """A ticket, to be given back by `run`; raises `Refused`: 400 where it can never fit, 429
        where it does not fit now, 404 for another model."""
        if asked.model not in (None, self.name):
            known = f"no model '{asked.model[:200]}' here: this server has '{self.name}'"
            raise Refused(known, "model", status=404, code="model_not_found")
        ids = self._ids(asked)
        room = self.room(len(ids) + asked.max_tokens)
        _check(len(ids) + asked.max_tokens, room, self.limits)
        with self._door:
            if len(self.running) >= self.limits.requests:
                raise _busy(f"{self.limits.requests} requests are running, the most at once")
            if sum(t.room for t in self.running) + room > self.limits.cache_bytes:
                raise _busy("running requests hold the room for cached segments")
            ticket = Ticket(asked, ids, room)
            self.running.append(ticket)
        return ticket

    def room(self, tokens: int) -> int:
        """Bytes of cached segments that a text of so many tokens may take at most."""
        config = self.loaded.config
        if config is None:
            return 0
        closed = tokens // config.segment
        if config.preset.segmentation == "logarithmic":
            closed = closed.bit_length()
        # the open segment: its start, its own state, its summary
        return self._each * (SPARE * closed + 3)

    def run(self, ticket: Ticket) -> Iterator[Piece]:
        """The answer piece by piece; the ticket is given back whatever happens."""
        try:
            yield from self._pieces(ticket)
        finally:
            self.leave(ticket)

    def leave(self, ticket: Ticket) -> None:
        """Give a ticket back; once is enough."""
        with self._door:
            if ticket in self.running:
                self.running.remove(ticket)

    def _pieces(self, ticket: Ticket) -> Iterator[Piece]:
        asked, made = ticket.asked, 0
        seed = random.SystemRandom().getrandbits(32) if asked.seed is None else asked.seed
        sampling = Sampling(asked.temperature, asked.top_p, seed % 2**63)
        until = Until(asked.stop)
        model = self.loaded.model
        for step in steps(
            model, self.tokenizer, ticket.ids, asked.max_tokens, sampling, self._turn(ticket)
        ):
            made, ticket.held = step.tokens, step.cache_bytes
            text = until.add(step.text)
            if until.met:
                yield Piece(text, made, "stop")
                return
            if text:
                yield Piece(text, made)
        yield Piece(until.rest(), made, "length" if made == asked.max_tokens else "stop")

    def _turn(self, ticket: Ticket) -> Callable:
        @contextmanager
        def turn() -> Iterator[None]:
            # a wrapped mixer keeps its place in the module: two passes at once would mix them up
            with self._model:
                if ticket.gone.is_set():
                    raise Cancelled
                yield

        return turn

    def _ids(self, asked: Asked) -> list[int]:
        if isinstance(asked.prompt, str):
            ids = self.tokenizer.encode(asked.prompt)
        elif isinstance(asked.prompt[0], int):
            most = self.loaded.model.config.get_text_config().vocab_size
            ids = asked.prompt
            if not all(0 <= i < most for i in ids):
                raise Refused(f"'prompt' holds a token that is not in 0 to {most - 1}", "prompt")
        else:
            try:
                ids = self.tokenizer.encode(self.chat(asked.prompt))
            except RetrofitError as error:
                raise Refused(str(error), "messages") from error
        if not ids:
            raise Refused("the prompt is no token to this model's tokenizer")
        return ids


class Until:
    """Text up to the first of some stops; what may be the start of one is held back."""

    def __init__(self, stops: tuple[str, ...]) -> None:
        self.stops, self.held, self.met = stops, "", False

    def add(self, text: str) -> str:
        """What is certain to come before every stop."""
        self.held += text
        found = [at for at in map(self.held.find, self.stops) if at >= 0]
        if found:
            self.met, self.held = True, self.held[: min(found)]
            return self.rest()
        keep = max((_overlap(self.held, stop) for stop in self.stops), default=0)
        out, self.held = self.held[: len(self.held) - keep], self.held[len(self.held) - keep :]
        return out

    def rest(self) -> str:
        """What was held back."""
        out, self.held = self.held, ""
        return out


def _overlap(text: str, stop: str) -> int:
    longest = min(len(text), len(stop) - 1)
    return next((n for n in range(longest, 0, -1) if text.endswith(stop[:n])), 0)


def _check(tokens: int, room: int, limits: Limits) -> None:
    if tokens > limits.tokens:
        message = f"{tokens} tokens of prompt and answer, this server reads up to {limits.tokens}"
        raise Refused(message, code="context_length_exceeded")
    if room > limits.cache_bytes:
        message = f"{tokens} tokens may need {room} bytes of cached segments, but this server has "
        message += f"{limits.cache_bytes}: a shorter prompt or fewer max_tokens"
        raise Refused(message, code="context_length_exceeded")


def _busy(why: str) -> Refused:
    return Refused(
        f"{why}: try again later", status=429, kind="rate_limit_error", code="rate_limit_exceeded"
    )
