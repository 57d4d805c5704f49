"""One rank: `python -m omni_trainer.main`.

Reads who it is, joins the world, resumes, trains to the end of the plan, and says by its exit code
how it ended. A lost peer, a stale claim and a user's mistake end it without a traceback.
"""

import faulthandler
import json
import os
import signal
import sys
import time
import traceback
import warnings
from collections.abc import Mapping
from datetime import timedelta
from functools import partial
from pathlib import Path
from types import FrameType

import torch
import torch.distributed as dist

from omni_contract.errors import OmniError, SpecError, StaleError, UnavailableError
from omni_contract.names import Exit
from omni_contract.plan import JobPlan
from omni_trainer import checkpoint, claims
from omni_trainer.claims import Claim, Start
from omni_trainer.data import DataClient, Interrupted
from omni_trainer.device import Device
from omni_trainer.environment import RankEnvironment
from omni_trainer.loop import Ending, TrainLoop
from omni_trainer.metrics import RunFolder
from omni_trainer.peers import is_peer_lost
from omni_trainer.progress import ProgressFile
from omni_trainer.saver import SaveOutcome, Saver
from omni_trainer.storage import Folder
from omni_trainer.supervisor.reaper import die_with_parent
from omni_trainer.train import Engine

_STORAGE_ATTEMPTS = 8
"""About a minute with the pauses between: a restart must outlive a short outage of the store. The
launcher has found wrong addresses before that."""


def main() -> int:
    """Run one rank to the end; its exit code."""
    die_with_parent(os.getppid())
    # megatron-core calls collectives by names that torch 2.13 is about to drop, once a step.
    warnings.filterwarnings(
        "ignore", r"`torch\.distributed\.(reduce_scatter|all_gather_into)_tensor`", FutureWarning
    )
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    try:
        return _run(RankEnvironment.read(os.environ))
    except StaleError as exc:
        return _leave(exc, Exit.STALE)
    except UnavailableError as exc:
        return _leave(exc, Exit.UNAVAILABLE)
    except OmniError as exc:
        return _leave(exc, Exit.USER)
    except Interrupted as exc:
        print(exc, file=sys.stderr)
        return Exit.INTERRUPTED
    except Exception as exc:
        if is_peer_lost(exc):
            return _leave(exc, Exit.PEER_LOST)
        _write_error_file(f"{type(exc).__name__}: {exc}")
        raise


def _leave(exc: Exception, code: Exit) -> int:
    text = str(exc)
    if code is Exit.PEER_LOST:
        text = f"another rank is gone: {text.splitlines()[0]}" if text else "another rank is gone"
    print(text, file=sys.stderr)
    _write_error_file(text)
    return code


def _write_error_file(message: str) -> None:
    """Tell torch's elastic agent, as its `record` decorator would."""
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if path:
        extra = {"py_callstack": traceback.format_exc(), "timestamp": str(int(time.time()))}
        Path(path).write_text(json.dumps({"message": {"message": message, "extraInfo": extra}}))


def _run(env: RankEnvironment) -> int:
    plan = JobPlan.load(env.plan)
    if env.world_size != plan.layout.world_size:
        raise SpecError(
            "WORLD_SIZE",
            f"{env.world_size} ranks were started, the plan {env.plan} is for "
            f"{plan.layout.world_size}",
        )
    env.run_dir.mkdir(parents=True, exist_ok=True)
    ending = Ending()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, _noting(ending))
    progress = ProgressFile(env.run_dir, env.rank, env.pair)
    records = RunFolder(env.run_dir, rank=env.rank, pair=env.pair)
    progress.start()
    try:
        device = Device.open(plan.spec.resources.device, local_rank=env.local_rank)
        if not device.is_cuda:
            torch.set_num_threads(1)  # sums must not depend on how many cores there are
        restart = plan.spec.restart
        # The supervisor ends a hung generation sooner, and by name.
        limit_s = 2 * max(restart.hang_after_seconds, restart.start_after_seconds)
        dist.init_process_group(device.backend, timeout=timedelta(seconds=limit_s))
        engine = Engine.build(plan, env.rank, device)
        interrupted = _train(env, plan, engine, progress, records, ending)
        engine.close()
        dist.destroy_process_group()
    finally:
        records.close()
        progress.stop()
    return Exit.INTERRUPTED if interrupted else Exit.OK


def _noting(ending: Ending) -> "signal._HANDLER":
    def note(number: int, frame: FrameType | None) -> None:
        if not ending.is_deferred:
            raise Interrupted("told to end before training began")
        ending.is_asked = True

    return note


def _train(
    env: RankEnvironment,
    plan: JobPlan,
    engine: Engine,
    progress: ProgressFile,
    records: RunFolder,
    ending: Ending,
) -> bool:
    """Resume and train. True: it was told to end before the plan's end."""
    progress.update("restoring", 0)
    folder = Folder(plan.spec.checkpoint.uri, plan.spec.storage, attempts=_STORAGE_ATTEMPTS)
    held, start = _claim(folder, plan, env)
    step, state = 0, None
    if start.resume is not None:
        source, manifest = folder.beside(start.resume.uri), start.resume.manifest
        step = manifest.ref.step
        state = checkpoint.load_data_state(source, manifest)
        engine.load(partial(checkpoint.load_object, source, manifest), manifest.layout)
        if env.rank == 0:
            message = f"resumed after step {step} from {source.uri}/{manifest.ref.folder}"
            if manifest.layout.world_size != env.world_size:
                message = f"{message}, saved by {manifest.layout.world_size} ranks"
            records.write_event("resumed", message, step=step)

    def report(outcome: SaveOutcome) -> None:
        kind = "checkpoint" if outcome.error is None else "checkpoint_failed"
        message = outcome.error or f"saved after step {outcome.step}"
        if outcome.note is not None:
            message = f"{message}; {outcome.note}"
        print(message, file=sys.stderr)
        records.write_event(kind, message, step=outcome.step, seconds=round(outcome.seconds, 3))

    saver = Saver(
        folder=folder,
        plan=plan,
        rank=env.rank,
        claim=start.claim,
        held=held,
        agree=agree,
        report=report,
    )
    data = DataClient(
        env.sidecar,
        plan_hash=plan.hash,
        pair=env.pair,
        rank=env.rank,
        next_step=step + 1,
        state=state,
        is_ending=lambda: ending.is_asked,
    )
    loop = TrainLoop(
        env=env,
        plan=plan,
        engine=engine,
        data=data,
        saver=saver,
        records=records,
        progress=progress,
        ending=ending,
        agree=agree,
    )
    try:
        return loop.run(step)
    except BaseException:
        saver.abandon()
        raise
    finally:
        data.close()


def agree(number: int) -> int:
    """The greatest of all ranks' numbers.

    Collective over the world: every rank calls it in the same order. Blocks; 8 bytes a rank.
    """
    box = torch.tensor([number], dtype=torch.int64)
    dist.all_reduce(box, op=dist.ReduceOp.MAX)
    return int(box)


def _claim(folder: Folder, plan: JobPlan, env: RankEnvironment) -> tuple[Claim | None, Start]:
    """Rank 0 takes the run and finds what to resume from; the others are told.

    Collective over the world. Where rank 0 raises, the others lose a peer.
    """
    held: Claim | None = None
    answer: list[Mapping[str, object]] = [{}]
    if env.rank == 0:
        held = claims.claim(folder, plan, env.pair, job_uid=env.job_uid)
        answer = [held.start.model_dump(mode="json")]
    dist.broadcast_object_list(answer, src=0, device=torch.device("cpu"))
    return held, Start.model_validate(answer[0])


if __name__ == "__main__":
    sys.exit(main())
