"""An answer in the making: the model works in a thread, its pieces arrive in the event loop."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import suppress

from mcretrofit.serving.engine import Cancelled, Engine, Piece, Ticket

WATCH = 0.25  # seconds between looks whether the client is still there


class Job:
    """One admitted request; it stops at the model's next pass once nobody reads its pieces."""

    def __init__(self, engine: Engine, ticket: Ticket) -> None:
        self.engine, self.ticket = engine, ticket
        self._loop = asyncio.get_running_loop()
        self._queue: asyncio.Queue[Piece | BaseException | None] = asyncio.Queue()
        self._thread = threading.Thread(target=self._work, daemon=True)
        self._thread.start()

    async def pieces(
        self, gone: Callable[[], Awaitable[bool]] | None = None
    ) -> AsyncIterator[Piece]:
        """The pieces as they are made; `gone()` is asked now and then whether to give up."""
        looked = self._loop.time()
        try:
            while True:
                found: Piece | BaseException | None = Piece("", 0)
                with suppress(asyncio.TimeoutError):
                    found = await asyncio.wait_for(self._queue.get(), WATCH)
                if isinstance(found, BaseException):
                    raise found
                if found is None:
                    return
                if found.tokens or found.finish:
                    yield found
                if gone is not None and self._loop.time() - looked > WATCH:
                    looked = self._loop.time()
                    if await gone():
                        return
        finally:
            self.ticket.gone.set()

    def _work(self) -> None:
        end: BaseException | None = None
        try:
            for piece in self.engine.run(self.ticket):
                self._put(piece)
        except Cancelled:
            return
        except BaseException as error:  # noqa: BLE001  whoever waits for the answer gets it
            end = error
        self._put(end)

    def _put(self, found: Piece | BaseException | None) -> None:
        try:
            self._loop.call_soon_threadsafe(self._queue.put_nowait, found)
        except RuntimeError:
            # the loop has been closed: the server is going down
            self.ticket.gone.set()
