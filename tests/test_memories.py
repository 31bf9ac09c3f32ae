"""Laws of every memory: chunked products against the recurrence as written, in float64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from mcretrofit import registry
from mcretrofit.memories import Streams
from mcretrofit.memories._decay import scores
from mcretrofit.memories._scan import init_state, kept, naive, pad, read, scan, scan_segments

pytestmark = pytest.mark.filterwarnings("error")
NAMES = registry.names("memories")
MEMORY = pytest.mark.parametrize("name", NAMES)
LOGS = {"none": 0.0, "strong": -50.0, "total": -500.0}


def example(name: str, length: int, dtype: torch.dtype = torch.float64, **how: str) -> Streams:
    torch.manual_seed(length)
    module = registry.load("memories", name)
    return module.example(2, length, 2, 8, **how).map(lambda s: s.to(dtype))


def begun(streams: Streams) -> Tensor:
    """A state that is not empty."""
    return torch.randn_like(init_state(streams)) / 2


def decays(least: int = 0) -> list[tuple[str, str | None]]:
    """Every memory with each kind of decay that its example offers (None: it has but one)."""
    found = []
    for name in NAMES:
        taken = registry.load("memories", name).example.__annotations__
        found += [
            (name, kind)
            for kind in (["none", "head", "channel"][least:] if "decay" in taken else [None])
        ]
    return found


def each(found: list[tuple[str, str | None]]) -> pytest.MarkDecorator:
    ids = ["-".join(filter(None, one)) for one in found]
    return pytest.mark.parametrize(("name", "kind"), found, ids=ids)


KINDS, DECAYING = each(decays()), each(decays(least=1))


def made(name: str, kind: str | None, length: int, **more: object) -> Streams:
    return (
        example(name, length, **more) if kind is None else example(name, length, decay=kind, **more)
    )


def near(got: Tensor, want: Tensor, tolerance: float = 1e-10) -> None:
    torch.testing.assert_close(got, want, rtol=0, atol=tolerance)


@KINDS
@pytest.mark.parametrize("length", [1, 2, 7, 64, 65, 150])
def test_chunked_equals_naive(name, kind, length):
    memory, streams = registry.load("memories", name), made(name, kind, length)
    state = begun(streams)
    for got, want in zip(scan(memory, streams, state), naive(memory, streams, state), strict=True):
        assert got.dtype == torch.float64
        near(got, want)
    near(scan(memory, streams)[0], naive(memory, streams)[0])


@KINDS
def test_gradients_of_chunked_equal_those_of_naive(name, kind):
    memory, streams = registry.load("memories", name), made(name, kind, 71)
    state = begun(streams)
    leaves = [s.requires_grad_() for s in (*streams, state) if s is not None]
    grads = []
    for run in (scan, naive):
        out, end = run(memory, streams, state)
        torch.manual_seed(1)
        loss = sum((x * torch.randn(x.shape).double()).sum() for x in (out, end))
        grads.append(torch.autograd.grad(loss, leaves))
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
    streams = streams._replace(decay=decay).map(lambda s: s.to(dtype))
    state = begun(streams)
    leaves = [s.requires_grad_() for s in (*streams, state) if s is not None]
    results = []
    for run in (scan, naive):
        out, end = run(memory, streams, state)
        grads = torch.autograd.grad(out.square().sum() + end.sum(), leaves)
        results.append((out, end, *grads))
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
    state = first = begun(streams)
    got, end, ends = scan_segments(memory, streams, size, first, init)
    for i in range(count):
        part = streams.map(lambda s, i=i: s[:, i * size : (i + 1) * size])
        start = state if init == "carry" or i == 0 else init_state(streams)
        out, state = naive(memory, part, start)
        near(got[:, i * size : (i + 1) * size], out)
        near(ends[:, i], state)
    near(end, state)


@KINDS
def test_end_state_read_by_the_last_query_is_the_last_output(name, kind):
    memory, streams = registry.load("memories", name), made(name, kind, 67)
    for run in (naive, scan):
        out, state = run(memory, streams)
        near(read(state[:, None], streams.q[:, -1:])[:, 0, 0], out[:, -1])
    states = torch.stack([state, 2 * state], 1)
    both = read(states, streams.q)
    near(both[:, :, 1], 2 * both[:, :, 0])
    assert both.shape == (2, 67, 2, *out.shape[2:])


@KINDS
def test_zero_streams_are_inert(name, kind):
    memory, streams = registry.load("memories", name), made(name, kind, 20)
    state = begun(streams)
    nothing = streams.map(torch.zeros_like)
    for run in (scan, naive):
        assert torch.equal(run(memory, nothing, state)[1], state)
    _, end = scan(memory, streams, state)
    assert pad(streams, 32).length == 32
    near(scan(memory, pad(streams, 32), state)[1], end)


@KINDS
def test_pieces_equal_one_scan(name, kind):
    memory, streams = registry.load("memories", name), made(name, kind, 84)
    want, last = scan(memory, streams)
    outs, state, start = [], init_state(streams), 0
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
        assert init_state(streams).dtype == torch.float32
        wide = streams.map(Tensor.float)
        for got, want in zip(scan(memory, streams), scan(memory, wide), strict=True):
            assert got.dtype == torch.float32 and torch.equal(got, want)


@MEMORY
@torch.no_grad()
def test_merging_is_claimed_only_where_it_holds(name):
    # a block's state is what its halves wrote alone, the earlier one decayed by the later one
    memory, streams = registry.load("memories", name), example(name, 24)
    halves = [streams.map(lambda s, a=a: s[:, a : a + 12]) for a in (0, 12)]
    left, right = (naive(memory, half)[1] for half in halves)
    merged = right + kept(left, None if streams.decay is None else streams.decay[:, 12:].sum(1))
    exact = naive(memory, streams)[1]
    assert bool(torch.allclose(merged, exact, atol=1e-10)) == memory.MERGES
