"""An exported folder to a hub: what would be sent, and sending it through the hub's own client."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, NamedTuple

from mcretrofit.checkpoint import open_checkpoint
from mcretrofit.errors import RetrofitError, UsageError
from mcretrofit.rawfile import read_json, show

_NAME = r"[A-Za-z0-9](?:[\w.-]{0,94}[A-Za-z0-9_])?"
_ID = re.compile(rf"{_NAME}/{_NAME}", re.ASCII)


class File(NamedTuple):
    """A file of the folder and its bytes."""

    name: str
    size: int


def files(folder: Path, repo_id: str) -> list[File]:
    """What would be sent, sorted; contacts nothing.

    Raises `RetrofitError` where the folder is no complete export, `UsageError` for the id.
    """
    if not _ID.fullmatch(repo_id) or "--" in repo_id or ".." in repo_id:
        raise UsageError(f"{show(repo_id)} is no hub id: expected OWNER/NAME")
    if not (folder / "config.json").is_file() or "auto_map" not in read_json(
        folder / "config.json"
    ):
        raise RetrofitError(
            f"{folder} is not an exported folder: `mcretrofit export` writes one (./export), push that"
        )
    # headers alone: a folder that cannot be opened here cannot be opened there
    weights = {file.name for file in open_checkpoint(folder).files()}
    found = sorted(path for path in folder.rglob("*"))
    strange = next((p for p in found if p.is_symlink() or not p.is_file()), None)
    if strange is not None:
        raise RetrofitError(f"{strange} is no plain file of an exported folder: take it out first")
    names = {path.name for path in found}
    for needed in (*weights, "README.md", "modeling_mcretrofit.py"):
        if needed not in names:
            raise RetrofitError(f"{folder} lacks {needed}: export it again")
    return [File(path.name, path.stat().st_size) for path in found if path.name[0] != "."]


def push(
    folder: Path,
    repo_id: str,
    *,
    private: bool = False,
    revision: str | None = None,
    message: str = "Upload by mcretrofit",
    api: Any = None,
) -> str:
    """Make the repository where it is not there and send the folder; returns its address.

    The hub's client finds the key of whoever is logged in. Raises `RetrofitError` with one line.
    """
    sent = [file.name for file in files(folder, repo_id)]
    try:
        if api is None:
            from huggingface_hub import HfApi

            api = HfApi()
        api.create_repo(repo_id, repo_type="model", private=private, exist_ok=True)
        done = api.upload_folder(
            repo_id=repo_id,
            repo_type="model",
            folder_path=str(folder),
            allow_patterns=sent,
            revision=revision,
            commit_message=message,
        )
    except Exception as error:
        # whatever the network stack raises, the user needs one line, and never their key
        reason = next(iter(str(error).splitlines()), "") or type(error).__name__
        reason = re.sub(r"\bhf_\w+", "hf_...", show(reason))
        raise RetrofitError(f"{repo_id}: could not be sent: {reason}") from error
    return str(getattr(done, "commit_url", None) or done)
