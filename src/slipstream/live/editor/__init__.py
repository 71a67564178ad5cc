"""A language server that shows the cost of lines, functions and modules in any editor.

    slipstream lsp train.py:make_workload       # over stdin and stdout, as editors start it

Source: Microsoft, "Language Server Protocol Specification 3.17"; the interaction follows Skyline
(Yu et al., UIST 2020).
"""

from slipstream.live.editor.requests import make_server, serve_stdio, serve_tcp
from slipstream.live.editor.server import EditorServer

__all__ = ["EditorServer", "make_server", "serve_stdio", "serve_tcp"]
