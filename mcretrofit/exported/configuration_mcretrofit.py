"""The configuration of an exported model: the checkpoint's own fields, and what is cached of it."""

from __future__ import annotations

from typing import Any

from mcretrofit.decoder import DecoderConfig as PlainConfig


class DecoderConfig(PlainConfig):
    """`caching` holds the fields of `CachingConfig`, `covers` what of each wrapped mixer is cached.

    Both are None where nothing is wrapped.
    """

    def __init__(
        self,
        family: str = "gla",
        caching: dict[str, Any] | None = None,
        covers: dict[str, dict[str, Any]] | None = None,
        **fields: Any,
    ) -> None:
        self.caching, self.covers = caching, covers
        super().__init__(family, **fields)
