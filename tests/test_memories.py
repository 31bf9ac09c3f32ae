"""Laws of every memory: chunked products against the recurrence as written, in float64."""

from __future__ import annotations

from types import ModuleType

import pytest
import torch
from torch import Tensor

from mcretrofit import registry
from mcretrofit.memories import Streams
from mcretrofit.memories._decay import scores
from mcretrofit.memories._scan import (
    State,
    init_state,
    kept,
    leaves,
    naive,
    pad,
    read,
    scan,
    scan_segments,
    tree,
)

pytestmark = pytest.mark.filterwarnings("error")
NAMES = registry.names("memories")
MEMORY = pytest.mark.parametrize("name", NAMES)
LOGS = {"none": 0.0, "strong": -50.0, "total": -500.0}


def example(name: str, length: int, dtype: torch.dtype = torch.float64, **how: str) -> Streams:
    torch.manual_seed(length)
    module = registry.load("memories", name)
    return cast(module.example(2, length, 2, 8, **how), dtype)


def cast(streams: Streams, dtype: torch.dtype) -> Streams:
    """The streams in a dtype, a deep memory's first weights in at least float32."""
    streams, inner = streams.map(lambda s: s.to(dtype)), streams.inner
    if inner is None:
        return streams
    wide = torch.promote_types(dtype, torch.float32)
    return streams._replace(inner=inner._replace(start=tuple(w.to(wide) for w in inner.start)))


def begun(memory: ModuleType, streams: Streams) -> State:
    """A state that is not empty; of a deep memory in the middle of an inner chunk."""
    state = init_state(streams, memory)
    if isinstance(state, Tensor):
        return torch.randn_like(state) / 2
    _, state = naive(memory, streams.map(lambda s: s[:, :2].flip(2)))
    return tree(lambda s: s + torch.randn_like(s) / 8 if s.dim() > 2 else s, state)


def weights(memory: ModuleType, state: State) -> State:
    return memory.weights(state) if hasattr(memory, "weights") else state


KINDS_OF = {
    "decay": ("none", "head", "channel"),
    "rule": ("dla", "keep", "titans", "matrix"),
}


def decays(least: int = 0) -> list[tuple[str, tuple[str, str] | None]]:
    """Every memory with each kind of its example (None: it has but one); the first has no decay."""
    found = []
    for name in NAMES:
        taken = registry.load("memories", name).example.__annotations__
        kinds = [(o, kind) for o, all_of in KINDS_OF.items() if o in taken for kind in all_of]
        found += [(name, kind) for kind in kinds[least:] or [None]]
    return found


def each(found: list[tuple[str, tuple[str, str] | None]]) -> pytest.MarkDecorator:
    ids = [name if kind is None else f"{name}-{kind[1]}" for name, kind in found]
    return pytest.mark.parametrize(("name", "kind"), found, ids=ids)


KINDS, DECAYING = each(decays()), each(decays(least=1))


def made(name: str, kind: tuple[str, str] | None, length: int, **more: object) -> Streams:
    return example(name, length, **(dict([kind]) if kind else {}), **more)


def reads_first(memory: ModuleType) -> bool:
    return getattr(memory, "READS_FIRST", False)


def near(got: State, want: State, tolerance: float = 1e-10) -> None:
    for one, other in zip(leaves(got), leaves(want), strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=tolerance)


def tensors(streams: Streams, state: State) -> list[Tensor]:
    """What gradients can be asked for."""
    given = [*streams[:-1], *leaves(state)]
    return [s.detach().requires_grad_() for s in given if s is not None]


def joined(streams: Streams, state: State, some: list[Tensor]) -> tuple[Streams, State]:
    """The streams and the state with the tensors of `tensors` in their places."""
    rest = iter(some)
    streams = streams.map(lambda _: next(rest))
    return streams, tree(lambda _: next(rest), state)


@KINDS
@pytest.mark.parametrize("length", [1, 2, 7, 64, 65, 150])
def test_chunked_equals_naive(name, kind, length):
    memory, streams = registry.load("memories", name), made(name, kind, length)
    state = begun(memory, streams)
    for got, want in zip(scan(memory, streams, state), naive(memory, streams, state), strict=True):
        assert {leaf.dtype for leaf in leaves(got)} == {torch.float64}
        near(got, want)
    near(scan(memory, streams)[0], naive(memory, streams)[0])


@KINDS
def test_gradients_of_chunked_equal_those_of_naive(name, kind):
    memory, streams = registry.load("memories", name), made(name, kind, 71)
    state = begun(memory, streams)
    wanted = tensors(streams, state)
    grads = []
    for run in (scan, naive):
        results = leaves(run(memory, *joined(streams, state, wanted)))
        torch.manual_seed(1)
        loss = sum((x * torch.randn(x.shape).double()).sum() for x in results)
        grads.append(torch.autograd.grad(loss, wanted))
    for got, want in zip(*grads, strict=True):
        assert want.any()
        near(got, want, 1e-9)


@DECAYING
@pytest.mark.parametrize("log", [*LOGS, "mixed"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=["float64", "float32"])
def test_extreme_decays_are_finite_and_exact(name, kind, log, dtype):
    memory, streams = registry.load("memories", name), made(name, kind, 70)
    values = torch.tensor(list(LOGS.values())).double()
    drawn = values[torch.randint(0, 3, streams.decay.shape)]
    decay = drawn if log == "mixed" else torch.full_like(streams.decay, LOGS[log])
    streams = cast(streams._replace(decay=decay), dtype)
    state = tree(lambda s: s.to(dtype), begun(memory, streams))
    wanted = tensors(streams, state)
    results = []
    for run in (scan, naive):
        out, end = run(memory, *joined(streams, state, wanted))
        loss = out.square().sum() + sum(leaf.sum() for leaf in leaves(end))
        results.append((out, *leaves(end), *torch.autograd.grad(loss, wanted)))
    for got, want in zip(*results, strict=True):
        assert got.isfinite().all()
        size = max(1.0, float(want.detach().abs().max()))
        near(got, want, (1e-11 if dtype == torch.float64 else 2e-4) * size)


def test_decayed_products_are_those_of_the_definition():
    torch.manual_seed(0)
    q, k = torch.randn(2, 3, 16, 4).double().unbind(0)
    for width, strict in ((1, False), (1, True), (4, False), (4, True)):
        at = (torch.rand(3, 16, width).double() * -90).cumsum(-2)
        got = scores(q, k, at, at, strict)
        weights = (at[:, :, None] - at[:, None]).clamp_max(0).exp().expand(-1, -1, -1, 4)
        want = (q[:, :, None] * k[:, None] * weights).sum(-1).tril(-1 if strict else 0)
        near(got, want)


@KINDS
@pytest.mark.parametrize("init", ["reset", "carry"])
@pytest.mark.parametrize(("size", "count"), [(1, 4), (5, 6), (8, 3), (64, 2), (72, 2)])
def test_segment_ends_are_those_of_the_recurrence(name, kind, init, size, count):
    memory, streams = registry.load("memories", name), made(name, kind, size * count)
    state = first = begun(memory, streams)
    got, end, ends = scan_segments(memory, streams, size, first, init)
    for i in range(count):
        part = streams.map(lambda s, i=i: s[:, i * size : (i + 1) * size])
        start = state if init == "carry" or i == 0 else init_state(streams, memory)
        out, state = naive(memory, part, start)
        near(got[:, i * size : (i + 1) * size], out)
        near(tree(lambda s, i=i: s[:, i], ends), state)
    near(end, state)


@KINDS
def test_end_state_read_by_the_last_query_is_the_last_output(name, kind):
    memory, streams = registry.load("memories", name), made(name, kind, 67)
    for run in (naive, scan):
        out, state = run(memory, streams)
        if reads_first(memory):
            state = run(memory, streams.map(lambda s: s[:, :-1]))[1]
        one = tree(lambda s: s[:, None], weights(memory, state))
        near(read(one, streams.q[:, -1:], memory)[:, 0, 0], out[:, -1])
    both = read(tree(lambda s: torch.cat([s, 2 * s], 1), one), streams.q, memory)
    near(both[:, :, 1], read(tree(lambda s: 2 * s, one), streams.q, memory)[:, :, 0])
    if isinstance(one, Tensor):
        near(both[:, :, 1], 2 * both[:, :, 0])
    assert both.shape == (2, 67, 2, *out.shape[2:])


@KINDS
def test_zero_streams_are_inert(name, kind):
    memory, streams = registry.load("memories", name), made(name, kind, 20)
    state = begun(memory, streams)
    nothing = streams.map(torch.zeros_like)
    for run in (scan, naive):
        for got, want in zip(leaves(run(memory, nothing, state)[1]), leaves(state), strict=True):
            assert torch.equal(got, want)
    _, end = scan(memory, streams, state)
    assert pad(streams, 32).length == 32
    near(scan(memory, pad(streams, 32), state)[1], end)


@KINDS
def test_pieces_equal_one_scan(name, kind):
    memory, streams = registry.load("memories", name), made(name, kind, 84)
    want, last = scan(memory, streams)
    outs, state, start = [], init_state(streams, memory), 0
    for size in (1, 7, 64, 12):
        part = streams.map(lambda s, a=start, b=start + size: s[:, a:b])
        out, state = scan(memory, part, state)
        outs.append(out)
        start += size
    near(torch.cat(outs, 1), want)
    near(state, last)


@MEMORY
def test_states_of_half_streams_are_float32(name):
    memory = registry.load("memories", name)
    for dtype in (torch.bfloat16, torch.float16):
        streams = example(name, 9, dtype=dtype)
        assert {s.dtype for s in leaves(init_state(streams, memory))} == {torch.float32}
        results = [leaves(scan(memory, s)) for s in (streams, streams.map(Tensor.float))]
        for got, want in zip(*results, strict=True):
            assert got.dtype == torch.float32 and torch.equal(got, want)


@MEMORY
@torch.no_grad()
def test_merging_is_claimed_only_where_it_holds(name):
    # a block's state is what its halves wrote alone, the earlier one decayed by the later one
    memory, streams = registry.load("memories", name), example(name, 24)
    halves = [streams.map(lambda s, a=a: s[:, a : a + 12]) for a in (0, 12)]
    left, right, exact = (leaves(weights(memory, naive(memory, s)[1])) for s in (*halves, streams))
    total = None if streams.decay is None else streams.decay[:, 12:].sum(1)
    merged = [r + kept(a, total) for a, r in zip(left, right, strict=True)]
    same = [torch.allclose(*pair, atol=1e-10) for pair in zip(merged, exact, strict=True)]
    # where a token reads first, what it reads when it closes a block is not the block's state
    assert all(same) == (memory.MERGES or reads_first(memory))
