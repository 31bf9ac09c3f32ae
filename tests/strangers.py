"""Exported folders read by one fresh process that knows nothing of this package."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

READER = Path(__file__).with_name("exported_reader.py")


def read_elsewhere(root: Path) -> None:
    """Run `exported_reader.py` on a folder of exports, isolated and offline."""
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    environment |= {"HF_HOME": str(root / "home"), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-I", str(READER), str(root)],
        cwd=root,
        env=environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr[-4000:]
