"""Random operators that are not element by element, or that torch does not tag so, and their derivatives.

Each sample's draw depends on nothing of another's: a microbatch draws under a seed of its own (`_run/_random`).
"""

from __future__ import annotations

from fullbatch._axis._node import NodeView, Strategy, rule
from fullbatch._axis._rules._pointwise import pointwise

for _name in (
    "aten.poisson", "aten.binomial", "aten._standard_gamma", "aten._standard_gamma_grad", "aten._dirichlet_grad",
    "aten.rrelu_with_noise_backward",
):  # fmt: skip
    rule(_name)(pointwise)


@rule("aten.multinomial", "aten._sample_dirichlet")
def _by_rows(view: NodeView) -> Strategy | None:
    """A row of weights is one distribution: the batch may be any dimension but the last."""
    source = view.operands[0]
    if source.layout is None or source.layout.dim >= source.ndim - 1:
        return None
    return Strategy({source.index: source.layout}, (source.layout,))
