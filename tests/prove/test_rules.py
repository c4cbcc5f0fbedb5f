"""Every placement rule, proved: an operator run in microbatches as its rule says gives what the whole batch gives.

Operators and operands come from torch's own sample inputs (OpInfo), forward and backward, and from `samples`, which
adds what those leave out. The last test asks that no rule be unproved.
"""

from __future__ import annotations

import contextlib
import itertools
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.testing._internal.common_methods_invocations import op_db
from torch.utils._pytree import tree_leaves

from fullbatch._axis._rules import RULES
from fullbatch._ir import Layout
from fullbatch._run._executor import cut, paste
from prove.prover import EXPANDED, POINTWISE, Ledger, Prover, direct, prove_function
from prove.samples import SAMPLES

DTYPES = (torch.float64, torch.complex128, torch.int64, torch.bool, torch.float32)
SAMPLES_OF_EACH = 8

UNPROVED = {
    "aten._fused_rms_norm_backward": "has no CPU kernel",
    "aten._scaled_dot_product_attention_math_for_mps": "Apple GPUs only",
    "aten._scaled_dot_product_cudnn_attention": "CUDA only",
    "aten._scaled_dot_product_cudnn_attention_backward": "CUDA only",
    "aten._scaled_dot_product_efficient_attention": "CUDA only",
    "aten._scaled_dot_product_efficient_attention_backward": "CUDA only",
    "aten._scaled_dot_product_flash_attention": "CUDA only",
    "aten._scaled_dot_product_flash_attention_backward": "CUDA only",
    "aten._scaled_dot_product_fused_attention_overrideable": "a hook for other backends",
    "aten.batch_norm_elemt": "CUDA only",
    "aten.cudnn_batch_norm": "CUDA only",
    "aten.cudnn_convolution": "CUDA only",
}


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
    torch.set_num_threads(threads)


def differentiate(out: Any, nest: Any = None) -> None:
    """The backward of the sum of squares of all outputs, for the leaves in `nest` or for all."""
    outs = [leaf for leaf in tree_leaves(out) if isinstance(leaf, torch.Tensor) and leaf.requires_grad]
    total = [(leaf * leaf.conj()).real.sum() if leaf.is_complex() else leaf.square().sum() for leaf in outs]
    leaves = [leaf for leaf in tree_leaves(nest) if isinstance(leaf, torch.Tensor) and leaf.requires_grad]
    if total and nest is None:
        torch.autograd.backward(total)
    elif total and leaves:
        torch.autograd.grad(total, leaves, allow_unused=True)


def prove_op(op: Any, prover: Prover) -> None:
    """Proves what `op` is made of, forward and backward, for torch's samples of it in two dtypes."""
    dtypes = [dtype for dtype in DTYPES if dtype in op.supported_dtypes("cpu")][:2]
    for dtype in [dtype for dtype in dtypes if dtype is not torch.float32 or dtype is dtypes[0]]:
        smooth = op.supports_autograd and dtype in op.supported_backward_dtypes("cpu")
        try:
            samples = list(itertools.islice(op.sample_inputs("cpu", dtype, requires_grad=smooth), 80))
        except Exception:  # torch makes no samples of this kind
            continue
        for sample in samples[:: max(1, len(samples) // SAMPLES_OF_EACH)]:
            try:
                with prover:
                    out = op(sample.input, *sample.args, **sample.kwargs)
                    if smooth:
                        differentiate(out, (sample.input, sample.args, sample.kwargs))
            except (RuntimeError, NotImplementedError, TypeError, ValueError, AssertionError):
                pass  # torch itself does not run this sample here; what ran before has been proved


def test_every_rule_is_proved(capsys: pytest.CaptureFixture[str]) -> None:
    """One test, for it needs the whole count: what is wrong, and what was never proved."""
    ledger = Ledger()
    prover = Prover(ledger, most=30, calls=30)
    for op in op_db:
        prove_op(op, prover)
    for fn in SAMPLES.values():
        with Prover(ledger, most=40, calls=80):
            differentiate(fn())
    wrong = ledger.failures
    assert not wrong, f"{len(wrong)} answers of rules are wrong:\n" + "\n".join(wrong[:20])
    missing = [name for name in RULES.names() if not ledger.proofs[name] and name not in UNPROVED]
    assert not missing, f"never proved: {missing}"
    known = [name for name in UNPROVED if ledger.proofs[name] or name not in RULES.names()]
    assert not known, f"no longer unproved: {known}"
    rules = len(ledger.proofs) - 2  # the pointwise tag and the expansions are counted apart
    with capsys.disabled():
        print(
            f"\n{sum(ledger.proofs.values())} answers proved of {ledger.choices} choices of layouts "
            f"({sum(ledger.folded.values())} with a folded batch): {len(ledger.operators)} operators by {rules} rules, "
            f"{ledger.proofs[POINTWISE]} by torch's pointwise tag, {ledger.proofs[EXPANDED]} by expansions"
        )


# ---- what takes more than one operator: an index that counts the samples


def _rand(*shape: int) -> torch.Tensor:
    return torch.randn(shape, dtype=torch.float64)


B = 6
FIRST = Layout(0)
COUNTED = {
    "x[arange, y]": (lambda x, y: x[torch.arange(B), y], (_rand(B, B), torch.randint(B, (B,))), {"index"}),
    "x[arange]": (lambda x, y: x[torch.arange(B)] * y, (_rand(B, 4), _rand(B, 4)), {"index", "mul"}),
    "x[arange[:, None], y]": (
        lambda x, y: x[torch.arange(B)[:, None], y], (_rand(B, B, 3), torch.randint(B, (B, B))), {"index"},
    ),
    "x[arange[:, None], y[None]]": (
        lambda x, y: x[torch.arange(B)[:, None], y[None]], (_rand(B, B), torch.randint(B, (B,))), set(),
    ),
    "x[y[:, None], arange]": (
        lambda x, y: x[y[:, None], torch.arange(B)], (_rand(B, B), torch.randint(B, (B,))), set(),
    ),
    "x[y, arange]": (lambda x, y: x[y, torch.arange(B)], (_rand(B, B), torch.randint(B, (B,))), {"index"}),
    "x[arange, arange]": (lambda x: x[torch.arange(B), torch.arange(B)], (_rand(B, B),), set()),
    "x[arange, :, y]": (
        lambda x, y: x[torch.arange(B), :, y], (_rand(B, 3, B), torch.randint(B, (B,))), {"index"},
    ),
    "put(x, arange, y)": (
        lambda x, y: torch.index_put(x, (torch.arange(B), y), torch.ones(B, dtype=x.dtype)),
        (_rand(B, B), torch.randint(B, (B,))), {"index_put"},
    ),
    "put(zeros, arange, y, values)": (
        lambda y, v: torch.index_put(v.new_zeros(B, B), (torch.arange(B), y), v, accumulate=True),
        (torch.randint(B, (B,)), _rand(B)), {"index_put"},
    ),
    "put(zeros, y, arange, values)": (
        lambda y, v: torch.index_put(v.new_zeros(B, B), (y, torch.arange(B)), v, accumulate=True),
        (torch.randint(B, (B,)), _rand(B)), {"index_put"},
    ),
    "put(zeros, arange[:, None], y, values)": (
        lambda y, v: torch.index_put(v.new_zeros(B, B, 2), (torch.arange(B)[:, None], y), v, accumulate=True),
        (torch.randint(B, (B, 4)), _rand(B, 4, 2)), {"index_put"},
    ),
    "put(zeros, arange[:, None], y[None], values)": (
        lambda y, v: torch.index_put(v.new_zeros(B, B), (torch.arange(B)[:, None], y[None]), v, accumulate=True),
        (torch.randint(B, (B,)), _rand(B, B)), set(),
    ),
    "put(ones, y, values)": (
        lambda y, v: torch.index_put(v.new_ones(B, 4), (y,), v), (torch.randperm(B), _rand(B, 4)), set(),
    ),
    "put(zeros, features, values)": (
        lambda v: torch.ops.aten.index_put(v.new_zeros(B, 8), [None, torch.tensor([1, 3, 5])], v),
        (_rand(B, 3),), {"index_put"},
    ),
    "scatter_add(zeros)": (
        lambda y, v: torch.scatter_add(v.new_zeros(4), 0, y, v), (torch.randint(4, (B,)), _rand(B)), {"scatter_add"},
    ),
    "index_add(zeros)": (
        lambda y, v: torch.index_add(v.new_zeros(4, 3), 0, y, v), (torch.randint(4, (B,)), _rand(B, 3)), {"index_add"},
    ),
    "reversed arange": (lambda x: x[torch.arange(B - 1, -1, -1)], (_rand(B, 3),), set()),
    "arange from one": (lambda x, y: x[torch.arange(1, B + 1) - 1, y], (_rand(B, B), torch.randint(B, (B,))), set()),
    "norm with running statistics": (
        lambda x, m, v: torch.ops.aten._native_batch_norm_legit_functional(x, None, None, m, v, True, 0.1, 1e-5)[0],
        (_rand(B, 3), torch.zeros(3, dtype=torch.float64), torch.ones(3, dtype=torch.float64)), set(),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", COUNTED)
def test_counted(name: str) -> None:
    fn, tensors, must = COUNTED[name]
    for layouts in itertools.product(*([None, FIRST] for _ in tensors)):
        if name.startswith("norm") and any(layouts[1:]):
            continue
        if any(layouts):
            local = prove_function(fn, tensors, layouts, B)
            assert all(layouts) is False or must <= local, f"{must - local} ran on the whole batch"


CUDA_SAMPLES = ("attention", "norms", "batch_norms", "convolutions", "pools", "resampling")


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_on_cuda() -> None:
    """Kernels that the CPU does not have: fused attention in every form, fused RMS norm, and layers once more."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    ledger = Ledger()
    with torch.device("cuda"):
        for name in CUDA_SAMPLES:
            with Prover(ledger, most=30, calls=60):
                differentiate(SAMPLES[name]())
        for backend in (SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.CUDNN_ATTENTION):
            for shape, causal, dropout in itertools.product(((4, 4, 8, 64), (8, 2, 16, 64)), (False, True), (0.0, 0.5)):
                q, k, v = (torch.randn(shape, dtype=torch.float16).requires_grad_() for _ in range(3))
                mask = torch.randn(shape[0], 1, shape[2], shape[2], dtype=torch.float16)
                for bias in (None, mask, mask[:1], mask[0, 0]):
                    if bias is not None and (causal or backend is SDPBackend.FLASH_ATTENTION):
                        continue
                    with contextlib.suppress(RuntimeError), sdpa_kernel(backend), Prover(ledger, most=30, calls=60):
                        attend = torch.nn.functional.scaled_dot_product_attention
                        differentiate(attend(q, k, v, bias, dropout, causal).float())
    assert not ledger.failures, "\n".join(ledger.failures[:20])
    expected = {name for name, why in UNPROVED.items() if why == "CUDA only" and "attention" in name}
    assert not expected - set(ledger.proofs), f"never proved: {expected - set(ledger.proofs)}"


def test_cut_and_paste() -> None:
    """A layout's slices by the arithmetic of its definition, and every element back where it came from."""
    for dim, outer, inner, batch in itertools.product(range(3), (1, 2, 3), (1, 2), (2, 3)):
        shape = [4, 4, 4]
        shape[dim] = outer * batch * inner
        whole = torch.arange(float(torch.Size(shape).numel())).view(shape)
        layout, again = Layout(dim, outer, inner), torch.full(shape, -1.0)
        for begin, end in ((0, 1), (1, batch)):
            at = [(o * batch + b) * inner + i for o in range(outer) for b in range(begin, end) for i in range(inner)]
            part = cut(whole, layout, begin, end, batch)
            assert torch.equal(part, whole.index_select(dim, torch.tensor(at)))
            assert part.is_contiguous()
            paste(again, part, layout, begin, end, batch)
        assert torch.equal(again, whole)


def test_prover_finds_a_wrong_rule(monkeypatch: pytest.MonkeyPatch) -> None:
    """The proof is worth something: a rule that calls a softmax over the batch local is caught."""
    from fullbatch._axis._node import Strategy

    def local(view: Any) -> Any:
        source = view.operands[0]
        return source.layout and Strategy({0: source.layout}, (source.layout,))

    monkeypatch.setitem(RULES._rules, "aten._softmax", local)
    ledger = Ledger()
    with Prover(ledger):
        direct(torch.ops.aten._softmax.default, _rand(4, 4), 0, False)
    assert any("S(0;1,1)" in failure for failure in ledger.failures)
    assert not any("S(1;1,1)']: o" in failure for failure in ledger.failures)
