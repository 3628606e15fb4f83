"""Types of transformers and PEFT by short names. mypy does not read these packages (to it each is Any), and nothing is imported
for them when the program runs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeAlias

if TYPE_CHECKING:
    from peft import PeftModel
    from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase, ProcessorMixin

    HFModel: TypeAlias = PreTrainedModel | PeftModel
    HFConfig: TypeAlias = PreTrainedConfig
    Tokenizer: TypeAlias = PreTrainedTokenizerBase | ProcessorMixin
else:
    HFModel = HFConfig = Tokenizer = Any
