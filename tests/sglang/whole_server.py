"""SGLang's HTTP server on a CPU: `python -m tests.sglang.whole_server`, with the flags of
`sglang.launch_server`.
"""

from __future__ import annotations

import sys

from testbed import sglang_parts

# also in the processes that SGLang starts, which import this module again
sglang_parts.prepare()

if __name__ == "__main__":
    from sglang.srt.entrypoints.http_server import launch_server
    from sglang.srt.server_args import prepare_server_args

    launch_server(prepare_server_args(sys.argv[1:]))
