"""Read ``TF_CONFIG``: TensorFlow's cluster of chief, workers and evaluator."""

from __future__ import annotations

import json
from typing import Any

from paceline._launch.variables import Launch, Variables

_TRAINING = ("chief", "worker")
_KNOWN = (*_TRAINING, "evaluator", "ps")
_FORM = (
    '{"cluster": {"chief": ["host:port"], "worker": ["host:port", ...]}, '
    '"task": {"type": "worker", "index": 0}}'
)


def from_tf_config(found: Variables) -> Launch | None:
    """Return the launch that ``TF_CONFIG`` describes; None if it has no cluster.

    The chief is rank 0, workers follow; all meet at the address of rank 0.
    """
    config = _parse(found.text("TF_CONFIG"))
    if not config.get("cluster") and not config.get("task"):
        return None
    cluster = _cluster_of(config)
    kind, index = _task_of(config, cluster)
    ranks = [address for name in _TRAINING for address in cluster.get(name, [])]
    if not ranks:
        raise _error("its cluster has neither a chief nor a worker")
    if kind == "evaluator":
        return _evaluator(cluster, index, ranks)
    rank = index + (len(cluster.get("chief", [])) if kind == "worker" else 0)
    addr, port = None, None
    if len(ranks) > 1:
        addr, port = _host_and_port(ranks[0])
        addr = found.text("MASTER_ADDR") or addr
        port = found.port() or port
    hosts = [_host_and_port(address)[0] for address in ranks]
    return Launch(
        "tf_config",
        rank,
        len(ranks),
        hosts[:rank].count(hosts[rank]),
        hosts.count(hosts[rank]),
        addr,
        port,
    )


def _evaluator(cluster: dict[str, list[str]], index: int, ranks: list[str]) -> Launch:
    """Return an evaluator's launch: outside the world, after its host's ranks."""
    local_rank = 0
    evaluators = cluster.get("evaluator", [])
    if evaluators:  # TensorFlow leaves evaluators out of the cluster
        host = _host_and_port(evaluators[index])[0]
        earlier = [*ranks, *evaluators[:index]]
        local_rank = [_host_and_port(address)[0] for address in earlier].count(host)
    return Launch("tf_config", -1, len(ranks), local_rank)


def _error(problem: str) -> ValueError:
    return ValueError(f"TF_CONFIG: {problem}; it has the form {_FORM}")


def _parse(text: str) -> dict[str, Any]:
    try:
        config = json.loads(text or "{}")
    except ValueError as error:
        raise _error(f"{text!r} is not JSON ({error})") from None
    if not isinstance(config, dict):
        raise _error(f"{text!r} is not a JSON object")
    return config


def _cluster_of(config: dict[str, Any]) -> dict[str, list[str]]:
    cluster = config.get("cluster")
    if not cluster or not isinstance(cluster, dict):
        raise _error(f"cluster is {cluster!r}")
    _refuse_unknown(*cluster)
    for kind, addresses in cluster.items():
        is_list = isinstance(addresses, list) and all(
            isinstance(address, str) for address in addresses
        )
        if not is_list:
            raise _error(f"{kind} is {addresses!r}, not a list of addresses")
    everyone = [address for addresses in cluster.values() for address in addresses]
    for address in everyone:
        _host_and_port(address)
        if everyone.count(address) > 1:
            raise _error(f"{address} appears {everyone.count(address)} times")
    if len(cluster.get("chief", [])) > 1:
        raise _error(f"there is more than one chief: {cluster['chief']}")
    return cluster


def _refuse_unknown(*kinds: str) -> None:
    if "ps" in kinds:
        raise _error(
            "it has a parameter server (ps), but here the workers average the "
            "gradients themselves: leave ps out of the cluster, and start no process "
            "for it"
        )
    for kind in kinds:
        if kind not in _KNOWN:
            raise _error(f"{kind!r} is not chief, worker or evaluator")


def _task_of(config: dict[str, Any], cluster: dict[str, list[str]]) -> tuple[str, int]:
    task = config.get("task")
    if not isinstance(task, dict):
        raise _error(f"task is {task!r}")
    kind, index = task.get("type"), task.get("index")
    if not isinstance(kind, str):
        raise _error(f"the task's type is {kind!r}")
    _refuse_unknown(kind)
    if isinstance(index, str) and index.isascii() and index.isdigit():
        index = int(index)
    if not isinstance(index, int) or isinstance(index, bool) or index < 0:
        raise _error(f"the task's index is {index!r}, not a whole number from 0 on")
    n_tasks = len(cluster.get(kind, []))
    if kind == "evaluator" and not n_tasks:
        return kind, index
    if index >= n_tasks:
        raise _error(
            f"the task is {kind} {index}, and the cluster has {n_tasks} of them"
        )
    return kind, index


def _host_and_port(address: str) -> tuple[str, int]:
    """Return the host and the port of "host:port" or "[::1]:port"."""
    host, _, port = address.rpartition(":")
    is_port = port.isascii() and port.isdigit() and 0 < int(port) < 65536
    if not host or not is_port:
        raise _error(f"{address!r} is not host:port")
    return host.removeprefix("[").removesuffix("]"), int(port)
