"""Real processes under load, and what is done to them.

    python -m tests.chaos        kills, stops, SIGTERMs and cuts from a seed; what clients see must stay true
    python -m tests.chaos.soak   a great many short requests; memory and descriptors must stay flat
    python -m tests.chaos.storm  nine of ten clients leave under overload; the throughput must be back in 5 s

`make chaos` and `make soak` run them; pytest collects only the tests of what they call wrong.
"""
