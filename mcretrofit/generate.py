"""Continue a prompt token by token with the growing cache, text coming out as it is made."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mcretrofit.costs import segment_bytes as segment_cost
from mcretrofit.errors import RetrofitError, UsageError
from mcretrofit.evaluate import read_pieces, segment_bytes
from mcretrofit.model import Loaded
from mcretrofit.retrofit import shapes
from mcretrofit.skeleton import Mixer
from mcretrofit.tokenizer import Tokenizer


class Sampling(NamedTuple):
    """How tokens are chosen; temperature 0 takes the likeliest one."""

    temperature: float = 0.0
    top_p: float = 1.0
    seed: int = 42


class Step(NamedTuple):
    """One new token: the text that is certain by now, and what is held after it."""

    text: str
    tokens: int  # new ones so far
    seconds: float  # since the prompt was read
    position: int  # tokens read in all
    cache_bytes: int


def generate(
    loaded: Loaded, prompt: str, max_new_tokens: int, sampling: Sampling | None = None
) -> Iterator[Step]:
    """Yield a `Step` a token until the end-of-text token or `max_new_tokens`."""
    sampling = Sampling() if sampling is None else sampling
    check(prompt, max_new_tokens, sampling)
    tokenizer = loaded.tokenizer()
    ids = tokenizer.encode(prompt)
    if not ids:
        raise UsageError(f"the prompt is no token to {tokenizer.name}: give some text to continue")
    return steps(loaded.model, tokenizer, ids, max_new_tokens, sampling)


def check(prompt: str, most: int, sampling: Sampling) -> None:
    """Refuse what no model could do; raises `UsageError`."""
    if not prompt:
        raise UsageError("the prompt is empty: give some text to continue")
    if most < 1:
        raise UsageError(f"--max-new-tokens {most}: has to be at least 1")
    if not 0 <= sampling.temperature < float("inf"):
        raise UsageError(f"--temperature {sampling.temperature}: has to be 0 or above")
    if not 0 < sampling.top_p <= 1:
        raise UsageError(f"--top-p {sampling.top_p}: has to be above 0 and at most 1")


def steps(
    model: Any,
    tokenizer: Tokenizer,
    ids: list[int],
    most: int,
    sampling: Sampling,
    turn: Callable[[], AbstractContextManager[Any]] = nullcontext,
) -> Iterator[Step]:
    """A `Step` a token; each pass through the model happens inside a `turn()` of its own."""
    random = torch.Generator().manual_seed(sampling.seed)
    text, made = _Text(tokenizer), 0
    logits, cache = _prompt(model, ids, turn)
    started = time.monotonic()
    while made < most:
        token = choose(logits[0, -1], sampling, random)
        if token == tokenizer.eos_id:
            break
        made += 1
        more = text.add(token, last=made == most)
        spent = time.monotonic() - started
        # as `model.generate`: the newest token is not read before it is needed
        yield Step(more, made, spent, len(ids) + made - 1, segment_bytes(cache))
        if made < most:
            one = torch.tensor([[token]], device=model.device)
            with turn(), torch.no_grad():
                logits = model(input_ids=one, past_key_values=cache, use_cache=True).logits
    rest = text.rest()
    if rest:
        spent = time.monotonic() - started
        yield Step(rest, made, spent, len(ids) + made - 1, segment_bytes(cache))


def _prompt(
    model: Any, ids: list[int], turn: Callable[[], AbstractContextManager[Any]]
) -> tuple[Tensor, Any]:
    pieces = read_pieces(model, torch.tensor([ids], device=model.device), None, keep=1)
    found = None
    while True:
        with turn(), torch.no_grad():
            piece = next(pieces, None)
        if piece is None:
            return found[1:]
        found = piece


def choose(logits: Tensor, sampling: Sampling, random: torch.Generator) -> int:
    """The next token from logits `[V]`: greedy, or of the smallest set with `top_p` of the mass."""
    wide = logits.float().cpu()
    if not bool(wide.isfinite().all()):
        raise RetrofitError("the model gives non-finite logits on this prompt")
    if sampling.temperature == 0:
        return int(wide.argmax())
    probabilities, order = (wide / sampling.temperature).softmax(-1).sort(descending=True)
    before = probabilities.cumsum(-1) - probabilities
    probabilities = probabilities.masked_fill(before >= sampling.top_p, 0)
    return int(order[torch.multinomial(probabilities, 1, generator=random)])


class _Text:
    """Ids to text where a character may be torn between tokens: only whole ones are let out."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self.ids: list[int] = []
        self.start = self.told = 0  # decoding starts at `start`; ids up to `told` are out

    def add(self, token: int, last: bool) -> str:
        self.ids.append(token)
        torn = self._pending().endswith("\ufffd") and len(self.ids) - self.told < 8
        return "" if torn and not last else self.rest()

    def rest(self) -> str:
        """What has not been let out yet."""
        more = self._pending()
        self.start, self.told = self.told, len(self.ids)
        return more

    def _pending(self) -> str:
        # decoded with the ids before them: a piece alone may lose its leading space
        before = self.tokenizer.decode(self.ids[self.start : self.told])
        return self.tokenizer.decode(self.ids[self.start :])[len(before) :]


def growth(loaded: Loaded, position: int) -> tuple[int, int]:
    """Bytes that one closed segment takes, and how many are held after `position` tokens."""
    if not loaded.wrapped:
        return 0, 0
    sizes = shapes(loaded.model)
    config, covers = loaded.config, loaded.covers
    each = sum(
        segment_cost(Mixer(name, *sizes[name]), len(covers[name].heads), config)
        for name in loaded.wrapped
    )
    closed = position // config.segment
    logarithmic = config.preset.segmentation == "logarithmic"
    return each, closed.bit_count() if logarithmic else closed
