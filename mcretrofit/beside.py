"""Files that go along with a checkpoint's weights: its tokenizer's and its generation settings."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from mcretrofit.checkpoint import Checkpoint
from mcretrofit.errors import RetrofitError
from mcretrofit.rawfile import read_json
from mcretrofit.sources import hub_tokenizer
from mcretrofit.tokenizer import has_tokenizer

if TYPE_CHECKING:
    from transformers import PreTrainedModel

CARRIED = (
    *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"),
    *("vocab.json", "merges.txt", "vocab.txt", "tokenizer.model", "chat_template.jinja"),
    *("rwkv_vocab*.txt", "generation_config.json"),
)


def carried(checkpoint: Checkpoint | None) -> dict[str, Path]:
    """The tokenizer's and the generation settings' files beside the checkpoint, by name."""
    if checkpoint is None:
        return {}
    return _beside(checkpoint.folder or checkpoint.files()[0].parent)


def borrowed(checkpoint: Checkpoint | None, model: PreTrainedModel) -> dict[str, Path]:
    """The files of another repository's tokenizer, where the checkpoint is published without one.

    None where they are not to be had: the folder then has the tokenizer that its base has.
    """
    usual = getattr(model.config, "tokenizer", None)
    if checkpoint is None or not isinstance(usual, str):
        return {}
    if has_tokenizer(checkpoint.folder or checkpoint.files()[0].parent):
        return {}
    try:
        return _beside(hub_tokenizer(usual))
    except RetrofitError:
        return {}


def _beside(place: Path) -> dict[str, Path]:
    files = {p.name: p for pattern in CARRIED for p in sorted(place.glob(pattern)) if p.is_file()}
    settings = read_json(files["tokenizer_config.json"]) if "tokenizer_config.json" in files else {}
    for reference in _strings(settings.get("auto_map")):
        code = place / f"{reference.partition('.')[0]}.py"
        if code.parent == place and code.is_file():
            files[code.name] = code
    return files


def _strings(value: Any) -> list[str]:
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list):
        return [text for part in value for text in _strings(part)]
    return [value] if isinstance(value, str) else []
