"""A planned step under a cap to the byte: the predicted peak is enough, and one byte less than the true peak is not."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from fullbatch._memory import _cap

pytestmark = pytest.mark.skipif(bool(_cap.available()), reason=f"no counting allocator: {_cap.available()}")

_CHILD = """
import sys
sys.path.insert(0, {tests!r})
import torch
from fullbatch._memory._cap import CountingAllocator
allocator = CountingAllocator()
allocator.install()
from cases import all_cases
from cases.reference import buffers_of, grads_of
import fullbatch

loss_fn, model, batch = next(case for case in all_cases("models") if case.name == {name!r}).build()
step = fullbatch.Step(loss_fn, model, batch, microbatch=2)
for _ in range(2):  # what Python and torch build once is there after the first call
    step(batch)
    model.zero_grad()
before = allocator.live
allocator.reset_peak()
step(batch)
peak = allocator.peak - before
assert peak <= step.plan.activations <= 1.02 * peak + 10112, (peak, step.plan.activations)
model.zero_grad()

allocator.cap = allocator.live + peak
step(batch)
model.zero_grad()

step(batch)  # gradients and buffers that must survive
state = grads_of(model), buffers_of(model), torch.get_rng_state()
allocator.cap = allocator.live + peak - 1
try:
    step(batch)
except torch.OutOfMemoryError:
    pass
else:
    raise SystemExit("one byte less was enough")
allocator.cap = None
for before, now in zip(state, (grads_of(model), buffers_of(model))):
    assert all(torch.equal(before[name], now[name]) for name in before)
assert torch.equal(state[2], torch.get_rng_state())
step(batch)
print("ok")
"""


@pytest.mark.parametrize("name", ["unet_bilinear", "resnet50", "gpt2_no_padding", "yolo"])
def test_cap_at_the_peak_passes_and_one_byte_less_raises_and_changes_nothing(name: str) -> None:
    tests = str(Path(__file__).resolve().parent.parent)
    child = textwrap.dedent(_CHILD).format(tests=tests, name=name)
    done = subprocess.run([sys.executable, "-c", child], capture_output=True, text=True, timeout=300)
    assert done.stdout.strip().endswith("ok"), done.stdout + done.stderr[-2000:]
