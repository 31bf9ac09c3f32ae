"""Attaching and detaching: nothing half done, nothing shared between a model and its copy."""

from __future__ import annotations

import copy
import functools
from threading import Thread

import pytest
import torch
from test_export import SSC, build, inputs, wrap

from mcretrofit._hosts import spare_
from mcretrofit.config import CachingConfig
from mcretrofit.errors import RetrofitError
from mcretrofit.retrofit import every_head, plans, retrofit_, retrofitted


@torch.no_grad()
def test_a_copy_has_gates_and_plans_of_its_own():
    model = wrap(build("gated_deltanet"), **SSC, gate=True)
    ids = inputs()["ids"]
    before = model(ids).logits
    twin = copy.deepcopy(model)
    assert torch.equal(twin(ids).logits, before)
    ours, theirs = plans(model), plans(twin)
    assert ours.keys() == theirs.keys()
    for name, plan in theirs.items():
        assert plan is not ours[name] and plan.gate is twin.get_submodule(name).mc
        plan.gate.bias += 3.0
        plan.gate.weight += torch.randn_like(plan.gate.weight)
    assert torch.equal(model(ids).logits, before)
    assert not torch.allclose(twin(ids).logits, before, atol=1e-4)
    # they share the rebuilt function, not what a call publishes
    found = {}
    asked = {"a": (model, ids), "b": (twin, ids.flip(1))}
    alone = {name: one(given).logits for name, (one, given) in asked.items()}

    def ask(name: str) -> None:
        one, given = asked[name]
        with torch.no_grad():
            found[name] = [one(given).logits for _ in range(4)]

    threads = [Thread(target=ask, args=(name,)) for name in asked]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(torch.equal(got, alone[n]) for n, gots in found.items() for got in gots)


def test_a_model_that_cannot_be_wrapped_whole_is_left_as_it_was():
    model = build("gated_deltanet")
    covers, names = every_head(model), list(model.state_dict())
    first, second = covers
    config = CachingConfig(segment=16)
    retrofit_(model, config, {second: covers[second]})
    kept = plans(model)[second]
    refused = pytest.raises(RetrofitError, match=f"{second} is wrapped already")
    with refused, retrofitted(model, config, covers):
        raise AssertionError
    assert plans(model) == {second: kept}
    assert set(names) < set(model.state_dict())
    assert "forward" not in vars(model.get_submodule(first))


class Bound(torch.nn.Module):
    """A mixer whose host chose a GPU's kernel without asking where its tensors lie."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return chosen_kernel(x)


def body(x: torch.Tensor) -> torch.Tensor:
    return x + 1


@functools.wraps(body)
def chosen_kernel(x: torch.Tensor) -> torch.Tensor:
    raise RuntimeError("0 active drivers")


def test_a_mixer_beside_wrapped_ones_takes_its_torch_body_on_a_cpu():
    module = Bound()
    with pytest.raises(RuntimeError):
        module(torch.zeros(2))
    spare_(module)
    assert torch.equal(module(torch.zeros(2)), torch.ones(2))
    other = copy.deepcopy(module)
    assert other.forward.__self__ is other and torch.equal(other(torch.zeros(2)), torch.ones(2))
