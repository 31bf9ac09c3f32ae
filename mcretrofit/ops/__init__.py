"""Ops: the one call that every linear-recurrent mixer funnels into, as a memory's streams. The contract.

An op is a module with
- `NAMES`: what hosts (flash-linear-attention, transformers, our decoder) call it;
- `MEMORY`: the module of `memories/` that it runs;
- `streams(...) -> Streams`: takes the op's own arguments and applies the norms, scales and gates that
  the op applies inside. Surplus arguments of a host (kernel modes, chunk sizes) are accepted;
- optionally `around(name, run)`, where hosts call `name` in another way than `_call.call`, or want
  more of it than a memory's read: the function that they call, which calls `run` as `call`;
- optionally `SHORTCUTS`: fused calls that hosts try first, and do without where they give None.
`_call` turns one into a function that a mixer can call.
"""
