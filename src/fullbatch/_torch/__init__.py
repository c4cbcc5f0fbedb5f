"""Every private torch interface that fullbatch touches, each with the reason. Seen to work on torch 2.13.

The rule: no other module of the package imports a name of torch that begins with an underscore, reads such an
attribute, or uses a module that torch does not document as public (`tests/report/test_private_torch.py` looks). A
module here is about one subject, and says on which versions of torch all in it was seen to work; where one thing
differs, its own line does. So another version of torch is a matter of this folder: run the tests, mend here what
broke, add the version.
"""

from fullbatch._torch._aot import (
    EAGER_LOSS,
    compiled,
    joint_graph,
    loss_decompositions,
    loss_marker,
)
from fullbatch._torch._autograd import (
    accumulated_hooks,
    backward_hooks,
    drop_hooks,
    give_hooks,
    global_hooks,
    gradient_hooks,
    graph_leaves,
    take_hooks,
    watched_backward,
)
from fullbatch._torch._dynamo import (
    DynamoError,
    capture_settings,
    forget,
    guarded,
    guarded_expressions,
    original_exception,
    traced_code,
    why_recaptured,
)
from fullbatch._torch._fake import (
    fake_mode,
    is_fake,
    quiet_shapes,
    to_fake,
)
from fullbatch._torch._graph import (
    dynamo_source,
    free_symbols,
    input_example,
    input_source,
    keep_input,
    may_write,
    numpy_name,
)
from fullbatch._torch._operators import (
    DispatchMode,
    OpOverload,
    assert_on_device,
    asserts_on_device,
    flops_of,
    modes_around,
    profiler_running,
    schema,
    without_modes,
    without_onednn,
    written_by,
)
from fullbatch._torch._optimizers import (
    optimizer_on_fakes,
    optimizes,
)
from fullbatch._torch._plain import (
    Known,
    as_plain,
)
from fullbatch._torch._tensors import (
    BatchNorm,
    is_transformed,
    is_view,
    is_wrapper,
    plain_parts,
    storage_key,
    tree_map,
    version,
)

__all__ = [
    "EAGER_LOSS",
    "BatchNorm",
    "DispatchMode",
    "DynamoError",
    "Known",
    "OpOverload",
    "accumulated_hooks",
    "as_plain",
    "assert_on_device",
    "asserts_on_device",
    "backward_hooks",
    "capture_settings",
    "compiled",
    "drop_hooks",
    "dynamo_source",
    "fake_mode",
    "flops_of",
    "forget",
    "free_symbols",
    "give_hooks",
    "global_hooks",
    "gradient_hooks",
    "graph_leaves",
    "guarded",
    "guarded_expressions",
    "input_example",
    "input_source",
    "is_fake",
    "is_transformed",
    "is_view",
    "is_wrapper",
    "joint_graph",
    "keep_input",
    "loss_decompositions",
    "loss_marker",
    "may_write",
    "modes_around",
    "numpy_name",
    "optimizer_on_fakes",
    "optimizes",
    "original_exception",
    "plain_parts",
    "profiler_running",
    "quiet_shapes",
    "schema",
    "storage_key",
    "take_hooks",
    "to_fake",
    "traced_code",
    "tree_map",
    "version",
    "watched_backward",
    "why_recaptured",
    "without_modes",
    "without_onednn",
    "written_by",
]
