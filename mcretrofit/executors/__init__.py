"""Executors of a sweep; one file = one way to run its cells. The contract.

An executor is a module with `check()`, which refuses in one line where what it needs is missing, and
`execute(todo, setup, workers, tick) -> Iterator[row]`: it takes tasks from `todo` until none is left,
measures each on a `Worker`, hands its row to `todo.finish` and yields it.
Whatever goes wrong, claims are given back and finished rows stay.
"""
