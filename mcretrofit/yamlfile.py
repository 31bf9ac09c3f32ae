"""The YAML files that a user gives: a mapping, or one line that says what is wrong with the file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from mcretrofit.errors import RetrofitError, UsageError


def mapping(path: Path) -> dict[Any, Any]:
    """Keys and values of a YAML file, none of an empty one; nothing in it is executed.

    Raises `RetrofitError` for a file that cannot be read, `UsageError` for one that is no mapping.
    """
    import yaml

    try:
        found = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        reason = (error.strerror or str(error)).lower()
        raise RetrofitError(f"{path} cannot be read: {reason}") from error
    except UnicodeDecodeError as error:
        raise RetrofitError(f"{path} is not readable YAML: not text in UTF-8") from error
    except RecursionError as error:
        raise RetrofitError(f"{path} is not readable YAML: nested too deeply") from error
    except (yaml.YAMLError, ValueError) as error:
        # a value such as the 32nd of January is a ValueError
        line = " ".join(str(error).split())
        raise RetrofitError(f"{path} is not readable YAML: {line}") from error
    if found is None:
        return {}
    if not isinstance(found, dict):
        raise UsageError(f"{path}: expected keys and values, found {type(found).__name__}")
    return found
