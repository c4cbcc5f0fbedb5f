"""The table of placement rules, one family of operators a file."""

from fullbatch._axis._node import RULES
from fullbatch._axis._rules import _head, _indexing, _layers, _matmul, _pointwise, _random, _reduce, _shape

__all__ = ["RULES", "_head", "_indexing", "_layers", "_matmul", "_pointwise", "_random", "_reduce", "_shape"]
