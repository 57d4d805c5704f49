"""Sidecars as real processes: killed, restarted, ended, started wrongly."""

import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from omni_contract.names import Exit
from omni_dataloader.main import main
from tests.dataloader.serving import (
    NUM_STEPS,
    RANKS,
    Undisturbed,
    assert_same,
    join_all,
    plan_of,
    take,
    walk,
)
from tests.fakes.forwarder import forwarding
from tests.fakes.sidecar_client import Sidecar, SidecarClient, Step, free_ports, sidecars


@pytest.mark.usefixtures("s3_env")
def test_killed_sidecars_are_started_again_and_nobody_notices(
    uri: str, tmp_path: Path, undisturbed: Undisturbed
) -> None:
    """C21 too: what a killed one leaves does not keep the next from starting."""
    plan = plan_of(uri)
    shared_memory = set(os.listdir("/dev/shm"))
    with sidecars(plan, tmp_path) as cars:
        clients = join_all([car.path for car in cars], plan)
        assert_same([take(clients, 1)], undisturbed.steps[:1])
        # After steps 2, 3 and 4: node 1, node 0, both. Rank 1 is a step ahead of rank 0 each time.
        for step, killed in ((2, [1]), (3, [0]), (4, [0, 1])):
            clients[1].ask(step)
            ahead = clients[1].take()
            assert isinstance(ahead, Step)
            clients[1].release(step)
            for node in killed:
                cars[node].kill()
            for node in killed:
                assert cars[node].path.exists()  # a stale socket
                cars[node].restart()
            for rank in RANKS:
                node = plan.layout.node_of(rank)
                if node in killed:
                    with pytest.raises((EOFError, ConnectionError)):
                        clients[rank].snapshot(1)
                    clients[rank] = SidecarClient.join(
                        cars[node].path, plan, rank=rank, next_step=step + (rank == 1)
                    )
            rest = take([clients[rank] for rank in RANKS if rank != 1], step)
            assert_same([[rest[0], ahead, *rest[1:]]], undisturbed.steps[step - 1 : step])
        assert_same(walk(clients, 5, NUM_STEPS), undisturbed.steps[4:])
        assert clients[2].snapshot(NUM_STEPS) == undisturbed.states[-1]
        assert "state of an earlier life" in cars[1].log.read_text()
    assert set(os.listdir("/dev/shm")) <= shared_memory


@pytest.mark.usefixtures("s3_env")
def test_c21_a_live_sidecar_keeps_its_socket_until_sigterm_ends_it_at_once(
    uri: str, tmp_path: Path
) -> None:
    plan = plan_of(uri)
    with sidecars(plan, tmp_path) as cars:
        clients = join_all([car.path for car in cars], plan)
        second = Sidecar(plan, 0, tmp_path, free_ports(2))
        assert second.process.wait(30) == Exit.USER
        log = second.log.read_text()
        assert "another data service answers there" in log and "Traceback" not in log
        take(clients, 1)  # the first lives on undisturbed
        clients[0].ask(2)
        for car in cars:
            begin_s = time.monotonic()
            assert car.stop() == Exit.INTERRUPTED
            assert time.monotonic() - begin_s < 2
            assert not car.path.exists()
            assert "Traceback" not in car.log.read_text()


def arguments(folder: Path, *, listen: str, peers: str) -> list[str]:
    return [
        "--plan", str(folder / "plan.json"), "--node", "0", "--socket", str(folder / "s"),
        "--listen", listen, "--peers", peers, "--run-dir", str(folder),
    ]  # fmt: skip


@pytest.mark.usefixtures("s3_env")
def test_a_mistake_of_the_user_is_one_sentence_and_an_exit_code(tmp_path: Path) -> None:
    plan = plan_of("s3://not-there/x")
    plan.save(tmp_path / "plan.json")
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        busy = f"127.0.0.1:{taken.getsockname()[1]}"
        free = "127.0.0.1:{}".format(*free_ports(1))
        runs = {
            "s3://not-there: there is no such bucket": (free, f"{free},{free}"),
            "--peers: 1 addresses for the 2 nodes": (free, free),
            f"--listen {busy}: Address already in use": (busy, f"{busy},{free}"),
        }
        for expected, (listen, peers) in runs.items():
            command = [sys.executable, "-m", "omni_dataloader.main"]
            done = subprocess.run(
                [*command, *arguments(tmp_path, listen=listen, peers=peers)],
                capture_output=True, text=True, timeout=60, check=False,
            )  # fmt: skip
            assert done.returncode == Exit.USER
            errors = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
            assert len(errors) == 1 and expected in errors[0]
            assert "Traceback" not in done.stderr
            assert not (tmp_path / "s").exists()


def test_an_outage_of_the_store_at_the_start_is_waited_out(
    uri: str, tmp_path: Path, s3_env: dict[str, str]
) -> None:
    plan_of(uri).save(tmp_path / "plan.json")
    port, listen = free_ports(2)
    names = ("AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3")
    away = {**os.environ, **s3_env, **dict.fromkeys(names, f"http://127.0.0.1:{port}")}
    address = f"127.0.0.1:{listen}"
    command = [sys.executable, "-m", "omni_dataloader.main",
               *arguments(tmp_path, listen=address, peers=f"{address},{address}")]  # fmt: skip
    log = tmp_path / "log"

    def wait_to_say(words: str) -> None:
        deadline = time.monotonic() + 40
        while words not in log.read_text():
            assert process.poll() is None and time.monotonic() < deadline, log.read_text()
            time.sleep(0.05)

    with log.open("wb") as output:
        process = subprocess.Popen(command, env=away, stderr=output)
    try:
        wait_to_say("the object store does not answer, trying again")
        with forwarding(port, int(s3_env["AWS_ENDPOINT_URL"].rpartition(":")[2])):
            wait_to_say("serving socket=")
    finally:
        process.kill()
        process.wait()


def test_sigterm_ends_it_while_storage_does_not_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = plan_of("s3://serve/good")
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        silent.settimeout(30)
        for name in ("AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3"):
            monkeypatch.setenv(name, f"http://127.0.0.1:{silent.getsockname()[1]}")
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", "key")
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
        with sidecars(plan, tmp_path) as cars, silent.accept()[0], silent.accept()[0]:
            for car in cars:  # both wait for an answer now
                begin_s = time.monotonic()
                assert car.stop() == Exit.INTERRUPTED
                assert time.monotonic() - begin_s < 2


def test_help_teaches(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["--help"])
    assert ended.value.code == 0
    text = capsys.readouterr().out
    assert "python -m omni_dataloader.main --plan plan.json" in text and "AWS chain" in text


def test_a_node_that_is_not_in_the_plan_is_refused(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    with pytest.raises(SystemExit) as ended:
        main([*arguments(tmp_path, listen="a:1", peers="a:1"), "--node", "3"])
    assert ended.value.code == Exit.USER
    assert "--node 3 is not one of the 1 nodes" in capsys.readouterr().err
