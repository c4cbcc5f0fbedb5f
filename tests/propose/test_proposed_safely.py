"""A proposal changes nothing, names what it cannot look at, and says all that is wrong with its arguments at once."""

from __future__ import annotations

import copy
import gc
import random
import sys
import weakref
from typing import Any

import numpy
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fullbatch
from fullbatch._propose._now import Proposal
from fullbatch._propose._smaller import Sides, _resized, _sides
from fullbatch._propose._tried import Tried
from fullbatch._propose._twin import without_values
from propose.proposed import CASES, MEMORY, images, words


def _rows(found: fullbatch.Proposals) -> dict[str, Proposal]:
    return {row.what: row for row in found.rows}


def _state(value: Any) -> Any:
    """What `value` holds, in a form that compares."""
    if isinstance(value, torch.Tensor):
        return id(value), value.dtype, value.requires_grad, value.detach().double().flatten().tolist()
    if isinstance(value, dict):
        return {str(key): _state(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_state(item) for item in value]
    return repr(value)


def _everything(model: nn.Module, optimizer: torch.optim.Optimizer, batch: Any) -> Any:
    modules = [
        (name, module.training, sorted(vars(module)), _state(module._parameters), _state(module._buffers))
        for name, module in model.named_modules()
    ]
    grads = [_state(p.grad) for p in model.parameters()]
    hooks = [list((p._backward_hooks or {}).values()) for p in model.parameters()]
    generators = torch.get_rng_state().tolist(), random.getstate(), _state(list(numpy.random.get_state()))
    held = [(id(key), _state(value)) for key, value in optimizer.state.items()]
    return modules, grads, hooks, generators, held, _state(optimizer.param_groups), _state(batch)


@pytest.mark.parametrize("name", CASES)
def test_nothing_of_the_users_changes(name: str) -> None:
    case = CASES[name]()
    case.loss_fn(case.model, case.batch).backward()
    case.optimizer.step()
    next(case.model.parameters()).register_hook(lambda grad: grad)
    before = _everything(case.model, case.optimizer, case.batch)
    case.propose(MEMORY[name])
    assert _everything(case.model, case.optimizer, case.batch) == before


def test_a_step_that_draws_leaves_the_generators() -> None:
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5), nn.Linear(8, 1))
    before = torch.get_rng_state()
    fullbatch.propose(lambda m, b: m(b).square().mean(), model, torch.ones(4, 8), memory="1MB")
    assert torch.equal(torch.get_rng_state(), before)


def test_no_step_outlives_the_proposals() -> None:
    case = CASES["words"]()
    found = case.propose(MEMORY["words"])
    gc.collect()
    assert not any(issubclass(type(one), Tried) for one in gc.get_objects())
    model = weakref.ref(case.model)
    del case
    gc.collect()
    assert model() is None
    assert found.rows


def test_gradients_that_are_not_zero_may_be_wanted() -> None:
    case = words()
    case.loss_fn(case.model, case.batch).backward()
    row = _rows(case.propose(MEMORY["words"]))["no gradients before the step"]
    assert not row.same
    assert "not zero" in row.reason


# ---- what cannot be looked at


def _flat(m: Any, b: Any) -> torch.Tensor:
    return F.cross_entropy(m(b[0]), b[1])


def test_a_model_of_one_size_refuses_the_others() -> None:
    model = nn.Sequential(nn.Flatten(), nn.Linear(3 * 32 * 32, 5))
    found = fullbatch.propose(_flat, model, (torch.randn(4, 3, 32, 32), torch.randint(5, (4,))), memory="10MB")
    row = _rows(found)["images of 24 x 24"]
    assert (row.peak, row.saved, row.least, row.fits, row.time, row.plan) == (None,) * 6
    assert row.reason.startswith("refused: 24 x 24")
    assert "[4, 1728] X [3072, 5]" in row.reason
    assert not row.same
    assert "not known" in str(found)


def test_a_size_that_is_refused_is_named_beside_the_one_that_is_taken() -> None:
    row = _rows(images().propose(MEMORY["images"]))["images of 16 x 16"]
    assert row.reason.startswith("refused: 15 x 15.")
    assert row.line == "F.interpolate(batch[0], size=(16, 16)), F.interpolate(batch[1], size=(16, 16))"


def test_a_model_that_is_read_by_another_name() -> None:
    model, batch = nn.Linear(4, 1), torch.randn(4, 4)
    row = _rows(fullbatch.propose(lambda m, b: model(b).mean(), model, batch, memory="1MB"))["weights in bfloat16"]
    assert row.peak is None
    assert "by another name" in row.reason


def test_a_step_that_would_be_captured_and_not_run() -> None:
    """Without storage a product of two dtypes passes."""
    model = nn.Linear(4, 4)
    found = fullbatch.propose(lambda m, b: (m(b) @ torch.ones(4, 1)).mean(), model, torch.randn(4, 4), memory="1MB")
    row = _rows(found)["weights in bfloat16"]
    assert row.peak is None
    assert row.reason == "it could be captured, but would not run: aten.mm"


class Uncopied(nn.Linear):
    def __deepcopy__(self, memo: Any) -> Any:
        raise TypeError("one of a kind")


def test_a_model_that_cannot_be_copied() -> None:
    found = fullbatch.propose(lambda m, b: m(b).mean(), Uncopied(4, 1), torch.randn(4, 4), memory="1MB")
    row = _rows(found)["weights in bfloat16"]
    assert "the model cannot be copied: TypeError: one of a kind" in row.reason
    assert _rows(found)["autocast to bfloat16"].peak is not None


def test_torchao_that_is_not_there_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torchao.optim", None)
    row = _rows(images().propose(MEMORY["images"]))["optimizer state in 8 bits"]
    assert row.reason == "torchao is not installed: pip install 'fullbatch[lowbit]'"
    assert row.peak is None


@pytest.mark.parametrize("kind", [torch.optim.RMSprop, torch.optim.Adagrad])
def test_an_optimizer_of_which_there_is_none_in_8_bits(kind: Any) -> None:
    model = nn.Linear(8, 8)
    options = {"memory": "1MB", "optimizer": kind(model.parameters())}
    rows = _rows(fullbatch.propose(lambda m, b: m(b).mean(), model, torch.randn(4, 8), **options))
    assert f"none of {kind.__name__}" in rows["optimizer state in 8 bits"].reason


def test_without_an_optimizer_that_is_noted() -> None:
    model = nn.Linear(8, 8)
    found = fullbatch.propose(lambda m, b: m(b).mean(), model, torch.randn(4, 8))
    assert any("optimizer= was not given" in note for note in found.notes)
    assert not any("optimizer" in row.what for row in found.rows)
    assert all(row.fits for row in found.rows)


def test_where_nothing_fits_and_nothing_can_be_made_again_the_budget_that_works_is_a_row() -> None:
    model, batch = nn.Linear(64, 64), torch.randn(1, 64)
    found = fullbatch.propose(lambda m, b: m(b).mean(), model, batch, memory=1000)
    (row,) = [row for row in found.rows if row.what == "a larger budget"]
    assert row.line == f"memory={found.least}"
    assert not row.fits
    assert fullbatch.Step(lambda m, b: m(b).mean(), model, batch, memory=found.least).plan.predicted_peak == row.peak


# ---- what is proposed, and what is not


def _tied(m: Any, b: Any) -> torch.Tensor:
    return F.cross_entropy(
        F.linear(m["net"](m["words"](b)), m["words"].weight)[:, :-1].flatten(0, 1), b[:, 1:].flatten()
    )


def test_a_shifted_head_with_a_tied_weight_is_found() -> None:
    model = nn.ModuleDict({"words": nn.Embedding(400, 8), "net": nn.Linear(8, 8)})
    batch = torch.randint(400, (4, 16))
    rows = _rows(fullbatch.propose(_tied, model, batch, memory="10MB"))
    row = rows["the loss without logits"]

    def by_tiles(m: Any, b: Any) -> torch.Tensor:
        return fullbatch.linear_cross_entropy(m["net"](m["words"](b))[:, :-1], m["words"].weight, b[:, 1:])

    assert row.peak == fullbatch.Step(by_tiles, model, batch, microbatch=4).plan.predicted_peak
    half = copy.deepcopy(model).to(torch.bfloat16)
    assert rows["weights in bfloat16"].peak == fullbatch.Step(_tied, half, batch, microbatch=4).plan.predicted_peak


def _classes_second(m: Any, b: Any) -> torch.Tensor:
    return F.cross_entropy(m(b[0]).transpose(1, 2), b[1], ignore_index=3, reduction="sum")


def test_classes_in_the_second_dimension_are_found() -> None:
    model = nn.Sequential(nn.Embedding(400, 8), nn.Linear(8, 400))
    batch = torch.randint(400, (4, 16)), torch.randint(400, (4, 16))
    row = _rows(fullbatch.propose(_classes_second, model, batch, memory="10MB"))["the loss without logits"]
    assert row.line == (
        "fullbatch.linear_cross_entropy(hidden, model[1].weight, target, model[1].bias, ignore_index=3, "
        "reduction='sum')"
    )

    def by_tiles(m: Any, b: Any) -> torch.Tensor:
        options: Any = {"ignore_index": 3, "reduction": "sum"}
        return fullbatch.linear_cross_entropy(m[0](b[0]), m[1].weight, b[1], m[1].bias, **options)

    assert row.peak == fullbatch.Step(by_tiles, model, batch, microbatch=4).plan.predicted_peak
    assert torch.allclose(by_tiles(model, batch), _classes_second(model, batch), rtol=1e-5)


def _read_twice(m: Any, b: Any) -> Any:
    logits = m(b[0])
    return F.cross_entropy(logits.flatten(0, 1), b[1].flatten()), logits.argmax(-1)


def _weighted(m: Any, b: Any) -> Any:
    return F.cross_entropy(m(b[0]).flatten(0, 1), b[1].flatten(), weight=torch.ones(400))


def _wrongly_shaped(m: Any, b: Any) -> Any:
    return F.cross_entropy(m(b[0]).transpose(0, 1).reshape(-1, 400), b[1].flatten())


@pytest.mark.parametrize("loss_fn", [_read_twice, _weighted, _wrongly_shaped])
def test_logits_that_are_needed_are_left(loss_fn: Any) -> None:
    model = nn.Sequential(nn.Embedding(400, 8), nn.Linear(8, 400))
    batch = torch.randint(400, (4, 16)), torch.randint(400, (4, 16))
    assert "the loss without logits" not in _rows(fullbatch.propose(loss_fn, model, batch, memory="10MB"))


def test_a_pair_of_forward_and_loss() -> None:
    model = nn.Linear(16, 4)
    pair = lambda m, b: m(b[0]), lambda outputs, b: F.cross_entropy(outputs[b[1] > 0], b[1][b[1] > 0])
    batch = torch.randn(8, 16), torch.randint(4, (8,))
    row = _rows(fullbatch.propose(pair, model, batch, memory="1MB"))["autocast to bfloat16"]
    assert row.line.endswith('(forward), torch.autocast("cpu", torch.bfloat16)(loss))')
    assert row.peak is not None


# ---- which dimensions are sides and lengths


def test_sides_of_images_masks_and_boxes_of_the_same_numbers() -> None:
    batch = {
        "images": torch.randn(16, 3, 16, 24), "masks": torch.zeros(16, 16, 24, dtype=torch.int64),
        "last": torch.zeros(16, 1, 16, 24), "features": torch.zeros(16, 24), "labels": torch.zeros(16),
    }  # fmt: skip
    found = _sides(batch, None)
    assert found == Sides("images", (16, 24), ({2: 0, 3: 1}, {1: 0, 2: 1}, {2: 0, 3: 1}, {}, {}))
    smaller = _resized(batch, found, (8, 12))
    assert [tuple(one.shape) for one in smaller.values()] == [
        (16, 3, 8, 12),
        (16, 8, 12),
        (16, 1, 8, 12),
        (16, 24),
        (16,),
    ]


def test_images_with_channels_last_keep_their_order_in_memory() -> None:
    batch = torch.randn(4, 3, 16, 16).to(memory_format=torch.channels_last)
    found = _sides(batch, None)
    assert found is not None
    assert _resized(batch, found, (8, 8)).is_contiguous(memory_format=torch.channels_last)
    bytes_last = torch.zeros(4, 16, 16, 3, dtype=torch.uint8)
    assert _sides(bytes_last, None) == Sides("images", (16, 16), ({1: 0, 2: 1},))


def test_lengths_of_words_and_of_features() -> None:
    text = {"input_ids": torch.zeros(4, 12, dtype=torch.int64), "mask": torch.zeros(4, 1, 12, 12, dtype=torch.bool)}
    assert _sides(text, None) == Sides("sequences", (12,), ({1: 0}, {2: 0, 3: 0}))
    sound = torch.randn(4, 12, 12), torch.zeros(4, dtype=torch.int64)
    assert _sides(sound, None) == Sides("sequences", (12,), ({1: 0}, {}))
    batch_second = torch.zeros(12, 4, dtype=torch.int64)
    assert _sides(batch_second, 1) == Sides("sequences", (12,), ({0: 0},))
    assert _sides((torch.randn(4, 30), torch.zeros(4)), None) is None


# ---- memory of the proposals themselves


def _resident() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * 4096


def test_a_copy_without_numbers_takes_no_memory() -> None:
    model = nn.Linear(2**14, 2**14, bias=False, device="meta").to_empty(device="cpu")  # 1 GiB that nobody wrote
    before = _resident()
    for dtype in (torch.bfloat16, None):
        twin, twins = without_values(model, dtype)
        assert twin.weight is twins[id(model.weight)]
        assert twin.weight.dtype == (dtype or torch.float32)
        assert _resident() - before < 2**26


def test_tensors_that_share_memory_go_on_sharing_it() -> None:
    model = nn.Linear(4, 4)
    model.register_buffer("view", model.weight.detach()[1:])
    twin, _ = without_values(model)
    assert twin.view.data_ptr() == twin.weight.data_ptr() + 16
    assert twin.view.shape == (3, 4)


# ---- arguments


def test_all_that_is_wrong_is_said_at_once() -> None:
    arguments: Any = {"memory": "much", "optimizer": "Adam"}
    with pytest.raises(fullbatch.FullbatchError) as caught:
        fullbatch.propose(3, {"a": 1}, "no batch", **arguments)  # type: ignore[arg-type]
    said = [fault.what for fault in caught.value.faults]
    assert "The model is not a module." in said
    assert "loss_fn is not a function." in said
    assert "The memory budget is not a size." in said
    assert "No tensor carries the batch." in said


def test_a_step_that_cannot_be_captured_is_refused_as_by_step() -> None:
    model, batch = nn.Linear(4, 1), torch.randn(4, 4)
    refused: list[str] = []
    for enter in (fullbatch.Step, fullbatch.propose):
        with pytest.raises(fullbatch.CaptureError) as caught:
            enter(lambda m, b: m(b.to(torch.float8_e4m3fn).float()).mean(), model, batch)
        refused.append(caught.value.faults[0].what)
    assert refused[0] == refused[1]
