"""Attaching and detaching: nothing half done, nothing shared between a model and its copy."""

from __future__ import annotations

import copy
from threading import Thread

import pytest
import torch
from test_export import SSC, build, inputs, wrap

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
