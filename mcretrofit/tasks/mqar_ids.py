"""Multi-query associative recall over bare ids, as Zoology generates it (arXiv 2312.04927)."""

from __future__ import annotations

from pathlib import Path

from mcretrofit.errors import UsageError
from mcretrofit.tasks import Sample
from mcretrofit.tasks._fit import check_request, no_depth
from mcretrofit.tasks._mqar_ids import IGNORED, mqar_ids
from mcretrofit.tasks._score import string_match_all as score
from mcretrofit.tasks._templates import fixed_wording
from mcretrofit.tokenizer import Tokenizer

__all__ = ["METRIC", "samples", "score"]

METRIC = "accuracy"

# an odd step, so that samples of neighbouring seeds never share a stream
_SEED_STEP = 1_000_003


def samples(
    *,
    length: int,
    depth: float | None = None,
    count: int,
    seed: int,
    tokenizer: Tokenizer,
    template: str | Path = "ruler",
    haystack: str | Path | None = None,
    pairs: int = 4,
    vocab_size: int | None = None,
    power_a: float = 0.01,
    random_non_queries: bool = True,
    num_passes: int = 1,
    zoology_collisions: bool = False,
) -> list[Sample]:
    """`count` samples of `length` ids (one less where it is odd), scored at labels other than -100.

    `vocab_size` None takes Zoology's 8,192, or all ids where the tokenizer has fewer. A model that
    never saw the task knows nothing of it: it is for models trained on it.
    """
    check_request("mqar_ids", length=length, depth=None, count=count)
    no_depth("mqar_ids", depth)
    fixed_wording("mqar_ids", template)
    if haystack is not None:
        raise UsageError("mqar_ids is made of bare ids and takes no haystack: leave it out")
    known = tokenizer.vocab_size
    size = min(8192, known) if vocab_size is None else vocab_size
    if size > known:
        raise UsageError(f"mqar_ids: vocab_size {size} is beyond the {known} ids of this model")
    made = []
    for index in range(count):
        inputs, labels = mqar_ids(
            vocab_size=size,
            input_seq_len=length - length % 2,
            num_kv_pairs=pairs,
            power_a=power_a,
            random_non_queries=random_non_queries,
            num_passes=num_passes,
            seed=seed * _SEED_STEP + index,
            zoology_collisions=zoology_collisions,
        )
        made.append(_sample(inputs, labels, seed, "zoology" if zoology_collisions else "ids"))
    return made


def _sample(inputs: list[int], labels: list[int], seed: int, dialect: str) -> Sample:
    return Sample(
        prompt=" ".join(map(str, inputs)),
        answers=tuple(str(label) for label in labels if label != IGNORED),
        tokens=len(inputs),
        max_new_tokens=0,
        depth=None,
        seed=seed,
        dialect=dialect,
        ids=tuple(inputs),
        labels=tuple(labels),
    )
