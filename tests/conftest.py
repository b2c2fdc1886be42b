"""How hypothesis runs in every test: the same examples each time, and no time limit of its own.

What is right today must not fail tomorrow over a change that has nothing to do with it, nor on a machine that is busy.
`pytest --hypothesis-profile search` tries other examples at each run.
"""

from hypothesis import HealthCheck, settings

settings.register_profile("search", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("same", settings.get_profile("search"), derandomize=True)
settings.load_profile("same")
