"""The client waits out what passes by itself, and says the rest in the API server's words."""

import asyncio
import json
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from kubernetes.aio.client.configuration import Configuration

from omni_operator.api import (
    AlreadyExists,
    ApiError,
    ApiUnavailable,
    Conflict,
    NotFound,
    QuotaExceeded,
    Refused,
)
from omni_operator.cluster import Access, Cluster
from omni_operator.kinds import CONFIG_MAP, POD
from omni_operator.settings import SetupError

Answers = Sequence[tuple[int, dict[str, Any] | str]]
OK = (200, {"kind": "ConfigMap"})


def status(code: int, reason: str, message: str = "so it is", **details: Any) -> dict[str, Any]:
    return {
        "kind": "Status",
        "code": code,
        "reason": reason,
        "message": message,
        "details": details,
    }


def ask(
    answers: Answers,
    act: Callable[[Cluster], Awaitable[Any]],
    *,
    patience_s: float = 5,
    token: str = "",
) -> tuple[Any, list[tuple[str, int]]]:
    """What comes of an act where these are the answers, one after another, the last for ever;
    and what was counted."""
    counted: list[tuple[str, int]] = []
    given = [*answers]

    async def answer(_: web.Request) -> web.Response:
        code, body = given.pop(0) if len(given) > 1 else given[0]
        text = body if isinstance(body, str) else json.dumps(body)
        return web.Response(status=code, text=text)

    async def run() -> Any:
        app = web.Application()
        app.router.add_route("*", "/{path:.*}", answer)
        runner = web.AppRunner(app, shutdown_timeout=0.1)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        configuration = Configuration(host=url)
        if token:
            configuration.api_key["BearerToken"] = token
        cluster = Cluster(
            Access(configuration=configuration),
            max_requests=4,
            patience_s=patience_s,
            count=lambda verb, _, code, seconds: counted.append((verb, code)),
        )
        try:
            return await act(cluster)
        except ApiError as exc:
            return exc
        finally:
            await cluster.close()
            await runner.cleanup()

    return asyncio.run(run()), counted


async def get(cluster: Cluster) -> Any:
    return await cluster.get(CONFIG_MAP, "team", "a")


async def create(cluster: Cluster) -> Any:
    return await cluster.create(POD, {"metadata": {"name": "a", "namespace": "team"}})


async def patch(cluster: Cluster) -> Any:
    return await cluster.json_patch(POD, "team", "a", [])


@pytest.mark.parametrize("code", [401, 429, 500, 502, 503, 504])
def test_what_passes_by_itself_is_asked_again(code: int) -> None:
    found, counted = ask([(code, status(code, "Passing")), (code, "<html>"), OK], get)
    assert found == {"kind": "ConfigMap"}
    assert counted == [("get", code), ("get", code), ("get", 200)]


def test_patience_ends() -> None:
    error, counted = ask([(503, status(503, "ServiceUnavailable", "down"))], get, patience_s=0.5)
    assert type(error) is ApiUnavailable
    assert (error.code, error.message) == (503, "down")
    assert 2 <= len(counted) <= 5


def test_the_pause_that_the_server_asks_for_is_kept() -> None:
    busy = status(429, "TooManyRequests", retryAfterSeconds=1)

    async def timed(cluster: Cluster) -> float:
        began_s = asyncio.get_running_loop().time()
        await get(cluster)
        return asyncio.get_running_loop().time() - began_s

    seconds, _ = ask([(429, busy), OK], timed)
    assert seconds >= 1.0


def test_no_answer_is_counted_and_told() -> None:
    async def unreachable(_: Cluster) -> Any:
        access = Access(configuration=Configuration(host="http://127.0.0.1:1"))
        counted: list[int] = []
        cluster = Cluster(
            access, max_requests=1, patience_s=0.3, count=lambda *said: counted.append(said[2])
        )
        try:
            await get(cluster)
        except ApiUnavailable as exc:
            return exc.reason, exc.message, set(counted)
        finally:
            await cluster.close()

    (reason, message, codes), _ = ask([OK], unreachable)
    assert (reason, codes) == ("NoAnswer", {0})
    assert "no answer from http://127.0.0.1:1" in message


@pytest.mark.parametrize(
    ("answer", "kind", "reason"),
    [
        (status(409, "AlreadyExists"), AlreadyExists, "AlreadyExists"),
        (status(409, "Conflict"), Conflict, "Conflict"),
        (status(403, "Forbidden", 'pods "a": exceeded quota: q'), QuotaExceeded, "Forbidden"),
        (status(403, "Forbidden", "failed quota: q: must specify cpu"), Refused, "Forbidden"),
        (status(403, "Forbidden", causes=[{"reason": "NamespaceTerminating"}]), Refused,
         "NamespaceTerminating"),
        (status(404, "NotFound"), NotFound, "NotFound"),
        (status(422, "Invalid", causes=[{"reason": "FieldValueInvalid"}]), Refused, "Invalid"),
        (status(400, "BadRequest"), Refused, "BadRequest"),
    ],
    ids=["exists", "conflict", "quota", "quota needs requests", "namespace ends", "no namespace",
         "invalid", "bad request"],
)  # fmt: skip
def test_a_refusal_is_told_at_once_in_the_servers_words(
    answer: dict[str, Any], kind: type[ApiError], reason: str
) -> None:
    error, counted = ask([(answer["code"], answer)], create)
    assert type(error) is kind
    assert (error.reason, error.message, error.code) == (reason, answer["message"], answer["code"])
    assert len(counted) == 1


def test_a_patch_that_does_not_fit_is_a_conflict_and_an_invalid_one_is_not() -> None:
    """The API server has the same status for both."""
    said = status(422, "Invalid", "the server rejected our request due to an error in our request")
    error, _ = ask([(422, said)], patch)
    assert type(error) is Conflict
    assert "is not as it was read" in error.message
    said["details"] = {"causes": [{"reason": "FieldValueForbidden", "message": "no"}]}
    error, _ = ask([(422, said)], patch)
    assert type(error) is Refused


def test_requests_go_by_the_proxy_that_the_environment_names(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:9")  # where nobody listens
    monkeypatch.setenv("NO_PROXY", "elsewhere.example")
    answer, _ = ask([OK], get, patience_s=0)
    assert isinstance(answer, ApiUnavailable)
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    assert ask([OK], get)[0] == OK[1]


def test_what_netrc_says_of_the_servers_host_does_not_hinder(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    netrc = tmp_path / "netrc"
    netrc.write_text("machine 127.0.0.1 login somebody password secret")
    monkeypatch.setenv("NETRC", str(netrc))
    assert ask([OK], get, token="t")[0] == OK[1]


def test_a_proxys_refusal_is_told_as_one() -> None:
    error, _ = ask([(407, "<html>who are you?</html>")], get)
    assert type(error) is Refused
    assert "/api/v1/namespaces/team/configmaps/a: HTTP 407" in error.message


def test_what_is_not_there_is_none_and_deleting_it_is_done() -> None:
    gone = status(404, "NotFound")
    assert ask([(404, gone)], get)[0] is None
    another = status(409, "Conflict", "the UID in the precondition does not match")

    async def delete(cluster: Cluster) -> None:
        await cluster.delete(POD, "team", "a", uid="x", grace_s=0)

    assert ask([(404, gone)], delete)[0] is None
    assert ask([(409, another)], delete)[0] is None


def test_no_more_requests_than_allowed_are_under_way() -> None:
    async def run() -> int:
        under_way = most = 0

        async def answer(_: web.Request) -> web.Response:
            nonlocal under_way, most
            under_way += 1
            most = max(most, under_way)
            await asyncio.sleep(0.02)
            under_way -= 1
            return web.json_response({})

        app = web.Application()
        app.router.add_route("*", "/{path:.*}", answer)
        runner = web.AppRunner(app)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        cluster = Cluster(Access(configuration=Configuration(host=url)), max_requests=3)
        await asyncio.gather(*(get(cluster) for _ in range(12)))
        await cluster.close()
        await runner.cleanup()
        return most

    assert asyncio.run(run()) == 3


def test_without_any_way_in_the_error_says_what_to_set(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("KUBECONFIG", "/nowhere/kubeconfig")
    with pytest.raises(SetupError, match="set KUBECONFIG to a kubeconfig file"):
        asyncio.run(Access.find())
