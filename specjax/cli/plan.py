"""``specjax plan``: what speculation should gain before anything runs, as tables and as a picture."""

from rich.console import Console

from specjax.cli.plan_compiled import plan_compiled
from specjax.cli.plan_measured import plan_contexts, plan_here
from specjax.cli.plan_options import PlanConfig, check_options
from specjax.cli.plan_reckoned import plan_cost, plan_models


def run_plan(config: PlanConfig) -> None:
    """From a cost, from the roofline of a chip, from times measured here, or from programs compiled for a chip."""
    console = Console(highlight=False, markup=False, emoji=False)
    if config.compile:
        plan_compiled(console, config)
        return
    check_options(config)
    if config.measure and config.contexts:
        plan_contexts(console, config)
    elif config.measure:
        plan_here(console, config)
    elif config.cost is not None:
        plan_cost(console, config, config.cost)
    else:
        plan_models(console, config)
    if config.plot:
        console.out(f"picture: {config.plot}")
