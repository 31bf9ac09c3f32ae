"""Our torch-only host: a causal language model around any family's mixer, loadable by transformers."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import GenerationMixin, PretrainedConfig, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutputWithPast

from mcretrofit.errors import RetrofitError
from mcretrofit.models._attention import Attention, fields
from mcretrofit.models._blocks import GatedMLP, RMSNorm
from mcretrofit.models._state import Context, RecurrentCache
from mcretrofit.registry import load

COMMON = {
    "vocab_size": 32000,
    "hidden_size": 2048,
    "num_hidden_layers": 24,
    "intermediate_size": None,
    "hidden_ratio": 4,
    "hidden_act": "swish",
    "norm_eps": 1e-6,
    "initializer_range": 0.02,
    "attn": None,
    "attnres_block_size": None,
}


class DecoderConfig(PretrainedConfig):
    """The checkpoint's own config.json under our model type; `family` names a module of `models/`."""

    model_type = "mcretrofit"
    keys_to_ignore_at_inference = ["past_key_values"]

    def __init__(self, family: str = "gla", **fields: Any) -> None:
        self.family = family
        for name, default in {**COMMON, **load("models", family).DEFAULTS}.items():
            setattr(self, name, fields.pop(name, default))
        fields.setdefault("tie_word_embeddings", False)
        super().__init__(**fields)


class Block(nn.Module):
    """Norm, mixer, norm, gated MLP, each with its residual."""

    def __init__(self, config: DecoderConfig, layer: int) -> None:
        super().__init__()
        self.attn_norm = RMSNorm(config.hidden_size, config.norm_eps)
        attention = fields(config)
        listed = attention is not None and layer in attention.layers
        self.attn = (Attention if listed else load("models", config.family).Mixer)(config, layer)
        self.mlp_norm = RMSNorm(config.hidden_size, config.norm_eps)
        self.mlp = GatedMLP(config)

    def forward(self, x: Tensor, context: Context) -> Tensor:
        x = x + self.attn(self.attn_norm(x), context)
        return x + self.mlp(self.mlp_norm(x))


class Decoder(nn.Module):
    """Embeddings, blocks, final norm."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        family = load("models", config.family)
        block = getattr(family, "Block", Block)
        norm = getattr(family, "final_norm", lambda c: RMSNorm(c.hidden_size, c.norm_eps))
        self.embeddings = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(block(config, i) for i in range(config.num_hidden_layers))
        self.norm = norm(config)
        for name, parameter in getattr(family, "shared", lambda _: {})(config).items():
            self.register_parameter(name, parameter)

    def forward(self, x: Tensor, context: Context) -> Tensor:
        context.shared.update(self.named_parameters(recurse=False))
        for layer in self.layers:
            x = layer(x, context)
        return self.norm(x)


class DecoderForCausalLM(PreTrainedModel, GenerationMixin):
    """The language model; `past_key_values` and `cache` (its newer name) are both accepted."""

    config_class = DecoderConfig
    base_model_prefix = "model"
    _tied_weights_keys = {"lm_head.weight": "model.embeddings.weight"}
    _keep_in_fp32_modules_strict = ["A_log", "dt_bias"]
    _is_stateful = True
    _supports_cache_class = True

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__(config)
        refused = ["attnres_block_size"]
        # attention stands in a norm-mixer-norm-MLP block
        refused += ["attn"] if hasattr(load("models", config.family), "Block") else []
        for name in refused:
            if getattr(config, name):
                raise RetrofitError(f"config: {name} is set; {config.family} has no such hybrids")
        self.model = Decoder(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    @classmethod
    def _supports_default_dynamic_cache(cls) -> bool:
        return False

    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, (nn.Linear, nn.Embedding)):
            nn.init.normal_(module.weight, std=self.config.initializer_range)
            if getattr(module, "bias", None) is not None:
                nn.init.zeros_(module.bias)

    def start(self) -> DecoderForCausalLM:
        """Give the mixers the decays that a model trained from scratch begins with."""
        for module in self.model.layers.modules():
            if hasattr(module, "start"):
                module.start()
        return self

    def get_input_embeddings(self) -> nn.Embedding:
        return self.model.embeddings

    def prepare_inputs_for_generation(self, input_ids: Tensor, **kwargs: Any) -> dict[str, Any]:
        """Only the newest token once there is a cache."""
        # generate() looks for the name `kwargs` before it hands an attention_mask on
        kept = kwargs.get("past_key_values")
        # a cache without layers of transformers' kind is false, so `or` would lose it
        kept = kwargs.get("cache") if kept is None else kept
        if kept is not None and kept.get_seq_length():
            input_ids = input_ids[:, -1:]
        names = ("attention_mask", "use_cache", "logits_to_keep")
        return {"input_ids": input_ids, "past_key_values": kept} | {
            n: kwargs[n] for n in names if n in kwargs
        }

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        past_key_values: RecurrentCache | None = None,
        cache: RecurrentCache | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        cu_seqlens: Tensor | None = None,
        logits_to_keep: int = 0,
        **_: Any,
    ) -> CausalLMOutputWithPast:
        """Logits `[B, T, vocabulary]` (the last `logits_to_keep` of them when that is set).

        `attention_mask [B, total]` is 0 on left or right padding; `cu_seqlens [n + 1]` are the bounds
        of documents packed into one row, each of which is read alone.
        """
        x = self.model.embeddings(input_ids) if inputs_embeds is None else inputs_embeds
        if cu_seqlens is not None:
            return CausalLMOutputWithPast(logits=self._packed(x, cu_seqlens))
        kept = past_key_values if past_key_values is not None else cache
        wanted = use_cache if use_cache is not None else not self.training and labels is None
        kept = (RecurrentCache() if kept is None else kept) if wanted else None
        context = _context(x, attention_mask, kept)
        hidden = self.model(x, context)
        logits = self.lm_head(hidden[:, -logits_to_keep:] if logits_to_keep else hidden)
        loss = None
        if labels is not None:
            loss = F.cross_entropy(logits[:, :-1].flatten(0, 1).float(), labels[:, 1:].flatten())
        return CausalLMOutputWithPast(loss=loss, logits=logits, past_key_values=kept)

    def _packed(self, x: Tensor, bounds: Tensor) -> Tensor:
        documents = [
            x[0, a:b] for a, b in zip(bounds[:-1].tolist(), bounds[1:].tolist(), strict=True)
        ]
        lengths = torch.tensor([len(d) for d in documents], device=x.device)
        rows = nn.utils.rnn.pad_sequence(documents, batch_first=True)
        mask = torch.arange(rows.shape[1], device=x.device) < lengths[:, None]
        hidden = self.model(rows, _context(rows, mask, None))
        return self.lm_head(hidden[mask])[None]


def _context(x: Tensor, mask: Tensor | None, kept: RecurrentCache | None) -> Context:
    batch, length = x.shape[:2]
    valid = None if mask is None else mask[:, mask.shape[1] - length :].bool()
    valid = None if valid is None or bool(valid.all()) else valid
    seen = x.new_zeros(batch, dtype=torch.long) if kept is None or kept.seen is None else kept.seen
    if valid is None:
        positions = seen[:, None] + torch.arange(length, device=x.device)
        total = seen + length
    else:
        positions = (seen[:, None] + valid.cumsum(1) - 1).clamp_min(0)
        total = seen + valid.sum(1)
    if kept is not None:
        kept.seen = total
    return Context(valid, positions, kept)
