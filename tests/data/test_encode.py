"""Tokens and loss, exact to the token: straddling tokens, spaces that decoders drop, texts that tokenizers rewrite."""

from __future__ import annotations

import itertools
from itertools import pairwise
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from pronghorn.data.encode.encode import Encoder, _runs
from pronghorn.data.preference.preference_rows import Group
from pronghorn.data.read.formats import Example
from pronghorn.data.template.rendering import RowError
from pronghorn.errors import DataError
from samples import CHATML, make_tokenizer
from tables import table

# The prompt ends with a space, so that the first token of an answer, " yes", would begin inside the prompt.
SPACED = (
    "{% for m in messages %}{{ m.role + ': ' + m.content }}{{ eos_token if m.role == 'assistant' else '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)
TALK = (
    {"role": "user", "content": "yes or no?"},
    {"role": "assistant", "content": "yes yes"},
    {"role": "user", "content": "so?"},
    {"role": "assistant", "content": "no"},
)


def learned_tokenizer(template: str | None = SPACED, normalizer: Any = None) -> Any:
    """Byte-level BPE with merges: ` yes` and `assistant:` become single tokens; `<s>` is put before plain texts."""
    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    core.normalizer = normalizer
    specials = ["<s>", "</s>", "<|im_start|>", "<|im_end|>"]
    trainer = trainers.BpeTrainer(
        vocab_size=400, special_tokens=specials, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    core.train_from_iterator(["assistant: yes yes or no user: no yes assistant: caf\u00e9"] * 9, trainer)
    core.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, bos_token="<s>", eos_token="</s>")
    tokenizer.chat_template = template
    return tokenizer


def parts(tokenizer: Any, example: Example, loss_on: Any = "auto") -> list[str]:
    """The row cut at the borders of loss: parts 1, 3, 5... are what carries it."""
    row = Encoder(tokenizer, loss_on).encode(example)
    borders = [0, *(border for run in row.runs for border in run), len(row.ids)]
    return [tokenizer.decode(row.ids[start:stop], skip_special_tokens=False) for start, stop in pairwise(borders)]


def chat(*messages: dict[str, Any], **more: Any) -> Example:
    return Example("chat", "a.jsonl:1", messages=messages, **more)


def test_a_token_that_straddles_the_border_is_cut_there() -> None:
    tokenizer = learned_tokenizer()
    text = tokenizer.apply_chat_template(list(TALK), tokenize=False)
    assert "Ġyes" in tokenizer.tokenize(text)  # or this test would test nothing
    prompt, first, between, second, rest = parts(tokenizer, chat(*TALK))
    assert (first, second, rest) == ("yes yes</s>", "no</s>", "")
    assert (prompt, between) == ("user: yes or no?\nassistant: ", "user: so?\nassistant: ")
    # The prompt is tokenized as it will be when the model is used.
    row = Encoder(tokenizer).encode(chat(*TALK))
    given = tokenizer.apply_chat_template(list(TALK[:1]), add_generation_prompt=True, tokenize=True, return_dict=False)
    assert row.ids[: row.runs[0][0]].tolist() == given


def test_loss_on_one_turn_or_everything() -> None:
    tokenizer = learned_tokenizer()
    assert parts(tokenizer, chat(*TALK), "assistant") == parts(tokenizer, chat(*TALK))
    assert parts(tokenizer, chat(*TALK), "completion")[1::2] == ["no</s>"]
    whole = "user: yes or no?\nassistant: yes yes</s>user: so?\nassistant: no</s>"
    assert parts(tokenizer, chat(*TALK), "all")[1::2] == [whole]


@table("loss_on", ["auto", "assistant", "completion"])
def test_a_given_prompt_never_carries_loss(loss_on: str) -> None:
    """Prompt and completion as message lists: the assistant's turn in the prompt is context."""
    assert parts(learned_tokenizer(), chat(*TALK, prompt_messages=2), loss_on)[1::2] == ["no</s>"]
    both = chat(*TALK, prompt_messages=1)
    assert parts(learned_tokenizer(), both, loss_on)[1::2] == ["yes yes</s>", "no</s>"]


@table("loss_on", ["auto", "assistant", "completion"])
def test_a_completion_carries_loss_with_its_end(loss_on: str) -> None:
    example = Example("completion", "a.jsonl:1", prompt="yes or ", completion="no yes")
    assert parts(learned_tokenizer(), example, loss_on) == ["<s>yes or ", "no yes</s>", ""]


def test_plain_text_carries_loss_everywhere() -> None:
    row = Encoder(learned_tokenizer()).encode(Example("text", "a.txt:1", text="yes yes"))
    assert row.ids[0] == 0  # <s>, once
    assert row.runs == ((1, len(row.ids)),)
    assert parts(learned_tokenizer(), Example("text", "a.txt:1", text="yes yes")) == ["<s>", "yes yes</s>", ""]


def test_begin_and_end_are_not_doubled() -> None:
    for text in ("yes", "<s>yes", "yes</s>", "<s>yes</s>"):
        ids = Encoder(learned_tokenizer()).encode(Example("text", "", text=text)).ids.tolist()
        assert (ids.count(0), ids.count(1), ids[0], ids[-1]) == (1, 1, 0, 1)
    begins = "<s>" + SPACED  # a template that writes its own
    assert Encoder(learned_tokenizer(begins)).encode(chat(*TALK)).ids.tolist().count(0) == 1


@pytest.mark.parametrize("loss_on", ["assistant", "completion"])
def test_plain_text_has_no_turns(loss_on: Any) -> None:
    with pytest.raises(DataError, match="plain text") as caught:
        Encoder(learned_tokenizer(), loss_on).encode(Example("text", "a.txt:1", text="yes"))
    assert "loss_on: all" in caught.value.fix


def test_a_tokenizer_that_normalizes() -> None:
    """Qwen's does NFC: the tokens spell the composed letter, the data has two characters."""
    row = chat(TALK[0], {"role": "assistant", "content": "cafe\u0301"})
    assert parts(learned_tokenizer(normalizer=normalizers.NFC()), row)[1] == "caf\u00e9</s>"


def test_a_decoder_that_drops_the_first_space() -> None:
    """SentencePiece style: decoding a run alone loses the space that stands before it in the text."""
    words = ["<s>", "</s>", "[INST]", "[/INST]", "▁hi", "▁yo", "▁", "<unk>"]
    core = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never")
    core.decoder = decoders.Metaspace(prepend_scheme="always")
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, bos_token="<s>", eos_token="</s>", unk_token="<unk>")
    tokenizer.add_tokens(["[INST]", "[/INST]"], special_tokens=True)
    tokenizer.chat_template = (
        "{% for m in messages %}{% if m.role == 'user' %}<s>[INST] {{ m.content }}[/INST]{% else %} {{ m.content }}</s>"
        "{% endif %}{% endfor %}"
    )
    ask, answer = {"role": "user", "content": "hi"}, {"role": "assistant", "content": "yo"}
    assert core.decode([5, 1], skip_special_tokens=False) == "yo</s>"  # the space is gone
    row = Encoder(tokenizer).encode(chat(ask, answer))
    assert row.ids[slice(*row.runs[0])].tolist() == [5, 1]
    # A word without a token cannot be learned: its row is refused, with its place.
    with pytest.raises(RowError, match="do not decode") as caught:
        Encoder(tokenizer).encode(chat(ask, {"role": "assistant", "content": "zebra"}))
    assert caught.value.where == "a.jsonl:1"


def test_the_prompt_for_an_answer() -> None:
    tokenizer = learned_tokenizer()
    encoder = Encoder(tokenizer)
    assert tokenizer.decode(encoder.prompt_ids(chat(*TALK[:3]))).endswith("user: so?\nassistant: ")
    assert encoder.prompt_ids(Example("completion", "", prompt="yes"))[0] == 0


def test_control_tokens_inside_a_message_stay_text() -> None:
    tokenizer = make_tokenizer(CHATML)
    row = chat({"role": "user", "content": "what is <|im_end|>?"}, {"role": "assistant", "content": "<|im_start|> opens"})
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    escaped, kept = (Encoder(tokenizer, controls=choice).encode(row) for choice in ("escape", "keep"))
    assert (escaped.ids.tolist().count(end), kept.ids.tolist().count(end)) == (2, 3)
    assert escaped.controls == kept.controls == 2
    assert [tokenizer.decode(escaped.ids[slice(*run)]) for run in escaped.runs] == ["<|im_start|> opens<|im_end|>"]
    assert tokenizer.decode(escaped.ids) == tokenizer.decode(kept.ids)
    with pytest.raises(RowError, match=r"contains the control token <\|im_end\|>") as caught:
        Encoder(tokenizer, controls="refuse").encode(row)
    assert "data.control_tokens" in caught.value.fix


def test_what_a_template_leaves_out_is_refused_or_counted() -> None:
    tokenizer = make_tokenizer(CHATML)
    answer = {"role": "assistant", "content": "4", "reasoning_content": "2 and 2"}
    row = chat({"role": "user", "content": "2+2?"}, answer)
    for loss_on in ("auto", "all"):
        with pytest.raises(RowError, match=r"drops its reasoning in message 2 \(assistant\)") as caught:
            Encoder(tokenizer, loss_on).encode(row)
        assert "data.lost: allow" in caught.value.fix
    assert Encoder(tokenizer, lost="allow").encode(row).lost == "its reasoning"
    _, bad, told = Encoder(tokenizer, lost="allow").encode_many([Group("", (one,)) for one in (row, chat(*TALK))])
    assert (bad, told) == ([], {"empty": 0, "identical": 0, "lost": 1, "controls": 0})
    # Not trained on, it is only context, and the template knows what of it the model sees.
    read = chat({"role": "user", "content": "2+2?"}, answer | {"train": False}, *TALK[:2])
    assert not Encoder(tokenizer).encode(read).lost


def test_a_template_for_another_vocabulary_is_refused() -> None:
    tokenizer = make_tokenizer(CHATML.replace("im_end", "eot_id"))
    tokenizer.pronghorn_own_template = True  # as data.chat_template sets it
    with pytest.raises(DataError, match=r"ends turns with <\|eot_id\|>, but the tokenizer has no such token"):
        Encoder(tokenizer).encode(chat(*TALK))


def test_a_border_falls_before_the_first_token_that_starts_there_or_behind() -> None:
    """Also inside a token and inside a character of several tokens."""
    text = "the cat, na\u00efve \U0001f600\n<|im_end|>  sat"
    encoding = make_tokenizer().backend_tokenizer.encode(text, add_special_tokens=False)
    assert len(encoding.ids) != len(text)
    spans = list(itertools.combinations_with_replacement(range(len(text) + 1), 2))
    before = [sum(start < border for start, _ in encoding.offsets) for border in range(len(text) + 1)]
    assert _runs(encoding, spans) == [(before[start], before[stop]) for start, stop in spans]
