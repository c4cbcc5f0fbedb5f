"""Train at the batch that the task needs, on the memory that there is, with the gradient of the whole batch."""

from fullbatch import eager, lr, optim
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
    OptimizerError,
    PlanError,
    VerifyError,
)
from fullbatch._head._head import linear_cross_entropy
from fullbatch._largest import Largest, largest
from fullbatch._memory._ledger import Ledger, explain
from fullbatch._memory._measure import Measurement, measure
from fullbatch._plan._diff import PlanDiff
from fullbatch._plan._frontier import Frontier
from fullbatch._plan._plan import Plan
from fullbatch._prepared import Prepared
from fullbatch._propose._propose import Proposals, propose
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
    "Largest",
    "Ledger",
    "LossError",
    "MeasureError",
    "Measurement",
    "MemorySizeError",
    "ModelError",
    "OptimizerError",
    "Plan",
    "PlanDiff",
    "PlanError",
    "Prepared",
    "Proposals",
    "Step",
    "VerifyError",
    "eager",
    "explain",
    "largest",
    "linear_cross_entropy",
    "lr",
    "measure",
    "optim",
    "propose",
]
