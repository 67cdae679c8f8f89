"""A look into the running system's actors: connects to its Ray and answers questions, one JSON line each.

A process of its own, so that neither Ray's threads nor its environment reach the tests. Run as
`python -m tests.e2e.probe RAY_ADDRESS POOL…`; questions are `members`, `control_pid`, `ranks`, `check_integrity` and
`stop_a_rank`, which asks one replica to leave as Serve's controller does, and answers when it has.
"""

import json
import sys
from typing import Any

import ray
from ray import serve

from cluster.application import pool_deployment
from cluster.control_actor import CONTROL_NAME, CONTROL_NAMESPACE
from cluster.removal import APPLICATION_NAME

TIMEOUT_S = 30


def main() -> None:
    answers = sys.stdout
    sys.stdout = sys.stderr
    ray.init(address=sys.argv[1], namespace="probe", log_to_driver=False, logging_level="ERROR")
    control = ray.get_actor(CONTROL_NAME, namespace=CONTROL_NAMESPACE)
    pools = [serve.get_deployment_handle(pool_deployment(pool), APPLICATION_NAME) for pool in sys.argv[2:]]

    def broadcast(method: str) -> list[Any]:
        calls = [pool.broadcast(method) for pool in pools]
        return [answer for call in calls for answer in call.results(timeout_s=TIMEOUT_S)]

    def answer(question: str) -> Any:
        match question:
            case "members":
                return ray.get(control.snapshot.remote(), timeout=TIMEOUT_S)["members"]
            case "control_pid":
                return ray.get(control.snapshot.remote(), timeout=TIMEOUT_S)["pid"]
            case "ranks":
                return broadcast("stats")
            case "check_integrity":
                ray.get(control.check_integrity.remote(), timeout=TIMEOUT_S)
                return broadcast("check_integrity")
            case "stop_a_rank":
                names = [each["name"] for each in ray.util.list_named_actors(all_namespaces=True)]
                name = min(name for name in names if f"#{pool_deployment(sys.argv[2])}#" in name)
                replica = ray.get_actor(name, namespace="serve")
                ray.get(replica.perform_graceful_shutdown.remote(), timeout=4 * TIMEOUT_S)
                return name

    for line in sys.stdin:
        try:
            reply = {"answer": answer(line.strip())}
        except Exception as error:
            reply = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(reply), file=answers, flush=True)


if __name__ == "__main__":
    main()
