"""The supervisor of one node: `python -m omni_trainer.supervise`.

Parses, builds the parts, translates how it ended into an exit code. Exit.PEER_LOST means that this
attempt is over and that another may follow; the other codes are final.
"""

import argparse
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from pydantic import ValidationError

from omni_contract.errors import OmniError
from omni_contract.log_store import LOG_FOLDER, LogFile
from omni_contract.names import Exit
from omni_contract.plan import JobPlan
from omni_contract.records import History
from omni_trainer.supervisor.ending import AttemptEnd
from omni_trainer.supervisor.nursery import Nursery
from omni_trainer.supervisor.reaper import adopt_orphans, die_with_parent, end_descendants

if TYPE_CHECKING:
    from omni_trainer.supervisor.agent import NodeAgent
    from omni_trainer.supervisor.rendezvous import PlanRendezvous

_RANK_MODULE = "omni_trainer.main"
_PRELOAD = "omni_trainer.preload:on_cpu"


def main(argv: Sequence[str] | None = None) -> int:
    """Run the ranks of one node to the end of the job or of the attempt."""
    args = _parser().parse_args(argv)
    if args.die_with_parent:
        die_with_parent(os.getppid())
    adopt_orphans()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, _interrupt)
    try:
        return _supervise(args)
    except OmniError as exc:
        print(exc, file=sys.stderr)
        return Exit.USER
    except KeyboardInterrupt:
        return Exit.INTERRUPTED
    finally:
        end_descendants()


def device_env(plan: JobPlan, rendezvous_host: str) -> dict[str, str]:
    """Environment that the ranks' device and network ask for; what the user set stays."""
    env: dict[str, str] = {}
    if uses_cpu(plan):
        env["OMP_NUM_THREADS"] = "1"  # the sums of a step must not depend on a thread count
    if rendezvous_host == "localhost" or rendezvous_host.startswith("127."):
        env["GLOO_SOCKET_IFNAME"] = "lo"  # a host name without an address must not matter here
    return {name: os.environ.get(name, value) for name, value in env.items()}


def uses_cpu(plan: JobPlan) -> bool:
    """Whether the ranks run on the CPU. Looks for a driver only: the supervisor opens no GPU."""
    device = plan.spec.resources.device
    return device == "cpu" or (device == "auto" and not Path("/dev/nvidiactl").exists())


def _supervise(args: argparse.Namespace) -> int:
    plan = JobPlan.load(args.plan)
    logs = args.run_dir / LOG_FOLDER
    try:
        logs.mkdir(parents=True, exist_ok=True)
    except OSError as exc:
        raise OmniError(
            f"--run-dir {args.run_dir}: {exc.strerror}; take a folder you own"
        ) from None
    env = device_env(plan, args.rendezvous.rpartition(":")[0])
    preload = [_PRELOAD] if args.rank_module == _RANK_MODULE else [args.rank_module]
    nursery = Nursery(
        # On a GPU nothing is preloaded: an import that touches CUDA would spoil every fork.
        preload=preload if uses_cpu(plan) else [],
        log=logs / LogFile(kind="nursery", number=args.node, attempt=args.attempt).name,
        env=env,
    )
    # torch takes seconds to import, and the nursery is busy with the same meanwhile.
    from torch.distributed.elastic.multiprocessing.api import SignalException

    from omni_trainer.supervisor.agent import Node, NodeAgent
    from omni_trainer.supervisor.rendezvous import (
        Address,
        ContactLostError,
        PlanRendezvous,
        RunEndedError,
    )

    agent: NodeAgent | None = None
    meeting: PlanRendezvous | None = None
    code, message = Exit.ERROR, ""
    try:
        meeting = PlanRendezvous(
            address=Address.parse(args.rendezvous),
            node=args.node,
            num_nodes=plan.layout.num_nodes,
            attempt=args.attempt,
            decide=lambda generation, reports: agent.judge(generation, reports),  # type: ignore[union-attr]
            join_timeout_s=min(plan.spec.restart.start_after_seconds, 900),
            data_address=args.data_address,
        )
        node = Node(
            plan=plan,
            plan_path=args.plan,
            node=args.node,
            attempt=args.attempt,
            run_dir=args.run_dir,
            sidecar=args.sidecar,
            trace_steps=args.trace_steps,
            rank_module=args.rank_module,
            device_env=env,
            save_grace_s=args.save_grace,
            history=args.history,
            peers_file=args.peers_file,
        )
        agent = NodeAgent(node, rendezvous=meeting, nursery=nursery)
        agent.run()
        code = Exit.OK
    except RunEndedError as exc:
        code, message = Exit(exc.verdict.exit_code), str(exc)
        print(exc, file=sys.stderr)
    except ContactLostError as exc:
        code, message = Exit.PEER_LOST, f"this attempt is over: {exc}"
        print(message, file=sys.stderr)
    except (SignalException, KeyboardInterrupt):
        code, message = Exit.INTERRUPTED, f"the supervisor of node {args.node} was told to end"
        if meeting is not None:
            meeting.declare_over(message)
    except OmniError as exc:
        code, message = Exit.USER, str(exc)
        raise
    except BaseException:
        message = f"the supervisor of node {args.node} ended by an error of its own"
        if meeting is not None:
            meeting.declare_over(message)
        raise
    finally:
        if args.end_file is not None:
            _end(code, message, args.history, agent, meeting).save(args.end_file)
        nursery.close()
        if meeting is not None:
            meeting.shutdown()
    return code


def _end(
    code: Exit,
    message: str,
    initial: History | None,
    agent: "NodeAgent | None",
    meeting: "PlanRendezvous | None",
) -> AttemptEnd:
    verdict = None if meeting is None else meeting.verdict
    return AttemptEnd(
        exit_code=code,
        generation=0 if meeting is None else meeting.generation or 0,
        step=0 if agent is None else agent.highest_step,
        message=message,
        verdict=verdict,
        history=(initial or History()) if verdict is None else verdict.history,
    )


def _interrupt(number: int, _frame: object) -> None:
    """Until torch's agent sets its own handlers."""
    raise KeyboardInterrupt(signal.Signals(number).name)


def _history(text: str) -> History:
    try:
        return History.model_validate_json(text)
    except ValidationError:
        raise argparse.ArgumentTypeError(f"{text!r} is no history of restarts as JSON") from None


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="omni_trainer.supervise", description=__doc__)
    add = parser.add_argument
    add("--plan", type=Path, required=True, help="JobPlan file")
    add("--node", type=int, required=True, help="index of this node in the plan")
    add("--attempt", type=int, required=True, help="number of this placement of the job")
    add("--rendezvous", required=True, help="HOST:PORT that node 0's supervisor serves")
    add("--sidecar", required=True, help="path of the node's sidecar socket")
    add("--run-dir", type=Path, required=True, help="folder for logs, metrics and events")
    add("--trace-steps", default="", help="comma-separated steps whose timeline is written")
    add("--rank-module", default=_RANK_MODULE, help="main program of a rank")
    add("--save-grace", type=float, default=6, metavar="SECONDS",
        help="time for a last checkpoint after SIGTERM (default %(default)s)")  # fmt: skip
    add("--history", type=_history, metavar="JSON",
        help="restarts before this attempt, from an operator that can replace pods; left out: "
        "those in the run folder")  # fmt: skip
    add("--data-address", default="", metavar="HOST:PORT",
        help="where the node's data service is reached by those of the others")  # fmt: skip
    add("--peers-file", type=Path, help="written with all data addresses once all nodes have met")
    add("--end-file", type=Path, help="written with how it ended")
    add("--die-with-parent", action="store_true", help="end when the parent process ends")
    return parser


if __name__ == "__main__":
    sys.exit(main())
