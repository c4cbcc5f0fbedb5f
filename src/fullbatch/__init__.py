"""Train at the batch that the task needs, on the memory that there is, with the gradient of the whole batch."""

from fullbatch._errors import (
    BatchError,
    BudgetError,
    CaptureError,
    CompileError,
    Fault,
    FullbatchError,
    LossError,
    MeasureError,
    MemorySizeError,
    ModelError,
    PlanError,
    VerifyError,
)
from fullbatch._memory._ledger import Ledger, explain
from fullbatch._memory._measure import Measurement, measure
from fullbatch._plan._diff import PlanDiff
from fullbatch._plan._frontier import Frontier
from fullbatch._plan._plan import Plan
from fullbatch._step import Step
from fullbatch._verify import Certificate

__version__ = "0.1.0"

__all__ = [
    "BatchError",
    "BudgetError",
    "CaptureError",
    "Certificate",
    "CompileError",
    "Fault",
    "Frontier",
    "FullbatchError",
    "Ledger",
    "LossError",
    "MeasureError",
    "Measurement",
    "MemorySizeError",
    "ModelError",
    "Plan",
    "PlanDiff",
    "PlanError",
    "Step",
    "VerifyError",
    "explain",
    "measure",
]
