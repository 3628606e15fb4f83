"""The layers inside other people's loops: with graphs on a GPU, on a CPU the same functions without capture."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from peft.tuners.lora import LoraLayer
from torch import Tensor
from transformers import AutoModelForCausalLM, Gemma2Config, LlamaConfig, Qwen2Config, Qwen3Config

from pronghorn.compat import captured_layers
from pronghorn.compat.captured_layers import CapturedLayers, power_of_2, rounded
from pronghorn.compat.hf_forward import install
from pronghorn.compat.outer_loop import loop_of
from pronghorn.model.causal_lm import engine_of
from pronghorn.model.formats.store import store_linears_
from pronghorn.model.formats.table import FORMATS
from pronghorn.model.lora import add_adapter
from pronghorn.recipe_parts import Lora
from tables import first_of

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
SMALL: dict[str, Any] = {
    "vocab_size": 259,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "pad_token_id": 0,
    "head_dim": 16,
}
CONFIGS = {"llama": LlamaConfig, "qwen2": Qwen2Config, "qwen3": Qwen3Config, "gemma2": Gemma2Config}
Batch = dict[str, Tensor]
# Without a GPU, tests/dropin/test_trainer_uses.py shows the same beside stock libraries.
IN_DROPIN = pytest.mark.later


def model_of(kind: str = "llama", *, captured: bool = True, four_bit: bool = False, full: bool = False) -> Any:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(CONFIGS[kind](**SMALL))
    if four_bit:
        store_linears_(model, FORMATS["nf4"])
    if not full:
        model.requires_grad_(False)
        model = add_adapter(model, Lora(r=4), seed=1)
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                torch.nn.init.normal_(parameter, std=0.02)
    model = model.to(DEVICE)
    assert install(model) == ""
    engine = engine_of(model)
    assert engine is not None
    loop = loop_of(model)
    loop.captured = CapturedLayers(engine, simulated=DEVICE.type == "cpu")
    loop.captured.on = captured
    return model.train()


def batch_of(seed: int, rows: int = 3, length: int = 40) -> Batch:
    """Padded on the right, some labels left out."""
    torch.manual_seed(100 + seed)
    ids = torch.randint(3, 250, (rows, length))
    mask = torch.ones_like(ids)
    for row in range(1, rows):
        mask[row, length - 7 * row :] = 0
    labels = ids.masked_fill((mask == 0) | (torch.rand(rows, length) < 0.2), -100)
    return {name: tensor.to(DEVICE) for name, tensor in {"input_ids": ids, "attention_mask": mask, "labels": labels}.items()}


def packed_batch(seed: int, lengths: tuple[int, ...] = (30, 9, 55)) -> Batch:
    torch.manual_seed(200 + seed)
    ids = torch.randint(3, 250, (1, sum(lengths)))
    positions = torch.cat([torch.arange(length) for length in lengths])[None]
    return {"input_ids": ids.to(DEVICE), "position_ids": positions.to(DEVICE), "labels": ids.to(DEVICE)}


def gradients(model: Any) -> dict[str, Tensor]:
    return {name: p.grad.detach().clone() for name, p in model.named_parameters() if p.grad is not None}


def taken(model: Any) -> int:
    """Pairs of graphs that there are."""
    state = loop_of(model).captured._state
    return 0 if state is None else len(state.pairs)


REL = 2e-5 if DEVICE.type == "cpu" else 2e-4  # a GPU adds in another order where padding stands


def assert_same(model: Any, other: Any, rel: float = REL) -> None:
    ours, theirs = gradients(model), gradients(other)
    assert ours.keys() == theirs.keys()
    assert ours
    for name, gradient in ours.items():
        scale = float(theirs[name].abs().max())
        assert torch.allclose(gradient, theirs[name], rtol=rel, atol=rel * max(scale, 1e-4)), name


Loop = Callable[[Any], Any]


def both(loop: Loop, pairs: int = 1, **options: Any) -> None:
    """The loop on a model with captured layers and on one without: what it returns, and the gradients it leaves."""
    ours, theirs = model_of(**options), model_of(captured=False, **options)
    found, expected = loop(ours), loop(theirs)
    assert found == pytest.approx(expected, rel=REL)
    assert_same(ours, theirs)
    assert taken(ours) == pairs
    assert taken(theirs) == 0


def steps(model: Any, count: int = 3, make: Callable[[int], Batch] = batch_of) -> list[float]:
    """Plain SGD: noise of 1e-6 in the gradients makes 6e-6 after four steps. AdamW divides small gradients by their own size:
    noise of 1e-7 made other gradients altogether after eight steps, and losses that differ by 4e-3."""
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    losses = []
    for step in range(count):
        optimizer.zero_grad()
        loss = model(**make(step)).loss
        loss.backward()
        losses.append(float(loss.detach()))
        if step < count - 1:
            optimizer.step()
    return losses


PADDED_AND_PACKED = [
    *zip(CONFIGS, [batch_of, packed_batch] * 2, strict=True),
    *zip(CONFIGS, [packed_batch, batch_of] * 2, strict=True),
]


@pytest.mark.parametrize(("kind", "make"), first_of(PADDED_AND_PACKED, len(CONFIGS)))
def test_steps_are_those_of_the_eager_layers(kind: str, make: Callable[[int], Batch]) -> None:
    both(lambda model: steps(model, make=make), kind=kind)


@pytest.mark.parametrize("options", [{"four_bit": True}, {"full": True}], ids=["4 bits", "everything trains"])
def test_other_storage(options: dict[str, Any]) -> None:
    both(steps, **options)


def test_recomputed_layers() -> None:
    def loop(model: Any) -> list[float]:
        for layer in engine_of(model).layers:  # type: ignore[union-attr]
            layer.recompute = True
        return steps(model)

    both(loop)


def test_several_sizes_share_memory() -> None:
    both(lambda model: steps(model, 19, lambda i: batch_of(i, 3, (40, 100, 70)[i % 3])), pairs=3)
    both(lambda model: steps(model, 9, lambda i: batch_of(i, 3, (40, 100, 70)[i % 3])), pairs=1)  # others must come more often


def test_a_smaller_batch_takes_a_graph_that_has_room_for_it() -> None:
    both(lambda model: steps(model, 6, lambda i: batch_of(i, 8, (150, 138)[i % 2])), pairs=1)
    both(lambda model: steps(model, 4, lambda i: batch_of(i, 8, (150, 110)[i % 2])), pairs=1)  # too small: eagerly
    model = model_of()
    steps(model, 2, lambda i: batch_of(i, 8, 150))
    state = loop_of(model).captured._state
    assert state is not None
    (known,) = state.pairs
    smaller = known._replace(tokens=known.tokens - 128)
    assert state.fitting(smaller, smaller.tokens, 9) is state.pairs[known]
    assert state.fitting(smaller, smaller.tokens, known.entries) is None  # no entry is left for a document of padding
    assert state.fitting(smaller._replace(longest=2 * known.longest), smaller.tokens, 9) is None
    assert state.fitting(smaller._replace(levels=("layer", "layer")), smaller.tokens, 9) is None
    assert state.fitting(known._replace(tokens=known.tokens // 2), known.tokens // 2, 9) is None


@IN_DROPIN
def test_gradients_are_added_up_and_scaled_as_the_loop_does() -> None:
    def loop(model: Any) -> list[float]:
        losses = []
        for i in range(5):
            loss = model(**batch_of(i), num_items_in_batch=torch.tensor(400)).loss
            (loss * 3.0 / 4).backward()
            losses.append(float(loss.detach()))
        return losses

    both(loop)


@IN_DROPIN
@pytest.mark.parametrize("options", [{}, {"full": True}], ids=["adapters", "everything trains"])
def test_losses_that_somebody_keeps(options: dict[str, Any]) -> None:
    """They hold autograd's nodes of every parameter, which belong to the stream of the first forward."""

    def loop(model: Any) -> list[float]:
        kept = []
        for i in range(4):
            loss = model(**batch_of(i)).loss
            loss.backward()
            kept.append(loss)
        return [float(loss.detach()) for loss in kept]

    both(loop, **options)


@IN_DROPIN
def test_a_second_forward_waits_for_nobody() -> None:
    def loop(model: Any) -> list[float]:
        losses = []
        for i in range(3):
            first, second = model(**batch_of(i)).loss, model(**batch_of(i + 10)).loss
            (first + 0.5 * second * second).backward()
            losses += [float(first), float(second)]
        return losses

    both(loop)


@IN_DROPIN
def test_backwards_in_the_order_of_forwards() -> None:
    """The eager one between a captured forward and its backward writes to memory that both use."""

    def loop(model: Any) -> list[float]:
        losses = []
        for i in range(3):
            first, second = model(**batch_of(i)).loss, model(**batch_of(i + 10)).loss
            with torch.no_grad():
                losses.append(float(model(**batch_of(i + 20)).loss))
            first.backward()
            second.backward()
            losses += [float(first), float(second)]
        return losses

    both(loop)
    both(loop, four_bit=True)


def test_a_forward_that_is_never_gone_back_through_holds_nothing_up() -> None:
    def loop(model: Any) -> list[float]:
        losses = [float(model(**batch_of(i)).loss) for i in range(3)]
        return losses + steps(model)

    both(loop)


@IN_DROPIN
def test_two_backwards_through_one_forward() -> None:
    def loop(model: Any) -> list[float]:
        steps(model)
        model.zero_grad()
        loss = model(**batch_of(5)).loss
        loss.backward(retain_graph=True)
        (2 * loss).backward()
        return [float(loss)]

    both(loop)
    model = model_of()
    steps(model)
    loss = model(**batch_of(5)).loss
    loss.backward(retain_graph=True)
    loss.backward()
    with pytest.raises(RuntimeError, match=r"second time|recompute the loss"):
        loss.backward()


@IN_DROPIN
def test_gradients_without_backward_belong_to_who_asked() -> None:
    def loop(model: Any) -> list[float]:
        wanted = [p for p in model.parameters() if p.requires_grad]
        found = [torch.autograd.grad(model(**batch_of(i)).loss, wanted) for i in range(4)]
        steps(model)
        return [float(sum(g.double().abs().sum() for g in each)) for each in found]

    both(loop)


@IN_DROPIN
def test_logits_and_the_gradient_of_embeddings() -> None:
    def loop(model: Any) -> list[float]:
        found = []
        for i in range(4):
            batch = batch_of(i)
            embedded = model.get_input_embeddings()(batch.pop("input_ids")).detach().requires_grad_()
            output = model(inputs_embeds=embedded, **batch)
            (output.loss + 1e-3 * output.logits[batch["attention_mask"] != 0].float().square().mean()).backward()
            found += [float(output.loss), float(embedded.grad.abs().sum())]
        return found

    both(loop)


@IN_DROPIN
def test_evaluation_and_generation_in_between() -> None:
    def loop(model: Any) -> list[float]:
        losses = steps(model)
        model.eval()
        with torch.no_grad():
            losses.append(float(model(**batch_of(9)).loss))
        model.generate(batch_of(9)["input_ids"][:, :5], max_new_tokens=3, do_sample=False)
        return losses + steps(model.train())

    both(loop)


def set_scale(model: Any, scale: float) -> None:
    for module in model.modules():
        if isinstance(module, LoraLayer):
            module.set_scale("default", scale)


def disable(model: Any) -> None:
    model.disable_adapter_layers()
    model.enable_adapter_layers()
    set_scale(model, 2.0)


def freeze(model: Any) -> None:
    for name, parameter in model.named_parameters():
        if ".0." in name:
            parameter.requires_grad_(False)
            parameter.grad = None


def replace_data(model: Any) -> None:
    for parameter in model.parameters():
        parameter.data = parameter.data.clone() * 1.5


def add_another(model: Any) -> None:
    model.add_adapter("other", copy.deepcopy(model.peft_config["default"]))
    model.set_adapter("other")
    torch.manual_seed(5)
    for name, parameter in model.named_parameters():
        if ".other." in name:
            torch.nn.init.normal_(parameter, std=0.02)


def train_norms(model: Any) -> None:
    for name, parameter in model.named_parameters():
        if "norm" in name:
            parameter.requires_grad_(True)


@pytest.mark.parametrize("change", [disable, freeze, replace_data, add_another, train_norms])
def test_what_is_changed_after_the_capture_is_seen(change: Callable[[Any], None]) -> None:
    def loop(model: Any) -> list[float]:
        losses = steps(model)
        change(model)
        return losses + steps(model)

    both(loop)


def test_a_loop_that_changes_it_again_and_again_runs_eagerly() -> None:
    def loop(model: Any) -> list[float]:
        losses = []
        for i in range(14):
            set_scale(model, 1.0 + i)
            losses += steps(model, 1, lambda _, i=i: batch_of(i))  # type: ignore[misc]
        return losses

    both(loop, pairs=0)


def test_a_copy_of_the_model_stands_on_its_own() -> None:
    seen = []

    def loop(model: Any) -> list[float]:
        steps(model)
        twin = copy.deepcopy(model)
        replace_data(model)
        losses = steps(twin)
        seen.append(taken(twin))
        return losses + steps(model)

    both(loop)
    assert seen == [1, 1]  # a copy captures its own


def test_memory_that_runs_out_is_taken_from_the_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    model = model_of()
    expected, engine = steps(model), engine_of(model)
    assert engine is not None
    assert taken(model) == 1
    hidden, failed = engine.hidden, []

    def fails_once(*args: Any) -> Tensor:
        if not failed:
            failed.append(True)
            raise torch.OutOfMemoryError("CUDA out of memory")
        return hidden(*args)

    monkeypatch.setattr(engine, "hidden", fails_once)
    assert model(**batch_of(0, 5, 200)).loss > 0  # a size that runs eagerly
    assert failed
    assert taken(model) == 0
    assert not loop_of(model).captured.on
    assert steps(model)
    assert expected
    failed.clear()
    with pytest.raises(torch.OutOfMemoryError):
        model(**batch_of(0))


def test_what_stays_eager(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(captured_layers, "MOST_TRAINED", 1000)
    both(steps, pairs=0)


def test_sizes() -> None:
    assert [rounded(n) for n in (1, 128, 129, 2000, 2049, 9000, 16384)] == [128, 128, 256, 2048, 2304, 9216, 16384]
    assert all(n <= rounded(n) <= max(128 + n, n * 9 / 8) for n in range(1, 40000, 7))
    assert [power_of_2(n, 32) for n in (1, 32, 33, 64, 65)] == [32, 32, 64, 64, 128]
