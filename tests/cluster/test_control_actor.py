"""The control actor's lease: what it does when its driver is gone."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Awaitable, Callable
from types import SimpleNamespace
from typing import Any

import pytest

from cluster import control_actor, removal
from cluster.control_actor import ControlActor
from rank_scheduler.config import SchedulerConfig

TIMEOUT_S = 10.0


@pytest.fixture
def removed(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """What was taken down, in order."""
    found: list[object] = []
    context = SimpleNamespace(current_actor="the actor", was_current_actor_reconstructed=False)
    ray: Any = SimpleNamespace(
        is_initialized=lambda: True,
        get_runtime_context=lambda: context,
        kill=lambda actor, no_restart: found.append((actor, no_restart)),
    )
    monkeypatch.setitem(sys.modules, "ray", ray)
    monkeypatch.setattr(removal, "remove_application", lambda stop_serve: found.append(stop_serve))
    return found


def run(test: Callable[[ControlActor], Awaitable[None]], owner: str | None) -> None:
    async def run_it() -> None:
        async with asyncio.timeout(TIMEOUT_S):
            actor = ControlActor(SchedulerConfig(), b"s" * 32, 1, "127.0.0.1", owner)
            try:
                await test(actor)
            finally:
                await actor._endpoint.stop()

    asyncio.run(run_it())


async def until_removed(actor: ControlActor) -> None:
    while actor._removal is None:  # noqa: ASYNC110
        await asyncio.sleep(0.001)
    await actor._removal


@pytest.mark.parametrize("stops_serve", [True, False])
def test_a_silent_driver_s_application_is_removed_then_the_actor(
    stops_serve: bool, removed: list[object], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(control_actor, "LEASE_S", 0.01)

    async def test(actor: ControlActor) -> None:
        await actor.renew(stops_serve)
        await until_removed(actor)

    run(test, "the driver")
    assert removed == [stops_serve, ("the actor", True)]


def test_an_incarnation_that_the_driver_never_called_ends_as_well(
    removed: list[object], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(control_actor, "LEASE_S", 0.01)

    async def test(actor: ControlActor) -> None:
        await actor.address()
        await until_removed(actor)

    run(test, "the driver")
    assert removed == [False, ("the actor", True)]


def test_the_actor_goes_even_if_serve_cannot_be_asked(removed: list[object], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(control_actor, "LEASE_S", 0.01)

    def fail(stop_serve: bool) -> None:
        raise ConnectionError("no controller")

    monkeypatch.setattr(removal, "remove_application", fail)

    async def test(actor: ControlActor) -> None:
        await actor.renew(False)
        with pytest.raises(ConnectionError):
            await until_removed(actor)

    run(test, "the driver")
    assert removed == [("the actor", True)]


def test_each_renewal_begins_the_lease_anew(removed: list[object]) -> None:
    async def test(actor: ControlActor) -> None:
        await actor.address()
        first = actor._lease_end
        await actor.renew(False)
        assert first is not None
        assert actor._lease_end is not None
        assert first.cancelled()
        assert actor._lease_end.when() >= first.when()
        actor._lease_end.cancel()

    run(test, "the driver")
    assert removed == []


def test_on_a_ray_of_our_own_there_is_no_lease(removed: list[object]) -> None:
    async def test(actor: ControlActor) -> None:
        await actor.address()
        assert actor._lease_end is None

    run(test, None)
    assert removed == []
