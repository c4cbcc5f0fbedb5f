"""Private interfaces of torch are touched in `fullbatch/_torch` alone, so that a release of torch is a matter of it."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import fullbatch

_SOURCE = Path(fullbatch.__file__).parent
_FILES = [path for path in sorted(_SOURCE.rglob("*.py")) if path.parent.name != "_torch"]

# Without an underscore, and documented by torch as nobody's to use.
_EXPERIMENTAL = ("torch.fx.experimental", "torch.fx.passes", "torch.fx.traceback")

_PUBLIC_IN_PRACTICE = {
    "_asdict": "of a NamedTuple: documented by Python",
    "_fields": "of a NamedTuple: documented by Python",
    "_getframe": "of sys: documented by Python",
    "_check_input_dim": "of BatchNorm: its subclasses are there to override it, and a forward of theirs calls it",
}
_OPERATORS = re.compile(r"(torch\.ops\.)?aten\._\w+")  # names of operators, as a traced graph has them
_ASKED_BY_NAME = {"getattr", "setattr", "hasattr", "delattr"}


def _private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def _own(trees: list[ast.Module]) -> set[str]:
    """Private names that classes of the package have."""
    found = set(_PUBLIC_IN_PRACTICE)
    for node in (node for tree in trees for node in ast.walk(tree)):
        if isinstance(node, ast.ClassDef):
            found.update(part.name for part in node.body if isinstance(part, ast.FunctionDef))
            targets = [part.target for part in node.body if isinstance(part, ast.AnnAssign)]
            targets += [target for part in node.body if isinstance(part, ast.Assign) for target in part.targets]
            found.update(target.id for target in targets if isinstance(target, ast.Name))
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and ast.unparse(node.value) == "self":
            found.add(node.attr)
    return found


def _of_torch(module: str) -> bool:
    private = any(_private(part) for part in module.split("."))
    return module.split(".")[0] == "torch" and (private or module.startswith(_EXPERIMENTAL))


def _touched(tree: ast.Module, own: set[str]) -> Iterator[tuple[int, str]]:
    """Line and text of what is private, and of no class of the package."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            wrong = any(_of_torch(name.name) for name in node.names)
        elif isinstance(node, ast.ImportFrom):
            wrong = any(_of_torch(f"{node.module}.{name.name}") for name in node.names)
        elif isinstance(node, ast.Attribute):
            text = ast.unparse(node)
            wrong = _private(node.attr) and node.attr not in own and not _OPERATORS.fullmatch(text)
            wrong = wrong or text.startswith(_EXPERIMENTAL)
        elif isinstance(node, ast.Call) and ast.unparse(node.func) in _ASKED_BY_NAME and len(node.args) > 1:
            wrong = _names(node.args[1], own)
        elif isinstance(node, ast.Subscript) and re.match(r"vars\(|.*\.__dict__$", ast.unparse(node.value)):
            wrong = _names(node.slice, own)
        else:
            continue
        if wrong:
            yield node.lineno, ast.unparse(node)


def _names(node: ast.expr, own: set[str]) -> bool:
    text = node.value if isinstance(node, ast.Constant) else None
    return isinstance(text, str) and _private(text) and text not in own


def test_nothing_else_touches_what_is_private() -> None:
    trees = {path: ast.parse(path.read_text(encoding="utf-8")) for path in _FILES}
    own = _own(list(trees.values()))
    found = [
        f"{path.relative_to(_SOURCE)}:{line}: {text}"
        for path, tree in trees.items()
        for line, text in _touched(tree, own)
    ]
    assert len(trees) > 100
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    "code",
    [
        "import torch._dynamo", "from torch._subclasses.fake_tensor import FakeTensor", "from torch import _C",
        "from torch.utils import _pytree as pytree", "from torch.fx.experimental.proxy_tensor import make_fx",
        "torch._functorch.config.patch()", "torch.nn.modules.batchnorm._BatchNorm", "tensor._version",
        "parameter._backward_hooks = None", "node.target._schema", "getattr(parameter, '_backward_hooks', None)",
        "vars(torch.autograd)['_engine_run_backward']", "torch.autograd.__dict__['_engine_run_backward']",
        "torch.fx.experimental.proxy_tensor.make_fx", "torch._C._nn.linear",
    ],
)  # fmt: skip
def test_it_is_found(code: str) -> None:
    assert list(_touched(ast.parse(code), _own([ast.parse(code)])))


@pytest.mark.parametrize(
    "code",
    [
        "import torch.nn.functional as F", "from fullbatch._plan._plan import Plan", "torch.ops.aten._to_copy.default",
        "class A:\n    def _b(self): self._c = 1\nA()._b, A()._c", "tensor.__class__", "sys._getframe(1)",
    ],
)  # fmt: skip
def test_it_is_nothing(code: str) -> None:
    assert not list(_touched(ast.parse(code), _own([ast.parse(code)])))


@pytest.mark.parametrize("path", sorted((_SOURCE / "_torch").glob("*.py")), ids=lambda path: path.stem)
def test_each_module_of_the_adapter_says_where_it_was_seen_to_work(path: Path) -> None:
    said = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
    assert re.search(r"[Ss]een (to work )?on torch \d+\.\d+", said)
