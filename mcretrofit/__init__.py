"""Give a pretrained recurrent language model a memory that grows (Memory Caching, arXiv 2602.24281).

from mcretrofit import CachingConfig, load, retrofitted
"""

from __future__ import annotations

from typing import Any

__version__ = "0.1.0"
__all__ = ["CachingConfig", "export", "load", "retrofit_", "retrofitted", "revert_"]

_HOMES = {
    "CachingConfig": "config",
    "export": "exporting",
    "load": "model",
    "retrofit_": "retrofit",
    "retrofitted": "retrofit",
    "revert_": "retrofit",
}


def __getattr__(name: str) -> Any:
    # torch and transformers are imported when they are first needed
    if name not in _HOMES:
        raise AttributeError(f"module 'mcretrofit' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f"mcretrofit.{_HOMES[name]}"), name)
