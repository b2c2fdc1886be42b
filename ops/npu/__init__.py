"""Ascend NPUs: checks that need no NPU (`check.py`) and one that does (`smoke.py`)."""
