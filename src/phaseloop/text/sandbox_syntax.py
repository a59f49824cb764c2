"""Rewrite a template's syntax tree so that all it does accounts to the sandbox.

Calls, look-ups, arithmetic and filters pass through the environment anyway.  Loops, `~`, slices,
comparisons and literal lists do not, so they are led there.
"""

from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.visitor import NodeTransformer

from .budget import TemplateError, Value


class GenerationTag(Extension):
    """`{% generation %}` marks what a model wrote, for training; here it is only what it holds."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=line)


class Accounting(NodeTransformer):
    """Leads loops, `~`, slices, comparisons and literals to methods of the environment."""

    def visit_For(self, node: nodes.For, *args: Value, **kwargs: Value) -> nodes.Node:
        self.generic_visit(node, *args, **kwargs)
        tick = called("tick", [], node)
        if node.test is None:
            node.body.insert(0, nodes.ExprStmt(tick, lineno=node.lineno))
        else:  # what the test rejects was work, too
            node.test = nodes.And(tick, node.test, lineno=node.lineno)
        return node

    def visit_Concat(self, node: nodes.Concat, *args: Value, **kwargs: Value) -> nodes.Node:
        self.generic_visit(node, *args, **kwargs)
        return called("concatenated", node.nodes, node)

    def visit_Getitem(self, node: nodes.Getitem, *args: Value, **kwargs: Value) -> nodes.Node:
        self.generic_visit(node, *args, **kwargs)
        return called("sliced", [node], node) if isinstance(node.arg, nodes.Slice) else node

    def visit_Compare(self, node: nodes.Compare, *args: Value, **kwargs: Value) -> nodes.Node:
        self.generic_visit(node, *args, **kwargs)
        node.expr = weighed(node.expr)
        for operand in node.ops:
            operand.expr = weighed(operand.expr)
        return node

    def visit_List(self, node: nodes.List, *args: Value, **kwargs: Value) -> nodes.Node:
        self.generic_visit(node, *args, **kwargs)
        return node if is_constant(node.items) else called("built", [node], node)

    def visit_Tuple(self, node: nodes.Tuple, *args: Value, **kwargs: Value) -> nodes.Node:
        self.generic_visit(node, *args, **kwargs)
        if node.ctx != "load" or is_constant(node.items):
            return node
        return called("built", [node], node)

    def visit_Dict(self, node: nodes.Dict, *args: Value, **kwargs: Value) -> nodes.Node:
        self.generic_visit(node, *args, **kwargs)
        is_fixed = is_constant([pair.value for pair in node.items])
        return node if is_fixed else called("built", [node], node)

    def refuse_others(self, node: nodes.Node, *args: Value, **kwargs: Value) -> nodes.Node:
        raise TemplateError("refers to another template", line=node.lineno)

    visit_Include = visit_Import = visit_FromImport = visit_Extends = refuse_others

    def refuse_escaping(self, node: nodes.Node, *args: Value, **kwargs: Value) -> nodes.Node:
        raise TemplateError("escapes for HTML, which prompts are not", line=node.lineno)

    visit_EvalContextModifier = visit_ScopedEvalContextModifier = refuse_escaping


def called(method: str, arguments: list[nodes.Expr], node: nodes.Node) -> nodes.Call:
    """A call of the environment's own method, in the place of a node."""
    target = nodes.EnvironmentAttribute(method, lineno=node.lineno)
    return nodes.Call(target, arguments, [], None, None, lineno=node.lineno)


def weighed(expression: nodes.Expr) -> nodes.Expr:
    is_short = isinstance(expression, nodes.Const)
    return expression if is_short else called("weighed", [expression], expression)


def is_constant(items: list[nodes.Expr]) -> bool:
    return all(isinstance(item, nodes.Const) for item in items)
