"""The program's first lines: `appliance` and `python -m appliance` begin here.

Knows: that Ctrl-C may come while Python still imports, and then deserves no trace. Does not know: any verb.
"""

import signal
import sys


def main() -> int:
    """The exit code of the command line; see `appliance.cli.main`."""
    # A shell starts programs in the background with the signal ignored; that stays as it is.
    listens = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if listens:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    from appliance import cli

    if listens:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    return cli.main()


if __name__ == "__main__":
    sys.exit(main())
