"""Takes what serried deployed off a Ray cluster that goes on: its Serve application, and Serve if it was its own."""

from __future__ import annotations

APPLICATION_NAME = "serried"


def remove_application(stop_serve: bool) -> None:
    """Delete the application and wait until it is gone. `stop_serve`: end Serve as well, if it has no other one.

    For any process that is connected to Ray. Serve's controller goes on with it whatever becomes of the caller.
    """
    from ray import serve

    applications = set(serve.status().applications)
    if stop_serve and not applications - {APPLICATION_NAME}:
        serve.shutdown()
    elif APPLICATION_NAME in applications:
        serve.delete(APPLICATION_NAME)
