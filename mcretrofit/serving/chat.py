"""Chat messages as one prompt: by the model's own template, or as named turns where it has none."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from mcretrofit.errors import RetrofitError
from mcretrofit.rawfile import read_json, show

Messages = list[dict[str, str]]
_NAMES = {"system": "System", "developer": "System", "user": "User", "assistant": "Assistant"}
_LONGEST = 1_000_000


def renderer(folder: Path | None) -> Callable[[Messages], str]:
    """`render(messages)` for the model in a folder; RetrofitError for a template that is no good."""
    found = None if folder is None else _template(folder)
    if found is None:
        return turns
    text, special = found
    try:
        from jinja2 import TemplateError
        from jinja2.sandbox import ImmutableSandboxedEnvironment
    except ImportError as error:
        raise RetrofitError(
            f"{folder}: its chat template needs jinja2: pip install 'mcretrofit[serve]'"
        ) from error

    def refuse(message: str) -> None:
        raise TemplateError(message)

    # a template is somebody's code: the sandbox keeps it to texts and numbers
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    environment.globals["raise_exception"] = refuse
    try:
        template = environment.from_string(text)
    except TemplateError as error:
        raise RetrofitError(f"{folder}: its chat template is damaged: {show(error)}") from error

    def render(messages: Messages) -> str:
        try:
            return template.render(messages=messages, add_generation_prompt=True, **special)
        except Exception as error:
            raise RetrofitError(
                f"the chat template refuses these messages: {show(error)}"
            ) from error

    return render


def turns(messages: Messages) -> str:
    """`User: ...`, blank line, `Assistant:`: what plain language models have read most of."""
    said = [f"{_NAMES[one['role']]}: {one['content'].strip()}" for one in messages]
    return "\n\n".join([*said, "Assistant:"])


def _template(folder: Path) -> tuple[str, dict[str, Any]] | None:
    path = folder / "tokenizer_config.json"
    settings = read_json(path) if path.is_file() else {}
    special = {name: _text(settings.get(name)) for name in ("bos_token", "eos_token")}
    alone = folder / "chat_template.jinja"
    text = settings.get("chat_template")
    if alone.is_file() and alone.stat().st_size <= _LONGEST:
        text = alone.read_text(encoding="utf-8")
    return (text, special) if isinstance(text, str) else None


def _text(token: Any) -> str:
    token = token.get("content") if isinstance(token, dict) else token
    return token if isinstance(token, str) else ""
