"""A jinja2 sandbox that also bounds time and memory: templates come with models, and models come from strangers.

Knows: how jinja2 compiles and calls. Does not know: messages or tokens.

jinja2's own sandbox keeps a template away from Python's insides, but lets it run for ever and fill the memory. Here every
loop step, call, filter, comparison and piece of output is counted, and whatever could grow is measured before or right
after it did. Source: jinja2.sandbox and jinja2.compiler (3.1): calls and intercepted operators of a sandboxed template go
through `call` and `call_binop`; the rest is wrapped in filters while the template is still a tree.

    {% for x in xs %}   -> for x in xs | <step>         a ~ b, [a, b], a < b   -> (...) | <check>
    {{ x }} and text    -> x | <write>                  also inside macros, set and filter blocks
"""

import re
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jinja2
import jinja2.exceptions
import jinja2.nodes
import jinja2.runtime
import jinja2.sandbox
import jinja2.utils
import jinja2.visitor

from appliance.bundle.template_dialect import EXTENSIONS, FILTERS

MAX_CHARS = 4_000_000
"""Of any value and of everything written: about a million tokens."""
MAX_STEPS = 1_000_000
MAX_SECONDS = 2.0
"""Of the thread's own processor time; a template of a long chat (1000 messages) takes about 0.02 s."""
BUDGET = "render budget"
"""Context key of the `Budget`; no template can name a variable with a space."""
STEP, CHECK, WRITE = "loop step", "value check", "write"
STRING_METHODS = frozenset(
    {
        "capitalize", "casefold", "count", "endswith", "find", "format", "index", "isalnum", "isalpha", "isdigit", "islower",
        "isnumeric", "isspace", "istitle", "isupper", "join", "lower", "lstrip", "partition", "removeprefix",
        "removesuffix", "replace", "rfind", "rindex", "rpartition", "rsplit", "rstrip", "split", "splitlines", "startswith",
        "strip", "swapcase", "title", "upper",
    }
)  # fmt: skip


class LimitExceeded(jinja2.TemplateError):
    """The template asked for more than a chat template can need."""


class Budget:
    """What one rendering may still use."""

    def __init__(self) -> None:
        self._steps = MAX_STEPS
        self._chars = MAX_CHARS
        self._end = time.thread_time() + MAX_SECONDS

    def step(self) -> None:
        """Count one operation."""
        self._steps -= 1
        if self._steps < 0 or time.thread_time() > self._end:
            raise LimitExceeded("the chat template runs for too long")

    def write(self, text: str) -> str:
        """Count text that is written, also inside macros."""
        self.step()
        self._chars -= len(text)
        if self._chars < 0:
            raise LimitExceeded(f"the chat template writes more than {MAX_CHARS} characters")
        return text


def check_size(size: int) -> None:
    """Refuse a value of that many characters or items before it is made."""
    if size > MAX_CHARS:
        raise LimitExceeded(f"the chat template makes a value of more than {MAX_CHARS} characters")


def weigh(value: object) -> int:
    """Characters of a value, eight for an item, parts as often as they would be printed; stops at the limit."""
    weight, waiting = 0, [value]
    while waiting and weight <= MAX_CHARS:
        item = waiting.pop()
        weight += 8
        if isinstance(item, str):
            weight += len(item)
        elif isinstance(item, Mapping):
            waiting.extend(item.keys())
            waiting.extend(item.values())
        elif isinstance(item, list | tuple | set | frozenset):
            waiting.extend(item)
    return weight


def checked(value: Any) -> Any:
    """`value`, unless it has grown beyond the limit."""
    if isinstance(value, str):
        check_size(len(value))
    elif isinstance(value, list | tuple | dict):
        check_size(weigh(value))
    return value


def check_format(pattern: str, arguments: list[Any]) -> None:
    """Refuse a format whose result could be huge: widths, or the same long argument many times."""
    if "*" in pattern or re.search(r"\{[^{}]*\{", pattern):
        raise LimitExceeded("the chat template uses a format whose width is an argument")
    widths = sum(int(number) if len(number) < 8 else MAX_CHARS + 1 for number in re.findall(r"\d+", pattern))
    places = pattern.count("{") + pattern.count("%")
    check_size(len(pattern) + widths + places * max(map(weigh, arguments), default=0))


def check_replace(text: str, old: str, new: str) -> None:
    """Refuse a replacement whose result would be huge."""
    check_size(len(text) + text.count(old) * len(new))


def check_join(separator: str, items: object) -> None:
    """Refuse a join whose result would be huge."""
    count = len(items) if isinstance(items, list | tuple | dict | str) else jinja2.sandbox.MAX_RANGE
    check_size(len(separator) * count + weigh(items))


class _Instrument(jinja2.visitor.NodeTransformer):
    """Wraps what must be counted in filters."""

    def visit_For(self, node: jinja2.nodes.For) -> jinja2.nodes.Node:
        self.generic_visit(node)
        node.iter = _filter(node.iter, STEP)
        return node

    def visit_Output(self, node: jinja2.nodes.Output) -> jinja2.nodes.Node:
        self.generic_visit(node)
        node.nodes = [_filter(_constant(part), WRITE) for part in node.nodes]
        return node

    def _check(self, node: jinja2.nodes.Expr) -> jinja2.nodes.Node:
        self.generic_visit(node)
        return _filter(node, CHECK)

    visit_Concat = visit_Compare = visit_Test = visit_Dict = visit_List = _check

    def visit_Tuple(self, node: jinja2.nodes.Tuple) -> jinja2.nodes.Node:
        return self._check(node) if node.ctx == "load" else node

    def visit_Getitem(self, node: jinja2.nodes.Getitem) -> jinja2.nodes.Node:
        if isinstance(node.arg, jinja2.nodes.Slice):
            return self._check(node)
        self.generic_visit(node)
        return node


def _constant(node: jinja2.nodes.Expr) -> jinja2.nodes.Expr:
    if isinstance(node, jinja2.nodes.TemplateData):
        return jinja2.nodes.Const(node.data, lineno=node.lineno)
    return node


def _filter(node: jinja2.nodes.Node, name: str) -> jinja2.nodes.Filter:
    return jinja2.nodes.Filter(node, name, [], [], None, None, lineno=node.lineno)


@jinja2.pass_context
def _step(context: jinja2.runtime.Context, items: Any) -> Iterator[Any]:
    budget = budget_of(context)
    for item in items:
        budget.step()
        yield item


@jinja2.pass_context
def _check(context: jinja2.runtime.Context, value: Any) -> Any:
    budget_of(context).step()
    return checked(value)


@jinja2.pass_context
def _write(context: jinja2.runtime.Context, value: Any) -> str:
    return budget_of(context).write(str(value))


def budget_of(context: jinja2.runtime.Context) -> Budget:
    """The budget of the rendering under way."""
    budget: Budget = context.parent[BUDGET]
    return budget


def _guarded(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """A filter that is counted, checked before where its result could explode, and measured after."""
    first = getattr(getattr(function, "jinja_pass_arg", None), "name", None)

    @jinja2.pass_context
    def call(context: jinja2.runtime.Context, value: Any, *arguments: Any, **named: Any) -> Any:
        budget_of(context).step()
        _check_filter(name, value, [*arguments, *named.values()])
        lead: dict[object, list[Any]] = {
            "context": [context],
            "eval_context": [context.eval_ctx],
            "environment": [context.environment],
        }
        return checked(function(*lead.get(first, []), value, *arguments, **named))

    return call


def _check_filter(name: str, value: Any, arguments: list[Any]) -> None:
    numbers = [int(argument) for argument in arguments if isinstance(argument, int | float) and abs(argument) < 1e18]
    texts = [argument for argument in arguments if isinstance(argument, str)]
    widest = max([0, *numbers, *map(len, texts)])
    if name in ("center", "truncate"):
        check_size(len(str(value)) + widest)
    elif name in ("batch", "slice"):
        check_size(100 * widest)
    elif name == "indent":
        text = str(value)
        check_size(len(text) + widest * (len(text.splitlines()) + 1))
    elif name == "tojson":
        check_size(weigh(value) + (widest * weigh(value) if widest > 2 else 0))
    elif name == "format":
        check_format(str(value), arguments)
    elif name == "replace" and len(texts) == 2:
        check_replace(str(value), *texts)
    elif name == "join":
        check_join(texts[0] if texts else "", value)


class LimitedEnvironment(jinja2.sandbox.ImmutableSandboxedEnvironment):
    """The sandbox of chat templates. A render must have a `Budget` under `BUDGET`."""

    intercepted_binops = frozenset({"+", "*", "%", "**"})

    def __init__(self, filters: Mapping[str, Callable[..., Any]], functions: Mapping[str, Any]):
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=EXTENSIONS)
        known = {name: function for name, function in self.filters.items() if name in FILTERS} | dict(filters)
        self.filters = {name: _guarded(name, function) for name, function in known.items()}
        self.filters |= {STEP: _step, CHECK: _check, WRITE: _write}
        self.globals = {name: self.globals[name] for name in ("range", "cycler", "joiner")} | dict(functions)

    def _parse(self, source: str, name: str | None, filename: str | None) -> jinja2.nodes.Template:
        tree: jinja2.nodes.Template = _Instrument().visit(super()._parse(source, name, filename))
        return tree

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        """jinja2's rules, and of text only methods whose result is bounded; of numbers none."""
        if isinstance(obj, str):
            return attr in STRING_METHODS
        return not isinstance(obj, int | float | bytes) and super().is_safe_attribute(obj, attr, value)

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        """jinja2's safe `format`, with its result bounded."""
        inner = super().wrap_str_format(value)
        if inner is None:
            return None
        pattern = str(value.__self__)

        def bounded(*arguments: Any, **named: Any) -> str:
            check_format(pattern, [*arguments, *named.values()])
            return inner(*arguments, **named)

        return bounded

    def call(__self, __context: jinja2.runtime.Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        """Counted; `self` and the rest are named so that a template may pass any keyword."""
        budget_of(__context).step()
        owner, name = getattr(__obj, "__self__", None), getattr(__obj, "__name__", "")
        if isinstance(owner, str) and name == "replace" and len(args) >= 2:
            check_replace(owner, str(args[0]), str(args[1]))
        elif isinstance(owner, str) and name == "join" and args:
            check_join(owner, args[0])
        return checked(super().call(__context, __obj, *args, **kwargs))

    def call_binop(self, context: jinja2.runtime.Context, operator: str, left: Any, right: Any) -> Any:
        """Counted, and refused before the result is made if that would be huge."""
        budget_of(context).step()
        if operator == "%" and isinstance(left, str):
            check_format(left, list(right) if isinstance(right, tuple) else [right])
        elif operator == "+" and isinstance(left, str | list | tuple):
            check_size(len(left) + (len(right) if isinstance(right, str | list | tuple) else 0))
        elif operator in ("*", "**") and isinstance(left, int) and isinstance(right, int):
            # bounds a number's digits as others bound characters
            check_size(100 * left.bit_length() * (max(right, 1) if operator == "**" else 1) + 100 * right.bit_length())
        elif operator == "*":
            sized, times = (left, right) if isinstance(right, int) else (right, left)
            if isinstance(sized, str | list | tuple) and isinstance(times, int):
                check_size(len(sized) * max(times, 0))
        return checked(super().call_binop(context, operator, left, right))


class Namespace(jinja2.utils.Namespace):
    """What a template may write to. Names with an underscore in front are refused, and printing shows no contents."""

    def __init__(*args: Any, **kwargs: Any) -> None:  # a template may pass the keyword "self"
        self, values = args[0], dict(*args[1:], **kwargs)
        jinja2.utils.Namespace.__init__(self)
        for name, value in values.items():
            self[name] = value

    def __setitem__(self, name: str, value: Any) -> None:
        if str(name).startswith("_"):
            raise jinja2.exceptions.SecurityError(f"a namespace takes no name like {name!r}")
        super().__setitem__(name, value)

    def __repr__(self) -> str:
        return "<namespace>"
