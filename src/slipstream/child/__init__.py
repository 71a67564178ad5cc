"""Child processes that run user code and answer calls.

User code never runs in a long-lived process of slipstream. It runs in a `Child`: a fresh
interpreter with a message pipe, a memory limit and a time limit per call. Messages are lines of
JSON; nothing is unpickled. Output of user code goes to a log, which is shown when it fails.

    with Child() as child:
        answer = child.call("package.module:function", timeout_s=60, argument=1)

Module globals of the child persist between calls, so that one call can build what the next one
uses. A running function can exchange messages with the parent through `channel()`.
"""

from slipstream.child.descendants import end_group
from slipstream.child.pipe import Channel, Message
from slipstream.child.process import Child, start_with, wait_any
from slipstream.child.report import describe_error, is_user_file
from slipstream.child.worker import call_in_fork, channel, end_descendants, exit_with, resolve

__all__ = [
    "Channel",
    "Child",
    "Message",
    "call_in_fork",
    "channel",
    "describe_error",
    "end_descendants",
    "end_group",
    "exit_with",
    "is_user_file",
    "resolve",
    "start_with",
    "wait_any",
]
