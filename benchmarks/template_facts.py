"""What a person read in public chat templates, by the name of the file: what stands before an answer, and what closes it.

The templates themselves are not here; `benchmarks/chat_templates.py` takes a folder of them.
"""

from __future__ import annotations

from benchmarks.template_oracle import Facts

CHATML_HEADER = ("<|im_start|>assistant\n",)


def _chatml(*openers: str, **more: object) -> Facts:
    """ChatML; `openers`: what the generation prompt also writes, so that an answer may begin behind it."""
    header = (*CHATML_HEADER, *(CHATML_HEADER[0] + opener for opener in openers))
    return Facts(**({"header": header, "end": "<|im_end|>", "opens": ("<|im_start|>",)} | more))  # type: ignore[arg-type]


def _llama3(**more: object) -> Facts:
    return Facts(
        **(
            {
                "header": ("<|start_header_id|>assistant<|end_header_id|>\n\n",),
                "end": "<|eot_id|>",  # type: ignore[arg-type]
                "opens": ("<|start_header_id|>",),
            }
            | more
        )
    )


def _cohere(header: tuple[str, ...], **more: object) -> Facts:
    turn = "<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>"
    return Facts(
        **(
            {
                "header": tuple(turn + text for text in header),
                "end": "<|END_OF_TURN_TOKEN|>",  # type: ignore[arg-type]
                "opens": ("<|START_OF_TURN_TOKEN|>",),
            }
            | more
        )
    )


def _kimi(*openers: str, **more: object) -> Facts:
    header = "<|im_assistant|>assistant<|im_middle|>"
    return Facts(
        **(
            {
                "header": (header, *(header + opener for opener in openers)),
                "end": "<|im_end|>",  # type: ignore[arg-type]
                "opens": ("<|im_user|>", "<|im_assistant|>", "<|im_system|>"),
            }
            | more
        )
    )


def _deepseek(*openers: str, **more: object) -> Facts:
    header = tuple("<｜Assistant｜>" + opener for opener in ("", *openers))
    return Facts(
        **(
            {
                "header": header,
                "end": "<｜end▁of▁sentence｜>",  # type: ignore[arg-type]
                "opens": ("<｜User｜>", "<｜Assistant｜>", "<｜tool▁output", "<function_results>", "w"),
                "after_assistant": ("<｜end▁of▁sentence｜>",),
            }
            | more
        )
    )


def _granite() -> Facts:
    return Facts(("<|start_of_role|>assistant<|end_of_role|>",), "<|end_of_text|>", ("<|start_of_role|>",))


def _mistral(**more: object) -> Facts:
    return Facts(
        **(
            {
                "header": ("[/INST]", "[/TOOL_RESULTS]"),
                "end": "</s>",
                "bos": "<s>",  # type: ignore[arg-type]
                "opens": ("[INST]", "[TOOL_RESULTS]", "[AVAILABLE_TOOLS]"),
            }
            | more
        )
    )


AFTER_RESULT = "it writes a calling turn's text behind the tool's result, so the turn is no piece of the text"
GEMMA4 = (
    "<|turn>",
    "<turn|>",
    "<|tool_call>",
    "<tool_call|>",
    "<|tool_response>",
    "<tool_response|>",
    "<|tool>",
    "<tool|>",
    "<|channel>",
    "<channel|>",
    '<|"|>',
    "<|think|>",
)

FACTS: dict[str, Facts] = {
    "Apertus-8B-Instruct": Facts(
        ("<|assistant_start|>",),
        "<|assistant_end|>",
        ("<|user_start|>", "[", "<|system_start|>", "<|developer_start|>"),
        call=("<|tools_suffix|>",),
        after_tool=("]",),
        after_assistant=("",),
    ),
    "Apriel-1.6-15b-Thinker-fixed": Facts(
        ("<|begin_assistant|>\n",), "\n<|end|>", ("<|begin_", "<|bos|><|begin_system|>"), eos="<|end|>"
    ),
    "Cohere2MoE": _cohere(("", "<|START_THINKING|>")),
    "CohereForAI-c4ai-command-r-plus-tool_use": _cohere(("",), call=("]```",), last_call=("]```<|END_OF_TURN_TOKEN|>",)),
    "CohereForAI-c4ai-command-r7b-12-2024-tool_use": _cohere(("", "<|START_THINKING|><|END_THINKING|>", "<|START_THINKING|>")),
    "GLM-4.7-Flash": Facts(
        ("<|assistant|>", "<|assistant|><think>"),
        "",
        ("<|user|>", "<|assistant|>", "<|observation|>", "<|system|>"),
        last="<|endoftext|>",
        last_call=("<|endoftext|>",),
        eos="<|endoftext|>",
        specials=("[gMASK]", "<sop>"),
    ),
    "GigaChat3-10B-A1.8B": Facts(
        ("assistant<|role_sep|>\n",),
        "<|message_sep|>",
        ("user<|role_sep|>", "assistant<|role_sep|>", "function", "system<|role_sep|>"),
    ),
    "HuggingFaceTB-SmolLM3-3B": _chatml("<think>\n"),
    "Kimi-K2-Instruct": _kimi(),
    "Kimi-K2-Thinking": _kimi(),
    "Kimi-K3": Facts(
        ('<|open|>message role="assistant"<|sep|><|open|>think<|sep|>',),
        "<|close|>message<|sep|><|end_of_msg|>",
        ("<|open|>message ",),
    ),
    "LFM2-8B-A1B": _chatml(),
    "MiMo-VL": _chatml(),
    "MiniMax-M2": Facts(("]~b]ai\n", "]~b]ai\n<think>\n"), "[e~[", ("]~b]",), specials=("]~!b[", "]~b]", "[e~[")),
    "Mistral-Small-3.2-24B-Instruct-2506": _mistral(),
    "NVIDIA-Nemotron-3-Nano-30B-A3B-BF16": _chatml("<think>\n"),
    "NousResearch-Hermes-2-Pro-Llama-3-8B-tool_use": _chatml(header=(*CHATML_HEADER, "<|im_start|>assistant")),
    "NousResearch-Hermes-3-Llama-3.1-8B-tool_use": _chatml(header=(*CHATML_HEADER, "<|im_start|>assistant")),
    "Qwen-Qwen2.5-7B-Instruct": _chatml(),
    "Qwen-Qwen3-0.6B": _chatml(),
    "Qwen3.5-4B": _chatml("<think>\n"),
    "deepseek-ai-DeepSeek-R1-Distill-Llama-8B": _deepseek(
        "<think>\n", after_tool=("<｜tool▁outputs▁end｜>",), call=("<｜tool▁call▁end｜>", "<｜end▁of▁sentence｜>")
    ),
    "deepseek-ai-DeepSeek-V3.1": _deepseek(
        "<think></think>", "<think>", after_tool=("<｜tool▁output▁end｜>",), first=("<|bos|>",)
    ),
    "deepseek-ai-DeepSeek-V3.2": _deepseek(
        "<think></think>",
        "<think>",
        after_tool=("</function_results>\n\n", "</function_results>\n\n<think>", "</function_results>\n\n<think></think>"),
        first=("<|bos|>",),
    ),
    "deepseek-ai-DeepSeek-V4-Flash-0731": _deepseek("</think>", "<think>"),
    "fireworks-ai-llama-3-firefunction-v2": _llama3(),
    "google-gemma-2-2b-it": Facts(("<start_of_turn>model\n",), "<end_of_turn>", ("<start_of_turn>",)),
    "google-gemma-4-31B-it": Facts(
        ("<|turn>model\n",),
        "<turn|>",
        ("<|turn>", "response:"),
        call=("<|tool_response>",),
        after_tool=("<tool_response|>", "<turn|>\n"),
        after_assistant=("<turn|>\n",),
        specials=GEMMA4,
        cannot={"text and call": AFTER_RESULT},
    ),
    "ibm-granite-granite-3.3-2B-Instruct": _granite(),
    "ibm-granite-granite-4.0": _granite(),
    "llama-cpp-rwkv-world": Facts(
        ("Assistant:",), "", ("User:", "Assistant:", "System:", "<|endoftext|>"), last="<|endoftext|>", eos="<|endoftext|>"
    ),
    "meetkai-functionary-medium-v3.1": _llama3(call=("<|eom_id|>",)),
    "meta-llama-Llama-3.1-8B-Instruct": _llama3(),
    "meta-llama-Llama-3.2-3B-Instruct": _llama3(),
    "microsoft-Phi-3.5-mini-instruct": Facts(
        ("<|assistant|>\n",), "<|end|>", ("<|user|>", "<|assistant|>", "<|system|>", "<|endoftext|>"), eos="<|endoftext|>"
    ),
    "mistralai-Ministral-3-14B-Reasoning-2512": _mistral(),
    "moonshotai-Kimi-K2": _kimi(),
    "muse-glimmer": Facts(("<|start|>assistant",), "<|eot|>", ("<|start|>",), again=True),
    "openai-gpt-oss-120b": Facts(
        ("<|start|>assistant",), "<|end|>", ("<|start|>",), last="<|return|>", call=("<|call|>",), eos="<|return|>", again=True
    ),
    "poolside-Laguna-S-2.1": Facts(
        ("<assistant>", "<assistant><think>"),
        "</assistant>",
        ("<user>", "<assistant>", "<system>", "<tool_response>"),
        specials=("<assistant>", "</assistant>", "〈|EOS|〉"),
    ),
    "poolside-Laguna-XS-2.1": Facts(
        ("<assistant>\n", "<assistant>\n</think>"),
        "</assistant>",
        ("<user>", "<assistant>", "<system>", "<tool_response>"),
        specials=("<assistant>", "</assistant>", "〈|EOS|〉"),
    ),
    "tencent-Hy3": Facts(
        (
            "<｜hy_Assistant:opensource｜>",
            "<｜hy_Assistant:opensource｜><think:opensource></think:opensource>",
            "<｜hy_Assistant:opensource｜><think:opensource>",
        ),
        "<｜hy_eos:opensource｜>",
        ("<｜hy_User:opensource｜>", "<｜hy_Assistant:opensource｜>", "<tool_responses:opensource>"),
    ),
    "unsloth-Apriel-1.5": Facts(("<|assistant|>\n",), "</s>", ("<|user|>", "<|assistant|>", "<|system|>", "<|tool_result|>")),
    "upstage-Solar-Open-100B": Facts(("<|begin|>assistant",), "<|end|>", ("<|begin|>",), call=("<|calls|>",), again=True),
}
