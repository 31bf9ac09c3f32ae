"""Deep memory: a small network that learns while it reads (arXiv 2602.24281, eq 30-36).

`M(x) = x + gelu(x U) D`, or one matrix `M(x) = x W`, or Titans-pytorch's network with a norm inside
(`_inner.forward`). A token takes one step of gradient descent
    S_t = b_t S_{t-1} - eta_t grad L(M; k_t, v_t),    M_t = a_t M_{t-1} + S_t,    y_t = M_t(q_t)
on `L = -<M(k), v>` (DLA) or `|M(k) - v|^2` (Titans; without momentum S is the last step alone). All
gradients of an inner chunk are taken at the weights before its first token, so that a chunk is a
handful of matrix products (MATH: the exact dual form); chunk 1 is the online rule.

State: `(weights, momenta, frozen, phase)`, where `frozen` are the weights before the inner chunk that
is under way and `phase [B, H]` counts its tokens. So pieces may cut a chunk anywhere. A token whose key
is zero is not there at all, so inner chunks are those of a row's own tokens, padding apart.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from mcretrofit.errors import RetrofitError
from mcretrofit.memories import Inner, Streams
from mcretrofit.memories._inner import Laid, forward, gradients, laid, network, steps
from mcretrofit.memories._scan import tree, wide
from mcretrofit.memories._tape import Entry, Tape

MERGES = False  # what a step changes depends on what was there
RAGGED = True
State = tuple[tuple, tuple, tuple, Tensor]


def begun(start: tuple[Tensor, ...], where: str) -> tuple[Tensor, ...]:
    """M_0 as it may be: of two matrices that are all zeros neither ever gets a gradient."""
    if len(start) > 1 and not start[0].is_meta and not any(bool(w.any()) for w in start):
        raise RetrofitError(
            f"{where}: M_0 of the deep memory is all zeros, where nothing is ever learned: "
            "start it at random values"
        )
    return start


def init_state(streams: Streams) -> State:
    """The learned M_0 for every row, no momentum, no token of an inner chunk."""
    batch, _, heads = streams.k.shape[:3]
    first = tuple(w.expand(batch, *w.shape) for w in streams.inner.start)
    still = () if streams.momentum is None else tuple(torch.zeros_like(w) for w in first)
    return first, still, first, first[0].new_zeros(batch, heads)


def weights(state: State) -> tuple[Tensor, ...]:
    """What is cached and read: the network alone."""
    return state[0]


def read(weights: tuple[Tensor, ...], q: Tensor) -> Tensor:
    """Every cached network `[B, N, H, ...]` on every query `[B, T, H, K]`: `[B, T, N, H, V]`."""
    x = q.to(weights[0].dtype).transpose(1, 2)[:, None]
    return network(weights, x).permute(0, 3, 1, 2, 4)


def step(streams: Streams, state: State) -> tuple[Tensor, State]:
    """One token: a gradient step, then a read."""
    memory, momenta, frozen, phase = state
    q, k, v, decay, eta, beta = (
        None if s is None else s[:, 0] for s in (*streams[:5], streams.momentum)
    )
    there = k.flatten(1).any(-1)[:, None].to(k.dtype)
    old = phase[..., None, None] > 0
    frozen = tree(lambda f, w: torch.where(old, f, w), frozen, memory)
    pairs = gradients(frozen, k[:, :, None], v[:, :, None], streams.inner.objective)
    size = (eta * there)[..., None, None]
    moved = tuple(-size * (z.transpose(-1, -2) @ r) for z, r in pairs)
    if momenta:
        share = (beta * there).exp()[..., None, None]
        momenta = tuple(share * s + m for s, m in zip(momenta, moved, strict=True))
        moved = tuple(there[..., None, None] * s for s in momenta)
    if decay is not None:
        share = (decay * there).exp()[..., None, None]
        memory = tuple(share * w for w in memory)
    memory = tuple(w + m for w, m in zip(memory, moved, strict=True))
    phase = (phase + there) % streams.inner.chunk
    out = (network(memory, q[:, :, None])[:, :, 0] * there[..., None])[:, None]
    _check(out, memory, streams)
    return out, (memory, momenta, _renewed(frozen, memory, phase), phase)


def chunks(
    streams: Streams, state: State, every: int, run: Callable | None = None
) -> tuple[Tensor, State, State]:
    """Many tokens, an inner chunk at a time; `ends` are the states after every `every` tokens.

    `run(streams, state) -> (out, state)` reads them where not as usual.
    """
    outs, ends = [], []
    for start in range(0, streams.length, every):
        part = streams.map(lambda s, a=start: s[:, a : a + every])
        out, state = (run or _run)(part, state)
        outs.append(out)
        ends.append(state)
    out = torch.cat(outs, 1)
    _check(out, state[0], streams)
    return out, state, tree(lambda *s: torch.stack(s, 1), *ends)


def _run(streams: Streams, state: State) -> tuple[Tensor, State]:
    """The dual form: every chunk is read before the next, so that nothing of it has to be kept."""
    outs: list[Tensor] = []
    tiles, state = _learn(streams, state, lambda entry, q: outs.append(_through(entry, q)))
    return tiles.take(torch.stack(outs)), state


def _through(entry: Entry, q: Tensor) -> Tensor:
    return forward(len(entry.pairs), q, entry.read)


def taped(streams: Streams, state: State) -> tuple[Tape, State]:
    """The writes of a scan alone; the tape reads any layer of the weights after any token."""
    entries: list[Entry] = []
    streams = wide(streams)
    tiles, state = _learn(streams, state, lambda entry, _: entries.append(entry))
    return Tape(entries, tiles.lay, tiles.take), state


def _learn(
    streams: Streams, state: State, visit: Callable[[Entry, Tensor], None]
) -> tuple[Laid, State]:
    """Rows are laid out so that a tile is an inner chunk of each of them; `visit` sees them all."""
    memory, momenta, frozen, phase = state
    inner, tiles = streams.inner, laid(streams, phase[:, 0])
    memory, momenta, frozen = (
        tuple(w.flatten(0, 1) for w in part) for part in (memory, momenta, frozen)
    )
    old = (phase > 0).flatten()[:, None, None]
    frozen = tree(lambda f, w: torch.where(old, f, w), frozen, memory) if old.any() else memory
    for i, ((q, k, v), given) in enumerate(zip(tiles.chunks, steps(tiles.gates), strict=True)):
        if i:
            frozen = _newest(tiles.live[i], memory, frozen)
        entry = Entry(memory, momenta, gradients(frozen, k, v, inner.objective), given)
        visit(entry, q)
        memory, momenta = entry.after()
    memory, momenta, frozen = (
        tuple(w.unflatten(0, phase.shape) for w in part) for part in (memory, momenta, frozen)
    )
    phase = (phase + tiles.counts[:, None]) % inner.chunk
    return tiles, (memory, momenta, _renewed(frozen, memory, phase), phase)


def _newest(live: Tensor | None, memory: tuple, frozen: tuple) -> tuple:
    """Where the gradients of a chunk are taken: a row without tokens in it keeps its place."""
    if live is None:
        return memory
    return tree(lambda f, w: torch.where(live, w, f), frozen, memory)


def _renewed(frozen: tuple, memory: tuple, phase: Tensor) -> tuple:
    """The weights at which the next gradient is taken: the newest once a chunk is complete."""
    done = phase == 0
    if not done.is_meta and done.all():
        return memory
    return tree(lambda f, w: torch.where(done[..., None, None], w, f), frozen, memory)


def _check(out: Tensor, memory: tuple[Tensor, ...], streams: Streams) -> None:
    """Refuse a state that ran away, naming where; on a device this waits for it."""
    if out.is_meta:
        return
    sums = torch.stack([w.sum() for w in memory])
    if bool(out.isfinite().all() & sums.isfinite().all()):
        return
    where = streams.inner.where
    if not all(s.isfinite().all() for s in streams[:3]):
        raise RetrofitError(f"{where}: its queries, keys or values are not finite")
    wrong = (~out.isfinite()).flatten(2).any(-1).any(0).nonzero()
    token = int(wrong[0]) + 1 if len(wrong) else out.shape[1]
    raise RetrofitError(
        f"{where}: the inner state is not finite at token {token} of this call: "
        "its steps are too large; lower max_step in config.json"
    )


RULES = {  # matrices, objective, gates
    "dla": (2, "dot", ()),
    "keep": (2, "dot", ("decay",)),
    "titans": (2, "l2", ("decay", "momentum")),
    "matrix": (1, "l2", ("decay", "momentum")),
    "normed": (3, "l2", ("decay", "momentum")),
}


def example(batch: int, length: int, heads: int, width: int, rule: str = "titans") -> Streams:
    """Random streams for inner chunks of 4; `rule` is one of `RULES`."""
    count, objective, gates = RULES[rule]
    shape = (batch, length, heads, width)
    q, k = (F.normalize(torch.randn(shape), dim=-1) for _ in range(2))
    hidden = 3 * width
    sizes = [(width, width)] if count == 1 else [(width, hidden), (hidden, width), (1, width)]
    # under a norm small outputs have steep gradients
    scale = 3 if count == 3 else 1
    start = tuple(torch.randn(heads, *size) * scale * size[0] ** -0.5 for size in sizes[:count])
    drawn = {name: F.logsigmoid(1 + torch.randn(shape[:3])) for name in gates}
    eta = torch.rand(shape[:3]) * 0.02
    inner = Inner(start, objective, 4)
    return Streams(q, k, torch.randn(shape), beta=eta, inner=inner, **drawn)
