"""Writes docs/commands.md from the help texts: python docs/generate.py

Knows: how the page is laid out. Does not know: any verb.
"""

from pathlib import Path

from appliance.cli import command, load, verbs

PAGE = Path(__file__).parent / "commands.md"
HEAD = """\
# Commands

Written by `make docs` from the help texts; a test keeps it current. Exit codes: 0 done, 1 failed, 2 bad input or no space, 3 not
now (try later), 4 the result lost more than its scheme may, 5 device, 130 interrupted. A failure is one line on stderr.

```
{overview}
```
"""
WIDTH = 100


def help_text(thing: object, name: str) -> str:
    """The help of a command as it is shown on a terminal of WIDTH columns."""
    context = thing.context_class(thing, info_name=name, terminal_width=WIDTH, max_content_width=WIDTH)  # type: ignore[attr-defined]
    return "\n".join(line.rstrip() for line in str(thing.get_help(context)).splitlines()).strip()  # type: ignore[attr-defined]


def page() -> str:
    """The whole page."""
    parts = [HEAD.format(overview=help_text(command(), "appliance"))]
    for verb in verbs().values():
        thing = load(verb)
        parts.append(section("##", verb.name, help_text(thing, f"appliance {verb.name}")))
        for name, inner in getattr(thing, "commands", {}).items():  # a verb with verbs of its own
            title = f"{verb.name} {name}"
            parts.append(section("###", title, help_text(inner, f"appliance {title}")))
    return "\n".join(parts)


def section(mark: str, title: str, text: str) -> str:
    """One help text under its heading."""
    return f"{mark} {title}\n\n```\n{text}\n```\n"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
