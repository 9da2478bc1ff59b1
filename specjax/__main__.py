"""The command ``specjax``, also started as ``python -m specjax``."""

import sys

from specjax.cli.interrupts import end_at_signals


def main() -> int:
    """Run the command line and return its exit status.

    ``env`` has an entry of its own, because it must work where JAX or another package cannot be
    imported.
    """
    end_at_signals()
    if sys.argv[1:2] == ["env"]:
        from specjax.cli.env import main as print_environment

        return print_environment(sys.argv[2:])
    from specjax.cli.main import main as run_command

    return run_command()


if __name__ == "__main__":
    sys.exit(main())
