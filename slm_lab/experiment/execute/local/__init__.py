"""The executor of this machine: start, monitor, restart and stop child processes, and collect their output.

`local_executor` is the parent's side, `child` the child's side, and `fork_server` the server from which children are forked. `interrupt`
ends user code that blocks.
"""
