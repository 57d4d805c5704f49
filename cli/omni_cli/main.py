"""`omni`: the command line. It starts commands and turns their errors into sentences."""

import importlib
import sys
from typing import Final, cast

import click

from omni_contract.errors import OmniError
from omni_contract.names import Exit

COMMANDS: Final = {
    "demo": "Train a small job on pictures, speech and books, kill a rank, show what happened.",
    "plan": "Check a job file and show what it means: layout, steps, schedule, mixture, sizes.",
    "run": "Run a job on this machine, without Kubernetes.",
    "data": "Build, index and upload training data.",
    "report": "Draw the report page of a finished run.",
}
"""Name of each command, which is also its module, and what it does in a line."""

_HELP = """Train one language model on text, pictures and speech together.

\b
A job is one YAML file; docs/job.md lists its fields. To see one from end to end:
  omni demo                                   data, training, a killed rank, a report
\b
To run your own:
  omni data build --help                      turn files into shards with an index
  omni plan job.yaml                          check it, see who runs where
  omni run job.yaml --local-s3 FOLDER         train on this machine, S3 included
  omni run job.yaml                           the same, from the S3 of your shell
  omni report RUN_DIR                         losses, mixture, incidents, timeline

Exit codes: 0 done, 1 a fault of the program, 2 a mistake in job, data or storage,
77 gave up after the restart limit, 130 interrupted.
"""


class LazyGroup(click.Group):
    """A group that imports a command's module only when that command is used."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """The commands in the order a newcomer meets them."""
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import the command, or nothing where there is none of this name."""
        if cmd_name not in COMMANDS:
            return None
        module = importlib.import_module(f"omni_cli.{cmd_name}")
        return cast(click.Command, getattr(module, cmd_name))

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """List the commands without importing one."""
        with formatter.section("Commands"):
            formatter.write_dl(list(COMMANDS.items()))


@click.group(
    cls=LazyGroup,
    help=_HELP,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)
def omni() -> None:
    """Hold the commands together; its help is `_HELP`."""


def main(arguments: list[str] | None = None) -> int:
    """Run one command line and return its exit code."""
    try:
        result = omni.main(args=arguments, prog_name="omni", standalone_mode=False)
        return int(result) if isinstance(result, int) else Exit.OK
    except OmniError as exc:
        print(f"omni: {exc}", file=sys.stderr)
        return Exit.USER
    except (KeyboardInterrupt, click.Abort):
        print("omni: interrupted", file=sys.stderr)
        return Exit.INTERRUPTED
    except click.ClickException as exc:
        exc.show()
        return Exit.USER
    except BrokenPipeError:
        # The reader has seen enough (`omni plan job.yaml | head`); nothing is left to flush to.
        sys.stdout = None
        return Exit.OK


if __name__ == "__main__":
    sys.exit(main())
