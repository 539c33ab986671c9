"""Tool: tell a program on the local network."""

from appliance.tools.desk import Desk


def notify(desk: Desk, url: str, text: str) -> int:
    """Post a short message to a granted address. Gives the HTTP status.

    Args:
        url: the address, exactly as it is granted.
        text: the message.
    """
    return desk.post(url, {"text": text})
