"""Models of which every rank keeps a part: the host memory that loading takes, and what is read."""

from __future__ import annotations

import ctypes
import gc
import json
import re
from pathlib import Path

import pytest
import torch
from rank_processes import in_ranks
from small_models import model_of
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

from image_text_models import save_image_text_model
from pronghorn.model.formats.checkpoint import Shards
from pronghorn.model.load import load_model
from pronghorn.model.rank_files import Part, file_name, write_rank_file
from pronghorn.train.dist.expert_shards import ExpertShares, shares_of
from pronghorn.train.dist.world import World
from tables import first_of

CPU = torch.device("cpu")
RANKS = 4
LIBC = ctypes.CDLL(None)
SLACK = 1.0  # MB, of Python and torch
HELD = {
    # the files; world.shard; how weights are stored, and read; bytes of a value while its layer is read (0: it is a view of
    # the file), and of one that a rank keeps
    "lora": ("dense", "base", "bf16", torch.bfloat16, 0, 2),
    "qlora": ("dense", "base", "nf4", torch.bfloat16, 2, 0.6),
    "fp8": ("dense", "base", "fp8", torch.bfloat16, 2, 1.1),
    "full": ("dense", "full", "bf16", torch.float32, 4, 4),
    "full, of files of ranks": ("files of ranks", "full", "bf16", torch.float32, 4, 4),
    "experts": ("experts", "experts", "bf16", torch.bfloat16, 2, 2),
    "experts in fp8": ("experts", "experts", "fp8", torch.bfloat16, 2, 1.1),
}


def _private() -> float:
    """MB of this process, without pages of files, which the kernel may drop, and without what malloc keeps for the next one."""
    LIBC.malloc_trim(0)
    found = re.search(r"RssAnon:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found
    return int(found[1]) / 1024


def _peak(case: str, world: World, models: Path) -> float:
    files, shard, storage, dtype, *_ = HELD[case]
    gc.collect()
    begin, seen = _private(), list[float]()
    shares = shares_of(shard, world, CPU, torch.float32, 1, "")
    assert shares is not None

    def keep(name: str, module: torch.nn.Module) -> None:
        seen.append(_private())
        shares.keep(name, module)
        seen.append(_private())

    model = load_model(str(models / files), dtype, CPU, keep=keep, storage=storage, experts=shares.experts)
    seen.append(_private())
    shares.keep_ends(model)
    seen.append(_private())
    return max(seen) - begin


def _peaks(world: World, models: Path) -> str:
    _peak("lora", world, models)  # the first load of a process also imports
    return json.dumps({case: _peak(case, world, models) for case in HELD})


def rows_of(weight: torch.Tensor, half: int) -> tuple[torch.Tensor, int]:
    first = half * (len(weight) // 2)
    return weight.detach()[first : first + len(weight) // 2], first


def test_a_rank_holds_its_share_and_two_layers_while_it_loads(tmp_path: Path) -> None:
    """Real bytes: private memory before and after each layer is cut, and embeddings and head. Whole, the weights are 12 layers
    of 6.5 MB in 16 bits, and 13 MB in float32."""
    sizes = {"vocab_size": 1000, "num_hidden_layers": 12}
    dense = LlamaForCausalLM(LlamaConfig(hidden_size=512, intermediate_size=1536, num_attention_heads=8, **sizes))
    experts = {"num_experts": 8, "num_experts_per_tok": 2, "num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 64}
    mixture = Qwen3MoeForCausalLM(Qwen3MoeConfig(hidden_size=256, moe_intermediate_size=512, **experts, **sizes))
    values = {}
    for name, model in (("dense", dense), ("experts", mixture)):
        model.bfloat16().save_pretrained(tmp_path / name)  # each expert is a tensor of its own in the files
        layer = sum(p.numel() for p in model.model.layers[0].parameters())
        values[name] = (layer / 2**20, sum(p.numel() for p in model.parameters()) / 2**20)
    values["files of ranks"] = values["dense"]
    dense.config.save_pretrained(tmp_path / "files of ranks")
    weights = dict(dense.float().named_parameters())
    for rank in range(2):
        parts = {name: Part(*rows_of(weight, rank)) for name, weight in weights.items()}
        write_rank_file(tmp_path / "files of ranks" / file_name(rank, 2, "model-"), parts)
    del weights, parts
    reports = in_ranks(lambda world: _peaks(world, tmp_path), tmp_path / "ranks", RANKS)
    for report in reports:
        assert report is not None
        assert report[0] == 0, report
        for case, peak in json.loads(report[1]).items():
            files, _, _, _, read, kept = HELD[case]
            layer, whole = values[files]
            limit = kept * whole / RANKS + 2 * read * layer + SLACK
            assert 0.8 * kept * whole / RANKS < peak < limit, (case, peak, limit)  # less: it was not measured
            assert limit < 0.7 * max(read, kept, 1) * whole


@pytest.mark.parametrize("stacked", [False, True])
def test_a_rank_reads_its_own_experts(stacked: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And the first, by which ranks tell models apart; cast, from files of single experts and of whole stacks."""
    model = model_of("gpt_oss" if stacked else "qwen3_moe", "full").bfloat16()
    model.save_pretrained(tmp_path)
    expected = load_model(str(tmp_path), torch.float32, CPU).state_dict()
    read: list[str] = []
    get = Shards.get
    monkeypatch.setattr(Shards, "get", lambda self, key: read.append(key) or get(self, key))

    class Second(World):
        rank, size = 1, 2

    shares = ExpertShares(Second(), CPU)
    load_model(str(tmp_path), torch.float32, CPU, keep=shares.keep, experts=shares.experts)
    count = model.config.num_local_experts if stacked else model.config.num_experts
    own = shares.experts(count)
    assert len(shares.own) == 2 * model.config.num_hidden_layers
    found = [one.weight for one in shares.own.values()]
    whole = [tensor for name, tensor in expected.items() if tensor.ndim == 3 and "experts" in name]
    assert all(torch.equal(weight, stack[own]) for weight, stack in zip(found, whole, strict=True))
    numbers = {int(name.split(".experts.")[1].split(".")[0]) for name in read if ".experts." in name and not stacked}
    assert stacked or numbers == {0, *range(count)[own]}


@pytest.mark.parametrize(
    ("kind", "dtype"),
    first_of(
        [
            ("falcon_h1", torch.bfloat16),  # the model around it fills a layer's buffer
            ("hunyuan_v1_moe", torch.bfloat16),  # routers in float32
            ("gemma3", torch.bfloat16),  # a vision tower; tied embeddings
            ("ernie4_5_moe", torch.float32),  # a bias that does not train; experts that are tensors of their own
            ("gpt_oss", torch.bfloat16),
            ("lfm2_moe", torch.bfloat16),
            ("granitemoe", torch.float32),
            ("mistral3", torch.float32),
        ],
        4,
    ),
)
def test_read_layer_by_layer_a_model_is_as_transformers_loads_it(kind: str, dtype: torch.dtype, tmp_path: Path) -> None:
    if kind in ("gemma3", "mistral3"):
        save_image_text_model(kind, tmp_path / "model")
    else:
        model = model_of(kind, "full")
        (model.unload() if hasattr(model, "unload") else model).float().save_pretrained(tmp_path / "model")
    kept: list[str] = []
    there: list[bool] = []

    def keep(name: str, module: torch.nn.Module) -> None:
        kept.append(name)
        there.append(not any(parameter.is_meta for parameter in module.parameters()))

    expected = load_model(str(tmp_path / "model"), dtype, CPU)
    found = load_model(str(tmp_path / "model"), dtype, CPU, keep=keep)
    assert len(kept) == expected.config.get_text_config().num_hidden_layers
    assert all(there)
    assert found.state_dict().keys() == expected.state_dict().keys()
    for name, tensor in (*expected.state_dict().items(), *expected.named_buffers()):
        same = {**found.state_dict(), **dict(found.named_buffers())}[name]
        assert same.dtype == tensor.dtype, name
        assert torch.equal(same, tensor), name
    assert {n: p.requires_grad for n, p in found.named_parameters()} == {
        n: p.requires_grad for n, p in expected.named_parameters()
    }


def test_files_that_are_converted_on_loading_are_read_whole_and_it_is_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Qwen3-VL's files have experts transposed."""
    folder = str(save_image_text_model("qwen3_vl_moe", tmp_path / "model"))
    meta: list[bool] = []
    found = load_model(
        folder, torch.float32, CPU, keep=lambda _, layer: meta.append(any(p.is_meta for p in layer.parameters()))
    )
    assert meta == [False, False]
    assert "every rank reads all weights into host memory" in capsys.readouterr().err
    for name, tensor in load_model(folder, torch.float32, CPU).state_dict().items():
        assert torch.equal(found.state_dict()[name], tensor), name
