"""A saved plan is the plan: the same bits in another process, refused where it is for another step, never wrong."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fullbatch
from cases import all_cases
from cases.reference import grads_of
from cases.watched import Watched
from fullbatch._plan import _saved
from fullbatch._plan._planner import Planner
from fullbatch._plan._restore import order_of, restore
from fullbatch._run._executor import Executor

MODELS = {case.name: case for case in all_cases("models")}


def _loss(model: Any, batch: Any) -> torch.Tensor:
    return F.mse_loss(model(batch[0]), batch[1])


def _model(width: int = 6, dtype: torch.dtype = torch.float64) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(5, width), nn.BatchNorm1d(width), nn.Tanh(), nn.Linear(width, 4), nn.BatchNorm1d(4), nn.Tanh(),
        nn.Linear(4, 2),
    ).to(dtype)  # fmt: skip


def _batch(samples: int = 6, dtype: torch.dtype = torch.float64) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(samples, 5, generator=generator, dtype=dtype)
    return x, torch.randn(samples, 2, generator=generator, dtype=dtype)


def _plan(**arguments: Any) -> fullbatch.Plan:
    return fullbatch.Step(_loss, _model(), _batch(), **(arguments or {"microbatch": 2})).plan


def _refused(call: Callable[[], Any], *mentions: str) -> fullbatch.PlanError:
    with pytest.raises(fullbatch.PlanError) as caught:
        call()
    for fault in caught.value.faults:
        assert fault.what and fault.got and fault.expected and fault.next, fault
    for text in mentions:
        assert text in str(caught.value), str(caught.value)
    return caught.value


# ---- there and back


@pytest.mark.parametrize("name", ["unet_bilinear", "gpt2_no_padding"])
@pytest.mark.parametrize("share", [0.85, None])
def test_text_and_back_is_the_same_plan(name: str, share: float | None) -> None:
    loss_fn, model, batch = MODELS[name].build()
    free = fullbatch.Step(loss_fn, model, batch, microbatch=3)
    plan = free.plan
    if share is not None:
        budget = plan.owned + int(share * plan.activations)
        plan = fullbatch.Step(loss_fn, model, batch, memory=budget).plan
    text = plan.to_json()
    back = fullbatch.Plan.from_json(text)
    assert back == plan
    assert back.to_json() == text
    assert str(back) == str(plan)
    assert not back.loaded
    loaded = fullbatch.Step(loss_fn, model, batch, plan=back)
    assert loaded.plan.loaded
    assert loaded.plan.schedule == plan.schedule
    assert loaded.plan.predicted_peak == plan.predicted_peak
    assert "same mathematics" in str(loaded.plan)
    assert "this plan was loaded" in str(loaded.plan)
    assert fullbatch.Plan.from_json(loaded.plan.to_json()).order == plan.order


def test_a_plan_of_a_deep_network_is_small() -> None:
    loss_fn, model, batch = MODELS["resnet50"].build()
    text = fullbatch.Step(loss_fn, model, batch, microbatch=2).plan.to_json()
    assert len(text) < 200_000
    assert json.loads(text)["format"] == "fullbatch-plan"


_SCRIPT = """
import sys
import torch
import fullbatch
sys.path.insert(0, {tests!r})
from cases.{module} import {name} as build
from cases.reference import grads_of

torch.set_num_threads(1)
loss_fn, model, batch = build()
plan, budget, out = {plan!r}, {budget!r}, {out!r}
step = fullbatch.Step(loss_fn, model, batch, memory=budget, plan=plan)
if plan is None:
    step.plan.save(out + ".plan")
step(batch)
for parameter in model.parameters():
    parameter.grad = None
torch.manual_seed(3)
peak = fullbatch.measure(lambda: step(batch)).peak
torch.save({{"grads": grads_of(model), "buffers": dict(model.named_buffers()), "peak": peak,
    "text": step.plan.to_json(), "loaded": step.plan.loaded, "predicted": step.plan.activations}}, out)
"""


@pytest.mark.parametrize(
    ("module", "name"), [("models_vision", "unet_bilinear"), ("models_sequence", "transformer_encoder_layer_padding")]
)
def test_a_fresh_process_gives_the_same_bits_and_the_same_peak(module: str, name: str, tmp_path: Path) -> None:
    loss_fn, model, batch = MODELS[name].build()
    free = fullbatch.Step(loss_fn, model, batch, microbatch=2).plan
    budget = free.owned + int(0.75 * free.activations)

    def run(plan: str | None, out: Path, seed: str) -> dict[str, Any]:
        script = _SCRIPT.format(
            tests=str(Path(__file__).parent.parent), module=module, name=name, plan=plan, budget=budget, out=str(out)
        )
        environment = {**os.environ, "PYTHONHASHSEED": seed, "OMP_NUM_THREADS": "1"}
        subprocess.run([sys.executable, "-c", script], check=True, env=environment)
        return torch.load(out, weights_only=False)  # type: ignore[no-any-return]

    made = run(None, tmp_path / "made", "1")
    used = run(str(tmp_path / "made.plan"), tmp_path / "used", "2")
    assert not made["loaded"]
    assert used["loaded"]
    assert used["text"] == made["text"]
    assert fullbatch.Plan.load(tmp_path / "made.plan").to_json() == made["text"]
    for key in ("grads", "buffers"):
        assert made[key].keys() == used[key].keys()
        assert all(
            torch.equal(tensor, used[key][at]) for at, tensor in made[key].items() if isinstance(tensor, torch.Tensor)
        )
    assert used["peak"] == made["peak"]
    assert used["predicted"] == made["predicted"]
    assert made["peak"] <= made["predicted"]


def test_a_step_with_a_plan_searches_nothing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    plan = _plan()
    plan.save(tmp_path / "plan.json")

    def forbidden(*_: Any) -> Any:
        raise AssertionError("the planner was asked")

    monkeypatch.setattr(Planner, "choose", forbidden)
    for given in (plan, tmp_path / "plan.json", str(tmp_path / "plan.json")):
        step = fullbatch.Step(_loss, _model(), _batch(), plan=given)
        assert step.plan.schedule == plan.schedule
        step(_batch())
        assert step.plan.loaded


def test_another_shape_is_planned_anew_and_the_first_is_still_the_loaded_plan() -> None:
    model, plain = _model(), _model()
    step = fullbatch.Step(_loss, model, _batch(), plan=_plan(microbatch=4))
    for samples, loaded in ((6, True), (5, False), (3, False), (6, True)):
        for each in (model, plain):
            each.zero_grad()
        step(_batch(samples))
        _loss(plain, _batch(samples)).backward()
        assert step.plan.loaded == loaded, samples
        assert any("planned anew" in note for note in step.plan.notes) != loaded
        assert step.plan.microbatch == min(samples, 4), "the plan had no budget, so its microbatch holds"
        for mine, theirs in zip(model.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(mine.grad, theirs.grad, rtol=1e-10, atol=1e-12)


def test_where_no_budget_is_named_that_of_the_plan_holds() -> None:
    budget = _plan(microbatch=6).predicted_peak
    plan = _plan(memory=budget)
    step = fullbatch.Step(_loss, _model(), _batch(), plan=plan)
    assert step.plan.budget == budget
    assert fullbatch.Step(_loss, _model(), _batch(), plan=plan, memory="1GiB").plan.budget == 2**30


def test_a_plan_for_random_masks_is_loaded() -> None:
    model = nn.Sequential(nn.Linear(5, 8), nn.Dropout(0.5), nn.Linear(8, 2)).double()
    first = fullbatch.Step(_loss, model, _batch(), microbatch=2)
    second = fullbatch.Step(_loss, model, _batch(), plan=first.plan)
    results = []
    for step in (first, second):
        model.zero_grad()
        torch.manual_seed(5)
        step(_batch())
        results.append(grads_of(model))
    assert all(torch.equal(results[0][name], grad) for name, grad in results[1].items())
    assert second.verify(_batch()).ok


def test_values_off_the_device_are_stored_too() -> None:
    step = Watched(_loss, _model(), _batch(), microbatch=2)
    program, schedule = step.captured.program, step.plan.schedule
    runs = [item for body in step.plan.order for item in body]
    moved = 0
    for value in {value for task in program.tasks for value in task.inputs if program.values[value].local}:
        away = schedule.with_offload(value, program)
        if away == schedule or runs.count(program.producers[value].id) > 1:
            continue
        moved += 1
        order = order_of(away)
        assert any(item < 0 for body in order for item in body)
        assert restore(program, step.captured.stages, order, schedule.samples) == away
    assert moved > 10
    plan = fullbatch.Plan.from_json(replace(step.plan, order=order).to_json())
    model = _model()
    fullbatch.Step(_loss, model, _batch(), plan=plan)(_batch())
    same = _model()
    fullbatch.Step(_loss, same, _batch(), microbatch=2)(_batch())
    assert all(torch.equal(p.grad, q.grad) for p, q in zip(model.parameters(), same.parameters(), strict=True))


# ---- refused, with all that differs


def test_another_model_names_the_first_operator_that_differs() -> None:
    other = _model()
    other[5] = nn.ReLU()
    mentions = ("another model", "aten.relu in 5", "aten.tanh in 5")
    _refused(lambda: fullbatch.Step(_loss, other, _batch(), plan=_plan()), *mentions)
    deeper = nn.Sequential(*_model(), nn.Linear(2, 2).double())
    _refused(lambda: fullbatch.Step(_loss, deeper, _batch(), plan=_plan()), "also model.7.weight, model.7.bias")
    bare = _model()
    bare[6] = nn.Linear(4, 2, bias=False).double()
    _refused(lambda: fullbatch.Step(_loss, bare, _batch(), plan=_plan()), "without model.6.bias")


def test_other_arguments_of_the_same_operators_are_named() -> None:
    def scaled(factor: float) -> Any:
        return lambda model, batch: (model[0](batch[0]) * factor).square().mean()

    plan = fullbatch.Step(scaled(2.0), _model(), _batch(), microbatch=2).plan
    assert fullbatch.Step(scaled(2.0), _model(), _batch(), plan=plan).plan.loaded
    _refused(lambda: fullbatch.Step(scaled(3.0), _model(), _batch(), plan=plan), "other arguments", "aten.mul")


def test_a_frozen_parameter_is_another_step() -> None:
    model = _model()
    model[0].weight.requires_grad_(False)
    _refused(
        lambda: fullbatch.Step(_loss, model, _batch(), plan=_plan()),
        "model.0.weight: was gets gradient, is no gradient",
    )


def test_another_shape_and_another_batch_are_named() -> None:
    _refused(lambda: fullbatch.Step(_loss, _model(7), _batch(), plan=_plan()), "model.0.weight: was (6, 5), is (7, 5)")
    mentions = ("batch[0]: was (6, 5), is (7, 5)", "7 samples", "6 samples")
    _refused(lambda: fullbatch.Step(_loss, _model(), _batch(7), plan=_plan()), *mentions)


def test_another_memory_order_and_another_batch_dimension_are_named() -> None:
    turned = tuple(tensor.T.contiguous().T for tensor in _batch())
    _refused(
        lambda: fullbatch.Step(_loss, _model(), turned, plan=_plan()), "memory order", "batch[0]: was strides (5, 1)"
    )

    def square(model: Any, batch: Any) -> torch.Tensor:
        return model(batch).square().mean()

    model, batch = nn.Linear(6, 6), torch.randn(6, 6)
    plan = fullbatch.Step(square, model, batch, microbatch=2).plan
    _refused(
        lambda: fullbatch.Step(square, model, batch, batch_dims=1, plan=plan),
        "batch: was dimension 0, is dimension 1",
    )


def test_another_dtype_torch_and_device_and_a_small_budget_are_named_at_once() -> None:
    plan = _plan()
    assert plan.fingerprint is not None
    elsewhere = replace(plan, fingerprint=replace(plan.fingerprint, torch="2.99.0", device="cuda"))
    error = _refused(
        lambda: fullbatch.Step(
            _loss, _model(dtype=torch.float32), _batch(dtype=torch.float32), plan=elsewhere, memory=1000, microbatch=3
        ),
        "another dtype", "model.0.weight: was float64, is float32", "torch 2.99.0", f"torch {torch.__version__}",
        "a model on cuda", "a model on cpu", "1,000 bytes", "microbatch=3", "microbatch=2",
    )  # fmt: skip
    assert len(error.faults) >= 5


def test_a_budget_below_the_peak_says_what_the_plan_needs() -> None:
    plan = _plan()
    peak = plan.predicted_peak
    _refused(
        lambda: fullbatch.Step(_loss, _model(), _batch(), plan=plan, memory=peak - 1), f"{peak:,}", f"memory={peak}"
    )
    assert fullbatch.Step(_loss, _model(), _batch(), plan=plan, memory=peak).plan.loaded


def test_a_peak_that_a_plan_only_claims_is_not_believed() -> None:
    """What operators take is measured where the plan is used: an edited number, or another machine, does not matter."""
    plan = _plan()
    claimed = replace(plan, activations=10, predicted_peak=plan.owned + 10)
    assert fullbatch.Step(_loss, _model(), _batch(), plan=claimed).plan.predicted_peak == plan.predicted_peak
    _refused(
        lambda: fullbatch.Step(_loss, _model(), _batch(), plan=claimed, memory=plan.owned + 10),
        f"{plan.predicted_peak:,}",
    )


def test_another_number_of_threads_is_measured_again_and_noted() -> None:
    plan = _plan()
    assert plan.fingerprint is not None
    there = replace(plan, fingerprint=replace(plan.fingerprint, threads=plan.fingerprint.threads + 5))
    step = fullbatch.Step(_loss, _model(), _batch(), plan=there)
    assert any(f"{plan.fingerprint.threads + 5} threads" in note for note in step.plan.notes)


@pytest.mark.parametrize("given", [3, True, {"a": 1}, b"plan.json"], ids=repr)
def test_what_is_no_plan(given: Any) -> None:
    _refused(lambda: fullbatch.Step(_loss, _model(), _batch(), plan=given), "plan= is no plan", type(given).__name__)


# ---- files


def test_a_text_that_is_cut_off_anywhere_is_refused() -> None:
    text = _plan().to_json()
    for end in [0, 1, 7, *random.Random(0).sample(range(len(text)), 60), len(text.rstrip()) - 1]:
        _refused(lambda end=end: fullbatch.Plan.from_json(text[:end]), "cut off")  # type: ignore[misc]


@pytest.mark.parametrize("text", ["[]", "3", '"plan"', "{}", '{"format": "other"}', "null"])
def test_another_json_is_no_plan(text: str) -> None:
    _refused(lambda: fullbatch.Plan.from_json(text), "This is no plan", "fullbatch-plan")


def test_another_format_version_is_named() -> None:
    found = json.loads(_plan().to_json())
    found["version"] = 2
    _refused(
        lambda: fullbatch.Plan.from_json(json.dumps(found)), "another format version", '"version": 2', '"version": 1'
    )


def test_all_that_is_damaged_is_named_at_once() -> None:
    found = json.loads(_plan().to_json())
    found["plan"]["batch"] = "six"
    found["plan"]["exact"] = 1
    del found["plan"]["stages"]
    found["order"] = [[1.5]]
    found["program"]["digests"] = ""
    mentions = ("'batch'", "'six'", "'exact'", "'stages'", "'order'", "'program'")
    error = _refused(lambda: fullbatch.Plan.from_json(json.dumps(found)), *mentions)
    assert len(error.faults) == 5


def test_numbers_that_do_not_agree_are_named() -> None:
    found = json.loads(_plan().to_json())
    found["plan"]["microbatch"] = 5
    found["plan"]["predicted_peak"] += 1
    found["order"].pop()
    error = _refused(lambda: fullbatch.Plan.from_json(json.dumps(found)), "'microbatch'", "'predicted_peak'", "'order'")
    assert len(error.faults) == 3


@pytest.mark.parametrize("place", ["plan", "program"])
def test_every_entry_is_needed_and_checked(place: str) -> None:
    whole = _plan().to_json()
    for name in json.loads(whole)[place]:
        for wrong in ("gone", [[]], {"a": 1}, -1.5, None):
            found = json.loads(whole)
            found[place][name] = wrong
            if wrong == "gone":
                del found[place][name]
            if (name, wrong) == ("budget", None):
                continue
            _refused(
                lambda found=found: fullbatch.Plan.from_json(json.dumps(found)), name if place == "plan" else "plan"
            )  # type: ignore[misc]


def test_files_that_cannot_be_read_or_written(tmp_path: Path) -> None:
    _refused(lambda: fullbatch.Plan.load(tmp_path / "none.json"), "none.json", "No such file")
    _refused(lambda: fullbatch.Step(_loss, _model(), _batch(), plan=tmp_path / "none.json"), "none.json")
    _refused(lambda: fullbatch.Plan.load(tmp_path), "cannot be read")
    (tmp_path / "bytes").write_bytes(b"\xff\xfe\x00")
    _refused(lambda: fullbatch.Plan.load(tmp_path / "bytes"), "cannot be read")
    _refused(lambda: _plan().save(tmp_path / "none" / "plan.json"), "cannot be written", "none")


def test_saving_is_all_or_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "plan.json"
    plan = _plan()
    plan.save(path)
    before = path.read_text()

    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    _refused(lambda: replace(plan, microbatch=1).save(path), "No space left")
    assert path.read_text() == before
    assert [entry.name for entry in tmp_path.iterdir()] == ["plan.json"]


def test_a_plan_put_together_by_hand_is_refused() -> None:
    bare = replace(_plan(), fingerprint=None)
    _refused(bare.to_json, "which program")
    _refused(lambda: fullbatch.Step(_loss, _model(), _batch(), plan=bare), "which program")


# ---- edited by hand: refused, or right


def test_tasks_that_are_unknown_or_repeated_are_named() -> None:
    plan = _plan()
    step = Watched(_loss, _model(), _batch(), microbatch=2)
    program, order = step.captured.program, [list(body) for body in plan.order]
    once = next(task.id for task in program.tasks if task.kind.value == "once")

    def edited(stage: int, body: list[int]) -> fullbatch.Plan:
        return replace(plan, order=tuple(tuple(body if at == stage else old) for at, old in enumerate(order)))

    def use(plan: fullbatch.Plan) -> Any:
        return fullbatch.Step(_loss, _model(), _batch(), plan=plan)

    _refused(lambda: use(edited(0, [*order[0], 99_999])), "task 99999", "unknown")
    _refused(lambda: use(edited(0, [*order[0], once])), f"task {once}", "once a step")
    _refused(lambda: use(edited(0, [*order[0], -99_999])), "moves a value that is unknown")
    _refused(lambda: use(edited(0, order[0][::-1])), "reads a value when it is not there")
    sums = [task.id for task in program.tasks if task.kind.value == "reduce"]
    doubled = next(item for item in order[0] if item in sums)
    _refused(lambda: use(edited(0, [*order[0], doubled])), f"task {doubled}", "runs 2 times")
    _refused(lambda: use(edited(0, [item for item in order[0] if item != doubled])), "runs 0 times", "when it is not")
    _refused(lambda: use(replace(plan, order=plan.order[:-1])), "another number of stages")
    merged = (plan.order[0] + plan.order[1], (), *plan.order[2:])
    _refused(lambda: use(replace(plan, order=merged)), "when it is not there")
    away = order_of(plan.schedule.with_offload(_a_value(program), program))
    without_return = tuple(tuple(item for item in body if item >= 0 or item % 2) for body in away)
    assert without_return != away
    _refused(lambda: use(replace(plan, order=without_return)), "when it is not there")
    _refused(lambda: use(replace(plan, whole=True)), "unsplit")
    unsplit = _plan(microbatch=6)
    assert unsplit.whole
    without_last = (*unsplit.order[:-1], unsplit.order[-1][:-1])
    mentions = ("runs 0 times", "does not make all that the step returns")
    _refused(lambda: use(replace(unsplit, order=without_last)), *mentions)


def _a_value(program: Any) -> int:
    """A value of a microbatch that several tasks read."""
    reads = [value for task in program.tasks for value in task.inputs if program.values[value].local]
    return max(set(reads), key=reads.count)


def test_no_edit_gives_a_wrong_gradient_in_silence() -> None:
    step = Watched(_loss, _model(), _batch(), microbatch=2)
    step(_batch())
    right = [parameter.grad for parameter in _parameters(step)]
    captured, samples = step.captured, step.plan.schedule.samples
    draw = random.Random(0)
    refused = used = 0
    for _ in range(600):
        try:
            schedule = restore(captured.program, captured.stages, _edited(step.plan.order, draw), samples)
        except fullbatch.PlanError:
            refused += 1
            continue
        used += 1
        _, pending = captured.run(Executor(captured.program, schedule), step.inputs)
        for (parameter, gradient), expected in zip(pending.gradients, right, strict=True):
            torch.testing.assert_close(gradient, expected, rtol=1e-10, atol=1e-12)
            assert gradient.shape == parameter.shape
    assert refused > 100
    assert used > 100


def _parameters(step: Any) -> list[Any]:
    """The parameters in the order in which the step makes their gradients."""
    return [step.inputs[at] for at, node in sorted(step.captured.joint.gradients.items()) if node is not None]


def _edited(order: tuple[tuple[int, ...], ...], draw: random.Random) -> tuple[tuple[int, ...], ...]:
    """`order` with one task swapped with its neighbour, repeated, dropped, or moved to another stage."""
    bodies = [list(body) for body in order]
    body = draw.choice([body for body in bodies if len(body) > 1])
    at = draw.randrange(len(body) - 1)
    how = draw.choice(["swap", "repeat", "drop", "move"])
    if how == "swap":
        body[at], body[at + 1] = body[at + 1], body[at]
    elif how == "repeat":
        body.insert(draw.randrange(len(body)), body[at])
    else:
        item = body.pop(at)
        if how == "move":
            other = draw.choice(bodies)
            other.insert(draw.randrange(len(other) + 1), item)
    return tuple(tuple(body) for body in bodies)


# ---- two plans side by side


def test_a_plan_differs_from_another_in_words() -> None:
    loss_fn, model, batch = MODELS["unet_bilinear"].build()
    free = fullbatch.Step(loss_fn, model, batch, microbatch=2).plan
    tight = fullbatch.Step(loss_fn, model, batch, microbatch=2, memory=free.owned + free.activations * 3 // 4).plan
    assert tight.recomputed > 0
    found = tight.diff(free)
    assert found
    what = {row.what.strip(): (row.this, row.other) for row in found.rows}
    assert what["recomputed"] == (f"{tight.recomputed} runs of {tight.runs}", f"0 runs of {free.runs}")
    assert f"{tight.predicted_peak:,}" in what["peak memory"][0]
    assert f"{free.predicted_peak:,}" in what["peak memory"][1]
    assert what["budget"][1] == "none given"
    assert "microbatch" not in what
    assert sum(item.this for item in found.recomputed) * tight.microbatches == tight.recomputed
    assert all(item.other == 0 for item in found.recomputed)
    assert found.held == (0, sum(item.nbytes for item in found.recomputed))
    assert found.held[1] > 0
    assert any("in inc" in item.where or "in up" in item.where for item in found.recomputed)
    text = str(found)
    assert "run again" in text
    assert "held" in text
    back = free.diff(tight)
    assert [(item.this, item.other) for item in back.recomputed] == [(i.other, i.this) for i in found.recomputed]


def test_a_plan_does_not_differ_from_itself_saved() -> None:
    plan = _plan()
    found = plan.diff(fullbatch.Plan.from_json(plan.to_json()))
    assert not found
    assert "the same" in str(found)


def test_plans_of_other_programs_say_so() -> None:
    other = fullbatch.Step(_loss, _model(9), _batch(), microbatch=3).plan
    what = {row.what for row in _plan().diff(other).rows}
    assert {"microbatch", "program", "peak memory"} <= what


def test_the_description_holds_no_address() -> None:
    text = _plan().to_json()
    assert "0x" not in text
    assert _saved.LOADED not in text
