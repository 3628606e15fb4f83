"""The names that scripts written for Unsloth import: an ordinary transformers or PEFT model, on our layers."""
