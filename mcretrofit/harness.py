"""lm-evaluation-harness: the model class `mcretrofit`, registered by importing this module.

`pretrained` takes whatever MODEL takes on the command line (a wrapped folder, a checkpoint, a hub id,
`builtin:NAME`); every key of the caching configuration is an argument too, and `base=True` leaves the
model unmodified: `--model mcretrofit --model_args pretrained=builtin:gla,variant=grm,segment=64`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from mcretrofit.errors import RetrofitError, UsageError
from mcretrofit.evaluate import read_pieces, segment_bytes
from mcretrofit.generate import Sampling, choose
from mcretrofit.model import Loaded, attach, load
from mcretrofit.retrofit import revert_
from mcretrofit.settings import settings

try:
    from lm_eval.api.model import TemplateLM
    from lm_eval.api.registry import register_model
except ImportError as error:
    raise RetrofitError(
        "lm-evaluation-harness is not installed: pip install 'mcretrofit[eval]'"
    ) from error

MAX_NEW_TOKENS = 256  # where a task names no limit


@register_model("mcretrofit")
class HarnessLM(TemplateLM):
    """A model with its caching on, as the harness asks for it; documents are never cut."""

    def __init__(
        self,
        pretrained: str | Loaded,
        *,
        batch_size: int | str = 1,
        max_batch_size: int | None = None,
        device: str | None = None,
        dtype: str | None = None,
        config: str | None = None,
        base: bool = False,
        **caching: Any,
    ) -> None:
        super().__init__()
        # before anything is loaded: a typo should not cost seconds
        settings(None, None, caching)
        if isinstance(pretrained, Loaded):
            self.loaded = pretrained
        else:
            place = "cpu" if device is None or not torch.cuda.is_available() else device
            found = load(pretrained, config=config, dtype=dtype, device=place)
            self.loaded = _covered(found, base, caching)
        self.batch_size = _rows(batch_size, max_batch_size)
        self.words = self.loaded.tokenizer()
        self.longest = self.held = 0  # tokens of a row, bytes of its segments

    @property
    def eot_token_id(self) -> int:
        """The end of text; a new line where the tokenizer has none."""
        end = self.words.eos_id
        return self.words.encode("\n")[0] if end is None else end

    @property
    def tokenizer_name(self) -> str:
        return self.words.name

    def tok_encode(
        self, string: str, add_special_tokens: bool | None = None, **_: Any
    ) -> list[int]:
        return self.words.encode(string)

    def loglikelihood_rolling(self, requests: Sequence[Any], disable_tqdm: bool = False):
        """Of whole texts behind the end-of-text token, in one pass however long they are."""
        texts = [request.args[0] for request in requests]
        pairs = [((text, ""), [self.eot_token_id], self.words.encode(text)) for text in texts]
        found = [score for score, _ in self._loglikelihood_tokens(pairs)]
        for text, score in zip(texts, found, strict=True):
            self.cache_hook.add_partial("loglikelihood_rolling", (text,), score)
        return found

    @torch.no_grad()
    def _loglikelihood_tokens(
        self, requests: Sequence[tuple[Any, list[int], list[int]]], **_: Any
    ) -> list[tuple[float, bool]]:
        found: list[tuple[float, bool]] = [(0.0, True)] * len(requests)
        for some in self._batches([len(a) + len(b) for _, a, b in requests]):
            rows = [requests[i][1] + requests[i][2] for i in some]
            counts = [len(requests[i][2]) for i in some]
            for i, one in zip(some, self._scored(rows, counts), strict=True):
                found[i] = one
                if all(requests[i][0]):
                    self.cache_hook.add_partial("loglikelihood", requests[i][0], one)
        return found

    def _scored(self, rows: list[list[int]], counts: list[int]) -> list[tuple[float, bool]]:
        """Log-likelihood of the last `counts` ids of each row, and whether each was the likeliest."""
        ids, mask = self._padded(rows)
        first = ids.shape[1] - max(counts)
        sums, right = [0.0] * len(rows), [True] * len(rows)
        read = None if mask is None else mask[:, :-1]
        for start, logits, cache in read_pieces(self.loaded.model, ids[:, :-1], read):
            self._note(cache, rows)
            stop = start + logits.shape[1]
            if stop < first:
                continue
            wide, wanted = logits.float().log_softmax(-1), ids[:, start + 1 : stop + 1]
            chance = wide.gather(-1, wanted[..., None])[..., 0].double()
            likeliest = wide.argmax(-1) == wanted
            for b, count in enumerate(counts):
                begin = max(ids.shape[1] - count - 1 - start, 0)
                sums[b] += float(chance[b, begin:].sum())
                right[b] &= bool(likeliest[b, begin:].all())
        return list(zip(sums, right, strict=True))

    @torch.no_grad()
    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
        """Continuations up to the first of the stop texts, the end of text or the limit."""
        asked = [request.args for request in requests]
        said = [""] * len(asked)
        groups: dict[str, list[int]] = {}
        for i, (_, options) in enumerate(asked):
            groups.setdefault(repr(sorted(options.items())), []).append(i)
        for group in groups.values():
            rows = [self.words.encode(asked[i][0]) or [self.eot_token_id] for i in group]
            for some in self._batches([len(row) for row in rows]):
                options = asked[group[0]][1]
                texts = self._continued([rows[i] for i in some], options)
                for i, text in zip(some, texts, strict=True):
                    said[group[i]] = text
                    self.cache_hook.add_partial("generate_until", asked[group[i]], text)
        return said

    def _continued(self, rows: list[list[int]], options: dict[str, Any]) -> list[str]:
        until = options.get("until") or []
        stops = [until] if isinstance(until, str) else list(until)
        most = int(options.get("max_gen_toks") or options.get("max_new_tokens") or MAX_NEW_TOKENS)
        sampling = Sampling(
            float(options.get("temperature") or 0.0) if options.get("do_sample") else 0.0,
            float(options.get("top_p") or 1.0),
        )
        random = torch.Generator().manual_seed(sampling.seed)
        ids, mask = self._padded(rows)
        model, said = self.loaded.model, [[] for _ in rows]
        *_, (_, logits, cache) = read_pieces(model, ids, mask, keep=1)
        for step in range(most):
            token = [choose(row[-1], sampling, random) for row in logits]
            for row, one in zip(said, token, strict=True):
                row.append(one)
            if step + 1 == most or all(self._ended(row, stops) for row in said):
                break
            mask = None if mask is None else torch.nn.functional.pad(mask, (0, 1), value=1)
            one = torch.tensor(token, device=ids.device)[:, None]
            logits = model(
                input_ids=one, attention_mask=mask, use_cache=True, past_key_values=cache
            ).logits
        self._note(cache, rows)
        return [self._cut(row, stops) for row in said]

    def _ended(self, ids: list[int], stops: list[str]) -> bool:
        if self.words.eos_id is not None and self.words.eos_id in ids:
            return True
        text = self.words.decode(ids)
        return any(stop in text for stop in stops if stop)

    def _cut(self, ids: list[int], stops: list[str]) -> str:
        end = self.words.eos_id
        text = self.words.decode(ids[: ids.index(end)] if end in ids else ids)
        for stop in stops:
            text = text.split(stop, 1)[0] if stop else text
        return text

    def _batches(self, lengths: Sequence[int]) -> Iterable[list[int]]:
        """Indices by length, so that little is padded."""
        order = sorted(range(len(lengths)), key=lambda i: -lengths[i])
        return [order[i : i + self.batch_size] for i in range(0, len(order), self.batch_size)]

    def _padded(self, rows: list[list[int]]) -> tuple[Tensor, Tensor | None]:
        width = max(map(len, rows))
        device = self.loaded.model.device
        ids = torch.tensor([[0] * (width - len(r)) + r for r in rows], device=device)
        if all(len(row) == width for row in rows):
            return ids, None
        mask = [[0] * (width - len(r)) + [1] * len(r) for r in rows]
        return ids, torch.tensor(mask, device=device)

    def _note(self, cache: Any, rows: list[list[int]]) -> None:
        self.longest = max(self.longest, *map(len, rows))
        self.held = max(self.held, segment_bytes(cache) // len(rows))


def command() -> None:
    """The harness's own command line, with the arguments of this process."""
    from lm_eval.__main__ import cli_evaluate

    cli_evaluate()


def _covered(found: Loaded, base: bool, caching: dict[str, Any]) -> Loaded:
    """The model wrapped as its folder or the arguments say, or bare."""
    if base:
        if caching:
            raise UsageError(f"base=True has no caching: leave {', '.join(caching)} out")
        revert_(found.model)
        return found._replace(config=None, covers=None)
    if caching or found.config is None:
        revert_(found.model)
        return attach(found, settings(found.config, None, caching))
    return found


def _rows(batch_size: int | str, most: int | None) -> int:
    """Rows of a batch; `auto` is read as eight, or fewer where `most` says so."""
    text = str(batch_size)
    if text.startswith("auto"):
        return min(8, most or 8)
    if not text.isdigit() or int(text) < 1:
        raise UsageError(f"batch_size {batch_size}: expected a number of at least 1, or auto")
    return int(text)
