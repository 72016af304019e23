"""The executor of this machine, which starts, monitors, restarts and stops child processes, and collects their output.

The module `local_executor` contains the code of the parent process, `child` contains the code of child processes, and `fork_server`
contains the server from which children are forked. The module `interrupt` ends user code that blocks.
"""
