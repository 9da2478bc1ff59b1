"""An agent's session on code: which drafters suit it, alone and together.

    python -m benchmarks.agent_session.recorded --help    # turns from commits, by git
    python -m benchmarks.agent_session                    # forced to the recorded texts
    python -m benchmarks.agent_session.tables             # the tables of docs/results
    python -m benchmarks.agent_session.live --help        # live, with a model that calls tools

The results are in docs/results/agent-session.md.
"""
