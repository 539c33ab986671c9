"""Tool: write a text file into the job's output folder."""

from appliance.tools.desk import Desk


def write_report(desk: Desk, name: str, text: str) -> str:
    """Write a Markdown file into the job's output folder. Gives its path.

    Args:
        name: a short name of small letters, digits and dashes.
        text: the whole text.
    """
    return str(desk.write(name, text))
