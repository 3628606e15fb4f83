"""Input layouts that people have, each with what must become of it, written by hand: the rows as the model sees them, with what
is trained on in « », or words of the refusal and of its fix. `python -m benchmarks.input_layouts` makes the table."""

from __future__ import annotations

import json

from benchmarks.file_cases import FILES
from benchmarks.layout_parts import (
    ANSWERED,
    CALL,
    CALLED,
    FROM,
    FUNCTION,
    HI,
    KIND,
    PLAIN,
    TOOL,
    TOOLS,
    A,
    Layout,
    S,
    U,
    no,
    read,
)
from benchmarks.preference_cases import COMPARED
from benchmarks.public_cases import PUBLIC

CHAT = [
    read("messages", {"messages": [U, A]}, HI),
    read(
        "messages with a system turn, several turns",
        {"messages": [S, U, A, {"role": "user", "content": "and?"}, A]},
        f"{KIND}<user>and?<end><assistant>«ho<end>»",
    ),
    read("messages under `conversations`", {"conversations": [U, A]}, HI),
    read("messages as JSON text", {"messages": json.dumps([U, A])}, HI),
    read(
        "messages as an object of lists, as `datasets` stores sequences",
        {"messages": {"role": ["user", "assistant"], "content": ["hi", "ho"]}},
        HI,
    ),
    read("a bare list of messages a line", [[U, A], [U, A]], HI, HI),
    read("a JSON list of bare conversations", json.dumps([[U, A]]).encode(), HI, file="x.json"),
    read("ShareGPT", {"conversations": FROM}, HI),
    read("ShareGPT with a `system` column", {"conversations": FROM, "system": "be kind"}, KIND),
    read("ShareGPT, an answer first", {"conversations": [FROM[1], *FROM]}, f"<assistant>«ho<end>»{HI}"),
    read(
        "`Human`, `GPT`: capital letters",
        {"conversations": [{"from": "Human", "value": "hi"}, {"from": "GPT", "value": "ho"}]},
        HI,
    ),
    read(
        "`System`, `User`, `Chatbot`: as Cohere writes them",
        {
            "messages": [
                {"role": "System", "content": "be kind"},
                {"role": "User", "content": "hi"},
                {"role": "Chatbot", "content": "ho"},
            ]
        },
        KIND,
    ),
    read(
        "`prompter` and `assistant`: OpenAssistant, with `text`",
        {"messages": [{"role": "prompter", "text": "hi"}, {"role": "assistant", "text": "ho"}]},
        HI,
    ),
    read("role and value", {"messages": [{"role": "user", "value": "hi"}, {"role": "assistant", "value": "ho"}]}, HI),
    read("from and content", {"messages": [{"from": "human", "content": "hi"}, {"from": "gpt", "content": "ho"}]}, HI),
    read(
        "contents as text parts",
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "h"}, {"type": "text", "text": "i"}]}, A]},
        HI,
    ),
    read(
        "thinking as a part",
        {
            "messages": [
                U,
                {"role": "assistant", "content": [{"type": "thinking", "thinking": "hm"}, {"type": "text", "text": "ho"}]},
            ]
        },
        "<user>hi<end><assistant>«<think>hm</think>ho<end>»",
    ),
    read(
        "reasoning_content",
        {"messages": [U, A | {"reasoning_content": "hm"}]},
        "<user>hi<end><assistant>«<think>hm</think>ho<end>»",
    ),
    read(
        "turns with weight 0",
        {"messages": [U, A | {"weight": 0}, U, A | {"weight": 1}]},
        f"<user>hi<end><assistant>ho<end>{HI}",
    ),
    read("turns with train: false", {"messages": [U, A | {"train": False}, U, A]}, f"<user>hi<end><assistant>ho<end>{HI}"),
    read("messages with a `system` column", {"messages": [U, A], "system": "be kind"}, KIND),
    read("messages with a `system_prompt` column", {"messages": [U, A], "system_prompt": "be kind"}, KIND),
    read("a `system` column that repeats the first message", {"messages": [S, U, A], "system": "be kind"}, KIND),
    no(
        "a `system` column that says something else",
        {"messages": [S, U, A], "system": "be quick"},
        "two different system messages",
        "keep one",
    ),
    read(
        "messages with other columns",
        {"messages": [U, A], "id": 7, "source": "web", "prompt": "hi", "note": None},
        HI,
        unused="id, prompt, source",
    ),
    no(
        "messages beside prompt and completion",
        {"messages": [U, A], "prompt": "hi", "completion": "no"},
        "the rows match 2 formats",
        "data.format: messages or data.format: completion",
    ),
    read(
        "the same with data.format: completion",
        {"messages": [U, A], "prompt": "hi", "completion": "ho"},
        PLAIN,
        unused="messages",
        format="completion",
    ),
    no(
        "messages beside conversations",
        {"messages": [U, A], "conversations": FROM},
        "the rows match 2 formats",
        "data.fields: {messages: conversations}",
    ),
    no("a role that nobody knows", {"messages": [{"role": "asker", "content": "hi"}, A]}, "the role `asker`", "data.roles"),
    read("the same with data.roles", {"messages": [{"role": "asker", "content": "hi"}, A]}, HI, roles={"user": "asker"}),
    read(
        "other keys in a message, named",
        {"chat": [{"who": "user", "says": "hi"}, {"who": "assistant", "says": "ho"}]},
        HI,
        fields={"messages": "chat"},
        message_fields={"role": "who", "content": "says"},
    ),
    no(
        "other keys in a message, not named",
        {"messages": [{"who": "user", "says": "hi"}]},
        "has no `role`",
        "data.message_fields: {role: KEY, content: KEY}",
    ),
    no("no answer", {"messages": [U]}, "no assistant turn", "end the conversation with an answer"),
    no("an answer that is null", {"messages": [U, {"role": "assistant", "content": None}]}, "has no `content`", "add a text"),
    read(
        "an empty answer",
        [{"messages": [U, A]}, {"messages": [U, {"role": "assistant", "content": ""}]}],
        HI,
        "<user>hi<end><assistant>«<end>»",
        told="1 row with an empty answer",
    ),
    no(
        "an image",
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}, A]},
        "a part of type `image_url`",
        "remove the part",
    ),
    no("a list of texts", {"conversation": ["hi", "ho"]}, "is not a list of objects", '{"role": ..., "content": ...}'),
    no("a weight of 0.5", {"messages": [U, A | {"weight": 0.5}]}, "the weight 0.5", "set it to 0 or 1"),
]
CALLS = [
    read(
        "tool calls with arguments as an object",
        {
            "tools": [TOOL],
            "messages": [
                U,
                {"role": "assistant", "tool_calls": [CALL]},
                {"role": "tool", "tool_call_id": "call_1", "content": "2"},
                A,
            ],
        },
        TOOLS + ANSWERED,
    ),
    read(
        "OpenAI: arguments as JSON text",
        {
            "messages": [
                U,
                {
                    "role": "assistant",
                    "content": None,
                    "tool_calls": [CALL | {"function": {"name": "add", "arguments": '{"a": 1, "b": "x"}'}}],
                },
            ]
        },
        CALLED,
    ),
    no(
        "arguments that are no JSON",
        {"messages": [U, {"role": "assistant", "tool_calls": [{"function": {"name": "add", "arguments": "a=1"}}]}]},
        "are not a JSON object: a=1",
        "write them as an object",
    ),
    no(
        "arguments that are a list",
        {"messages": [U, {"role": "assistant", "tool_calls": [{"function": {"name": "add", "arguments": "[1]"}}]}]},
        "are not a JSON object",
        "write them as an object",
    ),
    read(
        "OpenAI, older: function_call, functions, role function",
        {
            "functions": [FUNCTION],
            "messages": [
                U,
                {"role": "assistant", "content": None, "function_call": {"name": "add", "arguments": '{"a": 1, "b": "x"}'}},
                {"role": "function", "name": "add", "content": "2"},
                A,
            ],
        },
        TOOLS + ANSWERED,
    ),
    read(
        "the same with an empty content",
        {
            "messages": [
                U,
                {"role": "assistant", "content": "", "function_call": {"name": "add", "arguments": '{"a": 1, "b": "x"}'}},
            ]
        },
        CALLED,
    ),
    no(
        "function_call beside tool_calls",
        {"messages": [U, {"role": "assistant", "tool_calls": [CALL], "function_call": {"name": "add", "arguments": "{}"}}]},
        "both `tool_calls` and `function_call`",
        "keep `tool_calls`",
    ),
    read(
        "calls without their wrapping",
        {"messages": [U, {"role": "assistant", "tool_calls": [{"name": "add", "arguments": {"a": 1, "b": "x"}}]}]},
        CALLED,
    ),
    read(
        "two calls at once, and text beside them",
        {"messages": [U, A | {"tool_calls": [CALL, CALL]}]},
        '<user>hi<end><assistant>«ho<call>add {"a": 1, "b": "x"}</call><call>add {"a": 1, "b": "x"}</call><end>»',
    ),
    read(
        "ShareGPT: function_call and observation, tools as text",
        {
            "tools": json.dumps([TOOL]),
            "conversations": [
                FROM[0],
                {"from": "function_call", "value": '{"name": "add", "arguments": {"a": 1, "b": "x"}}'},
                {"from": "observation", "value": "2"},
                FROM[1],
            ],
        },
        TOOLS + ANSWERED,
    ),
    no(
        "ShareGPT: a function_call that is no JSON",
        {"conversations": [FROM[0], {"from": "function_call", "value": "add(1)"}]},
        "not JSON with `name`",
        '{"name": "weather"',
    ),
    read("tools beside messages, without their wrapping", {"tools": [FUNCTION], "messages": [U, A]}, TOOLS + HI),
    no("tools that are no list", {"tools": "add", "messages": [U, A]}, "`tools` is not a list of objects", "write `tools` as"),
    no(
        "Anthropic's tool_use parts",
        {"messages": [U, {"role": "assistant", "content": [{"type": "tool_use", "id": "1", "name": "add", "input": {}}]}]},
        "a part of type `tool_use`",
        "`tool_calls`",
    ),
    no(
        "a call by the user",
        {"messages": [{"role": "user", "content": "hi", "tool_calls": [CALL]}, A]},
        "calls a tool",
        "fix the role",
    ),
]
PAIRS = [
    read("prompt and completion", {"prompt": "hi", "completion": "ho"}, PLAIN),
    read("prompt and completion as messages", {"prompt": [S, U], "completion": [A]}, KIND),
    read(
        "a prompt of messages, a completion of text",
        {"prompt": [U, A, U], "completion": "ho"},
        f"<user>hi<end><assistant>ho<end>{HI}",
    ),
    no("a prompt of text, a completion of messages", {"prompt": "hi", "completion": [A]}, "`prompt` is text", "write both as"),
    read(
        "prompt, completion and `system`",
        [{"prompt": "hi", "completion": "ho", "system": "be kind"}, {"prompt": "hi", "completion": "ho", "system": ""}],
        KIND,
        HI,
        told="are read as conversations: x.jsonl",
    ),
    read("prompt, completion and `tools`", {"prompt": "hi", "completion": "ho", "tools": [TOOL]}, TOOLS + HI),
    read("prompt and completion as messages, and `system`", {"prompt": [U], "completion": [A], "system": "be kind"}, KIND),
    no(
        "question and answer",
        {"question": "hi", "answer": "ho"},
        "unknown data format",
        "data.fields: {prompt: question, completion: answer}",
    ),
    read(
        "the same with data.fields",
        {"question": "hi", "answer": "ho"},
        PLAIN,
        fields={"prompt": "question", "completion": "answer"},
    ),
    read(
        "the same with columns of the source",
        {"question": "hi", "answer": "ho"},
        PLAIN,
        train=[{"path": "x.jsonl", "columns": {"prompt": "question", "completion": "answer"}}],
    ),
    no("input and output", {"input": "hi", "output": "ho"}, "unknown data format", "data.fields: {instruction: input}"),
    read("the same as instructions", {"input": "hi", "output": "ho"}, HI, fields={"instruction": "input"}),
    no("a completion that is a number", {"prompt": "hi", "completion": 4}, "`completion` is not text", 'put it in quotes: "4"'),
    read("Alpaca", {"instruction": "hi", "input": "", "output": "ho"}, HI),
    read(
        "Alpaca with input",
        {"instruction": "Say it.", "input": "hi", "output": "ho"},
        "<user>Say it.\n\nhi<end><assistant>«ho<end>»",
    ),
    read("Alpaca with `text` beside it", {"instruction": "hi", "output": "ho", "text": "### hi ho"}, HI, unused="text"),
    read(
        "Alpaca with `system` and `tools`",
        {"instruction": "hi", "output": "ho", "system": "be kind", "tools": [TOOL]},
        TOOLS + KIND,
    ),
    read(
        "Alpaca with `history` (LLaMA-Factory)",
        {"instruction": "hi", "output": "ho", "history": [["a", "b"]]},
        f"<user>a<end><assistant>«b<end>»{HI}",
    ),
    no(
        "a `history` that is none",
        {"instruction": "hi", "output": "ho", "history": ["a"]},
        "`history` is not a list of pairs",
        '[["question", "answer"], ...]',
    ),
    no(
        "Dolly: instruction, context, response",
        {"instruction": "hi", "context": "", "response": "ho"},
        "unknown data format",
        "data.fields: {input: context, output: response}",
    ),
]
PREFERENCES = [
    no(
        "prompt, chosen, rejected",
        {"prompt": "hi", "chosen": "ho", "rejected": "no"},
        "preference data",
        "data.fields: {completion: chosen}",
    ),
    read(
        "the better answers of such a file, by data.fields",
        {"prompt": "hi", "chosen": "ho", "rejected": "no"},
        PLAIN,
        unused="rejected",
        fields={"completion": "chosen"},
    ),
    no(
        "chosen and rejected conversations",
        {"chosen": [U, A], "rejected": [U, A]},
        "preference data",
        "data.fields: {messages: chosen}",
    ),
    no(
        "messages beside chosen and rejected",
        {"messages": [U, A], "chosen": [U, A], "rejected": [U, A]},
        "preference data",
        "data.fields: {messages: chosen}",
    ),
    no(
        "Alpaca with chosen and rejected",
        {"instruction": "hi", "output": "", "chosen": "ho", "rejected": "no"},
        "preference data",
        "data.fields: {output: chosen}",
    ),
    no(
        "ShareGPT with chosen and rejected",
        {"conversations": FROM[:1], "chosen": FROM[1], "rejected": FROM[1]},
        "preference data",
        "with its `chosen` answer at the end",
    ),
    no(
        "prompt, completion, label (KTO)",
        [{"prompt": "hi", "completion": "ho", "label": True}, {"prompt": "hi", "completion": "no", "label": False}],
        "`label` marks good answers",
        "jq -c",
    ),
    no("messages and kto_tag", {"messages": [U, A], "kto_tag": True}, "preference data", "select(.kto_tag)"),
    no(
        "one pair among other rows",
        [{"messages": [U, A]}, {"messages": [U, A]}, {"messages": [U, A], "chosen": "ho", "rejected": "no"}],
        "preference data",
        "data.bad_rows: skip",
    ),
    read("text with a class", {"text": "hi", "label": 1}, "«hi<end>»", unused="label"),
]

LAYOUTS: list[Layout] = [*CHAT, *CALLS, *PAIRS, *PREFERENCES, *COMPARED, *PUBLIC, *FILES]
