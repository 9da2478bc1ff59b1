"""``python -m specjax``, and the command ``specjax``."""

import sys

from specjax.cli.interrupts import end_at_signals


def main() -> int:
    """Run the command line. ``env`` must work where JAX or anything else cannot be imported, and so is on its own."""
    if sys.argv[1:2] != ["train"]:  # which ends between two steps
        end_at_signals()
    if sys.argv[1:2] == ["env"]:
        from specjax.cli.env import main as print_environment

        return print_environment(sys.argv[2:])
    from specjax.cli.main import main as run_command

    return run_command()


if __name__ == "__main__":
    sys.exit(main())
