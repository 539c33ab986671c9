"""The jinja2 dialect of `chat_template.jinja`: what a template may be written with.

Knows: syntax. Does not know: values, limits or rendering (`appliance.runtime.chat_template`).
Source: the Hugging Face documentation of chat templates (loop controls, `generation` blocks).
"""

from collections.abc import Callable

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser

from appliance.errors import ApplianceError

LARGEST_SOURCE = 1 << 20
"""Characters; the longest published templates have about 20 000."""


class GenerationBlocks(jinja2.ext.Extension):
    """`{% generation %} ... {% endgeneration %}` marks the assistant's words for training; here its body is simply shown."""

    tags = {"generation"}  # noqa: RUF012  (jinja2 declares it so)

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node:
        """The block as a scope of its own, as a call block is."""
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.CallBlock(self.call_method("show"), [], [], body).set_lineno(line)

    def show(self, caller: Callable[[], str]) -> str:
        """The body's own text."""
        return caller()


FILTERS = frozenset(
    {
        "abs", "attr", "batch", "capitalize", "center", "count", "d", "default", "dictsort", "e", "escape", "first", "float",
        "format", "groupby", "indent", "int", "items", "join", "last", "length", "list", "lower", "map", "max", "min",
        "reject", "rejectattr", "replace", "reverse", "round", "safe", "select", "selectattr", "slice", "sort", "string",
        "sum", "title", "tojson", "trim", "truncate", "unique", "upper", "urlencode", "wordcount",
    }
)  # fmt: skip
"""jinja2's filters without those that write HTML, draw random numbers, or can be made to run for hours."""

EXTENSIONS: tuple[type[jinja2.ext.Extension], ...] = (GenerationBlocks, jinja2.ext.loopcontrols)


def check_syntax(source: str, where: str, error: type[ApplianceError], fix: str) -> None:
    """Parse a template and look for what is not offered.

    Raises:
        error: it is too long or not valid in this dialect; the message has the line.
    """
    if len(source) > LARGEST_SOURCE:
        raise error(f"{where}: a chat template of {len(source)} characters; the limit is {LARGEST_SOURCE}", fix)
    try:
        environment = jinja2.Environment(trim_blocks=True, lstrip_blocks=True, extensions=EXTENSIONS)
        tree = environment.parse(source)
        filters = list(tree.find_all(jinja2.nodes.Filter))
        tests = list(tree.find_all(jinja2.nodes.Test))
        wanted = list(tree.find_all((jinja2.nodes.Include, jinja2.nodes.Import, jinja2.nodes.FromImport, jinja2.nodes.Extends)))
    except jinja2.TemplateSyntaxError as failure:
        raise error(f"{where}: the chat template does not compile: line {failure.lineno}: {failure.message}", fix) from None
    except RecursionError:
        raise error(f"{where}: the chat template does not compile: it is nested too deeply", fix) from None
    for node in filters:
        if node.name not in FILTERS:
            raise error(f"{where}: the chat template uses the filter {node.name!r}, line {node.lineno}; it is not offered", fix)
    for test in tests:
        if test.name not in environment.tests:
            raise error(f'{where}: the chat template asks "is {test.name}", line {test.lineno}; there is no such test', fix)
    for other in wanted:
        raise error(f"{where}: the chat template wants another template, line {other.lineno}; it must stand alone", fix)
