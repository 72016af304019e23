"""The one supervisor of child processes: start, watch, restart and stop them, and collect their output.

`supervisor` is the parent's side, `child` the side of the child, `fork_server` the fork server that children come from,
`heartbeat` shows the phase of a process, `interrupt` ends user code that blocks.
"""
