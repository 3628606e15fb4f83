"""Names of what comes from transformers, PEFT and datasets. mypy does not read these packages: to it, each is Any."""

from typing import TypeAlias

from peft import PeftModel
from transformers import PreTrainedModel, PreTrainedTokenizerBase, ProcessorMixin

HFModel: TypeAlias = PreTrainedModel | PeftModel
Tokenizer: TypeAlias = PreTrainedTokenizerBase | ProcessorMixin
