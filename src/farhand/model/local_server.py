"""The program that serves the local model. Started by `local.py`; imports nothing of ours.

Reads one line of JSON {weights, key} from stdin, writes its address to stdout, and ends when stdin does: with its
parent, however that died.
"""

import json
import os
import sys


def main() -> None:
    import xllamacpp

    asked = json.loads(sys.stdin.readline())
    params = xllamacpp.CommonParams()
    params.model.path = asked["weights"]
    params.hostnames = ["127.0.0.1"]
    params.port = 0
    params.api_keys = [asked["key"]]
    params.n_ctx = 8192
    params.n_parallel = 2
    params.cache_ram_mib = 64
    # Its threads wait for one another by spinning: with one for each core, any other load makes it ten times slower.
    for threads in (params.cpuparams, params.cpuparams_batch):
        threads.n_threads = max(1, (os.cpu_count() or 2) // 2)
    server = xllamacpp.Server(params)
    print(server.listening_address, flush=True)
    sys.stdin.read()
    # The server's own shutdown waits for requests under way.
    os._exit(0)


main()
