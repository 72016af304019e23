"""The executor of this machine: start, watch, restart and stop child processes, and collect their output.

`local_executor` is the parent's side, `child` the side of the child, `fork_server` the fork server that children come from,
`interrupt` ends user code that blocks.
"""
