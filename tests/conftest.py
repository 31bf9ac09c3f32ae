"""Set before torch is imported: threads that spin while they wait slow small products down."""

import os

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
if "PYTEST_XDIST_WORKER" in os.environ:  # workers share the cores
    os.environ.setdefault("OMP_NUM_THREADS", "1")
