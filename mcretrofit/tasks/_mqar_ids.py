"""Multi-query associative recall over bare ids, as Zoology generates it (arXiv 2312.04927)."""

from __future__ import annotations

from random import Random

from mcretrofit.errors import UsageError

IGNORED = -100


def mqar_ids(
    *,
    vocab_size: int,
    input_seq_len: int,
    num_kv_pairs: int,
    power_a: float = 0.01,
    random_non_queries: bool = True,
    num_passes: int = 1,
    seed: int,
    zoology_collisions: bool = False,
) -> tuple[list[int], list[int]]:
    """(inputs, labels), `input_seq_len` ids each; a label is the value at its query, else -100.

    Keys are distinct ids of the lower half of the vocabulary (never 0), values of the upper half.
    The pairs come first, `num_passes` times over; queries follow at gaps drawn from a power law.
    The rest is uniform over the vocabulary without this sample's keys; `zoology_collisions`
    restores the published fill, which may repeat a key.
    """
    _check(vocab_size, input_seq_len, num_kv_pairs, num_passes)
    if power_a <= 0:
        raise UsageError(f"mqar_ids: power_a must be above 0, not {power_a}")
    rng = Random(f"mqar_ids/{seed}")
    half = vocab_size // 2
    keys = rng.sample(range(1, half), num_kv_pairs)
    values = rng.sample(range(half, vocab_size), num_kv_pairs)
    inputs = [token for pair in zip(keys, values, strict=True) for token in pair] * num_passes
    first = len(inputs)
    labels = [IGNORED] * input_seq_len
    inputs += [0] * (input_seq_len - first)
    gaps = _gaps(rng, (input_seq_len - first) // 2, num_kv_pairs, power_a)
    for key, value, gap in zip(keys, values, gaps, strict=True):
        inputs[first + 2 * gap], labels[first + 2 * gap] = key, value
    if random_non_queries:
        taken = set() if zoology_collisions else set(keys)
        free = [token for token in range(vocab_size) if token not in taken]
        fill = rng.choices(free, k=input_seq_len)
        inputs = [fresh if old == 0 else old for old, fresh in zip(inputs, fill, strict=True)]
    return inputs, labels


def _gaps(rng: Random, space: int, count: int, power_a: float) -> list[int]:
    """`count` of `space` slots without replacement, slot i with weight (i + 1)^(power_a - 1).

    The largest u^(1/w) in order are successive weighted draws (Efraimidis and Spirakis, 2006).
    """
    rank = {i: rng.random() ** ((i + 1) ** (1 - power_a)) for i in range(space)}
    return sorted(rank, key=rank.__getitem__, reverse=True)[:count]


def _check(vocab_size: int, length: int, pairs: int, passes: int) -> None:
    if pairs < 1 or passes < 1:
        raise UsageError(f"mqar_ids: pairs ({pairs}) and passes ({passes}) must be at least 1")
    if length % 2:
        raise UsageError(f"mqar_ids: the length must be even, not {length}")
    if 2 * pairs * (passes + 1) > length:
        raise UsageError(
            f"mqar_ids: {pairs} pairs in {passes} passes and their queries need a length of at "
            f"least {2 * pairs * (passes + 1)}, not {length}"
        )
    if pairs >= vocab_size // 2:
        raise UsageError(
            f"mqar_ids: {pairs} distinct keys need a vocabulary of at least {2 * pairs + 2}, "
            f"not {vocab_size}"
        )
