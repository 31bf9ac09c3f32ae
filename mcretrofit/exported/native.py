"""Caching around transformers' own class, which stays what it is: the folder's class derives from it."""

from __future__ import annotations

from typing import Any

from mcretrofit._hosts import spare_
from mcretrofit.exported.attaching import attach_
from mcretrofit.retrofit import mixers


class Caching:
    """Mixed in before transformers' class: attaches what config.json calls caching.

    The tensors lie in the folder as the base had them, so they are read as the base's are.
    """

    def __init__(self, config: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(config, *args, **kwargs)
        self._keep_in_fp32_modules_strict = {
            *(self._keep_in_fp32_modules_strict or ()),
            r"\bmc\b",
        }
        attach_(self, config.caching, config.covers)
        for mixer in mixers(self):
            if not hasattr(mixer.module, "mc"):
                spare_(mixer.module)

    @classmethod
    def is_custom_code(cls) -> bool:
        """No: custom code would have to do without the conversions of its model type's tensors."""
        return False
