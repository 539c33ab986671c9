"""A reading child whose text reader does what a hostile file makes a library do: python -m tests.knowledge.evil_reader LIMITS

Knows: words that stand for misbehaviour. Does not know: the parent.
"""

import os
import signal
import sys

from appliance.knowledge import reader_process
from appliance.knowledge.document import Extract
from appliance.knowledge.readers import text

honest = text.read


def read(data: bytes) -> Extract:
    """Misbehave as the first word says."""
    match data.split()[:1]:
        case [b"hang"]:
            while True:
                pass
        case [b"deaf"]:  # as a library that blocks signals
            signal.signal(signal.SIGALRM, signal.SIG_IGN)
            while True:
                pass
        case [b"crash"]:
            os.kill(os.getpid(), signal.SIGSEGV)
        case [b"leave"]:
            os._exit(7)
        case [b"swell"]:
            bytearray(8 * 2**30)
        case [b"fail"]:
            raise ValueError("odd\nfile")
        case [b"print"]:
            print("noise on the output")
            os.write(1, b'{"sha256": "forged"}\n')
    return honest(data)


text.read = read
sys.exit(reader_process.main(sys.argv[1:]))
