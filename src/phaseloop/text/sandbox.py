"""Run a chat template as what it is: a program that came with a file from somewhere.

jinja2's sandbox keeps a template from Python's insides.  This one also keeps it from the machine's
time and memory: loops, calls, look-ups, arithmetic, filters and everything that builds data account
to a budget before they run, so a template ends within its limits, with a TemplateError if need be.
It sees no clock but the date it is given, and it can print nothing that differs from run to run.
"""

from collections.abc import Callable, Iterable, Mapping, Sized
from datetime import datetime
from functools import partial
from types import BuiltinMethodType, CodeType, MethodType
from typing import cast

import jinja2
from jinja2.ext import loopcontrols
from jinja2.runtime import BlockReference, Context, LoopContext, Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment, safe_range
from jinja2.tests import TESTS
from jinja2.utils import Namespace

from .budget import Budget, TemplateError, Value
from .sandbox_filters import Filters
from .sandbox_strings import Formatter, joined, percent_formatted, replaced
from .sandbox_syntax import Accounting, GenerationTag

FILENAME = "<chat template>"
INTEGER_BITS_MAX = 256
PROBLEM_LENGTH_MAX = 500  # characters of a message that a template may put into an error
DATE_FORMAT_LENGTH_MAX = 256
JINJA_ARGUMENTS = ("_loop_vars", "_block_vars")  # compiled templates add them to calls in loops
COMPARING_TESTS = (
    *("==", "eq", "equalto", "!=", "ne", "<", "lt", "lessthan", "<=", "le", ">", "gt"),
    *("greaterthan", ">=", "ge", "in"),
)
METHODS: dict[type, frozenset[str]] = {  # what may be called of a value
    str: frozenset(
        {
            *("capitalize", "casefold", "count", "endswith", "find", "index", "isalnum"),
            *("isalpha", "isascii", "isdecimal", "isdigit", "islower", "isnumeric", "isspace"),
            *("istitle", "isupper", "join", "lower", "lstrip", "partition", "removeprefix"),
            *("removesuffix", "replace", "rfind", "rindex", "rpartition", "rsplit", "rstrip"),
            *("split", "splitlines", "startswith", "strip", "swapcase", "title", "upper"),
        }
    ),
    dict: frozenset({"get", "items", "keys", "values"}),
    list: frozenset({"count", "index"}),
    tuple: frozenset({"count", "index"}),
}


class Function:
    """A function that templates may call."""

    def __init__(self, name: str, function: Callable[..., Value]) -> None:
        self.name = name
        self._function = function

    def __call__(self, *args: Value, **kwargs: Value) -> Value:
        return self._function(*args, **kwargs)


class Sandbox(ImmutableSandboxedEnvironment):
    """An environment for one run."""

    intercepted_binops = frozenset({"+", "-", "*", "/", "//", "%", "**"})

    def __init__(self, budget: Budget, now: datetime | None = None) -> None:
        """Without a date, templates cannot ask for it."""
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=[loopcontrols, GenerationTag],
            finalize=self._printed,
            optimized=False,
            cache_size=0,
        )
        self.budget = budget
        self.filters = Filters(budget).table()
        self.tests = self.tests | {name: self._weighing(name) for name in COMPARING_TESTS}
        functions: dict[str, Callable[..., Value]] = {
            "dict": self._mapping,
            "namespace": Namespace,
            "raise_exception": refuse,
            "range": safe_range,
        }
        if now is not None:
            functions["strftime_now"] = partial(formatted, now)
        self.globals = {name: Function(name, made) for name, made in functions.items()}

    # What the rewritten syntax calls.

    def tick(self) -> bool:
        """A loop goes round once more."""
        self.budget.step()
        return True

    def concatenated(self, *parts: object) -> str:
        self.budget.step()
        return joined(self.budget, "", parts)

    def built(self, value: object) -> object:
        self.budget.step()
        self.budget.check_literal(value)
        return value

    def weighed(self, value: object) -> object:
        """A side of a comparison."""
        self.budget.weigh(value)
        return value

    def sliced(self, value: object) -> object:
        self.budget.step()
        if isinstance(value, Sized):
            self.budget.make(len(value))
        return value

    def _weighing(self, name: str) -> Callable[[Value, Value], bool]:
        """A test that compares two values."""
        test = cast(Callable[[Value, Value], bool], TESTS[name])

        def weighed(left: Value, right: Value) -> bool:
            self.budget.weigh((left, right))
            return test(left, right)

        return weighed

    def _mapping(self, *args: Value, **kwargs: Value) -> dict[Value, Value]:
        made = dict(*args, **kwargs)
        self.budget.check_literal(made)
        return made

    # What jinja2 calls.

    @jinja2.pass_context  # a filter of values that are known only when it runs
    def _printed(self, context: Context, value: object) -> str:
        return self.budget.text_of(value)

    def concat(self, parts: Iterable[str]) -> str:
        texts = list(parts)
        self.budget.make(sum(map(len, texts)))
        return "".join(texts)

    def getattr(self, obj: Value, attribute: str) -> Value:
        self.budget.step()
        return super().getattr(obj, attribute)

    def getitem(self, obj: Value, argument: Value) -> Value:
        self.budget.step()
        return super().getitem(obj, argument)

    def wrap_str_format(self, value: Value) -> Function | None:
        """`format` and `format_map` of a string, made safe when they are looked up."""
        if not isinstance(value, BuiltinMethodType) or not isinstance(value.__self__, str):
            return None
        text, formatter = value.__self__, Formatter(self, self.budget)
        if value.__name__ == "format":
            return Function("format", partial(formatter.apply, text))
        if value.__name__ == "format_map":
            return Function("format_map", partial(formatter.apply_map, text))
        return None

    def call_binop(self, context: Context, operator: str, left: Value, right: Value) -> Value:
        self.budget.step()
        if operator == "+" and isinstance(left, Sized) and isinstance(right, Sized):
            self.budget.make(len(left) + len(right))
        elif operator == "*":
            self._check_product(left, right)
        elif operator == "**":
            check_power(left, right)
        elif operator == "%" and isinstance(left, str):
            return percent_formatted(self.budget, left, right)
        return super().call_binop(context, operator, left, right)

    def call(__self, __context: Context, __obj: Value, *args: Value, **kwargs: Value) -> Value:
        """Call only what is known to stay within its bounds."""
        owner = getattr(__obj, "__self__", None)
        if owner is __self:
            return __obj(*args)
        __self.budget.step()
        if isinstance(__obj, BuiltinMethodType) and type(owner) in METHODS:
            named = {key: value for key, value in kwargs.items() if key not in JINJA_ARGUMENTS}
            return __self._call_method(owner, __obj, args, named)
        if isinstance(
            __obj, Function | Macro | BlockReference | LoopContext | jinja2.Undefined
        ) or (isinstance(__obj, MethodType) and isinstance(owner, LoopContext)):
            __self.budget.weigh(args)  # loop.changed compares them
            return super().call(__context, __obj, *args, **kwargs)
        raise TemplateError(f"calls a value of type {type(__obj).__name__}")

    def _call_method(
        self,
        owner: Value,
        method: Callable[..., Value],
        args: tuple[Value, ...],
        kwargs: dict[str, Value],
    ) -> Value:
        name = method.__name__
        kind = type(owner).__name__
        if name not in METHODS[type(owner)]:
            raise TemplateError(f"calls {name} of a {kind}, which is not supported")
        self.budget.make(len(owner))
        if type(owner) in (list, tuple):  # counts or looks for what equals an argument
            self.budget.weigh((owner, args))
        if name == "replace" and not kwargs:
            return replaced(self.budget, owner, *args)
        if name == "join" and len(args) == 1:
            args = (list(args[0]),)
            length = sum(len(part) for part in args[0] if isinstance(part, str))
            self.budget.make(length + len(owner) * len(args[0]))
        if isinstance(owner, str):
            for part in (*args, *kwargs.values()):
                if isinstance(part, str):
                    self.budget.search(owner, part)
        result = method(*args, **kwargs)
        if isinstance(result, Sized):
            self.budget.make(len(result))
        return result

    def _check_product(self, left: Value, right: Value) -> None:
        if isinstance(left, int) and isinstance(right, int):
            if left.bit_length() + right.bit_length() > INTEGER_BITS_MAX:
                raise TemplateError("multiplies beyond all bounds")
        elif isinstance(left, Sized) and isinstance(right, int):
            self.budget.make(len(left) * max(0, right))
        elif isinstance(left, int) and isinstance(right, Sized):
            self.budget.make(max(0, left) * len(right))


def check_power(base: Value, exponent: Value) -> None:
    is_whole = isinstance(base, int) and isinstance(exponent, int)
    if is_whole and base.bit_length() * abs(exponent) > INTEGER_BITS_MAX:
        raise TemplateError("multiplies beyond all bounds")


def refuse(problem: object) -> None:
    """What `raise_exception` does."""
    raise TemplateError(str(problem), refused=True)


def formatted(now: datetime, form: str) -> str:
    if len(form) > DATE_FORMAT_LENGTH_MAX:
        raise TemplateError(f"a date format of more than {DATE_FORMAT_LENGTH_MAX} characters")
    return now.strftime(form)


def compile_template(source: str, budget: Budget) -> CodeType:
    """Raises TemplateError."""
    limit = budget.limits.source_length_max
    if len(source) > limit:
        raise TemplateError(f"has {len(source)} characters, more than the limit of {limit}")
    sandbox = Sandbox(budget)
    try:
        tree = Accounting().visit(sandbox.parse(source))
        return sandbox.compile(tree, "chat template", FILENAME)
    except TemplateError:
        raise
    except jinja2.TemplateSyntaxError as error:
        raise TemplateError(error.message or "is malformed", line=error.lineno) from error
    except Exception as error:  # too deep for the parser or for Python's compiler
        raise TemplateError(f"cannot be compiled: {type(error).__name__}") from error


def run_template(
    code: CodeType, variables: Mapping[str, object], budget: Budget, now: datetime
) -> str:
    """What a template prints.  Raises TemplateError, with the line, whatever goes wrong in it."""
    sandbox = Sandbox(budget, now)
    template = jinja2.Template.from_code(sandbox, code, sandbox.globals)
    try:
        context = template.new_context(dict(variables))
        return sandbox.concat(template.root_render_func(context))
    except Exception as error:  # a template may provoke any
        refused = isinstance(error, TemplateError) and error.refused
        problem = error.problem if isinstance(error, TemplateError) else described(error)
        line = line_of(error, template)
        raise TemplateError(problem[:PROBLEM_LENGTH_MAX], refused=refused, line=line) from error


def described(error: Exception) -> str:
    if isinstance(error, RecursionError):
        return "calls itself without end"
    if isinstance(error, jinja2.TemplateError):
        return error.message or type(error).__name__
    return f"{type(error).__name__}: {error}"


def line_of(error: Exception, template: jinja2.Template) -> int | None:
    """The template's line at which the error arose."""
    line = None
    place = error.__traceback__
    while place is not None:
        if place.tb_frame.f_code.co_filename == FILENAME:
            line = template.get_corresponding_lineno(place.tb_lineno)
        place = place.tb_next
    return line
