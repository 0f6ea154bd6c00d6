"""Many runs: the demo, published experiments, searches for settings and for clients.

All of them hand their trials to `runner.run_many`. Nothing is imported here, so that a worker on
Ray loads only what its trial needs.
"""
