"""An exported model: the decoder, wrapped as its config says before its tensors are loaded."""

from __future__ import annotations

from mcretrofit.decoder import DecoderForCausalLM as PlainForCausalLM
from mcretrofit.exported.attaching import attach_
from mcretrofit.exported.configuration_mcretrofit import DecoderConfig


class DecoderForCausalLM(PlainForCausalLM):
    """The language model with its caching; `*.mc.*` tensors are loaded like all others."""

    config_class = DecoderConfig
    _keep_in_fp32_modules_strict = [*PlainForCausalLM._keep_in_fp32_modules_strict, r"\bmc\b"]

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__(config)
        if config.caching is not None:
            attach_(self, config.caching, config.covers or {})
