"""Families: checkpoints with our torch-only decoder around them. The contract.

A family is a module with
- `MODEL_TYPES`: the `model_type` values of config.json that it reads;
- `ABOUT`: a literal that `mcretrofit list families` reads without importing: its `memory`, the
  on-disk `layouts`, what its `parity` was checked against, and how that was `tested`;
- `DEFAULTS`: the configuration fields that it uses, with the format's own defaults;
- `Mixer(config, layer)`: the token mixer with the checkpoint's parameter names, whose
  `forward(hidden_states, context)` calls its op by one of `ops/*.NAMES`;
- `tiny() -> dict`: the smallest configuration that the laws run on;
- optionally `Block(config, layer)` where the block is not norm-mixer-norm-MLP, and
  `final_norm(config)` with it, `Mixer.start()` for the decays of fresh weights,
  `shared(config) -> {name: parameter}` for what belongs to no layer (in every `context.shared`), and
  `from_layout(shapes, config) -> Layout | None` for other on-disk layouts (`_layout`).

Layers that a config's `attn` lists are softmax attention in every family with an ordinary block
(`_attention`): hybrids, whose attention caching leaves alone, and transformers, which have nothing else.
"""
