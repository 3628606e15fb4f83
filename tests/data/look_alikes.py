"""Chat templates written for these tests, one for each structure of public templates, and what a person reads in them."""

from __future__ import annotations

from dataclasses import replace

from benchmarks.template_oracle import Facts

CALLS = "{% for c in m.tool_calls or [] %}<call>{{ c.function | tojson }}</call>{% endfor %}"
TOOLS = "{% if tools %}<tools>{{ tools | tojson }}</tools>{% endif %}"
NO_SYSTEM = "{{ raise_exception('no system role') }}"
RESULT = "<|o|>{{ m.content }}<|x|>"
LAST_QUESTION = (
    "{% set ns = namespace(last=-1) %}{% for m in messages %}{% if m.role == 'user' %}{% set ns.last = "
    "loop.index0 %}"
    "{% endif %}{% endfor %}"
)
WHY = "{% set why = m.reasoning_content or '' %}"


def loop(
    user: str,
    says: str,
    *,
    system: str = NO_SYSTEM,
    tool: str = "{{ raise_exception('no tools') }}",
    before: str = "",
    behind: str = "",
    prompt: str = "",
) -> str:
    """A fragment for each role's message `m`; `before` and `behind` all of them."""
    roles = {"user": user, "assistant": says, "system": system, "tool": tool}
    cases = "".join(f"{{% {'if' if role == 'user' else 'elif'} m.role == '{role}' %}}{text}" for role, text in roles.items())
    asked = f"{{% if add_generation_prompt %}}{prompt}{{% endif %}}" if prompt else ""
    return f"{before}{{% for m in messages %}}{cases}{{% endif %}}{{% endfor %}}{behind}{asked}"


def turns(says: str = "{{ m.content }}" + CALLS, end: str = "<|x|>", prompt: str = "<|h|>assistant\n", **more: str) -> str:
    """<|h|>role, a line, the content, <|x|>: only the assistant's part differs."""
    parts = {
        "system": "<|h|>system\n{{ m.content }}<|x|>\n",
        "tool": "<|h|>tool\n{{ m.content }}<|x|>\n",
        "before": TOOLS,
    } | more
    header = prompt.partition("\n")[0] + "\n"
    return loop("<|h|>user\n{{ m.content }}<|x|>\n", f"{header}{says}{end}\n", prompt=prompt, **parts)


TURN = Facts(("<|h|>assistant\n",), "<|x|>", ("<|h|>",))
THINKS = replace(
    TURN, header=("<|h|>assistant\n", "<|h|>assistant\n<think>", "<|h|>assistant\n<think>\n", "<|h|>assistant\n<think></think>")
)
ROLES = Facts(("<|a|>",), "<|x|>", ("<|u|>", "<|a|>", "<|y|>", "<|o|>"))
SPECIALS = (
    "<|h|>", "<|x|>", "<|u|>", "<|a|>", "<|y|>", "<|o|>", "<|eos|>", "<|bos|>", "<|ret|>", "<|done|>", "<|m|>", "<|c|>",
    "<|i|>", "<|/i|>", "<|/c|>", "<|/o|>", "<|open|>", "<|close|>", "<|sep|>", "<|msg|>", "<|text|>", "<|/text|>",
    "<|think|>", "<|/think|>", "<|bot|>",
)  # fmt: skip

BY_ROLE = {"system": "<|y|>{{ m.content }}", "tool": "<|o|>{{ m.content }}", "before": TOOLS}

LOOK_ALIKES: dict[str, tuple[str, Facts]] = {
    "a line a role": (turns(), TURN),
    "knows no tools": (turns("{{ m.content }}", before=""), TURN),
    "trims": (turns("{{ m.content | trim }}" + CALLS), TURN),
    "default system message": (
        turns(before="{% if messages[0].role != 'system' %}<|h|>system\nBe good. " + TOOLS + "<|x|>\n{% endif %}"),
        TURN,
    ),
    "date of today": (turns(before="<|h|>system\n{{ strftime_now('%Y-%m-%d') }}" + TOOLS + "<|x|>\n"), TURN),
    "two tokens a header": (
        loop(
            "<|h|>user<|m|>\n\n{{ m.content | trim }}<|x|>",
            "<|h|>assistant<|m|>\n\n{{ m.content | trim }}" + CALLS + "<|x|>",
            system="<|h|>system<|m|>\n\n{{ m.content | trim }}<|x|>",
            tool="<|h|>tool<|m|>\n\n{{ m.content }}<|x|>",
            before="{{ bos_token }}" + TOOLS,
            prompt="<|h|>assistant<|m|>\n\n",
        ),
        replace(TURN, header=("<|h|>assistant<|m|>\n\n",)),
    ),
    "no generation prompt": (
        loop(
            "<|i|>{{ m.content }}<|/i|>",
            "{{ m.content }}" + CALLS + "{{ eos_token }}",
            tool="<|o|>{{ m.content }}<|/o|>",
            before="{{ bos_token }}" + TOOLS,
        ),
        Facts(("<|/i|>", "<|/o|>"), "<|eos|>", ("<|i|>", "<|o|>"), first=("<|bos|>",), after_assistant=("<|eos|>",)),
    ),
    "system in the first question": (
        "{% set ns = namespace(system='') %}"
        + loop(
            "<|i|>{{ ns.system + m.content }}<|/i|>{% set ns.system = '' %}",
            "{{ m.content }}{{ eos_token }}",
            system="{% set ns.system = m.content + '\n\n' %}",
            before="{{ bos_token }}",
        ),
        Facts(("<|/i|>",), "<|eos|>", ("<|i|>",), first=("<|bos|>",), after_assistant=("<|eos|>",)),
    ),
    "spaces around an answer": (
        loop("{{ bos_token }}[Q] {{ m.content | trim }} [/Q]", " {{ m.content | trim }} {{ eos_token }}"),
        Facts(("[/Q]",), " <|eos|>", ("<|bos|>[Q]",), first=("",), after_assistant=("<|eos|>",)),
    ),
    "roles must alternate": (
        "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('must alternate') }}"
        "{% endif %}<|h|>{{ 'model' if m.role == 'assistant' else 'user' }}\n{{ m.content | trim }}<|x|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|h|>model\n{% endif %}",
        replace(TURN, header=("<|h|>model\n",)),
    ),
    "a token a role, no end": (
        loop("<|u|>{{ m.content }}", "<|a|>{{ m.content }}" + CALLS, prompt="<|a|>", **BY_ROLE),
        replace(ROLES, end="", last="<|eos|>", last_call=("<|eos|>",), eos="<|eos|>"),
    ),
    "a token a role, and an end": (
        loop("<|u|>{{ m.content }}", "<|a|>{{ m.content }}" + CALLS + "<|x|>", prompt="<|a|>", **BY_ROLE),
        ROLES,
    ),
    "words only": (
        loop(
            "User: {{ m.content }}\n\n",
            "Assistant: {{ m.content }}\n\n",
            system="System: {{ m.content }}\n\n",
            prompt="Assistant:",
        ),
        Facts(("Assistant:",), "", ("User:", "Assistant:", "System:", "<|eos|>"), last="<|eos|>", eos="<|eos|>"),
    ),
    "words with one beginning": (
        loop("### User:\n{{ m.content }}\n\n", "### Assistant:\n{{ m.content }}\n\n", prompt="### Assistant:\n"),
        Facts(("### Assistant:\n",), "", ("### ", "<|eos|>"), last="<|eos|>", eos="<|eos|>"),
    ),
    "words and an end": (
        loop("User: {{ m.content }}\n", "Assistant: {{ m.content }}{{ eos_token }}\n", prompt="Assistant:"),
        Facts(("Assistant:",), "<|eos|>", ("User:", "Assistant:")),
    ),
    "an end at the very end": (
        loop("User: {{ m.content }}\n", "Assistant: {{ m.content }}{{ eos_token if loop.last }}\n", prompt="Assistant:"),
        Facts(("Assistant:",), "", ("User:", "Assistant:"), last="<|eos|>", eos="<|eos|>"),
    ),
    "only inner turns are closed": (
        loop(
            "{% if loop.previtem and loop.previtem.role == 'assistant' %}<|done|>{% endif %}<|u|>{{ m.content }}<|x|>",
            "{% if not loop.previtem or loop.previtem.role != 'assistant' %}<|a|>{% endif %}{{ m.content }}",
            prompt="<|a|>",
            system="{% if loop.previtem %}<|done|>{% endif %}<|y|>{{ m.content }}<|x|>",
        ),
        Facts(("<|a|>",), "<|done|>", ("<|u|>", "<|y|>"), after_assistant=("",)),
    ),
    "only inner turns are closed, on a line": (
        loop(
            "<|u|>\n{{ m.content }}\n",
            "<|a|>\n{{ m.content }}" + CALLS + "{{ '\\n<|x|>\\n' if not loop.last }}",
            before=TOOLS,
            system="<|y|>\n{{ m.content }}\n",
            tool="<|o|>\n{{ m.content }}\n",
            prompt="<|a|>\nHere is what I think:\n",
        ),
        replace(ROLES, header=("<|a|>\n",), end="\n<|x|>", eos="<|x|>"),
    ),
    "several tokens close": (
        loop(
            "<|open|>user<|sep|>{{ m.content }}<|close|>user<|sep|><|msg|>",
            WHY + "<|open|>assistant<|sep|><|open|>think<|sep|>{{ why }}<|close|>think<|sep|><|open|>answer<|sep|>{{ "
            "m.content }}"
            "<|close|>answer<|sep|>" + CALLS + "<|close|>assistant<|sep|><|msg|>",
            system="<|open|>system<|sep|>{{ m.content }}<|close|>system<|sep|><|msg|>",
            before=TOOLS,
            tool="<|open|>tool<|sep|>{{ m.content }}<|close|>tool<|sep|><|msg|>",
            prompt="<|open|>assistant<|sep|><|open|>think<|sep|>",
        ),
        Facts(("<|open|>assistant<|sep|><|open|>think<|sep|>",), "<|close|>assistant<|sep|><|msg|>", ("<|open|>",)),
    ),
    "text in tokens of its own": (
        loop(
            "<|h|><|u|><|text|>{{ m.content }}<|/text|><|x|>",
            WHY
            + "<|h|><|bot|>{% if why %}<|think|>{{ why }}<|/think|>{% endif %}{% if m.tool_calls %}"
            + CALLS
            + "{% else %}<|text|>{{ m.content }}<|/text|>{% endif %}<|x|>",
            system="<|h|><|y|>{{ m.content }}<|x|>",
            tool="<|h|><|o|>{{ m.content }}<|x|>",
            before=TOOLS,
            prompt="<|h|><|bot|><|think|>",
        ),
        Facts(("<|h|><|bot|>", "<|h|><|bot|><|think|>"), "<|x|>", ("<|h|>",)),
    ),
    "always a generation prompt": (
        loop(
            "<|h|><|u|>{{ m.content }}<|x|>",
            "<|h|><|bot|><|text|>{{ m.content }}<|/text|>" + CALLS + "<|x|>",
            before="{{ bos_token }}" + TOOLS,
            system="<|h|><|y|>{{ m.content }}<|x|>",
            tool="<|h|><|o|>{{ m.content }}<|x|>",
            behind="<|h|><|bot|><|think|><|/think|>",
        ),
        Facts(("<|h|><|bot|>",), "<|x|>", ("<|h|>",)),
    ),
    "always an instruction behind": (
        loop(
            "<|h|><|u|>{{ m.content }}<|x|>",
            "<|h|><|bot|>{{ m.content }}<|x|>",
            system="<|h|><|y|>{{ m.content }}<|x|>",
            behind="<|h|><|y|>Now answer.<|x|>",
            prompt="<|h|><|bot|>",
        ),
        Facts(("<|h|><|bot|>",), "<|x|>", ("<|h|>",)),
    ),
    "wants a list of tools": (turns(before="<tools>{% for tool in tools %}{{ tool | tojson }}{% endfor %}</tools>"), TURN),
    "wants functions and a date": (
        turns(before="{{ '<|h|>system\n' + functions + datetime + '<|x|>\n' }}", prompt="<|h|>assistant\n"),
        TURN,
    ),
    "channels": (
        TOOLS.replace("<tools>", "<|h|>system<|m|>").replace("</tools>", "<|x|>")
        + "{% for m in messages %}{% if m.role == 'assistant' and m.tool_calls %}{% if m.thinking and loop.last %}"
        "<|h|>assistant<|c|>analysis"
        "<|m|>{{ m.thinking }}<|x|>{% endif %}{% for c in m.tool_calls %}<|h|>assistant to={{ c.function.name }}<|c|>"
        "commentary<|m|>"
        "{{ c.function.arguments | tojson }}<|done|>{% endfor %}{% elif m.role == 'assistant' %}{% if m.thinking and "
        "loop.last %}"
        "<|h|>assistant<|c|>analysis<|m|>{{ m.thinking }}<|x|>{% endif %}<|h|>assistant<|c|>final<|m|>{{ m.content }}"
        "{{ '<|ret|>' if loop.last and not add_generation_prompt else '<|x|>' }}{% elif m.role == 'tool' %}<|h|>{{ "
        "m.name }} to=assistant"
        "<|m|>{{ m.content | tojson }}<|x|>{% else %}<|h|>{{ m.role }}<|m|>{{ m.content }}<|x|>{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}<|h|>assistant{% endif %}",
        Facts(("<|h|>assistant",), "<|x|>", ("<|h|>",), last="<|ret|>", call=("<|done|>",), eos="<|ret|>", again=True),
    ),
    "blocks with the header": (
        turns()
        .replace("<|h|>assistant\n{{ m.content }}", "{% generation %}<|h|>assistant\n{{ m.content }}")
        .replace("{% endfor %}<|x|>\n", "{% endfor %}<|x|>\n{% endgeneration %}", 1),
        TURN,
    ),
    "blocks without the end": (turns("{% generation %}{{ m.content }}" + CALLS + "{% endgeneration %}"), TURN),
    "blocks in a macro": (
        "{% macro say(m) %}{% generation %}{{ m.content }}{% endgeneration %}{% endmacro %}" + turns("{{ say(m) }}" + CALLS),
        TURN,
    ),
    "prompt opens thinking, rows close it": (
        turns(WHY + "{% if why %}<think>{{ why }}{% endif %}</think>{{ m.content }}" + CALLS, prompt="<|h|>assistant\n<think>"),
        THINKS,
    ),
    "prompt opens thinking, rows have it empty": (
        turns(
            WHY + "{% if why %}<think>\n{{ why }}\n</think>{% else %}<think></think>{% endif %}{{ m.content }}" + CALLS,
            prompt="<|h|>assistant\n<think>\n",
        ),
        THINKS,
    ),
    "prompt has empty thinking, rows half of it": (
        turns(
            WHY + "{% if why %}<think>{{ why }}{% endif %}</think>{{ m.content }}" + CALLS,
            prompt="<|h|>assistant\n<think></think>",
        ),
        THINKS,
    ),
    "prompt opens thinking, rows have none": (turns("{{ m.content }}" + CALLS, prompt="<|h|>assistant\n<think>\n"), THINKS),
    "thoughts of the last question only": (
        LAST_QUESTION
        + turns(
            WHY + "{% if '</think>' in m.content %}{% set why = m.content.split('</think>"
            "')[0].split('<think>')[-1] %}"
            "{% endif %}{% if loop.index0 > ns.last and (loop.last or why) %}<think>\n{{ "
            "why.strip('\n') }}\n</think>"
            "\n\n{% endif %}{{ m.content.split('</think>')[-1].lstrip('\n') }}" + CALLS
        ),
        TURN,
    ),
    "thoughts under another name": (
        turns("{% if m.thinking %}<think>{{ m.thinking }}</think>{% endif %}{{ m.content }}" + CALLS),
        TURN,
    ),
    "thoughts behind a switch": (
        turns(WHY + "{% if thinking %}<think>{{ why }}</think>{% endif %}{{ m.content }}" + CALLS, prompt="<|h|>assistant\n"),
        TURN,
    ),
    "thoughts kept by a switch": (
        LAST_QUESTION
        + turns(
            WHY + "{% if why and (loop.index0 > ns.last or (clear_thinking is defined and not "
            "clear_thinking)) %}"
            "<think>{{ why }}</think>{% endif %}{{ m.content }}" + CALLS
        ),
        TURN,
    ),
    "thoughts as a part": (
        turns(
            "{% if m.content is string %}{{ m.content }}{% else %}{% for p in m.content %}{% if p.type == "
            "'thinking' %}<think>"
            "{{ p.thinking }}</think>{% else %}{{ p.text }}{% endif %}{% endfor %}{% endif %}" + CALLS
        ),
        TURN,
    ),
    "changes a list": (
        turns("{{ m.content }}{% set all = [] %}{% for c in m.tool_calls or [] %}{% set _ = all.append(c) %}{% endfor %}"),
        TURN,
    ),
    "calls only without a text": (
        turns(
            "{% if m.content is none %}{% for c in m.tool_calls %}<call>{{ c.function.name + ' ' + "
            "c.function.arguments }}</call>"
            "{% endfor %}{% else %}{{ m.content }}{% endif %}"
        ),
        TURN,
    ),
    "arguments one by one": (
        turns(
            "{{ m.content }}{% for c in m.tool_calls or [] %}<f={{ c.function.name }}>{% for k, v in "
            "c.function.arguments.items() %}"
            "<p={{ k }}>{{ v if v is string else v | tojson }}</p>{% endfor %}</f>{% endfor %}"
        ),
        TURN,
    ),
    "one call at once": (
        turns(
            "{{ m.content }}{% if m.tool_calls %}{% if m.tool_calls | length > 1 %}{{ raise_exception('one call at "
            "once') }}{% endif %}"
            "{% endif %}" + CALLS
        ),
        TURN,
    ),
    "writes the first call": (
        turns("{{ m.content }}{% if m.tool_calls %}<call>{{ m.tool_calls[0].function | tojson }}</call>{% endif %}"),
        TURN,
    ),
    "drops the text beside a call": (turns("{{ '' if m.tool_calls else m.content }}" + CALLS), TURN),
    "calls end with another token": (
        turns("{{ m.content }}" + CALLS, end="{{ '<|done|>' if m.tool_calls else '<|x|>' }}"),
        replace(TURN, call=("<|done|>",)),
    ),
    "calls have no end": (
        turns("{{ m.content }}" + CALLS, end="{{ '' if m.tool_calls else '<|x|>' }}"),
        replace(TURN, call=("</call>",), last_call=("<|x|>",)),
    ),
    "a call named twice": (
        turns(
            "{{ m.content }}{% for c in m.tool_calls or [] %}<to={{ c.function.name }}><call={{ c.function.name }}>"
            "{{ c.function.arguments | tojson }}</call>{% endfor %}",
            tool="<|h|>tool {{ m.name }}\n{{ m.content }}<|x|>\n",
        ),
        TURN,
    ),
    "a call in a turn of its own": (
        loop(
            "user<|sep|>\n{{ m.content }}<|x|>\n\n",
            "assistant<|sep|>\n{{ m.content }}<|x|>\n\n{% for c in "
            "m.tool_calls or [] %}function call"
            "<|sep|>\n{{ c.function | tojson }}<|x|>\n\n{% endfor %}",
            system="system<|sep|>\n{{ m.content }}<|x|>\n\n",
            before=TOOLS,
            tool="result<|sep|>\n{{ m.content }}<|x|>\n\n",
            prompt="{% if messages[-1].role != 'assistant' %}assistant<|sep|>\n{% endif %}",
        ),
        Facts(("assistant<|sep|>\n",), "<|x|>", ("user<|sep|>", "assistant<|sep|>", "system<|sep|>", "result<|sep|>")),
    ),
    "results are questions": (turns(tool="<|h|>user\n<result>{{ m.content }}</result><|x|>\n"), TURN),
    "results within the turn": (
        turns("{{ m.content }}" + CALLS, end="{{ '<|done|>' if m.tool_calls else '<|x|>' }}", tool="[{{ m.content }}]"),
        replace(TURN, call=("<|done|>",), opens=("<|h|>", "[")),
    ),
    "a text behind its result": (
        TOOLS + "{% for m in messages %}{% if m.role == 'assistant' and m.tool_calls %}<|h|>assistant\n" + CALLS + "<|done|>"
        "{% for r in messages[loop.index0 + 1:] if r.role == 'tool' %}[{{ r.content }}]{% endfor %}{{ m.content + "
        "'<|x|>' if m.content }}"
        "{% elif m.role in ('assistant', 'user') %}<|h|>{{ m.role }}\n{{ m.content }}<|x|>\n{% elif m.role == 'system' %}"
        "{{ raise_exception('none') }}{% endif %}{% endfor %}{% if add_generation_prompt %}<|h|>assistant\n{% endif %}",
        replace(
            TURN,
            opens=("<|h|>", "["),
            last_call=("<|x|>", "<|done|>"),
            call=("<|done|>",),
            cannot={"text and call": "a text stands behind its result", "call after call": "results stand twice"},
        ),
    ),
    "answers in a row have one header": (
        loop(
            "<|u|>{{ m.content }}",
            "{% if not loop.previtem or loop.previtem.role != 'assistant' %}<|a|>{% endif %}{{ m.content }}<|x|>",
            prompt="{% if messages[-1].role != 'assistant' %}<|a|>{% endif %}",
        ),
        replace(ROLES, after_assistant=("<|x|>",)),
    ),
    "an end and the end token": (turns(end="<|x|>\n{{ eos_token }}"), replace(TURN, end="<|x|>\n<|eos|>", eos="<|eos|>")),
    "the end token behind all": (
        turns(behind="{% if not add_generation_prompt %}{{ eos_token }}{% endif %}"),
        replace(TURN, opens=("<|h|>", "<|eos|>"), eos="<|eos|>"),
    ),
    "looks at the question": (
        turns().replace("<|h|>user\n", "<|h|>user{{ ' (tool)' if m.content.startswith('<r>') else '' }}\n"),
        TURN,
    ),
    "results go on in the turn": (
        "{% set ns = namespace(open=false, results=false) %}"
        + loop(
            "{{ ']' if ns.results }}{{ '<|done|>' if ns.open }}{% set ns.open = false %}{% set ns.results = false %}"
            "<|u|>{{ m.content }}<|x|>",
            "{{ '<|a|>' if not ns.open }}{% set ns.open = true %}{{ ']' if ns.results }}{% set ns.results = false %}"
            "{{ m.content }}" + CALLS.replace("<call>", "<|c|>").replace("</call>", "<|/c|>"),
            tool="{{ ', ' if ns.results else '[' }}{% set ns.results = true %}{{ m.content }}",
            before="{{ bos_token }}<|y|>Be good.<|x|><|i|>" + TOOLS + "<|/i|>",
            behind="{% if ns.results %}]{% endif %}",
            prompt="<|a|>",
        ),
        Facts(("<|a|>",), "<|done|>", ("<|u|>", "["), call=("<|/c|>",), after_tool=("]",), after_assistant=("",)),
    ),
    "no end, and texts are stripped": (
        LAST_QUESTION
        + loop(
            "<|u|>\n{{ m.content }}",
            WHY
            + "{% set said = m.content %}{% if not why and '</think>' in said %}{% set why = said.split('</think>')[0].split("
            "'<think>')[-1].strip('\n') %}{% set said = said.split('</think>')[-1] %}{% endif %}<|a|>\n<think>"
            "{{ why.strip() if loop.index0 > ns.last }}</think>{{ '\n' + said.strip() if said.strip() }}" + CALLS,
            system="<|y|>\n{{ m.content }}",
            tool="{{ '<|o|>' if not loop.previtem or loop.previtem.role != 'tool' }}\n<r>\n{{ m.content }}\n</r>",
            before=TOOLS,
            prompt="<|a|>",
        ),
        replace(ROLES, header=("<|a|>", "<|a|>\n"), end="", last="<|eos|>", last_call=("<|eos|>",), eos="<|eos|>"),
    ),
    "an empty text is a turn of its own": (
        "{% set ns = namespace(results=false) %}"
        + loop(
            "{% set ns.results = false %}<|u|>{{ m.content }}",
            "{% if m.tool_calls %}<|a|>{% for c in m.tool_calls %}<|c|>{{ c.function.name + ' ' + c.function.arguments }}"
            "<|/c|>{% endfor %}<|x|>{% endif %}{% if m.content is not none %}{{ '<|/o|>' if ns.results else '<|a|>' }}"
            "{{ m.content }}<|x|>{% set ns.results = false %}{% endif %}",
            tool="{{ '<|o|>' if not ns.results }}<|i|>{{ m.content }}<|/i|>{% set ns.results = true %}",
            before=TOOLS,
            behind="{{ '<|/o|>' if ns.results }}",
            prompt="{{ '<|a|><think>\n' if not ns.results }}",
        ),
        Facts(
            ("<|a|>", "<|a|><think>\n"),
            "<|x|>",
            ("<|u|>", "<|a|>", "<|o|>", "<|i|>"),
            after_tool=("<|/o|>",),
            after_assistant=("<|x|>",),
            cannot={"text and call": "the text is another turn", "text and call, last": "the text is another turn"},
        ),
    ),
    "an empty text ends no turn": (
        loop(
            "<|h|>user\n{{ m.content }}<|x|>",
            "<|h|>assistant{{ '\n' + m.content | trim if m.content | trim }}"
            + CALLS
            + "{{ '<|x|>' if m.tool_calls or m.content | trim }}",
            system="<|h|>system\n{{ m.content }}<|x|>",
            tool="<|h|>tool\n{{ m.content }}<|x|>",
            before=TOOLS,
            prompt="<|h|>assistant\n",
        ),
        replace(TURN, header=("<|h|>assistant\n", "<|h|>assistant"), bos="<|h|>"),
    ),
    "the last turn is written apart": (
        "{% set last = messages[-1] if messages[-1].role == 'assistant' %}"
        + loop(
            "<|h|>User\n{{ m.content.strip() }}\n",
            "<|h|>Assistant\n{{ m.content.strip() }}" + CALLS + "\n<|x|>\n\n",
            system="<|h|>System\n{{ m.content.strip() }}\n",
            tool="<|h|>User\n<r>{{ m.content }}</r>\n",
            before=TOOLS,
            behind="{% if last and not add_generation_prompt %}<|h|>Assistant\n{{ '<think>\n\n' if not last.tool_calls }}"
            "{{ last.content.strip() }}{% for c in last.tool_calls or [] %}<call>{{ c.function | tojson }}</call>{% endfor %}"
            "\n<|x|>\n\n{% endif %}",
            prompt="<|h|>Assistant\n<think>\n\n",
        ).replace("in messages %}", "in (messages[:-1] if last else messages) %}"),
        Facts(("<|h|>Assistant\n", "<|h|>Assistant\n<think>\n\n"), "<|x|>", ("<|h|>",)),
    ),
    "trims the others": (
        turns(system="<|h|>system\n{{ m.content.strip() }}<|x|>\n", tool="<|h|>tool\n{{ m.content | trim }}<|x|>\n").replace(
            "<|h|>user\n{{ m.content }}", "<|h|>user\n{{ m.content.lstrip() }}"
        ),
        TURN,
    ),
}
