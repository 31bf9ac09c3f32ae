"""`mcretrofit push`: an exported folder to a model hub."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from mcretrofit.cli import _render as render
from mcretrofit.cli._options import Json


def command(
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="What `export` wrote.")],
    repo_id: Annotated[str, typer.Argument(metavar="REPO_ID", help="OWNER/NAME on the hub.")],
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="List the files; contact nothing.")
    ] = False,
    private: Annotated[bool, typer.Option(help="Make a new repository private.")] = False,
    revision: Annotated[str | None, typer.Option(help="Branch to write to.")] = None,
    json: Json = False,
) -> None:
    """Send an exported folder to a model hub.

    The hub's client takes the key that you are logged in with, and the hub that HF_ENDPOINT names.
    """
    from mcretrofit import pushing

    found = pushing.files(folder, repo_id)
    total = sum(file.size for file in found)
    address = None if dry_run else pushing.push(folder, repo_id, private=private, revision=revision)
    if json:
        sent = {file.name: file.size for file in found}
        return render.json_row({"repo_id": repo_id, "sent": address, "bytes": total, "files": sent})
    render.table("", ("file", "size"), [(f.name, render.size(f.size)) for f in found])
    many = f"{len(found)} files, {render.size(total)}"
    print(f"{repo_id}: would send {many}" if dry_run else f"{repo_id}: sent {many} ({address})")
