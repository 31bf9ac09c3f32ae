"""`mcretrofit serve`: a model behind OpenAI's HTTP interface."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Annotated, Any

import typer

from mcretrofit.cli import _render as render
from mcretrofit.cli._models import chosen, loaded
from mcretrofit.cli._options import Config, Device, MaybeModel, Set, caching_flags
from mcretrofit.cli._sizes import in_bytes
from mcretrofit.errors import RetrofitError, UsageError

LOOPBACK = ("127.0.0.1", "localhost", "::1")


@caching_flags
def command(
    model: MaybeModel = None,
    host: Annotated[
        str, typer.Option(help="Address to listen on; another one opens the server to a network.")
    ] = LOOPBACK[0],
    port: Annotated[int, typer.Option(help="Port to listen on; 0 takes a free one.")] = 8000,
    name: Annotated[str | None, typer.Option(help="The model's name for clients.")] = None,
    max_requests: Annotated[int, typer.Option(help="Requests that run at once.")] = 4,
    cache_size: Annotated[
        str, typer.Option(help="Cached segments of all requests, such as 1GB.")
    ] = "1GB",
    max_length: Annotated[
        int, typer.Option(help="Tokens of a prompt and its answer at most.")
    ] = 131_072,
    base_only: Annotated[
        bool, typer.Option("--base-only", help="Leave a plain checkpoint unwrapped.")
    ] = False,
    config: Config = None,
    device: Device = "cpu",
    set_: Set = None,
    caching: dict[str, Any] | None = None,
) -> None:
    """Serve a model by OpenAI's HTTP interface.

    Routes /v1/models, /v1/completions and /v1/chat/completions, streaming included; on this
    machine only unless --host says otherwise. There is no key: put a proxy before it.
    """
    held = in_bytes(cache_size, "--cache-size")
    for flag, value in (("--max-requests", max_requests), ("--max-length", max_length)):
        if value < 1:
            raise UsageError(f"{flag} {value}: has to be at least 1")
    uvicorn = _server()
    listening = _listen(host, port)
    with listening:
        place = chosen(model)
        from mcretrofit.serving.app import app
        from mcretrofit.serving.engine import Engine, Limits

        found = loaded(place, caching, set_ or (), config=config, device=device, bare=base_only)
        title = name or (place if place.startswith("builtin:") else Path(place).resolve().name)
        engine = Engine(found, title, Limits(max_requests, held, max_length))
        address = f"[{host}]" if ":" in host else host
        print(f"serving {title} at http://{address}:{listening.getsockname()[1]}/v1", flush=True)
        if host not in LOOPBACK:
            render.note(f"--host {host}: whoever reaches this address may use the model")
        names = {*LOOPBACK, "[::1]"} if host in LOOPBACK else None
        # no access log: a query may hold a key
        how = uvicorn.Config(
            app(engine, names), log_level="warning", access_log=False, server_header=False
        )
        how.timeout_graceful_shutdown = 2
        uvicorn.Server(how).run(sockets=[listening])


def _server() -> Any:
    try:
        import starlette  # noqa: F401
        import uvicorn
    except ImportError as error:
        raise RetrofitError(
            f"serving needs {error.name}, which is not installed: pip install 'mcretrofit[serve]'"
        ) from error
    return uvicorn


def _listen(host: str, port: int) -> socket.socket:
    if not 0 <= port < 65536:
        raise UsageError(f"--port {port}: has to be from 0 to 65535")
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family)
    except OSError as error:
        reason = (error.strerror or str(error)).lower()
        raise RetrofitError(f"cannot listen on {host}, port {port}: {reason}") from error
