"""Text to token ids: Hugging Face `tokenizer.json`, RWKV World vocabulary files, raw bytes."""

from __future__ import annotations

import ast
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

from mcretrofit.errors import RetrofitError

_EOS_NAMES = ("<|endoftext|>", "</s>", "<eos>", "<|end_of_text|>")


class Tokenizer(Protocol):
    """What tasks and evaluation ask of a tokenizer; ids stay below `vocab_size`."""

    name: str
    vocab_size: int
    eos_id: int | None

    def encode(self, text: str) -> list[int]: ...

    def decode(self, ids: Sequence[int]) -> str: ...


class BytesTokenizer:
    """Ids are the UTF-8 bytes (V = 256); a torn character decodes to U+FFFD."""

    name = "bytes"
    vocab_size = 256
    eos_id: int | None = None

    def encode(self, text: str) -> list[int]:
        return list(text.encode("utf-8"))

    def decode(self, ids: Sequence[int]) -> str:
        return bytes(ids).decode("utf-8", errors="replace")

    def byte_counts(self, ids: Sequence[int]) -> list[int]:
        return [1] * len(ids)


class WorldTokenizer:
    """RWKV World: greedy longest match over bytes; id 0 ends a text and is no word."""

    eos_id: int | None = 0

    def __init__(self, words: dict[int, bytes], name: str) -> None:
        self.name = name
        self.vocab_size = max(words, default=0) + 1
        self._words = words
        self._trie: dict[int, Any] = {}
        for index, word in words.items():
            node = self._trie
            for byte in word:
                node = node.setdefault(byte, {})
            # bytes are never negative, so -1 can hold the id of the word that ends here
            node[-1] = index

    def encode(self, text: str) -> list[int]:
        data, ids, at = text.encode("utf-8"), [], 0
        while at < len(data):
            node, end, found = self._trie, at, None
            for place in range(at, len(data)):
                node = node.get(data[place])
                if node is None:
                    break
                if -1 in node:
                    found, end = node[-1], place + 1
            if found is None:
                raise RetrofitError(f"{self.name}: no word starts with the byte {data[at]:#04x}")
            ids.append(found)
            at = end
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        # a model may emit rows that only pad its embedding (65,530 to 65,535): mark them
        lost = "\ufffd".encode()
        data = b"".join(b"" if i == 0 else self._words.get(i, lost) for i in ids)
        return data.decode("utf-8", errors="replace")

    def byte_counts(self, ids: Sequence[int]) -> list[int]:
        return [len(self._words.get(i, b"")) for i in ids]


class HuggingFaceTokenizer:
    """A `tokenizer.json`, read by the `tokenizers` library; no special token is added."""

    def __init__(self, path: Path) -> None:
        from tokenizers import Tokenizer as Fast

        text = _read(path)
        try:
            self._fast = Fast.from_str(text)
        # `tokenizers` raises bare Exception for every malformed file
        except Exception as error:
            raise RetrofitError(f"{path} is not a tokenizer.json: {_line(error)}") from error
        self._fast.no_truncation()
        self._fast.no_padding()
        self._added = self._fast.get_added_tokens_decoder()
        # byte-level pieces spell each byte as one character of their own alphabet
        self._byte_level = '"ByteLevel"' in json.dumps(json.loads(text).get("decoder"))
        self.name = path.name
        self.vocab_size = max(self._fast.get_vocab().values(), default=-1) + 1
        self.eos_id: int | None = _eos(path.parent, self._fast.token_to_id)

    def encode(self, text: str) -> list[int]:
        return self._fast.encode(text, add_special_tokens=False).ids

    def decode(self, ids: Sequence[int]) -> str:
        return self._fast.decode(list(ids), skip_special_tokens=True)

    def byte_counts(self, ids: Sequence[int]) -> list[int]:
        return [self._bytes(i) for i in ids]

    def _bytes(self, index: int) -> int:
        piece = self._fast.id_to_token(index) or ""
        if self._byte_level and index not in self._added:
            return len(piece)
        if len(piece) == 6 and piece.startswith("<0x"):
            return 1
        return len(piece.replace("\u2581", " ").encode("utf-8"))


def load_tokenizer(place: Path | None, vocab_size: int) -> Tokenizer:
    """The tokenizer in a folder, or of one file; bytes where there is none and V = 256.

    Raises `RetrofitError` where none is found, the file is malformed, or its ids do not fit V.
    """
    path = _find(Path(place)) if place is not None else None
    if path is None and vocab_size == 256:
        return BytesTokenizer()
    if path is None:
        where = f"in {place}" if place is not None else "beside the model"
        raise RetrofitError(
            f"no tokenizer {where} for a vocabulary of {vocab_size}: give a tokenizer.json "
            "or an rwkv_vocab_*.txt (only a vocabulary of 256 is read as bytes)"
        )
    tokenizer: Tokenizer
    tokenizer = read_world(path) if path.suffix == ".txt" else HuggingFaceTokenizer(path)
    if tokenizer.vocab_size > vocab_size:
        raise RetrofitError(
            f"{path} has ids up to {tokenizer.vocab_size - 1}, but the model embeds only "
            f"{vocab_size}: give the tokenizer that belongs to it"
        )
    return tokenizer


def is_bytes(config: Any) -> bool:
    """Whether a model's vocabulary is that of bytes, which need no file."""
    return config.get_text_config().vocab_size == BytesTokenizer.vocab_size


def has_tokenizer(place: Path) -> bool:
    """Whether a folder holds one."""
    return _find(place) is not None


def read_world(path: Path) -> WorldTokenizer:
    """An RWKV World vocabulary file: lines of `index repr length`, length in bytes."""
    words: dict[int, bytes] = {}
    # not splitlines: a word may hold a bare separator such as U+2028
    lines = _read(path).removesuffix("\n").split("\n")
    for number, line in enumerate(lines, 1):
        try:
            index, rest = line.split(" ", 1)
            literal, size = rest.rsplit(" ", 1)
            word = ast.literal_eval(literal)
            word = word.encode("utf-8") if isinstance(word, str) else bytes(word)
            if not word or len(word) != int(size) or int(index) in words or int(index) < 1:
                raise ValueError("an empty word, a wrong length or an index that is taken")
        except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError) as error:
            raise RetrofitError(
                f"{path}, line {number}: not `index repr length` ({_line(error)})"
            ) from error
        words[int(index)] = word
    return WorldTokenizer(words, path.name)


def byte_counts(tokenizer: Tokenizer, ids: Sequence[int]) -> list[int]:
    """UTF-8 bytes that each id stands for; by decoding it where the tokenizer does not know."""
    count = getattr(tokenizer, "byte_counts", None)
    return count(ids) if count else [len(tokenizer.decode([i]).encode("utf-8")) for i in ids]


def _find(place: Path) -> Path | None:
    if place.is_file() and place.suffix in (".json", ".txt"):
        return place
    if not place.is_dir():
        raise RetrofitError(f"{place} is neither a folder nor a tokenizer.json or rwkv_vocab_*.txt")
    if (place / "tokenizer.json").is_file():
        return place / "tokenizer.json"
    found = sorted(place.glob("rwkv_vocab*.txt"))
    if len(found) > 1:
        names = " and ".join(p.name for p in found)
        raise RetrofitError(f"{place} holds {names}: name the one to use")
    return found[0] if found else None


def _eos(folder: Path, to_id: Any) -> int | None:
    for name in ("tokenizer_config.json", "special_tokens_map.json"):
        path = folder / name
        if path.is_file():
            try:
                token = json.loads(_read(path)).get("eos_token")
            except (json.JSONDecodeError, AttributeError) as error:
                raise RetrofitError(f"{path} is not a JSON object: {_line(error)}") from error
            token = token.get("content") if isinstance(token, dict) else token
            if token is not None and to_id(token) is not None:
                return to_id(token)
    return next((to_id(name) for name in _EOS_NAMES if to_id(name) is not None), None)


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise RetrofitError(f"{path} cannot be read as UTF-8 text: {_line(error)}") from error


def _line(error: BaseException) -> str:
    return " ".join(str(error).split()) or type(error).__name__
