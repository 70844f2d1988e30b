"""A calculator that the model calls."""

import ast
import operator

OPERATORS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul}


def calculate(expression: str) -> int:
    """Compute an arithmetic expression.

    Args:
        expression: whole numbers with + - * and parentheses
    """

    def value(node):
        if isinstance(node, ast.BinOp):
            return OPERATORS[type(node.op)](value(node.left), value(node.right))
        return int(ast.unparse(node))

    return value(ast.parse(expression, mode="eval").body)
