"""The connection to a Ray cluster, the checks of its nodes before training, and method calls on actors."""

from __future__ import annotations

import logging
import os
import pickle
import platform
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from secrets import token_hex
from typing import Any, TypeVar

import slm_lab
from slm_lab.experiment.execute.ray.local_cluster import LocalCluster, check_installed
from slm_lab.experiment.files.provenance import package_versions
from slm_lab.experiment.files.storage import Location
from slm_lab.experiment.plan import UserError
from slm_lab.lib.limits import cores
from slm_lab.lib.process import stop_signals_blocked, temporary_environment
from slm_lab.lib.text import error_line, last_line, nonblank_lines

_CONNECT_SECONDS = 3.0
"""Maximum time in seconds for the head node of a cluster to accept a connection. (Ray itself would try for 80 s and then end this
process.)"""
_HEADER, _SETTINGS = 9, b"\x04"
"""`_HEADER`: size in bytes of the header of an HTTP/2 frame. `_SETTINGS`: type (byte 3 of the header) of the first frame of a
connection."""
_GREETING = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes(3) + _SETTINGS + bytes(5)
"""First bytes that an HTTP/2 client sends: the connection preface and an empty settings frame."""
_PROBE_SECONDS = 60.0
"""Maximum time in seconds for a node to run its first task, for which Ray starts a process."""


@dataclass(frozen=True)
class Node:
    """A node of a Ray cluster: a machine, or the part of a machine that Ray uses."""

    id: str
    name: str
    cores: float
    gpus: float


class Cluster:
    """The Ray cluster to which this process is connected.

    Args: address: address that the user has given (--cluster).
    """

    def __init__(self, address: str) -> None:
        import ray

        self.address = address
        self.own_node = str(ray.get_runtime_context().get_node_id())
        """Id of the node on which this process runs."""

    @property
    def nodes(self) -> list[Node]:
        """Nodes that are alive now."""
        import ray

        nodes = []
        for node in ray.nodes():
            if node["Alive"]:
                resources = node["Resources"]
                name = f"{node['NodeManagerHostname']} ({node['NodeManagerAddress']}:{node['NodeManagerPort']})"
                nodes.append(Node(node["NodeID"], name, resources.get("CPU", 0.0), resources.get("GPU", 0.0)))
        return nodes

    def __str__(self) -> str:
        nodes = self.nodes
        gpus = sum(node.gpus for node in nodes)
        with_gpus = f", {gpus:g} GPU{'s' * (gpus != 1)}" if gpus else ""
        total = sum(node.cores for node in nodes)
        return f"cluster {self.address}: {len(nodes)} node{'s' * (len(nodes) != 1)}, {total:g} core{'s' * (total != 1)}{with_gpus}"

    def check_fits(self, what: str, cores: float, gpus: float = 0.0) -> None:
        """Raise UserError if no single node has at least `cores` cores and `gpus` GPUs.

        Args: what: subject of the error message.
        """
        nodes = self.nodes
        if not any(node.cores >= cores and node.gpus >= gpus for node in nodes):
            needs = f"{cores:g} core{'s' * (cores != 1)}" + (f" and {gpus:g} GPU{'s' * (gpus != 1)}" if gpus else "")
            has = "; ".join(f"{node.name}: {node.cores:g} cores, {node.gpus:g} GPUs" for node in nodes)
            raise UserError(f"--cluster {self.address}: {what} needs {needs} of one node, and no node has as many ({has})")

    def check_total(self, what: str, cores: float) -> None:
        """Raise UserError if the nodes of the cluster together have fewer than `cores` cores.

        Args: what: subject of the error message.
        """
        total = sum(node.cores for node in self.nodes)
        if total < cores:
            raise UserError(f"--cluster {self.address}: {what} need {cores:g} cores, and the cluster has {total:g}")


def node_strategy(node: str, *, soft: bool = False) -> Any:
    """Return Ray's scheduling strategy that runs a task on the node with the id `node`.

    Args:
        node: id of the node.
        soft: whether the task may run on another node if the node with the id `node` is not alive.
    """
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    return NodeAffinitySchedulingStrategy(node, soft=soft)


@contextmanager
def connect_cluster(address: str, folder: Location | None) -> Iterator[Cluster]:
    """Context manager that connects this process to a Ray cluster while the block runs.

    Args:
        address: HOST:PORT, "auto" (the cluster to which this machine belongs), or "local" (a cluster that is started on this machine and
            stopped after the block).
        folder: folder that all nodes must be able to read and write, or None to check no folder.

    Raises UserError within seconds if the cluster cannot be reached or used, if a node has other package versions than this process (see
    `versions_to_match`), or if a node cannot access the folder.
    """
    check_installed("ray", extra="cluster", what="--cluster")
    if address == "local":
        with _temporary_token_file(folder):
            pass
        with LocalCluster(cores()):
            yield Cluster(address)
        return
    with _join_cluster(address) as cluster:
        _check_nodes(cluster, folder)
        yield cluster


@contextmanager
def _join_cluster(address: str) -> Iterator[Cluster]:
    where = _resolve_address(address)
    with temporary_environment(_environment_variables()):
        import ray

        if ray.is_initialized():
            raise UserError("this process is already connected to a Ray cluster; call ray.shutdown() first")
        try:
            _init(address, where)
            with _silence_node_logs():
                yield Cluster(address)
        finally:  # also after a failed connection, since the next attempt would reuse the remaining state
            with stop_signals_blocked():
                ray.shutdown()


def _init(address: str, where: str) -> None:
    import ray

    try:
        with stop_signals_blocked():  # ray.init installs a handler of its own for SIGTERM
            ray.init(address=where, log_to_driver=False, configure_logging=False, logging_level=logging.ERROR)
    except SystemExit:
        raise UserError(f"--cluster {address}: Ray's head node at {where} does not answer") from None
    except Exception as error:
        raise UserError(_connection_error_message(address, str(error))) from None


@contextmanager
def _silence_node_logs() -> Iterator[None]:
    """Context manager that prevents Ray from printing the last lines of a node's log when the node dies.

    The context manager has no effect if the installed version of Ray lacks the function that is replaced.
    """
    from ray._private import worker

    before = getattr(worker, "print_to_stdstream", None)
    worker.print_to_stdstream = lambda *arguments, **options: None
    try:
        yield
    finally:
        if before is not None:
            worker.print_to_stdstream = before


def _resolve_address(address: str) -> str:
    """Return the address HOST:PORT of the cluster's head node. Raises UserError if the head node does not answer at this address."""
    where = address
    if address == "auto":
        where = os.environ.get("RAY_ADDRESS", "")
        if not where:
            with suppress(OSError):
                where = (Path(os.environ.get("RAY_TMPDIR", "/tmp")) / "ray" / "ray_current_cluster").read_text().strip()
        if not where:
            start = "start one with `ray start --head`, or join one with `ray start --address=HOST:PORT`"
            raise UserError(f"--cluster auto: this machine is not a node of a Ray cluster; {start}")
    host, _, port = where.rpartition(":")
    try:
        with socket.create_connection((host.strip("[]"), int(port)), _CONNECT_SECONDS) as connection:
            _check_protocol(connection)
            return where
    except (OSError, ValueError, OverflowError) as error:
        reason = getattr(error, "strerror", None) or error
        shown = f"--cluster {address}" + (f" ({where})" if where != address else "")
        raise UserError(f"{shown}: no Ray cluster can be reached there: {reason}; expected the address that `ray start` prints") from None


def _check_protocol(connection: socket.socket) -> None:
    """Raise OSError if the server does not answer with HTTP/2, as the head node of a Ray cluster does.

    (Ray itself would wait for an answer for minutes.)
    """
    if os.environ.get("RAY_USE_TLS", "0").lower() in ("1", "true"):
        return
    connection.sendall(_GREETING)
    answer = b""
    while len(answer) < _HEADER:
        if not (part := connection.recv(_HEADER - len(answer))):
            break
        answer += part
    if answer[3:4] != _SETTINGS:
        raise OSError("the server at this address is not Ray's head node")


def _environment_variables() -> dict[str, str]:
    """Return the environment variables to set while this process is connected to a cluster.

    RAY_AUTH_MODE must be set before ray is imported.
    """
    variables = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0", "RAY_DEDUP_LOGS": "0"}
    if "RAY_AUTH_MODE" not in os.environ:
        has_token = any(os.environ.get(name) for name in ("RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"))
        variables["RAY_AUTH_MODE"] = "token" if has_token or (Path.home() / ".ray" / "auth_token").is_file() else "disabled"
    return variables


def _connection_error_message(address: str, text: str) -> str:
    """Return the error message for the user. `text` is the text of the error that ray.init has raised."""
    shown = " ".join(nonblank_lines(text)[:6])[:600]
    if "ersion mismatch" in text:
        advice = "install the same versions of Ray and Python everywhere"
    elif "uthenticat" in text or "token" in text:
        advice = "the cluster wants a token: set RAY_AUTH_MODE=token, and RAY_AUTH_TOKEN or RAY_AUTH_TOKEN_PATH"
    else:
        advice = "this machine must be a node of the cluster (`ray start --address=HOST:PORT`), and have its token if it wants one"
    return f"--cluster {address}: cannot connect: {shown}; {advice}"


def probe_node(token: Location | None) -> dict[str, Any]:
    """Return {"versions": …, "token": …, "problem": …} of the node on which this function runs.

    The entry "versions" contains the package versions, and "token" contains the content of the token file. The entry "problem" is the
    reason why the node cannot read the token file or write to the folder of the token file, or "" if the node can do both.
    """
    result = {"versions": versions_to_match(), "token": "", "problem": ""}
    if token is not None:
        try:
            result["token"] = token.read_text()
            test_file = token.with_name(f"{token.name}_{token_hex(8)}")
            test_file.write_text("")
            test_file.unlink()
        except OSError as error:
            result["problem"] = str(error.strerror or error)
    return result


def versions_to_match() -> dict[str, str]:
    """Return the package versions that must be equal on all nodes, as a dict: package → version."""
    versions = package_versions()
    python = ".".join(platform.python_version_tuple()[:2])
    return {"python": python, "slm_lab": slm_lab.__version__, "torch": versions["torch"], "numpy": versions["numpy"]}


def _check_nodes(cluster: Cluster, folder: Location | None) -> None:
    """Check the package versions of each node, and check that each node can read and write files in the folder.

    The checks run as a task on each node. Raises UserError if a node does not answer or a check fails.
    """
    import ray

    with _temporary_token_file(folder) as token:
        task: Any = ray.remote(num_cpus=0, max_retries=0)(probe_node)
        node_of = {task.options(scheduling_strategy=node_strategy(node.id)).remote(token): node for node in cluster.nodes}
        ready, late = ray.wait(list(node_of), num_returns=len(node_of), timeout=_PROBE_SECONDS)
        alive = {node.id for node in cluster.nodes}  # Ray lists a node for some seconds after its end
        late = [answer for answer in late if node_of[answer].id in alive]
        if late:
            names = ", ".join(node_of[answer].name for answer in late)
            raise UserError(f"--cluster {cluster.address}: no answer from {names} within {_PROBE_SECONDS:g} s")
        for answer in ready:
            result = _probe_result(cluster, node_of[answer], answer, alive)
            if result is not None and folder is not None and token is not None and (result["problem"] or result["token"] != token.name):
                _raise_folder_error(cluster, node_of[answer], folder, result["problem"])


@contextmanager
def _temporary_token_file(folder: Location | None) -> Iterator[Location | None]:
    """Context manager that creates a token file in `folder`, or in its nearest existing parent, and removes the file after the block.

    The token file contains the random name of the token file.
    """
    if folder is None:
        yield None
        return
    where = folder
    if isinstance(folder, Path):
        where = next(path for path in (folder.absolute(), *folder.absolute().parents) if path.is_dir())
    token = where / f".slm_lab_{token_hex(16)}"
    try:
        token.write_text(token.name)
    except OSError as error:
        raise UserError(f"cannot write to {_describe_folder(folder)}: {error.strerror or error}") from None
    try:
        yield token
    finally:
        with suppress(OSError):
            token.unlink()


def _describe_folder(folder: Location) -> str:
    return f"the data folder {folder}" if isinstance(folder, Path) else f"--storage {folder}"


def _raise_folder_error(cluster: Cluster, node: Node, folder: Location, problem: str) -> None:
    if isinstance(folder, Path):
        advice = "all nodes must see the same folder there: use a network file system, with --data-dir, or an object store, with --storage"
    else:
        advice = (
            "all nodes must read and write there: use a URL that means the same store on each, and give each its package and credentials"
        )
    reason = f" ({problem})" if problem else ""
    raise UserError(f"--cluster {cluster.address}: {node.name} cannot use {_describe_folder(folder)}{reason}; {advice}")


def _probe_result(cluster: Cluster, node: Node, answer: Any, alive: set[str]) -> dict[str, Any] | None:
    """Return the result of `probe_node` on a node, or None if the node has died since the call.

    Raises UserError if the node cannot run slm_lab or has other package versions (see `versions_to_match`).

    Args:
        answer: Ray's reference to the result.
        alive: ids of the nodes that are alive.
    """
    import ray

    try:
        result: dict[str, Any] = ray.get(answer)
    except ray.exceptions.RayError as error:
        if node.id not in alive:
            return None
        raise UserError(f"--cluster {cluster.address}: {node.name} cannot run slm_lab: {last_line(str(error))}") from None
    here = versions_to_match()
    other = [f"{name} {version} (here {here[name]})" for name, version in result["versions"].items() if version != here[name]]
    if other:
        raise UserError(f"--cluster {cluster.address}: {node.name} has other versions: {', '.join(other)}; install the same everywhere")
    return result


PACKED = 2**16
"""Maximum total size in bytes of the arrays in a message that is pickled to one bytes object. Ray needs less processor time for a bytes
object. A message with larger arrays is sent unchanged, so that processes on the same node can read the arrays without a copy."""
Content = TypeVar("Content")


def pack(content: Content) -> Content | bytes:
    """Return `content` pickled to bytes if its arrays have at most PACKED bytes in total. If the arrays are larger, return `content`
    itself."""
    arrays: list[pickle.PickleBuffer] = []
    data = pickle.dumps(content, 5, buffer_callback=arrays.append)
    if not arrays:
        return data
    return pickle.dumps(content, 5) if sum(array.raw().nbytes for array in arrays) <= PACKED else content


def unpack(content: Content | bytes) -> Content:
    """Return the original content of a value that `pack` has returned."""
    if not isinstance(content, bytes):
        return content
    unpacked: Content = pickle.loads(content)
    return unpacked


@dataclass(frozen=True)
class ActorHandle:
    """Handle of a Ray actor. The methods of the actor are called by name."""

    actor: Any

    def call_async(self, method: str, *args: Any) -> None:
        """Call a method of the actor asynchronously. Calls from one process are executed in order."""
        self.start(method, *args)

    def call(self, method: str, *args: Any) -> Any:
        """Call a method of the actor and return the result. Raises the exception of the method, or an error if the actor has died."""
        return self.result(self.start(method, *args))

    def start(self, method: str, *args: Any) -> Any:
        """Start an asynchronous call of a method of the actor. Returns an object to pass to `is_done` and `result`."""
        return getattr(self.actor, method).remote(*args)

    def is_done(self, started: Any) -> bool:
        """Return whether a call that `start` has started has ended."""
        import ray

        return bool(ray.wait([started], timeout=0)[0])

    def result(self, started: Any) -> Any:
        """Wait for a call that `start` has started, and return the result of the call. Raises the same errors as `call`."""
        import ray

        try:
            return ray.get(started)
        except ray.exceptions.RayTaskError as error:
            raise error.cause if isinstance(error.cause, Exception) else error from None


def death_reason(error: BaseException) -> str:
    """Return the reason why an actor has died, as one line of text. `error` is the error that Ray has raised."""
    text = str(error)
    if "unavailable" in text or "node has died" in text or "node was terminated" in text:
        return LOST_NODE
    return next((line for line in nonblank_lines(text) if "cause" in line.lower()), error_line(error))[:300]


LOST_NODE = "its node is gone or does not answer"
